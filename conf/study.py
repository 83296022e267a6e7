"""A study: a question, and the runs that answer it: its arms crossed with its params. `conf/study/*.yaml` are its choices."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conf.check import nearest

Value = bool | int | float | str | None
Words = list[str]


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


class Scale(BaseModel):
    """A size at which a study is run: words for all its jobs, and params beside those of the study."""

    model_config = ConfigDict(strict=True, extra="forbid")
    words: Words = []
    params: dict[str, list[Value]] = {}


class Study(BaseModel):
    """What a file in `conf/study` may say. A job's words are, the later winning: those of `base`, `common[scale]`, `words`,
    `scales[scale].words`, one value of each of the params, the arm's, the command line's.

    `only`: arm -> param -> the values that it is run at, where those are fewer than the study's. `draw`: of the runs those
    that the picture shows, as param -> value or values, `arm` among them.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    question: str
    arms: dict[str, Words] = Field(min_length=1)
    words: Words = []
    params: dict[str, list[Value]] = {}
    scale: str
    scales: dict[str, Scale] = Field(min_length=1)
    base: Words = []
    common: dict[str, Words] = {}
    only: dict[str, dict[str, list[Value]]] = {}
    claims: dict[str, Any] = {}
    draw: dict[str, Any] = {}

    @classmethod
    def of(cls, config: DictConfig) -> "Study":
        """ValueError, one line, for a study that does not fit its schema."""
        try:
            study = cls.model_validate(OmegaConf.to_container(config.study, resolve=True))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, ["study", *first["loc"]]))
            if first["type"] == "extra_forbidden":
                fields = Scale.model_fields if "scales" in first["loc"] else cls.model_fields
                raise ValueError(f"{key} is no key of a study; {nearest(str(first['loc'][-1]), fields)}") from None
            raise ValueError(f"{key}: {first['msg']}") from None
        if study.scale not in study.scales:
            raise ValueError(f"study.scale={study.scale}: this study knows {', '.join(study.scales)}")
        params = study.everywhere()
        named = [("draw", key, ["arm", *params]) for key in study.draw] + [
            ("only", arm, [*study.arms]) for arm in study.only
        ]
        named += [(f"only.{arm}", key, [*params]) for arm, keys in study.only.items() for key in keys]
        for where, name, known in named:
            if name not in known:
                raise ValueError(f"study.{where}.{name} names nothing in this study; {nearest(name, known)}")
        return study

    def values(self) -> dict[str, list[Value]]:
        """The params at this scale, each with its values."""
        return self.params | self.scales[self.scale].params

    def everywhere(self) -> dict[str, list[Value]]:
        """The params, each with the values that it has at any scale: what a claim may name."""
        known: dict[str, list[Value]] = {}
        for params in (self.params, *(scale.params for scale in self.scales.values())):
            for key, values in params.items():
                known[key] = [*known.get(key, []), *(value for value in values if value not in known.get(key, []))]
        return known

    def jobs(self, typed: Sequence[Override]) -> list[Job]:
        """The runs, the last param varying fastest but for the arms. What is `typed` on the command line goes to every run: a
        key that is a param takes the place of its values (a list of them too), and one that tells the arms apart is
        a ValueError."""
        parser = OverridesParser.create()
        params, common = self.values(), self.common.get(self.scale, [])
        words = [*self.base, *common, *self.words, *self.scales[self.scale].words]
        told = {_key(parser, word) for arm in self.arms.values() for word in arm}
        last: list[Override] = []
        for override in typed:
            key = override.get_key_element()
            if key.split(".")[0] in ("study", "hydra"):
                continue
            if key in told:
                raise ValueError(f"{key} is set by the arms of this study ({', '.join(self.arms)}): leave it out")
            if override.is_sweep_override() or key in params:
                params[key] = _values(parser, override)
            else:
                last.append(override)
        jobs = []
        for chosen in itertools.product(*params.values()):
            point = dict(zip(params, chosen, strict=True))
            axes = [f"{key}={_text(value)}" for key, value in point.items()]
            for arm, own in self.arms.items():
                if any(point[key] not in values for key, values in self.only.get(arm, {}).items() if key in point):
                    continue
                parsed = [*parser.parse_overrides([*words, *axes, *own]), *last]
                kept = {o.get_key_element(): f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in parsed}
                jobs.append(Job(arm, point, list(kept.values())))
        if len({job.name for job in jobs}) < len(jobs):
            raise ValueError(
                "two runs of this study have the same name: its params need values that differ in letters or digits"
            )
        return jobs


def _key(parser: OverridesParser, word: str) -> str:
    return parser.parse_override(word).get_key_element()


def _values(parser: OverridesParser, override: Override) -> list[Value]:
    if not override.is_sweep_override():
        return [override.value()]  # type: ignore[list-item]
    if not override.is_discrete_sweep():
        raise ValueError(f"{override.input_line}: a study takes lists of values, not intervals")
    key = override.get_key_element()
    return [parser.parse_override(f"{key}={text}").value() for text in override.sweep_string_iterator()]  # type: ignore[misc]


def _text(value: Value) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)  # null, true, 0.001
