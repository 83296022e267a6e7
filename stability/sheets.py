"""A page of panels that share their axes, with one legend: lines by group with the band of their seeds, or, where those are
too many, a line a run in the colour of its verdict."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stability.curves import Curve, over_runs, thin, thinned
from stability.gather import Entry
from stability.groups import Group, Layout
from stability.observables import verdict
from stability.panel import BLACK, DASHES, GREY, PALETTE, VERDICTS, page, plain
from stability.records import Run

WIDTH = 8.0  # inches: on a printed page of 6.5 the letters of 10 points are of 8
TEXT = 10.0  # points
POINTS = 400  # of a curve across the page
MARKERS = "osD^vPX"

STEP = "step (optimizer steps)"
CROSS: dict[str, Any] = {"marker": "x", "linestyle": "", "markersize": 7, "markeredgewidth": 1.8}

Drawing = tuple[Figure, str]  # with its caption


@dataclass(frozen=True, eq=False)
class Kind:
    """Runs that look the same in a panel."""

    runs: Sequence[Run]
    colour: str
    dash: str
    marker: str


def sheet(
    titles: Sequence[str], columns: int, *, shared: bool = True, height: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """A page with a panel for each title, which share their axes unless told otherwise. `height` of a row in inches."""
    rows = -(-len(titles) // columns)
    figure = page(WIDTH, max(3.6, rows * (height or (4.2, 2.9, 2.3)[columns - 1]) + 0.7))
    panels = list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flat)
    for spare in panels[len(titles) :]:
        spare.remove()
    panels = panels[: len(titles)]
    for place, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        lines = [textwrap.fill(plain(line), 80 // columns) for line in title.splitlines()]
        panel.set_title("\n".join(lines), loc="left", fontsize=TEXT)
        panel.tick_params(labelsize=TEXT - 1, labelbottom=not shared or place + columns >= len(titles))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def name_axes(figure: Figure, panels: Sequence[Axes], across: str, up: str) -> None:
    """Once for all the panels, which share them."""
    if len(panels) == 1:
        panels[0].set_xlabel(across, fontsize=TEXT)
        panels[0].set_ylabel(up, fontsize=TEXT)
    else:
        figure.supxlabel(across, fontsize=TEXT)
        figure.supylabel(up, fontsize=TEXT)


def columns_for(panels: int) -> int:
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


def by_group(drawn: Iterable[tuple[int, Group]]) -> list[Kind]:
    return [Kind(group.runs, *_style(number)) for number, group in drawn]


GHOST = {"colour": "0.7", "dash": "-", "marker": ""}


def by_verdict(runs: Sequence[Run]) -> list[Kind]:
    """The best first, so that the worst lies on top."""
    found = {word: [run for run in runs if verdict(run) == word] for word in [*VERDICTS, *map(verdict, runs)]}
    there = [(word, its) for word, its in found.items() if its]
    return [Kind(its, VERDICTS.get(word, GREY), *_style(number)[1:]) for number, (word, its) in enumerate(there)]


def diverged(kinds: Sequence[Kind], which: bool = True) -> list[Kind]:
    """The runs of each that diverged, or those that did not."""
    return [replace(kind, runs=[run for run in kind.runs if (verdict(run) == "diverged") == which]) for kind in kinds]


def draw_medians(panel: Axes, kinds: Sequence[Kind], curve: Callable[[Run], Curve], points: int) -> None:
    """A line for each kind, the median of its runs, and where they differ a band from the smallest to the largest."""
    for kind, whole in _medians(kinds, curve):
        if (whole.high > whole.low).any():
            kept = np.union1d(thin(whole.low, points // 2), thin(whole.high, points // 2))
            band = whole.x[kept], whole.low[kept], whole.high[kept]
            panel.fill_between(*band, color=kind.colour, alpha=min(0.25, 0.8 / len(kinds)), linewidth=0)
        marker = "o" if len(whole.known) == 1 else ""
        line = thinned(whole, points).T
        panel.plot(*line, kind.dash, color=kind.colour, linewidth=1.5, marker=marker, markersize=4)


def draw_faint(panel: Axes, kinds: Sequence[Kind], curve: Callable[[Run], Curve], points: int) -> None:
    """The medians alone, thin: what the others are to be compared with."""
    for kind, whole in _medians(kinds, curve):
        panel.plot(*thinned(whole, points).T, kind.dash, color=kind.colour, linewidth=0.7, zorder=1.8)


def _medians(kinds: Sequence[Kind], curve: Callable[[Run], Curve]) -> Iterator[tuple[Kind, Curve]]:
    for kind in kinds:
        if curves := [own for own in map(curve, kind.runs) if len(own.known)]:
            yield kind, over_runs(curves)


def draw_each(panel: Axes, kinds: Sequence[Kind], curve: Callable[[Run], Curve], points: int) -> None:
    """A thin line for each run; hundreds of them as pixels, since as vectors they make a file that no viewer likes."""
    many = sum(len(kind.runs) for kind in kinds)
    form: dict[str, Any] = {"linewidths": 0.8, "alpha": min(0.8, max(0.15, 40 / max(many, 1))), "rasterized": many > 50}
    for kind in kinds:
        lines = [thinned(own, points) for own in map(curve, kind.runs) if len(own.known)]
        if lines:
            panel.add_collection(LineCollection(lines, colors=kind.colour, linestyles=kind.dash, **form))
    panel.autoscale_view()


def draw_points(panel: Axes, kinds: Sequence[Kind], curve: Callable[[Run], Curve]) -> None:
    """A point for each run that has one value."""
    for kind in kinds:
        points = np.array([(own.x[-1], own.y[-1]) for own in map(curve, kind.runs) if len(own.known)])
        if len(points):
            panel.plot(*points.T, kind.marker, color=kind.colour, markersize=4, alpha=0.8)


def mark_ends(panel: Axes, kinds: Sequence[Kind], curve: Callable[[Run], Curve], top: float = np.inf) -> None:
    """A cross, no higher than `top`, where each run ends."""
    for kind in kinds:
        curves = [own for own in map(curve, kind.runs) if len(own.known)]
        ends = np.array([(own.x[own.known[-1]], min(own.y[own.known[-1]], top)) for own in curves])
        if len(ends):
            panel.plot(*ends.T, color=kind.colour, clip_on=False, zorder=4, **CROSS)


def level(panels: Iterable[Axes], runs: Iterable[Run], key: str, dash: str, text: str) -> list[Artist]:
    """A horizontal line at a number of the summary, for each value that it has; the entry of the legend."""
    known = sorted({f"{value:.3f}" for run in runs if (value := (run.summary or {}).get(key)) is not None})
    if not known:
        return []
    for panel in panels:
        for value in known:
            panel.axhline(float(value), color=BLACK, linestyle=dash, linewidth=1.0, zorder=1.5, gid=key)
    span = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
    return [_sign(color=BLACK, linestyle=dash, linewidth=1.0, label=f"{text} {span} nats")]


def signs(layout: Layout | None, runs: Sequence[Run], *, crosses: bool, markers: bool = False) -> list[Artist]:
    """The entries of the legend for the lines (or, without a layout, for the verdicts, counted) and the crosses."""
    signs: list[Artist] = []
    if layout is None:
        for kind in by_verdict(runs):
            text = f"{verdict(kind.runs[0]).replace('_', ' ')} ({len(kind.runs)} run{'s' * (len(kind.runs) > 1)})"
            form = {"marker": kind.marker, "markersize": 4, "linestyle": ""} if markers else {"linestyle": kind.dash}
            signs.append(_sign(color=kind.colour, label=text, **form))
    elif layout.names == [""]:
        signs.append(_sign(color="0.75", label="the other panels' lines"))
    else:
        for number, name in enumerate(layout.names):
            colour, dash, marker = _style(number)
            form = {"marker": marker, "markersize": 4} if markers else {}
            text = textwrap.fill(plain(name), 100)
            signs.append(_sign(color=colour, linestyle=dash, linewidth=1.5, label=text, **form))
    if crosses and any(verdict(run) == "diverged" for run in runs):
        signs.append(_sign(**CROSS, color=BLACK, label="diverged"))
    return signs


def _style(number: int) -> tuple[str, str, str]:
    """Colour, dash and marker of a line: it differs from its neighbours in all three."""
    return PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]


def _sign(**form: Any) -> Line2D:
    return Line2D([], [], **form)


def legend(figure: Figure, signs: Sequence[Artist]) -> None:
    """Above the panels, in as many columns as there is room for; more than two rows make the figure higher."""
    longest = max((len(line) for sign in signs for line in str(sign.get_label()).splitlines()), default=0)
    columns = max(1, min(4, 112 // (longest + 9)))
    if signs:
        rows = -(-sum(str(sign.get_label()).count("\n") + 1 for sign in signs) // columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, rows - 2))
        figure.legend(handles=list(signs), loc="outside upper left", ncols=columns, frameon=False, fontsize=TEXT - 1)


def reading(layout: Layout | None, seeds: bool) -> str:
    """How the lines are to be read, for a caption."""
    if layout is None:
        return " Each run is drawn for itself, in the colour of its verdict."
    return (
        " A line is the median over seeds, its band runs from their smallest to their largest value." if seeds else ""
    )


def left_out(entries: Sequence[Entry], drawn: Sequence[Run], lacking: str) -> str:
    """The end of a caption."""
    count = len(entries) - len(drawn)
    return f" Left out: {count} of {len(entries)} runs, without {lacking}." if count else ""
