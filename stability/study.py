"""A study on disk: its plan, and its end, where its runs are read, its claims judged and shown, and a picture drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stability.claims import parse
from stability.judging import Case, Judged, judge, table, write
from stability.records import Run
from stability.sweep import JUDGED, wide_console
from stability.whole import document, replace

SHOWN = 8  # runs in the picture where the study does not choose
PLAN = "study.json"


@dataclass(frozen=True)
class Point:
    """One run of a study: its arm, its params, the overrides that repeat it, and its directory below the study's."""

    arm: str
    params: dict[str, Any]
    words: list[str]
    directory: str


@dataclass(frozen=True)
class Plan:
    """What a study was asked for, as `study.json` in its directory keeps it: all that is needed to judge it from its runs alone.

    `words`: the command's overrides. `params`: each with its values at any scale, `values`: at this one; a command may run
    fewer, `points`. `claims`: as written. `draw`: which runs the picture shows, as in `conf.study.Study`.
    `config_dir`: where its file is, if not in `conf/`.
    """

    study: str
    question: str
    scale: str
    words: list[str]
    arms: list[str]
    params: dict[str, list[Any]]
    values: dict[str, list[Any]]
    scales: list[str]
    claims: dict[str, Any]
    draw: dict[str, Any]
    points: list[Point]
    config_dir: str | None = None

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        replace(directory / PLAN, document(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> "Plan":
        """ValueError, one line, where `study.json` is none."""
        path = directory / PLAN
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValueError:
            raise ValueError(f"{path} is damaged: the command of the study writes it anew") from None

    def judged(self, runs: Sequence[Run | None]) -> list[Judged]:
        """Its claims, judged by a run or None for each of its points."""
        claims = parse(self.claims, arms=self.arms, params=self.params, scales=self.scales)
        cases = [Case(point.arm, point.params, run) for point, run in zip(self.points, runs, strict=True)]
        return judge(claims, cases, self.scale, values=self.values)


def conclude(directory: Path) -> list[Judged]:
    """Judge the study in `directory`: write `claims.json`, `report.png` and the page `report.html` there, and show the table
    of claims."""
    from stability.gather import PAGE, gather
    from stability.page import publish

    gathered = gather([directory])
    plan = Plan.read(directory)
    runs = [entry.run for entry in gathered.entries]
    judged = plan.judged(runs)
    ran = {key: list(dict.fromkeys(point.params[key] for point in plan.points)) for key in plan.points[0].params}
    about = {"study": plan.study, "question": plan.question, "scale": plan.scale, "words": plan.words}
    write(judged, directory / "claims.json", **about, params=ran)
    console = wide_console()
    console.print(f"\n{plan.question}\n", soft_wrap=True)
    console.print(table(judged))
    there = [(point, run) for point, run in zip(plan.points, runs, strict=True) if run and run.verdict in JUDGED]
    if shown := [(point, run) for point, run in there if _chosen(point, plan.draw)] or there[:SHOWN]:
        _draw(shown, directory / "report.png")
        console.print(f"picture: {directory / 'report.png'}", soft_wrap=True)
    if gathered.runs:
        publish(gathered, directory / PAGE, judged)
        console.print(f"page:    {directory / PAGE}", soft_wrap=True)
    console.print(f"claims:  {directory / 'claims.json'}", soft_wrap=True)
    if len(there) < len(plan.points):
        console.print(
            f"{len(plan.points) - len(there)} of {len(plan.points)} runs have no result, as said above; hydra.sweep.dir=DIR starts afresh",
            soft_wrap=True,
        )
    return judged


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
