"""What is printed: into a job's log too, and never the end of a run."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO


class Output(io.TextIOBase):
    """A text stream into several files. One that cannot be written any more (a closed pipe, a full disk) is left out from
    then on: a run goes on when nobody listens."""

    def __init__(self, *files: TextIO) -> None:
        self.files = list(files)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.files[0].encoding if self.files else "utf-8"

    def write(self, text: str) -> int:
        self._each(lambda file: _write(file, text))
        return len(text)

    def flush(self) -> None:
        self._each(lambda file: file.flush())

    def isatty(self) -> bool:
        return any(file.isatty() for file in self.files)

    def _each(self, action: Callable[[TextIO], object]) -> None:
        for file in list(self.files):
            try:
                action(file)
            except (OSError, ValueError):  # ValueError: closed, since a letter that it lacks is replaced
                self.files.remove(file)
                with suppress(OSError, ValueError):  # else Python complains when it flushes the stream at its end
                    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _write(file: TextIO, text: str) -> None:
    """A letter that the file's encoding lacks becomes a question mark."""
    try:
        file.write(text)
    except UnicodeEncodeError:
        file.write(text.encode(file.encoding, "replace").decode(file.encoding))


@contextmanager
def guarded() -> Iterator[None]:
    """The program's own two streams as such outputs."""
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        yield


def silence() -> None:
    """Nobody is at the end of guarded streams any more."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Output):
            stream.files.clear()


@contextmanager
def logged(path: Path, *, echo: bool = True) -> Iterator[TextIO]:
    """What is printed in the block stands in the file too, behind what is there; without `echo`, in the file alone, and
    so does what goes to stderr."""
    with path.open("a", encoding="utf-8") as log, ExitStack() as stack:
        stack.enter_context(redirect_stdout(Output(*([sys.stdout] if echo else []), log)))
        if not echo:
            stack.enter_context(redirect_stderr(Output(log)))
        yield log
