"""A study: a question, and the runs that answer it: its arms crossed with its params. `conf/study/*.yaml` are its choices."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from conf.check import nearest

PARSER = OverridesParser.create()
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
NO_WORD = {  # keys that no word of a study's file may set, and why
    "study": "a study does not hold another",
    "hydra": "a study says itself how its runs are started",
    "resume": "the same command goes on with a study",
}

Value = bool | int | float | str | None
Values = Annotated[list[Value], Field(min_length=1)]
Words = Annotated[list[str], BeforeValidator(lambda given: [] if given is None else given)]


@dataclass(frozen=True)
class Job:
    """One run: `arm` and `params` say which, `words` are its overrides, `name` is its directory below the study's."""

    arm: str
    params: dict[str, Value]
    words: Words

    @property
    def name(self) -> str:
        parts = [self.arm, *(f"{key.rpartition('.')[2]}={value}" for key, value in self.params.items())]
        return re.sub(r"[^\w.=+-]+", "-", "_".join(parts))


def _said(given: Any) -> Any:
    """What stands in a file without a value (`laptop:`) is not said."""
    if isinstance(given, dict):
        return {key: value for key, value in given.items() if value is not None}
    return {} if given is None else given


class Scale(BaseModel):
    """A size at which a study is run: words for all its jobs, and params beside those of the study."""

    model_config = STRICT
    words: Words = []
    params: dict[str, Values] = {}

    _null = model_validator(mode="before")(_said)


class Study(BaseModel):
    """What a file in `conf/study` may say. A job's words are, the later winning: those of `base`, `common[scale]`, `words`,
    `scales[scale].words`, one value of each of the params, the arm's, the command line's. `_base` fills `common` for the
    scales laptop, gpu and long: at a scale of another name each run is an ordinary one, with W&B, picture and checkpoints,
    of the size that `words` say.

    `only`: arm -> param -> the values that it is run at, where those are fewer than the study's; other values that are
    typed for the param, the arm is not run at. `draw`: of the runs those that the picture shows, as param -> value or
    values, `arm` among them.
    """

    model_config = STRICT
    question: str
    arms: dict[str, Words] = Field(min_length=1)
    words: Words = []
    params: dict[str, Values] = {}
    scale: str
    scales: dict[str, Scale] = Field(min_length=1)
    base: Words = []
    common: dict[str, Words] = {}
    only: dict[str, dict[str, Values]] = {}
    claims: dict[str, Any] = {}
    draw: dict[str, Any] = {}

    _null = model_validator(mode="before")(_said)

    @classmethod
    def of(cls, config: DictConfig) -> "Study":
        """ValueError, one line, for a study that does not fit its schema, or whose parts do not fit each other."""
        try:
            study = cls.model_validate(OmegaConf.to_container(config.study, resolve=True))
        except ValidationError as error:
            raise ValueError(_worded(error)) from None
        if study.scale not in study.scales:
            raise ValueError(f"study.scale={study.scale}: this study knows {', '.join(study.scales)}")
        params = study.everywhere()
        for key in params:
            if _key(_parsed(f"study.params: {key!r}", f"{key}=0")) != key:
                raise ValueError(f"study.params: {key!r} is no key: leave out what stands before or behind it")
        for where, word in study._written():
            key = _key(_parsed(where, word))
            if where.startswith("study.arms.") and key in params:
                raise ValueError(f"{where} sets {key}, a param of this study: leave it out of one of the two")
        for arm, keys in study.only.items():
            _known(f"study.only.{arm}", arm, study.arms)
            for key, values in keys.items():
                _listed(f"study.only.{arm}.{key}", key, values, params)
        for key, values in study.draw.items():
            _listed(f"study.draw.{key}", key, values, {"arm": [*study.arms], **params})
        return study

    def values(self) -> dict[str, list[Value]]:
        """The params at this scale, each with its values."""
        return self.params | self.scales[self.scale].params

    def everywhere(self) -> dict[str, list[Value]]:
        """The params, each with the values that it has at any scale: what a claim may name."""
        known: dict[str, list[Value]] = {}
        for params in (self.params, *(scale.params for scale in self.scales.values())):
            for key, values in params.items():
                had = known.get(key, [])
                known[key] = [*had, *(value for value in values if not _within(value, had))]
        return known

    def jobs(self, typed: Sequence[Override]) -> list[Job]:
        """The runs, the last param varying fastest but for the arms. What is `typed` on the command line goes to every run: a
        key that is a param takes the place of its values (several, as `0,1` or `[0,1]`), one with several values (`0,1`)
        becomes a param, and one that tells the arms apart is a ValueError."""
        params, spelled, last = self.values(), dict[str, str](), list[Override]()
        common = [*self.base, *self.common.get(self.scale, []), *self.words, *self.scales[self.scale].words]
        words = [PARSER.parse_override(word) for word in common]
        arms = {arm: [PARSER.parse_override(word) for word in own] for arm, own in self.arms.items()}
        told = {_key(override) for own in arms.values() for override in own}
        for override in typed:
            key = _key(override)
            if _root(key) in ("study", "hydra"):
                continue
            if override.is_delete():
                raise ValueError(f"{override.input_line}: a study sets keys and deletes none")
            if key in told:
                raise ValueError(f"{key} is set by the arms of this study ({', '.join(self.arms)}): leave it out")
            if override.is_sweep_override() or key in params:
                params[key], spelled[key] = _values(override), override.get_key_element()
            else:
                last.append(override)
        jobs = []
        for chosen in itertools.product(*params.values()):
            point = dict(zip(params, chosen, strict=True))
            axes = [_word(spelled.get(key, key), value) for key, value in point.items()]
            for arm, own in arms.items():
                if not all(_within(point[key], only) for key, only in self.only.get(arm, {}).items() if key in point):
                    continue
                kept = {_key(override): _text(override) for override in [*words, *axes, *own, *last]}
                jobs.append(Job(arm, point, list(kept.values())))
        if not jobs:
            raise ValueError(f"study.only leaves no run at scale {self.scale}: give its params values that it names")
        if len({job.name for job in jobs}) < len(jobs):
            raise ValueError(
                "two runs of this study have the same name: its params need values that differ in letters or digits"
            )
        return jobs

    def _written(self) -> Iterator[tuple[str, str]]:
        """Each word of the file, behind the key under which it stands."""
        lists = {"base": self.base, "words": self.words}
        lists |= {f"common.{name}": words for name, words in self.common.items()}
        lists |= {f"scales.{name}.words": scale.words for name, scale in self.scales.items()}
        lists |= {f"arms.{name}": words for name, words in self.arms.items()}
        for name, words in lists.items():
            for place, word in enumerate(words):
                yield f"study.{name}[{place}]={word!r}", word


def _worded(error: ValidationError) -> str:
    """The first thing that pydantic found, with its key and its value."""
    first = error.errors()[0]
    loc, kind = first["loc"], first["type"]
    if loc[-1] == "[key]":
        return f"{'.'.join(map(str, ['study', *loc[:-1]]))}: a name is text, as '{loc[-2]}' is"
    names = [str(part) for part in itertools.takewhile(lambda part: isinstance(part, str), loc)]
    key = ".".join(["study", *names]) + "".join(f"[{place}]" for place in loc[len(names) : len(names) + 1])
    if len(loc) > len(names) + 1:  # behind a place in a list stands a member of the union
        return f"{key}={first['input']!r} is no number, text, true, false or null"
    if kind == "missing":
        return f"{key} is missing"
    if kind == "too_short":
        return f"{key} is empty: it needs one at least"
    if kind == "extra_forbidden":
        fields = Scale.model_fields if len(names) == 3 else Study.model_fields
        return f"{key} is no key of a study; {nearest(names[-1], fields)}"
    return f"{key}={first['input']!r} {first['msg'].removeprefix('Input ')}"


def _parsed(where: str, word: str) -> Override:
    """A word of a study's file; ValueError, one line that begins with `where`, for one that no run could take."""
    try:
        override = PARSER.parse_override(word)
    except HydraException:
        raise ValueError(f"{where} cannot be read as KEY=VALUE") from None
    if override.is_delete():
        raise ValueError(f"{where}: a study sets keys and deletes none")
    if override.is_sweep_override():
        raise ValueError(f"{where} names several values: those stand under params")
    if why := NO_WORD.get(_root(_key(override))):
        raise ValueError(f"{where}: {why}")
    return override


def _key(override: Override) -> str:
    """Without the `+` or `++` before it."""
    return override.get_key_element().lstrip("+~")


def _root(key: str) -> str:
    return re.split(r"[./@]", key)[0]


def _text(override: Override) -> str:
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _known(where: str, name: str, known: Sequence[str] | dict[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{where} names nothing in this study; {nearest(name, known)}")


def _listed(where: str, key: str, wanted: Any, known: dict[str, list[Value]]) -> None:
    """ValueError for a key or a value that is not `known`: it would choose nothing, and silently."""
    _known(where, key, known)
    for value in wanted if isinstance(wanted, list) else [wanted]:
        if not _within(value, known[key]):
            raise ValueError(f"{where}={value!r} is none of {', '.join(map(str, known[key]))}")


def _within(value: Any, values: Sequence[Value]) -> bool:
    """1 is 1.0, and true is not 1."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)


def _values(override: Override) -> list[Value]:
    """What is typed for a param."""
    if not override.is_sweep_override():
        value: Any = override.value()
        found = value if isinstance(value, list) else [value]
    elif not override.is_discrete_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise ValueError(f"{override.input_line}: a study takes lists of values, not intervals or patterns")
    else:
        found = [PARSER.parse_override(f"x={text}").value() for text in override.sweep_string_iterator()]
    if not found or any(isinstance(value, list | dict) for value in found):
        raise ValueError(f"{override.input_line}: a param takes single values, as in {_key(override)}=1,2")
    return found


def _word(key: str, value: Value) -> Override:
    """`key=value`, in quotes where a text would else be read as something else."""
    text = (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )
    try:
        word = PARSER.parse_override(f"{key}={text}")
        if not isinstance(value, str) or word.value() == value:
            return word
    except HydraException:
        pass
    return PARSER.parse_override(f"{key}={QuotedString(text, Quote.single).with_quotes()}")
