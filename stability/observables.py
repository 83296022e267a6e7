"""What a claim may ask of a run: functions of one run.

What a record does not hold is `Unread`, with the reason; a claim then stays undecided. A function's keyword arguments are the
`knobs` of a claim and are checked against its annotations (`stability.claims`), so that a knob that fits nothing is
refused before anything runs. Layers are blocks, counted from 1; 0 is the place after the embedding.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator

from stability.records import BLOCK_PARTS, MATRICES, SUMMARY, Array

SOUND, UNSOUND = {"stable", "spiky"}, {"diverged", "stalled"}
OUTCOMES = ("final_loss", "final_val_loss", "best_loss", "best_val_loss")  # of the whole run, had it come to its end
STREAM = ("stream_rms", "stream_grad_norm", "token_cosine")  # at N + 1 places
BRANCHES = ("attention_rms", "ffn_rms", "attention_ratio", "ffn_ratio", "logit_max", "attention_entropy")  # at N
WEIGHTS = ("gain_min", "gain_mean", "gain_max", "update_ratio")  # at N
SCALARS = ("loss", "future_leak", "model_update")
COUNTED = tuple(key for key in SUMMARY if key not in ("name", "axes", "equation", "first_bad_parameter"))


class Unread(Exception):
    """What a record lacks, as the end of a sentence about its run."""


class Recorded(Protocol):
    """What is read of a run (`stability.records.Run`)."""

    @property
    def summary(self) -> dict[str, Any] | None: ...
    @property
    def layer_step(self) -> NDArray[np.int64]: ...
    @property
    def layers(self) -> dict[str, Array]: ...
    @property
    def probe_step(self) -> NDArray[np.int64]: ...
    @property
    def probe(self) -> Mapping[str, Array]: ...


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?`, or the known names where none is near."""
    known = list(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _one_of(*names: str, least: int = 0) -> AfterValidator:
    def known(value: int | str) -> int | str:
        if isinstance(value, str) and value not in names:
            raise ValueError(f"is not known; {nearest(value, names)}")
        if isinstance(value, int) and value < least:
            raise ValueError(f"is below {least}")
        return value

    return AfterValidator(known)


Matrix = Annotated[str, _one_of("block", *BLOCK_PARTS, *MATRICES)]
Key = Annotated[str, _one_of(*COUNTED)]
Name = Annotated[str, _one_of(*STREAM, *BRANCHES, *WEIGHTS, *SCALARS)]
Step = Annotated[int | str, _one_of("last", least=1)]
Line = Annotated[int | str, _one_of("last", "max", "min")]
Layer = Annotated[int | str, _one_of("first", "last", "first/last", "last/first", "max/min", "middle/first", least=1)]
Block = Annotated[int | str, _one_of("first", "last", "max", "min", least=1)]
Place = Annotated[int | str, _one_of("first", "last", "max", "min", "mean")]

# ------------------------------------------------------------------------------------------------------------ of one run


def gradient(run: Recorded, *, matrix: Matrix = "block", layer: Layer = "last", step: Step = 1) -> float:
    """The gradient norm of a matrix, a part of a block or the whole `block`, at a step that measured the layers.

    `layer`: a block, or a ratio of two; `middle` is block ceil(N/2); `max/min` is over the blocks. `step`: `last` is the
    run's last; a run that diverged has none.
    """
    if matrix not in run.layers:
        raise Unread(f"no gradient of {matrix!r} is recorded")
    at = _at(run, run.layer_step, step, "layers: log_every")
    return _pick(run.layers[matrix][at], layer, first=1)


def summary(run: Recorded, *, key: Key) -> float:
    """A number of `summary.json`. A run that diverged has no final and no best loss: what it came to is not the number
    that stands where it broke off."""
    return _number(run, key)


def verdict(run: Recorded) -> str:
    """The verdict, a word of `stability.verdict`."""
    return _verdict(run)


def below_entropy(run: Recorded) -> float:
    """unigram entropy - final loss, in nats: above 0 where more was learnt than how frequent each token is."""
    return _number(run, "unigram_entropy") - _number(run, "final_loss")


def loss_or_start(run: Recorded) -> float:
    """min(final loss, loss of the first step) in nats; the loss of the first step for a run that diverged.

    Source: Wortsman et al. 2023, arXiv 2309.14322: min(loss(A(lr)), loss at initialisation), so that how
    far a run went astray does not matter.
    """
    first = _number(run, "first_loss")
    return first if _verdict(run) == "diverged" else min(first, _number(run, "final_loss"))


def stable(run: Recorded) -> float:
    """1 where the verdict is stable or spiky, 0 where it is diverged or stalled."""
    found = _verdict(run)
    if found == "too_short":
        raise Unread("is too short to tell")
    if found not in SOUND | UNSOUND:
        raise Unread(f"is {found}")
    return float(found in SOUND)


def probe(run: Recorded, *, name: Name, layer: Place = "last", step: Line = "last") -> float:
    """What the probe batch measured: of a line, `layer` (a block; 0 after the embedding, which only the stream's names
    have and which is their `first`); then of the lines, `step`. A name without layers has no use for `layer`.

    `last` is the line of the run's last step; a run that diverged has none. `max` and `min` over the lines pass over those
    where the number is absent or not finite, and are of a run that diverged those of its lines up to there.
    """
    if name not in run.probe:
        raise Unread(f"no {name} on a probe line: probe_every")
    record = run.probe[name]
    if step in ("max", "min"):
        values = np.array([_of_line(line, name, layer) for line in record])
        values = values[np.isfinite(values)]
        if not values.size:
            raise Unread(f"{name} is finite on no probe line")
        return float(values.max() if step == "max" else values.min())
    return _of_line(record[_at(run, run.probe_step, step, "probe line: probe_every")], name, layer)


def gain_range(run: Recorded) -> float:
    """max over blocks of gain_max - min over blocks of gain_min, at the run's last step: how far apart the effective gains
    (1 + w for the zero-centred norm) of the blocks' norms lie."""
    return probe(run, name="gain_max", layer="max") - probe(run, name="gain_min", layer="min")


def mean_square(run: Recorded, *, layer: Block = "last", per_branch: bool = False) -> float:
    """mean(x_l^2) of the stream after block l before the first step, over blocks 1 to N; divided by 2N, the number of
    branches, if `per_branch`: 1 where each adds a vector of RMS 1 (Kim et al. 2025, arXiv 2502.02732, section 3)."""
    squares = _squares(run)
    return _pick(squares, layer, first=1) / (2 * len(squares) if per_branch else 1)


def mean_square_from_one(run: Recorded) -> float:
    """max over blocks of |mean(x_l^2) - 1| before the first step: 0 where a norm stands on the sum."""
    return float(np.abs(_squares(run) - 1).max())


def mean_square_bounds(run: Recorded, *, low: float, high: float) -> float:
    """The largest relative violation of 1 + low l <= mean(x_l^2) <= 1 + high l over blocks l = 1..N before the first step;
    0 where none is violated.

    Source: Xiong et al. 2020, arXiv 2002.04745, Lemma 2, for pre-norm: low = 1/2, high = 3/2.
    """
    squares = _squares(run)
    layer = np.arange(1, len(squares) + 1)
    least, most = 1 + low * layer, 1 + high * layer
    return float(np.maximum((least - squares) / least, (squares - most) / most).max().clip(min=0))


def ratio(over: float, under: float) -> float:
    """over / under; Unread where that is no number."""
    if under == 0:
        raise Unread("a division by 0")
    return over / under


def _verdict(run: Recorded) -> str:
    return str((run.summary or {}).get("verdict") or "unfinished")


def _number(run: Recorded, key: str) -> float:
    if key in OUTCOMES and _verdict(run) == "diverged":
        raise Unread("diverged")
    value = (run.summary or {}).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unread(f"summary.json has no {key}")
    return float(value)


def _at(run: Recorded, steps: NDArray[np.int64], step: int | str, what: str) -> int:
    """The row of a step. `last` is the run's last, not the last that is recorded: of a run that broke off at step 2 that
    may be the line before the first."""
    if step == "last":
        if _verdict(run) == "diverged":
            raise Unread("diverged")
        step = int(_number(run, "steps_done"))
    rows = np.flatnonzero(steps == step)
    if not rows.size:
        raise Unread(f"step {step} has no {what}")
    return int(rows[-1])


def _pick(values: Array, place: int | str, first: int) -> float:
    """One number of those over layers first, first + 1, ...; nan where one that it depends on is nan."""
    if not len(values):
        raise Unread("no layer is recorded")
    if isinstance(place, int):
        if not first <= place < first + len(values):
            raise Unread(f"layer {place} is none of {first} to {first + len(values) - 1}")
        return float(values[place - first])
    middle = float(values[(len(values) - 1) // 2])
    known = {"first": float(values[0]), "middle": middle, "last": float(values[-1]), "mean": float(values.mean())}
    known |= {"max": float(values.max()), "min": float(values.min())}
    over, _, under = place.partition("/")
    return ratio(known[over], known[under]) if under else known[over]


def _of_line(line: Any, name: str, layer: int | str) -> float:
    return float(line) if name in SCALARS else _pick(line, layer, first=0 if name in STREAM else 1)


def _squares(run: Recorded) -> Array:
    """mean(x_l^2) after blocks 1 to N at step 0."""
    if "stream_rms" not in run.probe:
        raise Unread("no stream_rms on a probe line: probe_every")
    squares: Array = np.square(run.probe["stream_rms"][_at(run, run.probe_step, 0, "probe line: probe_every")][1:])
    if not squares.size:
        raise Unread("no layer is recorded")
    return squares


_PROBED = (probe, gain_range, mean_square, mean_square_from_one, mean_square_bounds)
OBSERVABLES: dict[str, Callable[..., float | str]] = {
    f.__name__: f for f in (gradient, summary, verdict, below_entropy, loss_or_start, stable, *_PROBED)
}
