"""What the time of a step goes into: a trace of a few steps, and tables of its operations."""

import gzip
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from stability.whole import replace, whole
from training.pace import ends_step
from training.task import Task

STEPS, DEEP = 3, 100  # traced; of deeper networks one, since each layer of a step leaves some 650 events of 300 bytes
LARGE = 10**7  # bytes from which on a trace is compressed
TOP = 10  # operations in the table
STEP = "ProfilerStep"
BETWEEN, OTHER = "between operations: Python, autograd, dispatch", "elementwise, copies, views"

# of operations, of what autograd calls their backward, and of a GPU's kernels; the first that fits
KINDS = {
    "attention": r"scaled_?dot_?product|flash|fmha|attention",
    "norms": r"(layer|rms|batch)_?norm|GammaBeta|RowwiseMoments",
    "loss": r"cross_?entropy|log_?softmax|nll_?loss|softmax_?(warp|forward|backward)",
    "optimizer, gradient norms, clipping": r"_fused_(adam|sgd)|_foreach_|multi_tensor",
    "matrix products": r"aten::(add)?b?mm\b|gemm|cutlass|nvjet",
    "activation": r"gelu|silu",
    "embedding": r"embedding",
    "windows": r"DataLoader|Memcpy HtoD",
    BETWEEN: rf"{STEP}|Optimizer\.step|autograd::|Backward\d*$",
}


@dataclass(frozen=True, slots=True)
class Span:
    """An operation on one thread of the CPU, or a kernel on a device; in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 0


@dataclass(frozen=True)
class Cost:
    """`self_time`: nanoseconds within this operation and in none that it calls."""

    name: str
    kind: str
    calls: int
    self_time: int


def plan(left: int, depth: int) -> list[ProfilerAction]:
    """What is done in each of the next steps: two are waited for, two warm the profiler up, three are traced (one of a deep
    network). Where fewer are `left` to the run there is first less waiting, then less warming up, then less tracing."""
    active = min(left, STEPS if depth <= DEEP else 1)
    warm = min(2, left - active)
    wait = min(2, left - active - warm)
    record = [ProfilerAction.RECORD] * (active - 1) + [ProfilerAction.RECORD_AND_SAVE] * min(1, active)
    return [ProfilerAction.NONE] * wait + [ProfilerAction.WARMUP] * warm + record


class Profile(Callback):
    """Traces a few steps once the run has got going: `profile/trace.json` (`.gz` if large; Perfetto and Chrome's tracing
    read both) and `profile/table.txt`, which is printed when the run ends.

    The record is that of a run without it; into the speed no step counts up to the last that is traced. What is done between
    two steps (a validation, a checkpoint, a probe) counts into the second. A GPU is waited for after each of these steps, so
    that a step is what it has done, not what it has been told.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._profiler: profile | None = None
        self._task: Task | None = None
        self._steps, self._started = 0, False
        self._said = "profile=true: the run ended before the steps to trace were taken"

    def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        assert isinstance(task, Task)
        steps = plan(task.steps - trainer.global_step, task.model.depth)
        if not steps or not trainer.is_global_zero:
            return
        self._task, self._steps = task, len(steps)
        device = [ProfilerActivity.CUDA] if task.device.type == "cuda" else []
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *device],
            schedule=lambda step: steps[step] if step < len(steps) else ProfilerAction.NONE,
            on_trace_ready=self._keep,
        )

    def on_train_batch_start(self, *_: Any) -> None:
        """Here, so that the validation before the first step is no part of it."""
        if self._profiler and not self._started:
            self._started = True
            self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
        if self._profiler and ends_step(trainer, task):
            assert isinstance(task, Task)
            if task.device.type != "cpu":
                torch.accelerator.synchronize()
            task.recorder.pause()
            self._profiler.step()
            self._steps -= 1
            if not self._steps:
                self._stop()

    def on_train_end(self, *_: Any) -> None:
        self._drop()

    def on_exception(self, *_: Any) -> None:
        self._drop()

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            print(self._said, flush=True)

    def _drop(self) -> None:
        """A trace that has not come to its end would count what followed the last step as another."""
        if self._profiler:
            self._profiler.on_trace_ready = None
            self._stop()

    def _stop(self) -> None:
        if self._profiler and self._started:
            self._profiler.stop()
        self._profiler = self._task = None

    def _keep(self, profiler: profile) -> None:
        assert self._task is not None and profiler.profiler is not None
        traced = profiler.profiler.kineto_results
        assert traced is not None
        device = self._task.device
        with self._task.recorder.aside(device):
            self.directory.mkdir(exist_ok=True)
            path = write_trace(profiler, self.directory)
            text = tables(*costs(traced.events()), device=device.type)
            replace(self.directory / "table.txt", text)
        self._said = f"{text}profile: {path}"


def write_trace(profiler: profile, directory: Path) -> Path:
    """`trace.json`, or where that is large `trace.json.gz`, in `directory`; its path."""
    path, unfinished = directory / "trace.json", directory / ".trace.json.unfinished"
    packed = directory / "trace.json.gz"
    try:
        profiler.export_chrome_trace(str(unfinished))
        if unfinished.stat().st_size < LARGE:
            packed.unlink(missing_ok=True)
            return unfinished.replace(path)
        with unfinished.open("rb") as plain, whole(packed) as file, gzip.open(file, "wb", compresslevel=6) as gz:
            shutil.copyfileobj(plain, gz)
        path.unlink(missing_ok=True)
        return packed
    finally:
        unfinished.unlink(missing_ok=True)


def costs(events: Iterable[Any]) -> tuple[int, int, list[Cost], bool]:
    """(Steps traced, nanoseconds that they took, what each operation cost, the dearest first, whether these are a device's
    kernels), from the profiler's events: of kernels where there are any, else of the CPU's operations. torch's own sums (`key_averages`) take half a minute
    and a gigabyte for 1,000 layers."""
    host: list[Span] = []
    device: list[Span] = []
    for event in events:
        span = Span(event.name(), event.start_ns(), event.end_ns(), event.start_thread_id())
        if event.device_type().name == "CPU":
            if event.end_thread_id() == span.thread and not event.is_async():
                host.append(span)
        elif not event.is_user_annotation() and not span.name.startswith(STEP):
            device.append(span)
    steps = [span.end - span.start for span in host if span.name.startswith(STEP)]
    times = ((span.name, _kind(span.name) or OTHER, span.end - span.start) for span in device)
    calls: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    for name, of_kind, time in times if device else self_times(host):
        key = ("(between operations)" if of_kind == BETWEEN else name, of_kind)
        calls[key] += 1
        total[key] += time
    found = [Cost(*key, calls[key], time) for key, time in total.most_common()]
    return len(steps), sum(steps), found, bool(device)


def self_times(spans: Iterable[Span]) -> Iterator[tuple[str, str, int]]:
    """(Name, kind, nanoseconds within it and in nothing that it calls) of each operation. On a thread they lie apart, or one
    within the other. What has no kind of its own has that of what it is called by."""
    stack: list[tuple[Span, str]] = []
    inner: list[int] = []  # of each on the stack, the time of what it called so far

    def leave() -> tuple[str, str, int]:
        (span, of_kind), called = stack.pop(), inner.pop()
        return span.name, of_kind, span.end - span.start - called

    for span in sorted(spans, key=lambda span: (span.thread, span.start, -span.end)):
        while stack and (stack[-1][0].thread != span.thread or stack[-1][0].end <= span.start):
            yield leave()
        caller = OTHER
        if stack:
            inner[-1] += span.end - span.start
            caller = stack[-1][1]
        stack.append((span, _kind(span.name) or (OTHER if caller == BETWEEN else caller)))
        inner.append(0)
    while stack:
        yield leave()


@cache
def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), None)


def tables(steps: int, wall: int, found: Sequence[Cost], kernels: bool, device: str) -> str:
    """The dearest operations, and what kind of work the time goes into, in % of all self time; the arguments as from
    `costs`."""
    whole_time = sum(cost.self_time for cost in found) or 1
    names: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for cost in found:
        names[cost.name] += cost.self_time
        kinds[cost.kind] += cost.self_time
        calls[cost.name] += cost.calls

    def row(time: int) -> tuple[str, str]:
        return f"{100 * time / whole_time:.1f}", f"{time / steps / 1e6:,.3f}"

    dearest = _table("operation", "self %", "ms a step", "calls a step")
    for name, time in names.most_common(TOP):
        dearest.add_row(name, *row(time), f"{calls[name] / steps:,.4g}")
    by_kind = _table("kind of work", "self %", "ms a step")
    for kind, time in kinds.most_common():
        by_kind.add_row(kind, *row(time))
    text = StringIO()
    console = Console(file=text, width=110, markup=False, highlight=False)
    host = ", operations of the host, since no kernel was traced" if device != "cpu" else ""
    busy = f", kernels in {100 * whole_time / wall:.0f} % of it" if kernels else host
    console.print(f"{steps} profiled step{'s' * (steps > 1)} on {device}: {wall / steps / 1e6:.1f} ms a step{busy}")
    console.print(dearest, by_kind)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip() + "\n"


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, width=60, no_wrap=True, overflow="ellipsis")
    for head in numbers:
        table.add_column(head, justify="right")
    return table
