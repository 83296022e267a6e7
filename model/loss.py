"""The training loss."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: windows int64 (batch, context + 1), each position predicts the next."""
    loss: Tensor = model(windows[:, :-1], windows[:, 1:])
    return loss


def of_logits(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """-log p[target], p = exp(logits) / Z, of logits (tokens, vocab) and targets int64 (tokens,), in nats; its gradient is that
    of -log p[target] + z_loss log^2 Z.

    The value is the cross-entropy whatever z_loss is, so that runs with and without it compare. log Z is what the
    cross-entropy has made already: there is no second pass over the logits. Source: Chowdhery et al. 2022 (PaLM), arXiv
    2204.02311, section 5, with z_loss = 1e-4.
    """
    if not z_loss:
        return F.cross_entropy(logits, targets, reduction=reduction)
    each = F.cross_entropy(logits, targets, reduction="none")
    log_z = each + logits.gather(1, targets[:, None])[:, 0]
    slope = 2 * z_loss * log_z.detach()  # d(z_loss log^2 Z) / d log Z
    each = each + slope * (log_z - log_z.detach())
    return each.mean() if reduction == "mean" else each.sum()
