"""Whether activations are kept or computed again, and that a run so run is the same run."""

import json
import sys
from pathlib import Path

import pytest
import torch

from model import execution as execution_module
from model.execution import Execution, through
from tests.conftest import SMALL, network, plain
from training import device as machine
from training import memory
from training.memory import activations, execution, free_memory


def text(summary, name: str) -> str:
    return (summary["directory"] / name).read_text()


def settled(*words: str):
    """The config of `network(*words)`."""
    return plain(*SMALL, *words)


def chosen(*words: str, rows: int = 4):
    words = ("model.depth=16", *words)
    return execution(network(*words), settled(*words), rows=rows, device="cpu")


def test_activations_are_counted_by_hand():
    """Pre-norm: 16 tensors of the stream's size. What each norm is given and what it returns (4), q and k as rotated, v, what the
    heads return (4), and four times the width before and after GELU (8); and one number a row for each norm and each head.
    As many again for each window and each block; twice as much in float64; under bf16-mixed, half of what lies behind a matrix."""
    words = ["model.depth=3", "model.dim=64", "model.heads=4", "model.context=64"]
    stream, model = 64 * 64 * 4, network(*words)

    def found(rows: int, *more: str) -> float:
        return activations(model, settled(*words, *more), rows=rows, device="cpu") / stream

    each = found(2) - found(1)
    assert each == pytest.approx(3 * (16 + (2 + 4) / 64), rel=1e-3)
    assert found(5) == pytest.approx(5 * each, rel=0.01)
    assert found(2, "precision=fp64") - found(1, "precision=fp64") == pytest.approx(2 * each, rel=0.01)
    assert 0.5 * each < found(2, "precision=bf16-mixed") - found(1, "precision=bf16-mixed") < 0.8 * each


def test_counting_leaves_no_mark():
    model, state = network("model.dropout=0.5", "norm=batchnorm"), torch.get_rng_state()
    before = [buffer.clone() for buffer in model.buffers()]
    activations(model, settled(), rows=1, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


@pytest.mark.parametrize("share, recompute", [(0.4, 0), (0.6, 4)])
def test_auto_recomputes_what_would_take_over_half_of_the_free_memory(monkeypatch, share: float, recompute: int):
    """What is free once gradients and two moments are there; on a GPU the weights too."""
    model = network("model.depth=16")
    needed = activations(model, settled(), rows=4, device="cpu")
    state = 12 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda _: needed / share + state)
    how, words = chosen()
    assert how == Execution(recompute)
    assert words.endswith(
        "free: kept of one block in 4, the rest computed again" if recompute else "free: all are kept"
    )


def test_what_a_device_has_to_hold_is_its_own_part():
    model = network()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert memory.state_bytes(model, settled(), "cpu") == 3 * weights
    gpu = ["precision=bf16-mixed"]
    assert memory.state_bytes(model, settled(*gpu), "cuda") == 4 * weights
    assert memory.state_bytes(model, settled(*gpu, "trainer=fsdp", "devices=4"), "cuda") == weights
    assert memory.state_bytes(model, settled(*gpu, "devices=4"), "cuda") == 4 * weights
    assert memory.state_bytes(model, settled("precision=fp64"), "cpu") == 6 * weights


def test_checkpointing_is_as_asked_and_auto_keeps_where_no_one_knows_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: None)
    assert chosen()[0] == Execution()
    assert chosen("model.checkpointing=groups")[0] == Execution(4)
    monkeypatch.setattr(memory, "free_memory", lambda _: 1)
    assert chosen("model.checkpointing=none")[0] == Execution()
    assert chosen()[0] == Execution(4)


def test_running_statistics_are_not_moved_twice(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: 1)
    assert chosen("norm=batchnorm")[0] == Execution()
    with pytest.raises(ValueError, match=r"^model.checkpointing=groups would move .* use model.checkpointing=none"):
        chosen("norm=batchnorm", "model.checkpointing=groups")


def test_the_free_memory_of_this_machine():
    assert free_memory("mps") is None
    if sys.platform == "linux":
        assert 10**8 < free_memory("cpu") < 10**13


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_free_memory_of_a_control_group(monkeypatch, tmp_path):
    """Of the groups on the way to a process the one with the least; of what is used, files that were read are given back."""
    inside = Path("/proc/self/cgroup").read_text().partition("::")[2].strip().lstrip("/")
    for group, limit, used in ((tmp_path, "900", "500"), (tmp_path / inside, "max", "700")):
        group.mkdir(parents=True, exist_ok=True)
        if inside or group == tmp_path:
            for name, content in {"max": limit, "current": used, "stat": "anon 1\ninactive_file 30\n"}.items():
                (group / f"memory.{name}").write_text(content)
    if not inside:
        (tmp_path / "memory.max").write_text("900")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert free_memory("cpu") == (430 if inside else 230)


@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_compiling_needs_a_compiler(monkeypatch, name: str):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine, "which", lambda word: f"/usr/bin/{word}" if word == name else None)
    machine.check_compiler("cpu")
    monkeypatch.setattr(machine, "which", lambda word: None)
    with pytest.raises(ValueError, match=r"compile=true needs a C\+\+ compiler on a CPU, and finds none: install"):
        machine.check_compiler("cpu")
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="compile=true needs Triton"):
        machine.check_compiler("cuda")


def test_a_run_that_recomputes_is_the_same_run(run, capsys):
    """Its records byte for byte, with dropout, probes and a validation."""
    words = [
        "model.depth=9",
        "model.dropout=0.1",
        "steps=4",
        "log_every=2",
        "val_every=2",
        "probe_every=2",
        "picture=false",
    ]
    _, kept = run(*words, "model.checkpointing=none")
    _, again = run(*words, "model.checkpointing=groups")
    assert "kept of one block in 3, the rest computed again" in capsys.readouterr().out
    assert json.loads(text(again, "environment.json"))["execution"] == {"recompute": 3, "compiled": 0}
    assert text(kept, "metrics.jsonl") == text(again, "metrics.jsonl")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch):
    """The compiler's front half alone: the graphs that it finds are run eagerly."""
    compiled = torch.compile(through, backend="eager", fullgraph=True)
    monkeypatch.setattr(execution_module, "_compiled", lambda: compiled)
    yield
    torch.compiler.reset()


@pytest.mark.case("R12 Lightning-AI/pytorch-lightning#17415", "N12 pytorch/pytorch#141727")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_run_is_resumed_uncompiled_and_back(run, traced, first: bool):
    """The names in a checkpoint are the same; which it was stands in environment.json, so that nobody takes a difference
    between the two for one between norms."""
    words = ["steps=8", "schedule=constant", "schedule.warmup=2", "log_every=1", "val_every=0", "picture=false"]
    both = [f"compile={str(first).lower()}", f"compile={str(not first).lower()}"]
    whole, _ = run(*words)
    _, summary = run(*words, both[0], "steps=4")
    where = summary["directory"]
    assert not any("_orig_mod" in name for name in torch.load(where / "checkpoints" / "last.ckpt")["state_dict"])
    assert json.loads(text(summary, "environment.json"))["execution"]["compiled"] == (2 if first else 0)
    records, summary = run(*words, both[1], f"resume={where}", directory=where)
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx([record["loss"] for record in whole if "loss" in record], rel=1e-5)
    environment = json.loads(text(summary, "environment.json"))
    assert environment["changed"][-1]["compile"] == {"was": first, "is": not first}
    assert environment["execution"]["compiled"] == (0 if first else 2)
