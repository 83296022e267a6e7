"""A sweep of twelve jobs, of which one is refused and one diverges, whose process is killed in the midst of the seventh: the
same command does what is missing and nothing twice."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.faults.test_kill import finished, start

FIXED = [*SMALL, "logger=none", "steps=200", "save_every=5", "data=synthetic", "data.tokens=20000", "model.dropout=0.1"]
RATES = ["0.001", "0.002", "-1", "0.003", "0.004", "0.005", "0.006", "1e+30", "0.007", "0.008", "0.009", "0.01"]


def sweep(directory: str) -> list[str]:
    return ["-m", *FIXED, f"optimizer.lr={','.join(RATES)}", f"hydra.sweep.dir={directory}"]


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines()]


def untimed(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "wall_time_s"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("R09")
def test_kill_a_sweep_and_give_the_same_command_again(tmp_path: Path):
    unbroken = start(tmp_path, *sweep("unbroken"))
    said, _ = unbroken.communicate(timeout=300)
    assert unbroken.returncode == 1, said

    killed = tmp_path / "killed"
    process = start(tmp_path, *sweep("killed"))
    while not (killed / "6/checkpoints/best.ckpt").is_file() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (killed / "6/summary.json").exists() and not (killed / "7").exists()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("[0-5]/*.json*") if path.parent.name != "2"}
    assert len(before) == 5 * 4  # metrics, summary, environment, tokenizer

    again = start(tmp_path, *sweep("killed"))
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 1, said
    assert said.count("nothing to do: 200 of 200 steps are done") == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before

    verdicts = [row["verdict"] for row in rows(killed)]
    good = [i for i, verdict in enumerate(verdicts) if verdict not in ("refused", "diverged")]
    assert verdicts[2] == "refused" and verdicts[7] == "diverged" and len(good) == 10
    assert all(rows(killed)[i]["final_loss"] is not None for i in good)
    assert [untimed(row) for row in rows(killed)] == [untimed(row) for row in rows(tmp_path / "unbroken")]
    for job in [*map(str, good), "7"]:
        records = [(tmp_path / name / job / "metrics.jsonl").read_bytes() for name in ("unbroken", "killed")]
        assert records[0] == records[1], f"job {job}"
    assert "optimizer.lr=-1 should be greater than 0" in (killed / "2/job.log").read_text()

    third = start(tmp_path, *sweep("killed"))
    said, _ = third.communicate(timeout=300)
    assert said.count("nothing to do: 200 of 200") == 10 and "(diverged)" in said

    # what a job of a sweep computes is what a run of its own would
    finished(tmp_path, *FIXED, "threads=1", "optimizer.lr=0.01", "hydra.run.dir=alone")
    assert (tmp_path / "alone/metrics.jsonl").read_bytes() == (killed / "11/metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_leaves_a_sweep_that_another_command_cannot_take_over(tmp_path: Path):
    """Job 0 of another sweep in the same place is refused, and what is there stays as it was."""
    finished(tmp_path, "-m", *FIXED, "steps=20", "optimizer.lr=0.001,0.002", "hydra.sweep.dir=sweep")
    kept = {path: path.read_bytes() for path in (tmp_path / "sweep").glob("?/*.json*")}
    other = start(tmp_path, "-m", *FIXED, "steps=20", "optimizer.lr=0.002,0.003", "hydra.sweep.dir=sweep")
    said, _ = other.communicate(timeout=120)
    assert other.returncode == 1
    for job in range(2):  # as it comes, and once more below the table
        assert f"normlab: job {job} refused: resume=sweep/{job}: optimizer.lr differ from the run's own config" in said
        assert f"\njob {job}, refused: resume=sweep/{job}: optimizer.lr differ from the run's own config" in said
    assert {path: path.read_bytes() for path in kept} == kept
