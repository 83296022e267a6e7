"""What decays, for every norm, and by how much."""

import pytest
import torch
from torch import nn

from conf.help import choices
from model.inventory import inventory
from tests.conftest import network
from training.optim import adamw, sgd

EXTRAS = ["placement=peri", "model.qk_norm=full", "model.bias=true", "position=learned", "residual=learned_scalars"]


def decays(model, **knobs: float) -> dict[str, float]:
    groups = adamw(model, weight_decay=0.1, **knobs).param_groups
    of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    return {entry.name: of[id(entry.parameter)] for entry in inventory(model)}


@pytest.mark.case("N10 huggingface/transformers PR #35927")
@pytest.mark.parametrize("norm", choices("norm"))
def test_only_matrices_decay_and_gains_by_their_own_decay(norm: str):
    model = network(f"norm={norm}", *EXTRAS)
    kinds = {entry.name: entry.kind for entry in inventory(model)}
    for name, decay in decays(model).items():
        assert decay == (0.1 if kinds[name] == "matrix" else 0.0), name
    for name, decay in decays(model, norm_decay=0.3).items():
        assert decay == {"matrix": 0.1, "norm": 0.3}.get(kinds[name], 0.0), name


def test_every_knob_reaches_the_optimizer():
    optimizer = adamw(network("model.depth=1"), lr=0.5, betas=[0.7, 0.8], eps=1e-3)
    assert {key: optimizer.defaults[key] for key in ("lr", "betas", "eps")} == {
        "lr": 0.5,
        "betas": (0.7, 0.8),
        "eps": 1e-3,
    }


@pytest.mark.case("G15")
def test_a_tied_matrix_is_an_embedding():
    assert decays(network("model.tied=true"))["embed.token"] == 0.0


@pytest.mark.case("N10")
def test_published_decay(oracle):
    """1,000 steps of decay with a gradient of zero: w falls by (1 - lr decay)^1000, an excluded gain not at all."""
    case = oracle("oracle_weight_decay.json")
    for norm, leaf, plain in (
        ("rmsnorm", "gain", case["plain_gain_w"]),
        ("zero_rmsnorm", "weight", case["one_plus_w"]),
    ):
        for norm_decay in (0.0, case["weight_decay"]):
            model = network(f"norm={norm}", "model.depth=1", "model.dim=2", "model.heads=1")
            parameter = dict(model.named_parameters())[f"head.norm.{leaf}"]
            start = plain.get("start", plain.get("start_w"))
            nn.init.constant_(parameter, start)
            optimizer = adamw(model, lr=case["lr"], weight_decay=0.0, norm_decay=norm_decay)
            for _ in range(case["steps"]):
                parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
            end = plain.get("end_if_decayed", plain.get("end_w_if_decayed")) if norm_decay else start
            # each of 1,000 float32 products rounds by up to 6e-8
            assert parameter[0].item() == pytest.approx(end, rel=1000 * 6e-8)


@pytest.mark.case("N09")
def test_a_gain_moves_in_float32(oracle):
    """Pure bfloat16 cannot move a gain of 1 by 6e-4; our weights are float32 in every precision."""
    case = oracle("oracle_bf16_updates.json")
    model = network("model.depth=1")
    gain = model.head.norm.gain
    optimizer = adamw(model, lr=case["lr"], weight_decay=0.0)
    for _ in range(case["steps"]):
        gain.grad = torch.ones_like(gain)
        optimizer.step()
    assert gain.dtype == torch.float32
    assert 1 - gain[0].item() == pytest.approx(case["fp32_or_fp32_master"], rel=1e-3)


@pytest.mark.case("G13", "L11")
def test_a_step_that_is_not_finite_is_skipped_on_the_device():
    model = network("model.depth=1")
    optimizer = adamw(model, lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.found_inf = torch.zeros(())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


MOVED = ("q", "k", "v", "o", "up", "gate", "down")


def filled(model, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_update_blocks_moves_their_matrices_alone(make):
    """With decay on everything that can decay."""
    model = network("norm=layernorm", "ffn=swiglu", *EXTRAS)
    optimizer = make(model, lr=0.1, weight_decay=0.1, norm_decay=0.1, update="blocks")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    filled(model, 0.5)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moves = name.startswith("blocks.") and name.endswith(tuple(f".{matrix}.weight" for matrix in MOVED))
        assert torch.equal(parameter, before[name]) != moves, name


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_by_hand(momentum: float):
    """A skipped first step, then two: b = g, then mu g + g. In float32 theta = 1 rounds by 6e-8 a step."""
    model = network("model.depth=1")
    optimizer = sgd(model, lr=0.25, momentum=momentum, weight_decay=0.0)
    gain = model.head.norm.gain
    filled(model, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert gain.tolist() == [1.0] * 16
    optimizer.found_inf = torch.zeros(())
    for total in (1.0, 2.0 + momentum):
        filled(model, 0.5)
        optimizer.step()
        assert gain.tolist() == pytest.approx([1 - 0.25 * 0.5 * total] * 16, abs=2e-7)


def test_sgd_decays_what_adamw_does():
    model = network("norm=layernorm", *EXTRAS)
    optimizer = sgd(model, lr=0.5, weight_decay=0.2, norm_decay=0.1)
    before = {entry.name: entry.parameter.detach().clone() for entry in inventory(model)}
    filled(model, 0.0)
    optimizer.step()
    for entry in inventory(model):
        kept = {"matrix": 0.9, "norm": 0.95}.get(entry.kind, 1.0)
        assert torch.allclose(entry.parameter, kept * before[entry.name], rtol=1e-6), entry.name
