"""A function in a process of its own, and the memory that such a process took."""

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

from training import device as machine

P = ParamSpec("P")
T = TypeVar("T")


def workers(count: int) -> ProcessPoolExecutor:
    """Processes that begin from nothing, with no thread and no memory of this one."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def fresh(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What `function`, of a module, returns in a new process."""
    with workers(1) as pool:
        return pool.submit(function, *args, **named).result()


def peak_memory() -> int:
    """Bytes: the largest resident memory of this process. Not getrusage's, which on Linux a new process takes over from the
    one that started it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) * 1024 if found else machine.peak_memory("cpu")
