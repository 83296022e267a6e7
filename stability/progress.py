"""The progress of a sweep while it runs, read from the directories of its jobs, whoever runs them and wherever.

A job is never asked. It *runs* while its files change: a process that was killed, here or on another machine, leaves nothing
but files that do not change any more, and a lock could only be tried by taking it from the run that wants it. A job whose
files have been still for `QUIET` seconds, and for four times as long as ever before, is called silent; should it speak again,
it runs again. All times are of the watcher's own clock, so that those of two machines need not agree.
"""

import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stability.records import last_step, mapping
from stability.sweep import DONE, JUDGED, own, recorded, same_job, summary, told

QUIET = 120.0  # seconds
SHOWN = 20  # lines of running jobs at the most
FILES = ("job.log", "config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json")
ENDED = {*JUDGED, "refused", "failed"}  # an interrupted job may be taken up again, as Slurm does
COUNTED = ("finished", "failed", "diverged", "interrupted", "silent", "running", "waiting")  # in this order
ALWAYS = ("finished", "failed", "diverged", "waiting")  # also where there is none
ANY = (Exception, SystemExit)  # the second is rich's answer to a closed pipe

Stamp = tuple[int, int, int]  # what changes with a file: its size, its time, its number


@dataclass
class Job:
    """A job as it was last seen. `began`: when its files first changed while watched, `changed`: when they last did; None
    for a job that waits. `still`: the longest time between two changes. `seen`: (when, step), the latest sightings of a step."""

    number: int
    words: Sequence[str]
    where: Path | None = None
    stamps: dict[str, Stamp] = field(default_factory=dict)
    began: float | None = None
    changed: float = 0.0
    still: float = 0.0
    steps: int = 0  # asked for
    latest: dict[str, Any] = field(default_factory=dict)  # its last step in metrics.jsonl
    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=100))
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.summary.get("verdict") in ENDED

    def state(self, now: float) -> str:
        """One of COUNTED."""
        verdict = self.summary.get("verdict")
        if self.ended:
            return "finished" if verdict in DONE else "diverged" if verdict == "diverged" else "failed"
        if self.began is None:
            return "waiting"
        if verdict == "interrupted":
            return "interrupted"
        return "silent" if now - self.changed > max(QUIET, 4 * self.still) else "running"

    def left(self, now: float, usual: Mapping[int, float]) -> float | None:
        """Seconds to its last step, at the pace of the steps that were seen; before two of them at the `usual` seconds a step
        of the finished jobs of as many steps; None where there are none."""
        if len(self.seen) < 2:
            pace, step = usual.get(self.steps), self.latest.get("step", 0)
            return None if pace is None else (self.steps - step) * pace
        (first, start), (last, step) = self.seen[0], self.seen[-1]
        return max(0.0, (self.steps - step) * (last - first) / (step - start) - (now - last))


class Watch:
    """The jobs of a sweep, as `look` last found them. `jobs`, `names`, `ran` as in `watching`."""

    def __init__(
        self,
        directory: Path,
        jobs: Sequence[list[str]] | None,
        names: Sequence[str] = (),
        ran: Mapping[int, tuple[Path, dict[str, Any]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory, self.ran, self.clock = directory, {} if ran is None else ran, clock
        self.open = jobs is None  # they are made up as the sweep goes
        self.jobs = [Job(number, words) for number, words in enumerate(jobs or [])]
        self.names = names or own(jobs or [])
        self.known: set[Path] = set()  # directories that were read
        self.wanted: dict[tuple[str, ...], list[Job]] = defaultdict(list)  # by their words, those without a directory
        for job in self.jobs:
            self.wanted[same_job(job.words)].append(job)

    def look(self, *, first: bool = False) -> list[str]:
        """Look at all that may have changed; a line for each job that has ended since, in the order of ending. What the `first`
        look finds was there before the sweep: jobs that are judged have run, the others wait to be taken up."""
        now = self.clock()
        self._find()
        going = [job for job in self.jobs if not job.ended]
        for job in going:
            with suppress(OSError):  # looked at again
                self._see(job, now, first=first)
        ended = [job for job in going if job.ended]
        if first:
            return [f"{self.line(job)}  had run before" for job in ended]
        return [self.line(job) for job in sorted(ended, key=lambda job: job.stamps.get("summary.json", (0, 0))[1])]

    def rest(self) -> list[str]:
        """A line for each job that began and has not ended, for the end of the sweep."""
        return [self.line(job) for job in self.jobs if job.began is not None and not job.ended]

    def line(self, job: Job) -> str:
        of = "" if self.open else f" of {len(self.jobs)}"
        ending = told(job.summary or {"verdict": "unfinished"})
        return " ".join(f"run {job.number + 1}{of}: {self.name(job)}  {ending}".splitlines())

    def name(self, job: Job) -> str:
        names = own([each.words for each in self.jobs]) if self.open else self.names
        return names[job.number] or " ".join(job.words)

    def _find(self) -> None:
        """Give each new directory to the job of its words, the first that lacks one."""
        for where, words in recorded(self.directory, self.known):
            self.known.add(where)
            if waiting := self.wanted[same_job(words)]:
                waiting.pop(0).where = where
            elif self.open:
                self.jobs.append(Job(len(self.jobs), words, where))

    def _see(self, job: Job, now: float, *, first: bool) -> None:
        if not self.open and job.number in self.ran:
            job.summary = self.ran[job.number][1]
        elif job.where and (stamps := _stamps(job.where)):
            changed = {name for name, stamp in stamps.items() if stamp != job.stamps.get(name)}
            if changed and not first:
                self._tell(job, job.where, changed, now)
            elif first and "summary.json" in stamps:
                before, asked = summary(job.where), _asked(job.where)
                job.summary = before if before["verdict"] in JUDGED and before.get("steps") == asked else {}
            job.stamps = stamps  # last: after an error all is read again
        elif job.where:
            self._forget(job, job.where)

    def _tell(self, job: Job, where: Path, changed: set[str], now: float) -> None:
        if job.began is None:
            job.began, changed = now, changed | {"config.yaml", "metrics.jsonl"}  # a resumed run has them
        else:
            job.still = max(job.still, now - job.changed)
        job.changed = now
        if "config.yaml" in changed:
            job.steps = _asked(where)
        if "metrics.jsonl" in changed:
            job.latest = last_step(where / "metrics.jsonl") or {}
            _sight(job.seen, now, job.latest.get("step"))
        if "summary.json" in changed:
            job.summary = summary(where)
        elif changed & {"overrides.yaml", "metrics.jsonl"}:
            job.summary = {}  # of an interruption that it has gone on from

    def _forget(self, job: Job, where: Path) -> None:
        """Its directory has vanished: it waits again."""
        self.known.discard(where)
        self.jobs[job.number] = again = Job(job.number, job.words)
        self.wanted[same_job(job.words)].append(again)

    def shown(self, console: Console) -> RenderableType:
        """A line for each running job, as many as there is room for, and one that counts."""
        now = self.clock()
        states = Counter(job.state(now) for job in self.jobs)
        counted = [name for name in COUNTED if states[name] or name in ALWAYS]
        counts = ", ".join(f"{states[name]} {name}" for name in counted if not (self.open and name == "waiting"))
        running = [job for job in self.jobs if job.state(now) == "running"]
        room = max(1, min(SHOWN, console.height - 4))
        lines: list[RenderableType] = [self._table(running[:room], now, console.width)] if running else []
        if len(running) > room:
            lines.append(Text(f"... and {len(running) - room} more", style="dim"))
        of = "1 run" if len(self.jobs) == 1 else f"{len(self.jobs)} runs"
        return Group(*lines, Text(f"{of}: {counts}", no_wrap=True, overflow="ellipsis"))

    def _table(self, running: Sequence[Job], now: float, width: int) -> Table:
        paces = defaultdict(list)
        for job in self.jobs:
            if job.state(now) == "finished" and job.summary.get("steps_done") and job.summary.get("wall_time_s"):
                paces[job.summary["steps"]].append(job.summary["wall_time_s"] / job.summary["steps_done"])
        usual = {steps: sum(found) / len(found) for steps, found in paces.items()}
        bar, digits = min(30, max(8, width // 10)), len(str(max(job.steps for job in running)))
        room = max(12, width - bar - 2 * digits - 38)  # of the name, beside the number of the run and five columns
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for head in ("run", "", "", "step", "loss", "grad norm", "left"):
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for job in running:
            name, step, left = self.name(job), job.latest.get("step", 0), job.left(now, usual)
            table.add_row(
                str(job.number + 1),
                Text(name if len(name) <= room else f"…{name[1 - room :]}"),  # what varies fastest stands last
                ProgressBar(total=job.steps or 1, completed=step, width=bar),
                f"{step}/{job.steps}",
                _number(job.latest, "loss", ".4f"),
                _number(job.latest.get("grad_norm") or {}, "total", ".3g"),
                "" if left is None else str(timedelta(seconds=round(left))),
            )
        return table


@contextmanager
def watching(
    directory: Path,
    jobs: Sequence[list[str]] | None,
    names: Sequence[str] = (),
    *,
    ran: Mapping[int, tuple[Path, dict[str, Any]]] | None = None,
    console: Console | None = None,
    every: float = 1.0,
) -> Iterator[Watch]:
    """While a sweep runs in the block, show how far its jobs are, on a terminal; anywhere, a line for each that ends.

    `jobs[i]` are the words of job i, None where they are made up as the sweep goes; `names[i]` is what it is called, else it is
    by the words that are not the same in all. `ran`, which may grow meanwhile, knows jobs that have ended in this process: a
    job that is refused in another run's directory leaves nothing there. A `console` of the caller's must hold on to its own
    file, since a job may take sys.stdout for its log.

    Nothing that goes wrong here reaches the sweep.
    """
    console = console or Console(file=sys.stdout)
    watch, stop = Watch(directory, jobs, names, ran), threading.Event()
    # what is printed by others is not ours to turn aside: a job may have taken both streams for its log
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def show(say: Callable[[], list[str]]) -> None:
        with suppress(*ANY):
            for line in say():
                console.print(Text(line), soft_wrap=True)
            if live.is_started:
                live.update(watch.shown(console), refresh=True)

    def work() -> None:
        while not stop.wait(every):
            show(watch.look)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    try:
        with suppress(*ANY):
            if console.is_terminal and not console.is_dumb_terminal:
                live.start()
                console.show_cursor(True)  # a process that is killed cannot bring it back
        show(lambda: watch.look(first=True))
        with suppress(RuntimeError):  # no thread can be had
            thread.start()
        yield watch
    finally:
        try:
            stop.set()
            if thread.ident:
                thread.join()
            show(watch.look)
            show(watch.rest)
        finally:
            with suppress(*ANY):
                live.stop()


def _stamps(where: Path) -> dict[str, Stamp]:
    stamps = {}
    for name in FILES:
        with suppress(FileNotFoundError):
            stat = (where / name).stat()
            stamps[name] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return stamps


def _asked(where: Path) -> int:
    """The steps that a run is asked for; 0 where that is not known."""
    steps = (mapping(where / "config.yaml", []) or {}).get("steps")
    return steps if isinstance(steps, int) else 0


def _sight(seen: deque[tuple[float, int]], now: float, step: int | None) -> None:
    """A resumed run goes back, and its clock starts with its first new step."""
    if step is None:
        return
    if seen and (step < seen[-1][1] or (len(seen) == 1 and step == seen[0][1])):
        seen.clear()
    if not seen or step > seen[-1][1]:
        seen.append((now, step))


def _number(record: Mapping[str, Any], key: str, how: str) -> str:
    """Blank where nothing is written; nan where it was not finite, and null is written."""
    value = record.get(key, "")
    return format(value, how) if isinstance(value, float | int) else "nan" if value is None else ""
