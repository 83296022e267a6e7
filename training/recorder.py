"""From numbers on the device to lines of `metrics.jsonl`, with no synchronisation between two log steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability.gradients import GradientNorms
from stability.locate import Place
from stability.records import block_norms, metrics_line
from stability.verdict import Watch
from training import device as machine
from training.record import Record
from training.signals import STOPS
from training.wandb import Log

Locate = Callable[[int, np.ndarray], Place | None]


class Recorder:
    """Holds each step's loss and norms on the device and writes them at the next log step (1, every `log_every`, the
    last): one line a step, flushed as written, with the layers' arrays on log steps.

    `reason` says whether the run diverged. `first_bad_step` and `first_bad_place` tell the first step of the run that was
    not finite (or where the loss began to stay above its start), and its place as `locate(step, norms)` finds it: on a CPU
    a bad step is written at once, on other devices at the next log step, when the weights have moved on if it was a
    single one; the place can then be None. It stands in the record of the first step of each bad stretch.

    With several ranks each has one, and comes to the same decisions; `asked` is a signal that some rank has received.
    """

    def __init__(
        self,
        record: Record,
        gradients: GradientNorms,
        log: Log,
        *,
        steps: int,
        log_every: int,
        patience: int,
        tokens_per_step: int,
        locate: Locate,
    ) -> None:
        self.gradients, self.log, self.locate = gradients, log, locate
        self.steps, self.log_every, self.tokens_per_step = steps, log_every, tokens_per_step
        self.watch = Watch(steps, patience)
        self.asked: int | None = None
        self.reason: str | None = None
        self.first_bad_step: int | None = None
        self.first_bad_place: Place | None = None
        self._stretch_place: Place | None = None  # of the present stretch of bad steps
        self.loss: list[float] = []
        self.skipped: list[bool] = []
        self.val_loss: list[tuple[int, float]] = []
        self.ends: dict[int, np.ndarray] = {}  # block norms at the first and the latest log step
        self.latest: dict[str, Any] = {}
        self.probed = False  # whether the record has a probe line
        self.peak_memory = 0  # bytes, of the run up to the latest probe and without what the probes took
        self._pending: list[tuple[int, float, Tensor] | dict[str, Any]] = []
        self._record = record
        self._clock: float | None = None
        self._trained = 0.0  # seconds, the first step and validations apart
        self._timed_steps = 0

    def restore(self, done: int) -> int:
        """Continue after step `done` (-1: from nothing): the lines beyond it are dropped, the others are the history, and
        counted.

        A run that diverged and is resumed starts afresh: its record stays, what ended it no longer counts. A step whose
        line was lost counts as one whose loss is not known.
        """
        kept = self._record.keep(done)
        for record in kept:
            if "val_loss" in record:
                self.val_loss.append((record["step"], _number(record["val_loss"])))
                continue
            if "probe" in record:
                self.probed = True
                continue
            self._fill(record["step"] - 1)
            place = Place(**record["began"]) if "began" in record else None
            finite = not record.get("skipped", False)
            self._remember(record["step"], _number(record["loss"]), finite, place, record.get("grad_norm", {}))
        self._fill(done)
        if self.reason:
            self.reason, self.watch.bad, self.watch.above = None, 0, 0
        return len(kept)

    def _fill(self, step: int) -> None:
        while len(self.loss) < step:
            self.loss.append(float("nan"))
            self.skipped.append(False)

    def step(
        self, step: int, lr: float, loss: Tensor, norms: Tensor, total: Tensor, kept: Tensor, asked: Tensor
    ) -> None:
        """Take one step's numbers: `loss`, `total` and the share that clipping has `kept` of it scalars, `norms` (entries,) and
        which of STOPS some rank has `asked` for, empty with one rank, all on the device."""
        row = torch.cat((loss.reshape(1), total.reshape(1), kept.reshape(1), norms, asked)).detach()
        self._pending.append((step, lr, row))
        # costs no synchronisation there
        seen = row.device.type == "cpu" and bool(asked.any() or not torch.isfinite(row[:2]).all())
        if seen or self._is_log_step(step):
            self.flush()

    def _is_log_step(self, step: int) -> bool:
        return step == 1 or step % self.log_every == 0 or step >= self.steps

    def flush(self) -> None:
        """Write what is pending: one transfer for all of it."""
        if not self._pending:
            return
        if rows := [held[2] for held in self._pending if not isinstance(held, dict)]:
            values = iter(torch.stack(rows).cpu().numpy())
            self._tick(len(rows))
        for held in self._pending:
            if isinstance(held, dict):
                self._write(held)
            else:
                loss, total, kept, *_ = row = next(values)
                norms, asked = np.split(row[3:], [len(self.gradients.entries)])
                self._write_step(held[0], held[1], float(loss), float(total), float(kept), norms)
                if asked.any():
                    self.asked = STOPS[asked.argmax()]
        self._pending.clear()

    def _write_step(self, step: int, lr: float, loss: float, total: float, kept: float, norms: np.ndarray) -> None:
        finite = bool(np.isfinite(loss) and np.isfinite(total))
        table = self.gradients.table(norms) if self._is_log_step(step) else {}
        record: dict[str, Any] = {"step": step, "tokens": step * self.tokens_per_step, "loss": loss, "lr": lr}
        record |= {"grad_norm": table | {"total": total}, "clip_coefficient": kept if finite else 1.0}
        place = None
        if not finite:
            record["skipped"] = True
            if self.watch.bad == 0 and (place := self.locate(step, norms)):
                record["began"] = asdict(place)
        self._write(record)
        self._remember(step, loss, finite, place, table)

    def _remember(self, step: int, loss: float, finite: bool, place: Place | None, table: dict[str, Any]) -> None:
        """What the verdict is made of, from a step just made or from one before a resume."""
        self.loss.append(loss)
        self.skipped.append(not finite)
        if "attention" in table and finite:
            self.ends = {k: v for k, v in self.ends.items() if k == min(self.ends)} | {step: block_norms(table)}
        if not finite and self.watch.bad == 0:
            self._stretch_place = place
        reason = self.watch.see(step, loss, finite)
        if self.first_bad_step is None and (reason or not finite):
            self.first_bad_step, self.first_bad_place = self.watch.first_bad_step, None if finite else place
        if reason and self.reason is None:
            self.reason = reason + (f", begun in {self._stretch_place}" if self._stretch_place and not finite else "")

    def validation(self, step: int, loss: float) -> None:
        """One line for a validation, after the lines of the steps before it."""
        self.flush()
        self._write({"step": step, "tokens": step * self.tokens_per_step, "val_loss": loss})
        self.val_loss.append((step, loss))
        if not np.isfinite(loss) and self.reason is None:
            self.reason = f"validation loss not finite at step {step}"
            self.first_bad_step = self.first_bad_step or step

    def probe(self, step: int, seen: dict[str, Any]) -> None:
        """One line for a probe, in its place among the steps. It waits with them for the next log step: to write them now
        could end a diverging run some steps sooner than without the probe."""
        self._pending.append({"step": step, "tokens": step * self.tokens_per_step, "probe": seen})
        self.probed = True

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """What is done within is no part of the run: the training clock stands still, though what the device still has to do
        of the training counts as such, and the peak of memory begins anew afterwards where it can
        (`training.device.reset_peak_memory`)."""
        if device.type != "cpu":
            torch.accelerator.synchronize()
        self.peak_memory = max(self.peak_memory, machine.peak_memory(device.type))
        began = time.perf_counter()
        yield
        machine.reset_peak_memory(device.type)
        if self._clock is not None:
            self._clock += time.perf_counter() - began

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
        self._record.append(metrics_line(record))
        self.latest = self.latest | {k: v for k, v in record.items() if k != "grad_norm"}
        self.latest["grad_norm"] = record.get("grad_norm", {}).get("total", self.latest.get("grad_norm"))
        self.log.record(record)

    def to_disk(self) -> None:
        """What is written so far survives a power cut: a checkpoint must never be ahead of its record."""
        self.flush()
        self._record.to_disk()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._record.close()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
