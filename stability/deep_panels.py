"""What a run's probe lines show: the stream by layer, and the extremes of attention and updates over the run."""

import numpy as np
from matplotlib.axes import Axes

from stability.panel import BLUE, DASHES, ORANGE, SKY, furnish, log_y, mark, positive
from stability.records import Array, Run


def stream_panel(panel: Axes, run: Run) -> None:
    """The stream's RMS against depth, at the first, the middle and the last probe."""
    stream = positive(_by_place(run, "stream_rms"))
    rows = np.flatnonzero(np.isfinite(stream).any(axis=1))
    if len(rows):  # where two of the three coincide, the later entry names it
        named = {rows[len(rows) // 2]: "middle", rows[-1]: "last", rows[0]: "first"}
        place = np.arange(stream.shape[1])
        for row, dash, colour in zip(sorted(named), DASHES, (SKY, ORANGE, BLUE), strict=False):
            text = f"step {run.probe_step[row]} ({named[row]} probe)"
            panel.plot(place, stream[row], dash, color=colour, linewidth=1.8, label=text)
    log_y(panel, "RMS of the stream")
    furnish(panel, "Stream against depth, on the fixed probe batch", "after layer (0 = embedding)")


def extremes_panel(panel: Axes, run: Run) -> None:
    """Over the steps, the largest of all layers: attention logit (left axis) and update-to-weight ratio (right axis)."""
    other = panel.twinx()
    _largest(panel, run, "logit_max", "largest attention logit", BLUE, "-")
    _largest(other, run, "update_ratio", "largest |update| / |weight| of a block", ORANGE, "--")
    panel.plot([], [], "-", color=BLUE, linewidth=1.8, label="attention logit (left)")
    panel.plot([], [], "--", color=ORANGE, linewidth=1.8, label="|update| / |weight| (right)")
    furnish(panel, "Attention logits and updates, the largest over the layers")
    other.spines["top"].set_visible(False)


def _largest(panel: Axes, run: Run, key: str, text: str, colour: str, dash: str) -> None:
    """nan, drawn as a gap, where a layer is not known, which may be the largest."""
    values = positive(_by_place(run, key).max(axis=1))
    panel.plot(run.probe_step, values, dash, color=colour, linewidth=1.8, marker=mark(values[np.isfinite(values)]))
    log_y(panel, text)
    panel.yaxis.label.set_color(colour)


def _by_place(run: Run, key: str) -> Array:
    """(probes, places); one place that is nan where the record has none."""
    values = run.probe.get(key, np.empty(0))
    return values if values.ndim == 2 and values.size else np.full((len(run.probe_step), 1), np.nan)
