"""Whether activations are kept or computed again, and that a run so run is the same run."""

import json

import pytest
import torch

from model import execution as execution_module
from model.execution import Execution, through
from tests.conftest import network
from training import device as machine
from training import memory
from training.memory import activation_bytes, execution, free_memory

AUTO = {"checkpointing": "auto", "compiled": False, "rows": 4, "device": "cpu"}


def text(summary, name: str) -> str:
    return (summary["directory"] / name).read_text()


def test_activations_are_counted_by_hand():
    """Pre-norm: 16 tensors of the stream's size. What each norm is given and what it returns (4), q and k as rotated, v, what the
    heads return (4), and four times the width before and after GELU (8); less than one more for the norms' and the softmax's
    one number a row. A block alone, so that the depth does not count."""
    model = network("model.depth=3", "model.dim=64", "model.heads=4", "model.context=64")
    stream = 64 * 64 * 4
    assert 16 * stream < activation_bytes(model.blocks[0], 64, 64) < 17 * stream
    state = torch.get_rng_state()
    activation_bytes(network("model.dropout=0.5").blocks[0], 8, 16)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("share, recompute", [(0.4, 0), (0.6, 4)])
def test_auto_recomputes_what_would_take_over_half_of_the_free_memory(monkeypatch, share: float, recompute: int):
    model = network("model.depth=16")
    needed = 16 * 4 * activation_bytes(model.blocks[0], 8, 16)
    state = 12 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda _: needed / share + state)
    chosen, words = execution(model, **AUTO)
    assert chosen == Execution(recompute)
    assert words.endswith("free: kept of one block in 4, the rest computed again" if recompute else "free: kept")


def test_checkpointing_is_as_asked_and_auto_keeps_where_no_one_knows_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: None)
    model = network("model.depth=16")
    assert execution(model, **AUTO)[0] == Execution()
    assert execution(model, **AUTO | {"checkpointing": "groups"})[0] == Execution(4)
    monkeypatch.setattr(memory, "free_memory", lambda _: 1)
    assert execution(model, **AUTO | {"checkpointing": "none"})[0] == Execution()


def test_running_statistics_are_not_moved_twice(monkeypatch):
    model = network("norm=batchnorm")
    monkeypatch.setattr(memory, "free_memory", lambda _: 1)
    assert execution(model, **AUTO)[0] == Execution()
    with pytest.raises(ValueError, match=r"^model.checkpointing=groups would move .* use model.checkpointing=none"):
        execution(model, **AUTO | {"checkpointing": "groups"})


def test_the_free_memory_of_this_machine():
    found = free_memory("cpu")
    assert found is None or 10**8 < found < 10**13
    assert free_memory("mps") is None


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
    _, plain = run(*words, "model.checkpointing=none")
    _, again = run(*words, "model.checkpointing=groups")
    assert "kept of one block in 3, the rest computed again" in capsys.readouterr().out
    assert json.loads(text(again, "environment.json"))["execution"] == {"recompute": 3, "compiled": 0}
    assert text(plain, "metrics.jsonl") == text(again, "metrics.jsonl")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch):
    """The compiler's front half alone: the graphs that it finds are run eagerly."""
    compiled = torch.compile(through, backend="eager", fullgraph=True, dynamic=False)
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
