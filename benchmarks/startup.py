"""Seconds from the command to the first step."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import train
from benchmarks.ratios import Measurement, Row, Target
from benchmarks.step import Shape, composed
from conf.check import check
from stability.records import lines

LONGEST = 180  # seconds
POLL = 0.02


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    """`python train.py` as a new user has it, and 1,000 layers, eager and compiled with nothing compiled before."""
    depth = 2 if quick else 1000
    deep = ["model=deep", f"model.depth={depth}", "model.dim=64"]
    tiny = ["model.dim=16", "model.context=8", "threads=1", "data=synthetic", "data.tokens=20000"] if quick else []
    size, shape = Shape(depth=4, dim=128, batch=16, context=128), Shape(depth=depth, dim=64, batch=16)
    cases = [
        ("python train.py", [*tiny], size, 10, rounds),
        (f"{depth:,} layers of width 64", [*deep, *tiny], shape, 30, 1 if quick else 2),
        (f"{depth:,} layers of width 64, compile=true, cold cache", [*deep, *tiny, "compile=true"], shape, 60, 1),
    ]
    return [
        Measurement(
            Row("startup", f"to the first step: {name}", "", of.threads, Target("<=", bound), "s"),
            partial(startup, words, rounds=count),
        )
        for name, words, of, bound, count in (cases[::2] if quick else cases)
    ]


def startup(words: list[str], *, rounds: int) -> list[float]:
    """Of as many commands, one after another. The text is in the cache, W&B as it is on this machine, offline if nobody is
    logged in."""
    plain = check(composed(words)[0])
    train.text_of(plain, train.check_whole(plain, {})[2])
    return [first_step(words) for _ in range(rounds)]


def first_step(words: list[str]) -> float:
    """Seconds until the line of step 1 is in metrics.jsonl; the run is then ended. RuntimeError where it never comes."""
    with TemporaryDirectory() as scratch:
        here = Path(scratch)
        command = [sys.executable, str(Path(train.__file__).resolve()), f"hydra.run.dir={here / 'run'}", *words]
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(here / "inductor")}
        with (here / "said").open("wb") as said:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=here, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
            )
            try:
                while not _stepped(here / "run" / "metrics.jsonl"):
                    if process.poll() is not None or time.perf_counter() - began > LONGEST:
                        last = (here / "said").read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
                        raise RuntimeError(f"no step in {time.perf_counter() - began:.0f} s: {''.join(last)}")
                    time.sleep(POLL)
                return time.perf_counter() - began
            finally:
                _end(process)


def _stepped(metrics: Path) -> bool:
    return metrics.is_file() and any("loss" in line for line in lines(metrics, []))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """A first signal ends a run after its step, a second one at once."""
    while process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
