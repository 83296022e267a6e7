"""Launchers: how the jobs of a sweep are started, each on an engine that is there already. Hydra finds one below
`hydra_plugins` and nowhere else; the engines' own plugins are imported when they are asked for."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import open_dict

from conf.sweep import PENALTY, RAN, Remember
from stability.records import without_steps
from stability.whole import document, replace
from training.signals import Signals


class Joblib(BasicLauncher):
    """Jobs in processes of their own on this machine, `n_jobs` at once: as many as cores where it is None, and on a GPU one,
    which then runs in this process.

    A process that is killed takes those beside it along. All the jobs that were under way then go on, each alone, from where
    their checkpoints are; one whose process is killed again has failed, and the others have lost nothing.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        super().__init__()
        self.n_jobs = n_jobs

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        workers = min(self.n_jobs or _at_once(), len(job_overrides))
        if workers == 1:
            return super().launch(job_overrides, initial_job_idx)
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        Remember.begin(elsewhere=True)
        jobs = dict(enumerate(job_overrides, initial_job_idx))
        returns: dict[int, JobReturn] = {}
        with TemporaryDirectory() as place, Signals(lambda number: _pass_on(Path(place), number)) as signals:
            batches = [list(jobs)]
            while batches and not signals.received:
                batch, under_way = batches.pop(0), set[int]()
                try:
                    for number, returned in self._results(batch, jobs, under_way, workers, place, signals):
                        under_way.discard(number)
                        returns[number] = returned
                except TerminatedWorkerError:
                    if len(batch) == 1:
                        self._killed(batch[0], jobs[batch[0]])
                    else:
                        untouched = [number for number in batch if number not in returns | dict.fromkeys(under_way)]
                        batches = [*([number] for number in sorted(under_way)), *([untouched] if untouched else [])]
        if signals.received:
            raise SystemExit(128 + signals.received)
        return [returns.get(number) or _penalty() for number in jobs]

    def _results(
        self,
        batch: list[int],
        jobs: dict[int, Sequence[str]],
        under_way: set[int],
        workers: int,
        place: str,
        signals: Signals,
    ) -> Iterator[tuple[int, JobReturn]]:
        """What the jobs of a batch come to, each as it ends; `under_way` has those that have been handed to a process."""
        from joblib import Parallel, delayed

        def tasks() -> Iterator[Any]:
            for number in batch:
                if signals.received:
                    return
                under_way.add(number)
                yield delayed(_work)(
                    number, jobs[number], self.hydra_context, self.config, self.task_function, Singleton.get_state()
                )

        engine = Parallel(
            n_jobs=max(workers, 2),  # with one, joblib would run it in this process
            backend="loky",
            pre_dispatch="n_jobs",  # none waits inside the engine: it could not be called back
            batch_size=1,
            return_as="generator_unordered",
            initializer=_join,
            initargs=(place,),
        )
        for number, returned, ran in engine(tasks()):
            if ran:
                RAN[number] = ran
            yield number, returned

    def _killed(self, number: int, overrides: Sequence[str]) -> None:
        """The record of a job whose process was killed while it ran alone."""
        assert self.hydra_context and self.config
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.num = number
        directory = Path(config.hydra.sweep.dir) / str(config.hydra.sweep.subdir)
        summary = without_steps("failed", "its process was killed twice, the second time alone: too little memory?")
        if directory.is_dir():
            replace(directory / "summary.json", document(summary))
            RAN[number] = directory, summary


def _at_once() -> int:
    """How many jobs this machine runs at once where nothing is said: one a core, since each takes one thread; a GPU has one."""
    from joblib import cpu_count

    from training.device import accelerator

    return int(cpu_count()) if accelerator() == "cpu" else 1


def _join(place: str) -> None:
    """The first thing a process of joblib's does: out of the terminal's reach, so that a signal comes once, from the process
    that started it, which finds it by a file named after it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # between two jobs: Python would print a traceback
    (Path(place) / str(os.getpid())).touch()


def _pass_on(place: Path, number: int) -> None:
    for path in place.iterdir():
        with suppress(ProcessLookupError):
            os.kill(int(path.name), number)


def _work(number: int, *rest: Any) -> tuple[int, JobReturn, Any]:
    """In a process of joblib's: (the job, what Hydra says of it, its directory and summary)."""
    from hydra_plugins.hydra_joblib_launcher._core import execute_job

    try:
        returned = execute_job(number, *rest)
    except SystemExit:  # a signal to this process: its job says `interrupted`
        returned = _penalty()
    return number, returned, RAN.pop(number, None)


def _penalty() -> JobReturn:
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = PENALTY
    return returned
