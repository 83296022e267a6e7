"""Where in the network a step stopped being finite."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from model.execution import eagerly
from model.transformer import Transformer
from stability.gradients import GradientNorms


@dataclass(frozen=True)
class Place:
    """`layer` counts from 1 and is None outside the blocks; `parameter` is a name inside the layer (`ffn.down.weight`) or,
    outside, in the whole network (`head.weight`), and None where what went wrong has no parameter of its own."""

    layer: int | None
    parameter: str | None

    def __str__(self) -> str:
        layer = f"layer {self.layer}" if self.layer else ""
        return f"{layer} ({self.parameter})" if layer and self.parameter else layer or self.parameter or "the network"

    @classmethod
    def of(cls, name: str) -> "Place":
        """From the name of a parameter or a module of `Transformer`."""
        first, _, rest = name.partition(".")
        if first != "blocks":
            return cls(None, name)
        number, _, inner = rest.partition(".")
        return cls(int(number) + 1, inner.replace(".function.", ".") or None)


def first_bad_place(
    model: Transformer, windows: Iterable[Tensor], gradients: GradientNorms, norms: np.ndarray
) -> Place | None:
    """Of the step's windows, run again (a skipped step has left the weights as they were): the first module that makes of
    finite inputs an output that is not, by its parameter that is not finite or else its own; if there is none, the
    parameter nearest the output whose gradient is not finite. None where neither is found. Leaves running statistics and
    the generators of CPU and CUDA as it finds them.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), eagerly(model):
            for tokens in windows:
                if (bad := _first_bad(model, tokens[:, :-1])) is not None:
                    return bad
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    entry = gradients.last_bad(norms)
    return Place.of(entry.name) if entry else None


def _first_bad(model: Transformer, tokens: Tensor) -> Place | None:
    found: list[Place] = []  # in the order of the computation, what is inside a module before the module

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and not _finite(output) and all(map(_finite, inputs)):
            # what is called inside it has been looked at before: what is left is its own or is never called
            bad = next((leaf for leaf, tensor in module.named_parameters() if not _finite(tensor)), None)
            leaf = bad or next((leaf for leaf, _ in module.named_parameters(recurse=False)), None)
            found.append(Place.of(f"{name}.{leaf}" if name else leaf) if leaf else Place(Place.of(name).layer, None))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(look, name)).remove)
        model(tokens)
    return found[0] if found else None


def _finite(value: Any) -> bool:
    """Of a tensor, or of all tensors of a state."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
