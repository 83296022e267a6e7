"""The figures of a comparison, fit for a paper: which there are, and those that are curves."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stability.curves import EMPTY, Curve, profile, smooth_loss, smooth_norm, thread
from stability.gather import Entry
from stability.groups import LINES, Layout, arranged, grouped, grouped_along
from stability.maps import heat_maps, stability_map
from stability.observables import Unread, loss_or_start, verdict
from stability.panel import BLACK, LAYER, decades, log_y, loss_top, rate
from stability.records import Array, Run
from stability.sheets import (
    GHOST,
    POINTS,
    STEP,
    Drawing,
    Kind,
    by_group,
    by_verdict,
    columns_for,
    diverged,
    draw_each,
    draw_faint,
    draw_medians,
    draw_points,
    left_out,
    legend,
    level,
    mark_ends,
    name_axes,
    reading,
    sheet,
    signs,
)  # fmt: skip

LOSS = "loss (nats per token)"
BOTH = "at the first logged step and at the last"
ENTROPY = ("unigram_entropy", "--", "unigram entropy")
FIRST = Line2D([], [], color=BLACK, linewidth=0.7, label="thin: first logged step")


@dataclass(frozen=True)
class Plate:
    """A figure of a report. `name` is the stem of its file; `caption` says what is drawn, what the band is and what is left
    out, also to those who cannot see it."""

    name: str
    title: str
    caption: str
    figure: Figure


def plates(entries: Sequence[Entry]) -> Iterator[Plate]:
    """The figures that say something about these runs, one at a time. What cannot be read, or took no step, is left out of
    them, and their captions say so."""
    for name, (title, draw) in PLATES.items():
        if drawing := draw(entries):
            figure, caption = drawing
            figure.draw_without_rendering()
            middle = np.mean([edge for panel in figure.axes for edge in panel.get_position().intervaly])
            for text in figure.texts:  # beside the panels, and not beside the legend
                text.set_y(middle if text.get_rotation() == 90 else text.get_position()[1])
            figure.set_layout_engine("none")  # laid out once, however often it is saved
            yield Plate(name, title, caption, figure)


# --------------------------------------------------------------------------------------------------- against the step


def loss(entries: Sequence[Entry]) -> Drawing | None:
    curve = cache(smooth_loss)
    drawn = _with(entries, curve, 2)
    cut = loss_top([curve(entry.run).y for entry in drawn if entry.run])
    top, highest = cut or (math.inf, 0.0)
    page = _page_of_curves(drawn, [("", curve)], top)
    if page is None:
        return None
    figure, panels, layout, runs = page
    entropy = level(panels, runs, *ENTROPY)
    if cut:
        lowest = min(np.nanmin(curve(run).y) for run in runs)
        panels[0].set_ylim(lowest - 0.05 * (top - lowest), top + 0.05 * (top - lowest))  # room for the crosses
    name_axes(figure, panels, STEP, LOSS + (f", cut off: it rises to {highest:.3g}" if cut else ""))
    legend(figure, [*signs(layout, runs, crosses=True), *entropy])
    what = "Training loss, as the running mean over a fiftieth of the run."
    return (
        figure,
        f"{what}{reading(layout, _seeds(layout))}{_ends(layout, runs)}{left_out(entries, runs, 'two losses')}",
    )


def gradient_norm(entries: Sequence[Entry]) -> Drawing | None:
    curve = cache(smooth_norm)
    drawn = _with(entries, curve, 2)
    norms = [curve(entry.run).y for entry in drawn if entry.run]
    limits = decades(norms)
    page = _page_of_curves(drawn, [("", curve)], limits[1] if limits else math.inf)
    if page is None:
        return None
    figure, panels, layout, runs = page
    cut = _log_y(panels, norms)
    name_axes(figure, panels, STEP, "total gradient norm (L2)" + cut)
    legend(figure, signs(layout, runs, crosses=True))
    what = "Gradient norm of the whole model before clipping, as the geometric mean over a fiftieth of the run."
    if layout:
        of = "of all seeds; the line is their median" if _seeds(layout) else "of the run"
        what += f" The band runs from the smallest to the largest norm of those steps, {of}."
    how = "" if layout else reading(layout, False)
    return figure, f"{what}{how}{_ends(layout, runs)}{left_out(entries, runs, 'two gradient norms')}"


def depth_profile(entries: Sequence[Entry]) -> Drawing | None:
    """At the first logged step and at the last; where every run has one alone, at that."""
    relative = len({entry.run.depth for entry in entries if entry.run and entry.run.depth}) > 1
    first, last = partial(profile, row=0, relative=relative), partial(profile, row=-1, relative=relative)
    drawn = _with(entries, first, 2)
    once = all(len(entry.run.layer_step) == 1 for entry in drawn if entry.run)
    page = _page_of_curves(drawn, [("", first)] if once else [("first logged step", first), ("last logged step", last)])
    if page is None:
        return None
    figure, panels, layout, runs = page
    norms = [part(run).y for run in runs for part in (first, last)]
    cut = _log_y(panels, norms)
    panels[0].xaxis.set_major_locator(MaxNLocator(4, integer=not relative, min_n_ticks=1, steps=[1, 2, 5, 10]))
    name_axes(
        figure, panels, "layer / depth (1 = last)" if relative else LAYER, "gradient norm of the block (L2)" + cut
    )
    thin = layout is not None and len(layout.panels) > 1 and not once
    legend(figure, [*signs(layout, runs, crosses=False), *([FIRST] if thin else [])])
    both = "at the last logged step, and at the first as a thin line" if thin else BOTH
    what = f"Gradient norm of each block against its layer, {'at the one logged step' if once else both}."
    return figure, f"{what}{reading(layout, _seeds(layout))}{left_out(entries, runs, 'two layers to draw')}"


def _log_y(panels: Sequence[Axes], norms: Sequence[Array]) -> str:
    """What to add to the name of the axis where it does not show all."""
    cut = log_y(panels[0], "", norms)
    if len(panels) > 1:  # nine of them a decade, in each panel: they cost more time than all the curves
        panels[0].yaxis.set_minor_locator(NullLocator())
    return cut


def _seeds(layout: Layout | None) -> bool:
    return any(len(group.runs) > 1 for _, drawn in (layout.panels if layout else []) for _, group in drawn)


def _ends(layout: Layout | None, runs: Sequence[Run]) -> str:
    if not any(verdict(run) == "diverged" for run in runs):
        return ""
    return " A run that diverged ends at its cross" + (", a thin line outside the band." if layout else ".")


def _with(entries: Sequence[Entry], curve: Callable[[Run], Curve], points: int) -> list[Entry]:
    """Those whose curve has at least so many points, in the order of their groups: what is left out changes no colour that
    it need not change."""
    order = {group: place for place, group in enumerate(dict.fromkeys(entry.group for entry in entries))}
    there = [entry for entry in entries if entry.run and len(curve(entry.run).known) >= points]
    return sorted(there, key=lambda entry: order[entry.group])


def _page_of_curves(
    entries: Sequence[Entry], parts: Sequence[tuple[str, Callable[[Run], Curve]]], top: float | None = None
) -> tuple[Figure, list[Axes], Layout | None, list[Run]] | None:
    """A panel for each part (what it is called, and its curve of a run), or where the layout has several panels these, with
    the parts but the last as faint lines. With `top` a diverged run is a line of its own that ends in a cross, no higher."""
    if not entries:
        return None
    groups = grouped(entries)
    layout, runs = arranged(groups), [run for group in groups for run in group.runs]
    shown = layout.panels if layout else [("", [])]
    over = [curve for _, curve in parts[:-1]] if len(shown) > 1 else []  # where many panels leave no room beside them
    parts = parts[-1:] if over else parts
    titles = [title or part for (title, _), (part, _) in product(shown, parts)]
    figure, panels = sheet(titles, columns := columns_for(len(titles)))
    for panel, ((_, drawn), (_, curve)) in zip(panels, product(shown, parts), strict=True):
        kinds = by_group(drawn) if layout else by_verdict(runs)
        ended = [] if top is None else diverged(kinds)
        points = POINTS // columns
        if layout is None:
            draw_each(panel, kinds, curve, points)
        else:
            if layout.names == [""]:
                draw_faint(panel, [Kind(group.runs, **GHOST) for group in groups], curve, points)
            for earlier in over:
                draw_faint(panel, kinds, earlier, points)
            draw_medians(panel, diverged(kinds, False) if ended else kinds, curve, points)
            draw_each(panel, ended, curve, points)
        mark_ends(panel, ended, curve, top or math.inf)
    return figure, panels, layout, runs


# ------------------------------------------------------------------------------------------------- against a setting


def loss_against_lr(entries: Sequence[Entry]) -> Drawing | None:
    return _against(entries, "optimizer.lr", _lr, "learning rate", rate)


def loss_against_depth(entries: Sequence[Entry]) -> Drawing | None:
    return _against(entries, "model.depth", _depth, "depth (layers)", "{:g}".format)


def _against(
    entries: Sequence[Entry], key: str, across: Callable[[Run], Any], text: str, said: Callable[[float], str]
) -> Drawing | None:
    """The final loss against a setting, a line for each group of runs that differ in nothing else; None where it has one
    value alone, or where few runs differ in more than it throughout: a line would be a point."""
    at = partial(_final, across=across)
    drawn = [entry for entry in _with(entries, at, 1) if entry.run and len(entry.run.step) > 1]
    places = sorted({float(at(entry.run).x[0]) for entry in drawn if entry.run})
    if len(places) < 2:
        return None
    groups = grouped_along(drawn, key)
    runs = [run for group in groups for run in group.runs]
    widths = [len({at(run).x[0] for run in group.runs}) for group in groups]
    if max(widths) == 1 and len(groups) <= LINES:
        return None
    layout = arranged(groups) if max(widths) > 1 else None
    shown = layout.panels if layout else [("", [])]
    figure, panels = sheet([title for title, _ in shown], columns_for(len(shown)))
    for panel, (_, its) in zip(panels, shown, strict=True):
        kinds = by_group(its) if layout else by_verdict(runs)
        if layout:
            draw_medians(panel, kinds, at, POINTS)
        draw_points(panel, diverged(kinds, False), at)
        mark_ends(panel, diverged(kinds), at)
    entropy = level(panels, runs, *ENTROPY)
    log = key == "optimizer.lr" or places[-1] > 8 * places[0]
    _ticks(panels[0], places, 12 // columns_for(len(shown)), said, log=log)
    name_axes(figure, panels, text, "final " + LOSS)
    legend(figure, [*signs(layout, runs, crosses=True, markers=True), *entropy])
    what = f"Final training loss against the {text.split(' (')[0]}: at most the loss of the first step, and that for a run that diverged."
    seeds = len(runs) > sum(widths)
    points = " Each point is one run." if layout else ""
    return figure, f"{what}{reading(layout, seeds)}{points}{left_out(entries, runs, 'a final loss')}"


def _final(run: Run, across: Callable[[Run], Any]) -> Curve:
    """The one point of a run; none where the record lacks it."""
    try:
        x, y = float(across(run)), loss_or_start(run)
    except (Unread, TypeError, ValueError):
        return EMPTY
    return thread(np.array([x]), np.array([y])) if 0 < x < math.inf and math.isfinite(y) else EMPTY


def _lr(run: Run) -> Any:
    return _setting(run, "optimizer", "lr")


def _depth(run: Run) -> Any:
    return run.depth or _setting(run, "model", "depth")


def _setting(run: Run, axis: str, key: str) -> Any:
    settings = run.config.get(axis)
    return settings.get(key) if isinstance(settings, dict) else None


def _ticks(panel: Axes, places: Sequence[float], room: int, said: Callable[[float], str], *, log: bool) -> None:
    """At values that occur, as many as there is room for."""
    measure = np.array(places)
    if log:
        panel.set_xscale("log")
        measure = np.log(places)
    kept = [0]
    for place in range(1, len(places)):
        if measure[place] - measure[kept[-1]] > 0.8 * (measure[-1] - measure[0]) / room:
            kept.append(place)
    random = log and len(places) > 12  # as a random search draws them: no value is worth naming
    panel.xaxis.set_major_locator(LogLocator() if random else FixedLocator([places[place] for place in kept]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))


PLATES: dict[str, tuple[str, Callable[[Sequence[Entry]], Drawing | None]]] = {
    "loss": ("Training loss", loss),
    "gradient_norm": ("Gradient norm of the whole model", gradient_norm),
    "heat_maps": ("Gradient norm by layer and step", heat_maps),
    "depth_profile": ("Gradient norm against depth", depth_profile),
    "loss_against_lr": ("Final loss against the learning rate", loss_against_lr),
    "loss_against_depth": ("Final loss against depth", loss_against_depth),
    "stability_map": ("Stability map", stability_map),
}
