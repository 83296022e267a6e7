"""What an initialisation learns from one forward pass: Admin's weights of the skips."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from model.coefficient import number
from model.stream import Stream


@torch.no_grad()
def profile_(enters: nn.Module, streams: Sequence[Stream], run: Callable[[], object]) -> None:
    """Set alpha of each of `streams`, in their order, to w_i: w_1 = 1, w_i^2 = Var[x_0] + sum_{j < i} Var[f_j].

    `run` is a forward pass of the network, `enters` the module whose output is x_0, f_j what branch j adds. A variance is
    taken over all numbers of a tensor. Source: Liu et al. 2020 (Admin), arXiv 2004.08249, section 4: profiling with w = 1,
    then w_i from the branches before. That x_0 counts, and w_1 = 1, is as in the authors' code, which however sets each w
    within the pass.
    """
    variances: list[Tensor] = []

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        variances.append(output.double().var(correction=0))

    with ExitStack() as hooks:
        for module in (enters, *(stream.norm_out for stream in streams)):
            hooks.callback(module.register_forward_hook(note).remove)
        run()
    # what a branch adds is its answer times beta; ramps are whole meanwhile
    weights = [1.0, *(number(stream.beta) ** 2 for stream in streams)]
    added = torch.stack(variances) * torch.tensor(weights, dtype=torch.float64, device=variances[0].device)
    for stream, square in zip(streams[1:], added.cumsum(0)[1:], strict=False):
        assert isinstance(stream.alpha, nn.Parameter)
        stream.alpha.fill_(square.sqrt().item())
