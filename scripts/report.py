"""What runs came to, to look at: python scripts/report.py DIR [DIR ...] [--out PATH]."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from stability.gather import PAGE, Gathered, gather, nothing
from stability.observables import verdict
from stability.records import Run
from stability.report import draw_run, draw_runs

DESCRIPTION = """\
Of one run: draw loss, gradient norm, and the gradient norm of every layer at every logged step. Of several, which may lie
anywhere below a directory: write one HTML page, which needs no network, with the claims of a study, a table, figures,
what is broken and why, environment and commands; the figures are also put into figures/ beside it, as PNG and SVG.
Prints the path, then one line for each run: label, verdict, final loss, validation loss, steps.
Reads metrics.jsonl, summary.json and config.yaml; loads no model.
"""
EPILOG = """examples:
  python scripts/report.py runs/2026-01-31/pre               # draws runs/2026-01-31/pre/report.png
  python scripts/report.py runs/study/depth-laptop           # writes runs/study/depth-laptop/report.html
  python scripts/report.py runs/depth/* --out depth.png      # a picture that compares them
"""
LISTED = 40  # runs of which each gets a line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="report.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="a run directory, or one with runs below it")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="PATH", help="what to write: a .png, a .html, or a directory for report.html (default: RUN/report.png for one run; DIR/report.html; report/report.html for several)")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        code = report(options.directories, options.out)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads the list has read enough: the report is written by then
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"report.py: {said}", file=sys.stderr)
        return 2


def report(directories: list[Path], out: Path | None) -> int:
    """Draw or write, and list the runs. Raises ValueError where there is no run, or for a path that cannot be meant."""
    path = None if out is None else out if out.suffix in (".png", ".html") else out / PAGE
    if out and path != out and out.suffix and not out.is_dir():
        raise ValueError(f"--out must end in .png or .html, or be a directory, not {out}")
    gathered = gather(directories)
    if not gathered.runs:
        raise ValueError(nothing(directories, gathered))
    alone = gathered.runs[0].directory if len(gathered.runs) == 1 else None
    if path is None:
        path = _default(directories, alone)
    if path.suffix == ".png":
        _draw(gathered, path)
    else:
        from stability.page import publish

        judged = gathered.plan.judged([entry.run for entry in gathered.entries]) if gathered.plan else ()
        publish(gathered, path, judged)
    print(path)
    _list(gathered)
    return 0


def _default(directories: list[Path], alone: Path | None) -> Path:
    if len(directories) == 1:
        return directories[0] / ("report.png" if directories[0] == alone else PAGE)
    return alone / "report.png" if alone in directories else Path("report") / PAGE


def _draw(gathered: Gathered, path: Path) -> None:
    """The picture of one run, or one that compares several."""
    if len(gathered.runs) == 1:
        draw_run(gathered.runs[0], path)
    else:
        draw_runs(gathered.runs, path, names=[entry.name for entry in gathered.entries if entry.run])


def _list(gathered: Gathered) -> None:
    """What is left out on stderr; a line for each run, of many how many there are of each verdict."""
    for name, why in gathered.others.items():
        print(f"report.py: left out: {name}: {why}", file=sys.stderr)
    entries = [entry for entry in gathered.entries if entry.run]
    if len(gathered.entries) > LISTED:
        counts = Counter(verdict(entry.run) if entry.run else "no record" for entry in gathered.entries)
        print(f"{len(gathered.entries)} runs: {', '.join(f'{n} {word}' for word, n in counts.most_common())}")
        return
    width = max(len(entry.name) for entry in entries)
    for entry in gathered.entries:
        if entry.run:
            print(f"{entry.name:{width}}  {_result(entry.run)}")
        if entry.why:
            print(f"report.py: {entry.name}: {entry.why}", file=sys.stderr)


def _result(run: Run) -> str:
    """Verdict and losses, in nats per token. A run still going has no summary: its last tenth so far stands for it."""
    summary = run.summary or {}
    recent = run.loss[-max(1, len(run.loss) // 10) :]
    recent = recent[np.isfinite(recent)]
    final = summary.get("final_loss", recent.mean() if len(recent) else None)
    validation = summary.get("final_val_loss", run.val_loss[-1] if len(run.val_loss) else None)
    taken = run.step[-1] if len(run.step) else 0
    asked = summary.get("steps") or run.config.get("steps", "?")
    return f"{verdict(run):11}  loss {_nats(final)}  val {_nats(validation)}  steps {taken}/{asked}"


def _nats(value: float | None) -> str:
    return "     -" if value is None or not np.isfinite(value) else f"{value:6.3f}"


if __name__ == "__main__":
    sys.exit(main())
