"""Norms that divide by the length of a vector, ||x|| = sqrt(sum(x^2)), and not by its RMS, which is 1 / sqrt(dim) of that.

The papers' code keeps max(||x||, 1e-5) from zero; here it is sqrt(||x||^2 + dim eps), which is sqrt(dim) times the RMS of the
other norms, eps and all: a row near zero is treated as theirs are, and its gradient is 1 / sqrt(eps) and not 10^5.
"""

from math import sqrt

import torch
from torch import Tensor, nn

from model.norm import EPS, SimpleRMSNorm


class L2Norm(SimpleRMSNorm):
    """y = x / ||x||, ||x|| = sqrt(sum(x^2) + dim eps): a vector of length 1 and RMS 1 / sqrt(dim), without a gain.

    Source: Loshchilov et al. 2024 (nGPT), arXiv 2410.01131, section 2, whose learnt scales are no part of it.
    """

    def normalise(self, x: Tensor) -> Tensor:
        return super().normalise(x) / sqrt(self.dim)


class ScaleNorm(SimpleRMSNorm):
    """y = g * x / ||x||, ||x|| = sqrt(sum(x^2) + dim eps), g one scalar; g = sqrt(dim) at the start, where it is
    SimpleRMSNorm.

    At the place `embed` (placement.places=[embed,in,head]) it is FixNorm of the embeddings, of token and learned position
    in sum. The paper's code normalises the output matrix too, with which it is tied; that is not done here.
    Source: Nguyen, Salazar 2019, arXiv 1910.05895, section 2 (g = sqrt(dim): its code).
    """

    def __init__(self, dim: int, *, eps: float = EPS) -> None:
        super().__init__(dim, eps=eps)
        self.gain = nn.Parameter(torch.tensor(sqrt(dim)))

    def normalise(self, x: Tensor) -> Tensor:
        return super().normalise(x) * (self.gain.to(x.dtype) / sqrt(self.dim))
