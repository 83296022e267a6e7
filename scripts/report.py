"""Draw finished or running runs: python scripts/report.py RUN [RUN ...] [--out PATH]."""

import argparse
import sys
from pathlib import Path

import numpy as np

from stability.label import label
from stability.records import Run, read
from stability.report import draw_run, draw_runs

DESCRIPTION = """\
Draw one run (loss, gradient norm, and the gradient norm of every layer at every logged step), or compare several.
Prints the path of the figure, then one line for each run: label, verdict, final loss, validation loss, steps.
Reads metrics.jsonl, summary.json and config.yaml; loads no model.
"""
EPILOG = """examples:
  python scripts/report.py runs/2026-01-31/pre               # draws runs/2026-01-31/pre/report.png
  python scripts/report.py runs/study/depth/* --out depth.png
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="report.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the PNG to write (default: RUN/report.png for one run, comparison.png for several)")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        return report(options.runs, options.out)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2


def report(directories: list[Path], out: Path | None) -> int:
    """Draw and list the runs. Raises ValueError for what is no run, or for a path that is no PNG."""
    runs, refused = [], []
    for directory in directories:
        try:
            runs.append(read(directory))
        except ValueError as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("; ".join(refused))
    for line in refused:
        print(f"report.py: left out: {line}", file=sys.stderr)
    path = out or (runs[0].directory / "report.png" if len(runs) == 1 else Path("comparison.png"))
    if path.suffix != ".png":
        raise ValueError(f"--out must end in .png, not {path}")
    if len(runs) == 1:
        draw_run(runs[0], path)
    else:
        draw_runs(runs, path)
    print(path)
    names = label(runs)
    width = max(map(len, names))
    for name, run in zip(names, runs, strict=True):
        print(f"{name:{width}}  {_result(run)}")
        for note in run.notes:
            print(f"report.py: {run.directory}: {note}", file=sys.stderr)
    return 0


def _result(run: Run) -> str:
    """Verdict and losses, in nats per token. A run still going has no summary: its last tenth so far stands for it."""
    summary = run.summary or {}
    recent = run.loss[-max(1, len(run.loss) // 10) :]
    recent = recent[np.isfinite(recent)]
    final = summary.get("final_loss", recent.mean() if len(recent) else None)
    validation = summary.get("final_val_loss", run.val_loss[-1] if len(run.val_loss) else None)
    taken = run.step[-1] if len(run.step) else 0
    return f"{run.verdict:11}  loss {_nats(final)}  val {_nats(validation)}  steps {taken}/{summary.get('steps', '?')}"


def _nats(value: float | None) -> str:
    return "     -" if value is None or not np.isfinite(value) else f"{value:6.3f}"


if __name__ == "__main__":
    sys.exit(main())
