"""The feed-forward branch: two matrices, or three with a gate."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from model.setting import Setting

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def hidden_width(dim: int, ratio: float) -> int:
    """ratio * dim, rounded up to a multiple of 8."""
    if ratio <= 0:
        raise ValueError(f"ffn.ratio must be > 0, found {ratio}")
    return 8 * -(-round(ratio * dim) // 8)


class MLP(nn.Module):
    """F(u) = W_down act(W_up u), hidden width ratio * dim; (batch, time, dim) to the same. The place `inner` is before W_down.

    Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 2; GELU: Hendrycks, Gimpel 2016, arXiv 1606.08415 (exact form;
    `gelu_tanh` is its approximation, which GPT-2 and Gemma have).
    """

    def __init__(self, setting: Setting, *, activation: Activation = "gelu", ratio: float = 4.0) -> None:
        super().__init__()
        sizes, hidden = setting.sizes, hidden_width(setting.sizes.dim, ratio)
        self.up = setting.linear(sizes.dim, hidden, "carry", sizes.bias)
        self.inner_norm = setting.norm_at("inner", hidden)
        self.down = setting.linear(hidden, sizes.dim, "write", sizes.bias)
        self.act, self.dropout = ACTIVATIONS[activation], sizes.dropout

    def forward(self, u: Tensor) -> Tensor:
        y = self.down(self.inner_norm(self.act(self.up(u))))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y


class GatedMLP(nn.Module):
    """F(u) = W_down (act(W_gate u) * W_up u), hidden width 8/3 dim, so that it has as many parameters as `MLP`.

    Source: Shazeer 2020, arXiv 2002.05202, eq. 6 (SwiGLU: act = silu; GeGLU: act = gelu).
    """

    def __init__(self, setting: Setting, *, activation: Activation = "silu", ratio: float = 8 / 3) -> None:
        super().__init__()
        sizes, hidden = setting.sizes, hidden_width(setting.sizes.dim, ratio)
        self.gate = setting.linear(sizes.dim, hidden, "gate", sizes.bias)
        self.up = setting.linear(sizes.dim, hidden, "carry", sizes.bias)
        self.inner_norm = setting.norm_at("inner", hidden)
        self.down = setting.linear(hidden, sizes.dim, "write", sizes.bias)
        self.act, self.dropout = ACTIVATIONS[activation], sizes.dropout

    def forward(self, u: Tensor) -> Tensor:
        y = self.down(self.inner_norm(self.gated(u)))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def gated(self, u: Tensor) -> Tensor:
        """What W_down reads: (batch, time, hidden)."""
        return self.act(self.gate(u)) * self.up(u)
