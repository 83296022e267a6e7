"""The rules that pick threads and precision."""

import pytest

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
