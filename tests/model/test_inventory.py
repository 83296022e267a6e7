"""Each parameter counts once, in the part that the contract of a run names."""

from collections import Counter

import pytest

from model.inventory import inventory
from tests.conftest import cells, network


def test_the_parts_of_a_full_network():
    words = ["placement=peri", "residual=learned_scalars", "model.qk_norm=head", "model.bias=true", "position=learned"]
    model = network(*words, "norm=layernorm", "ffn=swiglu")
    found = Counter((entry.part, entry.kind) for entry in inventory(model))
    assert found == {
        ("embed", "embedding"): 2,  # tokens, positions
        ("embed", "norm"): 1,
        ("embed", "bias"): 1,
        ("attention", "matrix"): 8,
        ("attention", "bias"): 8,
        ("ffn", "matrix"): 6,
        ("ffn", "bias"): 6,
        ("norm", "norm"): 2 * (4 + 2),  # in and out of two branches, queries and keys
        ("norm", "bias"): 2 * (4 + 2),
        ("residual", "coefficient"): 2 * 4,
        ("head", "matrix"): 1,
        ("head", "norm"): 1,
        ("head", "bias"): 1,
    }
    assert {entry.layer for entry in inventory(model) if entry.part == "ffn"} == {1, 2}
    names = Counter(entry.matrix for entry in inventory(model) if entry.kind == "matrix" and entry.layer == 2)
    assert names == dict.fromkeys(["q", "k", "v", "o", "up", "gate", "down"], 1)


@pytest.mark.case("G15")
def test_a_tied_matrix_counts_once_as_embed():
    entries = inventory(network("model.tied=true"))
    assert [e.name for e in entries if e.part == "embed"] == ["embed.token"]
    assert [e.name for e in entries if e.part == "head"] == ["head.norm.gain"]


def test_a_learnt_eps_is_no_gain():
    kinds = {
        e.name.rpartition(".")[2]: e.kind for e in inventory(network("norm=learnable_eps_rmsnorm")) if e.part == "norm"
    }
    assert kinds == {"gain": "norm", "log_eps": "coefficient"}


@pytest.mark.parametrize("norm, placement, residual", cells())
def test_every_cell_is_known(norm: str, placement: str, residual: str):
    model = network(f"norm={norm}", f"placement={placement}", f"residual={residual}", "model.depth=4")
    assert [e.name for e in inventory(model)] == [name for name, _ in model.named_parameters()]
