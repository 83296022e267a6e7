"""A function in a process of its own, so that what it takes of memory is its own."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def workers(count: int) -> ProcessPoolExecutor:
    """Processes that begin from nothing, with no thread and no memory of this one."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def fresh(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What `function`, of a module, returns in a new process."""
    with workers(1) as pool:
        return pool.submit(function, *args, **named).result()
