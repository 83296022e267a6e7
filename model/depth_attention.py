"""Attention over depth: the state is all that has been written so far, v_0 (the embedding) .. v_n, and nothing adds it up.

    h = sum_i a_i v_i,   a = softmax_i(w . RMSNorm(v_i))       what a branch, and at the end the head, sees
    v <- (v, r beta F(s N_in(h)))                              or v_n <- v_n + r beta F(s N_in(h)) within a group of layers

Each w is learnt, one for each branch and one for the head, and 0 at the start: h is then the mean of all v_i.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.coefficient import times
from model.norm import EPS
from model.residual import Residual
from model.site import Site
from model.stream import Parts, Single, State, Stream, own_skip


class Mix(nn.Module):
    """(v_0 .. v_n), each (batch, time, dim), to h. The tensors side by side are made again in the backward pass, so that what is
    kept are the v_i themselves. RMSNorm has no gain: it is one with w."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, values: State) -> Tensor:
        if not torch.is_grad_enabled():
            return self._mixed(*values)
        h: Tensor = checkpoint(self._mixed, *values, use_reentrant=False, preserve_rng_state=False)
        return h

    def _mixed(self, *values: Tensor) -> Tensor:
        v = torch.stack(values)
        logits = (v * self.w).sum(-1) * torch.rsqrt(v.square().mean(-1) + EPS)
        return (torch.softmax(logits, 0).unsqueeze(-1) * v).sum(0)


class Append(nn.Module):
    """(v, y) to (v_0 .. v_n, y), in the precision of the embedding."""

    def forward(self, values: State, y: Tensor) -> State:
        return *values, y.to(values[0].dtype)


class Accumulate(nn.Module):
    """(v, y) to (v_0 .. v_n + y)."""

    def forward(self, values: State, y: Tensor) -> State:
        return *values[:-1], values[-1] + y


class Recalling(Stream):
    """One branch: its `mix` and how its answer is kept."""

    def __init__(self, mix: nn.Module, keep: nn.Module, parts: Parts) -> None:
        super().__init__(parts)
        self.mix, self.keep = mix, keep

    def base(self, values: State) -> State:
        return values, self.norm_both(self.mix(values))

    def read(self, state: State) -> Tensor:
        return times(self.s, self.norm_in(state[1]))

    def write(self, state: State, y: Tensor) -> State:
        return self.keep(state[0], self.norm_sum(self.branch(y)))


class AttentionResiduals(Single):
    """h_l = sum_{i<l} softmax_i(w_l . RMSNorm(v_i)) v_i over the embedding and the answers v_i of all earlier branches, for each
    branch l and for the head.

    With 0 `blocks` v_i is the answer of one branch: all of them are kept, and 2N branches do work of order N^2, which at 1,000
    layers is minutes a step on a CPU. With B blocks (the paper: about 8) the N layers are parted into B groups, as even as may
    be, and v_i is the sum of the answers in one; the group at work counts with what it has so far.
    The released code gives each RMSNorm a gain. For placements without a norm after the sum, since there is no sum, and
    residual methods without an alpha, since there is no skip. The state grows with the depth, so that compile=true is refused.
    Source: Kimi Team 2026, arXiv 2603.15031, section 3; the released pseudocode for the blocks.
    """

    letters = ("v",)
    grows = learns = True

    def __init__(self, *, blocks: int = 0) -> None:
        if blocks < 0:
            raise ValueError(f"stream.blocks must be >= 0, found {blocks}; 0 keeps each branch's answer apart")
        self.blocks = blocks

    def mix(self, dim: int) -> nn.Module:
        return Mix(dim)

    def keep(self, site: Site) -> nn.Module:
        return Append() if self.starts(site) else Accumulate()

    def starts(self, site: Site) -> bool:
        """Whether what this branch answers is the first of a new v: with B blocks the attention of the layers where
        floor(B (l - 1) / N) moves on, and of the first."""
        if not self.blocks:
            return True
        here, before = (self.blocks * layer // site.depth for layer in (site.layer - 1, site.layer - 2))
        return site.branch == "attention" and here > before

    def at(self, site: Site, parts: Parts) -> Stream:
        if reason := own_skip(parts.residual):
            raise ValueError(f"stream=attention_residuals with this residual: {reason}")
        return Recalling(self.mix(parts.dim), self.keep(site), parts)

    def enter(self, x: Tensor) -> State:
        return (x,)

    def outlet(self, depth: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return self.mix(dim)

    def tensors(self, state: State) -> tuple[Tensor, ...]:
        """The newest v, or h where that is asked about."""
        return (state[-1],) if isinstance(state, tuple) else (state,)

    def symbolic(self, letter: Callable[[str], Any]) -> Single:
        return Written(self.blocks, letter)

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        if places & {"both", "sum"}:
            return "it has no sum for a norm to follow; use placement=pre"
        if self.blocks > site.depth:
            return f"stream.blocks={self.blocks} groups need as many layers, and model.depth is {site.depth}; use 0 or fewer"
        return own_skip(residual)


class Written(AttentionResiduals):
    """With h for the average over all v, which the start says once."""

    def __init__(self, blocks: int, letter: Callable[[str], Any]) -> None:
        super().__init__(blocks=blocks)
        self.letter = letter

    def mix(self, dim: int) -> nn.Module:
        return Text(self.letter, "h")

    def keep(self, site: Site) -> nn.Module:
        return Text(self.letter, "(v, {1})" if self.starts(site) else "(.., v_n + {1})")

    def enter(self, x: Any) -> State:
        return self.letter(f"({x}), h = sum_i softmax_i(w . RMSNorm(v_i)) v_i")


class Text(nn.Module):
    """Writes `form`, filled with what it is called with."""

    def __init__(self, letter: Callable[[str], Any], form: str) -> None:
        super().__init__()
        self.letter, self.form = letter, form

    def forward(self, *given: Any) -> Any:
        return self.letter(self.form.format(*given))
