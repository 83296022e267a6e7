"""The command that makes a report: of a run, of several, of a study, of thousands of layers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from scripts import report
from stability.records import BLOCK_PARTS, MATRICES, metrics_line
from tests.conftest import ROOT
from tests.stability.test_gather import break_five, lines_of, write_run, write_study

PARTS = (*BLOCK_PARTS, *MATRICES)


# A process that starts another is counted in the peak of that one (Linux), and the tests' own may be of any size: between the
# two stands a small one, which has no other child. Last on stderr, in KiB.
WEIGHED = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def command(*arguments: str, cwd: Path, weighed: bool = False) -> subprocess.CompletedProcess[str]:
    before = ["-c", WEIGHED] if weighed else []
    return subprocess.run(
        [sys.executable, *before, str(ROOT / "scripts/report.py"), *arguments], cwd=cwd, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def write_sweep(root: Path, runs: int, depth: int, *, logged: int = 20, plain: int = 180) -> int:
    """A sweep of learning rates and seeds whose lines have every array that a run writes; its bytes.

    Arrays are written as text once and handed round among the runs, times a power of ten that tells them apart: to format
    100 million numbers would take minutes.
    """
    random = np.random.default_rng(0)
    pool = [json.dumps([float(f"{x:.9g}") for x in random.uniform(0.1, 0.9, depth)]) for _ in range(len(PARTS) + 7)]
    every = (logged + plain) // logged
    size = 0
    for number in range(runs):
        lr, seed, lines = 10.0 ** -(1 + number // 5 % 4), number % 5, [metrics_line({"step": 0, "val_loss": 5.5})]
        for step in range(1, logged + plain + 1):
            loss = 2 + 3.5 * np.exp(-step * (1 + seed / 9) / 50) + lr
            record = {"step": step, "tokens": 512 * step, "loss": loss, "lr": lr, "grad_norm": {"total": 1 + lr}}
            line = metrics_line(record | {"clip_coefficient": 1.0})
            if step % every == 0:
                arrays = ", ".join(
                    f'"{part}": {pool[(place + step + number) % len(pool)]}' for place, part in enumerate(PARTS)
                )
                line = line.replace('"grad_norm": {', f'"grad_norm": {{"embed": 0.1, "head": 0.2, {arrays}, ')
            lines.append(line)
        directory = root / f"{number:03d}"
        write_run(directory, "\n".join(lines) + "\n", lr=lr, seed=seed, number=number, depth=depth)
        size += (directory / "metrics.jsonl").stat().st_size
    return size


def measured(root: Path, runs: int) -> tuple[float, float, float]:
    """(Seconds, peak memory in GB, page in MB) of the report of a sweep, in a process of its own."""
    started = time.monotonic()
    ended = command(str(root), cwd=root.parent, weighed=True)
    seconds = time.monotonic() - started
    assert ended.returncode == 0 and ended.stdout.splitlines()[0] == f"{root}/report.html", ended.stderr
    page = (root / "report.html").read_text()
    assert page.count('<tr><th scope="row" data-value=') == runs
    peak = int(ended.stderr.split()[-1]) * 1024 / 1e9
    return seconds, peak, len(page.encode()) / 1e6


def test_one_run_is_a_picture_and_several_are_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, seed in (("a", 0), ("b", 1)):
        write_run(tmp_path / "runs" / name, lines_of(5), seed=seed, steps_done=5, steps=5)
    (tmp_path / "there/empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "draw_run", lambda run, path: path.write_bytes(b"one"))
    monkeypatch.setattr(report, "draw_runs", lambda runs, path, names: path.write_bytes(b"several"))
    for words, written, runs in (
        ("runs/a", "runs/a/report.png", 1),
        ("runs", "runs/report.html", 2),
        ("runs/a runs/b", "report/report.html", 2),
        ("runs/a runs/b --out x.png", "x.png", 2),
        ("runs/a --out y.html", "y.html", 1),
        ("runs --out there", "there/report.html", 2),
        ("runs --out new/er", "new/er/report.html", 2),
    ):
        assert report.main(words.split()) == 0
        said, errors = capsys.readouterr()
        assert said.splitlines()[0] == written and errors == ""
        assert said.count("stable       loss  2.000  val  2.100  steps 5/5") == runs
        content = (tmp_path / written).read_bytes()
        if written.endswith("png"):
            assert content == (b"one" if runs == 1 else b"several")
        else:
            assert content.count(b'<tr><th scope="row" data-value="') == runs
    for words, why in (
        ("nowhere", "nowhere is not a run directory and holds none: there is no such directory"),
        ("there/empty", "there/empty is not a run directory and holds none: is empty"),
        ("runs --out x.pdf", "--out must end in .png or .html, or be a directory, not x.pdf"),
        ("runs --out runs/a/summary.json/x.html", "summary.json/figures: Not a directory"),
    ):
        assert report.main(words.split()) == 2
        said, errors = capsys.readouterr()
        assert said == "" and why in errors and errors.count("\n") == 1


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path):
    write_run(tmp_path / "a", lines_of(5), steps_done=5, steps=5)
    with subprocess.Popen(
        [sys.executable, ROOT / "scripts/report.py", tmp_path / "a"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
    assert (tmp_path / "a/report.png").is_file()


def test_what_is_broken_is_said_on_the_terminal_too(tmp_path: Path):
    write_study(tmp_path / "twenty")
    break_five(tmp_path / "twenty")
    (tmp_path / "twenty/notes").mkdir()
    ended = command("twenty", cwd=tmp_path)
    assert ended.returncode == 0 and len(ended.stdout.splitlines()) == 1 + 18
    assert "report.py: left out: notes: is empty" in ended.stderr
    assert "report.py: pre seed=2 lr=0.1: interrupted: signal 15 after step 3" in ended.stderr


def test_a_sweep_of_a_hundred_layers_is_reported(tmp_path: Path):
    write_sweep(tmp_path / "sweep", 30, 100, logged=5, plain=45)
    seconds, _, megabytes = measured(tmp_path / "sweep", 30)
    assert seconds < 60 and megabytes < 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_runs_of_a_thousand_layers_are_reported_in_a_minute(tmp_path: Path):
    """1.3 GB of records."""
    assert write_sweep(tmp_path / "sweep", 500, 1000) > 1.1e9
    seconds, peak, megabytes = measured(tmp_path / "sweep", 500)
    print(f"{seconds:.1f} s, {peak:.2f} GB, {megabytes:.1f} MB")
    assert seconds < 60 and peak < 0.5 and megabytes < 20  # GB: 0.26 measured, 0.08 of it the arrays
