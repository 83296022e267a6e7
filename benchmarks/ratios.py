"""Things measured by turns, the ratios of neighbouring measurements, and what such a ratio should be."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import isfinite
from statistics import median
from typing import Any, Literal

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """What a median should be."""

    relation: Literal["<=", ">="]
    bound: float

    def met(self, value: float) -> bool:
        return value <= self.bound if self.relation == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """Ratios of `name` over `over`, or where that is empty measurements of `name` itself, in `unit`. `threads`: of the CPU,
    0 where several numbers of them are compared. `failed`: why there are no values."""

    part: str
    name: str
    over: str = ""
    threads: int = 1
    target: Target | None = None
    unit: str = ""
    values: tuple[float, ...] = ()
    failed: str | None = None

    @property
    def verdict(self) -> str:
        """failed; met or missed, by the median; empty where there is no target."""
        if self.failed is not None:
            return "failed"
        if self.target is None:
            return ""
        return "met" if self.target.met(median(self.values)) else "missed"

    def left_out(self) -> "Row":
        """Not measured, for want of time."""
        return replace(self, failed="left out: --minutes were over")

    def record(self) -> dict[str, Any]:
        """Numbers and texts, for a JSON file."""
        record: dict[str, Any] = {"part": self.part, "name": self.name, "over": self.over, "unit": self.unit}
        record |= {"threads": self.threads, "target": self.target and str(self.target), "verdict": self.verdict}
        if self.failed is not None:
            return record | {"failed": self.failed}
        record |= {"min": min(self.values), "median": median(self.values), "max": max(self.values)}
        return record | {"values": list(self.values)}


@dataclass(frozen=True)
class Measurement:
    """`measure` gives the values of `row`."""

    row: Row
    measure: Callable[[], Sequence[float]]

    def take(self) -> Row:
        """The row, measured. What cannot be measured is a row too, with the reason, so that the others go on."""
        try:
            torch.set_num_threads(self.row.threads or torch.get_num_threads())
            values = tuple(self.measure())
            if not values or not all(map(isfinite, values)):
                raise ArithmeticError(f"not finite: {values}")
        except Exception as error:
            return replace(self.row, failed=reason(error))
        return replace(self.row, values=values)


def reason(error: Exception) -> str:
    """One line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def neighbours(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """a_1 / b_1, a_2 / b_1, a_2 / b_2, ...: of a and b measured by turns, each ratio of two neighbours. A drift of the machine
    raises one and lowers the next."""
    taken = chain.from_iterable(zip(first, second, strict=True))
    return [y / x if turn % 2 else x / y for turn, (x, y) in enumerate(pairwise(taken))]


def alternate(first: Work, second: Work, *, rounds: int, seconds: float = 0.1) -> list[float]:
    """Ratios of the time of `first` to that of `second`; as `by_turns`."""
    return neighbours(*by_turns([first, second], rounds=rounds, seconds=seconds))


def by_turns(works: Sequence[Work], *, rounds: int, seconds: float = 0.1) -> list[list[float]]:
    """Seconds a call of each work in each round, works by rounds. In a round each is called once, and again for about
    `seconds` if it is faster than that."""
    for work in works:
        work()  # fills caches, and is not looked at
    calls = [max(1, round(seconds / clock(work))) for work in works]
    times = [[clock(work, count) for work, count in zip(works, calls, strict=True)] for _ in range(rounds)]
    return [list(of_work) for of_work in zip(*times, strict=True)]


def clock(work: Work, calls: int = 1) -> float:
    """Seconds a call."""
    began = now()
    for _ in range(calls):
        work()
    return (now() - began) / calls


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
