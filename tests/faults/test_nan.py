"""A layer that begins to answer nan, or to send back a gradient of nan, at a step drawn at random: the run names both, keeps
the last finite checkpoint, and a resume without the fault goes on from it."""

import math
import random

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.training.test_resume import go_on
from tests.training.test_run import steps
from training import run as run_module

DEPTH, STEPS = 5, 60


class Fault(Callback):
    """From step `first` on, in the output or the gradient of `module` of layer `layer`."""

    def __init__(self, layer: int, first: int, branch: str, what: str) -> None:
        self.layer, self.first, self.branch, self.what = layer, first, branch, what

    def on_train_start(self, trainer, module):
        place = getattr(module.model.blocks[self.layer - 1], self.branch).function

        def spoil(_, __, output):
            if module.model.training and trainer.global_step + 1 >= self.first:
                if self.what == "output":
                    return output * torch.nan
                if output.requires_grad:  # the forward pass stays finite: the gradient alone tells
                    output.register_hook(lambda gradient: gradient * torch.inf)
            return output

        place.register_forward_hook(spoil)


def trial(run, monkeypatch, seed: int) -> None:
    draw = random.Random(seed)
    layer, first = draw.randint(1, DEPTH), draw.randint(1, STEPS - 3)
    fault = Fault(layer, first, draw.choice(["attention", "ffn"]), draw.choice(["output", "gradient"]))
    words = [f"model.depth={DEPTH}", f"steps={STEPS}", "save_every=10", f"log_every={draw.choice([1, 7])}"]
    words += [f"placement={draw.choice(['pre', 'post'])}", f"accumulate={draw.choice([1, 2])}"]
    original = run_module._trainer
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, fault], **k))
        _, summary = run(*words)
    assert (summary["verdict"], summary["code"]) == ("diverged", 3)
    assert summary["first_bad_step"] == first, (fault.__dict__, summary["reason"])
    assert summary["first_bad_layer"] == layer, (fault.__dict__, summary["reason"])
    assert f"step {first}" in summary["reason"] and f"layer {layer}" in summary["reason"]
    kept = torch.load(summary["directory"] / "checkpoints/last.ckpt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())
    moments = kept["optimizer_states"][0]["state"].values()
    assert all(torch.isfinite(value).all() for state in moments for value in state.values())
    records, again = go_on(run, summary, *words)
    assert (again["code"], again["steps_done"]) == (0, STEPS)
    assert (again["first_bad_step"], again["first_bad_layer"]) == (first, layer)
    assert [record["step"] for record in steps(records)] == list(range(1, STEPS + 1))
    bad = [record["step"] for record in steps(records) if record.get("skipped")]
    assert bad == list(range(first, first + len(bad))) and len(bad) == again["skipped_steps"]
    assert all(math.isfinite(record["loss"]) for record in steps(records) if record["step"] not in bad)


@pytest.mark.parametrize("seed", range(3))
def test_nan_at_a_random_step_in_a_random_layer(run, monkeypatch, seed: int):
    trial(run, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nan_twenty_times(run, monkeypatch):
    for seed in range(3, 23):
        trial(run, monkeypatch, seed)
