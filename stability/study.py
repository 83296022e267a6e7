"""The end of a study: its runs read, its claims judged and shown, and a picture of the runs on one colour scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stability.claims import Claim
from stability.judging import Case, judge, table, write
from stability.records import Run, read
from stability.sweep import wide_console


@dataclass(frozen=True)
class Point:
    """One run of a study: its arm, its params, and where it is."""

    arm: str
    params: dict[str, Any]
    directory: Path


def conclude(
    directory: Path,
    points: Sequence[Point],
    claims: Mapping[str, Claim],
    about: dict[str, str],
    *,
    draw: Mapping[str, Any],
) -> None:
    """Write `claims.json` and `report.png` into the study's `directory`, and show the table of claims.

    `about`: study, question, scale. `draw`: which runs the picture shows, as in `Study.draw`.
    """
    runs = [_read(point.directory) for point in points]
    cases = [Case(point.arm, point.params, run) for point, run in zip(points, runs, strict=True)]
    judged = judge(claims, cases, about["scale"])
    write(judged, directory / "claims.json", **about)
    console = wide_console()
    console.print(f"\n{about['question']}\n", soft_wrap=True)
    console.print(table(judged))
    shown = [(point, run) for point, run in zip(points, runs, strict=True) if run and _chosen(point, draw)]
    if shown:
        _draw(shown, directory / "report.png")
        console.print(f"picture: {directory / 'report.png'}", soft_wrap=True)
    console.print(f"claims:  {directory / 'claims.json'}", soft_wrap=True)


def _read(directory: Path) -> Run | None:
    """None for a run that left nothing to read."""
    try:
        return read(directory)
    except ValueError:
        return None


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
