"""Muon for the matrices of the blocks, AdamW for everything else: one optimizer."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

QUINTIC = 3.4445, -4.7750, 2.0315
TOGETHER = 2**24  # elements of equal matrices that are worked on at a time: 64 MiB in float32


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """About U V^T of each matrix x = U S V^T, (..., rows, columns) to the same, by `steps` of X <- a X + (b A + c A^2) X with
    A = X X^T, from X = x / (||x||_F + 1e-7). It brings singular values between 0.7 and 1.2, not to 1: a is as large as that
    allows, so that small ones grow fastest. Of an x that has all but vanished, ||x||_F well below 1e-7, less is left.

    In bfloat16 on a device, where it is stable and fast, in x's own precision on a CPU.
    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (blog and code).
    """
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    y = x if x.device.type == "cpu" else x.bfloat16()
    y = y.mT if tall else y
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


class Muon(Optimizer):
    """B <- mu B + (1 - mu) G, O = orthogonal(mu B + (1 - mu) G), or of B without `nesterov`,
    W <- W - lr (s O + lambda W), W of (rows, columns).

    s = 0.2 sqrt(max(rows, columns)) with `match_rms`, the RMS of AdamW's updates, so that its lr and decay do for Muon too
    (Liu et al. 2025, Moonlight, arXiv 2502.16982, eq. 4); else sqrt(max(1, rows / columns)), Jordan's. `matrices` and
    `others` are torch's parameter groups; the others go to torch's fused AdamW, which has these very groups and states,
    so that a schedule and a checkpoint see one optimizer.

    torch.optim.Muon is not used: it would decay weights, and take in the gradient, of a step that is not finite.
    With `found_inf` = 1 nothing moves here, and nothing is asked of the host. Equal matrices are worked on together.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        match_rms: bool,
        adam_lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.nesterov, self.ns_steps, self.match_rms = nesterov, ns_steps, match_rms
        self._adamw = AdamW(others, lr=adam_lr, betas=betas, eps=eps, fused=True)
        with_momentum = [group | {"momentum": momentum} for group in matrices]
        super().__init__([*with_momentum, *self._adamw.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        self._adamw.param_groups = [group for group in self.param_groups if "betas" in group]
        self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        for group in self.param_groups:
            if "momentum" in group:
                for parameters in _alike([p for p in group["params"] if p.grad is not None]):
                    self._move(parameters, group)
        return loss

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape, stacked: (matrices, rows, columns)."""
        lr, mu, (rows, columns) = group["lr"], group["momentum"], parameters[0].shape
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        kept = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        before = torch.stack(kept)
        skipped = torch.zeros((), device=before.device) if self.found_inf is None else self.found_inf.to(before.device)
        gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
        gradient = torch.where(skipped > 0, 0.0, gradient)
        averaged = torch.where(skipped > 0, before, before.lerp(gradient, 1 - mu))
        move = orthogonal(gradient.lerp(averaged, mu) if self.nesterov else averaged, self.ns_steps)
        scale = 0.2 * max(rows, columns) ** 0.5 if self.match_rms else max(1.0, rows / columns) ** 0.5
        taken = (1 - skipped).to(before.dtype)
        torch._foreach_copy_(kept, list(averaged.unbind()))
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"] * taken)
        torch._foreach_sub_(parameters, list((lr * scale * taken * move).unbind()))


def _alike(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one shape, as many at a time as make `TOGETHER` elements, at least one."""
    shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        shapes[parameter.shape].append(parameter)
    for shape, equal in shapes.items():
        size = max(1, TOGETHER // shape.numel())
        yield from (equal[start : start + size] for start in range(0, len(equal), size))
