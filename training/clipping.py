"""How a gradient is kept small: by its norm, by the norm of each layer's, or by each entry's size."""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from stability.gradients import GradientNorms

Clip = Callable[[GradientNorms, Tensor, Tensor, float], Tensor]
"""(The gradients, in place; the norm of each entry's; that of all; the bound c) -> the norm of what is left over that of what
was there, 1 where nothing is clipped: scalars on the device, which nothing waits for. All of these have it, so that it means
the same whatever clips; of a clipping by norm it is the factor on the gradient."""


def by_norm(gradients: GradientNorms, norms: Tensor, total: Tensor, bound: float) -> Tensor:
    """g <- g min(1, c / ||g||), g the gradient of all parameters: Pascanu et al. 2013, arXiv 1211.5063, algorithm 1. Its
    direction stays."""
    clip_grads_with_norm_([entry.parameter for entry in gradients.entries], bound, total)
    return (bound / (total + 1e-6)).clamp(max=1.0)  # the same factor


def by_layer(gradients: GradientNorms, norms: Tensor, total: Tensor, bound: float) -> Tensor:
    """g_l <- g_l min(1, c / ||g_l||), g_l the gradient of one block, of the embeddings or of the head. Its direction stays in
    each layer, while their shares change."""
    # the inventory's order: embeddings (0), blocks, head (0)
    layers = [list(layer) for _, layer in groupby(gradients.entries, key=lambda entry: entry.layer)]
    found = torch._foreach_norm(torch.split(norms, [len(layer) for layer in layers]))
    for layer, norm in zip(layers, found, strict=True):
        clip_grads_with_norm_([entry.parameter for entry in layer], bound, norm)
    before = torch.stack(found)
    return _share(before, before * (bound / (before + 1e-6)).clamp(max=1.0))


def by_value(gradients: GradientNorms, norms: Tensor, total: Tensor, bound: float) -> Tensor:
    """g_i <- min(c, max(-c, g_i)), each entry of its own (Mikolov's, by Pascanu et al., section 3.2). Its
    direction turns."""
    clip_grad_value_([entry.parameter for entry in gradients.entries], bound)
    return _share(norms, gradients.measure())


CLIPS: dict[str, Clip] = {"norm": by_norm, "layer": by_layer, "value": by_value}


def _share(before: Tensor, after: Tensor) -> Tensor:
    """||after|| / ||before||, exactly 1 where they are the same, zeros too."""
    return torch.nan_to_num(torch.linalg.vector_norm(after) / torch.linalg.vector_norm(before), nan=1.0)
