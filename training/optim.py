"""The optimizers: which parameters they move, and what decays."""

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:  # a bad knob is refused without loading torch
    from torch.nn import Parameter
    from torch.optim import SGD, AdamW

    from model.transformer import Transformer
    from training.muon import Muon
    from training.stable import StableAdamW

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Update = Literal["all", "blocks"]


def adamw(
    model: "Transformer",
    *,
    lr: Positive = 1e-3,
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95],  # noqa: B006 (never changed)
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.1,
    norm_decay: NonNegative = 0.0,
    update: Update = "all",
) -> "AdamW":
    """theta <- theta - lr (m^ / (sqrt(v^) + eps) + lambda theta), lambda and which theta as `groups` says.

    Fused, since the fused kernel alone takes `found_inf` and skips a non-finite step on the device.
    Source: Loshchilov, Hutter 2017, arXiv 1711.05101, algorithm 2.
    """
    from torch.optim import AdamW

    listed = groups(model, weight_decay=weight_decay, norm_decay=norm_decay, update=update, lr=lr, eps=eps)
    return AdamW(listed, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)


def stable_adamw(
    model: "Transformer",
    *,
    lr: Positive = 1e-3,
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95],  # noqa: B006 (never changed)
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.1,
    norm_decay: NonNegative = 0.0,
    update: Update = "all",
) -> "StableAdamW":
    """AdamW, each tensor's step divided by max(1, RMS of g / sqrt(v^)): it needs no clipping of the gradient (clip=0).

    Source: Wortsman et al. 2023, arXiv 2304.13013, algorithm 2; see `training/stable.py`.
    """
    from training.stable import StableAdamW

    listed = groups(model, weight_decay=weight_decay, norm_decay=norm_decay, update=update)
    return StableAdamW(listed, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)


def sgd(
    model: "Transformer",
    *,
    lr: Positive = 0.1,
    momentum: Beta = 0.0,
    weight_decay: NonNegative = 0.0,
    norm_decay: NonNegative = 0.0,
    update: Update = "all",
) -> "SGD":
    """b <- mu b + g + lambda theta, theta <- theta - lr b, b = 0 at the start; lambda and which theta as `groups` says.

    Fused for the same reason. Source: Sutskever et al. 2013 (ICML), eq. 1 and 2, in torch's form: lr multiplies b.
    """
    import torch
    from torch.optim import SGD

    listed = groups(model, weight_decay=weight_decay, norm_decay=norm_decay, update=update)
    optimizer = SGD(listed, lr=lr, momentum=momentum, fused=True)
    if momentum:  # torch takes memory as it is for b on the first step, and leaves it so where that is skipped
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def muon(
    model: "Transformer",
    *,
    lr: Positive = 1e-3,
    adam_lr: Positive | None = None,
    momentum: Beta = 0.95,
    nesterov: bool = True,
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5,
    match_rms: bool = True,
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95],  # noqa: B006 (never changed)
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.1,
    norm_decay: NonNegative = 0.0,
) -> "Muon":
    """Muon on the matrices of the blocks; AdamW with `adam_lr` (null = lr), `betas` and `eps` on embeddings, head, gains,
    biases and coefficients. Decay as `groups` says. The recorded learning rate is Muon's.

    match_rms=false is Jordan's own scale, for which lr is about 0.02 and adam_lr, then to be given, about 1e-3.
    Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (Moonlight), arXiv 2502.16982; see `training/muon.py`.
    """
    from model.inventory import inventory
    from training.muon import Muon

    hidden = {id(entry.parameter) for entry in inventory(model) if entry.layer and entry.kind == "matrix"}
    listed = groups(model, weight_decay=weight_decay, norm_decay=norm_decay, update="all")

    def of(inside: bool) -> list[dict[str, Any]]:
        parts = [group | {"params": [p for p in group["params"] if (id(p) in hidden) == inside]} for group in listed]
        return [part for part in parts if part["params"]]

    return Muon(
        of(True),
        of(False),
        lr=lr,
        adam_lr=lr if adam_lr is None else adam_lr,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        match_rms=match_rms,
        betas=(betas[0], betas[1]),
        eps=eps,
    )


def groups(
    model: "Transformer",
    *,
    weight_decay: float,
    norm_decay: float,
    update: Update,
    lr: float | None = None,
    eps: float | None = None,
) -> list[dict[str, Any]]:
    """torch's parameter groups: what is updated, and its decay lambda.

    lambda is `weight_decay` for matrices, `norm_decay` for norm gains, and 0 for biases, embeddings (a tied matrix is
    one) and learnt coefficients. Qwen3-Next decays its zero-centred gains; decaying a plain gain pulls it to 0.

    `update=blocks` leaves out all but the matrices of the blocks: embeddings, head, gains, biases and coefficients stay
    where they start, while their gradients are measured and clipped as ever. The theory of the model update moves these
    matrices alone: Wang et al. 2022 (DeepNet), arXiv 2203.00555, section 4.

    A scaling parts each of these by whether it is inside a block, and gives lambda, `lr` and `eps` its factors. They are
    Adam's: an optimizer that has none of its own names no lr, and ValueError says that the two do not go together.
    """
    from model.inventory import inventory

    scaling = model.scaling
    if scaling.paced and (lr is None or eps is None):
        raise ValueError(
            "scaling: its factors on lr, decay and eps are those of AdamW: use optimizer=adamw, or scaling=none"
        )
    decay = {"matrix": weight_decay, "norm": norm_decay, "other": 0.0}
    # a group each even where two decay alike, so that a resume with another decay finds the same groups
    found: dict[tuple[str, bool], list[Parameter]] = defaultdict(list)
    for entry in inventory(model):
        if update == "all" or (entry.layer and entry.kind == "matrix"):
            name = entry.kind if entry.kind in decay else "other"
            found[name, scaling.paced and entry.layer > 0].append(entry.parameter)
    listed = []
    for (kind, inside), parameters in found.items():
        pace = scaling.pace(kind, inside, model.sizes)
        own = {"lr": (lr, pace.lr), "weight_decay": (decay[kind], pace.decay), "eps": (eps, pace.eps)}
        listed.append({"params": parameters} | {k: v * factor for k, (v, factor) in own.items() if v is not None})
    return listed
