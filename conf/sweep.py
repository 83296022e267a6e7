"""What a sweep was asked for: its directory and the overrides of each of its jobs, known before the first one starts."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig

from conf.engines import check_engine
from conf.explain import explain
from conf.help import CONF
from conf.study import NO_WORD, Job, Study
from stability import sweep as jobs

if TYPE_CHECKING:
    from stability.study import Plan

PENALTY = 100.0  # nats, told to a sweeper of a job without a loss; finite, since nan would end the sweep
T = TypeVar("T")
SWEEPER = "hydra_plugins.study_sweeper.StudySweeper"
UNREAD = {  # keys of Hydra's that a study does not look at, and why
    "hydra.sweep.subdir": "a study names the directories of its runs itself: leave it out",
    "hydra.run.dir": "hydra.sweep.dir is the directory of a study",
}


@dataclass(frozen=True)
class Sweep:
    """`jobs[i]`: the words of job i; None where the sweeper makes them up as it goes (Optuna). `study` and its `points`, job by
    job, where it is one's."""

    directory: Path
    jobs: list[list[str]] | None
    typed: list[str] = field(default_factory=list)  # the command line's overrides, Hydra's own apart
    name: str = ""  # of the study
    study: Study | None = None
    points: list[Job] = field(default_factory=list)
    config_dir: str | None = None  # as typed: --config-dir

    @property
    def names(self) -> list[str]:
        return [job.name for job in self.points]

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
            config_dir=self.config_dir,
        )


class Lost(RuntimeError):
    """An engine's own error: some jobs of a sweep have no result."""


class Remember(Callback):
    """Hydra tells it when a sweep starts. `sweep` is None in a single run, and in a process that an engine started.

    It ends the process where what was asked for is no study, or needs a package: before anything is written, and whatever
    the sweeper. `shown`: the jobs' progress is, and they themselves are silent but for their logs. `until_end`: what ends
    with the sweep.

    `texts` and `ran` are what a process keeps from one job of a sweep to the next, be it the one that was asked or a worker of
    an engine: what the jobs have read, since a text is read once; job -> its directory and summary. They are here since an
    engine imports a class, but copies the functions of the program, and each copy would have globals of its own."""

    sweep: ClassVar[Sweep | None] = None
    working: ClassVar[Lock] = (
        Lock()
    )  # held while a job runs in a process of joblib's; Hydra imports a plugin's file twice
    texts: ClassVar[dict[str, Any]] = {}
    ran: ClassVar[dict[int, tuple[Path, dict[str, Any]]]] = {}
    shown: ClassVar[bool] = False
    until_end: ClassVar[ExitStack] = ExitStack()
    _begun: ClassVar[bool] = False

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if config.study is not None:
            _or_refused(lambda: study_of(config))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _or_refused(lambda: check_engine("launcher", config.hydra))
        _or_refused(lambda: check_engine("sweeper", config.hydra))
        if config.study is not None or config.hydra.sweeper._target_ == SWEEPER:
            Remember.sweep = _or_refused(lambda: study_of(config))
        else:
            words, sweeper = None, get_class(config.hydra.sweeper._target_)
            if hasattr(sweeper, "split_arguments"):  # Hydra's basic sweeper, and what inherits from it
                (words,) = sweeper.split_arguments(_typed(config), max_batch_size=None)
            Remember.sweep = Sweep(Path(config.hydra.sweep.dir), words)
        _or_refused(lambda: check_devices(Remember.sweep, _typed(config)))
        # W&B shows the runs of a sweep as one group; its own variable, so that every process that is started has it
        os.environ.setdefault("WANDB_RUN_GROUP", Remember.sweep.directory.name)

    @classmethod
    def begin(cls, *, elsewhere: bool = False) -> None:
        """Before the first job, once all is known to be in order: the list of jobs is written, and their progress shown.
        `elsewhere`: they run in other processes."""
        if cls.sweep is None or cls._begun:
            return
        cls._begun, sweep = True, cls.sweep
        sweep.directory.mkdir(parents=True, exist_ok=True)
        jobs.write(sweep.directory, jobs.rows(sweep.directory, sweep.jobs, {}))
        if elsewhere or sweep.study is not None or sys.stdout.isatty():
            from stability.progress import watching

            cls.shown = True
            cls.until_end.enter_context(watching(sweep.directory, sweep.jobs, sweep.names, ran=cls.ran))


def without_schemas() -> None:
    """Engines bring configs with the names of our files, against which Hydra would hold them: ours are whole."""
    Plugins.instance()  # imports the engines' plugins
    for group, nodes in ConfigStore.instance().repo["hydra"].items():
        for path in CONF.glob(f"hydra/{group}/*.yaml"):
            nodes.pop(path.name, None)


def check_devices(sweep: Sweep | None, typed: list[Any]) -> None:
    """ValueError where a job would have several devices: its other ranks start the same command, and so the whole sweep."""
    assert sweep is not None
    jobs = [[override.input_line for override in typed]] if sweep.jobs is None else sweep.jobs
    for key, _, value in (word.lstrip("+").partition("=") for job in jobs for word in job):
        if key in ("devices", "num_nodes") and value != "1":
            raise ValueError(
                f"{key}={value}: a job of a sweep has one device; run one with several by itself, without -m"
            )


def study_of(config: DictConfig) -> Sweep:
    """The sweep that a study is; ValueError, one line, for what is wrong with it or with the words beside it."""
    from stability.claims import parse

    check_command(config)
    study = Study.of(config)
    parse(study.claims, arms=study.arms, params=study.everywhere(), scales=study.scales)
    points, typed = study.jobs(_typed(config)), list(config.hydra.overrides.task)
    words = [job.words for job in points]
    name = config.hydra.runtime.choices.study
    places = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
    return Sweep(Path(config.hydra.sweep.dir), words, typed, name, study, points, *places)


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


def _or_refused(asked: Callable[[], T]) -> T:
    """What is asked for, or the end of the process: of all that a callback can raise, Hydra makes a warning and goes on, but
    for this."""
    try:
        return asked()
    except (ValueError, HydraException) as error:
        print(f"normlab: {explain(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _typed(config: DictConfig) -> Any:
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    return OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
