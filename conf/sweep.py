"""What a sweep was asked for, its directory and the overrides of each of its jobs, known before the first one starts; and the
log of a job."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig


@dataclass(frozen=True)
class Sweep:
    """`jobs[i]`: the words of job i; None where the sweeper makes them up as it goes (Optuna)."""

    directory: Path
    jobs: list[list[str]] | None


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


@contextmanager
def logged(path: Path) -> Iterator[TextIO]:
    """What is printed in the block stands in the file too, behind what is there."""
    with path.open("a", encoding="utf-8") as log, redirect_stdout(_Both(sys.stdout, log)):
        yield log


class _Both(io.TextIOBase):
    """A text file that writes into several."""

    def __init__(self, *files: TextIO) -> None:
        self.files = files

    def write(self, text: str) -> int:
        for file in self.files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self.files:
            file.flush()
