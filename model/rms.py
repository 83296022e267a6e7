"""y = g x / RMS(x) on a CPU, with a derived backward: torch's own takes 3 to 10 times a layer norm there.

x and y are (..., d), g is (d,) or none (all ones), dy is the gradient of the loss by y. For a row x of d numbers

    r = (x.x / d + eps)^(-1/2),    y_j = g_j x_j r.

By the product rule, and since dr/dx_k = -r^3 x_k / d,

    dx_k = r g_k dy_k - x_k r^3 s / d,    s = sum_j dy_j g_j x_j,
    dg_j = sum over rows of dy_j x_j r.

A layer norm with mean m and deviation 1 / r is x -> g (x - m) r. Its backward kernel, which torch has on a CPU, gives the same
dg at m = 0, and

    dx_k = r g_k dy_k - x_k r^3 s / d - r (dy.g) / d,

the last term because a mean, unlike the 0 in its place, moves with x. So that kernel is run on m = 0 and our r, and
r (dy.g) / d, one number a row, is added back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """(..., d) to the same; `gain` is (d,) of the dtype of x, float32 or float64, or None for ones."""
    if torch.compiler.is_compiling():
        return reference(x, gain, eps)
    if x.is_cpu:
        return _RMSNorm.apply(x.contiguous(), gain, eps)  # type: ignore[no-untyped-call]
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def reference(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """The equation in plain operations: what a compiler fuses, and what is differentiated twice."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if gain is None else y * gain


def kernel(device: torch.device) -> str:
    """What computes an RMS norm on that device where nothing is compiled, for the record of a run."""
    return "autograd function of model/rms.py" if device.type == "cpu" else "torch F.rms_norm"


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = torch.addcmul(length.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, gain, r)
        ctx.eps = eps
        y = x * r
        return y if gain is None else y.mul_(gain)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, gain, r = ctx.saved_tensors
        needs_x, needs_gain, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph: r, kept as a number, would be taken for a constant
            wanted = [each for each, needed in ((x, needs_x), (gain, needs_gain)) if needed]
            found = iter(torch.autograd.grad(reference(x, gain, ctx.eps), wanted, dy, create_graph=True))
            return next(found) if needs_x else None, next(found) if needs_gain else None, None
        dy, d = dy.contiguous(), x.shape[-1]
        wants = [needs_x, needs_gain, False]  # of x, the gain and a bias
        dx, dg, _ = _layer_norm_backward(dy, x, [d], torch.zeros_like(r), r, gain, None, wants)
        if needs_x:
            along = dy.sum(-1, keepdim=True) if gain is None else torch.mv(dy.view(-1, d), gain).view_as(r)
            dx.add_(along.mul_(r), alpha=1 / d)
        return dx, dg, None
