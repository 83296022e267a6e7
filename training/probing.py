"""The deep metrics during a run: what `scripts/probe.py` measures, on the same windows all along, and what a step moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from model.inventory import inventory
from stability.change import features, future_leak, matrices, model_update, update_ratio
from stability.trace import Trace, trace
from training.pace import due, ends_step
from training.task import Task

LAYERS = ("attention_rms", "ffn_rms", "attention_ratio", "ffn_ratio", "logit_max", "attention_entropy")
GAINS = ("gain_min", "gain_mean", "gain_max")


@dataclass(frozen=True)
class Before:
    """The blocks' matrices and what the output matrix reads, as they are before a step: held for that step alone, and on
    the host, so that they are no part of what the step takes on a device. On a CPU they are."""

    matrices: list[Tensor]
    features: list[Tensor]


class Probing(Callback):
    """Before the first step, after every `every` and after the last, the fixed `windows` (micro-batches of int64
    (rows, context + 1): those of step 1) as `stability/trace.py` sees them, `future_leak` and, after a step, what it moved.

    Runs eagerly and in the run's precision, and leaves weights, gradients, buffers and generators as it finds them: the
    other lines of the record are those of a run without it, and neither its time nor its memory counts as the run's
    (`Recorder.aside`). A run that has diverged is not measured.
    """

    def __init__(self, windows: Sequence[Tensor], *, every: int, autocast: bool) -> None:
        self.windows, self.every, self.autocast = windows, every, autocast
        self._before: Before | None = None

    def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        assert isinstance(task, Task)
        if not trainer.global_step and not task.recorder.probed:
            self._measure(trainer, task)

    def on_before_optimizer_step(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
        assert isinstance(task, Task)
        step = trainer.global_step + 1
        if due(step, self.every) or step >= task.steps:
            with task.recorder.aside(task.device):
                held = [entry.parameter.detach().to("cpu", copy=True) for entry in matrices(inventory(task.model))]
                self._before = Before(held, [x.cpu() for x in self._features(task)])

    def on_train_batch_end(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
        assert isinstance(task, Task)
        if self._before and ends_step(trainer, task):
            if not task.recorder.reason:
                self._measure(trainer, task)
            self._before = None

    def _features(self, task: Task) -> list[Tensor]:
        return features(task.model, [batch.to(task.device) for batch in self.windows], autocast=self.autocast)

    def _measure(self, trainer: pl.Trainer, task: Task) -> None:
        model, entries = task.model, inventory(task.model)
        with task.recorder.aside(task.device):
            windows = [batch.to(task.device) for batch in self.windows]
            seen = values(trace(model, windows, autocast=self.autocast))
            if not any(entry.kind == "norm" and entry.layer for entry in entries):
                seen = {name: value for name, value in seen.items() if name not in GAINS}  # no gain to be measured
            if model.context == 1:
                del seen["token_cosine"]  # no other token to be like
            seen["future_leak"] = future_leak(model, windows[0], autocast=self.autocast).item()
            if self._before:
                seen["update_ratio"] = update_ratio(matrices(entries), self._before.matrices, model.depth)
                seen["model_update"] = model_update(self._before.features, self._features(task)).item()
        task.recorder.probe(trainer.global_step, seen)


def values(found: Trace) -> dict[str, Any]:
    """A trace's entries in `probe` of a record: all but the gradient norms and the skips, which a run's own lines and the
    ratios tell."""
    names = ("loss", "stream_rms", "stream_grad_norm", "token_cosine", *LAYERS, *GAINS)
    return {name: getattr(found, name) for name in names}
