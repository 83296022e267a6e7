"""Forward and backward pass of a micro-batch as two CUDA graphs: recorded once, then launched in one call each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.execution import Execution
from model.loss import next_token_loss
from model.transformer import Transformer


class MicroBatch(nn.Module):
    """windows -> loss. What is recorded is one module whose parameters are the network's; the network itself stays as it is, so
    that validation, probes and the search for a bad step call it eagerly."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        return next_token_loss(self.model, windows)


def check(device: str, execution: Execution) -> None:
    """ValueError, one line, where nothing can be recorded."""
    check_device(device)
    check_execution(execution)


def check_device(device: str) -> None:
    """ValueError off CUDA."""
    if device != "cuda":
        raise ValueError(f"trainer.cuda_graphs=true needs a CUDA device; found {device}: leave it out")


def check_execution(execution: Execution) -> None:
    """ValueError where activations are computed again: that restores the generator's state, which cannot be read while a graph
    is recorded."""
    if execution.recompute:
        raise ValueError(
            "trainer.cuda_graphs=true cannot record activations that are computed again: say model.checkpointing=none, or "
            "leave cuda_graphs out"
        )


def recorded(model: Transformer, windows: Tensor, *, bf16: bool) -> Callable[[Tensor], Tensor]:
    """windows -> loss with the gradients of `next_token_loss(model, windows)`, for windows of this shape, on their device.

    torch's `make_graphed_callables` runs three warm-up passes and records, all on a stream of its own: what is allocated on
    first use is allocated by then. It takes about four eager steps, for 1,000 layers some seconds, and the memory of a
    step's activations and gradients, which stays reserved for the graphs.

    - Record before anything else of the process uses the device: a thread that pins memory would break it off. The weights may
      be loaded afterwards, in place; the graphs read them, and the windows, where they lie.
    - The warm-up's draws and running statistics are undone. In a replay dropout draws on from where the generator of the
      device stands, and moves it, so that the draws are those of eager steps, and a checkpoint holds what it needs.
    - Autocast's cache of cast weights is off, since a cast made outside a graph would not be made again inside; each weight is
      cast where it is used. Replays run no Python, so that Lightning's own autocast around them does nothing.
    - The loss and the gradients that come back are views of buffers that the next replay overwrites. Whoever keeps the loss
      must copy it. A gradient becomes `.grad` itself where that is None, which is right for one micro-batch a step; for more,
      each parameter needs a `.grad` of its own to add to (`zero_gradients`).
    - Lightning divides the loss by `accumulate` and calls backward on the quotient: the graph takes the gradient of the loss as
      its input. A step that is skipped leaves the weights alone, in place, as eager ones.
    - The recorded pass keeps autograd's leaves alive, on the stream of the recording: they are made to wait for it on the
      device, of which torch would warn.
    """
    device = windows.device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cuda = [device] if device.type == "cuda" else []
    micro_batch = MicroBatch(model)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with (
        torch.random.fork_rng(cuda),
        torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False),
    ):
        torch.cuda.make_graphed_callables(micro_batch, (windows.clone(),))  # puts the replay in place of its forward
    for buffer, before in buffers:
        buffer.copy_(before)
    return micro_batch.__call__  # no module to whoever keeps it, who would have the network twice


def zero_gradients(model: nn.Module) -> None:
    """A `.grad` of zeros for each parameter, in memory of its own, so that every micro-batch is added to it."""
    parameters = list(model.parameters())
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])
