"""The gain that a norm starts with."""

from collections.abc import Iterator

import torch
from torch import nn

from model.norm import Norm


def _gains(norm: nn.Module) -> Iterator[tuple[nn.Parameter, float]]:
    """(A parameter, what is added to it to make it a gain): a plain `gain`, or a `weight` centred on zero."""
    for module in norm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Norm) and name in ("gain", "weight"):
                yield parameter, 1.0 if name == "weight" else 0.0


def has_gain(norm: nn.Module) -> bool:
    return any(True for _ in _gains(norm))


def scale_gain_(norm: nn.Module, factor: float) -> None:
    """Multiply the gain of a norm by `factor`: g <- factor g, or w <- factor (1 + w) - 1. Its bias stays."""
    with torch.no_grad():
        for parameter, centre in _gains(norm):
            parameter.copy_(factor * (centre + parameter) - centre)
