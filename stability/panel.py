"""What every picture of the house has in common: palette, grid, axes, and a file that is whole.

Figures are drawn through matplotlib's object API, without pyplot: no global state, no display, safe beside a training.
"""

from collections.abc import Sequence
from io import BytesIO
from math import sqrt
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from stability.records import Array
from stability.whole import replace

# Okabe and Ito's palette, which survives colour blindness and grey print; its yellow is for areas, too faint a line on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
YELLOW = "#F0E442"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK)
DASHES = ("-", "--", ":", "-.")  # a second sign, for when the palette has come round
LAYER = "layer (1 = nearest the input)"
VERDICTS = {  # the worst last: what a training came to weighs more than that it came to nothing
    "stable": GREEN, "too_short": SKY, "unfinished": GREY, "interrupted": BLUE, "refused": YELLOW, "failed": BLACK,
    "spiky": ORANGE, "stalled": PINK, "diverged": RED,
}  # fmt: skip


def positive(values: Array) -> Array:
    """Zero has no place on a log axis: nan, which is drawn as a gap and not as a plunge."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def mark(places: Array | NDArray[np.int64]) -> str:
    """A line through a single point is invisible: give it a marker."""
    return "o" if len(places) == 1 else ""


def log_y(panel: Axes, text: str, norms: Sequence[Array] = ()) -> str:
    """A log axis, of `norms` that span too much with their `decades` alone. What that cuts off is added to the text, and
    returned. One that spans less than a factor of 5 is widened to that: what is flat should look flat, and two of the labels 1, 2, 5
    stand on it, wherever it is."""
    panel.set_yscale("log")
    if limits := decades(norms):
        panel.set_ylim(limits[0] / 1.5, limits[1] * 1.5)
    low, high = panel.get_ylim()
    if high < 5 * low:
        middle = sqrt(low) * sqrt(high)
        panel.set_ylim(middle / sqrt(5), middle * sqrt(5))
    cut = cut_off(norms, limits)
    cut = f"\n{cut}" if cut else ""
    panel.set_ylabel(text and text + cut, fontsize=11)
    panel.yaxis.set_minor_formatter(NullFormatter())
    if ticks := log_ticks(*panel.get_ylim()):
        panel.yaxis.set_major_locator(ticks[0])
        panel.yaxis.set_major_formatter(ticks[1])
    return cut


def log_ticks(low: float, high: float) -> tuple[LogLocator, FuncFormatter] | None:
    """Within two decades plain numbers read better than powers of ten."""
    return (LogLocator(subs=(1, 2, 5)), FuncFormatter(lambda value, _: f"{value:g}")) if high < 100 * low else None


def loss_top(losses: Sequence[Array]) -> tuple[float, float] | None:
    """(where to cut the axis off, the highest loss) where one has exploded: it would press everything worth seeing against
    the floor."""
    known = [finite for finite in (loss[np.isfinite(loss)] for loss in losses) if len(finite)]
    start = max((loss[0] for loss in known), default=0)
    highest = max((loss.max() for loss in known), default=0)
    return (1.5 * start, highest) if highest > 2 * start > 0 else None


def decades(numbers: Sequence[Array]) -> tuple[float, float] | None:
    """Of several arrays whose numbers span more than eight decades, the limits of the six that hold the most of them, each
    array counting alike; None for any others. A gradient that has vanished would press the rest into one stroke."""
    known = [np.log10(own[np.isfinite(own)]) for own in map(positive, numbers)]
    known = [own.ravel() for own in known if own.size]
    if len(known) < 2:
        return None
    values = np.concatenate(known)
    order = np.argsort(values)
    values = values[order]
    if values[-1] - values[0] <= 8:
        return None
    shares = np.concatenate([np.full(len(own), 1 / len(own)) for own in known])[order]
    below = np.concatenate([[0.0], np.cumsum(shares)])
    ends = np.searchsorted(values, values + 6, side="right")
    start = int((below[ends] - below[:-1]).argmax())
    low, high = values[start], values[ends[start] - 1]
    low, high = (
        (values[0] if low - values[0] < 1 else low),
        (values[-1] if values[-1] - high < 1 else high),
    )  # by a hair
    return float(10**low), float(10**high)


def cut_off(numbers: Sequence[Array], limits: tuple[float, float] | None) -> str:
    """What lies beyond the limits, in words: `cut off: it falls to 1e-18`; empty where nothing does."""
    known = [own for own in (positive(own) for own in numbers) if np.isfinite(own).any()]
    if limits is None or not known:
        return ""
    low, high = min(np.nanmin(own) for own in known), max(np.nanmax(own) for own in known)
    ends = [f"falls to {low:.0e}"] * bool(low < 0.999 * limits[0]) + [f"rises to {high:.0e}"] * bool(
        high > 1.001 * limits[1]
    )
    return f"cut off: it {' and '.join(ends)}" if ends else ""


def rate(value: float) -> str:
    """A learning rate in short: `3e-4`."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def ink(ground: str) -> str:
    """Black or white, whichever can be read on the colour."""
    red, green, blue = to_rgb(ground)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def furnish(panel: Axes, title: str, across: str = "step (optimizer steps)") -> None:
    panel.set_title(title, loc="left", fontsize=12)
    panel.set_xlabel(across, fontsize=11)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if panel.get_legend_handles_labels()[0]:  # below the panel, where it can hide nothing
        panel.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.14), ncols=2, frameon=False, fontsize=10)


def plain(text: str) -> str:
    """Text as it stands: `$` starts no formula, and a leading `_` does not drop it from a legend."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def page(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    replace(Path(path), drawn.getvalue())
