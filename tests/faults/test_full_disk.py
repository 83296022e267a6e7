"""No room while a file of a run is written: one line, what was written before intact, and a resume once there is room.

A limit on the size of files stands in for a disk that is full (Python is told EFBIG, where a full disk says ENOSPC); the
real thing, a small file system of its own, needs rights that not every machine gives.
"""

import json
import logging
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stability.whole import whole
from tests.faults.test_kill import WORDS, finished, start
from tests.training.test_resume import go_on
from tests.training.test_run import steps
from training.checkpoint import save


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def litter(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "unfinished" in path.name]


# of this network the first checkpoint takes 70 kB, one with the optimizer's moments 205 kB, a record line with its layers 600 bytes
@pytest.mark.parametrize(
    "size, words, name",
    [(150_000, ["save_every=4"], "checkpoints/last.ckpt"), (100_000, ["log_every=1", "steps=300"], "metrics.jsonl")],
)
def test_a_run_that_finds_no_room_says_so_and_goes_on_later(run, tmp_path: Path, capsys, size: int, words, name: str):
    words = ["steps=12", "val_every=1000", "save_every=1000", "model.dropout=0.1", *words]
    unbroken, _ = run(*words)
    where = tmp_path / "full"
    capsys.readouterr()
    with files_of_at_most(size):
        broken, summary = run(*words, directory=where)
    assert (summary["verdict"], summary["code"]) == ("failed", 1)
    assert summary["reason"] == f"{where / name}: File too large: make room, then resume={where}"
    assert f"failed: {summary['reason']}\n" in capsys.readouterr().out
    assert json.loads((where / "summary.json").read_text())["verdict"] == "failed"
    kept = torch.load(where / "checkpoints/last.ckpt", weights_only=True)  # the one before
    assert kept["global_step"] <= len(steps(broken)) < len(steps(unbroken))
    assert not litter(where)
    assert broken == unbroken[: len(broken)]
    resumed, summary = go_on(run, summary, *words)
    assert resumed == unbroken
    assert summary["code"] == 0


def test_a_file_is_whole_or_the_old_one(tmp_path: Path):
    path = tmp_path / "file.ckpt"
    for write in (lambda: save({"a": torch.zeros(99_999)}, path), lambda: _text(path)):
        path.write_text("the old one")
        with pytest.raises(OSError, match="File too large") as caught, files_of_at_most(5_000):
            write()
        assert caught.value.filename == str(path)
        assert path.read_text() == "the old one"
        assert not litter(tmp_path)
        write()
        assert path.stat().st_size > 10_000
    with pytest.raises(ZeroDivisionError), whole(path) as file:
        file.write(bytes(1 // 0))
    assert path.stat().st_size > 10_000 and not litter(tmp_path)


def _text(path: Path) -> None:
    with whole(path) as file:
        file.write(b"x" * 20_000)


def test_an_error_that_is_no_full_disk_keeps_its_traceback(run, monkeypatch, tmp_path: Path):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("training.record.os", SimpleNamespace(fsync=refuse, fstat=os.fstat))
    with pytest.raises(RuntimeError, match=r"PermissionError: .* Permission denied: '.*metrics.jsonl'"):
        run("steps=2", directory=tmp_path / "other")


def test_a_library_whose_own_log_cannot_be_written_says_nothing_of_it(capsys):
    """W&B keeps a log beside the run; at the end of a full disk Python would print a traceback for each line of it."""

    def refuse(text: str) -> None:
        raise OSError(28, "No space left on device")

    log = logging.Logger("of a library")
    log.addHandler(logging.StreamHandler(SimpleNamespace(write=refuse, flush=lambda: None)))
    log.info("restore done")
    assert capsys.readouterr().err == ""


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("logger", ["none", "wandb"])
def test_full_disk_for_real(tmp_path: Path, logger: str):
    words = [word for word in WORDS if not word.startswith("logger")] + [f"logger={logger}"]
    finished(tmp_path, *words, "logger=none", "hydra.run.dir=unbroken")
    with small_disk(tmp_path / "disk", "12m"):
        run, fill = tmp_path / "disk" / "run", tmp_path / "disk" / "fill"
        process = start(tmp_path, *words, f"hydra.run.dir={run}")
        watch = threading.Timer(120, process.kill)
        watch.start()
        while not (run / "checkpoints/best.ckpt").is_file() and process.poll() is None:
            pass
        with fill.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        said, _ = process.communicate()
        watch.cancel()
        assert process.returncode == 1, said
        assert "No space left on device: make room, then resume=" in said and "Traceback" not in said
        last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        assert last["global_step"] > 0
        refused = start(tmp_path, f"resume={run}")
        said, _ = refused.communicate(timeout=60)
        assert refused.returncode == 2 and "MB needed for checkpoints and records: make room" in said
        fill.unlink()
        finished(tmp_path, f"resume={run}")
        assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "unbroken/metrics.jsonl").read_bytes()
