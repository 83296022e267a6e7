"""What is measured of activations: each a pure function of tensors, worked in float64 and left on the device as a scalar.

In float64, since a stream of 1e20, which float32 holds, has a square that it does not.
"""

from math import sqrt

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float64; float32 on a device that has no other."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def mean_square(x: Tensor) -> Tensor:
    """mean(x^2) over all elements; its root is the RMS."""
    return wide(x).square().mean()


def token_cosine(x: Tensor) -> Tensor:
    """The mean of cos(x_s, x_t) over all pairs s != t of tokens of one sequence: x is (batch, time, dim).

    From sum_{s != t} u_s . u_t = ||sum_t u_t||^2 - sum_t ||u_t||^2, u_t = x_t / ||x_t||, in time * dim operations. A row
    of zeros has cosine 0 with every other; nan where there is one token only. 1 is rank collapse (Noci et al. 2022, arXiv
    2206.03126).
    """
    rows = wide(x)
    u = rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    time = u.shape[-2]
    off_diagonal = u.sum(-2).square().sum(-1) - u.square().sum((-2, -1))
    return (off_diagonal / u.new_tensor(time * (time - 1))).mean()


def attention_logits(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """scale q_h k_h^T, scale = 1/sqrt(d_h) unless given, -inf where a key lies behind its query: Vaswani et al. 2017, arXiv
    1706.03762, eq. 1.

    q is (batch, heads, time, d_h), k the same or with fewer heads, each then shared by heads / kv_heads queries; the
    result (batch, heads, time, time), in at least float32.
    """
    q, k = (part if part.dtype == torch.float64 else part.float() for part in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ k.transpose(-2, -1) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
    return logits.masked_fill(future, -torch.inf)


def attention_entropy(logits: Tensor) -> Tensor:
    """mean over batch, heads and queries of -sum_k p_k ln p_k, p = softmax(logits), in nats: 0 is one key alone, and
    mean_t ln t an even look at the past. Its collapse goes with divergence (Zhai et al. 2023, arXiv 2303.06296)."""
    return wide(torch.special.entr(torch.softmax(logits, -1)).sum(-1)).mean()


def effective_gain(name: str, parameter: Tensor) -> Tensor:
    """What a norm multiplies by: its `gain`, or 1 + w for a zero-centred `weight`; `name` is the parameter's."""
    return 1 + parameter if name.rpartition(".")[2] == "weight" else parameter
