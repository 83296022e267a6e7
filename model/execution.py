"""How a network is run: its blocks in groups, the head's loss in chunks. Nothing here changes a formula."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.loss import of_logits

LOGITS = 2**24  # at a time, where a loss is taken: 64 MiB in float32


def through(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """x <- block_n(... block_1(x))."""
    for block in blocks:
        x = block(x)
    return x


@dataclass(frozen=True)
class Execution:
    """The blocks in equal groups, the last being perhaps shorter.

    recompute: blocks in a group of which only the input is kept, the rest computed again in the backward pass; 0: all is
    kept. About sqrt(depth) keeps sqrt(depth) inputs and sqrt(depth) blocks, and costs a forward pass (Chen et al. 2016,
    arXiv 1604.06174, section 3). The numbers are the same bit by bit, since the same kernels run on the same input, dropout's
    draws included.
    compiled: blocks in a group that is compiled as one graph, 0: none. Groups of equal blocks share it, whatever the depth.
    """

    recompute: int = 0
    compiled: int = 0

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
        """(batch, time, dim) through all blocks, to the same."""
        blocks = list(blocks)
        if not self.recompute or not torch.is_grad_enabled():
            return self._run(blocks, x)
        for group in groups(blocks, self.recompute):
            x = checkpoint(self._run, group, x, use_reentrant=False)
        return x

    def _run(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if not self.compiled:
            return through(blocks, x)
        for group in groups(blocks, self.compiled):
            x = _compiled()(group, x)
        return x

    @classmethod
    def of(cls, depth: int, *, recompute: bool, compiled: bool) -> "Execution":
        """Groups of about sqrt(depth) blocks to recompute; of 4 to 7 to compile, such that they divide what they part where
        that can be, and else leave no small rest: the compiler takes about 3 s a block, a call 0.1 ms."""
        kept = max(1, round(depth**0.5)) if recompute else 0
        whole = kept or depth
        sizes = [whole] if whole < 4 else sorted(range(4, 8), key=lambda size: (-whole % size, abs(size - 5)))
        return cls(kept, sizes[0] if compiled else 0)


@contextmanager
def eagerly(model: Any) -> Iterator[None]:
    """Without the compiled graphs, whose inside no hook sees, and which validation would have to compile for itself."""
    before = model.execution
    model.execution = replace(before, compiled=0)
    try:
        yield
    finally:
        model.execution = before


def groups(blocks: Sequence[nn.Module], size: int) -> list[Sequence[nn.Module]]:
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


@cache  # made when it is wanted: the compiler takes a second to load
def _compiled() -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
    """`through`, compiled: blocks that differ in nothing but their parameters are one graph, since none reads its number.
    Coefficients that differ from block to block become an input of a second one. Dropout draws as it does eagerly, so that
    the two are one run but for rounding."""
    return torch.compile(through, fullgraph=True, options={"fallback_random": True})


def cross_entropy(
    head: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, vocab: int, z_loss: float = 0.0
) -> Tensor:
    """Mean of -log softmax(head(x))[target] in nats: x (batch, time, dim), targets int64 (batch, time).

    From 2^24 logits on they are made a part of the tokens at a time, and again in the backward pass, so that all of them, their
    softmax and their gradient are never there at once. The gradient has that of `z_loss` too (`model/loss.py`).
    """
    rows, wanted = x.flatten(0, 1), targets.flatten()
    size = max(1, LOGITS // vocab)
    if len(rows) <= size:
        return of_logits(head(rows), wanted, z_loss)

    def part(rows: Tensor, wanted: Tensor) -> Tensor:
        return of_logits(head(rows), wanted, z_loss, reduction="sum")

    parts = zip(torch.split(rows, size), torch.split(wanted, size), strict=True)
    # nothing is drawn in a head; to read the generator's state would keep it from being recorded as a CUDA graph
    chunks = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in parts]
    return torch.stack(chunks).sum() / len(wanted)
