"""Causal multi-head attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.cap import capped
from model.linear import Linear
from model.qk_clip import QKClip
from model.setting import Setting
from model.sizes import QKNorm


class Attention(nn.Module):
    """F(u) = W_o concat_h softmax(q_h k_h^T / sqrt(d_h) + causal mask) v_h, with q, k, v = W_q u, W_k u, W_v u.

    u and F(u) are (batch, time, dim). `kv_heads` < `heads` shares each key-value head among heads / kv_heads query
    heads (Ainslie et al. 2023, arXiv 2305.13245). `qk_norm` puts the run's norm on queries and keys before the
    rotation: `head` over the width of a head, one gain for all heads (Qwen3, Gemma 3), `full` over the whole
    projection before it is split (OLMo 2, arXiv 2501.00656). Of a placement's places two are here: `qkv`, a norm on each head's
    q, k and v (HybridNorm, arXiv 2503.04598), and `inner`, one on the heads' outputs before W_o (Sub-LN, arXiv 2210.06423).

    With `logit_cap` c the scores z become c tanh(z / c) before the mask (Gemma 2: 50), at the price of the fast kernels, which
    have none: all scores are held. `qk_clip` is the tau of `model/qk_clip.py`, a bound on the scores before a cap. 0: neither.
    Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 1.
    """

    def __init__(self, setting: Setting, *, logit_cap: float = 0.0, qk_clip: float = 0.0) -> None:
        super().__init__()
        for knob, value in (("logit_cap", logit_cap), ("qk_clip", qk_clip)):
            if value < 0:
                raise ValueError(f"attention.{knob} must be >= 0 (0 = none), found {value}")
        sizes, linear = setting.sizes, setting.linear
        self.logit_cap = logit_cap
        self.head_dim, self.dropout, self.rotate = sizes.head_dim, sizes.dropout, setting.rotate
        self.scale = setting.score_scale / sizes.head_dim**0.5
        dim, shared, kv_dim = sizes.dim, sizes.heads // sizes.groups, sizes.head_dim * sizes.groups
        self.q = linear(dim, dim, "score", sizes.bias)
        self.k = linear(dim, kv_dim, "score", sizes.bias, shared)
        self.v = linear(dim, kv_dim, "carry", sizes.bias, shared)
        self.o = linear(dim, dim, "write", sizes.bias)

        def norm_if(kind: QKNorm, width: int) -> nn.Module:
            return setting.norm(width) if sizes.qk_norm == kind else nn.Identity()

        def norm_of_head() -> nn.Module:
            return setting.norm_at("qkv", self.head_dim) if "qkv" in setting.places else norm_if("head", self.head_dim)

        self.full_norm_q, self.full_norm_k = norm_if("full", dim), norm_if("full", kv_dim)
        self.head_norm_q, self.head_norm_k = norm_of_head(), norm_of_head()
        self.head_norm_v = setting.norm_at("qkv", self.head_dim)
        self.inner_norm = setting.norm_at("inner", dim)
        self.clip = self._clip(sizes.heads, sizes.groups, qk_clip) if qk_clip else None

    def forward(self, u: Tensor) -> Tensor:
        return self.answer(u, *self.project(u))

    def project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as they leave the norms of the heads, (batch, heads or kv_heads, time, head_dim)."""
        q = self.head_norm_q(self._split(self.full_norm_q(self.q(u))))
        k = self.head_norm_k(self._split(self.full_norm_k(self.k(u))))
        return q, k, self.head_norm_v(self._split(self.v(u)))

    def answer(self, u: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """F(u), once it is projected."""
        q, k = self.compared(q, k)
        if self.clip is not None and self.training:
            self.clip(q, k)
        y = self.of_heads(u, self.attend(q, k, v))
        y = self.o(self.inner_norm(y.transpose(1, 2).flatten(2)))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as they leave the norms of the heads to those whose product, times `scale`, is the attention logit."""
        return self.rotate(q), self.rotate(k)

    def of_heads(self, u: Tensor, y: Tensor) -> Tensor:
        """What each head gives, (batch, heads, time, head_dim), to what it hands to W_o."""
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v, (batch, heads, time, head_dim), to what each head gives, (batch, heads, time, head_dim)."""
        p = self.dropout if self.training else 0.0
        if self.logit_cap:
            return self._attend_capped(q, k, v, p)
        grouped = q.shape[1] != k.shape[1]
        # is_causal masks with -inf: no finite constant that a score could fall below
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=p, scale=self.scale, enable_gqa=grouped
        )

    def _attend_capped(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = capped(self.scale * (q @ k.transpose(-2, -1)), self.logit_cap)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = F.dropout(scores.masked_fill(future, -torch.inf).softmax(-1), p)
        return weights.to(v.dtype) @ v

    def _clip(self, heads: int, groups: int, tau: float) -> QKClip:
        normed = any(
            not isinstance(norm, nn.Identity)
            for norm in (self.full_norm_q, self.full_norm_k, self.head_norm_q, self.head_norm_k)
        )
        if normed:
            raise ValueError(
                f"attention.qk_clip={tau:g} scales W_q and W_k, and a norm on queries and keys undoes that: say "
                "model.qk_norm=none with a placement that has none there, or attention.qk_clip=0"
            )
        if type(self.q) is not Linear:
            raise ValueError(
                f"attention.qk_clip={tau:g} scales W_q and W_k, which are not what is multiplied with: say linear=plain, or "
                "attention.qk_clip=0"
            )
        return QKClip(self.q, self.k, heads, groups, self.scale, tau)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, time, heads * head_dim) -> (batch, heads, time, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
