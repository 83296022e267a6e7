"""`resume=DIR`: DIR's own overrides first, the command line's after them, in DIR, and only what leaves its numbers alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.older import completed
from stability.whole import document, replace

# what changes how a run is watched or when it is given up, not what it computes
FREE = {"resume", "resume_force", "name", "log_every", "val_every", "save_every", "patience", "workers"}
FREE |= {"allow_unstable", "logger", "probe_every", "picture", "profile", "model.checkpointing"}
# the machinery: another sums in another order, so that the numbers agree but for rounding; taken, and noted
MACHINERY = {"devices", "num_nodes", "compile", "trainer"}
# judged by the learning rates of the steps already taken: a run with a schedule that does not look at its end can go on
BY_EFFECT = {"steps", "schedule"}
# what the optimizer's state in a checkpoint hangs on: not even force can give it to another
STATE = {"optimizer", "optimizer.update", "optimizer.momentum", "scaling"}


class Schedule(Protocol):
    def factor(self, step: int, steps: int) -> float: ...


@dataclass(frozen=True)
class Before:
    """What a run directory says of the run that it holds; empty for a new one. `asked` is the config that it is resumed
    with, `changed` the keys in which that differs and its numbers with it."""

    directory: Path
    asked: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    @property
    def threads(self) -> int | None:
        """Of each process, where it is to have as many again."""
        return None if {"devices", "num_nodes"} & {*self.changed} else self.environment.get("threads")

    @property
    def done(self) -> int:
        """The steps that were taken when it was last judged; 0 where it was killed before."""
        return int(self.summary.get("steps_done") or 0)

    def check_text(self, now: str) -> None:
        """ValueError where the text is no longer the one that the run saw; `now` is its hash."""
        then = _at(self.environment, "corpus.hash") or now
        if then != now and not self.asked["resume_force"]:
            raise self.refuse(
                f"the text has changed since (its hash is {now}, the run's {then}): put the old text back, "
                "say resume_force=true"
            )

    def check_record(self, done: int, lost: list[int]) -> None:
        """ValueError where the checkpoint's `done` steps are more than are asked for, or their record lacks some."""
        if done > self.asked["steps"]:
            raise self.refuse(f"{done} steps are done, and steps={self.asked['steps']}: ask for more")
        if lost and not self.asked["resume_force"]:
            raise self.refuse(
                f"metrics.jsonl lacks {len(lost)} of the {done} steps done (the first is {lost[0]}): put it back, move "
                "checkpoints/ away to start again from step 0, say resume_force=true to go on with the gap"
            )

    def check_schedule(self, then: Schedule, now: Schedule, done: int) -> None:
        """ValueError where the `done` steps that a run has taken would have had other learning rates, had it been started
        with the schedule and the steps that it is resumed with."""
        if self.asked.get("resume_force"):
            return
        for step in range(1, done + 1):
            was, would_be = then.factor(step, self.config["steps"]), now.factor(step, self.asked["steps"])
            if was != would_be:
                keys = ", ".join(key for key in self.changed if key.partition(".")[0] in BY_EFFECT)
                raise self.refuse(
                    f"{keys} would have given step {step} {would_be:g} times the learning rate in place "
                    f"of {was:g}: more steps can follow under schedule=constant, or before the decay of schedule=wsd, with "
                    "schedule.warmup as a number of steps; otherwise say resume_force=true"
                )

    def goes_on(self, now: dict[str, Any], step: int) -> tuple[dict[str, Any], list[str]]:
        """(The run's `environment.json` from `step` on, what is to be said): `now` is the environment of this process."""
        if not self.environment:
            return now, []
        pairs = {
            name: (_at(self.environment, path), _at(now, path))
            for name, path in {"torch": "versions.torch", "device": "device", "text": "corpus.hash"}.items()
        }
        pairs |= {key: (_choice(_at(self.config, key)), _choice(_at(self.asked, key))) for key in self.changed}
        differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if not differ:
            return self.environment, []
        notes = [
            f"resumed: {name} was {then}, is {new} from step {step + 1} on" for name, (then, new) in differ.items()
        ]
        change = {"after_step": step} | {name: {"was": then, "is": new} for name, (then, new) in differ.items()}
        kept = {
            "run": self.environment.get("run", now["run"]),
            "changed": [*self.environment.get("changed", []), change],
        }
        return now | kept, notes

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"resume={self.directory}: {why}, or start a new run")


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """The sole right to write into a run directory: a lock of the kernel on its file `.lock`, which ends with the process,
    however that ends. Where the file system has no locks, nobody is kept out.

    Raises ValueError where another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock", timeout=0, fallback_to_soft=False)
    with suppress(OSError, NotImplementedError):
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"{directory}: another process runs there: wait for its end, or hydra.run.dir=... goes elsewhere"
            ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            if not any(path.name != ".lock" for path in directory.iterdir()):  # refused: nothing stays behind
                (directory / ".lock").unlink()
                directory.rmdir()
        lock.release()


def as_overrides(words: list[str]) -> list[str]:
    """The command line, options first, as it is, or, where it says `resume=DIR`, with what DIR was started with before it:
    less what the command line says anew, and less an axis's own keys where it chooses the axis anew.

    Raises ValueError where DIR is no run directory.
    """
    options, words = _options_first(words)
    given = {_key(word): word for word in words}
    if given.get("resume", "resume=null") == "resume=null":
        return [*options, *words]
    if {"-m", "--multirun"} & set(options):
        raise ValueError(
            "resume= continues one run; a sweep is continued by its own command, with hydra.sweep.dir= where it is"
        )
    if "hydra.run.dir" in given:
        raise ValueError("resume=DIR goes on in DIR: leave hydra.run.dir out")
    places = [Path(text).expanduser() for text in _readings(given["resume"])]
    directory = next((place for place in places if (place / "overrides.yaml").is_file()), None)
    if directory is None:
        raise ValueError(f"resume={places[0]}: no run to continue there (overrides.yaml is missing)")
    before = [
        word
        for word in _stored(directory / "overrides.yaml", list)
        if _key(str(word)) not in given and _key(str(word)).partition(".")[0] not in given
    ]
    after = [word for word in words if _key(word) != "resume"]
    return [*options, *map(str, before), *after, f"resume={quoted(directory)}", f"hydra.run.dir={quoted(directory)}"]


def quoted(directory: Path) -> str:
    """As the value of an override: it may hold = or a comma."""
    return QuotedString(str(directory), Quote.single).with_quotes()


def _options_first(words: list[str]) -> tuple[list[str], list[str]]:
    """(-m, --cfg job and the like, the overrides): argparse takes them only in this order."""
    options: list[str] = []
    overrides: list[str] = []
    before = ""
    for word in words:
        argument = before.startswith("-") and "=" not in word and not word.startswith("~")
        (options if word.startswith("-") or argument else overrides).append(word)
        before = word
    return options, overrides


def _readings(word: str) -> list[str]:
    """The value of an override as it stands and, where Hydra can read it (not a path that holds = or ,), as it reads it."""
    readings = [word.partition("=")[2]]
    with suppress(HydraException):
        readings.append(str(OverridesParser.create().parse_override(word).value()))
    return readings


def _stored(path: Path, kind: type) -> Any:
    """The content of a run's JSON or YAML file; an empty `kind` where it is missing, since a run can be killed before it
    is written. ValueError, one line, where it is damaged."""
    try:
        if not path.is_file():
            return kind()
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        else:  # OmegaConf's own YAML, which reads 1e-05 as the number that it was
            content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:100]}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} is damaged: it holds no {'list' if kind is list else 'mapping'}")
    return content


def machinery(plain: dict[str, Any], axes: dict[str, str]) -> dict[str, Any]:
    """What a run's environment says of how it is computed."""
    return {key: axes[key] if key in axes else plain[key] for key in ("devices", "num_nodes", "trainer")}


def lay_down(directory: Path, plain: dict[str, Any], words: list[str], more: dict[str, Any]) -> None:
    """What a run starts with. The overrides, which `resume=` looks for, come last: once they are there, all is."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in more.items():
        replace(directory / name, content if isinstance(content, str) else document(content))
    settled = plain | {"resume": None, "resume_force": False}
    replace(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(settled)))
    replace(directory / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(without_resume(words))))


def without_resume(words: list[str]) -> list[str]:
    """The words that a run is to be started with again."""
    return [word for word in words if _key(word) not in ("resume", "resume_force")]


def recorded(plain: dict[str, Any], directory: Path) -> Before:
    """The run that `directory` holds, if the config resumes it.

    Raises ValueError where a new run would write into another's directory, and where a resumed run's config differs in
    anything that changes its numbers, unless it says `resume_force=true`.
    """
    if plain["resume"] is None:
        if (directory / "metrics.jsonl").exists():
            raise ValueError(
                f"{directory} already holds a run: resume={directory} continues it, hydra.run.dir=... goes elsewhere"
            )
        return Before(directory)
    config, environment, summary = (
        _stored(directory / name, dict) for name in ("config.yaml", "environment.json", "summary.json")
    )
    if not config:
        raise ValueError(f"resume={directory}: no run to continue there (config.yaml is missing or empty)")
    config = completed(config, plain)
    changed = sorted({key.removesuffix("._target_") for key in _differing(config, plain)})
    changed = [key for key in changed if FREE.isdisjoint((key, key.partition(".")[0]))]
    before = Before(directory, plain, config, environment, summary, tuple(changed))
    before.check_record(before.done, [])
    if fixed := [key for key in changed if key in STATE]:
        raise before.refuse(
            f"{', '.join(fixed)} differ from the run's own config, and with them what the optimizer keeps: leave them out"
        )
    at_once = [key for key in changed if key.partition(".")[0] not in BY_EFFECT | MACHINERY]
    if at_once and not plain["resume_force"]:
        raise before.refuse(
            f"{', '.join(at_once)} differ from the run's own config, which would change its numbers: leave them out, "
            "say resume_force=true"
        )
    return before


def _differing(a: Any, b: Any, key: str = "") -> set[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        inner = f"{key}." if key else ""
        return set().union(*(_differing(a.get(k), b.get(k), f"{inner}{k}") for k in {*a, *b}))
    return set() if a == b else {key}


def _at(node: Any, path: str) -> Any:
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _choice(value: Any) -> Any:
    """Of an axis, the class that was chosen."""
    return value.get("_target_", value) if isinstance(value, dict) else value


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
