"""The papers' formulas at their own numbers, and which of them are taken to hold for a configuration."""

from math import pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from model.sizes import Sizes
from stability.theory import (
    Join,
    Prediction,
    branch_norm_mean_square,
    ffn_mean_square,
    mean_square,
    post_norm_gradient,
    pre_norm_mean_square,
    predict,
    update_bound,
)
from tests.conftest import SMALL, plain

LAYER = np.arange(0.0, 13.0)


def predicted(*words: str) -> Prediction:
    settings: dict[str, Any] = plain(*SMALL, "model.depth=12", *words)
    sizes = {key: value for key, value in settings["model"].items() if not key.startswith("_")}
    return predict(train.choices_of(settings), Sizes(**sizes))


def test_deepnet_s_bound_is_one_at_its_constants_and_4n_for_post_norm():
    for depth in (1, 12, 1000):
        branches = np.ones(2 * depth)
        alpha, beta = (2 * depth) ** 0.25 * branches, (8 * depth) ** -0.25 * branches
        assert update_bound(alpha, beta, beta) == pytest.approx(1, rel=1e-12)
        assert update_bound(branches, branches, branches) == 4 * depth
    # two branches by hand: (1 + 4) / 4 + (9 + 16) / 25
    assert update_bound(np.array([2.0, 5]), np.array([1.0, 3]), np.array([2.0, 4])) == 2.25


def test_post_norm_gradient_falls_by_two_thirds_in_two_layers():
    assert post_norm_gradient(np.array([1.0, 3, 5]), 5) == pytest.approx([4 / 9, 2 / 3, 1])


def test_the_recursion_gives_lemma_2_and_peri_ln():
    """Attention adds from 0 to 1, the ReLU feed-forward 1/2."""
    lemma = mean_square(1.0, [Join(1, 0, 1), Join(1, 0.5, 0.5)] * 12)
    for bound, expected in zip(lemma, pre_norm_mean_square(LAYER), strict=True):
        assert bound[::2] == pytest.approx(expected)
    low, high = mean_square(1.0, [Join(1, 1, 1)] * 24)
    assert low[::2] == pytest.approx(branch_norm_mean_square(LAYER)) and (low == high).all()
    low, high = mean_square(3.0, [Join(2, 0, 1), Join(1, 0, 0, norm_sum=True), Join(2, 0, 1)])
    assert (low.tolist(), high.tolist()) == ([3, 12, 1, 4], [3, 13, 1, 5])


def test_what_a_feed_forward_adds():
    """ReLU: half of z^2, so that the width ratio 4 with Xavier's std gives 8/5 * 2/5 / 2 = 0.32. GELU against a mean over
    a fine grid: its steps of 1.2e-4 leave nothing at 1e-6."""
    assert ffn_mean_square(F.relu, 1, 1) == pytest.approx(0.5)
    assert ffn_mean_square(F.relu, 2 / 5, 8 / 5) == pytest.approx(0.32)
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / sqrt(2 * pi)
    for variance in (0.4, 1.0, 9.0):
        expected = (F.gelu(z * sqrt(variance)) ** 2 * density).sum().item() * (z[1] - z[0]).item()
        assert ffn_mean_square(F.gelu, variance, 2.0) == pytest.approx(2 * expected, rel=1e-6)


def test_the_paper_s_own_network_has_the_paper_s_bounds():
    found = predicted("placement=pre", "ffn.activation=relu", "ffn.ratio=1.0")
    assert found.stream is not None
    assert found.stream[0] == pytest.approx(pre_norm_mean_square(LAYER)[0])
    assert found.stream[1] == pytest.approx(pre_norm_mean_square(LAYER)[1])
    assert found.stream_source == "Xiong et al. 2020, Lemma 2" and found.exponent == -0.5
    assert found.gradient == pytest.approx(np.ones(12)) and found.update is None


def test_post_norm_deepnorm_and_peri():
    post, deepnorm, peri = predicted("placement=post"), predicted("recipe=deepnorm"), predicted("placement=peri")
    assert post.stream is not None and deepnorm.stream is not None and peri.stream is not None
    assert (np.stack(post.stream) == 1).all() and (np.stack(deepnorm.stream) == 1).all()
    assert post.update == pytest.approx(48) and deepnorm.update == pytest.approx(1)
    assert post.gradient == pytest.approx(post_norm_gradient(LAYER[1:], 12)) and post.exponent == 0
    assert deepnorm.gradient is None and deepnorm.exponent is None  # the paper's result is for alpha = 1
    assert peri.stream[0] == pytest.approx(branch_norm_mean_square(LAYER)) and peri.update is None


def test_coefficients_and_gains_enter():
    """GPT-2's o and down are (2N)^(-1/2) times as large; Mix-LN is post-norm first; learnt coefficients count as they
    stand; N(0, 0.02) starts from 0.0004."""
    plain_pre, gpt2 = predicted("placement=pre"), predicted("residual=gpt2")
    assert plain_pre.stream is not None and gpt2.stream is not None
    for bound, base in zip(gpt2.stream, plain_pre.stream, strict=True):
        assert bound - 1 == pytest.approx((base - 1) / 24)
    mix = predicted("placement=mix").stream
    assert mix is not None and mix[1][3] == 1 and mix[1][4] == pytest.approx(plain_pre.stream[1][1])
    scaled = predicted("placement=out", "residual=learned_scalars", "residual.beta=0.5", "model.qk_norm=full").stream
    assert scaled is not None and scaled[0] == pytest.approx(1 + LAYER / 2)
    normal = predicted("init=normal", "position=learned").stream
    assert normal is not None and normal[0][0] == pytest.approx(2 * 0.02**2)


@pytest.mark.parametrize("words", [
    ["norm=none"], ["norm=batchnorm"], ["norm=partial_rmsnorm"], ["ffn=swiglu"], ["model.dropout=0.1"],
])  # fmt: skip
def test_nothing_is_predicted_beyond_the_assumptions(words: list[str]):
    found = predicted("placement=pre", *words)
    assert found.stream is None and found.stream_source == ""


@pytest.mark.parametrize("words", [["placement=pre"], ["placement=peri"], ["placement=mix"], ["residual=gpt2"]])
def test_the_bounds_hold_for_the_network_itself(words: list[str]):
    """The mean over 20 draws of the matrices of a network of 12 layers and width 64. The expected mean square is within
    the bounds; the standard error of the mean over draws, measured with them, leaves four of its size as room."""
    from stability.trace import trace
    from tests.conftest import network

    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    sizes = ["model.depth=12", "model.dim=64", "model.heads=4", "model.context=16"]
    found = predicted(*sizes, *words)
    assert found.stream is not None
    draws = [network(*sizes, *words, f"seed={seed}", vocab=64) for seed in range(20)]
    squares = np.array([trace(model, [tokens]).stream_rms ** 2 for model in draws])
    error = squares.std(0, ddof=1) / sqrt(20)
    low, high = found.stream
    assert (squares.mean(0) >= low - 4 * error - 1e-5).all()
    assert (squares.mean(0) <= high + 4 * error + 1e-5).all()


def test_the_ablations_of_deepnorm_s_constants():
    """At N = 12 and square matrices: 2N (1 + 1) / alpha^2 for alpha alone, 2N 2 beta^2 for beta alone."""
    words = ["placement=post", "residual=deepnorm"]
    assert predicted(*words).update == pytest.approx(1)
    assert predicted(*words, "residual.beta=1").update == pytest.approx(48 / sqrt(24))
    assert predicted(*words, "residual.alpha=1").update == pytest.approx(48 / sqrt(96))


def test_centring_takes_its_share_of_the_predicted_stream():
    for words in (["position=rotary"], ["position=learned"]):
        whole, centred = predicted(*words), predicted(*words, "init.centred=true")
        assert whole.stream and centred.stream
        for a, b in zip(whole.stream, centred.stream, strict=True):
            assert b == pytest.approx(a * 15 / 16)
