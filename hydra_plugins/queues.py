"""Launchers that hand jobs to an engine with processes and queues of its own, and Optuna's sweeper, where their packages are
installed. `knobs` declares what a launcher's config may have, where its own signature does not."""

import inspect
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from hydra.core.utils import JobReturn
from pydantic import Field

from conf.check import nearest
from conf.schema import Count
from conf.sweep import Lost, Remember
from training.signals import Interrupted, Signals


class Handed:
    """What all of them add to Hydra's own: the sweep is told that it begins, and an engine's error is one line."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        Remember.begin(elsewhere=True)
        try:
            self.prepare()
            return super().launch(job_overrides, initial_job_idx)  # type: ignore[misc]
        except Exception as error:  # whatever the engine raises: its jobs have records, where their own errors stand
            said = f"{type(error).__name__}: {error}".splitlines()
            raise Lost(f"{type(self).__name__} lost a job: {said[0]}") from error

    def prepare(self) -> None:
        """Start the engine itself, where it is to be started."""


with suppress(ImportError):
    from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher, SlurmLauncher

    class Slurm(Handed, SlurmLauncher):  # type: ignore[misc]
        """Each job a job of Slurm's."""

        knobs = SlurmQueueConf

    class Local(Handed, LocalLauncher):  # type: ignore[misc]
        """Each job a process of this machine's. submitit starts all that it is given: it is given as many as there are cores."""

        knobs = LocalQueueConf

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            from joblib import cpu_count

            returns: list[JobReturn] = []
            # they inherit it: Ctrl-C comes to them from here, by way of the threads of this process
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for start in range(0, len(job_overrides), cpu_count()):
                    returns += super().launch(job_overrides[start : start + cpu_count()], initial_job_idx + start)
            except Interrupted:
                self._stop()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return returns

        def _stop(self) -> None:
            """submitit's processes would go on: they are told to end, and waited for. Their folders have their numbers."""
            ours = []
            for folder in Path(self.params["submitit_folder"]).parent.glob("[0-9]*"):
                with suppress(ChildProcessError):  # of a sweep before this one
                    os.waitid(os.P_PID, int(folder.name), os.WEXITED | os.WNOWAIT | os.WNOHANG)
                    ours.append(int(folder.name))
            for number in ours:
                os.kill(number, signal.SIGTERM)
            for number in ours:
                os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)


def _as_ray_knows_it(number: int) -> None:
    """Whatever else a handler raises, ray drops."""
    raise KeyboardInterrupt


with suppress(ImportError):
    from hydra_plugins.hydra_ray_launcher.ray_launcher import RayLauncher

    class Ray(Handed, RayLauncher):
        """Each job a task of a ray cluster, which is started here where there is none."""

        def __init__(self, ray: Any) -> None:
            super().__init__(ray)

        @staticmethod
        def check(node: dict[str, Any]) -> None:
            """ValueError for what ray would not take, without starting it."""
            import ray

            known = {name for name in inspect.signature(ray.init).parameters if name != "kwargs"}
            for key in node["ray"].get("init") or {}:
                if key not in known and not key.startswith("_"):
                    raise ValueError(f"hydra.launcher.ray.init.{key} is no knob of ray.init; {nearest(key, known)}")
            try:
                ray.remote(**node["ray"].get("remote") or {"num_cpus": 1})(lambda: None)
            except (TypeError, ValueError) as error:
                raise ValueError(f"hydra.launcher.ray.remote: {error}") from error

        def prepare(self) -> None:
            from hydra_plugins.hydra_ray_launcher import _launcher_util

            init = self.ray_cfg.init
            if init.get("address") == "local":  # a cluster that is there has its own
                init.setdefault("object_store_memory", 2**27)  # jobs leave their results in files
            _launcher_util.start_ray(init)
            self.signals.install()  # ray has put a handler in place of ours that aborts the process

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
            with Signals(_as_ray_knows_it) as self.signals:
                try:
                    return super().launch(job_overrides, initial_job_idx)
                except KeyboardInterrupt:
                    raise SystemExit(128 + (self.signals.received or signal.SIGINT)) from None


with suppress(ImportError):
    from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper

    class Optuna(OptunaSweeper):
        """Optuna's search, which is silent of itself: the sweep's table says what it found."""

        def __init__(
            self,
            sampler: Any,
            direction: Any,
            storage: str | None,
            study_name: str | None,
            n_trials: Count,
            n_jobs: Count,
            max_failure_rate: Annotated[float, Field(ge=0, le=1)],
            search_space: Any,
            custom_search_space: str | None,
            params: Any,
        ) -> None:
            import optuna

            optuna.logging.set_verbosity(logging.WARNING)
            trials, space = (n_trials, n_jobs, max_failure_rate), (search_space, custom_search_space, params)
            super().__init__(sampler, direction, storage, study_name, *trials, *space)
