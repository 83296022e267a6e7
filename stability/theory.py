"""What papers predict of a network at its initialisation, as pure functions, and which of it holds for a configuration.

A prediction is about expectations over the initial matrices; l counts blocks from 1 to N. Where a paper's assumptions do
not hold for a configuration nothing is predicted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from model.attention import Attention
from model.coefficient import number
from model.ffn import MLP
from model.init import Xavier
from model.linear import Linear
from model.position import NoPosition
from model.residual import Residual
from model.site import Branch, Site
from model.sizes import Sizes
from model.stream import Single
from model.transformer import Choices, residual_at, setting
from stability.records import Array

XIONG, PERI_LN, DEEPNET = "Xiong et al. 2020", "Kim et al. 2025", "Wang et al. 2022"
BRANCHES: tuple[Branch, ...] = ("attention", "ffn")

# ------------------------------------------------------------------------------------------------------ the papers' formulas


def pre_norm_mean_square(layer: Array) -> tuple[Array, Array]:
    """(1 + l/2, 1 + 3l/2): bounds on E mean(x_l^2) after block l of a pre-norm network whose embedding has RMS 1.

    For Xavier matrices and a ReLU feed-forward as wide as the stream, which adds 1/2; attention adds from 0 (an even mean
    of many unlike tokens) to 1 (of equal ones). Source: Xiong et al. 2020, arXiv 2002.04745, Lemma 2.
    """
    return 1 + layer / 2, 1 + 3 * layer / 2


def branch_norm_mean_square(layer: Array) -> Array:
    """1 + 2l: E mean(x_l^2) after block l where each of its two branches adds a vector that a norm has brought to RMS 1.

    The linear growth of Kim et al. 2025 (Peri-LN), arXiv 2502.02732, section 3, with both branches' variance at 1.
    """
    return 1 + 2 * layer


def post_norm_gradient(layer: Array, depth: int) -> Array:
    """(2/3)^((N - l)/2): the gradient of block l against that of block N in a post-norm network, as an upper bound.

    Source: Xiong et al. 2020, arXiv 2002.04745, the paragraph that extends Theorem 1 to the other layers: each block's norm
    divides by sqrt(3/2), the RMS that Lemma 2 gives to the sum before it.
    """
    return np.asarray((2 / 3) ** ((depth - layer) / 2))


POST_NORM_EXPONENT, PRE_NORM_EXPONENT = 0.0, -0.5
"""The gradient of the last feed-forward's second matrix goes as N to this power: O(d sqrt(ln d)) for post-norm and
O(d sqrt(ln d / N)) for pre-norm. Source: Xiong et al. 2020, arXiv 2002.04745, Theorem 1."""


def update_bound(alpha: Array, v: Array, w: Array) -> float:
    """sum_{i=1}^{2N} (v_i^2 + w_i^2) / alpha_i^2: how far one step of SGD moves the network's output, in units of the
    learning rate and to a factor that does not depend on the depth, when x <- N(alpha x + F(x)) with gains v (value
    projection, first matrix of the feed-forward) and w (output projection, second matrix).

    Source: Wang et al. 2022 (DeepNet), arXiv 2203.00555, Theorem 4.2, ||dF|| <= sum_i sqrt(v_i^2 + w_i^2) / alpha_i
    ||theta*_i - theta_i||, where a step of SGD is bounded by the gradient, ||theta*_i - theta_i|| <= eta
    O(sqrt(v_i^2 + w_i^2) / alpha_i). It is 1 for alpha = (2N)^(1/4), v = w = (8N)^(-1/4), and 4N for post-norm.
    """
    return float(((v**2 + w**2) / alpha**2).sum())


# --------------------------------------------------------------------------------------------- the same for any configuration


@dataclass(frozen=True)
class Join:
    """What one branch does to m = E mean(x^2): m <- alpha^2 m + [low, high], or m <- 1 where a norm stands on the sum."""

    alpha: float
    low: float
    high: float
    norm_sum: bool = False


def mean_square(start: float, joins: Sequence[Join]) -> tuple[Array, Array]:
    """(Lowest, highest) m at the start and after each join, as in the proof of Xiong et al.'s Lemma 2: the expectation of
    x . F(x) over a last matrix that is symmetric about 0 is 0, so that mean squares add up."""
    bounds = [(start, start)]
    for join in joins:
        low, high = (join.alpha**2 * bound for bound in bounds[-1])
        bounds.append((1.0, 1.0) if join.norm_sum else (low + join.low, high + join.high))
    return np.array([low for low, _ in bounds]), np.array([high for _, high in bounds])


def ffn_mean_square(activation: Callable[[Tensor], Tensor], up: float, down: float) -> float:
    """down E[act(z)^2], z ~ N(0, up): what W_down act(W_up u) adds, where up = dim std_up^2 mean(u^2) and down = hidden
    std_down^2. 1/2 for the ReLU of Lemma 2 (up = down = 1). Gauss-Hermite quadrature of 100 points."""
    node, weight = np.polynomial.hermite_e.hermegauss(100)
    value = activation(torch.from_numpy(node * sqrt(up))).numpy()
    return down * float((weight * value**2).sum() / weight.sum())


@dataclass(frozen=True, eq=False)
class Prediction:
    """What is known of a configuration; None where nothing is, with `stream_source` naming where it comes from.

    stream: lowest and highest expected mean square of the stream at N + 1 places. gradient: of the blocks, relative to
    the last. exponent: of the last block's gradient in the depth. update: `update_bound`.
    """

    stream: tuple[Array, Array] | None = None
    stream_source: str = ""
    gradient: Array | None = None
    exponent: float | None = None
    update: float | None = None


def predict(choices: Choices, sizes: Sizes) -> Prediction:
    """Judged by what a configuration does (places, coefficients, stds), not by its names."""
    sites = [Site(branch, layer, sizes.depth) for layer in range(1, sizes.depth + 1) for branch in BRANCHES]
    places = [choices.placement.at(site) for site in sites]
    residuals = [residual_at(choices, sizes.dim, site) for site in sites]
    whole = _plain_stream(choices, places, sites[0]) and not residuals[0].profiled
    if not (whole and _brings_to_one(choices.norm(sizes.dim), sizes.dim)):
        return Prediction()
    stream = source = None
    if joins := _joins(choices, sizes, sites, residuals):
        position = choices.position(sizes.dim, sizes.head_dim, sizes.context)
        terms = 1 + position.terms
        rms = choices.init.embedding(terms) * residuals[0].gains.get("embedding", 1.0)
        entering = terms * rms**2 * _kept(choices, sizes)
        start = 1.0 if "embed" in choices.placement.ends else entering
        low, high = mean_square(start, joins)
        stream, source = (low[::2], high[::2]), _source(places)

    layer = np.arange(1.0, sizes.depth + 1)
    alpha, v, w = _gains(choices, sizes, residuals)
    fixed = all(isinstance(part, float) for r in residuals for part in (r.alpha, r.beta)) and all(
        r.s == 1 for r in residuals
    )
    plain = fixed and isinstance(choices.init, Xavier) and (alpha == 1).all() and (v == 1).all() and (w == 1).all()
    post, pre = all(p == {"sum"} for p in places), all(p == {"in"} for p in places)
    mlp, gradient, exponent = isinstance(_ffn(choices, sizes), MLP), None, None
    if plain and mlp and post:
        gradient, exponent = post_norm_gradient(layer, sizes.depth), POST_NORM_EXPONENT
    if plain and mlp and pre:  # "about independent of l": the same paragraph
        gradient, exponent = np.ones(sizes.depth), PRE_NORM_EXPONENT
    update = update_bound(alpha, v, w) if fixed and post and mlp else None
    return Prediction(stream, source or "", gradient, exponent, update)


def _joins(choices: Choices, sizes: Sizes, sites: Sequence[Site], residuals: Sequence[Residual]) -> list[Join]:
    """One for each branch; none at all where one of them is beyond the theory."""
    ffn, joins = _ffn(choices, sizes), list[Join]()
    for site, residual in zip(sites, residuals, strict=True):
        branch, at, gain = site.branch, choices.placement.at(site), choices.placement.gain(site)
        alpha, beta, s = (number(part) for part in (residual.alpha, residual.beta, residual.s))
        if "sum" in at:
            joins.append(Join(alpha, 0, 0, norm_sum=True))
        elif "out" in at:
            joins.append(Join(alpha, (beta * gain) ** 2, (beta * gain) ** 2))
        elif "in" in at and not sizes.dropout and branch == "attention":
            carry, write = (
                _square(choices, sizes, residual, role, sizes.dim, sizes.dim) for role in ("carry", "write")
            )
            joins.append(Join(alpha, 0.0, beta**2 * s**2 * carry * write * _kept(choices, sizes)))
        elif "in" in at and not sizes.dropout and isinstance(ffn, MLP):
            up = s**2 * _square(choices, sizes, residual, "carry", sizes.dim, ffn.up.out_features)
            down = _square(choices, sizes, residual, "write", ffn.down.in_features, sizes.dim) * _kept(choices, sizes)
            adds = beta**2 * ffn_mean_square(ffn.act, up, down)
            joins.append(Join(alpha, adds, adds))
        else:
            return []
    return joins


def _kept(choices: Choices, sizes: Sizes) -> float:
    """Of the mean square of what is drawn to enter the stream: centring takes a share 1/dim."""
    return 1 - 1 / sizes.dim if choices.init.centred else 1.0


def _ffn(choices: Choices, sizes: Sizes) -> nn.Module:
    return choices.ffn(setting(choices, sizes, Site("ffn", 1, sizes.depth), NoPosition(1, 1, 1)))


def _square(choices: Choices, sizes: Sizes, residual: Residual, role: str, fan_in: int, fan_out: int) -> float:
    """fan_in std^2: what the matrix multiplies a mean square by."""
    factor = residual.gains.get(role, 1.0) * choices.scaling.matrix(sizes, choices.init)
    return fan_in * (factor * choices.init.matrix(fan_in, fan_out)) ** 2


def _gains(choices: Choices, sizes: Sizes, residuals: Sequence[Residual]) -> tuple[Array, Array, Array]:
    """(alpha, v, w) by branch, the gains against Xavier's std, which all matrices of a branch share at square shape."""
    base = choices.init.matrix(sizes.dim, sizes.dim) / Xavier().matrix(sizes.dim, sizes.dim)
    base *= choices.scaling.matrix(sizes, choices.init)
    alpha = np.array([number(residual.alpha) / (number(residual.beta) or np.nan) for residual in residuals])
    v, w = (np.array([base * r.gains.get(role, 1.0) for r in residuals]) for role in ("carry", "write"))
    return alpha, v, w


def _plain_stream(choices: Choices, places: Sequence[frozenset[str]], site: Site) -> bool:
    """One tensor, matrices as they are drawn, plain attention, and no place or ramp that the papers do not have."""
    at_once = isinstance(choices.ramp.at(site), float) and type(choices.stream) is Single
    linear, attention = (getattr(made, "func", made) for made in (choices.linear, choices.attention))
    plain = linear is Linear and attention is Attention
    return at_once and plain and not any(at & {"both", "qkv", "inner"} for at in places)


def _brings_to_one(norm: nn.Module, dim: int) -> bool:
    """Whether the norm gives every vector RMS 1, as the papers' does: not that of a part, nor over a batch, nor none."""
    x = torch.randn(64, dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return bool(((norm(2 * x + 1).square().mean(-1) - 1).abs() < 0.01).all())


def _source(places: Sequence[frozenset[str]]) -> str:
    found = {"sum" if "sum" in at else "out" if "out" in at else "in" for at in places}
    said = {"sum": "a norm on the sum: 1", "in": f"{XIONG}, Lemma 2", "out": f"{PERI_LN}"}
    return "; ".join(said[place] for place in ("sum", "in", "out") if place in found)
