"""The figures of a comparison, fit for a paper: which there are, and those that are curves."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from stability.curves import EMPTY, Curve, profile, smooth_loss, smooth_norm, thread
from stability.gather import Entry
from stability.groups import Layout, arranged, grouped, grouped_along
from stability.maps import heat_maps, stability_map
from stability.observables import Unread, loss_or_start
from stability.panel import LAYER, log_y, loss_top
from stability.records import Run
from stability.sheets import (
    POINTS,
    STEP,
    Drawing,
    columns_for,
    draw_behind,
    draw_groups,
    draw_points,
    draw_verdicts,
    left_out,
    legend,
    level,
    name_axes,
    reading,
    sheet,
    signs,
)  # fmt: skip

LOSS = "loss (nats per token)"
ENTROPY = ("unigram_entropy", "--", "unigram entropy")


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
            figure.set_layout_engine("none")  # laid out once, however often it is saved
            yield Plate(name, title, caption, figure)


# --------------------------------------------------------------------------------------------------- against the step


def loss(entries: Sequence[Entry]) -> Drawing | None:
    drawn = _with(entries, smooth_loss, 2)
    cut = loss_top([smooth_loss(entry.run).y for entry in drawn if entry.run])
    top, highest = cut or (math.inf, 0.0)
    page = _page_of_curves(drawn, [("", smooth_loss)], top)
    if page is None:
        return None
    figure, panels, layout, runs = page
    entropy = level(panels, runs, *ENTROPY)
    if cut:
        lowest = min(np.nanmin(smooth_loss(run).y) for run in runs)
        panels[0].set_ylim(lowest - 0.05 * (top - lowest), top)
    name_axes(figure, panels, STEP, LOSS + (f", cut off: it rises to {highest:.3g}" if cut else ""))
    legend(figure, [*signs(layout, runs, crosses=True), *entropy])
    what = "Training loss, as the running mean over a fiftieth of the run."
    return figure, f"{what} {reading(layout)}{left_out(entries, runs, 'two losses')}"


def gradient_norm(entries: Sequence[Entry]) -> Drawing | None:
    page = _page_of_curves(_with(entries, smooth_norm, 2), [("", smooth_norm)])
    if page is None:
        return None
    figure, panels, layout, runs = page
    log_y(panels[0], "")
    name_axes(figure, panels, STEP, "total gradient norm (L2)")
    legend(figure, signs(layout, runs, crosses=True))
    what = "Gradient norm of the whole model before clipping: its geometric mean over a fiftieth of the run."
    band = "" if layout is None else " The band holds every norm of those steps, over all seeds."
    return figure, f"{what} {reading(layout)}{band}{left_out(entries, runs, 'two gradient norms')}"


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
    log_y(panels[0], "")
    panels[0].xaxis.set_major_locator(MaxNLocator(4, integer=not relative, min_n_ticks=1))
    name_axes(figure, panels, "layer / depth (1 = last)" if relative else LAYER, "gradient norm of the block (L2)")
    legend(figure, signs(layout, runs, crosses=False))
    when = "the one logged step" if once else "the first and the last logged step that have one"
    what = f"Gradient norm of each block against its layer, at {when}."
    return figure, f"{what} {reading(layout)}{left_out(entries, runs, 'two layers to draw')}"


def _with(entries: Sequence[Entry], curve: Callable[[Run], Curve], points: int) -> list[Entry]:
    """Those whose curve has at least so many points."""
    return [entry for entry in entries if entry.run and len(curve(entry.run).known) >= points]


def _page_of_curves(
    entries: Sequence[Entry], parts: Sequence[tuple[str, Callable[[Run], Curve]]], top: float = math.inf
) -> tuple[Figure, list[Axes], Layout | None, list[Run]] | None:
    """A panel for each of the layout's panels and each part (what it is called, and its curve of a run)."""
    if not entries:
        return None
    groups = grouped(entries)
    layout, runs = arranged(groups), [run for group in groups for run in group.runs]
    shown = list(product(layout.panels if layout else [("", [])], parts))
    titles = ["\n".join(filter(None, (title, part))) for (title, _), (part, _) in shown]
    columns = columns_for(len(shown)) if len(parts) == 1 else 2 if len(shown) <= 8 else 4
    figure, panels = sheet(titles, columns)
    for panel, ((_, drawn), (_, curve)) in zip(panels, shown, strict=True):
        if layout is None:
            draw_verdicts(panel, runs, curve, top)
            continue
        if layout.names == [""]:
            draw_behind(panel, groups, curve, POINTS // columns)
        draw_groups(panel, drawn, curve, POINTS // columns, top)
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
    value alone."""
    at = partial(_final, across=across)
    drawn = [entry for entry in entries if entry.run and len(entry.run.step) > 1 and len(at(entry.run).known)]
    places = sorted({float(at(entry.run).x[0]) for entry in drawn if entry.run})
    if len(places) < 2:
        return None
    groups = grouped_along(drawn, key)
    layout, runs = arranged(groups), [run for group in groups for run in group.runs]
    shown = layout.panels if layout else [("", [])]
    figure, panels = sheet([title for title, _ in shown], columns_for(len(shown)))
    for panel, (_, its) in zip(panels, shown, strict=True):
        if layout:
            draw_groups(panel, its, at, POINTS)
        draw_points(panel, its, runs, at)
    entropy = level(panels, runs, *ENTROPY)
    _ticks(
        panels[0],
        places,
        max(2, 8 // columns_for(len(shown))),
        said,
        log=key == "optimizer.lr" or places[-1] > 8 * places[0],
    )
    name_axes(figure, panels, text, "final " + LOSS)
    legend(figure, [*signs(layout, runs, crosses=True, markers=True), *entropy])
    what = f"Final training loss against the {text.split(' (')[0]}, at most the loss of the first step, which a diverged run counts as."
    return figure, f"{what} {reading(layout)} Points are runs.{left_out(entries, runs, 'a final loss')}"


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


def rate(value: float) -> str:
    """`3e-4`."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _ticks(panel: Axes, places: Sequence[float], room: int, said: Callable[[float], str], *, log: bool) -> None:
    """At values that occur, as many as there is room for."""
    if log:
        panel.set_xscale("log")
    measure = np.log(places) if log else np.array(places)
    kept = [0]
    for place in range(1, len(places)):
        if measure[place] - measure[kept[-1]] > 0.8 * (measure[-1] - measure[0]) / room:
            kept.append(place)
    panel.xaxis.set_major_locator(FixedLocator([places[place] for place in kept]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value)))


PLATES: dict[str, tuple[str, Callable[[Sequence[Entry]], Drawing | None]]] = {
    "loss": ("Training loss", loss),
    "gradient_norm": ("Gradient norm of the whole model", gradient_norm),
    "heat_maps": ("Gradient norm by layer and step", heat_maps),
    "depth_profile": ("Gradient norm against depth", depth_profile),
    "loss_against_lr": ("Final loss against the learning rate", loss_against_lr),
    "loss_against_depth": ("Final loss against depth", loss_against_depth),
    "stability_map": ("Verdicts", stability_map),
}
