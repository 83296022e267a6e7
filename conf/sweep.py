"""What a sweep was asked for: its directory and the overrides of each of its jobs, known before the first one starts."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig

from conf.explain import explain
from conf.study import NO_WORD, Job, Study

if TYPE_CHECKING:
    from stability.study import Plan

SWEEPER = "hydra_plugins.study_sweeper.StudySweeper"
UNREAD = {  # keys of Hydra's that a study does not look at, and why
    "hydra.sweep.subdir": "a study names the directories of its runs itself: leave it out",
    "hydra.run.dir": "hydra.sweep.dir is the directory of a study",
}


@dataclass(frozen=True)
class Sweep:
    """`jobs[i]`: the words of job i; None where the sweeper makes them up as it goes (Optuna). `ran[i]`: the directory and
    the summary of job i, once it has run in this process. `study` and its `points`, job by job, where it is one's."""

    directory: Path
    jobs: list[list[str]] | None
    texts: dict[str, Any] = field(default_factory=dict)  # what its jobs have read: a text is read once
    typed: list[str] = field(default_factory=list)  # the command line's overrides, Hydra's own apart
    name: str = ""  # of the study
    study: Study | None = None
    points: list[Job] = field(default_factory=list)
    ran: dict[int, tuple[Path, dict[str, Any]]] = field(default_factory=dict)

    def plan(self) -> "Plan":
        """The study, for those who read its directory."""
        from stability.study import Plan, Point

        assert self.study
        return Plan(
            study=self.name,
            question=self.study.question,
            scale=self.study.scale,
            words=self.typed,
            arms=list(self.study.arms),
            params=self.study.everywhere(),
            values=self.study.values(),
            scales=list(self.study.scales),
            claims=self.study.claims,
            draw=self.study.draw,
            points=[Point(job.arm, job.params, job.words, job.name) for job in self.points],
        )


class Remember(Callback):
    """Hydra tells it when a sweep starts. `sweep` is None in a single run, and in a process that another one started.

    It ends the process where what was asked for is no study: before anything is written, and whatever the sweeper."""

    sweep: ClassVar[Sweep | None] = None

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if config.study is not None:
            _told(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if config.study is not None or config.hydra.sweeper._target_ == SWEEPER:
            Remember.sweep = _told(config)
            return
        jobs, sweeper = None, get_class(config.hydra.sweeper._target_)
        if hasattr(sweeper, "split_arguments"):  # Hydra's basic sweeper, and what inherits from it
            (jobs,) = sweeper.split_arguments(_typed(config), max_batch_size=None)
        Remember.sweep = Sweep(Path(config.hydra.sweep.dir), jobs)


def study_of(config: DictConfig) -> Sweep:
    """The sweep that a study is; ValueError, one line, for what is wrong with it or with the words beside it."""
    from stability.claims import parse

    check_command(config)
    study = Study.of(config)
    parse(study.claims, arms=study.arms, params=study.everywhere(), scales=study.scales)
    points, typed = study.jobs(_typed(config)), list(config.hydra.overrides.task)
    words = [job.words for job in points]
    name = config.hydra.runtime.choices.study
    return Sweep(Path(config.hydra.sweep.dir), words, typed=typed, name=name, study=study, points=points)


def check_command(config: DictConfig) -> None:
    """ValueError for a study that would not come to its sweeper, or not be the one that was meant."""
    name, typed = config.hydra.runtime.choices.get("study"), list(config.hydra.overrides.hydra)
    if name is None:
        raise ValueError("no study is chosen: study=NAME, as `python train.py --help` lists them")
    if resumed := [word for word in config.hydra.overrides.task if word.startswith("resume=")]:
        raise ValueError(f"{resumed[0]}: {NO_WORD['resume']}")
    for word in typed:
        key = word.partition("=")[0].lstrip("+~")
        if key.startswith(("hydra/sweeper", "hydra.sweeper._target_")) and config.hydra.sweeper._target_ != SWEEPER:
            raise ValueError(f"{word}: a study has a sweeper of its own: leave it out")
        if key in UNREAD:
            raise ValueError(f"{word}: {UNREAD[key]}")
    if config.hydra.sweeper._target_ != SWEEPER:
        raise ValueError(f"study={name}: its file must begin with defaults: [_base, _self_]")
    if config.hydra.mode != RunMode.MULTIRUN:
        raise ValueError("a study is a sweep: leave out hydra.mode")
    _check_names(config)


def _check_names(config: DictConfig) -> None:
    """ValueError where two folders have a study of one name: Hydra takes the first, which is not that of `--config-dir`."""
    seen: dict[str, Path] = {}
    for source in config.hydra.runtime.config_sources:
        if source.schema != "file":
            continue
        for path in sorted(Path(source.path).resolve().glob("study/*.yaml")):
            if (first := seen.setdefault(path.name, path)) != path:
                raise ValueError(f"{path} would not be read: {first} has the same name; give it another")


def _told(config: DictConfig) -> Sweep:
    try:
        return study_of(config)
    except (ValueError, HydraException) as error:
        _refuse(explain(error))


def _refuse(line: str) -> NoReturn:
    """Of all that a callback can raise, Hydra makes a warning and goes on, but for this."""
    print(f"normlab: {line}", file=sys.stderr)
    raise SystemExit(2)


def _typed(config: DictConfig) -> Any:
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    return OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
