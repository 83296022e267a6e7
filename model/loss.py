"""The training loss."""

from torch import Tensor, nn
from torch.nn import functional as F


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: windows int64 (batch, context + 1), each position predicts the next."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
