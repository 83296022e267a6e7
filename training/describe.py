"""What is said before the first step: the equation, its constants, the initial matrices, the data, the machine."""

from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.tokens import Tokens
from model.block import Branch
from model.coefficient import Coefficient, number
from model.equation import equation
from model.init import std_of
from model.linear import Linear
from model.norm import Norm
from model.site import Site
from model.stream import Single
from model.transformer import Choices, Transformer
from stability.label import USUAL, named
from training import device as machine
from training.flops import flops_per_token
from training.schedule import Constant

SHOWN = (
    "norm",
    "placement",
    "residual",
    "stream",
    "ramp",
    "scaling",
    "init",
    "linear",
    "attention",
    "ffn",
    "position",
    "model",
    "data",
    "tokenizer",
    "optimizer",
    "schedule",
)
ON_STREAM = {"norm", "norm_both", "norm_in", "norm_sum"}  # norms whose input is float32 under bf16-mixed too


def describe(
    model: Transformer,
    choices: Choices,
    schedule: Constant,
    plain: dict[str, Any],
    axes: dict[str, str],
    tokens: Tokens,
    device: str,
    memory: str,
    directory: Path,
) -> tuple[str, dict[str, Any]]:
    """(The lines that a run prints when it starts, the facts that its summary repeats.)"""
    has_norm = any(isinstance(module, Norm) for module in model.modules())
    line = equation(choices, model.depth, has_norm=has_norm, cap=model.sizes.logit_cap, logits=model.head.scale)
    name = plain["name"] or " ".join(named(axes))
    facts = {
        "name": name,
        "depth": model.depth,
        "axes": axes,
        "equation": line,
        "unigram_entropy": tokens.unigram_entropy,
        "floor": tokens.floor,
        "flops_per_token": flops_per_token(model),
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    floor = f", true entropy {tokens.floor:.4f}" if tokens.floor is not None else ""
    rows = {
        "run": f"{name}  ->  {directory}",
        "choices": "  ".join(f"{axis}={axes[axis]}" for axis in SHOWN if axes[axis] != USUAL.get(axis)),
        "equation": line,
        "constants": _coefficients(model)
        + (f"  eps = {plain['norm']['eps']:g}" if has_norm and "eps" in plain["norm"] else ""),
        "initial std": _stds(model, choices),
        **_scaling(model, choices),
        "model": f"{size:,} parameters, depth {model.depth}, width {model.dim}, context {model.context}",
        "data": f"{tokens.name}, hash {tokens.hash}, vocabulary {tokens.vocab}, "
        f"unigram entropy {tokens.unigram_entropy:.4f} nats{floor}",
        "": "\n".join(tokens.notes),
        "note": "\n".join(_advice(model, schedule, plain, device)),
        "machine": _machine(device, plain, axes),
        "memory": memory,
    }
    width = max(map(len, rows)) + 2
    lines = [f"{key:<{width}}{part}" for key, text in rows.items() for part in text.splitlines()]
    return "\n".join(lines), facts


def _machine(device: str, plain: dict[str, Any], axes: dict[str, str]) -> str:
    devices, threads = plain["devices"] * plain["num_nodes"], f"{torch.get_num_threads()} CPU threads"
    several = (
        [f"{devices} x {device} ({axes['trainer'].upper()})", f"{threads} each"] if devices > 1 else [device, threads]
    )
    return f"{several[0]}, {machine.precision(plain['precision'], device)}, {several[1]}"


def closing(summary: dict[str, Any], directory: Path) -> str:
    """The lines that a run prints when it is over."""
    picture = directory / "report.png"  # not there where the disk was full
    where = f"picture: {picture}" if picture.is_file() else f"record: {directory}"
    val, best = summary["final_val_loss"], summary["best_val_loss"]
    losses = f"validation loss {val:.4f} (best {best:.4f})" if val is not None else "no validation since the start"
    speed = f", {summary['tokens_per_second']:,.0f} tokens/s" if summary["tokens_per_second"] else ""
    share = f", {100 * summary['mfu']:.1f} % of the peak (MFU)" if summary.get("mfu") else ""
    return (
        f"{summary['verdict']}: {summary['reason']}\n"
        f"{losses}, {summary['steps_done']} steps in {summary['wall_time_s']:.0f} s{speed}{share}\n"
        f"{where}"
    )


def _advice(model: Transformer, schedule: Constant, plain: dict[str, Any], device: str) -> Iterator[str]:
    """A line for what is allowed but known to fail, or to change nothing."""
    streams = [module.stream for module in model.modules() if isinstance(module, Branch)]
    post = all(isinstance(stream.norm_sum, Norm) and number(stream.alpha) == 1 for stream in streams)
    if post and type(model.stream) is Single and schedule.warmup_steps(plain["steps"]) == 0:
        yield "post-norm without warm-up seldom trains (Xiong et al. 2020, arXiv 2002.04745, section 3)"
    rounds = machine.precision(plain["precision"], device) == "bf16-mixed" and any(
        isinstance(module, Norm) and name.rpartition(".")[2] not in ON_STREAM for name, module in model.named_modules()
    )
    if plain["norm"].get("cast") == "before_gain" and not rounds:
        yield "norm.cast=before_gain changes nothing here, where every norm is given float32"


def _coefficients(model: Transformer) -> str:
    branches = [module for module in model.modules() if isinstance(module, Branch)]
    said = []
    for letter in ("alpha", "s", "beta"):
        values = [getattr(branch.stream, letter) for branch in branches]
        learnt = ", learnt" if _is_learnt(values[0]) else ""
        said.append(f"{letter} = {_span([number(value) for value in values])}{learnt}")
    return "  ".join(said)


def _is_learnt(value: Coefficient) -> bool:
    return isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters()))


def _stds(model: Transformer, choices: Choices) -> str:
    factor, stds = choices.scaling.matrix(model.sizes, choices.init), dict[str, list[float]]()
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear):
            stds.setdefault(f"{name.rpartition('.')[2]} ({module.role})", []).append(
                std_of(module, choices.init, factor)
            )
    return "  ".join(f"{name} {_span(values)}" for name, values in stds.items())


def _scaling(model: Transformer, choices: Choices) -> dict[str, str]:
    """The factors of a scaling, as rows; none for none."""
    scaling, sizes = model.scaling, model.sizes
    if not scaling.paced:
        return {}
    on = {
        "branches": scaling.branch(Site("attention", 1, sizes.depth)),
        "scores": scaling.scores(sizes),
        "logits (c)": scaling.logits(sizes),
        "std of matrices": scaling.matrix(sizes, choices.init),
        "of the head": scaling.head(sizes, choices.init),
    }
    paces = {
        "matrices": scaling.pace("matrix", True, sizes),
        "rest of the blocks": scaling.pace("norm", True, sizes),
        "ends": scaling.pace("embedding", False, sizes),
    }
    factors = "  ".join(f"{name} x {factor:.4g}" for name, factor in on.items())
    rates = "  ".join(f"{name} x {p.lr:.4g}, {p.decay:.4g}, {p.eps:.4g}" for name, p in paces.items())
    return {"scaling": factors, "lr, decay, eps": rates}


def _span(values: list[float]) -> str:
    """One number where all are equal, else the first and the last."""
    first, last = values[0], values[-1]
    return f"{first:.4g}" if all(isclose(value, first) for value in values) else f"{first:.4g} .. {last:.4g}"
