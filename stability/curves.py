"""Numbers made fit to be drawn as lines: smoothed, over the seeds of a group, and no more of them than can be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stability.panel import positive
from stability.records import Array, Run


@dataclass(frozen=True, eq=False)
class Curve:
    """`y` against `x`, which increases, between `low` and `high`, which are y where it has no width; nan is a gap."""

    x: Array
    y: Array
    low: Array
    high: Array

    @property
    def known(self) -> NDArray[np.intp]:
        """The places that are no gap."""
        return np.flatnonzero(np.isfinite(self.y))


def thread(x: Array, y: Array) -> Curve:
    """A curve without width."""
    return Curve(x, y, y, y)


EMPTY = thread(np.empty(0), np.empty(0))


def rolling_mean(values: Array, width: int) -> Array:
    """The mean of the last `width` values at each place (fewer at the start), nan ones left out; nan where all are."""
    if not len(values):
        return values
    known = np.isfinite(values)
    ones = np.ones(width)
    total = np.convolve(np.where(known, values, 0.0), ones)[: len(values)]  # no running sum: one spike would stay in it
    count = np.round(np.convolve(known.astype(float), ones)[: len(values)])
    return np.where(known | (count > 0), total / np.maximum(count, 1), np.nan)


def rolling(extreme: Callable[[Array, Array], Array], values: Array, width: int) -> Array:
    """The extreme (np.fmin, np.fmax) of the last `width` values at each place, in log(width) passes."""
    found, span = values.copy(), 1
    while span < width:
        step = min(span, width - span)
        found[step:] = extreme(found[step:], found[:-step])
        span += step
    return found


def window(run: Run) -> int:
    """Over how many steps the loss is averaged: a fiftieth of the run."""
    return max(1, len(run.step) // 50)


def drawable(run: Run) -> NDArray[np.intp]:
    """The rows of the layer arrays that hold anything to draw."""
    return np.flatnonzero(np.isfinite(positive(run.layers["block"])).any(axis=1))


def smooth_loss(run: Run) -> Curve:
    """The running mean up to the last finite loss: beyond it the window would draw a run on that has ended."""
    known = np.flatnonzero(np.isfinite(run.loss))
    end = known[-1] + 1 if len(known) else 0
    return thread(run.step[:end].astype(float), rolling_mean(run.loss, window(run))[:end])


def smooth_norm(run: Run) -> Curve:
    """The running mean of the logarithm, and the smallest and the largest norm of the same steps, that no spike is lost."""
    norm, width = positive(run.grad_norm_total), window(run)
    known = np.flatnonzero(np.isfinite(norm))
    norm = norm[: known[-1] + 1 if len(known) else 0]
    mean = np.exp(rolling_mean(np.log(norm), width))
    return Curve(
        run.step[: len(norm)].astype(float), mean, rolling(np.fmin, norm, width), rolling(np.fmax, norm, width)
    )


def profile(run: Run, row: int, *, relative: bool) -> Curve:
    """The blocks' gradient norm against the layer, or the layer over the depth, at the first (`row` 0) or the last (-1)
    logged step that has one."""
    rows = drawable(run)
    if not len(rows):
        return EMPTY
    layer = np.arange(1, run.depth + 1) / (run.depth if relative else 1)
    return thread(layer.astype(float), positive(run.layers["block"][rows[row]]))


def over_runs(curves: Sequence[Curve]) -> Curve:
    """The median over the curves that have a value, between the smallest and the largest, wherever one of them has a place;
    nan where none has a value."""
    across = np.unique(np.concatenate([curve.x for curve in curves]))
    low, middle, high = (np.full((len(curves), len(across)), np.nan) for _ in range(3))
    for row, curve in enumerate(curves):
        at = np.searchsorted(across, curve.x)
        low[row, at], middle[row, at], high[row, at] = curve.low, curve.y, curve.high
    middle.sort(axis=0)  # nan comes last
    last = np.maximum(np.isfinite(middle).sum(axis=0) - 1, 0)
    places = np.arange(len(across))
    median = (middle[last // 2, places] + middle[(last + 1) // 2, places]) / 2
    return Curve(across, median, np.fmin.reduce(low), np.fmax.reduce(high))


def thin(values: Array, points: int) -> NDArray[np.intp]:
    """The places of at most `points` values that draw the same curve: the smallest and the largest of each of points / 2
    equal stretches, so that no spike is lost. A stretch that is nan throughout stays a gap."""
    if len(values) <= points:
        return np.arange(len(values))
    size = -(-len(values) // (points // 2))
    stretches = -(-len(values) // size)
    padded = np.full(stretches * size, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(stretches, size)
    smallest = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
    largest = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    return np.unique(np.concatenate([smallest, largest]) + np.tile(np.arange(stretches) * size, 2))


def thinned(curve: Curve, points: int) -> Array:
    """Its line, of shape (at most `points`, 2)."""
    kept = thin(curve.y, points)
    return np.column_stack([curve.x[kept], curve.y[kept]])
