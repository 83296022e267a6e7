"""What stands in a norm's place without being one: a bounded function of each feature alone.

It takes no statistic, divides by nothing, and so has no eps; a vector keeps its direction and length only in part.
"""

import torch
from torch import Tensor, nn

from model.norm import Norm


class DyT(Norm):
    """y = g * tanh(a x) + b, a one scalar, all learnt; g = 1, b = 0, a = `alpha` at the start. `bias=false`: no b.

    alpha is the same at every place. The paper starts large language models with another a before attention (LLaMA 7B: 0.8)
    than elsewhere (0.2), smaller the wider they are, without b (released code), and multiplies their embeddings by a scalar
    that starts at sqrt(dim), since they are small; ours enter with RMS 1.
    Source: Zhu et al. 2025, arXiv 2503.10622, section 4.
    """

    bias: nn.Parameter | None

    def __init__(self, dim: int, *, alpha: float = 0.5, bias: bool = True) -> None:
        super().__init__(dim)
        if alpha <= 0:
            raise ValueError(f"norm.alpha must be > 0, found {alpha}")
        self.gain, self.alpha = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.tensor(float(alpha)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if bias else None)

    def normalise(self, x: Tensor) -> Tensor:
        y = self.bounded(x) * self.gain.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def bounded(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha.to(x.dtype) * x)


class Derf(DyT):
    """y = g * erf(a x + s) + b, a and s one scalar each, all learnt; g = 1, b = 0, a = `alpha`, s = `shift` at the start.

    Source: Chen et al. 2025, arXiv 2512.10938, eq. 10; a = 0.5 and s = 0 are the defaults of its released code, which has
    another a before attention, before the feed-forward and at the end, as DyT's.
    """

    def __init__(self, dim: int, *, alpha: float = 0.5, shift: float = 0.0, bias: bool = True) -> None:
        super().__init__(dim, alpha=alpha, bias=bias)
        self.shift = nn.Parameter(torch.tensor(float(shift)))

    def bounded(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
