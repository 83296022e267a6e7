"""The factors on lr, decay and eps: each parameter has its own, a step takes them, a record and a resume know them."""

import json
from typing import Any

import pytest
import torch

from model.inventory import inventory
from tests.conftest import network
from tests.training.test_resume import broken_off, go_on
from training.optim import adamw, sgd

WIDE = ["model.dim=32", "model.depth=6"]  # m = 2 and M = 3 against base sizes 16 and 2
EXTRAS = ["norm=layernorm", "placement=peri", "model.bias=true", "position=learned", "residual=learned_scalars"]
BASE = ["scaling.base_dim=16", "scaling.base_head_dim=8"]
KNOBS: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.25, "norm_decay": 0.125, "eps": 0.0625}


def paces(model: Any, **more: Any) -> dict[str, tuple[float, float, float]]:
    """Parameter -> its group's lr, decay and eps, as shares of what the config says."""
    groups = adamw(model, **KNOBS | more).param_groups
    of = {id(p): group for group in groups for p in group["params"]}
    found = {}
    for entry in inventory(model):
        group, own = of[id(entry.parameter)], {"matrix": "weight_decay", "norm": "norm_decay"}.get(entry.kind)
        decay = group["weight_decay"] / KNOBS[own] if own else group["weight_decay"]
        found[entry.name] = (group["lr"] / KNOBS["lr"], decay, group["eps"] / KNOBS["eps"])
    return found


ROOT = 3**-0.5


@pytest.mark.parametrize(
    "words, matrix, rest_inside, ends",
    [
        (["scaling=none"], (1, 1, 1), (1, 1), (1, 1)),
        (["scaling=mup", *BASE], (1 / 2, 2, 1 / 2), (1, 1 / 2), (1, 1 / 2)),
        (["scaling=completep", *BASE], (1 / 2, 2, 1 / 6), (1, 1 / 6), (1, 1 / 2)),
        (["scaling=depth_mup", *BASE], (ROOT / 2, 2, ROOT / 2), (ROOT, ROOT / 2), (1, 1 / 2)),
    ],
)
def test_every_parameter_has_the_papers_factors(words: list[str], matrix: tuple, rest_inside: tuple, ends: tuple):
    """(lr, decay, eps) of hidden matrices; (lr, eps) of gains, biases and coefficients in the blocks; of embeddings, positions,
    the norms at the ends and the output matrix."""
    model = network(*WIDE, *EXTRAS, *words)
    kinds = {entry.name: entry.kind for entry in inventory(model)}
    for name, (lr, decay, eps) in paces(model).items():
        inside = name.startswith("blocks.")
        wanted = matrix if inside and kinds[name] == "matrix" else rest_inside if inside else ends
        assert (lr, eps) == pytest.approx((wanted[0], wanted[-1])), name
        decays = kinds[name] in ("matrix", "norm")
        assert decay == (wanted[1] if inside and kinds[name] == "matrix" else float(decays)), name


def test_without_a_scaling_the_groups_are_what_they_were():
    """Three, in the order in which their kinds come, each with the optimizer's own lr and eps: old checkpoints fit."""
    model = network(*EXTRAS)
    groups = adamw(model, **KNOBS).param_groups
    kinds = {id(entry.parameter): entry.kind for entry in inventory(model)}
    found = [(group["lr"], group["weight_decay"], group["eps"]) for group in groups]
    assert found == [(0.5, 0.0, 0.0625), (0.5, 0.125, 0.0625), (0.5, 0.25, 0.0625)]
    named = [{kinds[id(p)] for p in group["params"]} for group in groups]
    assert named == [{"embedding", "bias", "coefficient"}, {"norm"}, {"matrix"}]
    assert set(groups[0]) == set(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True).param_groups[0])


def test_the_groups_hang_on_no_number():
    """So that a resume that is forced to other base sizes finds them: at the base sizes too."""
    for words in (["scaling.base_dim=32", "scaling.base_depth=6"], ["scaling.base_dim=16", "scaling.base_depth=2"]):
        groups = adamw(network(*WIDE, "scaling=completep", *words)).param_groups
        assert [len(group["params"]) for group in groups] == [1, 36, 12, 1, 1]


@pytest.mark.parametrize("choice", ["mup", "completep"])
def test_a_step_takes_them(choice: str):
    """AdamW's first step, theta - lr (g / (|g| + eps) + lambda theta), with an eps of the gradient's size; float32 rounds a number
    of size 3 by 2e-7, and there are a few."""
    model = network(*WIDE, *EXTRAS, f"scaling={choice}", *BASE)
    optimizer, factors = adamw(model, **KNOBS), paces(model)
    before = {entry.name: entry.parameter.detach().clone() for entry in inventory(model)}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    for entry in inventory(model):
        lr, decay, eps = factors[entry.name]
        own = {"matrix": KNOBS["weight_decay"], "norm": KNOBS["norm_decay"]}.get(entry.kind, 0.0)
        theta = before[entry.name].double()
        wanted = theta - 0.5 * lr * (0.1 / (0.1 + 0.0625 * eps) + own * decay * theta)
        torch.testing.assert_close(entry.parameter.double(), wanted, rtol=0, atol=2e-6, msg=entry.name)


def test_update_blocks_still_moves_their_matrices_alone():
    model = network(*WIDE, *EXTRAS, "scaling=completep", *BASE)
    (group,) = adamw(model, **KNOBS, update="blocks").param_groups
    assert group["lr"] == 0.25 and len(group["params"]) == 6 * 6


@pytest.mark.parametrize("choice", ["mup", "depth_mup", "completep"])
def test_sgd_has_none_of_these_rules(run, tmp_path, choice: str):
    with pytest.raises(ValueError, match=r"scaling: .* use optimizer=adamw, or scaling=none"):
        sgd(network(f"scaling={choice}"))
    with pytest.raises(ValueError, match=r"scaling: .* use optimizer=adamw, or scaling=none"):
        run(f"scaling={choice}", "optimizer=sgd", directory=tmp_path / "refused")
    assert not (tmp_path / "refused" / "config.yaml").exists()


SCALED = ["scaling=depth_mup", "scaling.base_dim=4", "model.depth=3", "schedule.warmup=4", "optimizer.weight_decay=0.3"]


def test_what_is_recorded_is_the_schedules_rate(run):
    """Even where no parameter has it: the blocks' matrices are the only group."""
    records, _ = run(*SCALED, "steps=10", "schedule=constant", "optimizer.lr=0.01", "optimizer.update=blocks")
    rates = [record["lr"] for record in records if "lr" in record]
    assert rates == [0.01 * min(1, step / 5) for step in range(1, 11)]


@pytest.mark.parametrize("update", ["all", pytest.param("blocks", marks=pytest.mark.slow)])
def test_a_resume_is_exact(run, monkeypatch, update: str):
    words = [*SCALED, "model.dropout=0.1", "log_every=1", "steps=16", f"optimizer.update={update}", "picture=false"]
    unbroken, _ = run(*words)
    summary = broken_off(run, monkeypatch, 7, *words)
    resumed, _ = go_on(run, summary, *words)
    assert resumed == unbroken


def test_a_resume_takes_the_rates_of_the_config(run, monkeypatch):
    """Forced to another lr and other base sizes, each group has its factor of them, not what the checkpoint holds."""
    words = [*SCALED, "log_every=1", "steps=12", "schedule=constant", "picture=false"]
    summary = broken_off(run, monkeypatch, 6, *words)
    changed = [word for word in words if "base_dim" not in word]
    more = ["scaling.base_dim=8", "optimizer.lr=0.002", "resume_force=true"]
    _, again = go_on(run, summary, *changed, *more)
    state = torch.load(again["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    (optimizer,), (schedule,) = state["optimizer_states"], state["lr_schedulers"]
    factors = [1.0, 1.5**-0.5 / 2, 1.5**-0.5, 1.0, 1.0]  # embedding, the blocks' matrices and gains, head norm, head
    assert schedule["base_lrs"] == pytest.approx([0.002 * factor for factor in factors])
    assert [group["lr"] for group in optimizer["param_groups"]] == schedule["base_lrs"]
    assert optimizer["param_groups"][0]["eps"] == 0.5e-8


def test_another_scaling_is_another_optimizer(run, monkeypatch):
    words = ["steps=12", "picture=false", "model.depth=3"]
    summary = broken_off(run, monkeypatch, 6, *words)
    with pytest.raises(ValueError, match=r"scaling.* differ"):
        go_on(run, summary, *words, "scaling=mup", "resume_force=true")


def test_a_run_says_its_factors(run, capsys):
    _, summary = run(*WIDE, "scaling=completep", *BASE, "steps=2", "picture=false")
    said = capsys.readouterr().out
    assert "x <- x + beta F(N(x));  logits = c W N(x)" in said and "beta = 0.3333" in said
    assert "branches x 0.3333  scores x 0.7071  logits (c) x 0.5  std of matrices x 1  of the head x 1.414" in said
    assert "matrices x 0.5, 2, 0.1667  rest of the blocks x 1, 1, 0.1667  ends x 1, 1, 0.5" in said
    assert summary["equation"].endswith("logits = c W N(x)")
    assert json.loads((summary["directory"] / "summary.json").read_text())["axes"]["scaling"] == "completep"
