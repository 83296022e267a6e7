"""StableAdamW and Muon against their equations, written out here a tensor at a time in float64; the guard; checkpoints."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from model.inventory import inventory
from tests.conftest import network
from tests.training.test_resume import broken_off, go_on
from tests.training.test_run import steps
from training.optim import muon, stable_adamw

EXTRAS = ["norm=layernorm", "model.bias=true", "position=learned", "residual=learned_scalars", "ffn=swiglu"]
EITHER = pytest.mark.parametrize("make", [stable_adamw, muon])


def gradients(model, steps: int) -> list[dict[str, Tensor]]:
    """Such that RMS(g / sqrt(v)) goes beyond 1 for some tensors and steps: each has its own size in each step."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            name: torch.randn(p.shape, generator=draw, dtype=p.dtype) * 10 ** torch.randn((), generator=draw).item()
            for name, p in model.named_parameters()
        }
        for _ in range(steps)
    ]


def train(model, optimizer, given: list[dict[str, Tensor]]) -> None:
    for gradient in given:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name].clone()
        optimizer.step()


def numbers(model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def decay_of(model, weight_decay: float, norm_decay: float) -> dict[str, float]:
    by_kind = {"matrix": weight_decay, "norm": norm_decay}
    return {entry.name: by_kind.get(entry.kind, 0.0) for entry in inventory(model)}


def adamw_by_hand(
    theta: Tensor, given: list[Tensor], *, lr: float, decay: float, clipped: bool, betas=(0.9, 0.95), eps: float = 1e-8
) -> tuple[Tensor, list[float]]:
    """(theta after all steps, RMS of each)."""
    m, v, seen = torch.zeros_like(theta), torch.zeros_like(theta), []
    for t, g in enumerate(given, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        seen.append(math.sqrt((g * g / v_hat.clamp(min=eps * eps)).mean().item()))
        eta = lr / max(1.0, seen[-1]) if clipped else lr
        theta = theta - eta * (m_hat / (v_hat.sqrt() + eps) + decay * theta)
    return theta, seen


def test_stable_adamw_equals_its_equations():
    """Ten float64 steps on numbers up to 1: 1e-12."""
    model = network(*EXTRAS).double()
    before, decay, given = numbers(model), decay_of(model, 0.1, 0.05), gradients(model, 10)
    train(model, stable_adamw(model, lr=0.02, weight_decay=0.1, norm_decay=0.05), given)
    clipped = 0
    for name, parameter in model.named_parameters():
        series = [gradient[name] for gradient in given]
        expected, rms = adamw_by_hand(before[name], series, lr=0.02, decay=decay[name], clipped=True)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12, msg=name)
        clipped += sum(value > 1.01 for value in rms)
    assert clipped > 20


def test_the_clipping_is_never_by_less_than_eps():
    """Gradients of 1e-12 are below eps^2 in v: RMS counts them as small, and the step is AdamW's."""
    model = network("model.depth=1").double()
    start = model.head.norm.gain.detach().clone()
    given = [{name: torch.full_like(p, size) for name, p in model.named_parameters()} for size in (1e-13, 1e-12)]
    train(model, stable_adamw(model, lr=0.1, weight_decay=0.0), given)
    series = [gradient["head.norm.gain"] for gradient in given]
    assert torch.equal(model.head.norm.gain, adamw_by_hand(start, series, lr=0.1, decay=0.0, clipped=False)[0])


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, steps).T
    x = x / (x.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = 3.4445 * x - 4.7750 * s @ x + 2.0315 * s @ s @ x
    return x


@pytest.mark.parametrize("nesterov, match_rms, adam_lr", [(True, True, None), (False, False, 0.003)])
def test_muon_equals_its_equations(nesterov: bool, match_rms: bool, adam_lr: float | None):
    """The matrices of the blocks; and AdamW for the rest, the head among them. Five steps of five cubic products: 1e-9."""
    model = network(*EXTRAS, "model.kv_heads=1").double()
    before, decay, given = numbers(model), decay_of(model, 0.1, 0.05), gradients(model, 5)
    knobs = {"nesterov": nesterov, "match_rms": match_rms, "adam_lr": adam_lr, "weight_decay": 0.1, "norm_decay": 0.05}
    train(model, muon(model, lr=0.02, momentum=0.9, **knobs), given)
    hidden = {entry.name for entry in inventory(model) if entry.kind == "matrix" and entry.layer}
    shapes = {tuple(before[name].shape) for name in hidden}
    assert len(hidden) == 2 * 7 and {(16, 16), (8, 16), (48, 16), (16, 48)} == shapes
    for name, parameter in model.named_parameters():
        series, expected = [gradient[name] for gradient in given], before[name]
        if name not in hidden:
            lr = 0.02 if adam_lr is None else adam_lr
            expected, _ = adamw_by_hand(expected, series, lr=lr, decay=decay[name], clipped=False)
        else:
            total, (rows, columns) = torch.zeros_like(expected), expected.shape
            scale = 0.2 * math.sqrt(max(rows, columns)) if match_rms else math.sqrt(max(1, rows / columns))
            for g in series:
                total = 0.9 * total + 0.1 * g
                o = newton_schulz(0.9 * total + 0.1 * g if nesterov else total)
                expected = expected - 0.02 * (scale * o + 0.1 * expected)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9, msg=name)


def test_muon_moves_orthogonally_and_as_far_as_adamw():
    """All singular values of an update between 0.5 and 1.3 times lr s (the five steps bring them there, not to 1), so that
    its RMS is about 0.2 lr whatever the shape."""
    model = network("model.dim=64")
    before, (given,) = numbers(model), gradients(model, 1)
    train(model, muon(model, lr=0.01, weight_decay=0.0), [given])
    for entry in inventory(model):
        if entry.kind == "matrix" and entry.layer:
            move = (before[entry.name] - entry.parameter.detach()) / 0.01
            values = torch.linalg.svdvals(move) / (0.2 * max(move.shape) ** 0.5)
            assert values.median() > 0.5 and values.max() < 1.3, entry.name
            assert 0.14 < move.square().mean().sqrt() < 0.26, entry.name


def test_matrices_are_orthogonalised_a_part_at_a_time_as_together(monkeypatch):
    ends = []
    for together in (1, 600, 2**24):
        monkeypatch.setattr("training.muon.TOGETHER", together)
        model = network("model.depth=3").double()
        train(model, muon(model), gradients(model, 2))
        ends.append(numbers(model))
    for end in ends[1:]:
        for name, value in end.items():
            torch.testing.assert_close(value, ends[0][name], rtol=1e-12, atol=1e-12)


@pytest.mark.case("G13", "L11")
@EITHER
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_not_finite_moves_nothing(make, first: bool):
    """Neither weights nor states, bit by bit, the first step's or a later one's; what follows is as if it had not been."""
    ends = []
    for bad in (False, True):
        model = network(*EXTRAS)
        optimizer, given = make(model, lr=0.02), gradients(model, 4)
        poison = {name: torch.full_like(gradient, torch.nan) for name, gradient in given[0].items()}
        for index, gradient in enumerate(given):
            if bad and index == (0 if first else 2):
                before = numbers(model)
                optimizer.found_inf = torch.ones(())
                train(model, optimizer, [poison])
                assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            optimizer.found_inf = torch.zeros(())
            train(model, optimizer, [gradient])
        ends.append(numbers(model))
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@EITHER
def test_a_checkpoint_holds_all_of_the_state(make):
    models = [network(*EXTRAS) for _ in range(2)]
    given = gradients(models[0], 6)
    optimizers = [make(model, lr=0.02) for model in models]
    train(models[0], optimizers[0], given[:3])
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # as a schedule does, which finds the groups of both parts
        train(model, optimizer, given[3:])
    for one, other in zip(*(numbers(model).values() for model in models), strict=True):
        assert torch.equal(one, other)


@EITHER
def test_every_parameter_moves_at_its_groups_rate(make):
    """A rate of 0 in all groups holds everything still."""
    model = network(*EXTRAS)
    optimizer = make(model, lr=0.02)
    before, given = numbers(model), gradients(model, 2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, given[:1])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    train(model, optimizer, given[1:])
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "words",
    [pytest.param(["optimizer=stable_adamw"], marks=pytest.mark.slow), ["optimizer=muon", "optimizer.adam_lr=3e-4"]],
)
def test_a_run_that_was_interrupted_goes_on_as_unbroken(run, monkeypatch, words: list[str]):
    """Weights, states, and the learning rate of each group, which differ here."""
    words = [*words, "steps=16", "log_every=1", "val_every=8", "schedule.warmup=4", "picture=false"]
    unbroken, summary = run(*words)
    assert summary["final_loss"] < steps(unbroken)[0]["loss"]
    broken = broken_off(run, monkeypatch, 6, *words)
    resumed, _ = go_on(run, broken, *words)
    assert resumed == unbroken


@pytest.mark.slow
def test_muons_groups_keep_their_rates_in_a_resume_with_others(run, monkeypatch):
    """By force: each group has its own of the new config, and no one number for all."""
    from training import run as run_module

    words = ["optimizer=muon", "schedule=constant", "schedule.warmup=0", "steps=6", "val_every=3", "picture=false"]
    summary = broken_off(run, monkeypatch, 3, *words)
    seen, original = [], run_module._trainer

    class Look(run_module.pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append({("momentum" in group, group["lr"]) for group in trainer.optimizers[0].param_groups})

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Look()], **k))
        go_on(run, summary, *words, "optimizer.lr=2e-3", "optimizer.adam_lr=5e-4", "resume_force=true")
    assert seen == [{(True, 2e-3), (False, 5e-4)}] * 3
