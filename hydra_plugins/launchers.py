"""Launchers: how the jobs of a sweep are started, each on an engine that is there already. Hydra finds one below
`hydra_plugins` and nowhere else; the engines' own plugins are imported when they are asked for."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict

from conf.schema import Count
from conf.sweep import PENALTY, Lost, Remember
from stability.records import without_steps
from stability.sweep import overrides as overrides_of
from stability.sweep import same_job
from stability.whole import document, replace
from training.signals import Signals

STOPPED = "stopped"  # a file in the folder that the processes of a sweep share


class Joblib(BasicLauncher):
    """Jobs in processes of their own on this machine, `n_jobs` at once: as many as cores where it is None, and on a GPU one,
    which then runs in this process.

    A process that is killed takes those beside it along. The jobs that were under way then go on from where their checkpoints
    are, in two halves, one after the other, and so on; one whose process is killed while it runs alone has failed, and the
    others have lost nothing.
    """

    def __init__(self, n_jobs: Count | None = None) -> None:
        super().__init__()
        self.n_jobs = n_jobs

    @cached_property
    def _place(self) -> str:
        """Of the whole sweep: processes are kept from one batch of Optuna's to the next if they were started with the same words."""
        return Remember.until_end.enter_context(TemporaryDirectory(prefix="normlab-"))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        at_once = self.n_jobs or _at_once()
        if at_once == 1 or len(job_overrides) == 1:
            return super().launch(job_overrides, initial_job_idx)
        from joblib.externals.loky.process_executor import BrokenProcessPool, TerminatedWorkerError

        Remember.begin(elsewhere=True)
        jobs = dict(enumerate(job_overrides, initial_job_idx))
        returns: dict[int, JobReturn] = {}
        with Signals(lambda number: _pass_on(Path(self._place), number)) as signals:
            batches = [list(jobs)]
            while batches and not signals.received:
                batch, under_way = batches.pop(0), set[int]()
                try:
                    for number, returned in self._results(batch, jobs, under_way, at_once, signals):
                        under_way.discard(number)
                        returns[number] = returned
                except TerminatedWorkerError:
                    if len(batch) == 1:
                        self._killed(batch[0], jobs[batch[0]])
                    else:
                        untouched = [number for number in batch if number not in returns | dict.fromkeys(under_way)]
                        again, half = sorted(under_way), len(under_way) // 2
                        batches = [part for part in (again[:half], again[half:], untouched, *batches) if part]
                except BrokenProcessPool as error:
                    raise Lost(f"the processes of joblib cannot start: {str(error).splitlines()[0]}") from error
        if signals.received:
            raise SystemExit(128 + signals.received)
        return [returns.get(number) or _penalty() for number in jobs]

    def _results(
        self, batch: list[int], jobs: dict[int, Sequence[str]], under_way: set[int], at_once: int, signals: Signals
    ) -> Iterator[tuple[int, JobReturn]]:
        """What the jobs of a batch come to, each as it ends; `under_way` has those that have been handed to a process."""
        from joblib import Parallel, delayed

        def tasks() -> Iterator[Any]:
            for number in batch:
                if signals.received:
                    return
                under_way.add(number)
                hydra = (self.hydra_context, self.config, self.task_function, Singleton.get_state())
                yield delayed(_work)(self._place, number, jobs[number], *hydra)

        engine = Parallel(
            n_jobs=max(min(at_once, len(jobs)), 2),  # with one, joblib would run it in this process
            backend="loky",
            pre_dispatch="n_jobs",  # none waits inside the engine: it could not be called back
            batch_size=1,
            return_as="generator_unordered",
            initializer=_join,
            initargs=(self._place, os.getpid()),
        )
        for number, returned, ran in engine(tasks()):
            if ran:
                Remember.ran[number] = ran
            yield number, returned

    def _killed(self, number: int, overrides: Sequence[str]) -> None:
        """The record of a job whose process was killed while it ran alone."""
        assert self.hydra_context and self.config
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.num = number
        directory = Path(config.hydra.sweep.dir) / str(config.hydra.sweep.subdir)
        summary = without_steps("failed", "its process was killed, and again while it ran alone: too little memory?")
        words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        known = overrides_of(directory / "overrides.yaml")
        if known is None or same_job(known) == same_job(words):  # else another run has the place
            directory.mkdir(parents=True, exist_ok=True)
            replace(directory / "summary.json", document(summary))
            replace(directory / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(words)))
        Remember.ran[number] = directory, summary


def _at_once() -> int:
    """How many jobs this machine runs at once where nothing is said: one a core, since each takes one thread; a GPU has one."""
    from joblib import cpu_count

    from training.device import accelerator

    return int(cpu_count()) if accelerator() == "cpu" else 1


def _join(place: str, parent: int) -> None:
    """The first thing a process of joblib's does: out of the terminal's reach, so that a signal comes once, from the process
    that started it, which knows by a file that this one listens. Between two jobs it does not, since joblib ends all the
    processes where one ends."""
    os.setsid()
    Signals.spoken = False  # the parent has said it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    (Path(place) / str(os.getpid())).touch()
    threading.Thread(target=_outlive, args=(place, parent), daemon=True).start()


def _outlive(place: str, parent: int) -> None:
    """Where the parent is killed, its jobs end as by its signal: nobody would wait for them, and they keep their directories
    from the same command."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(place, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    with Remember.working:
        os._exit(1)  # else it would wait for a next one


def _pass_on(place: Path, number: int) -> None:
    """To each process, or by the file to one that does not listen yet."""
    (place / STOPPED).touch()
    for process in multiprocessing.active_children():
        if process.pid and (place / str(process.pid)).exists():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _work(place: str, number: int, *rest: Any) -> tuple[int, JobReturn, Any]:
    """In a process of joblib's: (the job, what Hydra says of it, its directory and summary)."""
    from hydra_plugins.hydra_joblib_launcher._core import execute_job

    returned = _penalty()
    with Remember.working, Signals(), suppress(SystemExit):  # a signal to this process: its job says `interrupted`
        if not (Path(place) / STOPPED).exists():
            returned = execute_job(number, *rest)
    return number, returned, Remember.ran.pop(number, None)


def _penalty() -> JobReturn:
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = PENALTY
    return returned
