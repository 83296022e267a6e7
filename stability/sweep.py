"""What became of a sweep's jobs, read from the records that they left: `sweep.jsonl`, and the table that ends a sweep."""

import os
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from stability.records import LOADER, mapping, metrics_line
from stability.whole import replace

if TYPE_CHECKING:
    from rich.console import Console

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


def rows(
    directory: Path, jobs: Sequence[list[str]] | None, ran: Mapping[int, tuple[Path, dict[str, Any]]]
) -> list[Row]:
    """One row a job, in order: what `ran` says of it, else what lies below `directory` under the same overrides. Where no
    `jobs` are listed, those that left a record."""
    known: dict[tuple[str, ...], tuple[list[str], Path]] = {}
    for path, words in recorded(directory):
        known.setdefault(same_job(words), (words, path))
    if jobs is None:
        return [_row(n, words, (path, summary(path)), directory) for n, (words, path) in enumerate(known.values())]
    found = {words: (path, summary(path)) for words, (_, path) in known.items()}
    return [_row(n, words, ran.get(n) or found.get(same_job(words)), directory) for n, words in enumerate(jobs)]


def write(directory: Path, rows: Sequence[Row]) -> None:
    """`sweep.jsonl`: a line a job."""
    replace(directory / "sweep.jsonl", "".join(metrics_line(asdict(row)) + "\n" for row in rows))


def show(rows: Sequence[Row], directory: Path, names: Sequence[str] = ()) -> None:
    """The table on the terminal: of each job its name, or where it has none those of its overrides that are not the same in
    all jobs; then why jobs have no result, and what to do about those that are missing."""
    from rich import box
    from rich.table import Table

    told = "run" if names else "overrides"
    names = names or own([row.overrides for row in rows])
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("job", told, "verdict", "loss", "val loss", "seconds"):
        table.add_column(head, justify="left" if head in (told, "verdict") else "right", overflow="fold")
    for row in rows:
        numbers = (_number(row.final_loss, ".4f"), _number(row.final_val_loss, ".4f"), _number(row.wall_time_s, ".1f"))
        table.add_row(str(row.job), names[row.job], row.verdict.replace("_", " "), *numbers)
    console = wide_console()
    console.print(table)
    for row in rows:
        if row.verdict not in DONE and row.reason:
            console.print(f"job {row.job}, {row.verdict}: {row.reason}", soft_wrap=True)
    if any(row.verdict in MISSING for row in rows):
        console.print(f"the same command with hydra.sweep.dir={directory} does what is missing", soft_wrap=True)


def told(summary: Mapping[str, Any]) -> str:
    """What became of a job, in a few words; of one that is refused or failed also why."""
    loss, seconds = _number(summary.get("final_loss"), ".4f"), _number(summary.get("wall_time_s"), ".1f")
    if summary["verdict"] in ("refused", "failed"):
        return f"{summary['verdict']}: {summary.get('reason', '')}"
    words = [summary["verdict"].replace("_", " "), loss and f"loss {loss}", seconds and f"{seconds} s"]
    return "  ".join(word for word in words if word)


def wide_console() -> "Console":
    """Where tables go: as wide as the terminal; in a file or a pipe nothing needs to be folded to 80 columns."""
    from rich.console import Console

    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 150)


def end(
    directory: Path,
    jobs: Sequence[list[str]] | None,
    ran: Mapping[int, tuple[Path, dict[str, Any]]],
    names: Sequence[str] = (),
) -> Sequence[Row]:
    """Show the table and write it."""
    table = rows(directory, jobs, ran)
    show(table, directory, names)
    losses = [(row.final_loss, row.job) for row in table if row.verdict in DONE and row.final_loss is not None]
    if jobs is None and losses:  # the sweeper was looking for it
        print(f"lowest loss: {min(losses)[0]:.4f} nats, job {min(losses)[1]}")
    try:
        write(directory, table)
    except OSError as error:
        print(f"normlab: {error.filename}: {error.strerror}", file=sys.stderr)
    return table


def overrides(path: Path) -> list[str] | None:
    """The words of an `overrides.yaml`; None where there is none, or a damaged one, which is nobody's."""
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        words = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        if isinstance(words, list):
            return [str(word) for word in words]
    return None


def recorded(directory: Path, known: Container[Path] = ()) -> Iterator[tuple[Path, list[str]]]:
    """The runs below `directory` by path, each with its overrides; without those that are `known` and all that lies in them."""
    for place, folders, files in os.walk(directory):
        where = Path(place)
        folders[:] = sorted((name for name in folders if where / name not in known), key=_as_numbered)
        if "overrides.yaml" not in files or where in known:
            continue
        if (words := overrides(where / "overrides.yaml")) is not None:
            yield where, words


def _as_numbered(name: str) -> tuple[int, str]:
    """2 before 10."""
    return (int(name) if name.isdigit() else 0, name)


def same_job(words: Sequence[str]) -> tuple[str, ...]:
    """What tells a job: Hydra escapes an interpolation, and a run does not keep that it was forced."""
    return tuple(word.replace("\\", "") for word in words if not word.startswith("resume_force="))


def own(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Of each job the words that are not the same in all of them."""
    same = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(word for word in words if word not in same) for words in jobs]


def summary(where: Path) -> dict[str, Any]:
    """What the run in `where` says of its end; the verdict is `unfinished` where it says nothing."""
    notes: list[str] = []
    said = mapping(where / "summary.json", notes)
    return said if said and "verdict" in said else {"verdict": "unfinished", "reason": ", ".join(notes)}


def _row(number: int, words: list[str], known: tuple[Path, dict[str, Any]] | None, directory: Path) -> Row:
    where, said = known or (None, {"verdict": "not_started"})
    losses = [said.get(key) for key in ("final_loss", "final_val_loss", "wall_time_s")]
    place = os.path.relpath(where, directory) if where else None
    return Row(number, words, place, said["verdict"], said.get("reason", ""), *losses)


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
