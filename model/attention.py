"""Causal multi-head attention."""

from torch import Tensor, nn
from torch.nn import functional as F

from model.setting import Setting
from model.sizes import QKNorm


class Attention(nn.Module):
    """F(u) = W_o concat_h softmax(q_h k_h^T / sqrt(d_h) + causal mask) v_h, with q, k, v = W_q u, W_k u, W_v u.

    u and F(u) are (batch, time, dim). `kv_heads` < `heads` shares each key-value head among heads / kv_heads query
    heads (Ainslie et al. 2023, arXiv 2305.13245). `qk_norm` puts the run's norm on queries and keys before the
    rotation: `head` over the width of a head, one gain for all heads (Qwen3, Gemma 3), `full` over the whole
    projection before it is split (OLMo 2, arXiv 2501.00656). Of a placement's places two are here: `qkv`, a norm on each head's
    q, k and v (HybridNorm, arXiv 2503.04598), and `inner`, one on the heads' outputs before W_o (Sub-LN, arXiv 2210.06423).
    Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 1.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        sizes, linear = setting.sizes, setting.linear
        self.head_dim, self.dropout, self.rotate = sizes.head_dim, sizes.dropout, setting.rotate
        self.score_scale = setting.score_scale
        self.scale = self.score_scale / sizes.head_dim**0.5
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

    def forward(self, u: Tensor) -> Tensor:
        q = self.rotate(self.head_norm_q(self._split(self.full_norm_q(self.q(u)))))
        k = self.rotate(self.head_norm_k(self._split(self.full_norm_k(self.k(u)))))
        v = self.head_norm_v(self._split(self.v(u)))
        y = self.o(self.inner_norm(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        return F.dropout(y, self.dropout, self.training) if self.dropout else y

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v, (batch, heads, time, head_dim), to what each head gives, (batch, heads, time, head_dim)."""
        p = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        # is_causal masks with -inf: no finite constant that a score could fall below
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=p, scale=self.scale, enable_gqa=grouped
        )

    def _split(self, x: Tensor) -> Tensor:
        """(batch, time, heads * head_dim) -> (batch, heads, time, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
