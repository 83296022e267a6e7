"""What is read of a run and along an axis, on a hand-made run and with numbers worked out by hand."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stability.observables import OBSERVABLES, TAKES, Unread


@dataclass
class Stub:
    """What is read of a run: layers at steps 1 and 5 of 3 blocks, the probe at steps 0 and 5."""

    summary: dict[str, Any] | None = field(default_factory=lambda: {"verdict": "stable"})
    layer_step: np.ndarray = field(default_factory=lambda: np.array([1, 5]))
    layers: dict[str, np.ndarray] = field(
        default_factory=lambda: {"block": np.array([[4.0, 2, 1], [9, 3, 6]]), "q": np.array([[0.0, 1, 2], [1, 1, 1]])}
    )
    probe_step: np.ndarray = field(default_factory=lambda: np.array([0, 5, 10]))
    probe: dict[str, np.ndarray] = field(
        default_factory=lambda: {
            "stream_rms": np.sqrt([[1.0, 2, 4, 3], [1, 1, 1, 1], [1, 2, 3, 5]]),
            "logit_max": np.array([[1.0, 5, 3], [2, 9, 4], [math.nan] * 3]),
            "model_update": np.array([math.nan, 0.5, 0.25]),
        }
    )


def run(loss: float | None = 2.0, verdict: str = "stable", first: float = 5.0) -> Stub:
    return Stub({"verdict": verdict, "final_loss": loss, "first_loss": first, "unigram_entropy": 3.0})


@pytest.mark.parametrize(
    "observe, knobs, value",
    [
        ("gradient", {}, 1),
        ("gradient", {"layer": "first/last", "step": "last"}, 1.5),
        ("gradient", {"layer": "last/first"}, 0.25),
        ("gradient", {"layer": "max/min", "step": 5}, 3),
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
        ("probe", {"name": "logit_max", "layer": 0}, "layer 0 is none of 1 to 3"),
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
    assert OBSERVABLES["loss_or_start"](run(None, "diverged")) == 5
    assert OBSERVABLES["verdict"](run(verdict="stalled")) == "stalled"
    sound = {verdict: OBSERVABLES["stable"](run(verdict=verdict)) for verdict in ("stable", "spiky", "too_short")}
    assert sound == {"stable": 1, "spiky": 1, "too_short": 1}
    assert OBSERVABLES["stable"](run(verdict="diverged")) == OBSERVABLES["stable"](run(verdict="stalled")) == 0


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
        ("t", [1, 2, 3], 2 * math.sqrt(3)),  # mean 2, std 1
        ("t", [-1, -2, -3], 2 * math.sqrt(3)),
    ],
)
def test_a_take_along_1_2_4(take: str, y: list[float], value: float):
    assert TAKES[take]([1, 2, 4], np.array(y, float)) == pytest.approx(value)


def test_an_exponent_of_0_is_unread():
    with pytest.raises(Unread, match="above 0"):
        TAKES["exponent"]([1, 2], np.array([0.0, 1]))
