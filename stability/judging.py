"""Whether the claims of a study hold, from the records of its runs: judged, shown as a table, written as `claims.json`.

Nothing that a record lacks is an exception: the claim is then undecided, and says which run lacks what.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stability import whole
from stability.claims import Claim, Selection, expected, fixed, listed, same
from stability.label import param
from stability.observables import OBSERVABLES, Recorded, Unread, ratio
from stability.records import Array
from stability.sweep import JUDGED
from stability.takes import TAKES

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["holds", "fails", "undecided", "not judged"]
STYLE = {"holds": "green", "fails": "bold red", "undecided": "yellow", "not judged": "dim"}
TOLD = 3  # reasons that are said of a claim, before the rest is counted


@dataclass(frozen=True, eq=False)
class Case:
    """One run of a study; `run` is None where there is none yet."""

    arm: str
    params: dict[str, Any]
    run: Recorded | None


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it: every number, with the runs that it is of (`post depth=12 seed=0`).

    holds: every number is as expected. fails: one is not, whatever is missing. undecided: none breaks it, but some
    could not be read; `reason` says why. not judged: not at this scale.
    """

    name: str
    claim: Claim
    verdict: Verdict
    numbers: list[tuple[str, float | str]]
    reason: str


@dataclass(frozen=True)
class _Point:
    """A number and what it is of; `value` is None where it could not be had, for the `lacks`. `rival`: (arm, params) of
    what it was compared with."""

    arm: str
    params: dict[str, Any]
    value: Any
    lacks: tuple[str, ...] = ()
    rival: tuple[str, dict[str, Any]] | None = None


def judge(
    claims: Mapping[str, Claim],
    cases: Sequence[Case],
    scale: str,
    *,
    values: Mapping[str, Sequence[Any]] | None = None,
) -> list[Judged]:
    """Each claim, in order, by the runs of a study at one scale.

    values: the params of the study at this scale, each with its values. What a claim takes along one of them needs all of
    them, but those that the claim leaves out: the exponent of two depths is not that of five. None: whatever was run.
    """
    return [_judge(name, claim, cases, scale, values or {}) for name, claim in claims.items()]


def _judge(name: str, claim: Claim, cases: Sequence[Case], scale: str, values: Mapping[str, Sequence[Any]]) -> Judged:
    if claim.scales and scale not in claim.scales:
        return Judged(name, claim, "not judged", [], f"judged at scale {' or '.join(claim.scales)} alone")
    against = claim.against or {}
    lacks = [*_not_run(claim.of, cases, scale), *_not_run(against, cases, scale)]
    points = _points(claim, claim.of, cases)
    rivals = None if claim.against is None else _points(claim, against, cases)
    if rivals is not None and not claim.take_first:
        points = _compared(claim, points, rivals)
    points = _folded(claim, points, _axis(claim, claim.of, values))
    if rivals is not None and claim.take_first:
        points = _compared(claim, points, _folded(claim, rivals, _axis(claim, against, values)))
    lacks = list(dict.fromkeys([*lacks, *(lack for point in points for lack in point.lacks)]))
    numbers = [(_label(point), point.value) for point in points if point.value is not None]
    if not numbers and not lacks:
        lacks = ["no run is what `of` names"]
    broken = sum(not claim.expect.holds(value) for _, value in numbers)
    said = "; ".join(lacks[:TOLD]) + (f"; and {len(lacks) - TOLD} more" if len(lacks) > TOLD else "")
    if broken:
        counted = f"{broken} of {len(numbers)} numbers not {expected(claim)}"
        return Judged(name, claim, "fails", numbers, f"{counted}; unknown: {said}" if said else counted)
    return Judged(name, claim, "undecided" if lacks else "holds", numbers, said)


def _axis(claim: Claim, selection: Selection, values: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The values of `along` that the study has and the selection does not leave out."""
    along = claim.along or ""
    wanted = listed(selection[along]) if along in selection else values.get(along, [])
    return [value for value in values.get(along, []) if any(same(value, one) for one in wanted)]


def _not_run(selection: Selection, cases: Sequence[Case], scale: str) -> list[str]:
    """What a selection names and this scale does not run."""
    return [
        f"{name}={value} is not run at scale {scale}"
        for name, wanted in selection.items()
        for value in listed(wanted)
        if not any(_has(case, name, [value]) for case in cases)
    ]


def _has(case: Case, name: str, wanted: list[Any]) -> bool:
    if name == "arm":
        return case.arm in wanted
    return name in case.params and any(same(case.params[name], value) for value in wanted)


def _points(claim: Claim, selection: Selection, cases: Sequence[Case]) -> list[_Point]:
    chosen = [case for case in cases if all(_has(case, name, listed(wanted)) for name, wanted in selection.items())]
    return [_tried(_Point(case.arm, case.params, None), _observed, claim, case) for case in chosen]


def _observed(claim: Claim, case: Case) -> float | str:
    if case.run is None:
        raise Unread("has not run")
    verdict = str((case.run.summary or {}).get("verdict") or "unfinished")
    if verdict not in JUDGED:  # what it has written so far is not what it will have
        raise Unread(f"is {verdict}")
    return OBSERVABLES[claim.observe](case.run, **claim.knobs)


def _tried(point: _Point, number: Callable[..., float | str], *of: Any) -> _Point:
    """The point with its number, or with the reason why there is none."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is said below
            value = number(*of)
        if not isinstance(value, str) and not np.isfinite(value):
            raise Unread("is not finite")
    except Unread as lack:
        return replace(point, value=None, lacks=(f"{_label(point)}: {lack}",))
    return replace(point, value=value)


def _compared(claim: Claim, points: Sequence[_Point], rivals: Sequence[_Point]) -> list[_Point]:
    """Each point with each of its rivals, as `Claim.against` says."""
    free = fixed(claim.against or {})
    compared = []
    for point in points:
        own = {name: value for name, value in point.params.items() if name not in free}
        met = [
            rival
            for rival in rivals
            if ("arm" in free or rival.arm == point.arm)
            and all(name in rival.params and same(rival.params[name], value) for name, value in own.items())
        ]
        if not met:
            compared.append(replace(point, value=None, lacks=(f"{_label(point)}: nothing to compare it with",)))
        for rival in met:
            pair = replace(point, rival=(rival.arm, rival.params), lacks=(*point.lacks, *rival.lacks))
            if pair.lacks:
                compared.append(replace(pair, value=None))
            else:
                compared.append(_tried(pair, ratio if claim.compare == "ratio" else sub, point.value, rival.value))
    return compared


def _folded(claim: Claim, points: list[_Point], axis: Sequence[Any]) -> list[_Point]:
    """Over seeds, then along the axis, of which these values are needed."""
    if claim.seeds == "mean":
        points = _along("seed", points, TAKES["mean"], least=1)
    if claim.along is not None and claim.take is not None:
        points = _along(claim.along, points, TAKES[claim.take], least=2, axis=axis)
    return points


def _along(
    name: str,
    points: Sequence[_Point],
    take: Callable[[Sequence[Any], Array], float],
    *,
    least: int,
    axis: Sequence[Any] = (),
) -> list[_Point]:
    """One point for those that differ in `name` alone; it lacks what any of them lacks, and what `axis` has and none is."""
    groups: list[tuple[_Point, list[_Point]]] = []  # what its points have in common; the points
    for point in points:
        rival = point.rival and (point.rival[0], _without(point.rival[1], name))
        common = _Point(point.arm, _without(point.params, name), None, (), rival)
        members = next((members for known, members in groups if known == common), None)
        if members is None:
            groups.append((common, members := []))
        members.append(point)
    folded = []
    for common, members in groups:
        x, lacks = [point.params.get(name) for point in members], [lack for point in members for lack in point.lacks]
        if all(isinstance(value, int | float) for value in x):  # else they stay in the order in which they are run
            members.sort(key=lambda point: point.params[name])
            x.sort()
        run = sum(any(same(value, there) for there in x) for value in axis)
        if run < len(axis):
            lacks.append(f"{_label(common)}: {run} of {len(axis)} values of {name} were run")
        if not lacks and len(x) < least:
            lacks = [f"{_label(common)}: fewer than {least} values of {name}"]
        y = [point.value for point in members]
        folded.append(replace(common, lacks=tuple(lacks)) if lacks else _tried(common, take, x, np.array(y)))
    return folded


def _without(params: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != name}


def _label(point: _Point) -> str:
    """`post depth=12 seed=0 against pre`: of the rival only what differs."""
    words = [point.arm, *(param(point.params, name) for name in point.params)]
    if point.rival:
        arm, params = point.rival
        told = [param(params, name) for name in params if not same(params[name], point.params.get(name))]
        words += ["against", *([arm] if arm != point.arm or not told else []), *told]
    return " ".join(words)


# ---------------------------------------------------------------------------------------------------------- what is said


def found(judged: Judged) -> str:
    """The number, or the least and the largest of several; of a claim that fails how many hold; else why it is open."""
    values = [value for _, value in judged.numbers]
    texts, numbers = [v for v in values if isinstance(v, str)], [v for v in values if not isinstance(v, str)]
    said = [", ".join(f"{count} {word}" for word, count in Counter(texts).items())] if texts else []
    if numbers:
        low, high, n = min(numbers), max(numbers), len(numbers)
        hold = sum(judged.claim.expect.holds(value) for value in numbers)
        counted = f"{hold} of {n} hold" if judged.verdict == "fails" else f"{n} numbers"
        span = f"{low:.4g} to {high:.4g}" if f"{low:.4g}" != f"{high:.4g}" else f"{low:.4g}"
        said.append(span if n == 1 else f"{span} ({counted})")
    if judged.verdict in ("undecided", "not judged"):
        said.append(judged.reason)
    return "; ".join(said)


def table(judged: Sequence[Judged]) -> "Table":
    """The claims for a terminal of 100 columns and more."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, leading=1)
    for head, share in (("claim", 5), ("expected", None), ("found", 4), ("verdict", None), ("source", 4)):
        shown.add_column(head, overflow="fold", ratio=share, no_wrap=share is None)
    for one in judged:
        cells = (one.claim.says, expected(one.claim), found(one))
        # as Text, since [..] in a claim is no markup
        shown.add_row(*map(Text, cells), Text(one.verdict, STYLE[one.verdict]), Text(one.claim.source))
    return shown


def write(judged: Sequence[Judged], path: Path, **about: Any) -> None:
    """`claims.json`: what it is `about` (study, scale, question), and each claim with its verdict and all its numbers."""
    claims = {
        one.name: {
            **one.claim.model_dump(by_alias=True, exclude_none=True),
            "expected": expected(one.claim),
            "verdict": one.verdict,
            "found": found(one),
            "reason": one.reason,
            "numbers": [
                {"of": label, "value": _short(value), "holds": one.claim.expect.holds(value)}
                for label, value in one.numbers
            ],
        }
        for one in judged
    }
    whole.replace(path, whole.document({**about, "claims": claims}))


def _short(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.9g}")
