"""In which layer a step stopped being finite."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from model.transformer import Transformer
from stability.gradients import GradientNorms


def first_bad_layer(
    model: Transformer, windows: Iterable[Tensor], gradients: GradientNorms, norms: np.ndarray
) -> int | None:
    """The first layer whose output is not finite on the step's windows (a skipped step has left the weights as they
    were, so that it happens again); if all are finite, the layer nearest the output whose gradient is not. None where
    it was the embedding or the head. Leaves generators and running statistics as it finds them.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            for tokens in windows:
                layer = _first_bad(model, tokens[:, :-1])
                if layer is not None:
                    return layer or None
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    entry = gradients.last_bad(norms)
    return (entry.layer or None) if entry else None


def _first_bad(model: Transformer, tokens: Tensor) -> int | None:
    """0 for the embedding, a layer's number, or None where all are finite."""
    x = model.embed(tokens)
    if not torch.isfinite(x).all():
        return 0
    for layer, block in enumerate(model.blocks, start=1):
        x = block(x)
        if not torch.isfinite(x).all():
            return layer
    return None
