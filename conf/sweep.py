"""What a sweep was asked for: its directory and the overrides of each of its jobs, known before the first one starts."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig

from conf.study import Job, Study


@dataclass(frozen=True)
class Sweep:
    """`jobs[i]`: the words of job i; None where the sweeper makes them up as it goes (Optuna). `ran[i]`: the directory and
    the summary of job i, once it has run in this process. `study` and its `points`, job by job, where it is one's."""

    directory: Path
    jobs: list[list[str]] | None
    texts: dict[str, Any] = field(default_factory=dict)  # what its jobs have read: a text is read once
    typed: list[str] = field(default_factory=list)  # the command line's overrides, Hydra's own apart
    study: Study | None = None
    points: list[Job] = field(default_factory=list)
    ran: dict[int, tuple[Path, dict[str, Any]]] = field(default_factory=dict)


class Remember(Callback):
    """Hydra tells it when a sweep starts. `sweep` is None in a single run, and in a process that another one started."""

    sweep: ClassVar[Sweep | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        jobs, sweeper = None, get_class(config.hydra.sweeper._target_)
        words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        parsed = OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
        directory, typed = Path(config.hydra.sweep.dir), list(config.hydra.overrides.task)
        if config.study is not None:
            with suppress(ValueError):  # Hydra makes a warning of what a callback raises: the sweeper says it
                study = Study.of(config)
                points = study.jobs(parsed)
                Remember.sweep = Sweep(directory, [job.words for job in points], study=study, points=points, typed=typed)
            return
        if hasattr(sweeper, "split_arguments"):  # Hydra's basic sweeper, and what inherits from it
            (jobs,) = sweeper.split_arguments(parsed, max_batch_size=None)
        Remember.sweep = Sweep(directory, jobs)
