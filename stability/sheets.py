"""A page of panels that share their axes, with one legend: lines by group with the band of their seeds, or, where those are
too many, a line a run in the colour of its verdict."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
CROSS: dict[str, Any] = {
    "marker": "x",
    "linestyle": "",
    "markersize": 7,
    "markeredgewidth": 1.8,
    "clip_on": False,
    "zorder": 4,
}

Drawing = tuple[Figure, str]  # with its caption
Drawn = Sequence[tuple[int, Group]]  # the groups of a panel, each with the number of its line


def sheet(titles: Sequence[str], columns: int, *, shared: bool = True) -> tuple[Figure, list[Axes]]:
    """A page with a panel for each title, which share their axes unless told otherwise."""
    rows = -(-len(titles) // columns)
    figure = page(WIDTH, rows * (4.2, 2.9, 2.3, 2.0)[columns - 1] + 0.7)
    panels = list(figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False).flat)
    for spare in panels[len(titles) :]:
        spare.remove()
    panels = panels[: len(titles)]
    for place, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        panel.set_title(_wrapped(title, 92 // columns), loc="left", fontsize=TEXT)
        panel.tick_params(labelsize=TEXT - 1, labelbottom=not shared or place + columns >= len(titles))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _wrapped(title: str, width: int) -> str:
    return "\n".join(textwrap.fill(plain(line), width) for line in title.splitlines())


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


def style(number: int) -> tuple[str, str, str]:
    """Colour, dash and marker of a line: it differs from its neighbours in all three."""
    return PALETTE[number % len(PALETTE)], DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)]


def draw_groups(panel: Axes, drawn: Drawn, curve: Callable[[Run], Curve], points: int, top: float = np.inf) -> None:
    """A line for each group, the median of its runs, and where it has several a band from the smallest to the largest; a
    cross, no higher than `top`, where a diverged run ends."""
    for number, group in drawn:
        colour, dash, _ = style(number)
        curves = [own for own in map(curve, group.runs) if len(own.known)]
        if not curves:
            continue
        whole = over_runs(curves)
        if (whole.high > whole.low).any():
            kept = np.union1d(thin(whole.low, points // 2), thin(whole.high, points // 2))
            panel.fill_between(whole.x[kept], whole.low[kept], whole.high[kept], color=colour, alpha=0.2, linewidth=0)
        marker = "o" if len(whole.known) == 1 else ""
        panel.plot(*thinned(whole, points).T, dash, color=colour, linewidth=1.5, marker=marker, markersize=4)
        mark_ends(panel, group.runs, curve, colour, top)


def draw_verdicts(panel: Axes, runs: Iterable[Run], curve: Callable[[Run], Curve], top: float = np.inf) -> None:
    """A thin line a run, as pixels (hundreds of them as vectors make a file that no viewer likes)."""
    by_verdict = sorted_by_verdict(runs)
    alpha = min(0.7, max(0.15, 40 / sum(map(len, by_verdict.values()))))
    for number, (found, its) in enumerate(by_verdict.items()):
        lines = [thinned(own, POINTS) for own in map(curve, its) if len(own.known)]
        colour, dash = VERDICTS.get(found, GREY), DASHES[number % len(DASHES)]
        collection = LineCollection(lines, colors=colour, linestyles=dash, linewidths=0.7, alpha=alpha, rasterized=True)
        panel.add_collection(collection)
        mark_ends(panel, its, curve, colour, top)
    panel.autoscale_view()


def sorted_by_verdict(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The best first, so that the worst lies on top."""
    runs = list(runs)
    found = [*VERDICTS, *dict.fromkeys(verdict(run) for run in runs)]
    return {word: its for word in found if (its := [run for run in runs if verdict(run) == word])}


def mark_ends(panel: Axes, runs: Iterable[Run], curve: Callable[[Run], Curve], colour: str, top: float) -> None:
    curves = [curve(run) for run in runs if verdict(run) == "diverged"]
    ends = [(own.x[own.known[-1]], min(own.y[own.known[-1]], top)) for own in curves if len(own.known)]
    if ends:
        panel.plot(*zip(*ends, strict=True), color=colour, gid="ends", **CROSS)


def draw_points(panel: Axes, drawn: Drawn, runs: Sequence[Run], curve: Callable[[Run], Curve]) -> None:
    """A point for each run that did not diverge (those have their crosses): by group, or without any by verdict."""
    kinds = [(*style(number)[::2], group.runs) for number, group in drawn] or [
        (VERDICTS.get(found, GREY), MARKERS[number % len(MARKERS)], tuple(its))
        for number, (found, its) in enumerate(sorted_by_verdict(runs).items())
    ]
    for colour, marker, its in kinds:
        points = [np.column_stack([own.x, own.y]) for own in (curve(run) for run in its if verdict(run) != "diverged")]
        if points:
            panel.plot(
                *np.concatenate(points).T, marker, color=colour, linestyle="", markersize=4, alpha=0.8, gid="points"
            )
        if not drawn:
            mark_ends(panel, its, curve, colour, np.inf)


def draw_behind(panel: Axes, groups: Iterable[Group], curve: Callable[[Run], Curve], points: int) -> None:
    """The other groups in grey: a panel with one line is otherwise compared with nothing."""
    curves = [[own for own in map(curve, group.runs) if len(own.known)] for group in groups]
    lines = [thinned(over_runs(its), points) for its in curves if its]
    panel.add_collection(LineCollection(lines, colors="0.75", linewidths=0.6, zorder=1, rasterized=True))


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
        counts = Counter(verdict(run) for run in runs)
        for number, found in enumerate(sorted_by_verdict(runs)):
            text = f"{found.replace('_', ' ')} ({counts[found]} run{'s' * (counts[found] > 1)})"
            signs.append(_sign(color=VERDICTS.get(found, GREY), linestyle=DASHES[number % 4], label=text))
    elif layout.names == [""]:
        signs.append(_sign(color="0.75", label="the other panels' lines"))
    else:
        for number, name in enumerate(layout.names):
            colour, dash, marker = style(number)
            sign = _sign(color=colour, linestyle=dash, linewidth=1.5, label=textwrap.fill(plain(name), 100))
            if markers:
                sign.set(marker=marker, markersize=4)
            signs.append(sign)
    if crosses and any(verdict(run) == "diverged" for run in runs):
        signs.append(_sign(**CROSS, color=BLACK, label="diverged"))
    return signs


def _sign(**form: Any) -> Line2D:
    return Line2D([], [], **form)


def legend(figure: Figure, signs: Sequence[Artist]) -> None:
    """Above the panels, in as many columns as there is room for."""
    longest = max((len(line) for sign in signs for line in str(sign.get_label()).splitlines()), default=0)
    columns = max(1, min(4, 112 // (longest + 9)))
    if signs:
        figure.legend(handles=list(signs), loc="outside upper left", ncols=columns, frameon=False, fontsize=TEXT - 1)


def reading(layout: Layout | None) -> str:
    """How the lines are to be read, for a caption."""
    if layout is None:
        return "Each run is drawn for itself, in the colour of its verdict."
    if all(len(group.runs) == 1 for _, drawn in layout.panels for _, group in drawn):
        return "Each line is one run."
    return "A line is the median over seeds, its band runs from their smallest to their largest value."


def left_out(entries: Sequence[Entry], drawn: Sequence[Run], lacking: str) -> str:
    """The end of a caption."""
    count = len(entries) - len(drawn)
    return f" Left out: {count} of {len(entries)} runs, without {lacking}." if count else ""
