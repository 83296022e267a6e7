"""Where a token stands in its sequence: two verbs, `embed` (added to the stream once) and `rotate` (queries, keys)."""

import torch
from torch import Tensor, nn


class NoPosition(nn.Module):
    """Nothing: the causal mask alone tells the order (Haviv et al. 2022, arXiv 2203.16634). The base of the others."""

    terms = 0  # how many embeddings it adds to the token's

    def __init__(self, dim: int, head_dim: int, context: int) -> None:
        super().__init__()

    def embed(self, x: Tensor) -> Tensor:
        return x

    def rotate(self, q: Tensor) -> Tensor:
        return q


class LearnedPosition(NoPosition):
    """x_t + p_t, p a learnt table of shape (context, dim): Radford et al. 2018 (GPT)."""

    terms = 1

    def __init__(self, dim: int, head_dim: int, context: int) -> None:
        super().__init__(dim, head_dim, context)
        self.weight = nn.Parameter(torch.empty(context, dim))

    def embed(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Rotary(NoPosition):
    """The pair (q_i, q_{i + h/2}) of a head of width h turned by the angle t * base^(-2i/h), worked in float32.

    Source: Su et al. 2021 (RoFormer), arXiv 2104.09864, eq. 15, with the halves paired as in GPT-NeoX and Llama's
    released weights.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, head_dim: int, context: int, *, base: float = 10_000.0) -> None:
        super().__init__(dim, head_dim, context)
        if base <= 0:
            raise ValueError(f"position.base must be > 0, found {base}")
        if head_dim % 2:
            raise ValueError(
                f"position=rotary needs an even width per head, found model.dim / model.heads = {head_dim}"
            )
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def rotate(self, q: Tensor) -> Tensor:
        cos, sin = self.cos[: q.shape[-2]], self.sin[: q.shape[-2]]
        first, second = q.chunk(2, dim=-1)
        return (q * cos + torch.cat((-second, first), dim=-1) * sin).to(q.dtype)
