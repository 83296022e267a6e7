"""The figures of a report, each drawn from the entries of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from stability.gather import Entry


@dataclass(frozen=True)
class Plate:
    """A figure and what is said of it: `name` is the stem of its files, `caption` one or two sentences."""

    name: str
    title: str
    caption: str
    figure: Figure


def plates(entries: Sequence[Entry]) -> Iterator[Plate]:
    """Each figure that these runs have the numbers for, drawn when it is asked for."""
    yield from ()
