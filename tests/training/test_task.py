"""One call of the step's measuring, guarding and clipping, on gradients written by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.inventory import Entry
from stability.gradients import GradientNorms
from training.ranks import Ranks
from training.schedule import Constant
from training.signals import Signals
from training.task import Task


class Taken:
    """A recorder that keeps what it is given."""

    reason = None

    def step(self, step, lr, loss, norms, total, kept, asked):
        self.total, self.norms = total.item(), norms.tolist()


def clipped(gradient: list[float], clip: float, **more) -> tuple[Taken, nn.Parameter, torch.optim.AdamW]:
    """What is recorded, the parameter with the gradient that the optimizer is left with, and the optimizer."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(len(gradient)))
    model.weight.grad = torch.tensor(gradient)
    entries = [Entry("weight", model.weight, "ffn", "matrix", 1, "up")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    taken = Taken()
    words = {"run_id": "", "steps": 9, "accumulate": 1, "clip": clip, "ranks": Ranks(1, 1), "signals": Signals()} | more
    task = Task(model, optimizer, Constant(), GradientNorms(entries, 1), taken, **words)
    task._trainer = SimpleNamespace(global_step=0, should_stop=False)
    task._loss = torch.tensor(1.0)
    task.configure_gradient_clipping(optimizer)
    return taken, model.weight, optimizer


@pytest.mark.case("G02", "G03")
def test_published_clip(oracle):
    """The norm before clipping is what is recorded; the gradient after it is what the optimizer gets."""
    case = oracle("oracle_grad_norm.json")["clip_1.0"]
    taken, weight, _ = clipped([float(g) for g in case["grad"]], 1.0)
    assert taken.total == case["pre_clip_norm"] == taken.norms[0]
    assert weight.grad.tolist() == pytest.approx(case["post_clip_grad"], abs=case["tolerance"])
    assert weight.grad.norm().item() == pytest.approx(case["post_clip_norm"], abs=case["tolerance"])
    _, weight, _ = clipped([0.3, 0.4], 1.0)
    assert weight.grad.tolist() == pytest.approx([0.3, 0.4], rel=1e-6)  # below the threshold: left alone
    _, weight, _ = clipped([3.0, 4.0], 0.0)
    assert weight.grad.tolist() == [3.0, 4.0]  # 0 = off


@pytest.mark.case("L11 torch.nn.utils.clip_grad_norm_, own measurement", "G13")
def test_an_infinite_gradient_moves_no_weight(oracle):
    case = oracle("oracle_grad_norm.json")["inf_norm_and_clip"]
    _, weight, optimizer = clipped([float(g) for g in case["grad"]], 1.0)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.state[weight]["step"].item() == 0
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.0, 0.0]


def test_a_finite_gradient_moves_them():
    _, weight, optimizer = clipped([3.0, 4.0], 1.0)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 0.9], abs=2e-3)  # Adam's first step: lr, whatever the gradient
