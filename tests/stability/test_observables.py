"""What is read of a run and along an axis, on a hand-made run and with numbers worked out by hand."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stability.observables import OBSERVABLES, Unread
from stability.takes import NORMAL95, T95, TAKES


@dataclass
class Stub:
    """What is read of a run of 10 steps: layers at steps 1 and 10 of 3 blocks, the probe at steps 0, 5 and 10."""

    summary: dict[str, Any] | None = field(default_factory=lambda: {"verdict": "stable", "steps_done": 10})
    layer_step: np.ndarray = field(default_factory=lambda: np.array([1, 10]))
    layers: dict[str, np.ndarray] = field(
        default_factory=lambda: {"block": np.array([[4.0, 2, 1], [9, 3, 6]]), "q": np.array([[0.0, 1, 2], [1, 1, 1]])}
    )
    probe_step: np.ndarray = field(default_factory=lambda: np.array([0, 5, 10]))
    probe: dict[str, np.ndarray] = field(
        default_factory=lambda: {
            "stream_rms": np.sqrt([[1.0, 2, 4, 3], [1, 1, 1, 1], [1, 2, 3, 5]]),
            "logit_max": np.array([[1.0, 5, 3], [2, 9, 4], [math.nan] * 3]),
            "model_update": np.array([math.nan, 0.5, 0.25]),
            "gain_min": np.array([[1.0, 1, 1], [0.7, 0.5, 1], [0.75, 0.9, 1]]),
            "gain_max": np.array([[1.0, 1, 1], [1, 2, 3], [1, 1.5, 1.25]]),
        }
    )


def run(loss: float | None = 2.0, verdict: str = "stable", first: float = 5.0) -> Stub:
    losses = dict.fromkeys(("final_loss", "final_val_loss", "best_loss", "best_val_loss"), loss)
    return Stub({"verdict": verdict, **losses, "first_loss": first, "unigram_entropy": 3.0, "steps_done": 10})


@pytest.mark.parametrize(
    "observe, knobs, value",
    [
        ("gradient", {}, 1),
        ("gradient", {"layer": "first/last", "step": "last"}, 1.5),
        ("gradient", {"layer": "last/first"}, 0.25),
        ("gradient", {"layer": "max/min", "step": 10}, 3),
        ("gradient", {"layer": "middle/first"}, 0.5),
        ("gradient", {"layer": 1}, 4),
        ("gradient", {"matrix": "q", "layer": 3}, 2),
        ("probe", {"name": "stream_rms", "layer": 0}, 1),
        ("probe", {"name": "stream_rms"}, math.sqrt(5)),
        ("probe", {"name": "logit_max", "layer": 1, "step": 0}, 1),  # a block is a block in either kind of array
        ("probe", {"name": "logit_max", "layer": "mean", "step": 5}, 5),
        ("probe", {"name": "logit_max", "layer": "max", "step": "max"}, 9),
        ("probe", {"name": "logit_max", "layer": "min", "step": "min"}, 1),
        ("probe", {"name": "model_update"}, 0.25),
        ("probe", {"name": "model_update", "step": "max"}, 0.5),
        ("gain_range", {}, 0.75),  # 1.5 of block 2 - 0.75 of block 1, at step 10
        ("mean_square", {}, 3),
        ("mean_square", {"layer": "max"}, 4),
        ("mean_square", {"layer": 1, "per_branch": True}, 2 / 6),
        ("mean_square_from_one", {}, 3),
        ("mean_square_bounds", {"low": 0.5, "high": 1.5}, 0),  # [1.5, 2.5], [2, 4], [2.5, 5.5] hold 2, 4, 3
        ("mean_square_bounds", {"low": 0.0, "high": 2.0}, 0),  # with room to spare
        ("mean_square_bounds", {"low": 1.0, "high": 1.5}, 0.25),  # 3 against 4
        ("mean_square_bounds", {"low": 0.0, "high": 0.25}, 4 / 1.5 - 1),
        ("mean_square_bounds", {"low": 0.0, "high": 1.0}, 1 / 3),  # 4 against 3
    ],
)
def test_an_observable_of_a_run(observe: str, knobs: dict[str, Any], value: float):
    assert OBSERVABLES[observe](Stub(), **knobs) == pytest.approx(value)


@pytest.mark.parametrize(
    "observe, knobs, said",
    [
        ("gradient", {"step": 3}, "step 3 has no layers: log_every"),
        ("gradient", {"layer": 4}, "layer 4 is none of 1 to 3"),
        ("gradient", {"matrix": "gate"}, "no gradient of 'gate' is recorded"),
        ("gradient", {"matrix": "q", "layer": "last/first"}, "a division by 0"),
        ("probe", {"name": "ffn_rms"}, "no ffn_rms on a probe line: probe_every"),
        ("probe", {"name": "logit_max", "layer": 0, "step": 0}, "layer 0 is none of 1 to 3"),
        ("probe", {"name": "stream_rms", "step": 7}, "step 7 has no probe line: probe_every"),
        ("summary", {"key": "final_loss"}, "summary.json has no final_loss"),
    ],
)
def test_what_a_record_lacks_is_said(observe: str, knobs: dict[str, Any], said: str):
    with pytest.raises(Unread, match=f"^{said}$"):
        OBSERVABLES[observe](Stub(), **knobs)


def test_the_numbers_of_a_summary():
    assert OBSERVABLES["summary"](run(2.0), key="final_loss") == 2
    assert OBSERVABLES["below_entropy"](run(2.0)) == 1
    assert OBSERVABLES["loss_or_start"](run(2.0)) == 2 and OBSERVABLES["loss_or_start"](run(6.0)) == 5
    assert OBSERVABLES["loss_or_start"](run(2.0, "diverged")) == 5
    assert OBSERVABLES["verdict"](run(verdict="stalled")) == "stalled"
    told = {
        verdict: OBSERVABLES["stable"](run(verdict=verdict)) for verdict in ("stable", "spiky", "diverged", "stalled")
    }
    assert told == {"stable": 1, "spiky": 1, "diverged": 0, "stalled": 0}
    with pytest.raises(Unread, match=r"^is too short to tell$"):
        OBSERVABLES["stable"](run(verdict="too_short"))


@pytest.mark.parametrize(
    "observe, knobs",
    [("below_entropy", {})]
    + [("summary", {"key": key}) for key in ("final_loss", "final_val_loss", "best_loss", "best_val_loss")],
)
def test_what_a_diverged_run_came_to_is_no_number(observe: str, knobs: dict[str, Any]):
    OBSERVABLES[observe](run(), **knobs)
    with pytest.raises(Unread, match=r"^diverged$"):
        OBSERVABLES[observe](run(verdict="diverged"), **knobs)
    assert OBSERVABLES["summary"](run(verdict="diverged"), key="first_loss") == 5  # it had one


@pytest.mark.parametrize(
    "observe, knobs, said",
    [
        ("probe", {"name": "logit_max", "step": "last"}, "probe line: probe_every"),
        ("gain_range", {}, "probe line: probe_every"),
        ("gradient", {"step": "last"}, "layers: log_every"),
    ],
)
def test_the_last_step_is_that_of_the_run(observe: str, knobs: dict[str, Any], said: str):
    """Not the last that happens to be recorded: a run that broke off at step 2 has the line of step 0."""
    OBSERVABLES[observe](run(), **knobs)
    with pytest.raises(Unread, match=r"^diverged$"):
        OBSERVABLES[observe](run(verdict="diverged"), **knobs)
    with pytest.raises(Unread, match=f"^step 12 has no {said}$"):
        OBSERVABLES[observe](Stub({"verdict": "stable", "steps_done": 12}), **knobs)
    with pytest.raises(Unread, match=r"^summary.json has no steps_done$"):
        OBSERVABLES[observe](Stub({"verdict": "stable"}), **knobs)


def test_a_step_that_a_diverged_run_took_is_a_step():
    assert OBSERVABLES["gradient"](run(verdict="diverged"), layer=1) == 4
    assert OBSERVABLES["probe"](run(verdict="diverged"), name="logit_max", layer=1, step=0) == 1


@pytest.mark.parametrize(
    "take, y, value",
    [
        ("exponent", [8, 4, 2], -1),  # 8 / x
        ("max/min", [2, 8, 4], 4),
        ("last/first", [2, 8, 4], 2),
        ("mean_above_least", [2, 6, 4], 2),
        ("largest", [1, 0, 1], 4),
        ("largest", [1, 1, 0], 2),
        ("largest", [0, 0, 0], 0),
        ("best", [3, 1, 2], 2),
        ("spread", [2, 8, 4], 6),
        ("mean", [2, 8, 5], 5),
        ("significance", [1, 2, 3], 2 * math.sqrt(3) / 4.303),  # mean 2, std 1, three of them
        ("significance", [-1, -2, -3], 2 * math.sqrt(3) / 4.303),
        ("significance", [0, 0, 0], 0),
    ],
)
def test_a_take_along_1_2_4(take: str, y: list[float], value: float):
    assert TAKES[take]([1, 2, 4], np.array(y, float)) == pytest.approx(value)


def test_an_exponent_of_0_is_unread():
    with pytest.raises(Unread, match="above 0"):
        TAKES["exponent"]([1, 2], np.array([0.0, 1]))


def test_the_bound_of_significance_goes_with_the_number_of_seeds():
    """-1 and 1 in turn, about 0.5: t = 0.5 sqrt(n) / std."""
    for n, bound in ((2, 12.706), (4, 3.182), (30, 2.045), (32, 1.960), (100, 1.960)):
        y = 0.5 + np.resize([-1.0, 1.0], n)
        t = 0.5 * math.sqrt(n) / math.sqrt(n / (n - 1))
        assert TAKES["significance"](range(n), y) == pytest.approx(t / bound)


def test_the_quantiles_hold_95_percent():
    """Of the density of Student's t, gamma((v+1)/2) / (sqrt(v pi) gamma(v/2)) (1 + t^2/v)^(-(v+1)/2), by trapezes; of the
    normal distribution, by its error function."""
    assert len(T95) == 30
    for v, quantile in enumerate(T95, start=1):
        x = np.linspace(0, quantile, 20_001)
        scale = math.exp(math.lgamma((v + 1) / 2) - math.lgamma(v / 2)) / math.sqrt(v * math.pi)
        assert 2 * scale * np.trapezoid((1 + x**2 / v) ** (-(v + 1) / 2), x) == pytest.approx(0.95, abs=1e-4)
    assert math.erf(NORMAL95 / math.sqrt(2)) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("y", [[0.5, 0.5], [0.1] * 3])  # the mean of three 0.1 is not 0.1: their std is not 0
def test_a_difference_that_no_seed_changes_has_no_significance(y: list[float]):
    with pytest.raises(Unread, match=r"^is the same at every value: no spread to judge it by$"):
        TAKES["significance"](range(len(y)), np.array(y))
