"""One run, from its built parts to its records, verdict and picture."""

import json
import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from data.tokens import Tokens
from data.windows import Windows
from model.inventory import inventory
from model.transformer import Transformer
from stability.gradients import GradientNorms
from stability.locate import first_bad_layer
from stability.verdict import judge, spikes, tail
from training import device as machine
from training.pace import Bar, Lines, Pace, Signals
from training.recorder import Recorder
from training.schedule import Constant
from training.task import Task
from training.wandb import Log

DIVERGED = 3  # exit code


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built and checked."""

    directory: Path
    model: Transformer
    optimizer: Callable[[Transformer], Optimizer]
    schedule: Constant
    windows: Windows
    train: DataLoader[Tensor]
    val: DataLoader[Tensor]
    tokens: Tokens
    log: Log
    device: str
    checkpoint: Path | None
    start: int


def resume_point(directory: Path, *, resuming: bool) -> tuple[Path | None, int]:
    """(The newest checkpoint that is whole, the steps that it has done), or (None, 0) for a run from the start, which a
    run that was killed before its first checkpoint is too.

    Says which files are damaged; ValueError where a resumed run has no other.
    """
    if not resuming:
        return None, 0
    good: dict[int, Path] = {}
    paths = [directory / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    for path in paths:
        if path.is_file():
            try:
                # mapped: only the structure is read here, whose end a truncated file lacks
                good[int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"])] = path
            except (RuntimeError, OSError, EOFError, KeyError, TypeError, ValueError, UnpicklingError) as error:
                print(f"{path} is no whole checkpoint of a run and is left aside ({str(error).splitlines()[0][:80]})")
    if not good and any(path.is_file() for path in paths):
        raise ValueError(f"resume={directory}: checkpoints/ holds no checkpoint that can be read: start a new run")
    start = max(good, default=0)
    return good.get(start), start


def fit(parts: Parts, scalars: dict[str, Any], facts: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Train, judge, write `summary.json` and `report.png`; (summary, exit code).

    `facts` goes into the summary as it is (name, axes, equation, unigram_entropy, floor, depth). The exit code is 0,
    3 for a run that diverged, 128 + the signal's number for one that was interrupted.
    """
    started = time.perf_counter()
    if not parts.checkpoint:
        _write(parts.directory / "environment.json", machine.environment(parts.device, _corpus(parts.tokens)))
        (parts.directory / "tokenizer.json").write_text(parts.tokens.tokenizer.to_json(), encoding="utf-8")
    steps, signals = scalars["steps"], Signals()
    trainer, task = _assemble(parts, scalars, signals)
    recorder = task.recorder
    verdict, reason, code = "failed", "", 1
    try:
        # Lightning raises for a SIGTERM that comes before the first step
        with _quiet(), signals, suppress(SIGTERMException):
            trainer.fit(task, parts.train, ckpt_path=parts.checkpoint, weights_only=True)
        recorder.flush()
        verdict, reason, code = _judge(recorder, signals, steps, facts)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        # never a ValueError: those are what the user can mend, and are said without a traceback
        raise RuntimeError(f"the run failed: {reason}") from error
    finally:
        recorder.close()
        wall = time.perf_counter() - started + (_earlier(parts.directory) if parts.checkpoint else 0.0)
        summary = _summary(recorder, facts, verdict, reason, steps, wall, machine.peak_memory(parts.device))
        _write(parts.directory / "summary.json", summary)
        try:
            if recorder.loss:
                _draw(parts)
        finally:
            parts.log.finish(summary, code)
    return summary, code


def _assemble(parts: Parts, scalars: dict[str, Any], signals: Signals) -> tuple[pl.Trainer, Task]:
    model, steps, accumulate = parts.model.train(), scalars["steps"], scalars["accumulate"]
    gradients = GradientNorms(inventory(model), model.depth)

    def locate(step: int, norms: np.ndarray) -> int | None:
        batches = (parts.windows[i].to(task.device) for i in range((step - 1) * accumulate, step * accumulate))
        with trainer.precision_plugin.forward_context():
            return first_bad_layer(model, batches, gradients, norms)

    recorder = Recorder(
        parts.directory / "metrics.jsonl",
        gradients,
        parts.log,
        steps=steps,
        log_every=scalars["log_every"],
        tokens_per_step=scalars["batch"] * model.context,
        clip=scalars["clip"],
        locate=locate,
    )
    recorder.restore(parts.start if parts.checkpoint else -1)
    shared = {"steps": steps, "accumulate": accumulate, "clip": scalars["clip"]}
    task = Task(model, parts.optimizer(model), parts.schedule, gradients, recorder, **shared)
    show = Bar(recorder) if sys.stderr.isatty() else Lines(recorder)
    every = {"val_every": scalars["val_every"], "save_every": scalars["save_every"]}
    pace = Pace(parts.directory / "checkpoints", parts.val, **every)
    # signals before Pace, which saves when a stop has been asked for
    trainer = _trainer(parts.device, scalars, [signals, pace, show], bar=isinstance(show, Bar))
    return trainer, task


def _judge(recorder: Recorder, signals: Signals, steps: int, facts: dict[str, Any]) -> tuple[str, str, int]:
    loss, skipped = np.array(recorder.loss), np.array(recorder.skipped)
    if signals.received and len(loss) < steps and not recorder.reason:
        name = signal.Signals(signals.received).name
        return "interrupted", f"{name} after step {len(loss)} of {steps}", 128 + signals.received
    known = {"unigram_entropy": facts["unigram_entropy"], "floor": facts["floor"]}
    verdict, reason = judge(loss, skipped, steps=steps, diverged=recorder.reason, **known)
    if verdict == "stalled" and len(recorder.ends) == 2:
        (first, before), (last, after) = sorted(recorder.ends.items())
        reason += (
            f"; the gradient norm of layer 1 went from {before[0]:.1e} (step {first}) to {after[0]:.1e} (step {last}), "
            f"of layer {len(after)} from {before[-1]:.1e} to {after[-1]:.1e}"
        )
    return verdict, reason, DIVERGED if verdict == "diverged" else 0


def _summary(
    recorder: Recorder, facts: dict[str, Any], verdict: str, reason: str, steps: int, wall: float, memory: int
) -> dict[str, Any]:
    loss = np.array(recorder.loss, dtype=np.float64)
    finite = loss[np.isfinite(loss)]
    val = [value for step, value in recorder.val_loss if step]
    numbers = {
        "first_loss": finite[0] if finite.size else None,
        "final_loss": tail(loss, steps),
        "best_loss": finite.min() if finite.size else None,
        "best_val_loss": min((v for v in val if np.isfinite(v)), default=None),
        "final_val_loss": val[-1] if val else None,
        "spike_score": 100 * spikes(loss).mean() if finite.size else None,
        "tokens_per_second": recorder.tokens_per_second,
        "wall_time_s": wall,
    }
    return {
        "verdict": verdict,
        "reason": reason,
        **facts,
        "steps": steps,
        "steps_done": len(loss),
        "first_bad_step": recorder.first_bad_step,
        "first_bad_layer": recorder.first_bad_layer,
        "skipped_steps": sum(recorder.skipped),
        **{
            key: float(f"{value:.9g}") if value is not None and np.isfinite(value) else None
            for key, value in numbers.items()
        },
        "peak_memory_bytes": memory,
    }


def _earlier(directory: Path) -> float:
    """Seconds that a resumed run took before; 0 where it left no summary."""
    path = directory / "summary.json"
    return float(json.loads(path.read_text(encoding="utf-8"))["wall_time_s"]) if path.is_file() else 0.0


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _corpus(tokens: Tokens) -> dict[str, Any]:
    return {
        "name": tokens.name,
        "hash": tokens.hash,
        "tokenizer": tokens.tokenizer.name,
        "vocab": tokens.vocab,
        "train_tokens": len(tokens.train),
        "val_tokens": len(tokens.val),
        "unigram_entropy": tokens.unigram_entropy,
        "floor": tokens.floor,
    }


def _draw(parts: Parts) -> None:
    from stability.records import read
    from stability.report import draw_run

    path = parts.directory / "report.png"
    draw_run(read(parts.directory), path)
    parts.log.image("report", path)


def _trainer(device: str, scalars: dict[str, Any], callbacks: list[pl.Callback], *, bar: bool) -> pl.Trainer:
    """Lightning without what the run does itself: logging, checkpoints, validation, clipping."""
    with _quiet():
        return pl.Trainer(
            accelerator=device,
            devices=1,
            precision=machine.precision(scalars["precision"], device),
            max_steps=scalars["steps"],
            max_epochs=-1,
            accumulate_grad_batches=scalars["accumulate"],
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=bar,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice on what does not concern a user of this framework (number of workers, loggers)."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield
