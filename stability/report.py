"""A run, or several, on one page: loss, gradient norm, and the gradient norm of every layer over the whole run."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

from stability.curves import drawable, rolling_mean, window
from stability.deep_panels import draw_starts, extremes_panel, starts, stream_panel
from stability.label import label
from stability.maps import colour_bar, colour_scale, heat_map
from stability.panel import (
    BLACK,
    BLUE,
    DASHES,
    GREY,
    LAYER,
    ORANGE,
    PALETTE,
    PINK,
    RED,
    SKY,
    VERDICTS,
    furnish,
    ink,
    log_y,
    loss_top,
    mark,
    page,
    plain,
    positive,
    save,
)  # fmt: skip
from stability.records import Array, Run

HEAT_MAPS = 8
COLUMNS, ROWS = 800, 1000  # of a heat map: more than it has pixels for only make the file slow to draw


def draw_run(run: Run, path: str | Path) -> None:
    """Draw one run to `path` (PNG): loss, total gradient norm, layer by step, and layer profile; where it has probe lines,
    the stream by layer and the extremes of attention and updates."""
    text = _heading_lines(run)
    rows = 3 if len(run.probe_step) else 2
    figure = page(13, 1.3 + 4.6 * rows)
    grid = figure.add_gridspec(1 + rows, 2, height_ratios=[0.75 + 0.2 * len(text), *[4.6] * rows])
    _heading(figure.add_subplot(grid[0, :]), run, text)
    _loss_panel(figure.add_subplot(grid[1, 0]), run)
    _norm_panel(figure.add_subplot(grid[1, 1]), run)
    heat = figure.add_subplot(grid[2, 0])
    mesh = _heat_map(heat, run, colour_scale([run]), "Gradient norm of each block")
    colour_bar(figure, mesh, [heat])
    _profile_panel(figure.add_subplot(grid[2, 1]), run)
    if rows == 3:
        stream_panel(figure.add_subplot(grid[3, 0]), run)
        extremes_panel(figure.add_subplot(grid[3, 1]), run)
    save(figure, path)


def draw_runs(runs: Sequence[Run], path: str | Path, *, names: Sequence[str] = ()) -> None:
    """Draw several runs to `path` (PNG), one colour each, with their heat maps on one colour scale. Without `names` they
    are told apart by what differs between them.

    The first 8 runs get a heat map; the figure says so when there are more. Of runs that took one step alone and have
    probe lines it shows the start by layer. Raises ValueError when there is no run.
    """
    if not runs:
        raise ValueError("a comparison needs at least one run")
    names = names or label(runs)
    if starts(runs):
        draw_starts(runs, path, [plain(text) for text in names])
        return
    mapped = runs[:HEAT_MAPS]
    rows, columns = -(-len(mapped) // 4), min(len(mapped), 4)
    names = [plain(f"{text}  [{run.verdict}]") for text, run in zip(names, runs, strict=True)]
    legend_columns = max(1, min(4, 150 // max(map(len, names))))
    heights = [4.6 + 0.22 * -(-len(runs) // legend_columns), 3.7 * rows]

    figure = page(15, sum(heights))
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    curves, maps = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    handles = _curves(curves, runs)
    curves.legend(handles, names, loc="outside upper left", ncols=legend_columns, frameon=False, fontsize=11)
    scale, cells = colour_scale(mapped), maps.add_gridspec(rows, columns)
    panels = [maps.add_subplot(cells[place]) for place in range(len(mapped))]
    for panel, run, name in zip(panels, mapped, names, strict=False):
        mesh = _heat_map(panel, run, scale, textwrap.fill(name, 120 // columns))
    colour_bar(maps, mesh, panels)
    more = f" (the first {len(mapped)} of {len(runs)} runs)" if len(runs) > len(mapped) else ""
    maps.suptitle("Gradient norm of each block, on one colour scale" + more, fontsize=12)
    save(figure, path)


# ------------------------------------------------------------------------------------------------------------- one run


def _heading_lines(run: Run) -> list[str]:
    summary = run.summary or {}
    reason = textwrap.wrap(str(summary.get("reason") or "\n".join(run.notes)), 138)
    equation = str(summary.get("equation") or "").strip().splitlines()
    return [plain(line) for line in [*reason, *equation]]


def _heading(panel: Axes, run: Run, text: list[str]) -> None:
    panel.set_axis_off()
    ground = VERDICTS.get(run.verdict, GREY)
    badge = panel.text(0.008, 0.9, run.verdict.upper(), color=ink(ground), fontsize=14, weight="bold", va="top")
    badge.set_bbox({"boxstyle": "round,pad=0.35", "facecolor": ground, "edgecolor": "none"})
    beside: dict[str, Any] = {"xycoords": badge, "textcoords": "offset points", "annotation_clip": False}
    panel.annotate(plain(run.name), (1, 0), (16, 0), fontsize=15, **beside)
    panel.annotate("\n".join(text), (0, 0), (-6, -12), va="top", fontsize=10.5, family="monospace", **beside)
    for artist in panel.texts:
        artist.set_in_layout(False)  # a long line must not squeeze the panels below


def _loss_panel(panel: Axes, run: Run) -> None:
    summary = run.summary or {}
    width = window(run)
    panel.plot(run.step, run.loss, color=SKY, linewidth=0.7, marker=mark(run.step), label="training, each step")
    if width > 1:
        panel.plot(run.step, rolling_mean(run.loss, width), color=BLUE, linewidth=2, label=f"mean of {width} steps")
    ring: dict[str, Any] = {"markersize": 6, "markerfacecolor": "none", "markeredgewidth": 2.0}
    panel.plot(run.val_step, run.val_loss, "o", color=RED, label="validation", **ring)
    for key, text, dash in (("unigram_entropy", "unigram entropy", "--"), ("floor", "floor", ":")):
        if (level := summary.get(key)) is not None:
            panel.axhline(level, color=BLACK, linestyle=dash, linewidth=1.2, label=f"{text} {level:.3f} nats")
    _first_bad_step(panel, run)
    _loss_y(panel, [run])
    furnish(panel, "Loss")


def _norm_panel(panel: Axes, run: Run) -> None:
    norm = positive(run.grad_norm_total)
    panel.plot(run.step, norm, color=BLUE, linewidth=1, marker=mark(run.step), label="before clipping")
    clip = float(run.config.get("clip") or 0)
    if clip > 0 and run.config.get("clip_by", "norm") == "norm":  # a layer's or an entry's is no bound on the whole
        panel.axhline(clip, color=BLACK, linestyle="--", linewidth=1.2, label=f"clip threshold {clip:g}")
    if len(skipped := run.step[run.skipped]):  # they have no norm to be drawn at: they stand along the lower edge
        text, edge = f"skipped ({len(skipped)} of {len(run.step)} steps)", np.full(len(skipped), 0.03)
        panel.plot(skipped, edge, "^", color=RED, transform=panel.get_xaxis_transform(), label=text)
    _first_bad_step(panel, run)
    log_y(panel, "total gradient norm (L2)")
    furnish(panel, "Gradient norm of the whole model")


def _profile_panel(panel: Axes, run: Run) -> None:
    rows, layer = drawable(run), np.arange(1, run.depth + 1)
    if len(rows):  # where two of the three coincide, the later entry names it
        named = {rows[len(rows) // 2]: "middle", rows[-1]: "last", rows[0]: "first"}
        for row, dash, colour in zip(sorted(named), DASHES, (SKY, ORANGE, BLUE), strict=False):
            norm, text = positive(run.layers["block"][row]), f"step {run.layer_step[row]} ({named[row]} logged)"
            panel.plot(layer, norm, dash, color=colour, linewidth=1.8, marker=mark(layer), label=text)
    log_y(panel, "gradient norm of the block (L2)")
    furnish(panel, "Gradient norm against depth", LAYER)


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
    norms: list[Array] = []
    for number, run in enumerate(runs):
        colour = PALETTE[number % len(PALETTE)]
        style = {"color": colour, "linestyle": DASHES[number // len(PALETTE) % len(DASHES)], "marker": mark(run.step)}
        handles += loss.plot(run.step, rolling_mean(run.loss, window(run)), linewidth=1.8, **style)
        loss.plot(run.val_step, run.val_loss, "o", color=colour, markersize=5, markeredgecolor="white")
        norm.plot(run.step, positive(run.grad_norm_total), linewidth=1, **style)
        for row in drawable(run)[-1:]:
            layer = np.arange(1, run.depth + 1) / (1 if one_depth else run.depth)
            style["marker"] = mark(layer)
            norms.append(positive(run.layers["block"][row]))
            profile.plot(layer, norms[-1], linewidth=1.8, **style)
    known = {(run.summary or {}).get("unigram_entropy") for run in runs} - {None}
    for text in sorted({f"{entropy:.3f}" for entropy in known}):
        loss.axhline(float(text), color=GREY, linestyle="--", linewidth=1.2, label=f"unigram entropy {text} nats")
    _loss_y(loss, runs)
    log_y(norm, "total gradient norm (L2)")
    log_y(profile, "gradient norm of the block (L2)", norms)
    furnish(loss, "Loss: running mean, validation as points")
    furnish(norm, "Gradient norm of the whole model")
    across = LAYER if one_depth else "layer / depth (1 = last)"
    furnish(profile, "Gradient norm against depth, last step", across)
    if not one_depth:
        profile.xaxis.set_major_locator(MaxNLocator(5))
    return handles


# ------------------------------------------------------------------------------------------------------------ the parts


def _heat_map(panel: Axes, run: Run, scale: LogNorm, title: str) -> QuadMesh:
    mesh = heat_map(panel, run, scale, COLUMNS, ROWS)
    furnish(panel, title)
    panel.grid(False)
    panel.set_ylabel(LAYER, fontsize=11)
    panel.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return mesh


def _loss_y(panel: Axes, runs: Sequence[Run]) -> None:
    """Cut off a loss that has exploded, and say so."""
    panel.set_ylabel("loss (nats per token)", fontsize=11)
    if cut := loss_top([run.loss for run in runs]):
        top, highest = cut
        panel.set_ylabel(f"loss (nats per token)\ncut off: it rises to {highest:.3g}", fontsize=11)
        lowest = panel.dataLim.y0
        panel.set_ylim(lowest - 0.05 * (top - lowest), top)
