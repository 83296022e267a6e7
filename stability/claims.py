"""A claim is data: what a paper says, which runs of a study show it, the number that is read of them and what it must be.

    number = take_along( compare( observe(run of `of`), observe(run of `against`) ) )

It holds when every resulting number is as expected (`stability.judging`). Here it is written and checked, before anything
runs: whatever names nothing in the study is a ValueError of one line, with the full key.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stability.observables import OBSERVABLES, nearest
from stability.sweep import JUDGED
from stability.takes import OF_NUMBERS, TAKES

KEY = "study.claims"
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
KNOB = ConfigDict(strict=True, allow_inf_nan=False)
Selection = dict[str, Any]  # `arm` or a param -> one value, or a list of them


class Expect(BaseModel):
    """What every number must be: at least min or above `above`, at most max or below `below`, min and max included, the
    other two not; or, of the observable `verdict`, the word `is`."""

    model_config = STRICT
    min: float | None = None
    above: float | None = None
    max: float | None = None
    below: float | None = None
    is_: str | None = Field(None, alias="is")

    def holds(self, found: float | str) -> bool:
        if isinstance(found, str):
            return found == self.is_
        inside = (self.min is None or self.min <= found) and (self.max is None or found <= self.max)
        return inside and (self.above is None or self.above < found) and (self.below is None or found < self.below)


class Claim(BaseModel):
    """One claim of a study.

    of: the runs, by arm and param; what it does not name may be anything.
    observe, knobs: a function of one run in `stability.observables`, and its keyword arguments.
    against, compare: the same of other runs, and how the two make one number: of / against, or of - against. Each run is
        paired with those that have its arm, unless `against` names arms, and its value of each param of which
        `against` does not name one value.
    seeds: `mean` makes one number of those that differ in `seed` alone; after the pairing.
    along, take: a param and a function (`stability.takes`) of the numbers of the runs that differ in it alone, in the order
        of its values: all that the study has, or those that `of` names.
    take_first: take along the param before comparing, where the two do not commute: the learning rate sensitivity of one
        arm less that of another is not the sensitivity of their difference.
    scales: where it is judged; None for everywhere.
    tolerance: where the bound of `expect` comes from: the paper's, or measured, and then on what.
    """

    model_config = STRICT
    says: str = Field(min_length=1)
    source: str = Field(min_length=1)
    of: Selection
    observe: str
    knobs: dict[str, Any] = {}
    against: Selection | None = None
    compare: Literal["ratio", "difference"] | None = None
    seeds: Literal["each", "mean"] = "each"
    along: str | None = None
    take: str | None = None
    take_first: bool = False
    expect: Expect
    scales: list[str] | None = Field(None, min_length=1)
    note: str = ""
    tolerance: str = ""


def parse(
    raw: Any, *, arms: Iterable[str], params: Mapping[str, Sequence[Any]], scales: Iterable[str]
) -> dict[str, Claim]:
    """The claims of a study, by name. `params`: the study's, each with the values that it has at any of its `scales`.

    Raises ValueError, one line, for the first that does not fit.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{KEY} is no mapping of names to claims")
    arms, scales = list(arms), list(scales)
    return {str(name): _claim(f"{KEY}.{name}", said, arms, params, scales) for name, said in raw.items()}


def expected(claim: Claim) -> str:
    """What the claim expects, in words: `<= 1.8`, `> 0`, `0.3 to 0.5`, `stalled`."""
    expect = claim.expect
    if expect.is_ is not None:
        return expect.is_
    if expect.min is not None and expect.max is not None:
        return f"{expect.min:g}" if expect.min == expect.max else f"{expect.min:g} to {expect.max:g}"
    sides = ((">=", expect.min), (">", expect.above), ("<=", expect.max), ("<", expect.below))
    return " and ".join(f"{sign} {bound:g}" for sign, bound in sides if bound is not None)


def fixed(selection: Selection) -> set[str]:
    """What a selection leaves no choice of, so that no pairing can go by it: a param of one value, and the arms."""
    return {name for name, wanted in selection.items() if name == "arm" or len(listed(wanted)) == 1}


def listed(wanted: Any) -> list[Any]:
    return wanted if isinstance(wanted, list) else [wanted]


def same(a: Any, b: Any) -> bool:
    """Whether two values of a param are the same: 1e-3 is 0.001 and 1 is 1.0, but true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


# -------------------------------------------------------------------------------------------------------------- the check


def _claim(key: str, said: Any, arms: list[str], params: Mapping[str, Sequence[Any]], scales: list[str]) -> Claim:
    if not isinstance(said, dict):
        raise ValueError(f"{key}={said!r} is no mapping; its keys: {', '.join(Claim.model_fields)}")
    try:
        claim = Claim.model_validate(said)
    except ValidationError as error:
        raise ValueError(_worded(key, error)) from None
    _known(f"{key}.observe", claim.observe, OBSERVABLES)
    _knobs(key, claim)
    _selection(f"{key}.of", claim.of, arms, params)
    for scale in claim.scales or ():
        _known(f"{key}.scales", scale, scales)
    _expect(key, claim)
    _pairs(key, claim, arms, params)
    _axis(key, claim, params)
    return claim


def _knobs(key: str, claim: Claim) -> None:
    """The knobs against the signature of the observable."""
    parameters = dict(inspect.signature(OBSERVABLES[claim.observe]).parameters)
    parameters.pop("run")
    for name, value in claim.knobs.items():
        if name not in parameters:
            hint = nearest(name, parameters) if parameters else "it has none"
            raise ValueError(f"{key}.knobs.{name} is no knob of {claim.observe}; {hint}")
        try:
            TypeAdapter(parameters[name].annotation, config=KNOB).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key}.knobs.{name}={value!r} {_said(error.errors()[0])}") from None
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in claim.knobs:
            raise ValueError(f"{key}.knobs.{name} is missing: {claim.observe} needs it")


def _selection(key: str, selection: Selection, arms: list[str], params: Mapping[str, Sequence[Any]]) -> None:
    known = {"arm": arms, **params}
    for name, wanted in selection.items():
        if name not in known:
            raise ValueError(f"{key}.{name} is no param of the study; {nearest(str(name), known)}")
        if not listed(wanted):
            raise ValueError(f"{key}.{name} is empty: name a value, or leave it out for all")
        for value in listed(wanted):
            if not any(same(value, there) for there in known[name]):
                hint = nearest(str(value), map(str, known[name])) if isinstance(value, str) else None
                hint = hint or f"known: {', '.join(map(str, known[name]))}"
                raise ValueError(f"{key}.{name}={value!r} is in no run of the study; {hint}")


def _expect(key: str, claim: Claim) -> None:
    given, text = claim.expect.model_dump(by_alias=True, exclude_none=True), claim.observe == "verdict"
    if not given:
        raise ValueError(f"{key}.expect is empty: give {'is' if text else 'min or above, max or below'}")
    if text and [*given] != ["is"]:
        raise ValueError(f"{key}.expect: a verdict is a word: give `is`, and nothing else")
    if text:
        _known(f"{key}.expect.is", given["is"], sorted(JUDGED))
    elif "is" in given:
        raise ValueError(
            f"{key}.expect.is={given['is']!r}: {claim.observe} is a number: give min or above, max or below"
        )
    for one, other in (("min", "above"), ("max", "below")):
        if one in given and other in given:
            raise ValueError(f"{key}.expect has both {one} and {other}: give one of them")
    low, high = (next((name for name in pair if name in given), None) for pair in (("min", "above"), ("max", "below")))
    if low and high and not (given[low] < given[high] or (given[low] == given[high] and (low, high) == ("min", "max"))):
        raise ValueError(f"{key}.expect.{low}={given[low]:g} and {high}={given[high]:g}: no number is both")
    if text and (claim.against is not None or claim.along or claim.seeds == "mean"):
        raise ValueError(f"{key}.observe=verdict is a word: it takes no against, along or seeds=mean")


def _pairs(key: str, claim: Claim, arms: list[str], params: Mapping[str, Sequence[Any]]) -> None:
    if (claim.against is None) != (claim.compare is None):
        lacks, there = ("compare", "against") if claim.compare is None else ("against", "compare")
        raise ValueError(f"{key}.{lacks} is missing: {there} needs it")
    if claim.against is not None:
        _selection(f"{key}.against", claim.against, arms, params)
        if not fixed(claim.against):
            raise ValueError(f"{key}.against pairs each run with itself: name an arm, or one value of a param")


def _axis(key: str, claim: Claim, params: Mapping[str, Sequence[Any]]) -> None:
    if claim.seeds == "mean" and "seed" not in params:
        raise ValueError(f"{key}.seeds=mean: the study has no param seed")
    if (claim.along is None) != (claim.take is None):
        lacks, there = ("take", "along") if claim.take is None else ("along", "take")
        raise ValueError(f"{key}.{lacks} is missing: {there} needs it")
    if claim.take_first and (claim.against is None or claim.along is None):
        raise ValueError(f"{key}.take_first=true needs against and along: it says which comes first")
    if claim.along is None or claim.take is None:
        return
    _known(f"{key}.along", claim.along, params)
    _known(f"{key}.take", claim.take, TAKES)
    if claim.seeds == "mean" and claim.along == "seed":
        raise ValueError(f"{key}.along=seed: seeds=mean leaves one number; leave it out")
    sides = {"of": claim.of} | ({"against": claim.against or {}} if claim.take_first else {})
    for side, selection in sides.items():
        if claim.along in fixed(selection):
            raise ValueError(f"{key}.{side}.{claim.along} is one value: along={claim.along} needs several")
    texts = [value for value in params[claim.along] if isinstance(value, bool) or not isinstance(value, int | float)]
    if claim.take in OF_NUMBERS and texts:
        raise ValueError(f"{key}.take={claim.take} needs numbers: {claim.along} has {texts[0]!r}")


def _known(key: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        raise ValueError(f"{key}={name!r} is not known; {nearest(name, known)}")


def _worded(key: str, error: ValidationError) -> str:
    """Of several faults the key that does not exist: it is the reason why another is missing."""
    first = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0]
    where = ".".join(map(str, [key, *first["loc"]]))
    if first["type"] == "extra_forbidden":
        of = Expect if len(first["loc"]) > 1 else Claim
        names = [field.alias or name for name, field in of.model_fields.items()]
        return f"{where} is no key of a claim; {nearest(str(first['loc'][-1]), names)}"
    return f"{where} is missing" if first["type"] == "missing" else f"{where}={first['input']!r} {_said(first)}"


def _said(error: Any) -> str:
    return str(error["msg"]).removeprefix("Input ").removeprefix("Value error, ")
