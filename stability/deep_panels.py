"""What probe lines show: of a run the stream by layer, and the extremes of attention and updates over its steps; of several
that took no second step, what they were before the first."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from stability.panel import BLUE, DASHES, LAYER, ORANGE, PALETTE, SKY, furnish, log_y, mark, page, positive, save
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


def draw_starts(runs: Sequence[Run], path: str | Path, names: Sequence[str]) -> None:
    """Draw what networks are before their first step to `path` (PNG), one colour each: gradient norm of the blocks, RMS
    of the stream and likeness of its tokens, by layer; over the depth where the depths differ."""
    figure = page(15, 6 + 0.22 * -(-len(runs) // 4))
    gradient, stream, cosine = figure.subplots(1, 3)
    one_depth = len({run.depth for run in runs}) == 1
    handles = []
    for number, run in enumerate(runs):
        style = {"color": PALETTE[number % len(PALETTE)], "linestyle": DASHES[number // len(PALETTE) % len(DASHES)]}
        across = np.arange(run.depth + 1) / (1 if one_depth else run.depth)
        handles += gradient.plot(across[1:], positive(run.layers["block"][0]), linewidth=1.8, **style)
        stream.plot(across, positive(_by_place(run, "stream_rms")[0]), linewidth=1.8, **style)
        cosine.plot(across, _by_place(run, "token_cosine")[0], linewidth=1.8, **style)
    log_y(gradient, "gradient norm of the block (L2)")
    log_y(stream, "RMS of the stream")
    cosine.set_ylabel("mean cosine between two tokens of a sequence", fontsize=11)
    after = "after layer (0 = embedding)" if one_depth else "after layer / depth (0 = embedding)"
    furnish(gradient, "Gradient norm at step 1", LAYER if one_depth else "layer / depth (1 = last)")
    furnish(stream, "Stream before step 1", after)
    furnish(cosine, "Likeness of tokens before step 1", after)
    figure.legend(handles, list(names), loc="outside upper left", ncols=4, frameon=False, fontsize=11)
    save(figure, path)


def starts(runs: Sequence[Run]) -> bool:
    """Whether that is all that there is to see of them."""
    return all(len(run.step) == 1 and len(run.layer_step) == 1 and "stream_rms" in run.probe for run in runs)


def _by_place(run: Run, key: str) -> Array:
    """(probes, places); one place that is nan where the record has none."""
    values = run.probe.get(key, np.empty(0))
    return values if values.ndim == 2 and values.size else np.full((len(run.probe_step), 1), np.nan)
