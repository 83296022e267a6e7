"""One run, from its built parts to its records, verdict and picture."""

import errno
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from data.tokens import Tokens
from data.windows import Windows
from model.inventory import inventory
from model.transformer import Transformer
from stability.gradients import GradientNorms
from stability.locate import Place, first_bad_place
from stability.records import read
from stability.verdict import FAILED
from stability.whole import document, replace
from training import device as machine
from training.clipping import CLIPS
from training.meeting import RankLost, Start
from training.pace import Bar, Lines, Pace, Stop, WholeFiles
from training.parallel import cluster, shard, strategy, without_lightnings_signals
from training.probing import Probing
from training.profiling import Profile
from training.ranks import Ranks
from training.record import NoRecord, Record
from training.recorder import Recorder
from training.schedule import Constant
from training.signals import Signals
from training.strategy import DDP, FSDP
from training.summary import earlier, judged, of_peak, summarise
from training.task import Task
from training.wandb import Log

FULL = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
}  # the disk, a quota, a limit on files, a mount gone read-only


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built and checked."""

    begin: Start
    model: Transformer
    ranks: Ranks
    trainer: DDP | FSDP
    optimizer: Callable[[Transformer], Optimizer]
    schedule: Constant
    windows: Windows
    train: DataLoader[Tensor]
    val: DataLoader[Tensor]
    tokens: Tokens
    log: Log
    signals: Signals
    device: str


def fit(parts: Parts, scalars: dict[str, Any], facts: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Train, judge, draw `report.png` unless told not to, write `summary.json`; (summary, exit code).

    `facts` goes into the summary as it is (name, axes, equation, unigram_entropy, floor, depth, flops_per_token). The exit code
    is 0, 3 for a run that diverged, 128 + the signal's number for one that was interrupted, 1 for one that ran out of disk or
    lost a rank. Of the ranks the first alone does more than train.
    Any other error in training is raised again as a RuntimeError, never as a ValueError: those are what the user can mend,
    and are said without a traceback.
    """
    started = time.perf_counter()
    machine.reset_peak_memory(parts.device)
    steps, code, failure = scalars["steps"], FAILED, None
    try:
        trainer, task = _assemble(parts, scalars)
    except Exception as error:
        if lost := parts.ranks.lost(error):
            raise RankLost(f"{lost}: resume={parts.begin.directory} goes on") from None
        raise
    recorder = task.recorder
    try:
        # Lightning raises for a SIGTERM that comes before the first step
        with _quiet(), suppress(SIGTERMException):
            trainer.fit(task, parts.train, ckpt_path=parts.begin.checkpoint, weights_only=True)
        recorder.flush()
        parts.ranks.leave()
        verdict, reason, code = judged(recorder, parts.signals, steps, facts)
    except Exception as error:
        lost = parts.ranks.lost(error)
        failure = None if lost else error
        again = f"{lost}: resume={parts.begin.directory} goes on"
        verdict, reason = "failed", again if lost else _failure(error, parts.begin.directory)
    wall = time.perf_counter() - started + (earlier(parts.begin.directory) if parts.begin.checkpoint else 0.0)
    memory = max(recorder.peak_memory, machine.peak_memory(parts.device))
    summary = summarise(recorder, facts, verdict, reason, steps, wall, memory)
    summary |= of_peak(summary, parts.device, scalars)
    # each whatever becomes of the others; the summary, which says that the run is complete, after the picture
    with ExitStack() as closing:
        if parts.ranks.first:
            closing.callback(_unless_full, lambda: parts.log.finish(summary, code))
            closing.callback(_unless_full, lambda: replace(parts.begin.directory / "summary.json", document(summary)))
            closing.callback(
                _unless_full, lambda: _draw(parts, summary) if recorder.loss and scalars["picture"] else None
            )
            closing.callback(_unless_full, recorder.close)
    if failure and not (parts.ranks.first and _full(failure)):
        raise RuntimeError(f"the run failed: {reason}") from failure
    return summary, code


def _full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def _failure(error: Exception, directory: Path) -> str:
    if _full(error):
        assert isinstance(error, OSError)
        return f"{error.filename or directory}: {error.strerror}: make room, then resume={directory}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _unless_full(step: Callable[[], None]) -> None:
    """One closing step; a disk that is full is said in a line, since what was written before is still good."""
    try:
        step()
    except OSError as error:
        if not _full(error):
            raise
        print(f"normlab: {error.filename or 'the record'}: {error.strerror}", file=sys.stderr)


def _assemble(parts: Parts, scalars: dict[str, Any]) -> tuple[pl.Trainer, Task]:
    model, steps, accumulate = parts.model.train(), scalars["steps"], scalars["accumulate"]
    precision = machine.precision(scalars["precision"], parts.device)
    if precision == "64-true":
        model.double()  # Lightning does it after it has loaded a checkpoint, which would round the weights
    apart = shard(model, parts.ranks, parts.device) if isinstance(parts.trainer, FSDP) else []
    gradients = GradientNorms(inventory(model), model.depth)

    def locate(step: int, norms: np.ndarray) -> Place | None:
        if not parts.ranks.together:
            return None
        items = range((step - 1) * accumulate, step * accumulate)
        batches = (part.to(task.device) for item in items for part in parts.windows.of_all_ranks(item))
        with trainer.precision_plugin.forward_context():
            return first_bad_place(model, batches, gradients, norms)

    recorder = Recorder(
        (Record if parts.ranks.first else NoRecord)(parts.begin.directory / "metrics.jsonl"),
        gradients,
        parts.log,
        steps=steps,
        log_every=scalars["log_every"],
        patience=scalars["patience"],
        tokens_per_step=scalars["batch"] * model.context,
        locate=locate,
    )
    kept = parts.ranks.of_all(recorder.restore(parts.begin.steps if parts.begin.checkpoint else -1))
    if len(set(kept)) > 1:
        said = (
            f"{parts.begin.directory}: the ranks read {kept} lines of its record: it has to be on a disk that all share"
        )
        raise ValueError(said) if parts.ranks.first else RankLost(said)
    graphs = isinstance(parts.trainer, DDP) and parts.trainer.cuda_graphs
    task = Task(
        model,
        parts.optimizer(model),
        parts.schedule,
        gradients,
        recorder,
        run_id=parts.begin.run,
        steps=steps,
        accumulate=accumulate,
        clip=scalars["clip"],
        clip_by=CLIPS[scalars["clip_by"]],
        record=parts.windows[0] if graphs else None,
        ranks=parts.ranks,
        signals=parts.signals,
        apart=apart,
    )
    show = Bar(recorder) if sys.stderr.isatty() else Lines(recorder)
    every = {"val_every": scalars["val_every"], "save_every": scalars["save_every"]}
    pace = Pace(parts.begin.directory / "checkpoints", parts.val, parts.ranks, **every)
    probing: list[pl.Callback] = []
    if every_probe := scalars["probe_every"]:
        windows = [part for item in range(accumulate) for part in parts.windows.of_all_ranks(item)]
        probing.append(Probing(windows, every=every_probe, autocast=precision == "bf16-mixed"))
    # Profile first, so that what follows a step is no part of it; Stop and Probing before Pace, which saves when a stop has
    # been asked for, and after what the record is to hold by then
    profiles = [Profile(parts.begin.directory / "profile")] if scalars["profile"] else []
    shows = [show] if parts.ranks.first else []
    callbacks: list[pl.Callback] = [*profiles, Stop(parts.signals, parts.ranks), *probing, pace, *shows]
    trainer = _trainer(parts, scalars, callbacks, bar=parts.ranks.first and isinstance(show, Bar))
    return trainer, task


def _draw(parts: Parts, summary: dict[str, Any]) -> None:
    from stability.report import draw_run

    path = parts.begin.directory / "report.png"
    draw_run(changed(read(parts.begin.directory), summary=summary), path)
    parts.log.image("report", path)


def _trainer(parts: Parts, scalars: dict[str, Any], callbacks: list[pl.Callback], *, bar: bool) -> pl.Trainer:
    """Lightning without what the run does itself: starting processes, logging, checkpoints, validation, clipping, signals."""
    with _quiet():
        trainer = pl.Trainer(
            accelerator=parts.device,
            devices=scalars["devices"],
            num_nodes=scalars["num_nodes"],
            strategy=strategy(parts.trainer, parts.ranks),
            precision=machine.precision(scalars["precision"], parts.device),
            max_steps=scalars["steps"],
            max_epochs=-1,
            accumulate_grad_batches=scalars["accumulate"],
            callbacks=callbacks,
            # the second keeps Lightning from handling Slurm's signals, which training/signals.py does
            plugins=[WholeFiles(mapped=parts.ranks.world > 1), cluster(parts.ranks)],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=bar,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )
    if parts.ranks.world > 1:
        without_lightnings_signals(trainer)
    return trainer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice on what does not concern a user of this framework (number of workers, loggers)."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield
