"""A probe as one picture (PNG): what was measured, by layer, and what theory predicts of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from stability.panel import BLACK, DASHES, GREY, LAYER, PALETTE, furnish, log_y, mark, page, plain, positive, save
from stability.probe import Probe, blocks, labels, stream_gradient, stream_rms, token_cosine
from stability.records import Array

if TYPE_CHECKING:
    from stability.trace import Trace

PLACE = "layer (0 = the embedding)"


def draw(probes: Sequence[Probe], path: Path) -> None:
    """Four panels: RMS of the stream, gradient of each block, gradient of the stream, likeness of tokens. A colour for each
    configuration, its seeds as a band; theory dotted, and left out where none is known, which the legend says.

    Raises ValueError where there is nothing to draw.
    """
    if not probes:
        raise ValueError("a picture needs at least one probe")
    names = [plain(name) for name in _names(probes)]
    columns = max(1, min(3, 140 // max(map(len, names))))
    figure = page(13, 9.2 + 0.24 * -(-len(names) // columns))
    (stream, block), (gradient, cosine) = figure.subplots(2, 2)
    shared = len({probe.depth for probe in probes}) == 1
    for number, probe in enumerate(probes):
        places = np.arange(probe.depth + 1) / (1 if shared else probe.depth)
        _measured(stream, places, probe, stream_rms, number)
        _measured(block, places[1:], probe, blocks, number)
        _measured(gradient, places, probe, stream_gradient, number)
        _measured(cosine, places, probe, token_cosine, number)
    for panel in (stream, block, gradient):
        panel.set_yscale("log")
    measured = {panel: panel.get_ylim() for panel in (stream, block)}
    for number, probe in enumerate(probes):
        places = np.arange(probe.depth + 1) / (1 if shared else probe.depth)
        _predicted_stream(stream, places, probe, number)
        _predicted_gradient(block, places[1:], probe, number)
    for panel, (low, high) in measured.items():  # theory may leave the picture, what was measured may not
        bottom, top = panel.get_ylim()
        panel.set_ylim(max(low / 3, bottom), min(high * 3, top))

    place, layer = (PLACE, LAYER) if shared else ("layer / depth (0 = the embedding)", "layer / depth (1 = last)")
    log_y(stream, "RMS of the stream")
    furnish(stream, "Stream after each block", place)
    log_y(block, "gradient norm of the block (L2)")
    furnish(block, "Gradient of each block's parameters", layer)
    log_y(gradient, "gradient norm of the stream (L2)")
    furnish(gradient, "Gradient of the loss in the stream", place)
    cosine.set_ylabel("mean cosine of two tokens of a sequence", fontsize=11)
    furnish(cosine, "Likeness of tokens (1 = rank collapse)", place)
    if not shared:
        for panel in (stream, block, gradient, cosine):
            panel.xaxis.set_major_locator(MaxNLocator(5))
    figure.legend(_signs(probes), names, loc="outside upper left", ncols=columns, frameon=False, fontsize=11)
    save(figure, path)


def _names(probes: Sequence[Probe]) -> list[str]:
    """Of the legend's signs: what each configuration is and whose theory stands beside it."""
    known = [probe.predicted.stream_source or "no theory known" for probe in probes]
    names = [f"{label}  [{source}]" for label, source in zip(labels(probes), known, strict=True)]
    seeds = sorted({len(probe.seeds) for probe in probes})
    more = ["lowest to highest of the seeds"] if seeds[-1] > 1 else []
    course = any(probe.predicted.gradient is not None for probe in probes)
    theory = "theory" + " (of the block gradient: its course, Xiong et al. 2020)" * course
    return names + more + [theory] * _any_theory(probes)


def _signs(probes: Sequence[Probe]) -> list[Artist]:
    signs: list[Artist] = [Line2D([], [], linewidth=2, **_style(number)) for number in range(len(probes))]
    more = [Patch(color=GREY, alpha=0.35)] if max(len(probe.seeds) for probe in probes) > 1 else []
    return signs + more + [Line2D([], [], linestyle=":", color=BLACK)] * _any_theory(probes)


def _any_theory(probes: Sequence[Probe]) -> bool:
    return any(probe.predicted.stream is not None or probe.predicted.gradient is not None for probe in probes)


def _style(number: int) -> dict[str, Any]:
    return {"color": PALETTE[number % len(PALETTE)], "linestyle": DASHES[number // len(PALETTE) % len(DASHES)]}


def _measured(panel: Axes, places: Array, probe: Probe, get: "Callable[[Trace], Any]", number: int) -> None:
    """The mean of the seeds, and a band from the lowest to the highest; what has no logarithm is a gap."""
    rows = probe.each(get)
    rows = rows if get is token_cosine else positive(rows)
    panel.fill_between(places, rows.min(0), rows.max(0), color=_style(number)["color"], alpha=0.3, linewidth=0)
    panel.plot(places, rows.mean(0), linewidth=1.8, marker=mark(places), **_style(number))


def _predicted_stream(panel: Axes, places: Array, probe: Probe, number: int) -> None:
    if probe.predicted.stream is None:
        return
    low, high = (positive(np.sqrt(bound)) for bound in probe.predicted.stream)
    colour = _style(number)["color"]
    panel.fill_between(places, low, high, color=colour, alpha=0.08, linewidth=0)
    for bound in (low, high):
        panel.plot(places, bound, ":", color=colour, linewidth=1.4)


def _predicted_gradient(panel: Axes, places: Array, probe: Probe, number: int) -> None:
    """The predicted course, tied to what was measured at the last block, since the papers leave the constant open."""
    if probe.predicted.gradient is not None:
        last = probe.each(blocks)[:, -1].mean()
        course = positive(last * probe.predicted.gradient)
        panel.plot(places, course, ":", color=_style(number)["color"], linewidth=1.4)
