"""The initial matrices: a std by shape (this file), times a gain by role (the residual method).

Roles and sizes are read from the modules, so that a name never decides. Each parameter draws from a generator seeded
by the run's seed and the parameter's own name: two runs that differ in the norm alone start with the same matrices.
"""

from collections.abc import Iterable
from hashlib import blake2b
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor, nn

from model.linear import Linear


class Init(Protocol):
    @property
    def centred(self) -> bool:
        """Whether what enters the stream has mean zero over its features: see `FanIn`."""

    def matrix(self, fan_in: int, fan_out: int) -> float:
        """The std of a hidden matrix."""

    def embedding(self, terms: int) -> float:
        """The RMS with which each of `terms` embeddings (token, learned position) enters their sum."""

    def head(self, dim: int) -> float:
        """The std of the output matrix."""


class FanIn:
    """std = 1 / sqrt(fan_in). Embeddings: RMS 1 in sum; head N(0, 1/dim).

    `centred` takes from each vector that enters the stream (a row of the token or position table, a column of o and down)
    its mean over the features, after it is drawn: its mean square is then 1 - 1/dim times as large. In a pre-norm network
    without biases and dropout the stream of each token has mean zero, and LayerNorm at its start (g = 1, b = 0) is RMSNorm.
    Source: Jiang et al. 2023, arXiv 2305.14858, section 3.
    """

    def __init__(self, *, centred: bool = False) -> None:
        self.centred = centred

    def matrix(self, fan_in: int, fan_out: int) -> float:
        return 1 / sqrt(fan_in)

    def embedding(self, terms: int) -> float:
        return 1 / sqrt(terms)

    def head(self, dim: int) -> float:
        return 1 / sqrt(dim)


class Xavier(FanIn):
    """std = sqrt(2 / (fan_in + fan_out)): Glorot, Bengio 2010, eq. 12 (its normal form). The rest as `FanIn`."""

    def matrix(self, fan_in: int, fan_out: int) -> float:
        return sqrt(2 / (fan_in + fan_out))


class SpikeNoMore(FanIn):
    """std = sqrt(2 / (5 dim)) in every matrix, the head's too; embeddings of RMS 1 in sum. With o and down (2N)^(-1/2) times
    as large (residual=gpt2) these are the paper's two conditions: small branches, and a skip that is large beside them.
    The width is the smaller side of a matrix, as long as no feed-forward is narrower than the stream.

    Source: Takase et al. 2023 (Spike No More), arXiv 2312.16903, section 4; the std is SmallInit, Nguyen, Salazar 2019,
    arXiv 1910.05895.
    """

    def matrix(self, fan_in: int, fan_out: int) -> float:
        return sqrt(2 / (5 * min(fan_in, fan_out)))

    def head(self, dim: int) -> float:
        return sqrt(2 / (5 * dim))


class Normal:
    """std everywhere, whatever the width, embeddings and head included: Radford et al. 2019 (GPT-2), N(0, 0.02).

    At small widths this is a strong shrink of every branch (0.02 is 0.16 / sqrt(64)), which hides what depth does to
    post-norm.
    """

    centred = False

    def __init__(self, *, std: float = 0.02) -> None:
        if std <= 0:
            raise ValueError(f"init.std must be > 0, found {std}")
        self.std = std

    def matrix(self, fan_in: int, fan_out: int) -> float:
        return self.std

    def embedding(self, terms: int) -> float:
        return self.std

    def head(self, dim: int) -> float:
        return self.std


def std_of(linear: Linear, init: Init, factor: float = 1.0) -> float:
    """The std of a matrix: factor * gain * std(fan_in, fan_out), less what centring takes; `factor` is the scaling's. q, k
    and v are separate matrices, and a key-value head that serves several query heads counts as often as it is used, so that
    grouping does not change the std."""
    kept = sqrt(1 - 1 / linear.out_features) if _is_centred(linear, init) else 1
    return linear.acting_std(_drawn_std(linear, init, factor) * kept)


def _drawn_std(linear: Linear, init: Init, factor: float) -> float:
    return factor * linear.gain * init.matrix(linear.in_features, linear.out_features * linear.repeats)


def _is_centred(linear: Linear, init: Init) -> bool:
    return init.centred and linear.role == "write"


def draw_(parameter: Tensor, std: float, *, seed: int, name: str, centred: int | None = None) -> None:
    """Fill with N(0, std^2), on the CPU in float32, so that every device and dtype starts from the same numbers; then take
    away the mean over the dimension `centred`, in the parameter's own dtype."""
    key = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1
    draw = torch.empty(parameter.shape, dtype=torch.float32)
    draw.normal_(0.0, std, generator=torch.Generator().manual_seed(key))
    with torch.no_grad():
        parameter.copy_(draw)
        if centred is not None:
            parameter -= parameter.mean(centred, keepdim=True)


def initialise_(modules: Iterable[tuple[str, nn.Module]], init: Init, seed: int, factor: float = 1.0) -> None:
    """Every Linear of the blocks: its matrix by role, shape and gain; its bias zero."""
    for name, module in modules:
        if isinstance(module, Linear):
            features = 0 if _is_centred(module, init) else None
            draw_(module.weight, _drawn_std(module, init, factor), seed=seed, name=f"{name}.weight", centred=features)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            module.drawn()
