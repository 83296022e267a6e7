"""Causal multi-head attention."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from model.linear import Linear
from model.sizes import QKNorm, Sizes


class Attention(nn.Module):
    """F(u) = W_o concat_h softmax(q_h k_h^T / sqrt(d_h) + causal mask) v_h, with q, k, v = W_q u, W_k u, W_v u.

    u and F(u) are (batch, time, dim). `kv_heads` < `heads` shares each key-value head among heads / kv_heads query
    heads (Ainslie et al. 2023, arXiv 2305.13245). `qk_norm` puts the run's norm on queries and keys before the
    rotation: `head` over the width of a head, one gain for all heads (Qwen3, Gemma 3), `full` over the whole
    projection before it is split (OLMo 2, arXiv 2501.00656).
    Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 1.
    """

    def __init__(
        self, sizes: Sizes, norm: Callable[[int], nn.Module], rotate: Callable[[Tensor], Tensor] = lambda q: q
    ) -> None:
        super().__init__()
        self.head_dim, self.dropout, self.rotate = sizes.head_dim, sizes.dropout, rotate
        dim, shared, kv_dim = sizes.dim, sizes.heads // sizes.groups, sizes.head_dim * sizes.groups
        self.q = Linear(dim, dim, role="score", bias=sizes.bias)
        self.k = Linear(dim, kv_dim, role="score", bias=sizes.bias, repeats=shared)
        self.v = Linear(dim, kv_dim, role="carry", bias=sizes.bias, repeats=shared)
        self.o = Linear(dim, dim, role="write", bias=sizes.bias)

        def norm_if(kind: QKNorm, width: int) -> nn.Module:
            return norm(width) if sizes.qk_norm == kind else nn.Identity()

        self.full_norm_q, self.full_norm_k = norm_if("full", dim), norm_if("full", kv_dim)
        self.head_norm_q, self.head_norm_k = norm_if("head", self.head_dim), norm_if("head", self.head_dim)

    def forward(self, u: Tensor) -> Tensor:
        q = self.rotate(self.head_norm_q(self._split(self.full_norm_q(self.q(u)))))
        k = self.rotate(self.head_norm_k(self._split(self.full_norm_k(self.k(u)))))
        v = self._split(self.v(u))
        p = self.dropout if self.training else 0.0
        # is_causal masks with -inf: no finite constant that a score could fall below
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=q.shape[1] != k.shape[1])
        y = self.o(y.transpose(1, 2).flatten(2))
        return F.dropout(y, p) if p else y

    def _split(self, x: Tensor) -> Tensor:
        """(batch, time, heads * head_dim) -> (batch, heads, time, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
