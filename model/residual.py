"""How much: the skip alpha, the inlet s, the gain beta of a branch, and what its initial matrices are multiplied by.
Constants of depth and layer; what is learnt is in `residual_learnt.py`, what stands in for a norm in `residual_without_norm.py`.

    x <- N_sum(alpha x + beta N_out(F(s N_in(x))))

A method is a function `(site, dim, *, its own knobs)`. A coefficient is a plain float, a Parameter where the method
learns it (a scalar, or one number a feature), or `Computed`. Gains go by the role of a matrix (`model/linear.py`), never by its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import log
from typing import get_args

import torch
from torch import nn

from model.coefficient import Coefficient
from model.linear import Role
from model.site import Site


@dataclass(frozen=True)
class Residual:
    """alpha, s, beta of one branch, and `gains`: role -> factor on the std of the initial matrix; of the network's ends,
    `embedding` (on its RMS) and `head`, those of the first branch count. `shared`: both branches of a layer have the
    attention's, where a method learns one a layer. `profiled`: alpha is set by one forward pass (`model/profile.py`)."""

    alpha: Coefficient = 1.0
    s: Coefficient = 1.0
    beta: Coefficient = 1.0
    gains: Mapping[str, float] = field(default_factory=dict)
    shared: bool = False
    profiled: bool = False


Method = Callable[[Site, int], Residual]


def _of_gate(site: Site, gain: float) -> dict[str, float]:
    """Of the feed-forward's gate, which multiplies a value; that of an attention's heads is between 0 and 1 whatever its size."""
    return {"gate": gain} if site.branch == "ffn" and gain != 1.0 else {}


def standard(site: Site, dim: int) -> Residual:
    """alpha = s = beta = 1, no gain: He et al. 2015, arXiv 1512.03385, eq. 1."""
    return Residual()


def gpt2(site: Site, dim: int) -> Residual:
    """The matrices that write to the stream (o, down) start (2N)^(-1/2) times as large, N blocks.

    Source: Radford et al. 2019 (GPT-2), section 2.3: "a factor of 1/sqrt(N) where N is the number of residual layers",
    that is 2N in blocks; Megatron-LM's and nanoGPT's scaled init.
    """
    return Residual(gains={"write": (2 * site.depth) ** -0.5})


def deepnorm(
    site: Site, dim: int, *, alpha: float | None = None, beta: float | None = None, scale_gate: bool = False
) -> Residual:
    """x <- N(alpha x + F(x)), alpha = (2N)^(1/4); v, o, up, down start with Xavier gain beta = (8N)^(-1/4), q and k
    with gain 1. Both are constants of the depth; beta never appears in the forward pass. A number takes the formula's
    place, for ablations: beta=1 is alpha alone, alpha=1 beta alone.

    Source: Wang et al. 2022 (DeepNet), arXiv 2203.00555, figure 2 and table "decoder-only"; its feed-forward has two
    matrices. With a gated one, `scale_gate` scales the gate too, as GLM-130B's code does; without it the branch keeps
    the paper's beta^2 (three scaled matrices would make it about beta^3).
    """
    for name, given in (("alpha", alpha), ("beta", beta)):
        if given is not None and given <= 0:
            raise ValueError(f"residual.{name} must be > 0, or null for the paper's, found {given}")
    beta = (8 * site.depth) ** -0.25 if beta is None else float(beta)
    gains = {"carry": beta, "write": beta} | _of_gate(site, beta if scale_gate else 1.0)
    return Residual(alpha=(2 * site.depth) ** 0.25 if alpha is None else float(alpha), gains=gains)


def glm130b(site: Site, dim: int) -> Residual:
    """x <- N(alpha x + F(x)), alpha = (2N)^(1/2); v, o and all matrices of the feed-forward, its gate too, start with
    Xavier gain (2N)^(-1/2). DeepNorm's form with other exponents: beta / alpha = 1/(2N) keeps Adam's first update, where
    DeepNorm's keeps SGD's.

    Source: Zeng et al. 2022 (GLM-130B), arXiv 2210.02414, section 2.2; the gate as in its code. Its shrunk gradient of the
    embedding is no part of this.
    """
    gain = (2 * site.depth) ** -0.5
    return Residual(alpha=(2 * site.depth) ** 0.5, gains={"carry": gain, "write": gain} | _of_gate(site, gain))


def keel(site: Site, dim: int) -> Residual:
    """x <- N(alpha x + F(N(x))), alpha = 2N, the number of branches; no gain. Its norms are the places `in` and `sum`.

    Source: Chen, Wei 2026 (Keel), arXiv 2601.19895; alpha is as several summaries quote it. Whether its first layer is an
    exception could not be verified, and here it is none.
    """
    return Residual(alpha=2.0 * site.depth)


def lns(site: Site, dim: int) -> Residual:
    """x <- x + F(N(x) / sqrt(l)): what the norm gives the branch, times s = l^(-1/2) in layer l. The head's norm is left
    as it is, and no matrix starts smaller: the authors advise against both at once.

    Source: Sun et al. 2025 (LayerNorm Scaling), arXiv 2502.05795, section 4.
    """
    return Residual(s=site.layer**-0.5)


def ds_init(site: Site, dim: int, *, scale: float = 1.0) -> Residual:
    """Every matrix of layer l starts `scale` / sqrt(l) times as large. Source: Zhang et al. 2019 (DS-Init), arXiv 1908.11365,
    section 4.1, whose alpha is `scale`, 1 in its code."""
    if scale <= 0:
        raise ValueError(f"residual.scale must be > 0, found {scale}")
    return Residual(gains=dict.fromkeys(("score", "carry", "gate", "write"), scale * site.layer**-0.5))


def olmo(site: Site, dim: int) -> Residual:
    """o and down of layer l start 1/sqrt(2l) times as large: with init=fan_in the start of OLMo-0424, which OLMo 2 gave up
    for N(0, 0.02). Source: released code of arXiv 2402.00838; arXiv 2501.00656, section 3."""
    return Residual(gains={"write": (2 * site.layer) ** -0.5})


def b2t(site: Site, dim: int) -> Residual:
    """Every matrix of the N blocks starts N^(-1/2) times as large: for stream=b2t.

    Source: the released code of Takase et al. 2022, arXiv 2206.00330, on Xavier's std.
    """
    return Residual(gains=dict.fromkeys(get_args(Role), site.depth**-0.5))


def sub_ln(site: Site, dim: int, *, scale_gate: bool = False) -> Residual:
    """alpha = 1; v, o, up, down start with Xavier gain sqrt(ln 2N), q and k with gain 1. With placement=sub_ln.

    From N = 2 on the gain is above 1 (1.78 at N = 12): it enlarges, where DeepNorm's beta shrinks the same matrices. A network
    has one or the other.
    Source: Wang et al. 2022 (Magneto), arXiv 2210.06423, section 2.3, decoder-only; `scale_gate` as in `deepnorm`. The
    released code scales the biases too, which are zero here.
    """
    gain = log(2 * site.depth) ** 0.5
    return Residual(gains={"carry": gain, "write": gain} | _of_gate(site, gain if scale_gate else 1.0))


def learned_scalars(site: Site, dim: int, *, alpha: float = 1.0, beta: float = 1.0) -> Residual:
    """x <- N(alpha x + beta F(x)), alpha and beta one learnt scalar each, a pair for every branch.

    Popular articles call this DeepNorm. It is not: the paper's alpha and beta are constants, and its beta multiplies
    initial matrices, not the branch (`deepnorm` above; arXiv 2203.00555). The knobs are the starting values.
    """
    return Residual(alpha=nn.Parameter(torch.tensor(float(alpha))), beta=nn.Parameter(torch.tensor(float(beta))))
