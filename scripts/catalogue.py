"""Every method of scripts/catalogue.yaml, before its first step and after sixty, as one table."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from joblib import Parallel, delayed

from conf.resume import quoted
from stability.records import BLOCK_PARTS, Array, block_norms
from stability.whole import replace
from training.signals import Signals

HERE = Path(__file__).parent
DEPTHS, TRAINED, RATES = (12, 100, 1000), 100, ("1e-3", "3e-3")
DESCRIPTION = """\
Measure each method of scripts/catalogue.yaml at its initialisation (scripts/probe.py, seed 0) at depth 12, 100 and 1,000, and
train it for 60 steps at depth 100, at two learning rates (train.py). Prints the table that docs/methods.md has. What is done is
kept in --out and not done again, so that the command goes on where it was stopped; a row whose words have changed is measured
anew. All of it takes about an hour and a half on two CPU cores (--jobs 2).
"""
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Row:
    """A method: its name, where it comes from, and the words that choose it."""

    name: str
    source: str
    words: tuple[str, ...]

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "_")


def listed() -> tuple[list[str], list[Row]]:
    """(The words that all have, the methods.)"""
    found = yaml.safe_load((HERE / "catalogue.yaml").read_text(encoding="utf-8"))
    rows = [Row(name, row["source"], tuple(row["words"])) for name, row in found["methods"].items()]
    return found["words"], rows


class Commands:
    """Processes under way. A signal goes on to all of them, and after it none is started."""

    def __init__(self) -> None:
        self.signals = Signals(self._pass_on)
        self._running: set[subprocess.Popen[str]] = set()

    def _pass_on(self, number: int) -> None:
        for process in list(self._running):
            process.send_signal(number)

    def run(self, script: str, *words: str) -> str | None:
        """What a command says that refuses or fails; None where it gives an answer."""
        if self.signals.received:
            return "stopped"
        command = [sys.executable, str(HERE / script), *words]
        # in a group of its own: a terminal's Ctrl-C would reach it twice, and the second one ends a run in mid-step
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        ) as process:
            self._running.add(process)
            out, errors = process.communicate()
            self._running.discard(process)
        if process.returncode in (0, 3):  # 3: diverged, which is an answer
            return None
        said = (errors or out).strip().splitlines()
        return said[-1] if said else f"exit code {process.returncode}"


@dataclass(frozen=True)
class Catalogue:
    """What is asked of each row, and the directory that keeps what has been measured: for each row `words.txt`, `probe.json`, a
    run for each rate, and `refused.txt` where a command gave no answer."""

    words: tuple[str, ...]
    out: Path
    depths: Sequence[int] = DEPTHS
    trained: int = TRAINED
    rates: Sequence[str] = RATES

    def measure(self, row: Row, commands: Commands) -> None:
        """What of a row is not there yet; a run that was cut off begins anew, as does a row that was measured with other words."""
        place = self.out / row.folder
        if not self._is_of(row):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            replace(place / "words.txt", self._asked(row))
        alike, failed = [*self.words, *row.words], list[str | None]()
        if not _read(place / "probe.json"):
            each = " vs ".join(f"model.depth={depth}" for depth in self.depths).split()
            failed.append(commands.run("probe.py", *alike, "batch=4", ":", *each, "--seeds", "1", "--out", str(place)))
        for rate in self.rates:
            run = place / rate
            if _read(run / "summary.json").get("verdict") in (None, "interrupted", "failed"):
                shutil.rmtree(run, ignore_errors=True)
                more = [
                    f"model.depth={self.trained}",
                    f"optimizer.lr={rate}",
                    "threads=1",
                    "logger=none",
                    "save_every=0",
                ]
                failed.append(commands.run("../train.py", *alike, *more, f"hydra.run.dir={quoted(run)}"))
        (place / "refused.txt").unlink(missing_ok=True)
        if whys := [why for why in failed if why]:
            replace(place / "refused.txt", f"{whys[0]}\n")

    def refused(self, row: Row) -> str | None:
        """Why a row lacks something, where a command said so."""
        path = self.out / row.folder / "refused.txt"
        return path.read_text(encoding="utf-8").strip() if path.is_file() and self._is_of(row) else None

    def table(self, rows: Sequence[Row]) -> str:
        """In Markdown. stream: its RMS after the last block over that of the embedding; gradient: of the last block over that of the
        first; at a rate: the verdict, and how far the loss ended below the unigram entropy."""
        heads = ["method", "words", *(f"{what}, {n:,}" for what in ("stream", "gradient") for n in self.depths)]
        heads += [f"at {rate}" for rate in self.rates]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row in rows:
            place, there = self.out / row.folder, self._is_of(row)
            found = _read(place / "probe.json").get("configurations", []) if there else []
            cells = [_last_over_first(get(one)) for get in (_stream, _gradient) for one in found]
            cells = cells or ["-"] * 2 * len(self.depths)
            summaries = [_read(place / rate / "summary.json") if there else {} for rate in self.rates]
            cells += [_ended(summary) or self.refused(row) or "-" for summary in summaries]
            lines.append(f"| {row.name} ({row.source}) | `{' '.join(row.words)}` | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def _asked(self, row: Row) -> str:
        depths = ", ".join(map(str, self.depths))
        return f"{' '.join([*self.words, *row.words])}: probed at {depths}, trained at {self.trained}\n"

    def _is_of(self, row: Row) -> bool:
        """Whether what is kept of a row was measured with these words."""
        path = self.out / row.folder / "words.txt"
        return path.is_file() and path.read_text(encoding="utf-8") == self._asked(row)


def _read(path: Path) -> dict[str, Any]:
    """Of a JSON file; empty where it is not there, or no such file."""
    with suppress(FileNotFoundError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def _stream(one: dict[str, Any]) -> Array:
    return np.array(one["arrays"]["stream_rms"][0], dtype=np.float64)  # null, what was not finite, becomes nan


def _gradient(one: dict[str, Any]) -> Array:
    return block_norms({part: np.array(one["grad_norm"][part][0], dtype=np.float64) for part in BLOCK_PARTS})


def _last_over_first(values: Array) -> str:
    first, last = values[0], values[-1]
    if not np.isfinite(first + last):
        return "overflow"
    if first == 0:
        return "inf" if last else "0/0"
    value = last / first
    return f"{value:.2f}" if 0.095 <= value < 100 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _ended(summary: dict[str, Any]) -> str:
    """`trains` or the verdict, and how far below the unigram entropy."""
    if not summary or summary["final_loss"] is None:
        return f"**{summary['verdict']}**" if summary else ""
    words = "trains" if summary["verdict"] in ("stable", "spiky") else f"**{summary['verdict']}**"
    return f"{words}, {round(summary['unigram_entropy'] - summary['final_loss'], 2) + 0.0:+.2f}"  # + 0.0: no -0.00


def main(arguments: list[str] | None = None, *, depths: Sequence[int] = DEPTHS, trained: int = TRAINED) -> int:
    parser = argparse.ArgumentParser(
        prog="catalogue.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="overrides for all, as train.py's")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure and print these methods alone")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/catalogue"), metavar="DIR", help="default runs/catalogue"
    )
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="LR", help=f"default {' '.join(RATES)}")
    parser.add_argument("--jobs", type=int, default=1, help="methods at once; depth 1,000 takes 4 GB each (default 1)")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="put the table of all methods between the marks in this file, those of an earlier call too",
    )
    asked = parser.parse_intermixed_args(arguments)
    words, every = listed()
    rows = [row for row in every if not asked.only or row.name in asked.only]
    try:
        if unknown := sorted(set(asked.only or ()) - {row.name for row in rows}):
            raise ValueError(f"--only knows {', '.join(row.name for row in every)}; found {unknown[0]}")
        if asked.jobs < 1:
            raise ValueError(f"--jobs must be >= 1, found {asked.jobs}")
        asked.out.mkdir(parents=True, exist_ok=True)
        around = _around(asked.write) if asked.write else None
    except (ValueError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"catalogue.py: {said}", file=sys.stderr)
        return 2
    catalogue, commands = Catalogue((*words, *asked.words), asked.out, depths, trained, asked.rates), Commands()
    with commands.signals as signals:  # each thread waits for processes of its own
        Parallel(n_jobs=asked.jobs, prefer="threads", verbose=5)(
            delayed(catalogue.measure)(row, commands) for row in rows
        )
    if signals.received:
        print("catalogue.py: stopped; the same command goes on", file=sys.stderr)
        return 128 + signals.received
    print(catalogue.table(rows), end="")
    if around:
        replace(asked.write, f"{around[0]}{BEGIN}{catalogue.table(every)}{END}{around[1]}")
    refused = {row.name: why for row in rows if (why := catalogue.refused(row))}
    for name, why in refused.items():
        print(f"catalogue.py: {name}: {why}", file=sys.stderr)
    return 1 if refused else 0


def _around(path: Path) -> tuple[str, str]:
    """What stands before and behind the marks of a file."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"--write {path}: it needs a line {BEGIN.strip()} and, below, a line {END.strip()}")
    return before, after


if __name__ == "__main__":
    sys.exit(main())
