"""AdamW whose step is made shorter, a tensor at a time, where the second moment lags behind the gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW


class StableAdamW(AdamW):
    """eta = lr / max(1, RMS), RMS = sqrt(mean(g^2 / max(v^, eps^2))) over one tensor, v^ with g in it and corrected for its start;
    theta <- theta - eta (m^ / (sqrt(v^) + eps) + lambda theta).

    theta is what it was before torch's fused step, plus 1 / max(1, RMS) times what the step moved it: decay and update alike,
    as in the paper. Moments and their place in a checkpoint are AdamW's, and so is the guard: with `found_inf` = 1 the
    fused step moves nothing, and nothing of nothing is added.
    Source: Wortsman et al. 2023, arXiv 2304.13013, algorithm 2.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        groups = [(group, parameters) for group, parameters in groups if parameters]
        before = [torch._foreach_mul(parameters, 1.0) for _, parameters in groups]
        super().step()
        for (group, parameters), old in zip(groups, before, strict=True):
            shares = torch.reciprocal(self._rms(group, parameters).clamp(min=1.0))
            if self.found_inf is not None:  # its gradient is not finite, nor then its share
                shares = torch.where(self.found_inf.to(shares.device) > 0, 0.0, shares)
            torch._foreach_lerp_(old, parameters, list(shares.unbind()))
            torch._foreach_copy_(parameters, old)
        return loss

    def _rms(self, group: dict[str, Any], parameters: list[Tensor]) -> Tensor:
        """RMS of each tensor, shape (tensors,)."""
        states, beta = [self.state[parameter] for parameter in parameters], group["betas"][1]
        done = torch.stack([state["step"] for state in states]).to(parameters[0].dtype)
        second = torch._foreach_div([state["exp_avg_sq"] for state in states], list((1 - beta**done).unbind()))
        # an eps whose square float32 does not hold would make 0 / 0 of an entry that has had no gradient
        torch._foreach_clamp_min_(second, max(group["eps"] ** 2, torch.finfo(torch.float32).tiny))
        torch._foreach_sqrt_(second)
        ratio = torch._foreach_div([p.grad for p in parameters if p.grad is not None], second)
        norms = torch._foreach_norm(ratio)
        return torch.stack(torch._foreach_div(norms, [parameter.numel() ** 0.5 for parameter in parameters]))
