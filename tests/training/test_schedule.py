"""lr(s) against the published rows and the properties that any warm-up and decay must have."""

import csv
import io

import pytest

from training.schedule import WSD, Constant, Cosine, Linear


@pytest.mark.case("R05", "T01", "T03")
def test_published_rows(oracle):
    """Row r (counted from 0) is step r + 1; the file has 12 significant digits."""
    schedule = Cosine(warmup=10, min_ratio=0.1)
    for row in csv.DictReader(io.StringIO(oracle("oracle_lr_schedule.csv"))):
        got = 1e-3 * schedule.factor(int(row["step"]) + 1, 100)
        assert got == pytest.approx(float(row["lr_reference"]), rel=1e-11), row


@pytest.mark.case("T01")
@pytest.mark.parametrize("kind", [Cosine, Linear, WSD, Constant])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 10.0])
def test_properties(kind, warmup: float):
    schedule = kind(warmup=warmup)
    warm = schedule.warmup_steps(100)
    assert warm == (0 if warmup == 0 else 10)
    factors = [schedule.factor(step, 100) for step in range(1, 140)]
    assert factors[0] > 0
    assert factors[warm] == 1.0
    assert factors[: warm + 1] == sorted(factors[: warm + 1])
    assert factors[warm:] == sorted(factors[warm:], reverse=True)
    end = 1.0 if kind is Constant else 0.1
    assert all(factor == pytest.approx(end) for factor in factors[100:])


def test_shapes_at_the_middle():
    assert Cosine(warmup=0, min_ratio=0).factor(51, 100) == pytest.approx(0.5)
    assert Linear(warmup=0, min_ratio=0).factor(26, 100) == pytest.approx(0.75)
    wsd = WSD(warmup=0, min_ratio=0, decay=0.2)
    assert [wsd.factor(step, 100) for step in (1, 81)] == [1.0, 1.0]
    assert wsd.factor(91, 100) == pytest.approx(0.5)


def test_a_warmup_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"schedule\.warmup=20 is 20 steps and leaves none of steps=10"):
        Cosine(warmup=20).warmup_steps(10)
    assert Constant(warmup=0.1).warmup_steps(1) == 0  # a single step runs
