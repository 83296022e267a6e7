"""Every method of scripts/catalogue.yaml, before its first step and after sixty: the table in docs/methods.md."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hydra import compose, initialize_config_dir
from joblib import Parallel, delayed
from omegaconf import DictConfig

import train
from conf.help import CONF
from scripts.probe import Checked
from stability.probe import blocks
from stability.whole import replace

ROWS = Path(__file__).with_suffix(".yaml")
DEPTHS = (12, 100, 1000)
TRAINED = 100
DESCRIPTION = """\
Measure each method of scripts/catalogue.yaml at its initialisation at depth 12, 100 and 1,000, and train it for 60 steps at
depth 100. Prints a table in Markdown. What is done is kept in --out and not done again, so that the command goes on where
it was stopped.
"""
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Row:
    """A method: its name, where it comes from, and the words that choose it."""

    name: str
    source: str
    words: tuple[str, ...]


def rows(path: Path = ROWS) -> list[Row]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))["methods"]
    return [Row(name, row["source"], tuple(row["words"])) for name, row in found.items()]


def common(path: Path = ROWS) -> list[str]:
    """The words that all have."""
    words: list[str] = yaml.safe_load(path.read_text(encoding="utf-8"))["words"]
    return words


def at_start(row: Row, depth: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Stream and gradient at the initialisation, and the windows' loss: from one trace, seed 0."""
    checked = Checked([*common(), f"model.depth={depth}", *row.words, *more])
    seen = checked.trace(0)
    block = blocks(seen)
    with np.errstate(divide="ignore", invalid="ignore"):
        growth, ratio = seen.stream_rms[-1] / seen.stream_rms[0], block[-1] / block[0]
    return {"growth": float(growth), "ratio": float(ratio), "loss": seen.loss}


def trained(row: Row, directory: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of sixty steps."""
    words = [*common(), f"model.depth={TRAINED}", "threads=1", "logger=none", "save_every=0", *row.words, *more]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", words, return_hydra_config=True)
    chosen = dict(cfg.hydra.runtime.choices)
    own = DictConfig({key: value for key, value in cfg._content.items() if key != "hydra"})
    summary, _ = train.train(own, directory, chosen, words)
    return {key: summary[key] for key in ("verdict", "final_loss", "first_loss", "unigram_entropy", "equation")}


def jobs(found: Sequence[Row], out: Path, more: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    """(Where its answer is kept, what gives it) of all that is not there yet."""
    for row in found:
        name = row.name.replace("/", "-").replace(" ", "_")
        asked = {f"start-{depth}": delayed(at_start)(row, depth, more) for depth in DEPTHS}
        asked["trained"] = delayed(trained)(row, out / name / "run", more)
        for what, job in asked.items():
            if not (path := out / name / f"{what}.json").is_file():
                yield path, job


def _keep(path: Path, job: Any) -> None:
    """Do one and write its answer; what is refused or goes wrong is an answer too."""
    function, arguments, knobs = job
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        answer = function(*arguments, **knobs)
    except (ValueError, RuntimeError) as error:
        answer = {"refused": str(error).splitlines()[0]}
    replace(path, json.dumps(answer) + "\n")


def table(found: Sequence[Row], out: Path) -> str:
    """In Markdown."""
    spans = " | ".join(f"{what}, {depth:,}" for what in ("stream", "gradient") for depth in DEPTHS)
    lines = [f"| method | words | {spans} | 60 steps |", "|---" * (2 + 2 * len(DEPTHS) + 1) + "|"]
    for row in found:
        name = row.name.replace("/", "-").replace(" ", "_")
        answers = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (out / name).glob("*.json")}
        starts = [answers.get(f"start-{depth}", {}) for depth in DEPTHS]
        cells = [_number(start.get(key)) for key in ("growth", "ratio") for start in starts]
        words = f"`{' '.join(row.words)}`"
        lines.append(f"| {row.name}, {row.source} | {words} | {' | '.join(cells)} | {_ended(answers.get('trained', {}))} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if not np.isfinite(value):
        return "0/0" if np.isnan(value) else "inf"
    return f"{value:.2f}" if 0.095 <= value < 100 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _ended(answer: dict[str, Any]) -> str:
    if "verdict" not in answer:
        return answer.get("refused", "-")
    if answer["final_loss"] is None:
        return f"**{answer['verdict']}**"
    below = answer["unigram_entropy"] - answer["final_loss"]
    words = "trains" if answer["verdict"] in ("stable", "spiky") else f"**{answer['verdict']}**"
    return f"{words}, {below:+.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="catalogue.py", description=DESCRIPTION)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="overrides for all, as train.py's")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these methods alone")
    parser.add_argument("--out", type=Path, default=Path("runs/catalogue"), metavar="DIR", help="default runs/catalogue")
    parser.add_argument("--jobs", type=int, default=1, help="at once; depth 1,000 takes 4 GB each (default 1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    asked = parser.parse_intermixed_args(arguments)
    found = [row for row in rows() if not asked.only or row.name in asked.only]
    if unknown := set(asked.only or ()) - {row.name for row in found}:
        print(f"catalogue.py: --only knows {', '.join(row.name for row in rows())}; found {unknown.pop()}", file=sys.stderr)
        return 2
    left = list(jobs(found, asked.out, asked.words))
    Parallel(n_jobs=asked.jobs, verbose=5)(delayed(_keep)(path, job) for path, job in left)
    text = table(found, asked.out)
    print(text, end="")
    if asked.write:
        before, _, rest = asked.write.read_text(encoding="utf-8").partition(BEGIN)
        replace(asked.write, before + BEGIN + text + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
