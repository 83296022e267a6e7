"""The rules that pick threads and precision, and what is said of the kernels."""

import json

import pytest
import torch

from tests.conftest import network
from training import device as machine


def test_threads_by_shape_and_cores_unless_asked(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.threads(3, tokens=10**6, dim=10**3) == 3
    assert machine.threads(None, tokens=10**6, dim=10**3) == 8
    assert machine.threads(None, tokens=511, dim=64) == 1
    assert machine.threads(None, tokens=1024, dim=48) == 3


def test_precision_by_device():
    assert machine.precision("auto", "cpu") == "32-true"
    assert machine.precision("auto", "mps") == "32-true"
    assert machine.precision("bf16-mixed", "cpu") == "bf16-mixed"
    with pytest.raises(ValueError, match="precision=fp64 does not exist on MPS"):
        machine.precision("fp64", "mps")


@pytest.mark.case("N07")
def test_the_record_says_which_kernels_ran(run):
    _, summary = run("steps=1")
    said = json.loads((summary["directory"] / "environment.json").read_text())["kernels"]
    assert said == {
        "norm": "autograd function of model/rms.py",
        "attention": "scaled_dot_product_attention: flash, math",
    }
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for device in ("cpu", "cuda"):
            assert machine.kernels(device, None)["attention"] == "scaled_dot_product_attention: math"
    for backend in ("flash", "math", "mem_efficient", "cudnn"):
        assert backend in machine.kernels("cuda", None)["attention"]


@pytest.mark.parametrize(
    "norm, cpu, cuda",
    [
        ("layernorm", "torch F.layer_norm", "torch F.layer_norm"),
        ("zero_rmsnorm", "autograd function of model/rms.py", "torch F.rms_norm"),
        ("group_rmsnorm", "autograd function of model/rms.py", "torch F.rms_norm"),
        ("partial_rmsnorm", "plain operations", "plain operations"),
        ("learnable_eps_rmsnorm", "plain operations", "plain operations"),
        ("batchnorm", "plain operations", "plain operations"),
    ],
)
def test_a_norm_names_its_kernel(norm: str, cpu: str, cuda: str):
    module = network(f"norm={norm}").head.norm
    assert [machine.kernels(device, module)["norm"] for device in ("cpu", "cuda")] == [cpu, cuda]
