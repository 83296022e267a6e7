"""Who has started the processes of a run, and how the first of them starts the others, watches them and ends them.

Without torch, so that a bad command line is answered at once.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stability.verdict import FAILED
from training.signals import STOPS, name

PARENT = "NORMLAB_RANK_0"  # in the environment of a rank that rank 0 has started: the number of its process


def started_by() -> str:
    """Who has started several processes, of this run as it seems: rank 0, torchrun, srun; empty where there is one, or this is
    the first. A shell in an allocation that is named as Lightning has it is the user's own: what is typed there is one process.
    """
    if PARENT in os.environ:
        return "rank 0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "srun" if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not shell else ""


def rank() -> int:
    """From 0, of this process, as whoever started it says."""
    by = started_by()
    return int(os.environ["SLURM_PROCID" if by == "srun" else "RANK"]) if by else 0


def follows() -> bool:
    """Whether this is another rank than the first for certain, before the config is known: the tasks of srun may be runs of one
    device each. One that rank 0 has started ends with it, however that ends."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(FAILED)

    if PARENT in os.environ:
        threading.Thread(target=watch, args=(int(os.environ[PARENT]),), daemon=True).start()
    return started_by() in ("rank 0", "torchrun") and rank() > 0


def same_command(directory: str) -> list[str]:
    """This process's own, in the run's directory, as a word of Hydra's. ValueError where it is not the command line's."""
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "a notebook").name
    if program not in ("train.py", "normlab"):
        raise ValueError(f"devices: {program} cannot be started again as another rank; python train.py ... can")
    words = sys.orig_argv[1:]
    place = [] if any(word.startswith("resume=") for word in words) else [f"hydra.run.dir={directory}"]
    return [sys.executable, *words, *place]


def listen() -> None:
    """What has been sent to a rank since rank 0 started it arrives now, when it can answer."""
    if PARENT in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


class Others:
    """The ranks that rank 0 has started, by number. Each that ends, well or not, is added to `ended`, a line each, and then
    `after` is called with the line, in a thread of its own."""

    def __init__(self, world: int, after: Callable[[str], None]) -> None:
        self.world, self.ended, self._after = world, list[str](), after
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: list[str]) -> None:
        """In this process's environment but for their numbers. They inherit the signals blocked: one that comes while Python
        starts would be a traceback."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            for number in range(1, self.world):
                more = {PARENT: str(os.getpid()), "RANK": str(number), "LOCAL_RANK": str(number)}
                self._running[number] = subprocess.Popen(command, env=os.environ | more, stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in self._running:
            threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def first_ended(self, seconds: float = 0) -> str | None:
        """The line of the first that ended, within `seconds`: the end of a process is not known at once."""
        until = time.monotonic() + seconds
        while self._running and not self.ended and time.monotonic() < until:
            time.sleep(0.02)
        return self.ended[0] if self.ended else None

    def end(self, seconds: float) -> None:
        """All of them within `seconds`, by force what has not ended by then."""
        until = time.monotonic() + seconds
        for process in self._running.values():
            try:
                process.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, number: int) -> None:
        code = self._running[number].wait()
        how = f"was ended by {name(-code)}" if code < 0 else f"ended with exit code {code}"
        self.ended.append(f"rank {number} of {self.world} {how}")
        self._after(self.ended[-1])
