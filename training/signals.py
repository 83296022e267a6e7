"""SIGINT, SIGTERM and, under Slurm, SIGUSR1: when a run may stop, and what it answers."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

REQUEUE = signal.SIGUSR1
STOPS = (signal.SIGINT, signal.SIGTERM, REQUEUE)


class Interrupted(BaseException):
    """The process was told to stop and has nothing to lose. No Exception, so that nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(name(number))
        self.number = number


class Signals:
    """Inside the context the first signal is noted in `received`, for `check` to raise `Interrupted` or for the training
    loop to stop after the step under way. Inside `at_once` it raises where it finds the program: for what takes long and
    is plain Python, since an exception in the midst of a library's import can end the process without a word. A second
    signal ends the process, whatever it is at: a thread counts them as they come, since Python itself looks only between
    two instructions, and a backward pass is one.

    On the way out the handlers that were there before come back. Where one context stands in another they know of each
    other's signal, so that none is lost between two jobs of a sweep. In a thread other than the main one, which Python lets
    no handler be set from, nothing happens. `pass_on` is called with each signal that is noted, which
    stderr is told, unless it is not `spoken`.
    """

    spoken: ClassVar[bool] = True

    def __init__(self, pass_on: Callable[[int], object] = lambda number: None) -> None:
        self.received: int | None = None
        self._pass_on = pass_on
        self._at_once = False
        self._found: dict[int, Any] = {}
        self._outer: Signals | None = None

    def __enter__(self) -> "Signals":
        # Slurm sends SIGUSR1 some time before the limit where it is asked to (--signal=USR1@90)
        numbers = [signal.SIGINT, signal.SIGTERM] + [REQUEUE] * ("SLURM_JOB_ID" in os.environ)
        if threading.current_thread() is threading.main_thread():
            self._found = {number: signal.getsignal(number) for number in numbers}
            outer = getattr(self._found[signal.SIGTERM], "__self__", None)
            if isinstance(outer, Signals):
                self._outer, self.received = outer, outer.received
            self.install()
            self._counted, self._arriving = os.pipe()
            os.set_blocking(self._arriving, False)
            self._woken = signal.set_wakeup_fd(self._arriving, warn_on_full_buffer=False)
            threading.Thread(target=self._count, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._found:
            signal.set_wakeup_fd(self._woken)
            os.close(self._arriving)  # the thread ends
        for number, handler in self._found.items():
            signal.signal(number, handler)
        if self._outer:
            self._outer.received = self._outer.received or self.received

    def _count(self) -> None:
        seen = 0
        while byte := os.read(self._counted, 1):  # the number of a signal that has just arrived
            seen += byte[0] in self._found
            if seen == 2:
                os._exit(128 + byte[0])
        os.close(self._counted)

    def install(self) -> None:
        """Set the handlers, again where a library has put its own in their place."""
        for number in self._found:
            signal.signal(number, self._note)

    def check(self) -> None:
        """A safe point: raises `Interrupted` for a signal that has been received."""
        if self.received:
            raise Interrupted(self.received)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False
        self.check()  # what a handler raises can get lost, in a destructor for instance

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._pass_on(number)
        if self._at_once:
            raise Interrupted(number)
        if not self.spoken:
            return
        said = f"\n{name(number)}: stopping at the next safe point; a second signal stops at once\n"
        with suppress(OSError):
            os.write(2, said.encode())  # print could be in the midst of another print, which Python forbids


def name(number: int) -> str:
    return signal.Signals(number).name


def requeued() -> bool:
    """Whether Slurm has started this job again."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def requeue() -> None:
    """Put this Slurm job back in the queue, as its own SIGUSR1 asked for.

    Lightning's handler of that signal would save in the middle of a step and train on; here the run has stopped at the
    end of one, and the same command with the same hydra.run.dir resumes it.
    """
    job = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"normlab: scontrol requeue {job} failed: {error}", file=sys.stderr)
