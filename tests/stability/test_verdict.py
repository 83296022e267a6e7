"""Each verdict on a hand-made history."""

import numpy as np
import pytest

from stability.verdict import Watch, judge, spikes, tail

ENTROPY = 3.15


def history(steps: int = 400, final: float = 2.0, noise: float = 0.02) -> np.ndarray:
    fall = 3.5 * np.exp(-np.arange(steps) / 20) + final
    return fall + noise * np.random.default_rng(0).standard_normal(steps)


def verdict(loss: np.ndarray, skipped: np.ndarray | None = None, **words) -> str:
    skipped = np.zeros(len(loss), bool) if skipped is None else skipped
    return judge(loss, skipped, steps=len(loss), unigram_entropy=ENTROPY, **words)[0]


def watch(loss: np.ndarray, steps: int | None = None) -> tuple[str | None, Watch, int]:
    seen = Watch(steps or len(loss))
    for step, value in enumerate(loss, start=1):
        if reason := seen.see(step, float(value), bool(np.isfinite(value))):
            return reason, seen, step
    return None, seen, len(loss)


def test_stable_and_stalled():
    assert verdict(history()) == "stable"
    assert verdict(history(final=3.15)) == "stalled"
    assert verdict(history(final=3.15 - 0.09)) == "stalled"
    assert verdict(history(final=3.15 - 0.11)) == "stable"


def test_a_stall_is_judged_on_the_mean_of_the_end_not_on_a_lucky_batch():
    loss = history(final=3.15)
    loss[-3] = 2.83
    assert verdict(loss) == "stalled"
    assert tail(np.arange(100.0), 1000) == 49.5
    assert tail(np.arange(100.0), 50) == 94.5


def test_too_short_and_a_known_floor():
    assert verdict(history(49)) == "too_short"
    assert verdict(history(final=3.15), floor=3.14) == "stable"  # nothing to learn beyond the frequencies
    assert verdict(history(final=3.15), floor=1.0) == "stalled"


def test_a_loss_on_its_way_is_neither_stalled_nor_stable():
    falling = np.linspace(6.0, 4.0, 100)
    assert verdict(falling) == "too_short"
    assert verdict(np.linspace(6.0, 5.2, 100)) == "stalled"  # 0.08 a tenth: that is no way to get there
    assert verdict(np.linspace(4.2, 3.2, 100)) == "stalled"  # within 0.1 of the entropy: it has got there


def test_spiky():
    loss = history()
    loss[300] += 1.0
    assert spikes(loss).nonzero()[0].tolist() == [300]
    assert verdict(loss) == "stable"  # one odd batch
    loss[350] += 1.0
    assert verdict(loss) == "spiky"
    skipped = np.zeros(400, bool)
    skipped[10] = True
    assert verdict(history(), skipped) == "spiky"


def test_spikes_equal_the_plain_loop():
    loss = np.random.default_rng(1).standard_t(2, 1500)
    loss[[5, 700]] = np.nan
    loss[100] = 1e7  # running sums would lose every digit after it
    loss[900] = 60.0
    plain = np.zeros(len(loss), bool)
    for i in range(len(loss)):
        before = loss[max(0, i - 150) : i]
        before = before[np.isfinite(before)]
        plain[i] = len(before) >= 30 and loss[i] > before.mean() + 7 * before.std()
    assert np.array_equal(spikes(loss), plain)
    assert plain.any()


def test_three_non_finite_steps_in_a_row_end_a_run():
    loss = history()
    loss[[50, 51, 60]] = np.nan
    assert watch(loss)[0] is None
    loss[[100, 101, 102]] = np.inf
    reason, seen, step = watch(loss)
    assert (step, seen.first_bad_step) == (103, 101)
    assert "not finite from step 101" in reason


def test_a_run_that_ends_on_a_non_finite_step_diverged():
    loss = history(60)
    loss[-1] = np.nan
    reason, seen, step = watch(loss)
    assert reason and (step, seen.first_bad_step) == (60, 60)


def test_a_sustained_loss_above_the_start_ends_a_run():
    loss = history()
    loss[100:139] = 9.0
    assert watch(loss)[0] is None
    loss[139] = 9.0
    reason, seen, step = watch(loss)
    assert (step, seen.first_bad_step) == (140, 101)
    assert "above its start" in reason


@pytest.mark.parametrize("steps, stretch", [(100, 20), (1000, 100)])
def test_how_long_a_loss_may_stay_above(steps: int, stretch: int):
    """20 steps, or a tenth of the run where that is more."""
    loss = np.full(steps, 9.0)
    loss[0] = 5.0
    reason, seen, step = watch(loss)
    assert reason and (step, seen.first_bad_step) == (stretch + 1, 2)


@pytest.mark.parametrize("above", [0.05, -0.05])
def test_noise_around_the_start_is_no_divergence(above: float):
    """A uniform text: the loss starts at ln V and stays there."""
    assert watch(np.full(400, 4.0) + above * (np.arange(400) > 0))[0] is None


def test_what_the_watch_said_is_the_verdict():
    verdict, reason = judge(history(), np.zeros(400, bool), steps=400, unigram_entropy=ENTROPY, diverged="because")
    assert (verdict, reason) == ("diverged", "because")
