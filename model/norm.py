"""What a norm does to one vector.

Every class is called `(dim, *, its own knobs)` and maps (..., dim) to (..., dim). Three rules hold for all: statistics and
gain are worked in at least float32 (float64 stays float64) and the result is cast last, to the dtype that came in, unless
`cast` says otherwise; where a norm divides, eps stands inside the square root, beside a mean square, and is 1e-6 unless
said otherwise, so that a comparison of norms is not one of eps; a row of zeros gives zeros (or the bias) and finite
gradients while eps > 0. Those that divide by the length are in `length.py`, those that divide by nothing in `pointwise.py`.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import rms

EPS = 1e-6
Cast = Literal["last", "before_gain"]


class Norm(nn.Module):
    """The base: widen, normalise, cast back. `sees_future` tells whether a position's output in training depends on
    later positions of its sequence."""

    sees_future = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return self.normalise(wide).to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def kernel(self, device: torch.device) -> str:
        """What computes it there where nothing is compiled: speeds of two norms compare only with that in view."""
        return "plain operations"

    def extra_repr(self) -> str:
        return f"{self.dim}"


class Dividing(Norm):
    """Divides by a statistic of what comes in, which eps keeps from zero."""

    def __init__(self, dim: int, *, eps: float = EPS) -> None:
        super().__init__(dim)
        if eps < 0:
            raise ValueError(f"norm.eps must be >= 0, found {eps}")
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class Gained(Dividing):
    """y = g * unit(x) (+ b), g = 1 (and b = 0) at the start, and where rounding to less than float32 comes in.

    cast: `last` rounds y alone (Gemma, Qwen3-Next, torch's own norms); `before_gain` rounds unit(x), and works gain and bias
    in the dtype that came in (Llama, DeBERTa; released code). In float32 and float64 the two are one.
    """

    def __init__(self, dim: int, *, eps: float = EPS, cast: Cast = "last") -> None:
        super().__init__(dim, eps=eps)
        self.cast = cast
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.cast == "last" or x.dtype in (torch.float32, torch.float64):
            return super().forward(x)
        gain, *bias = (each.to(x.dtype) for each in self.affine(torch.float32))
        return sum(bias, self.unit(x.float()).to(x.dtype) * gain)

    def normalise(self, x: Tensor) -> Tensor:
        return self.unit(x, *self.affine(x.dtype))

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(g,) or (g, b), in a dtype that is wide."""
        return (self.gain.to(dtype),)

    def unit(self, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """x over its statistic, times the gain and plus the bias that are given."""
        raise NotImplementedError


class SimpleLayerNorm(Dividing):
    """y = (x - mean(x)) / sqrt(var(x) + eps), the variance biased: LayerNorm without gain and bias.

    Source: Groeneveld et al. 2024 (OLMo), arXiv 2402.00838, section 2 ("non-parametric").
    """

    def normalise(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), None, None, self.eps)

    def kernel(self, device: torch.device) -> str:
        return "torch F.layer_norm"


class BiaslessLayerNorm(Gained):
    """y = g * (x - mean(x)) / sqrt(var(x) + eps), the variance biased. Source: nanoGPT's `bias=False` (released code)."""

    def unit(self, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, (self.dim,), gain, bias, self.eps)

    def kernel(self, device: torch.device) -> str:
        return "torch F.layer_norm"


class LayerNorm(BiaslessLayerNorm):
    """y = g * (x - mean(x)) / sqrt(var(x) + eps) + b, the variance biased.

    Source: Ba, Kiros, Hinton 2016, arXiv 1607.06450, eq. 4.
    """

    def __init__(self, dim: int, *, eps: float = EPS, cast: Cast = "last") -> None:
        super().__init__(dim, eps=eps, cast=cast)
        self.bias = nn.Parameter(torch.zeros(dim))

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return *super().affine(dtype), self.bias.to(dtype)


class SimpleRMSNorm(Dividing):
    """y = x / RMS(x), RMS(x) = sqrt(mean(x^2) + eps): RMSNorm without a gain.

    Source: Qin et al. 2023 (TransNormerLLM), arXiv 2307.14995.
    """

    def normalise(self, x: Tensor) -> Tensor:
        return rms.rms_norm(x, None, self.eps)

    def kernel(self, device: torch.device) -> str:
        return rms.kernel(device)


class RMSNorm(Gained):
    """y = g * x / RMS(x), RMS(x) = sqrt(mean(x^2) + eps).

    Source: Zhang, Sennrich 2019, arXiv 1910.07467, eq. 4. The paper has no eps; its PyTorch file adds one outside the
    root, its other code and every language model inside, as here.
    """

    def unit(self, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = rms.rms_norm(x, gain, self.eps)
        return y if bias is None else y + bias

    def kernel(self, device: torch.device) -> str:
        return rms.kernel(device)


class ZeroRMSNorm(RMSNorm):
    """y = (1 + w) * x / RMS(x), w = 0 at the start: the parameter is centred on zero, the activation is not.

    Equal to RMSNorm until weight decay acts: it then pulls the gain 1 + w to 1, and RMSNorm's gain to 0. 1 + w is
    formed in float32 before any cast, since in bfloat16 the sum would lose small w.
    Source: Gemma, Qwen3-Next, Qwen3.5 (released code); `optimizer.norm_decay` is the decay that Qwen3-Next gives it.
    """

    def __init__(self, dim: int, *, eps: float = EPS, cast: Cast = "last") -> None:
        super().__init__(dim, eps=eps, cast=cast)
        del self.gain  # w in its place
        self.weight = nn.Parameter(torch.zeros(dim))

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (1 + self.weight.to(dtype),)


class BiasedRMSNorm(RMSNorm):
    """y = g * x / RMS(x) + b. Source: an option of the authors' code of arXiv 1910.07467."""

    def __init__(self, dim: int, *, eps: float = EPS, cast: Cast = "last") -> None:
        super().__init__(dim, eps=eps, cast=cast)
        self.bias = nn.Parameter(torch.zeros(dim))

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return *super().affine(dtype), self.bias.to(dtype)


class GroupRMSNorm(RMSNorm):
    """y = g * concat_j( x_j / RMS(x_j) ) over `groups` equal parts x_j of x, one gain of the full width.

    Source: Mamba-2's gated norm (its group size; released code), arXiv 2405.21060.
    """

    def __init__(self, dim: int, *, eps: float = EPS, groups: int = 4) -> None:
        super().__init__(dim, eps=eps)
        if groups < 1 or dim % groups:
            raise ValueError(f"norm.groups={groups} must divide the width that it normalises ({dim})")
        self.groups = groups

    def normalise(self, x: Tensor) -> Tensor:
        parts = rms.rms_norm(x.reshape(*x.shape[:-1], self.groups, -1), None, self.eps)
        return parts.flatten(-2) * self.gain.to(x.dtype)


class LearnableEpsRMSNorm(RMSNorm):
    """y = g * x / sqrt(mean(x^2) + exp(r)), r a learnt scalar that starts at ln(eps), so that the eps stays positive.

    Source: the learnt eps is that of Filter Response Normalization (Singh, Krishnan 2019, arXiv 1911.09737), which
    takes its absolute value; no language model is known to use it.
    """

    kernel = Norm.kernel

    def __init__(self, dim: int, *, eps: float = EPS) -> None:
        super().__init__(dim, eps=eps)
        if eps == 0:
            raise ValueError("norm.eps must be > 0 where it is learnt, found 0")
        self.log_eps = nn.Parameter(torch.tensor(eps).log())

    def normalise(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.log_eps.to(x.dtype).exp()) * self.gain.to(x.dtype)


class PartialRMSNorm(RMSNorm):
    """pRMSNorm: y = g * x / RMS(x_1 .. x_k), k = floor(p * dim) and at least 1: the RMS is estimated on the first part.

    Source: Zhang, Sennrich 2019, arXiv 1910.07467, section 3 (p = 6.25%; the code takes the first int(d * p)).
    """

    kernel = Norm.kernel

    def __init__(self, dim: int, *, eps: float = EPS, p: float = 0.0625) -> None:
        super().__init__(dim, eps=eps)
        if not 0 < p <= 1:
            raise ValueError(f"norm.p must be in (0, 1], found {p}")
        self.k = max(1, int(dim * p))

    def normalise(self, x: Tensor) -> Tensor:
        mean_square = x[..., : self.k].square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.gain.to(x.dtype)


class CompressedRMSNorm(RMSNorm):
    """y = g * x / sqrt((sum(x^2) + sum(x)^2) / (dim + 1) + eps): the first dim entries of the RMSNorm of x and -sum(x).

    x stands for dim + 1 entries that sum to zero, of which the last is left out. The stream is such a vector where all that
    enters it is; of entries drawn independently the one left out is as large as all others together, and the norm hangs on
    it. `init.centred=true` starts with it at zero. The paper's conversion of a trained Pre-LN network is not done here.
    Source: Jiang et al. 2023 (CRMSNorm), arXiv 2305.14858, section 3.
    """

    kernel = Norm.kernel

    def __init__(self, dim: int, *, eps: float = EPS) -> None:
        super().__init__(dim, eps=eps)

    def normalise(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()
        return x * torch.rsqrt(squares / (self.dim + 1) + self.eps) * self.gain.to(x.dtype)


class BatchNorm(Dividing):
    """y = g * (x - mean_B(x)) / sqrt(var_B(x) + eps) + b, each feature over batch and time B; running statistics in
    evaluation.

    In training a position's output depends on later positions and on other sequences: the training loss of a
    language model is then flattered by the future. It is here to show that, behind `allow_unstable=true`.
    Source: Ioffe, Szegedy 2015, arXiv 1502.03167, algorithm 1; for its failure in language models Shen et al. 2020
    (PowerNorm), arXiv 2003.07845.
    """

    sees_future = True
    mean: Tensor
    var: Tensor

    def __init__(self, dim: int, *, eps: float = EPS, momentum: float = 0.1) -> None:
        super().__init__(dim, eps=eps)
        if not 0 < momentum <= 1:
            raise ValueError(f"norm.momentum must be in (0, 1], found {momentum}")
        self.momentum = momentum
        self.gain = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def normalise(self, x: Tensor) -> Tensor:
        mean, var = self.mean.to(x.dtype), self.var.to(x.dtype)
        if self.training:
            rows = x.reshape(-1, self.dim)
            var, mean = torch.var_mean(rows, dim=0, correction=0)
            with torch.no_grad():
                unbiased = var * (len(rows) / max(1, len(rows) - 1))  # what is kept for evaluation, as in the paper
                self._keep(self.mean, mean)
                self._keep(self.var, unbiased)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain.to(x.dtype) + self.bias.to(x.dtype)

    def _keep(self, running: Tensor, now: Tensor) -> None:
        """running <- (1 - momentum) running + momentum now; what is not finite is left out, as its step will be."""
        moved = running.lerp(now.to(running.dtype), self.momentum)
        running.copy_(torch.where(torch.isfinite(moved), moved, running))


def none(dim: int) -> nn.Module:
    """y = x: no norm, at any place."""
    return nn.Identity()
