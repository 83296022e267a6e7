"""From numbers on the device to lines of `metrics.jsonl`, with no synchronisation between two log steps."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability.gradients import GradientNorms
from stability.records import metrics_line
from stability.verdict import Watch
from training.wandb import Log

Locate = Callable[[int, np.ndarray], int | None]


class Recorder:
    """Holds each step's loss and norms on the device and writes them at the next log step (1, every `log_every`, the
    last): one line a step, flushed as written, with the layers' arrays on log steps.

    After a flush `reason` says whether the run diverged, `first_bad_step` and `first_bad_layer` where it began
    (`locate(step, norms)` answers the layer of a step that was not finite).
    """

    def __init__(
        self,
        path: Path,
        gradients: GradientNorms,
        log: Log,
        *,
        steps: int,
        log_every: int,
        tokens_per_step: int,
        clip: float,
        locate: Locate,
    ) -> None:
        self.gradients, self.log, self.clip, self.locate = gradients, log, clip, locate
        self.steps, self.log_every, self.tokens_per_step = steps, log_every, tokens_per_step
        self.watch = Watch(steps)
        self.reason: str | None = None
        self.first_bad_step: int | None = None
        self.first_bad_layer: int | None = None
        self.loss: list[float] = []
        self.skipped: list[bool] = []
        self.val_loss: list[tuple[int, float]] = []
        self.ends: dict[int, np.ndarray] = {}  # block norms at the first and the latest log step
        self.latest: dict[str, Any] = {}
        self._pending: list[tuple[int, float, Tensor]] = []
        self._path, self._file = path, path.open("a", encoding="utf-8")
        self._clock: float | None = None
        self._trained = 0.0  # seconds, the first step and validations apart
        self._timed_steps = 0

    def restore(self, done: int) -> None:
        """Continue after step `done`: the lines beyond it are dropped, the others are the history."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        kept = [record for record in records if record["step"] <= done]
        self._file.close()
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(unfinished, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        for record in kept:
            if "val_loss" in record:
                self.val_loss.append((record["step"], _number(record["val_loss"])))
                continue
            loss, skipped = _number(record["loss"]), record.get("skipped", False)
            self.loss.append(loss)
            self.skipped.append(skipped)
            self.watch.see(record["step"], loss, not skipped)

    def step(self, step: int, lr: float, loss: Tensor, norms: Tensor, total: Tensor) -> None:
        """Take one step's numbers: `loss`, `total` scalars and `norms` (entries,) on the device."""
        self._pending.append((step, lr, torch.cat((loss.reshape(1), total.reshape(1), norms)).detach()))
        if step == 1 or step % self.log_every == 0 or step >= self.steps:
            self.flush()

    def flush(self) -> None:
        """Write what is pending: one transfer for all of it."""
        if not self._pending:
            return
        values = torch.stack([row for _, _, row in self._pending]).cpu().numpy()
        self._tick(len(self._pending))
        for (step, lr, _), (loss, total, *norms) in zip(self._pending, values, strict=True):
            self._write_step(step, lr, float(loss), float(total), np.asarray(norms))
        self._pending.clear()

    def _write_step(self, step: int, lr: float, loss: float, total: float, norms: np.ndarray) -> None:
        finite = bool(np.isfinite(loss) and np.isfinite(total))
        log_step = step == 1 or step % self.log_every == 0 or step >= self.steps
        # the factor of torch.nn.utils.clip_grads_with_norm_, from the same number
        coefficient = min(1.0, self.clip / (total + 1e-6)) if self.clip and finite else 1.0
        record: dict[str, Any] = {"step": step, "tokens": step * self.tokens_per_step, "loss": loss, "lr": lr}
        table = self.gradients.table(norms) if log_step else {}
        record["grad_norm"] = table | {"total": total}
        record["clip_coefficient"] = coefficient
        if not finite:
            record["skipped"] = True
        self._write(record)
        self.loss.append(loss)
        self.skipped.append(not finite)
        if table:
            parts = [table[part] for part in ("attention", "ffn", "norm", "residual")]
            self.ends = {k: v for k, v in self.ends.items() if k == min(self.ends)}
            self.ends[step] = np.sqrt(np.sum(np.square(parts), axis=0))
        reason = self.watch.see(step, loss, finite)
        if not finite and self.watch.first_bad_step == step and self.reason is None:
            self.first_bad_step, self.first_bad_layer = step, self.locate(step, norms)
        if reason and self.reason is None:
            where = f", begun in layer {self.first_bad_layer}" if not finite and self.first_bad_layer else ""
            self.reason, self.first_bad_step = reason + where, self.watch.first_bad_step
            if finite:
                self.first_bad_layer = None

    def validation(self, step: int, loss: float) -> None:
        """One line for a validation, after the lines of the steps before it."""
        self.flush()
        self._write({"step": step, "tokens": step * self.tokens_per_step, "val_loss": loss})
        self.val_loss.append((step, loss))
        if not np.isfinite(loss) and self.reason is None:
            self.reason, self.first_bad_step = f"validation loss not finite at step {step}", step

    def pause(self) -> None:
        """Stop the training clock until the next step (validation, checkpoints)."""
        self._clock = None

    def _tick(self, steps: int) -> None:
        now = time.perf_counter()
        if self._clock is not None:
            self._trained += now - self._clock
            self._timed_steps += steps
        self._clock = now

    @property
    def tokens_per_second(self) -> float | None:
        return self._timed_steps * self.tokens_per_step / self._trained if self._trained else None

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(metrics_line(record) + "\n")
        self._file.flush()
        self.latest = self.latest | {k: v for k, v in record.items() if k != "grad_norm"}
        self.latest["grad_norm"] = record.get("grad_norm", {}).get("total", self.latest.get("grad_norm"))
        self.log.record(record)

    def close(self) -> None:
        self.flush()
        self._file.close()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
