"""A factor of the block equation: constant, learnt, or computed anew in each forward pass."""

from typing import Any

import torch
from torch import Tensor, nn


class Computed(nn.Module):
    """A coefficient that is a function of parameters or buffers: `forward` gives a scalar, or one number a feature."""

    def forward(self) -> Tensor:
        raise NotImplementedError


Coefficient = float | nn.Parameter | Computed


def times(c: Any, x: Any) -> Any:
    """c x; a constant 1 costs nothing."""
    if isinstance(c, float) and c == 1.0:
        return x
    return (c() if isinstance(c, Computed) else c) * x


def number(coefficient: Coefficient) -> float:
    """A coefficient as it stands; of one number a feature their mean."""
    if isinstance(coefficient, float | int):
        return coefficient
    with torch.no_grad():
        return (coefficient() if isinstance(coefficient, Computed) else coefficient).mean().item()


class Scaled(Computed):
    """factor * c, c learnt or computed."""

    def __init__(self, factor: float, inner: nn.Parameter | Computed) -> None:
        super().__init__()
        self.factor, self.inner = factor, inner

    def forward(self) -> Tensor:
        product: Tensor = times(self.inner, self.factor)
        return product


def scaled(factor: float, c: Coefficient) -> Coefficient:
    """factor * c, at no cost where the factor is 1."""
    if factor == 1.0:
        return c
    return factor * c if isinstance(c, float) else Scaled(factor, c)


class Ramped(Computed):
    """A factor that follows the steps of a training: set from outside (`Transformer.at_step`), kept in checkpoints."""

    value: Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value))

    def forward(self) -> Tensor:
        return self.value
