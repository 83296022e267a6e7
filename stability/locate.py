"""In which layer a step stopped being finite."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from model.transformer import Transformer
from stability.gradients import GradientNorms


@torch.no_grad()
def first_bad_layer(
    model: Transformer, windows: Iterable[Tensor], gradients: GradientNorms, norms: np.ndarray
) -> int | None:
    """The first layer whose output is not finite on the step's windows (a skipped step has left the weights as they
    were, so it happens again); if all are finite, the layer nearest the output whose gradient is not. None where it
    was the embedding or the head.
    """
    for tokens in windows:
        x = model.embed(tokens[:, :-1])
        if not torch.isfinite(x).all():
            return None
        for layer, block in enumerate(model.blocks, start=1):
            x = block(x)
            if not torch.isfinite(x).all():
                return layer
    entry = gradients.last_bad(norms)
    return (entry.layer or None) if entry else None
