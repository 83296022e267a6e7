"""A run killed with SIGKILL at random moments, start-up and checkpoints included, and resumed until it is done, leaves the
record of an unbroken one, byte for byte."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL, environment

WORDS = [*SMALL, "data=synthetic", "data.tokens=20000", "threads=1", "logger=none", "steps=400", "val_every=50"]
WORDS += ["save_every=7", "accumulate=2", "model.dropout=0.1", "log_every=9"]


def start(cwd: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(cwd / "cache"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(cwd: Path, *words: str) -> str:
    process = start(cwd, *words)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_kill_and_resume_leaves_the_unbroken_record(tmp_path: Path, seed: int):
    finished(tmp_path, *WORDS, "hydra.run.dir=unbroken")
    draw, killed, midway = random.Random(seed), tmp_path / "killed", 0
    for kill in range(8):
        resuming = (killed / "overrides.yaml").is_file()
        words = [f"resume={killed}"] if resuming else [*WORDS, f"hydra.run.dir={killed}"]
        process = start(tmp_path, *words)
        if kill % 2:  # while it trains: a moment after its record has grown
            size, deadline = _size(killed), time.monotonic() + 60
            while _size(killed) <= size and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
        else:  # wherever it is by then
            time.sleep(draw.uniform(0.2, 7))
        midway += process.poll() is None and _size(killed) > 0
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    words = [f"resume={killed}"] if (killed / "overrides.yaml").is_file() else [*WORDS, f"hydra.run.dir={killed}"]
    finished(tmp_path, *words)
    assert midway >= 2, "the kills came too late or too early to tell anything"
    record = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("unbroken", "killed")]
    assert record[0] == record[1]
    assert not list(killed.rglob("*unfinished*"))


def _size(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0
