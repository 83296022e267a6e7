"""The rules that pick threads and precision, and what is said of the kernels."""

import json

import pytest
import torch

from training import device as machine


def test_threads_by_shape_and_cores_unless_asked(monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.threads(3, tokens=10**6, dim=10**3) == 3
    assert machine.threads(None, tokens=10**6, dim=10**3) == 8
    assert machine.threads(None, tokens=512, dim=64) == 1
    assert machine.threads(None, tokens=1024, dim=96) == 3


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
    assert said == machine.kernels("cpu")
    assert said["attention"] == "scaled_dot_product_attention: flash, math"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert machine.kernels("cpu")["attention"] == "scaled_dot_product_attention: math"
        assert machine.kernels("cuda")["attention"] == "scaled_dot_product_attention: math"
    for backend in ("flash", "math", "mem_efficient", "cudnn"):
        assert backend in machine.kernels("cuda")["attention"]
    assert machine.kernels("cuda")["norm"] == "layer norms: torch F.layer_norm; RMS norms: torch F.rms_norm"
    assert machine.kernels("cpu")["norm"].endswith("RMS norms: autograd function of model/rms.py")
