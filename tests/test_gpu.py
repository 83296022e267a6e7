"""What only a CUDA device can show: `python -m pytest -m gpu`, a minute in all."""

import warnings
from functools import partial

import pytest
import torch

from conf.help import choices
from tests.conftest import network
from training import device as machine
from training.optim import adamw, sgd
from training.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def losses(records) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def test_gpu_runs_in_bf16_where_it_is_made_for_it(run):
    records, summary = run("steps=60", "optimizer.lr=1e-2")
    assert summary["code"] == 0 and len(losses(records)) == 60
    if torch.cuda.get_device_capability() >= (8, 0):
        assert machine.precision("auto", "cuda") == "bf16-mixed"
    assert summary["peak_memory_bytes"] == torch.cuda.max_memory_allocated()


def test_gpu_in_float32_equals_the_cpu(run, monkeypatch):
    """The same draws and windows: after 5 steps float32 sums in another order differ by some 1e-5."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu, _ = run("steps=5", "precision=fp32")
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    cpu, _ = run("steps=5", "precision=fp32")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-4)


@pytest.mark.case("N07")
@pytest.mark.parametrize("norm", [name for name in choices("norm") if name != "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_norms_equal_the_cpu_and_are_dispatched_to_fused_kernels(norm: str, dtype: torch.dtype):
    module = network(f"norm={norm}", "model.dim=64").head.norm
    x = torch.randn(4, 32, 64).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Cannot dispatch to fused implementation"
        on_gpu = module.cuda()(x.cuda()).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(on_gpu, module.cpu()(x), rtol=tolerance, atol=tolerance)


@pytest.mark.case("G13")
@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9)])
def test_gpu_skips_a_step_that_is_not_finite_on_the_device(make):
    model = network().cuda()
    optimizer = make(model, lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_gpu_probes_leave_the_run_alone_and_see_no_future(run, precision: str):
    """CUDA adds up the embedding's gradient in no fixed order: a few steps differ by some 1e-5, in bfloat16 by 1e-2."""
    words = ["steps=6", "log_every=4", f"precision={precision}", "model.dropout=0.1"]
    plain, _ = run(*words)
    watched, _ = run(*words, "probe_every=2")
    assert losses(watched) == pytest.approx(losses(plain), rel=1e-4 if precision == "fp32" else 2e-2)
    probes = [record for record in watched if "probe" in record]
    assert [record["step"] for record in probes] == [0, 2, 4, 6]
    for record in probes:
        assert record["probe"]["future_leak"] == 0 and "nonfinite" not in record
        assert record["step"] == 0 or 0 < record["probe"]["model_update"] < 1


def test_gpu_the_peak_of_memory_is_that_of_a_run_without_probes(run):
    """To what the allocator rounds: a probe holds the logits of attention in float64, and copies of all matrices."""
    words = ["steps=6", "model.depth=4", "model.dim=128", "model.context=64", "batch=32", "accumulate=2", "val_every=0"]
    plain = run(*words)[1]["peak_memory_bytes"]
    for every in (1, 3, 100):
        assert run(*words, f"probe_every={every}")[1]["peak_memory_bytes"] == pytest.approx(plain, rel=0.02)


@pytest.mark.case("W07")
def test_gpu_measures_clips_and_guards_without_synchronising(run, monkeypatch):
    """Between two log steps whatever fetched a number from the device would raise, in the task and in the recorder."""
    original, guarded = Task.configure_gradient_clipping, []

    def under_guard(task, *args, **words):
        step = task.trainer.global_step + 1
        if step < 3 or task.recorder._is_log_step(step):
            return original(task, *args, **words)
        torch.cuda.set_sync_debug_mode("error")
        try:
            guarded.append(step)
            return original(task, *args, **words)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Task, "configure_gradient_clipping", under_guard)
    _, summary = run("steps=12", "log_every=5")
    assert summary["code"] == 0
    assert guarded == [3, 4, 6, 7, 8, 9, 11]
