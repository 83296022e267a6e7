"""Runs ended at random moments, start-up and checkpoints included, by SIGKILL, SIGTERM and SIGINT: each leaves what it
should, and resumed until it is done it leaves the record of an unbroken one, byte for byte."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

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


def finish(cwd: Path, run: Path) -> None:
    """Start or resume a run, as its user would, until it is done."""
    finished(cwd, *([f"resume={run}"] if (run / "overrides.yaml").is_file() else [*WORDS, f"hydra.run.dir={run}"]))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, bytes, float, float]:
    """(Where the runs live, the record of one that nothing happened to, the seconds that it took to start and to train)."""
    cwd = tmp_path_factory.mktemp("killed")
    finished(cwd, *WORDS, "hydra.run.dir=first")  # the tokens are made by this one
    began = time.monotonic()
    finished(cwd, *WORDS, "hydra.run.dir=unbroken")
    took = time.monotonic() - began
    training = json.loads((cwd / "unbroken/summary.json").read_text())["wall_time_s"]
    return cwd, (cwd / "unbroken/metrics.jsonl").read_bytes(), took - training, training


def intact(run: Path, record: bytes) -> None:
    assert (run / "metrics.jsonl").read_bytes() == record
    assert not [path for path in run.rglob("*") if "unfinished" in path.name]


def stage(run: Path) -> str:
    """How far a run has come."""
    if not (run / "metrics.jsonl").is_file():
        return "start-up"
    return "end" if len((run / "metrics.jsonl").read_bytes().splitlines()) >= 400 else "training"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_kill_again_and_again_leaves_the_unbroken_record(unbroken, seed: int):
    """One run, killed eight times."""
    cwd, record, *_ = unbroken
    draw, run, midway = random.Random(seed), cwd / f"again{seed}", 0
    for kill in range(8):
        resuming = (run / "overrides.yaml").is_file()
        process = start(cwd, *([f"resume={run}"] if resuming else [*WORDS, f"hydra.run.dir={run}"]))
        if kill % 2:  # while it trains: a moment after its record has grown
            size, deadline = _size(run), time.monotonic() + 60
            while _size(run) <= size and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
        else:  # wherever it is by then
            time.sleep(draw.uniform(0.2, 7))
        midway += process.poll() is None and _size(run) > 0
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finish(cwd, run)
    assert midway >= 2, "the kills came too late or too early to tell anything"
    intact(run, record)


def _size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.is_file() else 0


def ended_by(number: int, trial: int, unbroken: tuple[Path, bytes, float, float]) -> str:
    """One run, one signal at a random moment, of its start for even trials and of its training for odd ones, and what must
    hold then; how far it had come."""
    cwd, record, starting, training = unbroken
    run, draw = cwd / f"{signal.Signals(number).name}{trial}", random.Random(1000 * number + trial)
    process = start(cwd, *WORDS, f"hydra.run.dir={run}")
    if trial % 2:
        while not _size(run) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, training))
    else:
        time.sleep(draw.uniform(0.1, starting))
    came = "done" if process.poll() is not None else stage(run)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    for path in run.glob("checkpoints/*.ckpt"):  # none is lost, none is half
        torch.load(path, weights_only=True)
    if came == "done":
        assert process.returncode == 0, said
    elif number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        # Python itself answers as long as it has not read the program
        codes = {128 + number, -number} if not run.is_dir() else {128 + number}
        assert process.returncode in codes, said
        assert "Traceback" not in said or process.returncode < 0, said
        if (run / "config.yaml").is_file():
            summary = json.loads((run / "summary.json").read_text())
            done = summary["steps_done"]
            assert summary["verdict"] == "interrupted" or done == 400, said
            if done:
                assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == done
    finish(cwd, run)
    intact(run, record)
    return came


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number, trials", [(signal.SIGKILL, 50), (signal.SIGTERM, 20), (signal.SIGINT, 20)])
def test_many_runs_ended_at_random_moments(unbroken, number: int, trials: int):
    with ThreadPoolExecutor(2) as pool:
        came = Counter(pool.map(lambda trial: ended_by(number, trial, unbroken), range(trials)))
    print(f"{signal.Signals(number).name}: {dict(came)}")
    assert came["start-up"] >= trials // 10 and came["training"] >= trials // 10, came


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_kill_a_run_that_was_already_asked_to_stop(tmp_path: Path, number: int):
    """The second signal ends it at once, in the midst of a step that takes long."""
    words = [word for word in WORDS if not word.startswith(("model", "accumulate"))]
    words += ["batch=1024", "model.context=128", "data.tokens=600000", "data.val_windows=1", "hydra.run.dir=run"]
    process = start(tmp_path, *words)
    while not (tmp_path / "run/checkpoints/last.ckpt").is_file():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)  # in the first step, which takes ten seconds, most of them in one call of backward
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.3)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 2
    assert not (tmp_path / "run/summary.json").is_file()
