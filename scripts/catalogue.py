"""Every method of scripts/catalogue.yaml, before its first step and after sixty, as one table."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from joblib import Parallel, delayed

from conf.resume import quoted
from stability.records import BLOCK_PARTS, Array, block_norms
from stability.whole import replace

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


def measure(
    row: Row, words: Sequence[str], out: Path, depths: Sequence[int], trained: int, rates: Sequence[str]
) -> None:
    """What of a row is not there yet: `probe.json`, and for each rate a run that is over; one that was cut off begins anew, as does
    a row that was measured with other words (`words.txt`). A command that refuses leaves its line in `refused.txt`."""
    place = out / row.folder
    alike = [*words, *row.words]
    asked = f"{' '.join(alike)}: probed at {', '.join(map(str, depths))}, trained at {trained}\n"
    kept = place / "words.txt"
    if not kept.is_file() or kept.read_text(encoding="utf-8") != asked:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        replace(kept, asked)
    if not (place / "probe.json").is_file():
        each = " vs ".join(f"model.depth={depth}" for depth in depths).split()
        _run("probe.py", [*alike, "batch=4", ":", *each, "--seeds", "1", "--out", str(place)], place)
    for rate in rates:
        run = place / rate
        if _read(run / "summary.json").get("verdict") in (None, "interrupted", "failed"):
            shutil.rmtree(run, ignore_errors=True)
            more = [f"model.depth={trained}", f"optimizer.lr={rate}", "threads=1", "logger=none", "save_every=0"]
            _run("../train.py", [*alike, *more, f"hydra.run.dir={quoted(run)}"], place)


def _run(script: str, words: Sequence[str], place: Path) -> None:
    (place / "refused.txt").unlink(missing_ok=True)
    ended = subprocess.run([sys.executable, str(HERE / script), *words], capture_output=True, text=True)
    if ended.returncode not in (0, 3):  # 3: diverged, which is an answer
        said = (ended.stderr or ended.stdout).strip().splitlines()
        replace(place / "refused.txt", (said[-1] if said else f"exit code {ended.returncode}") + "\n")


def table(rows: Sequence[Row], out: Path, depths: Sequence[int], rates: Sequence[str]) -> str:
    """In Markdown. stream: its RMS after the last block over that of the embedding; gradient: of the last block over that of the
    first; at a rate: the verdict, and how far the loss ended below the unigram entropy."""
    heads = ["method", "words", *(f"{what}, {depth:,}" for what in ("stream", "gradient") for depth in depths)]
    heads += [f"at {rate}" for rate in rates]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        place = out / row.folder
        found = _read(place / "probe.json").get("configurations", [])
        cells = [_last_over_first(get(one)) for get in (_stream, _gradient) for one in found]
        cells = cells or ["-"] * 2 * len(depths)
        refused = (
            (place / "refused.txt").read_text(encoding="utf-8").strip() if (place / "refused.txt").is_file() else "-"
        )
        cells += [_ended(_read(place / rate / "summary.json")) or refused for rate in rates]
        lines.append(f"| {row.name} ({row.source}) | `{' '.join(row.words)}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    """Of a JSON file; empty where it is not there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


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
    return f"{words}, {summary['unigram_entropy'] - summary['final_loss']:+.2f}"


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
    if unknown := sorted(set(asked.only or ()) - {row.name for row in rows}):
        print(f"catalogue.py: --only knows {', '.join(row.name for row in every)}; found {unknown[0]}", file=sys.stderr)
        return 2
    work = [delayed(measure)(row, [*words, *asked.words], asked.out, depths, trained, asked.rates) for row in rows]
    Parallel(n_jobs=asked.jobs, prefer="threads", verbose=5)(work)  # each waits for processes of its own
    print(table(rows, asked.out, depths, asked.rates), end="")
    if asked.write:
        before, _, rest = asked.write.read_text(encoding="utf-8").partition(BEGIN)
        text = table(every, asked.out, depths, asked.rates)
        replace(asked.write, before + BEGIN + text + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
