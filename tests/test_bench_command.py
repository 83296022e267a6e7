"""The benchmark's command, what its numbers are made of, and that the bare loop which training is held against trains."""

import json
import subprocess
import sys
import time
from itertools import islice
from math import isfinite, nan
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu, overhead, report, startup
from benchmarks.process import fresh
from benchmarks.ratios import Measurement, Row, Target, by_turns, neighbours
from scripts import bench
from tests.conftest import ROOT, SMALL, environment
from training import device as machine

TEXT = ["data=synthetic", "data.tokens=20000"]


def test_help_names_every_part(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(f"\n  {part} " in said for part in bench.PARTS)


@pytest.mark.parametrize("arguments, said", [
    (["--only", "norms,speed"], "--only norms,speed: no part 'speed'; there are overhead, startup, norms"),
    (["--only", ""], "no part ''"),
    (["--rounds", "0"], "--rounds must be >= 1, found 0"),
    (["--rounds", "many"], "argument --rounds: invalid int value: 'many'"),
    (["--fast"], "unrecognized arguments: --fast"),
    (["--gpu", "--only", "norms"], "leave out --only"),
    (["--only", "scaling", "--out", "{file}/below"], "file/below: Not a directory; --out names another place"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_bad_command_line_is_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert bench.main([argument.format(file=tmp_path / "file") for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bench.py: ") and said in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_gpu_its_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(["--gpu"]) == 2
    assert capsys.readouterr().err == "bench.py: --gpu needs a CUDA device, and torch finds none\n"


def test_each_ratio_is_of_two_neighbours():
    assert neighbours([2.0, 6.0, 8.0], [4.0, 2.0, 4.0]) == [2 / 4, 6 / 4, 6 / 2, 8 / 2, 8 / 4]
    # a machine that slows down by 10% from one measurement to the next: what takes twice as long still does
    drift = 1.1 ** np.arange(10)
    assert np.median(neighbours(2 * drift[::2], drift[1::2])) == pytest.approx(2, rel=0.1)
    assert np.exp(np.log(neighbours(2 * drift[::2], drift[1::2])[:8]).mean()) == pytest.approx(2)


def test_works_take_turns():
    called: list[str] = []
    works = [lambda: called.append("a"), lambda: (called.append("b"), time.sleep(0.01))]
    first, second = by_turns(works, rounds=3, seconds=0.0)
    assert "".join(called[-6:]) == "ababab"
    assert len(first) == len(second) == 3 and max(first) < 0.01 <= min(second)


@pytest.mark.parametrize("values, relation, verdict", [
    ((1.0, 1.2, 9.0), "<=", "met"),
    ((1.0, 1.3, 1.3), "<=", "missed"),
    ((1.0, 1.3, 1.3), ">=", "met"),
    ((9.0, 1.2, 1.0), ">=", "missed"),
])  # fmt: skip
def test_the_median_decides(values: tuple[float, ...], relation, verdict: str):
    row = Measurement(Row("norms", "a", "b", target=Target(relation, 1.25)), lambda: values).take()
    assert row.verdict == verdict
    record = row.record()
    assert (record["min"], record["median"], record["max"]) == tuple(sorted(values))
    assert record["target"] == f"{relation} 1.25"


def test_a_part_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path):
    def breaks() -> list[float]:
        raise RuntimeError("no room\nfor it")

    def of(name: str, measure) -> Measurement:
        return Measurement(Row("memory", name, "other", target=Target("<=", 2)), measure)

    plan = [of("breaks", breaks), of("unknown", lambda: [1.0, nan]), of("empty", list), of("good", lambda: [1.5])]
    taken: list = []
    bench.measure(plan, time.monotonic() + 60, taken)
    bench.measure([of("late", breaks)], time.monotonic(), taken)
    assert [row.verdict for row in taken] == ["failed", "failed", "failed", "met", "failed"]
    assert taken[0].failed == "RuntimeError: no room" and taken[4].failed == "left out: --minutes were over"
    report.write(taken, [], {"load at the start": report.load()}, tmp_path)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["breaks", "unknown", "empty", "good", "late"]
    shown = (tmp_path / "bench.txt").read_text()
    (line,) = [line for line in shown.splitlines() if " good " in line]
    assert line.split() == ["memory", "good", "other", "1", "<=", "2", "1.5", "1.5", "1.5", "1", "met"]
    assert "failed: RuntimeError: no room" in shown


def test_the_bare_loop_takes_the_steps_of_the_run(run):
    """Else the comparison would be of two trainings."""
    words = [*SMALL, *TEXT, "steps=12", "clip=0.5", "schedule.warmup=3"]
    records, _ = run("steps=12", "clip=0.5", "schedule.warmup=3")
    losses = [loss.item() for loss in overhead.bare_loop(words)]
    assert losses == pytest.approx([record["loss"] for record in records if "loss" in record], rel=1e-5)
    assert losses[-1] < losses[0] - 0.01


def test_a_run_is_held_against_the_loop_and_against_itself(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    bare = overhead.bare

    def slow(*args, **named):
        for loss in bare(*args, **named):
            time.sleep(0.2)
            yield loss

    monkeypatch.setattr(overhead, "bare", slow)  # a run of the same speed has more than twice its tokens per second
    found = overhead.against_bare([*SMALL, *TEXT, "threads=1"], rounds=3)
    assert len(found) == 5 and all(ratio > 2 for ratio in found)
    clipped = 0

    def count(*_) -> None:
        nonlocal clipped
        clipped += 1
        time.sleep(0.2)

    monkeypatch.setattr(overhead, "clip_grad_norm_", count)
    found = overhead.recording([*SMALL, "threads=1"], rounds=3)
    assert len(found) == 5 and all(0 < ratio < 0.5 for ratio in found)
    assert clipped == 4  # of 9 steps every second one only clips


def test_a_mode_that_fails_leaves_the_others(monkeypatch):
    def fake(words) -> dict[str, float]:
        if "compile=true" in words:
            raise RuntimeError("no compiler")
        return {"tokens_per_second": 200.0 if "trainer.cuda_graphs=true" in words else 100.0}

    monkeypatch.setattr(gpu, "run", fake)
    rows = [one.take() for one in gpu._of_size("a size", ("batch=1",), 2, mfu=True)]
    found = {(row.name, row.part, row.over): row.failed or list(row.values) for row in rows}
    assert found["a size, CUDA graphs", "speed", "eager"] == [2.0, 2.0, 2.0]
    assert found["a size, eager", "speed", ""] == [100.0, 100.0]
    assert found["a size, compiled", "speed", "eager"] == "RuntimeError: no compiler"
    assert "mfu" in found["a size, eager", "MFU", ""]  # missing from the summary, and said so


def test_a_command_that_takes_no_step_says_why():
    with pytest.raises(RuntimeError, match=r"no step in \d+ s: normlab: .*norm=nothing"):
        startup.first_step(["norm=nothing"])


@pytest.mark.slow
def test_a_process_does_not_inherit_a_peak_of_memory():
    held = np.ones(10**8)  # 800 MB
    assert machine.peak_memory("cpu") > held.nbytes > 1.2 * fresh(machine.peak_memory, "cpu")


@pytest.mark.slow
def test_everything_works_in_small(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path / "cache"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {row["part"] for row in found["rows"]} | {"scaling"} == set(bench.PARTS)
    assert [row["failed"] for row in found["rows"] if "failed" in row] == []
    numbers = [value for row in found["rows"] for value in row["values"]]
    numbers += [point[key] for point in found["scaling"] for key in ("seconds", "peak_memory", "share", "own_share")]
    assert found["scaling"] and all(isfinite(number) and number > 0 for number in numbers)
    assert len(found["load at the start"]) == len(found["load at the end"]) == 3
    shown = (tmp_path / "out" / "bench.txt").read_text()
    assert all(row["name"] in shown for row in found["rows"]) and shown.strip() in done.stdout
    assert list(islice(tmp_path.glob("runs/*"), 1)) == []
