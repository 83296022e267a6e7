"""The training loss."""

from torch import Tensor, nn


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: windows int64 (batch, context + 1), each position predicts the next."""
    loss: Tensor = model(windows[:, :-1], windows[:, 1:])
    return loss
