"""What nGPT learns in place of norms' gains: how far a branch moves the stream, and the scales of vectors of length 1.

h <- nrm(h + a (nrm(F(h)) - h)), nrm(x) = x / ||x||, every vector of a matrix that lies along the stream of length 1. It is whole as
recipe=ngpt; its parts are choices of their own: norm=l2norm, placement=ngpt, residual=ngpt, linear=unit, attention=ngpt, ffn=ngpt,
scaling=ngpt. A learnt number that should be `start` is stored as `scale` and multiplied by start / scale, which is to say that
Adam, whose steps have a size of their own, moves it by start / scale as far as the learning rate says.
Source: Loshchilov et al. 2024, arXiv 2410.01131, sections 2.1 to 2.6, and NVIDIA's released code.
"""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention
from model.coefficient import Computed, Scaled
from model.ffn import Activation, GatedMLP
from model.residual import Residual
from model.setting import Setting
from model.site import Site


def learnt(width: int, start: float, scale: float) -> Scaled:
    """`width` numbers that are `start`, stored as `scale`."""
    return Scaled(start / scale, nn.Parameter(torch.full((width,), scale)))


class Rest(Computed):
    """1 - a."""

    def __init__(self, a: Computed) -> None:
        super().__init__()
        self.a = a

    def forward(self) -> Tensor:
        return 1 - self.a()


def interpolation(site: Site, dim: int, *, rate: float | None = 0.05) -> Residual:
    """alpha = 1 - a and beta = a, a one learnt number a feature, `rate` at the start, null: 1/depth, stored as 1/sqrt(dim).

    With placement=ngpt x <- nrm((1 - a) x + a nrm(F(x))), the paper's step, since x has length 1. Its released code takes
    |a|, which the paper does not, and normalises x once more.
    Source: arXiv 2410.01131, section 2.2; 0.05, "in order of 1/n_layers", in section 2.6.
    """
    if rate is not None and not 0 < rate <= 1:
        raise ValueError(f"residual.rate must be in (0, 1], or null for 1/depth, found {rate}")
    a = learnt(dim, 1 / site.depth if rate is None else float(rate), 1 / sqrt(dim))
    return Residual(alpha=Rest(a), beta=a)


class UnitHeads(nn.Module):
    """q -> s_qk nrm(R(q)), R the rotation: (batch, heads, time, head_dim) to the same. s_qk has a number for each of the
    `groups` key-value heads and each of their features; query heads that share keys share it. No `Norm`, since it is none of
    the run's norm: it is there with norm=none too."""

    def __init__(self, rotate: Callable[[Tensor], Tensor], groups: int, head_dim: int, dim: int) -> None:
        super().__init__()
        self.rotate, self.groups, self.head_dim = rotate, groups, head_dim
        self.s = learnt(groups * head_dim, 1.0, 1 / sqrt(dim))

    def forward(self, q: Tensor) -> Tensor:
        s: Tensor = self.s().view(self.groups, 1, self.head_dim).repeat_interleave(q.shape[1] // self.groups, 0)
        turned = self.rotate(q)
        wide = turned if turned.dtype == torch.float64 else turned.float()
        return (s * F.normalize(wide, dim=-1)).to(q.dtype)


class NGPTAttention(Attention):
    """softmax(sqrt(d_h) q_h k_h^T + causal mask) v_h, q = s_qk nrm(R(W_q u)), k = s_qk nrm(R(W_k u)), R the rotation. s_qk
    starts at 1, stored as 1/sqrt(dim). The scale is sqrt(d_h), since q k^T of vectors of length 1 has variance 1/d_h.

    Source: arXiv 2410.01131, section 2.3. Rotation before norm and scale as in the released code.
    """

    bounded = True

    def __init__(self, setting: Setting) -> None:
        sizes = setting.sizes
        heads = UnitHeads(setting.rotate, sizes.groups, sizes.head_dim, sizes.dim)
        super().__init__(replace(setting, rotate=heads, score_scale=setting.score_scale * sizes.head_dim))


class NGPTMLP(GatedMLP):
    """F(u) = W_down (act(sqrt(dim) s_v * W_gate u) * (s_u * W_up u)), s_u and s_v one number a hidden feature, 1 at the start;
    hidden width 4 dim. sqrt(dim) gives the activation arguments of order 1, where u and the rows of W_gate have length 1.

    The released code has sqrt(dim) on W_up u too, of which nothing is left behind the norm.
    Source: arXiv 2410.01131, section 2.4.
    """

    def __init__(self, setting: Setting, *, activation: Activation = "silu", ratio: float = 4.0) -> None:
        super().__init__(setting, activation=activation, ratio=ratio)
        hidden = self.up.out_features
        self.root = sqrt(setting.sizes.dim)
        self.s_u, self.s_v = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))

    def gated(self, u: Tensor) -> Tensor:
        return self.act(self.root * self.s_v * self.gate(u)) * (self.s_u * self.up(u))
