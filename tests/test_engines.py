"""Sweeps on engines: whatever starts the jobs, they leave the same records."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, SMALL, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = [*SMALL, "logger=none", "data=synthetic", "data.tokens=20000", "steps=60"]
SIX = ["optimizer.lr=1e-3,1e-2,1e9", "placement=pre,post", "schedule=constant"]  # of which two diverge
TIMES = {"tokens_per_second", "wall_time_s", "peak_memory_bytes"}


SLURM = {  # a cluster of one machine, as far as submitit looks at it: its jobs run one after the other
    "sbatch": """\
last=$(sed -n 's/#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
export SLURM_ARRAY_JOB_ID=100 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
(for i in $(seq 0 "$last"); do SLURM_JOB_ID=$((100 + i)) SLURM_ARRAY_TASK_ID=$i bash "$1"; done) >/dev/null 2>&1 &
cp "$1" "$(dirname "$0")/submitted"
echo Submitted batch job 100
""",
    "srun": 'while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] || shift; shift; done; exec "$@"\n',
    "sacct": "echo 'JobID|State|NodeList'\n",
}


def start(*words: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), "-m", *WORDS, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment(cwd) | more, text=True, stdout=pipe, stderr=pipe)


def sweep(*words: str, cwd: Path, **more: str) -> tuple[int, str, str]:
    process = start(*words, cwd=cwd, **more)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def summaries(directory: Path) -> list[dict[str, Any]]:
    known = [json.loads((directory / str(job) / "summary.json").read_text()) for job in range(6)]
    return [{key: value for key, value in summary.items() if key not in TIMES} for summary in known]


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    """The six jobs, one after the other in one process."""
    cwd: Path = tmp_path_factory.mktemp("engines")
    code, _, errors = sweep(*SIX, "hydra.sweep.dir=basic", cwd=cwd)
    assert code == 1 and "Traceback" not in errors
    return cwd


@pytest.mark.parametrize("engine", ["joblib", "submitit_local", "submitit_slurm", "ray"])
def test_the_same_six_summaries(six: Path, engine: str):
    (six / "bin").mkdir(exist_ok=True)
    for name, script in SLURM.items():
        (six / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}")
        (six / "bin" / name).chmod(0o755)
    path = f"{six / 'bin'}:{os.environ['PATH']}"
    code, _, errors = sweep(*SIX, f"hydra/launcher={engine}", f"hydra.sweep.dir={engine}", cwd=six, PATH=path)
    assert code == 1, errors
    assert "Traceback" not in errors
    assert summaries(six / engine) == summaries(six / "basic")
    assert [s["verdict"] for s in summaries(six / engine)].count("diverged") == 2
    untimed = [[row | {"wall_time_s": None} for row in rows(six / name)] for name in ("basic", engine)]
    assert untimed[0] == untimed[1]
    for name in ("metrics.jsonl", "config.yaml"):
        for job in "012345":
            assert (six / engine / job / name).read_bytes() == (six / "basic" / job / name).read_bytes()
    assert (six / engine / "3" / "job.log").read_text().startswith("\njob 3: ")


def running(directory: Path) -> Iterator[int]:
    """The process that has the lock of a run's directory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) == str(directory.resolve() / ".lock") for fd in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:
            continue


def kill(directory: Path) -> None:
    """Kill the process that has taken steps there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (directory / "metrics.jsonl").is_file() and (found := list(running(directory))):
            os.kill(found[0], signal.SIGKILL)
            while (Path("/proc") / str(found[0])).exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return
        time.sleep(0.01)
    raise AssertionError(f"nothing ran in {directory}")


LONG = ["steps=1500", "save_every=50", "seed=0,1,2,3", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def test_a_killed_worker_loses_nothing(tmp_path: Path):
    process = start(*LONG, "hydra.sweep.dir=killed", cwd=tmp_path)
    kill(tmp_path / "killed/1")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert sweep(*LONG, "hydra.sweep.dir=whole", cwd=tmp_path)[0] == 0
    for job in "0123":
        records = [(tmp_path / name / job / "metrics.jsonl").read_bytes() for name in ("killed", "whole")]
        assert records[0] == records[1]


def test_a_job_whose_worker_is_always_killed_has_failed_alone(tmp_path: Path):
    process = start(*LONG, "hydra.sweep.dir=killed", cwd=tmp_path)
    kill(tmp_path / "killed/1")
    kill(tmp_path / "killed/1")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    known = rows(tmp_path / "killed")
    assert (
        known[1]["verdict"] == "failed" and "its process was killed, and again while it ran alone" in known[1]["reason"]
    )
    assert all(known[job]["final_loss"] is not None for job in (0, 2, 3))
    assert "its process was killed, and again while it ran alone" in out
    # the same command takes it up again where it was
    again, _, errors = sweep(*LONG, "hydra.sweep.dir=killed", cwd=tmp_path)
    assert again == 0, errors
    assert len((tmp_path / "killed/1/metrics.jsonl").read_text().splitlines()) >= 1500


def test_a_signal_ends_a_sweep_in_several_processes(tmp_path: Path):
    words = [
        "steps=100000",
        "seed=0,1,2,3",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=sweep",
    ]
    process = start(*words, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"sweep/{job}/metrics.jsonl").is_file() for job in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert [row["verdict"] for row in rows(tmp_path / "sweep")] == ["interrupted"] * 2 + ["not_started"] * 2
    assert not any(path.name == "metrics.jsonl" for job in "23" for path in tmp_path.glob(f"sweep/{job}/*"))


def test_optuna_finds_the_learning_rate_and_survives_what_diverges(tmp_path: Path):
    """The grid goes in factors of 2. From about 10 on runs of this size diverge: half of Optuna's range, in the logarithm."""
    words = ["steps=100", "schedule=constant"]
    grid = [f"{1e-4 * 2**k:g}" for k in range(14)]
    assert sweep(*words, f"optimizer.lr={','.join(grid)}", "hydra.sweep.dir=grid", cwd=tmp_path)[0] in (0, 1)
    done = [(row["final_loss"], float(rate)) for row, rate in zip(rows(tmp_path / "grid"), grid, strict=True)]
    best = min(pair for pair in done if pair[0] is not None)[1]
    range_ = "optimizer.lr=tag(log,interval(1e-4,1e6))"
    code, out, errors = sweep(*words, "hydra/sweeper=optuna", range_, "hydra.sweep.dir=optuna", cwd=tmp_path)
    assert code == 1, errors  # some diverged
    found = rows(tmp_path / "optuna")
    assert len(found) == 20 and sum(row["verdict"] == "diverged" for row in found) >= 3
    good = [row for row in found if row["verdict"] != "diverged"]
    lowest = min(good, key=lambda row: row["final_loss"])
    (rate,) = [float(word.partition("=")[2]) for word in lowest["overrides"] if word.startswith("optimizer.lr=")]
    assert best / 2 <= rate <= best * 2, (best, rate)
    assert f"lowest loss: {lowest['final_loss']:.4f} nats, job {lowest['job']}" in out


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_leaves_the_last_job_its_record_while_another_process_has_none(tmp_path: Path):
    words = [
        "steps=1,2,100000",
        "save_every=0",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=s",
    ]
    process = start(*words, cwd=tmp_path)
    until(lambda: all((tmp_path / f"s/{job}/summary.json").is_file() for job in "01"))
    until((tmp_path / "s/2/metrics.jsonl").is_file)
    time.sleep(0.5)  # the other process has nothing to do by now
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.count("SIGTERM") == 1 and "Traceback" not in errors
    row = rows(tmp_path / "s")[2]
    assert row["verdict"] == "interrupted" and row["final_loss"] is not None


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path):
    words = ["steps=100000", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=s"]
    process = start(*words, cwd=tmp_path, TMPDIR=str(tmp_path))
    until(lambda: all((tmp_path / f"s/{job}/metrics.jsonl").is_file() for job in "01"))
    process.kill()
    process.communicate(timeout=60)
    until(lambda: all((tmp_path / f"s/{job}/summary.json").is_file() for job in "01"))
    assert [json.loads((tmp_path / f"s/{job}/summary.json").read_text())["verdict"] for job in "01"] == [
        "interrupted",
        "interrupted",
    ]
    until(lambda: not list(running(tmp_path / "s/0")) and not list(tmp_path.glob("normlab-*")))


def test_a_job_refused_in_another_process_says_why(tmp_path: Path):
    """Its directory holds another run, and it leaves nothing there."""
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=s", "hydra.sweep.subdir='${seed}'"]
    assert sweep(*words, "steps=2", "seed=0,1", cwd=tmp_path)[0] == 0
    code, out, errors = sweep(*words, "steps=2", "batch=4", "seed=0,1", cwd=tmp_path)
    assert code == 1 and "Traceback" not in errors
    assert [row["verdict"] for row in rows(tmp_path / "s")] == ["refused"] * 2
    assert out.count("batch") >= 2, out
