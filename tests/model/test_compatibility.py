"""What the check refuses, and the number that it gives."""

import re

import pytest
import torch

import train
from model.compatibility import refusals
from model.sizes import Sizes
from tests.conftest import cells, is_trap, network, plain


def refused(norm: str, placement: str, residual: str, depth: int) -> list[str]:
    return check(
        {"norm": norm, "placement": placement, "residual": residual},
        depth,
        qk_norm="none" if norm == "none" else "full",
    )


def check(names: dict[str, str], depth: int, *words: str, qk_norm: str = "full") -> list[str]:
    built = train.choices_of(plain(*[f"{axis}={name}" for axis, name in names.items()], *words))
    return list(refusals(built, {"init": "xavier"} | names, Sizes(depth, 64, 4, 8, qk_norm=qk_norm)))


@pytest.mark.case("P04 own arithmetic, after P03")
def test_the_growth_of_deepnorm_on_a_pre_norm_stream(oracle):
    for depth, log10 in oracle("oracle_pre_deepnorm_growth.json")["log10_growth"].items():
        (line,) = refused("rmsnorm", "pre", "deepnorm", int(depth))
        assert float(re.search(r"about 10\^([\d.]+) in all", line)[1]) == pytest.approx(log10, abs=0.051)
        assert "placement=pre" in line and "residual=deepnorm" in line and "recipe=deepnorm" in line


@pytest.mark.case("P04")
@pytest.mark.parametrize("depth", [4, 12, 24])
def test_the_number_of_a_refusal_is_what_the_network_does(depth: int):
    """alpha^(2 depth) alone would carry the embedding; what the branches add, of order 1 beside it, moves it by less than a
    factor of 3."""
    model = network("residual=deepnorm", f"model.depth={depth}", "model.dim=64")
    x = embedding = model.embed(torch.arange(8)[None])
    for block in model.blocks:
        x = block(x)
    growth = (x.double().norm() / embedding.double().norm()).log10().item()
    (line,) = refused("rmsnorm", "pre", "deepnorm", depth)
    assert float(re.search(r"about 10\^([\d.]+) in all", line)[1]) == pytest.approx(growth, abs=0.5)


@pytest.mark.case("P03", "P04")
def test_which_cells_are_refused():
    for norm, placement, residual in cells():
        trap = is_trap(norm, placement, residual)
        assert bool(refused(norm, placement, residual, 12)) == trap, (norm, placement, residual)


def test_mix_counts_only_the_layers_without_a_sum_norm():
    (line,) = refused("rmsnorm", "mix", "deepnorm", 12)
    assert "at each of 18 branches" in line  # 9 of 12 layers are pre-norm
    (line,) = refused("rmsnorm", "mix", "standard", 3)
    assert "placement=mix with model.depth=3 has no early layer" in line and "model.depth=4" in line
    assert not refused("rmsnorm", "mix", "standard", 4)


def test_a_learnt_skip_is_judged_by_where_it_starts():
    assert not refused("rmsnorm", "pre", "learned_scalars", 12)
    assert (
        len(check({"residual": "learned_scalars", "placement": "pre", "norm": "rmsnorm"}, 12, "residual.alpha=2.0"))
        == 1
    )


def test_the_reordered_norm_needs_qk_norm_where_it_is_deep():
    (line,) = check({"placement": "out", "norm": "rmsnorm"}, 48, qk_norm="none")
    assert "placement=out" in line and "model.qk_norm=full" in line and "10^4 times" in line
    assert not check({"placement": "out"}, 48, qk_norm="head")
    assert not check({"placement": "out"}, 12, qk_norm="none")
    assert not check({"placement": "sandwich"}, 48, qk_norm="none")
    assert not check({"placement": "out", "init": "normal"}, 48, qk_norm="none")  # 0.02 is 0.16 / sqrt(64)


def test_deepnorm_is_judged_by_its_alpha():
    names = {"norm": "rmsnorm", "placement": "pre", "residual": "deepnorm"}
    assert check(names, 12, "residual.alpha=1") == []
    (line,) = check(names, 12, "residual.alpha=2")
    assert "alpha = 2 at each of 24 branches" in line and "10^7.2 in all" in line  # 24 log10(2)


@pytest.mark.parametrize(
    "names",
    [
        {"residual": "rezero"},
        {"residual": "layerscale"},
        {"residual": "ds_init"},
        {"scaling": "completep"},
        {"attention": "ngpt"},
        {"stream": "attention_residuals"},
        {"linear": "sigma_reparam"},
        {"norm": "dyt"},
        {"norm": "none", "residual": "rezero"},
        {"ramp": "prores"},
    ],
)
def test_what_makes_branches_small_or_bounds_scores_is_let_through(names: dict[str, str]):
    """Measured at depth 24 and width 64, block 1 over block 24: 223 without, 24 at most with any of these."""
    assert not check({"placement": "out", "norm": "rmsnorm"} | names, 48, qk_norm="none")


def test_bare_layers_are_counted_wherever_they_are():
    (line,) = check({"placement": "by_layer"}, 48, "placement.layers=[out,pre]", qk_norm="none")
    assert "10^2 times" in line


@pytest.mark.parametrize("residual", ["gpt2", "deepnorm", "lns", "ds_init", "olmo", "admin"])
def test_depth_is_followed_once(residual: str):
    placement = "post" if residual in ("deepnorm", "admin") else "pre"
    lines = check({"placement": placement, "residual": residual, "scaling": "completep"}, 12)
    assert len(lines) == 1 and "both follow the depth" in lines[0]
    assert not check({"placement": placement, "residual": residual, "scaling": "mup"}, 12)


def test_a_scaling_needs_rules_for_all_that_is_learnt():
    (line,) = check({"scaling": "mup", "stream": "hyper"}, 12)
    assert "stream=hyper: no paper says" in line
    (line,) = check({"scaling": "mup", "linear": "unit", "norm": "rmsnorm"}, 12)
    assert "linear=unit undoes" in line
