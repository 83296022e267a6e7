"""What a network answers when something of it is changed: its weights by a step, or a token of the future."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model.inventory import Entry
from model.transformer import Transformer
from stability.metrics import mean_square, wide
from stability.records import Array
from stability.trace import as_found


def features(model: Transformer, windows: Sequence[Tensor], *, autocast: bool = False) -> list[Tensor]:
    """What the output matrix reads, (rows, context, dim) for each of `windows`, int64 (rows, context + 1): the stream after
    the last block, and the norm of the head if there is one.

    In evaluation mode: without dropout, and BatchNorm by its running statistics, which stay as they are. Leaves the model
    as it finds it, and sends nothing to the host.
    """
    with as_found(model, training=False), torch.no_grad():
        return [_features(model, batch[:, :-1], autocast) for batch in windows]


def _features(model: Transformer, tokens: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        x = model.head.norm(model.features(tokens))
    assert isinstance(x, Tensor)
    return x


def model_update(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """sqrt(mean((F(x, theta_s) - F(x, theta_{s-1}))^2)) over batch, time and features, F being `features` before and after
    a step: the size of the model update. A scalar on the device of `after`, in float64; `before` may be elsewhere.

    Source: Wang et al. 2022 (DeepNet), arXiv 2203.00555, sections 3 and 4, ||Delta F||, as an RMS here, which neither
    batch, context nor width scales.
    """
    squares = [mean_square(wide(new) - wide(old.to(new.device))) for old, new in zip(before, after, strict=True)]
    return torch.stack(squares).mean().sqrt()  # the micro-batches have as many tokens each


def matrices(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the blocks."""
    return [entry for entry in entries if entry.layer and entry.kind == "matrix"]


def update_ratio(entries: Sequence[Entry], before: Sequence[Tensor], depth: int) -> Array:
    """sqrt(sum ||W_s - W_{s-1}||^2 / sum ||W_{s-1}||^2) over the matrices W of each block, (depth,): how far a step has
    moved them, weight decay included, as a share of what they were. `before` holds W_{s-1} of each of `entries`, on
    whatever device."""
    now = [entry.parameter.detach() for entry in entries]
    was = [old.to(new.device) for old, new in zip(before, now, strict=True)]
    moved = torch._foreach_sub(now, was)
    norms = torch.stack([torch.linalg.vector_norm(wide(tensor)) for tensor in (*moved, *was)])
    new, old = norms.cpu().numpy().astype(np.float64).reshape(2, -1) ** 2
    layer = np.array([entry.layer - 1 for entry in entries])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.sqrt(np.bincount(layer, new, depth) / np.bincount(layer, old, depth))


def future_leak(model: Transformer, windows: Tensor, *, autocast: bool = False) -> Tensor:
    """max |logits' - logits| over all positions but the last, in training mode, when the last input token of each window is
    replaced by the next one of the vocabulary: a scalar on the device, 0 for a network that is causal.

    `windows` is int64 (rows, context + 1). Both passes draw the same dropout. The rows go through the blocks together, since
    BatchNorm's statistics are over all of them, and through the output matrix one by one: never are there more logits than
    those of one row. Leaves the model as it finds it.
    """
    tokens = windows[:, :-1]
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % model.head.weight.shape[0]
    streams, zero = [], model.head.weight.new_zeros(())
    for given in (tokens, other):
        with as_found(model), torch.no_grad():
            streams.append(_features(model, given, autocast)[:, :-1])
    leak = wide(zero)
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        for here, there in zip(*streams, strict=True):
            if len(here):  # a single position has none before it
                apart = wide(model.head.logits(there)) - wide(model.head.logits(here))
                leak = torch.maximum(leak, apart.abs_().max())
    return leak
