"""How time and memory grow with depth and width, beside the arithmetic that a step needs and what the machine does of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.process import fresh
from benchmarks.ratios import Row, clock, reason
from benchmarks.step import Shape, network, training_step, windows
from model.loss import next_token_loss
from model.transformer import Transformer
from training import device as machine

DEPTHS = [Shape(depth=depth, dim=64, batch=4) for depth in (12, 50, 100, 200, 500, 1000)]
WIDTHS = [Shape(depth=12, dim=dim, batch=4) for dim in (128, 256, 512)]
SQUARE = 1024


@dataclass(frozen=True)
class Point:
    """One step (forward, backward, clipping, AdamW) of a shape. `flops`: floating-point operations of its matrix products,
    forward and backward, attention's over the whole square though the mask leaves half. `rate`, `own_rate`: operations
    per second of a product of 1,024 x 1,024 matrices, and of one of (tokens, dim) by (dim, dim)."""

    shape: Shape
    parameters: int
    threads: int
    seconds: float
    peak_memory: int
    flops: int
    rate: float
    own_rate: float

    @property
    def share(self) -> float:
        """Of the machine's rate, that the step reaches."""
        return self.flops / self.seconds / self.rate

    @property
    def own_share(self) -> float:
        """Of the rate at products of the step's own shape."""
        return self.flops / self.seconds / self.own_rate

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "own_share": self.own_share}


@dataclass(frozen=True)
class Scale:
    """A point of the table that has not been measured yet."""

    row: Row
    shape: Shape

    def take(self) -> Point | Row:
        try:
            return fresh(measure, self.shape)
        except Exception as error:
            return replace(self.row, failed=reason(error))


def points(quick: bool) -> list[Scale]:
    shapes = [replace(DEPTHS[0], depth=2)] if quick else [*DEPTHS, *WIDTHS]
    return [Scale(Row("scaling", str(shape), threads=shape.threads), shape) for shape in shapes]


def measure(shape: Shape, steps: int = 3) -> Point:
    """In a process that has done nothing else. The median of the steps after the first; the rates before and after them, the
    better of each."""
    torch.set_num_threads(shape.threads)
    model = network(shape)
    step = training_step(model, shape)
    step()
    rates = [(rate(SQUARE, SQUARE), rate(shape.tokens, shape.dim))]
    seconds = median(clock(step) for _ in range(steps))
    rates.append((rate(SQUARE, SQUARE), rate(shape.tokens, shape.dim)))
    memory = machine.peak_memory("cpu")
    size = sum(parameter.numel() for parameter in model.parameters())
    best, own = (max(of_kind) for of_kind in zip(*rates, strict=True))
    return Point(shape, size, shape.threads, seconds, memory, flops(model, windows(shape)), best, own)


def flops(model: Transformer, batch: Tensor) -> int:
    """Of the matrix products of one forward and backward pass. torch counts no fused attention on a CPU, hence the plain one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(next_token_loss(model, batch))
    return counter.get_total_flops()


def rate(rows: int, dim: int) -> float:
    """Operations per second of (rows, dim) by (dim, dim) in float32."""
    x, w = torch.randn(rows, dim), torch.randn(dim, dim)
    with torch.no_grad():
        calls = max(1, round(0.05 / clock(lambda: x @ w, 3)))
        return 2 * rows * dim * dim / min(clock(lambda: x @ w, calls) for _ in range(3))


def table(found: Sequence[Point]) -> Table:
    """A line for each shape."""
    drawn = Table(
        title="one step: time and memory, beside the matrix products that it needs and what the machine does of them",
        box=box.SIMPLE_HEAD,
    )
    drawn.add_column("step", overflow="fold")
    heads = ("parameters", "threads", "s a step", "tokens a s", "peak memory", "GFLOP a step")
    rates = (f"GFLOP/s, {SQUARE}^3", "share", "GFLOP/s, own shape", "share")
    for head in (*heads, *rates):
        drawn.add_column(head, justify="right")
    for one in found:
        drawn.add_row(
            str(one.shape),
            f"{one.parameters:,}",
            str(one.threads),
            f"{one.seconds:.3g}",
            f"{one.shape.tokens / one.seconds:,.0f}",
            f"{one.peak_memory / 2**30:.2f} GiB",
            f"{one.flops / 1e9:.3g}",
            f"{one.rate / 1e9:.0f}",
            f"{one.share:.1%}",
            f"{one.own_rate / 1e9:.0f}",
            f"{one.own_share:.1%}",
        )
    return drawn
