"""What is shown of a sweep while it runs, from directories made by hand and a clock of the test's."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from conf.output import Output, logged
from stability import records
from stability.progress import QUIET, SHOWN, Watch, watching
from stability.records import last_step, metrics_line, without_steps
from tests.conftest import environment

JOBS = [["norm=rmsnorm", f"seed={seed}"] for seed in range(5)]


def step(number: int, loss: float = 2.5, total: float = 0.125, **more) -> str:
    return metrics_line({"step": number, "loss": loss, "grad_norm": {"total": total, **more}}) + "\n"


def begin(place: Path, words: list[str], steps: int = 100) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yaml").write_text(f"steps: {steps}\n")
    (place / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    return place


def go(place: Path, number: int, **numbers: float) -> None:
    with (place / "metrics.jsonl").open("a") as file:
        file.write(step(number, **numbers))


def end(place: Path, verdict: str, **known) -> None:
    known = {"steps": 100, "steps_done": 100} | known
    (place / "summary.json").write_text(json.dumps(without_steps(verdict, "a reason", **known)))


@pytest.fixture
def clock() -> Callable[[], float]:
    """Stands still unless `now` is moved."""

    def read() -> float:
        return read.now  # type: ignore[attr-defined]

    read.now = 1000.0  # type: ignore[attr-defined]
    return read


def terminal(width: int = 80) -> Console:
    return Console(force_terminal=True, color_system=None, file=StringIO(), width=width, height=40)


def shown(watch: Watch, width: int = 80) -> list[str]:
    console = terminal(width)
    console.print(watch.shown(console))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_what_runs_and_how_many_of_what(tmp_path: Path, clock):
    watch = Watch(tmp_path, JOBS, clock=clock)
    assert watch.look(first=True) == []
    assert shown(watch) == ["5 runs: 0 finished, 0 failed, 0 diverged, 5 waiting"]
    places = [begin(tmp_path / f"deep/er/{number}", words) for number, words in enumerate(JOBS[:4])]
    go(places[1], 25, loss=3.14159, total=0.0123456)
    go(places[3], 7, loss=float("nan"), total=float("inf"))
    assert watch.look() == []
    head, *rows, counts = shown(watch)
    assert head.split() == ["run", "step", "loss", "grad", "norm", "left"]
    assert [[word for word in row.split() if not {*word} & {*"━╸"}] for row in rows] == [
        ["1", "seed=0", "0/100"], ["2", "seed=1", "25/100", "3.1416", "0.0123"], ["3", "seed=2", "0/100"],
        ["4", "seed=3", "7/100", "nan", "nan"],
    ]  # fmt: skip
    assert counts == "5 runs: 0 finished, 0 failed, 0 diverged, 4 running, 1 waiting"

    end(places[1], "stalled", final_loss=3.18554, wall_time_s=6.71)
    end(places[3], "diverged", final_loss=9.0)
    end(places[2], "refused")
    os.utime(places[3] / "summary.json", ns=(1, 1))  # the first of the three
    os.utime(places[2] / "summary.json", ns=(2, 2))
    assert watch.look() == [
        "run 4 of 5: seed=3  diverged  loss 9.0000",
        "run 3 of 5: seed=2  refused: a reason",
        "run 2 of 5: seed=1  stalled  loss 3.1855  6.7 s",
    ]
    assert shown(watch)[-1] == "5 runs: 1 finished, 1 failed, 1 diverged, 1 running, 1 waiting"
    assert watch.look() == []
    end(places[1], "stable")
    assert watch.look() == []  # none is told twice
    assert watch.rest() == ["run 1 of 5: seed=0  unfinished"]  # what never began is no ending


def test_a_killed_job_runs_no_longer_than_it_could_be_busy(tmp_path: Path, clock):
    watch = Watch(tmp_path, JOBS[:1], clock=clock)
    watch.look(first=True)
    place = begin(tmp_path / "0", JOBS[0])
    watch.look()
    clock.now += 0.9 * QUIET
    watch.look()
    assert "1 running" in shown(watch)[-1]
    go(place, 1)  # after a long silence: so much and more may come again
    watch.look()
    clock.now += 3 * QUIET
    watch.look()
    assert "1 running" in shown(watch)[-1]
    clock.now += QUIET
    watch.look()
    assert shown(watch) == ["1 run: 0 finished, 0 failed, 0 diverged, 1 silent, 0 waiting"]
    go(place, 2)
    watch.look()
    assert "1 running" in shown(watch)[-1]
    assert watch.rest() == ["run 1 of 1: norm=rmsnorm seed=0  unfinished"]


def test_a_job_that_vanished_waits_again(tmp_path: Path, clock):
    watch = Watch(tmp_path, JOBS[:2], clock=clock)
    watch.look(first=True)
    go(begin(tmp_path / "0", JOBS[0]), 50)
    watch.look()
    shutil.rmtree(tmp_path / "0")
    assert watch.look() == [] and watch.rest() == []
    assert shown(watch)[-1].endswith("0 diverged, 2 waiting")
    begin(tmp_path / "0", JOBS[0])
    watch.look()
    assert "0/100" in shown(watch)[1]


def test_the_same_command_again(tmp_path: Path, clock):
    """What is judged has run before. What was begun, interrupted, or judged for fewer steps waits until it is taken up."""
    for number, words in enumerate(JOBS):
        go(begin(tmp_path / str(number), words), 60)
    end(tmp_path / "0", "stable", final_loss=1.0)
    end(tmp_path / "1", "diverged")
    end(tmp_path / "2", "interrupted")
    end(tmp_path / "3", "stable", steps=60)
    watch = Watch(tmp_path, JOBS, [f"job {number}" for number in range(5)], clock=clock)
    assert watch.look(first=True) == [
        "run 1 of 5: job 0  stable  loss 1.0000  had run before",
        "run 2 of 5: job 1  diverged  had run before",
    ]
    assert watch.look() == []
    assert shown(watch) == ["5 runs: 1 finished, 0 failed, 1 diverged, 3 waiting"]
    (tmp_path / "2/job.log").write_text("job 2")
    watch.look()
    assert "60/100" in shown(watch)[1] and "2 waiting" in shown(watch)[-1]
    end(tmp_path / "2", "interrupted", final_loss=4.0)
    assert watch.look() == []  # Slurm may start it again
    (tmp_path / "2/job.log").write_text("job 2, interrupted")
    watch.look()
    assert "1 interrupted" in shown(watch)[-1]
    go(tmp_path / "2", 61)
    watch.look()
    assert "61/100" in shown(watch)[1]
    end(tmp_path / "2", "interrupted")
    end(tmp_path / "4", "stable")
    assert watch.look() == ["run 5 of 5: job 4  stable"]
    assert watch.rest() == ["run 3 of 5: job 2  interrupted"]


def test_jobs_that_nobody_has_listed(tmp_path: Path, clock):
    watch = Watch(tmp_path, None, clock=clock)
    assert watch.look(first=True) == []
    end(begin(tmp_path / "0", ["norm=rmsnorm", "lr=1"]), "stable")
    begin(tmp_path / "1", ["norm=rmsnorm", "lr=2"])
    assert watch.look() == ["run 1: lr=1  stable"]
    _, row, counts = shown(watch)
    assert row.startswith("  2  lr=2") and counts == "2 runs: 1 finished, 0 failed, 0 diverged, 1 running"


def test_what_a_job_of_this_process_came_to(tmp_path: Path, clock):
    """A job that is refused because its directory holds the run of other words leaves nothing there."""
    ran: dict = {}
    go(begin(tmp_path / "0", ["other=words"]), 10)
    watch = Watch(tmp_path, JOBS[:2], ran=ran, clock=clock)
    watch.look(first=True)
    ran[0] = tmp_path / "0", without_steps("refused", "it holds\nanother run")
    assert watch.look() == ["run 1 of 2: seed=0  refused: it holds another run"]
    assert watch.look() == []


def test_two_jobs_of_the_same_words(tmp_path: Path, clock):
    watch = Watch(tmp_path, [JOBS[0], JOBS[0]], clock=clock)
    watch.look(first=True)
    end(begin(tmp_path / "0", JOBS[0]), "stable")
    assert watch.look() == ["run 1 of 2: norm=rmsnorm seed=0  stable"]
    end(begin(tmp_path / "1", JOBS[0]), "spiky")
    assert watch.look() == ["run 2 of 2: norm=rmsnorm seed=0  spiky"]


@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"- [", b"\xff\x00\n", b"[]\n", b'{"verdict": 3, "loss": "x", "steps": "y"}\n']
)
def test_a_damaged_file_hides_no_other_job(tmp_path: Path, clock, name: str, content: bytes):
    watch = Watch(tmp_path, JOBS[:2], clock=clock)
    watch.look(first=True)
    (begin(tmp_path / "0", JOBS[0]) / name).write_bytes(content)
    end(begin(tmp_path / "1", JOBS[1]), "stable")
    assert watch.look() == ["run 2 of 2: seed=1  stable"]
    assert shown(watch)[-1].startswith("2 runs: 1 finished, 0 failed, 0 diverged")


def left(watch: Watch) -> str:
    return shown(watch)[1].split()[-1]


def test_the_time_left_is_that_of_the_steps_seen(tmp_path: Path, clock):
    """Two seconds a step, seen ten steps at a time; meanwhile it counts down."""
    watch = Watch(tmp_path, JOBS[:2], clock=clock)
    watch.look(first=True)
    place = begin(tmp_path / "0", JOBS[0])
    watch.look()
    clock.now += 60  # a slow start is no slow pace
    go(place, 10)
    watch.look()
    assert left(watch) == "0.125"  # one sighting: blank
    for seen in range(20, 100, 10):
        clock.now += 20
        go(place, seen)
        watch.look()
        assert left(watch) == f"0:0{2 * (100 - seen) // 60}:{2 * (100 - seen) % 60:02d}"
        clock.now += 5
        watch.look()
        assert left(watch) == f"0:0{(2 * (100 - seen) - 5) // 60}:{(2 * (100 - seen) - 5) % 60:02d}"
        clock.now -= 5
    clock.now += 100
    assert left(watch) == "0:00:00"


def test_before_two_sightings_it_is_that_of_finished_jobs_of_as_many_steps(tmp_path: Path, clock):
    for number, (steps, seconds) in enumerate([(100, 200.0), (100, 400.0), (50, 1.0)]):
        end(begin(tmp_path / f"{number}", JOBS[number], steps), "stable", steps=steps, steps_done=steps, wall_time_s=seconds)  # fmt: skip
    watch = Watch(tmp_path, JOBS, clock=clock)
    watch.look(first=True)
    begin(tmp_path / "3", JOBS[3])
    watch.look()
    assert left(watch) == "0:05:00"
    clock.now += 10
    go(tmp_path / "3", 50)
    watch.look()
    assert left(watch) == "0:02:30"


def test_a_resumed_run_has_a_clock_of_its_own(tmp_path: Path, clock):
    """The lines beyond its checkpoint are dropped, and what it takes to start counts for none of its steps."""
    place = begin(tmp_path / "0", JOBS[0])
    go(place, 60)
    watch = Watch(tmp_path, JOBS[:1], clock=clock)
    watch.look(first=True)
    (place / "job.log").write_text("job 0")
    for number in (50, 50, 60, 70):
        clock.now += 10
        (place / "metrics.jsonl").write_text(step(number))
        watch.look()
    assert left(watch) == "0:00:30"


def test_as_many_lines_as_there_is_room_for(tmp_path: Path, clock):
    jobs = [["a.rather.long.key.of.a.model=with_a_value", "model.depth=12", f"optimizer.lr=0.00{number}"] for number in range(30)]  # fmt: skip
    watch = Watch(tmp_path, jobs, [" ".join(words) for words in jobs], clock=clock)
    watch.look(first=True)
    for number, words in enumerate(jobs):
        go(begin(tmp_path / str(number), words, steps=10000), 9999)
    watch.look()
    for width in (80, 140):
        lines = shown(watch, width)
        assert len(lines) == 1 + SHOWN + 2 and max(map(len, lines)) <= width
        assert all("9999/10000  2.5000" in line for line in lines[1:-2])
        assert lines[-2] == "... and 10 more"
        names = [line.split("━" if "━" in line else "╸")[0].split(maxsplit=1)[1].strip() for line in lines[1:-2]]
        assert names == [" ".join(words) if width == 140 else f"…{' '.join(words)[-23:]}" for words in jobs[:SHOWN]]
    console = Console(force_terminal=True, file=StringIO(), width=80, height=10)
    console.print(watch.shown(console))
    assert console.file.getvalue().count("9999/10000") == 6  # type: ignore[attr-defined]


def test_the_last_step_is_found_from_the_end(tmp_path: Path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) is None
    path.write_text("")
    assert last_step(path) is None
    path.write_text(step(1)[:-1])
    assert last_step(path) is None  # not written to its end
    huge = [0.123456789] * 100_000
    whole = step(1) + step(2) + step(3, attention=huge)
    aside = (
        metrics_line({"step": 3, "val_loss": 1.0}) + "\n" + metrics_line({"step": 3, "probe": {"loss": 1.0, "x": huge}})
    )
    for text, found in [(step(1), 1), (whole, 3), (whole + aside + "\n", 3), (step(2) + aside + "\n{\n[1]\n3\n", 2), (whole + step(4)[:-9], 3)]:  # fmt: skip
        path.write_text(text)
        record = last_step(path)
        assert record and record["step"] == found and record["grad_norm"]["total"] == 0.125
        monkeypatch.setattr(records, "CHUNK", 7)
        assert last_step(path) == record
        monkeypatch.undo()


def test_nothing_is_read_twice_that_has_not_changed(tmp_path: Path, clock, monkeypatch):
    opened: list[str] = []
    watch = Watch(tmp_path, JOBS[:3], clock=clock)
    watch.look(first=True)
    places = [begin(tmp_path / str(number), words) for number, words in enumerate(JOBS[:3])]
    go(places[1], 1)
    end(places[0], "stable")
    watch.look()
    original = Path.open

    def noted(self, *args, **kwargs):
        opened.append(str(self.relative_to(tmp_path)))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noted)
    watch.look()
    assert opened == []
    go(places[1], 2)
    (places[0] / "metrics.jsonl").write_text(step(9))  # of a job that has ended
    opened.clear()
    watch.look()
    assert opened == ["1/metrics.jsonl"]


# The context itself


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("run ")]


def until(true: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < 20
        time.sleep(0.01)


def sees_cursor(text: str) -> bool:
    """Whether a terminal that was told so shows its cursor, which was hidden meanwhile."""
    return text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


@pytest.fixture
def threads():
    """Every thread that a test starts has ended with it."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("threads")
def test_where_there_is_no_terminal_each_job_that_ends_is_one_line(tmp_path: Path):
    """At once, and the last of them on leaving."""
    end(begin(tmp_path / "0", JOBS[0]), "stable", final_loss=1.0)
    out = StringIO()
    with watching(tmp_path, JOBS, console=Console(file=out, width=20), every=0.01):
        assert out.getvalue() == "run 1 of 5: seed=0  stable  loss 1.0000  had run before\n"
        for number in (2, 1):
            end(begin(tmp_path / str(number), JOBS[number]), "stable", final_loss=number)
            until(lambda: len(lines_of(out.getvalue())) == 4 - number)  # noqa: B023
        begin(tmp_path / "3", JOBS[3])
        end(begin(tmp_path / "4", JOBS[4]), "failed")
    assert out.getvalue().splitlines()[1:] == [
        "run 3 of 5: seed=2  stable  loss 2.0000", "run 2 of 5: seed=1  stable  loss 1.0000",
        "run 5 of 5: seed=4  failed: a reason", "run 4 of 5: seed=3  unfinished",
    ]  # fmt: skip


@pytest.mark.usefixtures("threads")
def test_on_a_terminal_they_scroll_above_what_runs(tmp_path: Path):
    console = terminal()
    out = console.file
    with watching(tmp_path, JOBS, ["[bold]", "b", "c", "d", "e"], console=console, every=0.01):
        go(begin(tmp_path / "0", JOBS[0], steps=2000), 1200, loss=3.25)
        until(lambda: "1200/2000  3.2500      0.125" in out.getvalue())
        end(tmp_path / "0", "stable", final_loss=3.0)
        until(lambda: "5 runs: 1 finished, 0 failed, 0 diverged, 4 waiting" in out.getvalue())
    assert out.getvalue().count("run 1 of 5: [bold]  stable  loss 3.0000") == 1
    text = out.getvalue()
    assert sees_cursor(text) and sees_cursor(text[: text.find("runs:")])  # a process may be killed while it runs
    assert not text.rsplit("\x1b[2K", 1)[1].strip().startswith("5 runs")  # what was live is gone


@pytest.mark.usefixtures("threads")
def test_a_job_takes_the_streams_for_its_log_and_the_display_is_none_the_less_on_the_terminal(tmp_path, monkeypatch):
    real = StringIO()
    monkeypatch.setattr(real, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", Output(real))
    streams = sys.stdout, sys.stderr
    with watching(tmp_path, JOBS[:1], every=0.01):
        assert (sys.stdout, sys.stderr) == streams  # rich has put nothing in their place
        place = begin(tmp_path / "0", JOBS[0])
        with logged(place / "job.log", echo=False):
            print("of the job")
            go(place, 30)
            until(lambda: "30/100" in real.getvalue())
            end(place, "stable")
            until(lambda: "run 1 of 1: norm=rmsnorm seed=0  stable" in real.getvalue())
        print("of the sweep")
    assert (tmp_path / "0/job.log").read_text() == "of the job\n"
    assert "of the sweep\n" in real.getvalue() and "of the job" not in real.getvalue()


class Broken(StringIO):
    def write(self, text: str) -> int:
        raise self.error  # type: ignore[attr-defined]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "error", [OSError(5, "gone"), BrokenPipeError(32, "closed"), ValueError("closed"), RuntimeError()]
)
@pytest.mark.parametrize("live", [True, False])
def test_what_goes_wrong_in_the_watcher_is_nothing_to_the_sweep(tmp_path: Path, error: Exception, live: bool):
    file = Broken()
    file.error = error  # type: ignore[attr-defined]
    with watching(tmp_path / "not there", JOBS, console=Console(file=file, force_terminal=live), every=0.01):
        end(begin(tmp_path / "not there/0", JOBS[0]), "stable")
        time.sleep(0.05)


@pytest.mark.usefixtures("threads")
def test_what_goes_wrong_in_the_sweep_is_raised(tmp_path: Path):
    console = terminal()
    with pytest.raises(KeyboardInterrupt), watching(tmp_path, JOBS, console=console, every=0.01):
        raise KeyboardInterrupt
    assert sees_cursor(console.file.getvalue())  # type: ignore[attr-defined]


STOPPED = """
import sys, time
from pathlib import Path
from stability.progress import watching
from training.signals import Signals

with Signals() as signals, signals.at_once(), watching(Path(sys.argv[1]), [["a=1"]], every=0.01):
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_sweep_leaves_the_terminal_as_it_was(tmp_path: Path, number: signal.Signals):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path)], stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(tmp_path) | {"TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"1 waiting" not in said:
        said += os.read(ours, 4096)
    process.send_signal(number)
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(20) != 0
    assert sees_cursor(said.decode())
    assert b"Interrupted" in said or number == signal.SIGKILL
