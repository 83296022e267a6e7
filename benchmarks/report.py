"""What was measured, as tables and as files."""

import os
import platform
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from benchmarks import scaling
from benchmarks.ratios import Row
from benchmarks.scaling import Point
from benchmarks.step import cores
from stability import whole

STYLE = {"met": "green", "missed": "red", "failed": "bold red", "": ""}
WIDTH = 200  # of a table that goes into a file or a pipe


def machine() -> dict[str, Any]:
    """What the numbers hang on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    processor = platform.processor() or platform.machine()
    return {
        "platform": platform.platform(),
        "processor": processor,
        "cores": cores(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def load() -> list[float]:
    """Processes that wanted a core over the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def parted(taken: Sequence[Row | Point]) -> tuple[list[Row], list[Point]]:
    """(The rows, the points), each in order."""
    return [one for one in taken if isinstance(one, Row)], [one for one in taken if isinstance(one, Point)]


def tables(rows: Sequence[Row], points: Sequence[Point], about: dict[str, Any]) -> Group:
    """All rows in one table, the points in a second, and what they were measured on."""
    facts = "; ".join(f"{key}: {value}" for key, value in about.items())
    return Group(ratio_table(rows), *([scaling.table(points)] if points else []), Text(facts))


def ratio_table(rows: Sequence[Row]) -> Table:
    """A line for each row: the first thing over the second."""
    drawn = Table(box=box.SIMPLE_HEAD)
    for head, right in (("part", False), ("what", False), ("over what", False), ("threads", True), ("target", True)):
        drawn.add_column(head, justify="right" if right else "left", overflow="fold")
    for head in ("min", "median", "max", "n"):
        drawn.add_column(head, justify="right", no_wrap=True)
    drawn.add_column("", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, (row.part, row.name, row.over)), *map(Text, _numbers(row)), _verdict(row))
    return drawn


def _numbers(row: Row) -> list[str]:
    unit = f" {row.unit}" if row.unit else ""
    figures = [f"{take(row.values):.3g}{unit}" if row.values else "" for take in (min, median, max)]
    target = f"{row.target}{unit}" if row.target else ""
    return [str(row.threads or ""), target, *figures, str(len(row.values))]


def _verdict(row: Row) -> Text:
    return Text(f"failed: {row.failed}" if row.failed is not None else row.verdict, STYLE[row.verdict])


def write(rows: Sequence[Row], points: Sequence[Point], about: dict[str, Any], directory: Path) -> None:
    """`bench.json`, with every single value, and `bench.txt`, the tables."""
    records = {"rows": [row.record() for row in rows], "scaling": [point.record() for point in points]}
    whole.replace(directory / "bench.json", whole.document({**about, **records}))
    text = Console(file=StringIO(), width=WIDTH, no_color=True, record=True)
    text.print(tables(rows, points, about))
    whole.replace(directory / "bench.txt", text.export_text())
