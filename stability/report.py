"""A run, or several, on one page: loss, gradient norm, and the gradient norm of every layer over the whole run.

Figures are drawn through matplotlib's object API, without pyplot: no global state, no display, safe beside a training.
"""

import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from stability.records import Array, Run, label
from stability.whole import replace

# Okabe and Ito's palette, which survives colour blindness and grey print; its yellow is left out, too faint on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)
DASHES = ("-", "--", ":", "-.")  # a second sign, for when the palette has come round
VERDICTS = {"stable": GREEN, "spiky": ORANGE, "diverged": RED, "stalled": PINK}
LAYER = "layer (1 = nearest the input)"
HEAT_MAPS = 8
COLUMNS = 800  # logged steps in a heat map: more than it has pixels for only make the file slow to draw


def draw_run(run: Run, path: str | Path) -> None:
    """Draw one run to `path` (PNG): loss, total gradient norm, layer by step, and layer profile."""
    text = _heading_lines(run)
    figure = _figure(13, 10.5)
    grid = figure.add_gridspec(3, 2, height_ratios=[0.75 + 0.2 * len(text), 4.6, 4.6])
    _heading(figure.add_subplot(grid[0, :]), run, text)
    _loss_panel(figure.add_subplot(grid[1, 0]), run)
    _norm_panel(figure.add_subplot(grid[1, 1]), run)
    heat = figure.add_subplot(grid[2, 0])
    mesh = _heat_map(heat, run, _colour_scale([run]), "Gradient norm of each block")
    _colour_bar(figure, mesh, [heat])
    _profile_panel(figure.add_subplot(grid[2, 1]), run)
    _save(figure, path)


def draw_runs(runs: Sequence[Run], path: str | Path) -> None:
    """Draw several runs to `path` (PNG), one colour each, with their heat maps on one colour scale.

    The first 8 runs get a heat map; the figure says so when there are more. Raises ValueError when there is no run.
    """
    if not runs:
        raise ValueError("a comparison needs at least one run")
    mapped = runs[:HEAT_MAPS]
    rows, columns = -(-len(mapped) // 4), min(len(mapped), 4)
    names = [_plain(f"{text}  [{run.verdict}]") for text, run in zip(label(runs), runs, strict=True)]
    legend_columns = max(1, min(4, 150 // max(map(len, names))))
    heights = [4.6 + 0.22 * -(-len(runs) // legend_columns), 3.7 * rows]

    figure = _figure(15, sum(heights))
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    curves, maps = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    handles = _curves(curves, runs)
    curves.legend(handles, names, loc="outside upper left", ncols=legend_columns, frameon=False, fontsize=11)
    scale, cells = _colour_scale(mapped), maps.add_gridspec(rows, columns)
    panels = [maps.add_subplot(cells[place]) for place in range(len(mapped))]
    for panel, run, name in zip(panels, mapped, names, strict=False):
        mesh = _heat_map(panel, run, scale, textwrap.fill(name, 120 // columns))
    _colour_bar(maps, mesh, panels)
    more = f" (the first {len(mapped)} of {len(runs)} runs)" if len(runs) > len(mapped) else ""
    maps.suptitle("Gradient norm of each block, on one colour scale" + more, fontsize=12)
    _save(figure, path)


# ------------------------------------------------------------------------------------------------------------- one run


def _heading_lines(run: Run) -> list[str]:
    summary = run.summary or {}
    reason = textwrap.wrap(str(summary.get("reason") or "\n".join(run.notes)), 138)
    equation = str(summary.get("equation") or "").strip().splitlines()
    return [_plain(line) for line in [*reason, *equation]]


def _heading(panel: Axes, run: Run, text: list[str]) -> None:
    panel.set_axis_off()
    ground = VERDICTS.get(run.verdict, GREY)
    ink = "black" if ground in (ORANGE, PINK) else "white"
    badge = panel.text(0.008, 0.9, run.verdict.upper(), color=ink, fontsize=14, weight="bold", va="top")
    badge.set_bbox({"boxstyle": "round,pad=0.35", "facecolor": ground, "edgecolor": "none"})
    beside: dict[str, Any] = {"xycoords": badge, "textcoords": "offset points", "annotation_clip": False}
    panel.annotate(_plain(run.name), (1, 0), (16, 0), fontsize=15, **beside)
    panel.annotate("\n".join(text), (0, 0), (-6, -12), va="top", fontsize=10.5, family="monospace", **beside)
    for artist in panel.texts:
        artist.set_in_layout(False)  # a long line must not squeeze the panels below


def _loss_panel(panel: Axes, run: Run) -> None:
    summary = run.summary or {}
    width = _window(run)
    panel.plot(run.step, run.loss, color=SKY, linewidth=0.7, marker=_mark(run.step), label="training, each step")
    if width > 1:
        panel.plot(run.step, rolling_mean(run.loss, width), color=BLUE, linewidth=2, label=f"mean of {width} steps")
    ring: dict[str, Any] = {"markersize": 6, "markerfacecolor": "none", "markeredgewidth": 2.0}
    panel.plot(run.val_step, run.val_loss, "o", color=RED, label="validation", **ring)
    for key, text, dash in (("unigram_entropy", "unigram entropy", "--"), ("floor", "floor", ":")):
        if (level := summary.get(key)) is not None:
            panel.axhline(level, color=BLACK, linestyle=dash, linewidth=1.2, label=f"{text} {level:.3f} nats")
    _first_bad_step(panel, run)
    _loss_y(panel, [run])
    _furnish(panel, "Loss")


def _norm_panel(panel: Axes, run: Run) -> None:
    norm = _positive(run.grad_norm_total)
    panel.plot(run.step, norm, color=BLUE, linewidth=1, marker=_mark(run.step), label="before clipping")
    clip = float(run.config.get("clip") or 0)
    if clip > 0:
        panel.axhline(clip, color=BLACK, linestyle="--", linewidth=1.2, label=f"clip threshold {clip:g}")
    if len(skipped := run.step[run.skipped]):  # they have no norm to be drawn at: they stand along the lower edge
        text, edge = f"skipped ({len(skipped)} of {len(run.step)} steps)", np.full(len(skipped), 0.03)
        panel.plot(skipped, edge, "^", color=RED, transform=panel.get_xaxis_transform(), label=text)
    _first_bad_step(panel, run)
    _log_y(panel, "total gradient norm (L2)")
    _furnish(panel, "Gradient norm of the whole model")


def _profile_panel(panel: Axes, run: Run) -> None:
    rows, layer = _drawable(run), np.arange(1, run.depth + 1)
    if len(rows):  # where two of the three coincide, the later entry names it
        named = {rows[len(rows) // 2]: "middle", rows[-1]: "last", rows[0]: "first"}
        for row, dash, colour in zip(sorted(named), DASHES, (SKY, ORANGE, BLUE), strict=False):
            norm, text = _positive(run.layers["block"][row]), f"step {run.layer_step[row]} ({named[row]} logged)"
            panel.plot(layer, norm, dash, color=colour, linewidth=1.8, marker=_mark(layer), label=text)
    _log_y(panel, "gradient norm of the block (L2)")
    _furnish(panel, "Gradient norm against depth", LAYER)


def _first_bad_step(panel: Axes, run: Run) -> None:
    summary = run.summary or {}
    if (step := summary.get("first_bad_step")) is not None:
        where = "" if summary.get("first_bad_layer") is None else f", layer {summary['first_bad_layer']}"
        panel.axvline(step, color=PINK, linestyle="-.", linewidth=1.5, label=f"first bad: step {step}{where}")


# ---------------------------------------------------------------------------------------------------------- several runs


def _curves(figure: SubFigure, runs: Sequence[Run]) -> list[Artist]:
    loss, norm, profile = figure.subplots(1, 3)
    one_depth = len({run.depth for run in runs if run.depth}) <= 1
    handles: list[Artist] = []
    for number, run in enumerate(runs):
        colour = PALETTE[number % len(PALETTE)]
        style = {"color": colour, "linestyle": DASHES[number // len(PALETTE) % len(DASHES)], "marker": _mark(run.step)}
        handles += loss.plot(run.step, rolling_mean(run.loss, _window(run)), linewidth=1.8, **style)
        loss.plot(run.val_step, run.val_loss, "o", color=colour, markersize=5, markeredgecolor="white")
        norm.plot(run.step, _positive(run.grad_norm_total), linewidth=1, **style)
        for row in _drawable(run)[-1:]:
            layer = np.arange(1, run.depth + 1) / (1 if one_depth else run.depth)
            style["marker"] = _mark(layer)
            profile.plot(layer, _positive(run.layers["block"][row]), linewidth=1.8, **style)
    known = {(run.summary or {}).get("unigram_entropy") for run in runs} - {None}
    for text in sorted({f"{entropy:.3f}" for entropy in known}):
        loss.axhline(float(text), color=GREY, linestyle="--", linewidth=1.2, label=f"unigram entropy {text} nats")
    _loss_y(loss, runs)
    _log_y(norm, "total gradient norm (L2)")
    _log_y(profile, "gradient norm of the block (L2)")
    _furnish(loss, "Loss: running mean, validation as points")
    _furnish(norm, "Gradient norm of the whole model")
    across = LAYER if one_depth else "layer / depth (1 = last)"
    _furnish(profile, "Gradient norm against depth, last step", across)
    if not one_depth:
        profile.xaxis.set_major_locator(MaxNLocator(5))
    return handles


# ------------------------------------------------------------------------------------------------------------ the parts


def rolling_mean(values: Array, width: int) -> Array:
    """The mean of the last `width` values at each place (fewer at the start), nan ones left out; nan where all are."""
    if not len(values):
        return values
    known = np.isfinite(values)
    ones = np.ones(width)
    total = np.convolve(np.where(known, values, 0.0), ones)[: len(values)]  # no running sum: one spike would stay in it
    count = np.round(np.convolve(known.astype(float), ones)[: len(values)])
    return np.where(known | (count > 0), total / np.maximum(count, 1), np.nan)


def _window(run: Run) -> int:
    return max(1, len(run.step) // 50)


def _positive(values: Array) -> Array:
    """Zero has no place on a log axis: nan, which is drawn as a gap and not as a plunge."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _drawable(run: Run) -> NDArray[np.intp]:
    """The rows of the layer arrays that hold anything to draw."""
    return np.flatnonzero(np.isfinite(_positive(run.layers["block"])).any(axis=1))


def _edges(middles: NDArray[np.int64]) -> Array:
    """The borders of cells around increasing `middles`: halfway between neighbours, and half a unit beyond the ends."""
    return np.concatenate([[middles[0] - 0.5], (middles[1:] + middles[:-1]) / 2, [middles[-1] + 0.5]])


def _colour_scale(runs: Sequence[Run]) -> LogNorm:
    known = np.concatenate([_positive(run.layers["block"]).ravel() for run in runs])
    known = known[np.isfinite(known)]
    low, high = (known.min(), known.max()) if len(known) else (0.1, 1.0)
    return LogNorm(low, high) if low < high else LogNorm(low / 3, high * 3)


def _heat_map(panel: Axes, run: Run, scale: LogNorm, title: str) -> QuadMesh:
    steps, block = run.layer_step, _positive(run.layers["block"])
    if len(steps) > COLUMNS:
        kept = np.linspace(0, len(steps) - 1, COLUMNS).round().astype(int)
        steps, block = steps[kept], block[kept]
    if not block.size:
        steps, block = np.array([1]), np.full((1, 1), np.nan)
        panel.text(0.5, 0.5, "no layers recorded", transform=panel.transAxes, ha="center", fontsize=11)
    edges = _edges(steps), _edges(np.arange(1, block.shape[1] + 1))
    mesh = panel.pcolormesh(*edges, np.ma.masked_invalid(block.T), norm=scale, cmap="viridis")
    panel.set_facecolor("0.75")  # what is masked shows the ground
    _furnish(panel, title)
    panel.grid(False)
    panel.set_ylabel(LAYER, fontsize=11)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return mesh


def _colour_bar(figure: Figure | SubFigure, mesh: QuadMesh, panels: Sequence[Axes]) -> None:
    bar = figure.colorbar(mesh, ax=list(panels))
    grey = any(np.ma.is_masked(drawn.get_array()) for panel in panels for drawn in panel.collections)
    bar.set_label("gradient norm of the block (L2)" + ("\ngrey: zero or not finite" if grey else ""), fontsize=11)


def _mark(places: Array | NDArray[np.int64]) -> str:
    """A line through a single point is invisible: give it a marker."""
    return "o" if len(places) == 1 else ""


def _loss_y(panel: Axes, runs: Sequence[Run]) -> None:
    """Cut off a loss that has exploded, and say so: it would press everything worth seeing against the floor."""
    known = [loss for loss in (run.loss[np.isfinite(run.loss)] for run in runs) if len(loss)]
    start = max((loss[0] for loss in known), default=0)
    highest = max((loss.max() for loss in known), default=0)
    panel.set_ylabel("loss (nats per token)", fontsize=11)
    if highest > 2 * start > 0:
        panel.set_ylabel(f"loss (nats per token)\ncut off: it rises to {highest:.3g}", fontsize=11)
        lowest = panel.dataLim.y0
        panel.set_ylim(lowest - 0.05 * (1.5 * start - lowest), 1.5 * start)


def _log_y(panel: Axes, text: str) -> None:
    panel.set_yscale("log")
    panel.set_ylabel(text, fontsize=11)
    low, high = panel.get_ylim()
    if high < 30 * low:  # within a decade or so plain numbers read better than powers of ten
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())


def _furnish(panel: Axes, title: str, across: str = "step (optimizer steps)") -> None:
    panel.set_title(title, loc="left", fontsize=12)
    panel.set_xlabel(across, fontsize=11)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if panel.get_legend_handles_labels()[0]:  # below the panel, where it can hide nothing
        panel.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=2, frameon=False, fontsize=10)


def _plain(text: str) -> str:
    """Text as it stands: `$` starts no formula, and a leading `_` does not drop it from a legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12))
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    replace(Path(path), drawn.getvalue())
