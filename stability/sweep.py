"""What became of a sweep's jobs, read from the records that they left: `sweep.jsonl`, and the table that ends a sweep."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from stability.records import metrics_line
from stability.whole import replace

DONE = {"stable", "spiky", "stalled", "too_short"}
JUDGED = {*DONE, "diverged"}  # a diverged job is a result: the sweep does not start it again
MISSING = {"not_started", "unfinished", "interrupted", "failed"}  # what the same command does


@dataclass(frozen=True)
class Row:
    """`verdict`: of the summary; `unfinished` for a job that was killed or still runs, `not_started` where there is none."""

    job: int
    overrides: list[str]
    directory: str | None
    verdict: str
    reason: str
    final_loss: float | None
    final_val_loss: float | None
    wall_time_s: float | None


def rows(directory: Path, jobs: Sequence[list[str]] | None = None) -> list[Row]:
    """One row a job, in order; a job's record is known by its overrides, wherever it lies below `directory`. None: of the
    jobs that left a record."""
    found = {tuple(words): path for path, words in _recorded(directory)}
    listed = [list(words) for words in found] if jobs is None else jobs
    return [_row(number, words, found.get(tuple(words)), directory) for number, words in enumerate(listed)]


def write(directory: Path, rows: Sequence[Row]) -> None:
    """`sweep.jsonl`: a line a job."""
    replace(directory / "sweep.jsonl", "".join(metrics_line(asdict(row)) + "\n" for row in rows))


def show(rows: Sequence[Row], directory: Path) -> None:
    """The table on the terminal, of the overrides only those that are not the same in all jobs; then why jobs have no
    result, and what to do about those that are missing."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    same = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("job", "overrides", "verdict", "loss", "val loss", "seconds"):
        table.add_column(head, justify="left" if head in ("overrides", "verdict") else "right", overflow="fold")
    for row in rows:
        numbers = (_number(row.final_loss, ".4f"), _number(row.final_val_loss, ".4f"), _number(row.wall_time_s, ".1f"))
        told = " ".join(word for word in row.overrides if word not in same)
        table.add_row(str(row.job), told, row.verdict.replace("_", " "), *numbers)
    console = Console(markup=False, highlight=False)
    console.print(table)
    for row in rows:
        if row.verdict not in DONE and row.reason:
            console.print(f"job {row.job}, {row.verdict}: {row.reason}", soft_wrap=True)
    if any(row.verdict in MISSING for row in rows):
        console.print(f"the same command with hydra.sweep.dir={directory} does what is missing", soft_wrap=True)


def _recorded(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    for path in sorted(directory.rglob("overrides.yaml")):
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(words, list):
            yield path.parent, [str(word) for word in words]


def _row(number: int, words: list[str], where: Path | None, directory: Path) -> Row:
    summary: dict[str, Any] = {"verdict": "unfinished" if where else "not_started"}
    if where and (where / "summary.json").is_file():
        summary = json.loads((where / "summary.json").read_text(encoding="utf-8"))
    losses = [summary.get(key) for key in ("final_loss", "final_val_loss", "wall_time_s")]
    place = str(where.relative_to(directory)) if where else None
    return Row(number, words, place, summary["verdict"], summary.get("reason", ""), *losses)


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
