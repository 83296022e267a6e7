"""What a norm costs on a CPU, forward and backward, beside LayerNorm."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ratios import Measurement, Row, Target, Work, alternate
from benchmarks.step import cores
from model.norm import EPS, RMSNorm, ZeroRMSNorm

SHAPES = ((512, 64), (4096, 256), (4096, 768), (16384, 1024))
TARGETS = {(512, 64): Target("<=", 1.5)}
OTHERWISE = Target("<=", 1.25)
Make = Callable[[int, int, torch.dtype], Work]


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    """Each norm of normlab and torch's own RMSNorm over torch's LayerNorm. The targets are for ours in float32."""
    return [
        Measurement(
            Row("norms", f"{name}, {rows} x {dim}, {named}", "F.layer_norm", threads, target),
            partial(over_layer_norm, make, rows, dim, dtype, rounds=rounds if quick else 2 * rounds),
        )
        for rows, dim in (SHAPES[:1] if quick else SHAPES)
        for dtype, named in ((torch.float32, "float32"), (torch.bfloat16, "bf16, statistics in float32"))
        for threads in sorted({1, min(2, cores())})
        for name, make in NORMS.items()
        for target in [TARGETS.get((rows, dim), OTHERWISE) if dtype == torch.float32 and name != "F.rms_norm" else None]
    ]


def over_layer_norm(make: Make, rows: int, dim: int, dtype: torch.dtype, *, rounds: int) -> list[float]:
    return alternate(make(rows, dim, dtype), layer_norm(rows, dim, dtype), rounds=rounds, seconds=0.02)


def layer_norm(rows: int, dim: int, dtype: torch.dtype) -> Work:
    gain, bias = torch.ones(dim, requires_grad=True), torch.zeros(dim, requires_grad=True)
    return both_ways(lambda x: F.layer_norm(x.float(), (dim,), gain, bias, EPS).to(dtype), rows, dim, dtype)


def rms_norm(rows: int, dim: int, dtype: torch.dtype) -> Work:
    gain = torch.ones(dim, requires_grad=True)
    return both_ways(lambda x: F.rms_norm(x.float(), (dim,), gain, EPS).to(dtype), rows, dim, dtype)


def both_ways(norm: Callable[[Tensor], Tensor], rows: int, dim: int, dtype: torch.dtype) -> Work:
    """Forward and backward, to the input and to the norm's parameters, whose gradients add up."""
    x = torch.randn(rows, dim).to(dtype).requires_grad_()
    weight = torch.randn(rows, dim).to(dtype)

    def work() -> None:
        x.grad = None
        torch.autograd.backward(norm(x), weight)

    return work


NORMS: dict[str, Make] = {
    "RMSNorm": lambda rows, dim, dtype: both_ways(RMSNorm(dim), rows, dim, dtype),
    "ZeroRMSNorm": lambda rows, dim, dtype: both_ways(ZeroRMSNorm(dim), rows, dim, dtype),
    "F.rms_norm": rms_norm,
}
