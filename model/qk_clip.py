"""A bound on attention's scores that is kept by the weights: after a step, heads whose scores have grown beyond it."""

import torch
from torch import Tensor, nn

from model.linear import Linear

SCORES = 2**24  # at a time, of which the largest is looked for: 64 MiB in float32


class QKClip(nn.Module):
    """W_q,h <- sqrt(gamma_g) W_q,h and W_k,g <- sqrt(gamma_g) W_k,g after each step, gamma_g = min(1, tau / S_max,g), biases
    alike. S_max,g is the largest score s q_h k_g^T that a query could look at in the training passes of that step, over all its
    windows and over the heads h that share the key g; s is 1/sqrt(d_h) and the scaling's. Where each head has a key of its own
    (the paper's multi-head case) only the heads that exceed tau are touched.

    `largest`, (heads,), is of the passes since the last step; a step that is skipped, and what is no step, leaves it at -inf.
    The paper has no rule for a shared key but its multi-latent one, which is left alone; the largest score over its group is
    Megatron-LM's. Source: Kimi Team 2025 (Kimi K2), arXiv 2507.20534, section 2.1, algorithm 1, with tau = 100.
    """

    largest: Tensor

    def __init__(self, q: Linear, k: Linear, heads: int, groups: int, scale: float, tau: float) -> None:
        super().__init__()
        self._matrices = q, k  # of the attention, which names them
        self.groups, self.scale, self.tau = groups, scale, tau
        self.register_buffer("largest", torch.full((heads,), -torch.inf), persistent=False)

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor) -> None:
        """Look at q, (batch, heads, time, d_h), and k, (batch, groups, time, d_h), as they are multiplied."""
        _, heads, time, _ = q.shape
        future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
        k = k.repeat_interleave(heads // self.groups, 1)
        rows = max(1, SCORES // (heads * time**2))
        for some_q, some_k in zip(torch.split(q, rows), torch.split(k, rows), strict=True):
            scores = (some_q @ some_k.transpose(-2, -1)).masked_fill(future, -torch.inf)
            self.largest.copy_(torch.maximum(self.largest, self.scale * scores.amax((0, 2, 3))))

    def after_step(self) -> None:
        excess = self.largest.view(self.groups, -1).amax(1) / self.tau
        factor = excess.clamp_min(1.0).rsqrt()
        for linear in self._matrices:
            for parameter in (linear.weight, linear.bias):
                if parameter is not None:
                    rows = parameter.view(self.groups, -1)  # those of a group lie together
                    rows.mul_(factor[:, None])
        self.largest.fill_(-torch.inf)
