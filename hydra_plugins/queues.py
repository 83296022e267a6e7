"""Launchers that hand jobs to an engine with processes and queues of its own, where its package is installed."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.utils import JobReturn

from conf.sweep import Lost, Remember


class Handed:
    """What all of them add to Hydra's own: the sweep is told that it begins, and an engine's error is one line."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        Remember.begin(elsewhere=True)
        try:
            return super().launch(job_overrides, initial_job_idx)  # type: ignore[misc]
        except (
            Exception
        ) as error:  # whatever the engine raises: its jobs have records, and their own errors stand there
            said = f"{type(error).__name__}: {error}".splitlines()
            raise Lost(f"{type(self).__name__} lost a job: {said[0]}") from error


with suppress(ImportError):
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher, SlurmLauncher

    class Slurm(Handed, SlurmLauncher):  # type: ignore[misc]
        """Each job a job of Slurm's."""

    class Local(Handed, LocalLauncher):  # type: ignore[misc]
        """Each job a process of this machine's. submitit starts all that it is given: it is given as many as there are cores."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
            from joblib import cpu_count

            returns: list[JobReturn] = []
            for start in range(0, len(job_overrides), cpu_count()):
                returns += super().launch(job_overrides[start : start + cpu_count()], initial_job_idx + start)
            return returns


with suppress(ImportError):
    from hydra_plugins.hydra_ray_launcher.ray_launcher import RayLauncher

    class Ray(Handed, RayLauncher):
        """Each job a task of a ray cluster, which is started here where there is none."""
