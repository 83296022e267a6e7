"""What a sweep was asked for: its directory and the overrides of each of its jobs, known before the first one starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig


@dataclass(frozen=True)
class Sweep:
    """`jobs[i]`: the words of job i; None where the sweeper makes them up as it goes (Optuna). `ran[i]`: the directory and
    the summary of job i, once it has run in this process."""

    directory: Path
    jobs: list[list[str]] | None
    ran: dict[int, tuple[Path, dict[str, Any]]] = field(default_factory=dict)


class Remember(Callback):
    """Hydra tells it when a sweep starts. `sweep` is None in a single run, and in a process that another one started."""

    sweep: ClassVar[Sweep | None] = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        jobs, sweeper = None, get_class(config.hydra.sweeper._target_)
        if hasattr(sweeper, "split_arguments"):  # Hydra's basic sweeper, and what inherits from it
            words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
            parsed = OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
            (jobs,) = sweeper.split_arguments(parsed, max_batch_size=None)
        Remember.sweep = Sweep(Path(config.hydra.sweep.dir), jobs)
