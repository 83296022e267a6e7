"""What the check refuses, and the number that it gives."""

import re

import pytest

import train
from model.compatibility import refusals
from tests.conftest import cells, plain


def refused(norm: str, placement: str, residual: str, depth: int) -> list[str]:
    names = {"norm": norm, "placement": placement, "residual": residual}
    built = train.choices_of(plain(*[f"{axis}={name}" for axis, name in names.items()]))
    return list(refusals(built, names, depth))


def test_the_growth_of_deepnorm_on_a_pre_norm_stream(oracle):
    for depth, log10 in oracle("oracle_pre_deepnorm_growth.json")["log10_growth"].items():
        (line,) = refused("rmsnorm", "pre", "deepnorm", int(depth))
        assert float(re.search(r"about 10\^([\d.]+) in all", line)[1]) == pytest.approx(log10, abs=0.051)
        assert "placement=pre" in line and "residual=deepnorm" in line and "recipe=deepnorm" in line


def test_which_cells_are_refused():
    for norm, placement, residual in cells():
        trap = norm == "batchnorm" or (residual == "deepnorm" and (placement != "post" or norm == "none"))
        assert bool(refused(norm, placement, residual, 12)) == trap, (norm, placement, residual)


def test_mix_counts_only_the_layers_without_a_sum_norm():
    (line,) = refused("rmsnorm", "mix", "deepnorm", 12)
    assert "at each of 18 branches" in line  # 9 of 12 layers are pre-norm


def test_a_learnt_skip_is_judged_by_where_it_starts():
    assert not refused("rmsnorm", "pre", "learned_scalars", 12)
    names = {"norm": "rmsnorm", "placement": "pre", "residual": "learned_scalars"}
    built = train.choices_of(plain("residual=learned_scalars", "residual.alpha=2.0"))
    assert len(list(refusals(built, names, 12))) == 1
