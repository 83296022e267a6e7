"""Kinds of attention: what is compared, what the heads hand on, and whose values are read."""

from math import log, log2
from typing import Literal

import torch
from torch import Tensor, nn

from model.attention import Attention
from model.setting import Setting

CLOSE_TO_ZERO = 1e-12  # as torch's normalize


class HeadScaleAttention(Attention):
    """F(u) = W_o concat_h(gamma_h y_h), y_h what head h gives and gamma_h a learnt scalar, 1 at the start.

    Source: Shleifer, Weston, Ott 2021 (NormFormer), arXiv 2110.09456, section 2 (HeadScaleMHA).
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.head_scale = nn.Parameter(torch.ones(setting.sizes.heads))

    def of_heads(self, u: Tensor, y: Tensor) -> Tensor:
        return y * self.head_scale[:, None, None]


class CosineAttention(Attention):
    """Logits g_h cos(q, k) in place of q k^T / sqrt(d_h): g_h, a learnt scalar of each query head, is stored as its logarithm,
    starts at `start`, and acts as min(g_h, `limit`). q and k are brought to length 1 in at least float32; a row of zeros stays.

    The scaling's factor on 1/sqrt(d_h) has nothing to act on: a cosine does not grow with the width.
    Source: Liu et al. 2021 (Swin-v2), arXiv 2111.09883, section 3.2, and its code: start = 10, limit = 100. `start=null` is
    log2(L^2 - L), L the context, of Henry et al. 2020, arXiv 2010.04245, section 3, whose g is one for all heads of a layer,
    not held as a logarithm, without a limit, and whose L is the 97.5th percentile of the lengths in the training text.
    """

    bounded = True

    def __init__(self, setting: Setting, *, start: float | None = 10.0, limit: float | None = 100.0) -> None:
        super().__init__(setting)
        if start is None:
            length = setting.sizes.context
            if length < 3:
                raise ValueError(f"attention.start=null is log2(L^2 - L): it needs model.context >= 3, found {length}")
            start = log2(length**2 - length)
        if start <= 0 or (limit is not None and limit < start):
            raise ValueError(f"attention.start must be > 0 and at most attention.limit={limit}, found {start:g}")
        self.scale, self.limit = 1.0, None if limit is None else log(limit)
        self.log_scale = nn.Parameter(torch.full((setting.sizes.heads,), log(start)))

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.log_scale if self.limit is None else self.log_scale.clamp(max=self.limit)
        unit = _unit(q)
        scaled = unit * log_scale.exp().to(unit.dtype)[:, None, None]
        return self.rotate(scaled.to(q.dtype)), self.rotate(_unit(k).to(k.dtype))


def _unit(x: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(CLOSE_TO_ZERO)


class GatedAttention(Attention):
    """F(u) = W_o concat_h(y_h * sigmoid(W_h u)): a gate of each head, read from what the branch is given, on what the head gives.

    `each=feature`: a number for each feature of a head, W (dim, dim); `each=head`: one for the head, W (heads, dim). W is
    drawn as a gate (`model/init.py`), so that the gates start around 1/2.
    Source: Qiu et al. 2025, arXiv 2505.06708, section 2.2, the position after the attention (G1), both granularities.
    """

    def __init__(self, setting: Setting, *, each: Literal["feature", "head"] = "feature") -> None:
        super().__init__(setting)
        sizes = setting.sizes
        width = sizes.dim if each == "feature" else sizes.heads
        # a gate of a whole head counts as often as it is used, as a shared key does
        self.head_gate = setting.linear(sizes.dim, width, "gate", sizes.bias, sizes.dim // width)
        self.heads = sizes.heads

    def of_heads(self, u: Tensor, y: Tensor) -> Tensor:
        gate = torch.sigmoid(self.head_gate(u))
        return y * gate.view(*gate.shape[:-1], self.heads, -1).transpose(1, 2)


class ValueResidualAttention(Attention):
    """The values of layer l > 1 are lambda_1 V_1 + lambda_2 V_l, V_1 those of the first layer, V_l its own.

    `first` and `own` are lambda_1 and lambda_2; `learnt` makes them two scalars of each layer, which start there.
    Source: Zhou et al. 2024 (ResFormer), arXiv 2410.17897, section 3; 0.5 and 0.5 are those of the released code.
    """

    carries = True

    def __init__(self, setting: Setting, *, first: float = 0.5, own: float = 0.5, learnt: bool = False) -> None:
        super().__init__(setting)
        self.is_first = setting.site.layer == 1
        self.first, self.own = (
            nn.Parameter(torch.tensor(float(c))) if learnt and not self.is_first else float(c) for c in (first, own)
        )

    def forward(self, u: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = self.project(u)
        if self.is_first:
            return self.answer(u, q, k, v), v
        return self.answer(u, q, k, self.first * carried + self.own * v), carried
