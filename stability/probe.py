"""What a probe measured, beside what theory predicts, as JSON and as a table; `stability/probe_report.py` draws it.

Nothing here imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stability.records import Array, block_norms, metrics_line
from stability.whole import replace

if TYPE_CHECKING:  # both load torch
    from rich.table import Table

    from stability.theory import Prediction
    from stability.trace import Trace

UNKNOWN = "none known"


@dataclass(frozen=True, eq=False)
class Probe:
    """One configuration, measured once for each seed. `words`: its overrides; `config`: all of it, resolved."""

    words: list[str]
    config: dict[str, Any]
    vocab: int
    seeds: list[int]
    traces: "list[Trace]"
    predicted: "Prediction"

    @property
    def depth(self) -> int:
        return len(self.traces[0].ffn_rms)

    def each(self, get: "Callable[[Trace], Any]") -> Array:
        """One row a seed."""
        return np.array([get(trace) for trace in self.traces], dtype=np.float64)


def stream_rms(trace: "Trace") -> Array:
    return trace.stream_rms


def stream_gradient(trace: "Trace") -> Array:
    return trace.stream_grad_norm


def token_cosine(trace: "Trace") -> Array:
    return trace.token_cosine


def blocks(trace: "Trace") -> Array:
    """The gradient norm of each block as a whole."""
    return block_norms(trace.grad_norm)


def labels(probes: Sequence[Probe]) -> list[str]:
    """What tells each from the others: the words that not all of them have."""
    shared = set.intersection(*(set(probe.words) for probe in probes)) if len(probes) > 1 else set()
    own = [" ".join(word for word in probe.words if word not in shared) for probe in probes]
    return [text or " ".join(probe.words) or "the default" for text, probe in zip(own, probes, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- JSON


def write(probes: Sequence[Probe], path: Path) -> None:
    """`probe.json`, one line of strict JSON by the rules of `metrics.jsonl`: what is not finite is null and named, as in
    `configurations[2].arrays.ffn_rms[1][13]`; all of these count from 1, so that [1] of an array of N + 1 is the embedding.

    `arrays` and `grad_norm` hold a row for each of `seeds`, by layer (`Trace`); `theory` the mean squares' bounds.
    """
    replace(path, metrics_line({"configurations": [_document(probe) for probe in probes]}) + "\n")


def _document(probe: Probe) -> dict[str, Any]:
    first = probe.traces[0]
    names = [field.name for field in fields(first) if field.name not in ("loss", "grad_norm")]
    return {
        "overrides": probe.words,
        "depth": probe.depth,
        "seeds": probe.seeds,
        "vocab": probe.vocab,
        "loss": [trace.loss for trace in probe.traces],
        "arrays": {name: [getattr(trace, name).tolist() for trace in probe.traces] for name in names},
        "grad_norm": {name: [trace.grad_norm[name] for trace in probe.traces] for name in first.grad_norm},
        "theory": asdict(probe.predicted),
        "config": probe.config,
    }


# --------------------------------------------------------------------------------------------------------------- table


def table(probes: Sequence[Probe]) -> "Table":
    """A row for each quantity and a column for each configuration: mean and standard deviation over the seeds."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("", no_wrap=True)
    for label in labels(probes):
        drawn.add_column(label, justify="right", overflow="fold")
    for cells in zip(*(_column(probe) for probe in probes), strict=True):
        drawn.add_row(cells[0][0], *(text for _, text in cells))
    return drawn


def notes(probes: Sequence[Probe]) -> list[str]:
    """Where the theory comes from, for which configuration none is known, and what several depths say together."""
    said = []
    for label, probe in zip(labels(probes), probes, strict=True):
        source = probe.predicted.stream_source
        said.append(f"{label}: stream by {source}" if source else f"{label}: no theory known for the stream")
    return list(dict.fromkeys(said)) + _against_depth(probes)


def _against_depth(probes: Sequence[Probe]) -> list[str]:
    """The exponent of the last feed-forward's gradient in the depth, of configurations that differ in nothing else."""
    families: dict[str, list[Probe]] = {}
    for probe in probes:
        others = " ".join(word for word in probe.words if not word.startswith("model.depth="))
        families.setdefault(others, []).append(probe)
    lines = []
    for words, family in families.items():
        if len({probe.depth for probe in family}) > 1:
            depths = [probe.depth for probe in family]
            measured = slope(depths, [float(probe.each(lambda t: t.grad_norm["down"][-1]).mean()) for probe in family])
            known = family[0].predicted.exponent
            theory = "no theory known" if known is None else f"theory {known:g}, Xiong et al. 2020, Theorem 1"
            lines.append(
                f"{words or 'the default'}: gradient of the last block's W_down over depths "
                f"{', '.join(map(str, depths))} goes as depth^{measured:.2f} ({theory})"
            )
    return lines


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y = c x^p, by least squares in the logarithms; nan where y is not positive and finite."""
    if len(x) < 2 or not (np.isfinite(y).all() and (np.asarray(y) > 0).all()):
        return float("nan")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _column(probe: Probe) -> list[tuple[str, str]]:
    n, theory = probe.depth, probe.predicted
    stream, gradient, block = (probe.each(get) for get in (stream_rms, stream_gradient, blocks))
    with np.errstate(divide="ignore", invalid="ignore"):
        growth, ratio = np.log(stream[:, -1] / stream[:, 0]) / n, block[:, 0] / block[:, -1]
    bounds = None if theory.stream is None else [float(np.sqrt(bound[-1])) for bound in theory.stream]
    return [
        ("depth, seeds", f"{n}, {len(probe.seeds)}"),
        ("loss (nats)", _spread(probe.each(lambda t: t.loss))),
        ("  ln of the vocabulary", f"{log(probe.vocab):.4g}"),
        ("stream RMS, embedding", _spread(stream[:, 0])),
        ("  last block", _spread(stream[:, -1])),
        ("  theory", UNKNOWN if bounds is None else " to ".join(dict.fromkeys(f"{bound:.4g}" for bound in bounds))),
        ("  ln(last / embedding) / depth", _spread(growth)),
        ("stream gradient, embedding", _spread(gradient[:, 0])),
        ("  last block", _spread(gradient[:, -1])),
        ("block gradient, first", _spread(block[:, 0])),
        ("  last", _spread(block[:, -1])),
        ("  first / last", _spread(ratio)),
        ("  theory", UNKNOWN if theory.gradient is None else f"{theory.gradient[0]:.3g}"),
        ("token cosine, last block", _spread(probe.each(lambda t: t.token_cosine[-1]))),
        ("largest attention logit", _spread(probe.each(lambda t: t.logit_max.max()))),
        ("update bound / lr (theory)", UNKNOWN if theory.update is None else f"{theory.update:.4g}"),
    ]


def _spread(values: Array) -> str:
    """Mean and, of several seeds, standard deviation."""
    with np.errstate(over="ignore", invalid="ignore"):
        return f"{values.mean():.4g}" + (f" ± {values.std(ddof=1):.2g}" if len(values) > 1 else "")
