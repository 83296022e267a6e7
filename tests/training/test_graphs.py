"""Recorded micro-batches, with a stand-in for CUDA's recording that has its traps: warm-up passes that draw, an input, a loss
and gradients that lie in buffers which the next replay overwrites."""

import pytest
import torch
from torch import nn

from model.execution import Execution
from tests.conftest import network
from training import graphs
from training import run as run_module
from training.task import Task


def stand_in(module: nn.Module, sample: tuple[torch.Tensor, ...], num_warmup_iters: int = 3) -> nn.Module:
    """What torch.cuda.make_graphed_callables does, in eager steps on a CPU."""
    assert not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())  # as it asks
    parameters, eager = tuple(module.parameters()), module.forward
    (static,) = sample
    for _ in range(num_warmup_iters):
        found = torch.autograd.grad(eager(static), parameters)
    gradients = [torch.empty_like(gradient) for gradient in found]
    static_loss, held = torch.empty(()), []
    # the generator and autocast of the recording, not of the replay
    kept = {
        "enabled": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache_enabled": False,
    }

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, windows, *_):
            static.copy_(windows)
            with torch.enable_grad(), torch.autocast("cpu", **kept):
                held[:] = [eager(static)]
            static_loss.copy_(held[0].detach())
            return static_loss.detach()

        @staticmethod
        def backward(ctx, gradient):
            for kept_in, new in zip(gradients, torch.autograd.grad(held[0], parameters, gradient), strict=True):
                kept_in.copy_(new)
            return None, *(kept_in.detach() for kept_in in gradients)

    module.forward = lambda windows: Replay.apply(windows, *parameters)
    return module


@pytest.fixture
def on_cpu(monkeypatch):
    """Recording works here; the number of recordings so far."""
    made = []
    monkeypatch.setattr(graphs, "check_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "make_graphed_callables", lambda *args, **words: made.append(1) or stand_in(*args, **words)
    )
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["model.tied=true", "optimizer.update=blocks"],
        ["accumulate=2", "model.dropout=0.2", "probe_every=3", "precision=bf16-mixed"],
        ["accumulate=2", "norm=batchnorm", "allow_unstable=true", "residual=learned_scalars"],
    ],
    ids=" ".join,
)
def test_a_recorded_run_has_the_record_of_an_eager_one(run, on_cpu, words: list[str]):
    """Byte for byte: validations and probes between the steps and dropout's draws too. Were a gradient the graph's own buffer, the
    second micro-batch would overwrite the first."""
    words = ["steps=9", "log_every=2", "val_every=4", "picture=false", *words]
    _, eager = run(*words)
    _, recorded = run(*words, "trainer.cuda_graphs=true")
    metrics = [(one["directory"] / "metrics.jsonl").read_bytes() for one in (eager, recorded)]
    assert metrics[0] == metrics[1]
    assert on_cpu == [1]
    weights = [
        torch.load(one["directory"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for one in (eager, recorded)
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_recorded_run_skips_a_step_that_is_not_finite_and_finds_its_place(run, on_cpu, monkeypatch):
    original = Task.training_step

    def broken(task, *args):
        loss = original(task, *args)
        return loss * torch.nan if task.trainer.global_step == 3 else loss

    monkeypatch.setattr(Task, "training_step", broken)
    words = ["steps=6", "accumulate=2", "picture=false"]
    eager, _ = run(*words)
    recorded, _ = run(*words, "trainer.cuda_graphs=true")
    assert eager == recorded
    assert [record["step"] for record in recorded if record.get("skipped")] == [4]


def test_a_recorded_run_is_resumed_with_the_same_draws(run, on_cpu, monkeypatch):
    """Recorded anew, and after that the weights and the generator are those of the checkpoint."""
    words = [
        "steps=8",
        "save_every=4",
        "picture=false",
        "model.dropout=0.2",
        "accumulate=2",
        "trainer.cuda_graphs=true",
    ]
    unbroken, _ = run(*words)
    original = Task.training_step

    def broken(task, *args):
        if task.trainer.global_step == 5:
            raise ArithmeticError("as planned")
        return original(task, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "training_step", broken)
        parts, fit = [], run_module.fit
        patch.setattr(run_module, "fit", lambda built, *rest: (parts.append(built), fit(built, *rest))[1])
        with pytest.raises(RuntimeError, match="as planned"):
            run(*words)
    directory = parts[0].begin.directory
    resumed, _ = run(*words, f"resume={directory}", directory=directory)
    assert resumed == unbroken
    assert len(on_cpu) == 3


def test_the_network_is_no_part_of_what_is_recorded(on_cpu):
    """A module in the task's attribute would double the names in a checkpoint; draws, statistics and modes are as before."""
    model = network("norm=batchnorm", "model.dropout=0.5").train()
    windows = torch.randint(0, 11, (4, 9))
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    loss_of = graphs.recorded(model, windows, bf16=False)
    assert not isinstance(loss_of, nn.Module)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training and "forward" not in vars(model)


def test_graphs_are_refused_where_they_cannot_be(run, tmp_path):
    with pytest.raises(ValueError, match=r"^trainer.cuda_graphs=true needs a CUDA device; found cpu: leave it out$"):
        run("steps=1", "trainer.cuda_graphs=true", directory=tmp_path / "refused")
    assert not (tmp_path / "refused" / "overrides.yaml").exists()
    graphs.check_execution(Execution(recompute=0, compiled=4))
    with pytest.raises(
        ValueError, match=r"^trainer.cuda_graphs=true cannot record activations that are computed again"
    ):
        graphs.check_execution(Execution(recompute=4))


def test_recomputed_activations_are_refused_before_anything_is_written(run, on_cpu, tmp_path):
    with pytest.raises(ValueError, match=r"say model.checkpointing=none"):
        run("steps=1", "trainer.cuda_graphs=true", "model.checkpointing=groups", directory=tmp_path / "refused")
    assert not (tmp_path / "refused" / "overrides.yaml").exists()
