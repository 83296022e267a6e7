"""The optimizer and what decays."""

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:  # a bad knob is refused without loading torch
    from torch.nn import Parameter
    from torch.optim import AdamW

    from model.transformer import Transformer

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def adamw(
    model: "Transformer",
    *,
    lr: Positive = 1e-3,
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95],  # noqa: B006 (never changed)
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.1,
    norm_decay: NonNegative = 0.0,
) -> "AdamW":
    """theta <- theta - lr (m^ / (sqrt(v^) + eps) + lambda theta), lambda by what the parameter is.

    lambda is `weight_decay` for matrices, `norm_decay` for norm gains, and 0 for biases, embeddings (a tied matrix is
    one) and learnt coefficients. Qwen3-Next decays its zero-centred gains; decaying a plain gain pulls it to 0.
    Fused, since the fused kernel alone takes `found_inf` and skips a non-finite step on the device.
    Source: Loshchilov, Hutter 2017, arXiv 1711.05101, algorithm 2.
    """
    from torch.optim import AdamW

    from model.inventory import inventory

    decay = {"matrix": weight_decay, "norm": norm_decay, "other": 0.0}
    # a group each even where two decay alike, so that a resume with another decay finds the same groups
    groups: dict[str, list[Parameter]] = defaultdict(list)
    for entry in inventory(model):
        groups[entry.kind if entry.kind in decay else "other"].append(entry.parameter)
    listed = [{"params": parameters, "weight_decay": decay[kind]} for kind, parameters in groups.items()]
    return AdamW(listed, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)
