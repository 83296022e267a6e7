"""Memory and time of what trades one for the other: activation checkpointing, and the cross-entropy in chunks."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.process import fresh
from benchmarks.ratios import Measurement, Row, Target, alternate
from benchmarks.step import Shape, network, training_step
from model.execution import Execution
from model.loss import next_token_loss
from training import device as machine

Loss = Callable[[nn.Module, Tensor], Tensor]


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    """The peak of memory is that of a process that takes one step: one each. The times of steps are compared in one process,
    on fewer tokens, so that it holds the activations of all layers and a step is short."""
    deep = Shape(depth=4, dim=64, batch=2) if quick else Shape(depth=1000, dim=64, batch=32)
    shorter = Shape(depth=deep.depth, dim=64, batch=1 if quick else 4)
    wordy = Shape(depth=2, dim=16 if quick else 128, batch=2 if quick else 16, context=256, vocab=50257)
    groups, none = "checkpointing=groups", "checkpointing=none"
    chunked, plain = f"cross-entropy in chunks, vocabulary {wordy.vocab:,}", "F.cross_entropy"
    return [
        Measurement(
            Row("memory", f"peak memory, {groups}, {deep}", none, 1, Target("<=", 0.25)),
            lambda: [fresh(peak, deep, recompute=True) / fresh(peak, deep)],
        ),
        Measurement(
            Row("memory", f"step, {groups}, {shorter}", none, shorter.threads, Target("<=", 1.45)),
            lambda: fresh(recomputing, shorter, rounds=rounds),
        ),
        Measurement(
            Row("memory", f"peak memory, {chunked}, {wordy}", plain, 1),
            lambda: [fresh(peak, wordy) / fresh(peak, wordy, loss=whole_cross_entropy)],
        ),
        Measurement(
            Row("memory", f"step, {chunked}, {wordy}", plain, wordy.threads),
            lambda: fresh(chunking, wordy, rounds=rounds),
        ),
    ]


def peak(shape: Shape, *, recompute: bool = False, loss: Loss = next_token_loss) -> int:
    """Bytes that a process took which took a step, with one thread, since memory does not hang on their number."""
    torch.set_num_threads(1)
    model = network(shape)
    model.execution = _execution(shape, recompute)
    training_step(model, shape, loss)()
    return machine.peak_memory("cpu")


def recomputing(shape: Shape, *, rounds: int) -> list[float]:
    """Time of a step with checkpointing over that of one without, of one network."""
    torch.set_num_threads(shape.threads)
    model = network(shape)
    step = training_step(model, shape)

    def run_as(execution: Execution) -> None:
        model.execution = execution
        step()

    works = (partial(run_as, _execution(shape, recompute)) for recompute in (True, False))
    return alternate(*works, rounds=rounds)


def _execution(shape: Shape, recompute: bool) -> Execution:
    return Execution.of(shape.depth, recompute=recompute, compiled=False)


def chunking(shape: Shape, *, rounds: int) -> list[float]:
    """Time of a step with the loss in chunks over that of one with the loss of all logits at once."""
    torch.set_num_threads(shape.threads)
    model = network(shape)
    works = (training_step(model, shape, loss) for loss in (next_token_loss, whole_cross_entropy))
    return alternate(*works, rounds=rounds)


def whole_cross_entropy(model: nn.Module, windows: Tensor) -> Tensor:
    """All logits at once, as torch has it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
