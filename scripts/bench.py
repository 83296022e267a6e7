"""Measure what normlab costs, as ratios of things measured by turns: python scripts/bench.py"""

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from tqdm import tqdm

from stability.verdict import REFUSED

if TYPE_CHECKING:
    from benchmarks.ratios import Measurement, Row
    from benchmarks.scaling import Point, Scale

# imported when they are measured: the processes that they start read this file again, and need none of them
PARTS = ("overhead", "startup", "norms", "memory", "threads", "scaling")
DESCRIPTION = """\
Measure what normlab costs. Nearly every figure is a ratio of two things measured by turns in this run, which says the same on
another machine; it is met or missed by the median. Leaves bench.txt and bench.json, and ends with 0 whatever the ratios are.

parts:
  overhead  training over a bare loop of torch; the record of every layer over clipping alone
  startup   seconds from the command to the first step, default and 1,000 layers
  norms     RMSNorm over LayerNorm, forward and backward
  memory    activation checkpointing, and the cross-entropy in chunks: peak of memory, time
  threads   the rule for CPU threads over the best choice; two runs side by side over one
  scaling   time and memory against depth and width, beside the machine's rate of matrix products
"""
EPILOG = """examples:
  python scripts/bench.py
  python scripts/bench.py --only overhead,norms --rounds 10
  python scripts/bench.py --gpu

  The machine should have nothing else to do; its load at the start and the end is recorded.
"""
MINUTES, GPU_MINUTES = 13.0, 7.0


class Parser(argparse.ArgumentParser):
    """What is wrong with a command line is a ValueError, one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="bench.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="alternations, of short things more (default 5; quick 1)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether everything works, in a minute")
    parser.add_argument("--gpu", action="store_true", help="the part for a GPU instead: MFU, compiled, CUDA graphs")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help=f"begin nothing after so many (default {MINUTES:g}, GPU {GPU_MINUTES:g})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to (default: runs/bench-TIME)")
    try:
        asked = parser.parse_args(arguments)
        parts = chosen(asked.only, gpu=asked.gpu)
        rounds = asked.rounds if asked.rounds is not None else 1 if asked.quick else 5
        if rounds < 1:
            raise ValueError(f"--rounds must be >= 1, found {rounds}")
        minutes = asked.minutes if asked.minutes is not None else GPU_MINUTES if asked.gpu else MINUTES
        directory = asked.out or Path("runs") / f"bench-{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
        directory.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"bench.py: {error.filename}: {error.strerror}; --out names another place", file=sys.stderr)
        return REFUSED
    return bench(parts, rounds, minutes, directory, quick=asked.quick)


def chosen(only: str | None, *, gpu: bool) -> list[str]:
    """The parts that are asked for, in their order."""
    if gpu:
        import torch

        if only is not None:
            raise ValueError("--gpu is a part of its own: leave out --only")
        if not torch.cuda.is_available():
            raise ValueError("--gpu needs a CUDA device, and torch finds none")
        return ["gpu"]
    wanted = only.split(",") if only is not None else list(PARTS)
    if unknown := [part for part in wanted if part not in PARTS]:
        raise ValueError(f"--only {only}: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def bench(parts: Sequence[str], rounds: int, minutes: float, directory: Path, *, quick: bool) -> int:
    """Measure, print, write into `directory`; 130 for an interrupt, which keeps what was measured."""
    from benchmarks import report

    began, about, code = time.monotonic(), report.machine() | {"rounds": rounds, "quick": quick}, 0
    about["load at the start"] = report.load()
    taken: list[Row | Point] = []
    try:
        measure(planned(parts, rounds, quick=quick), began + 60 * minutes, taken)
    except KeyboardInterrupt:
        code = 130
    about |= {"load at the end": report.load(), "seconds": round(time.monotonic() - began)}
    rows, points = report.parted(taken)
    report.write(rows, points, about, directory)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else report.WIDTH)
    console.print(report.tables(rows, points, about))
    for name in ("bench.txt", "bench.json"):
        console.print(str(directory / name), soft_wrap=True)
    return code


def planned(parts: Sequence[str], rounds: int, *, quick: bool) -> "list[Measurement | Scale]":
    """All that is to be measured."""
    plan: list[Any] = []
    for part in parts:
        module = import_module(f"benchmarks.{part}")
        plan += module.points(quick) if part == "scaling" else module.measurements(rounds, quick)
    return plan


def measure(plan: "Sequence[Measurement | Scale]", end: float, taken: "list[Row | Point]") -> None:
    """Into `taken`, one after another; what has not begun at the time `end` is left out, and says so."""
    with tqdm(total=len(plan), unit="row", disable=None, leave=False) as bar:  # None: on a terminal alone
        for one in plan:
            bar.set_description(f"{one.row.part}: {one.row.name}")
            taken.append(one.take() if time.monotonic() < end else one.row.left_out())
            bar.update()


if __name__ == "__main__":
    sys.exit(main())
