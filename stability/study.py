"""The end of a study: its runs read, its claims judged and shown, and a picture of the runs on one colour scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.claims import Claim
from stability.judging import Case, judge, table, write
from stability.records import Run, read
from stability.sweep import wide_console

SHOWN = 8  # runs in the picture where the study does not choose


@dataclass(frozen=True)
class Point:
    """One run of a study: its arm, its params, where it is, and whether what is there is this run, and at its end (it may
    be one of other words, which this sweep has refused to touch)."""

    arm: str
    params: dict[str, Any]
    directory: Path
    done: bool


def conclude(
    directory: Path,
    points: Sequence[Point],
    claims: Mapping[str, Claim],
    about: Mapping[str, Any],
    *,
    values: Mapping[str, Sequence[Any]],
    draw: Mapping[str, Any],
) -> None:
    """Write `claims.json` and `report.png` into the study's `directory`, and show the table of claims.

    `about`: study, question, scale, and the words of the command. `values`: the params as the study has them, of which a command
    may run fewer. `draw`: which runs the picture shows, as in `Study.draw`; the first of all where it chooses none.
    """
    runs = [read(point.directory) if point.done else None for point in points]
    cases = [Case(point.arm, point.params, run) for point, run in zip(points, runs, strict=True)]
    judged = judge(claims, cases, about["scale"], values=values)
    ran = {key: list(dict.fromkeys(point.params[key] for point in points)) for key in points[0].params}
    write(judged, directory / "claims.json", **about, params=ran)
    console = wide_console()
    console.print(f"\n{about['question']}\n", soft_wrap=True)
    console.print(table(judged))
    there = [(point, run) for point, run in zip(points, runs, strict=True) if run]
    if shown := [(point, run) for point, run in there if _chosen(point, draw)] or there[:SHOWN]:
        _draw(shown, directory / "report.png")
        console.print(f"picture: {directory / 'report.png'}", soft_wrap=True)
    console.print(f"claims:  {directory / 'claims.json'}", soft_wrap=True)
    if len(there) < len(points):
        console.print(
            f"{len(points) - len(there)} of {len(points)} runs have no result, as said above; hydra.sweep.dir=DIR starts afresh",
            soft_wrap=True,
        )


def _chosen(point: Point, draw: Mapping[str, Any]) -> bool:
    """Whether the picture shows it: each key of `draw` is `arm` or a param, and names the values that are drawn."""
    facts = {"arm": point.arm, **point.params}
    return all(facts.get(key, value) in (value if isinstance(value, list) else [value]) for key, value in draw.items())


def _draw(shown: Sequence[tuple[Point, Run]], path: Path) -> None:
    """The runs by arm and by what else differs among them."""
    from stability.report import draw_runs

    points = [point for point, _ in shown]
    told = [key for key in points[0].params if len({point.params[key] for point in points}) > 1]
    names = [" ".join([point.arm, *(f"{key}={point.params[key]}" for key in told)]) for point in points]
    draw_runs([run for _, run in shown], path, names=names)
