"""The logged norms against autograd and against published cases."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model.inventory import Entry, inventory
from stability.gradients import GradientNorms
from stability.locate import Place, first_bad_place
from tests.conftest import network

FULL = [
    "placement=peri",
    "residual=learned_scalars",
    "model.qk_norm=head",
    "norm=layernorm",
    "ffn=swiglu",
    "model.bias=true",
]


def entry(gradient: list[float], layer: int = 1, part: str = "ffn", dtype: torch.dtype = torch.float32) -> Entry:
    parameter = nn.Parameter(torch.zeros(len(gradient), dtype=dtype))
    parameter.grad = torch.tensor(gradient, dtype=dtype)
    return Entry(f"{part}{layer}", parameter, part, "matrix", layer, "up" if part == "ffn" else None)


def backward(model: nn.Module) -> None:
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()


@pytest.mark.case("G05 Lightning-AI/pytorch-lightning PR #2012")
def test_published_norms(oracle):
    case = oracle("oracle_grad_norm.json")
    gradients = GradientNorms([entry(layer["w"], int(k) + 1) for k, layer in case["layers"].items()], depth=3)
    norms = gradients.measure()
    table = gradients.table(norms.numpy())
    assert table["ffn"] == [case["per_layer_l2"][k] for k in "012"] == table["up"]
    assert table["total"] == case["total_l2"] == torch.linalg.vector_norm(norms).item()

    half = case["fp16_grads"]
    assert GradientNorms([entry([half["value"]] * half["n"], dtype=torch.float16)], 1).measure().item() == half["right"]
    ones = GradientNorms([entry([1.0] * 5120, dtype=torch.bfloat16)], 1).measure().item()
    assert ones == pytest.approx(case["bf16_ones_5120"]["right_l2"], rel=1e-7)


@pytest.mark.case("G15")
def test_a_tied_matrix_has_the_sum_of_both_gradients(oracle):
    """3 from the embedding and 4 from the head are one gradient of 7, not two of norm 5."""
    case = oracle("oracle_grad_norm.json")["tied_embedding"]
    model = network("model.tied=true", "model.depth=1")
    (tied,) = [e for e in inventory(model) if e.part == "embed"]
    tied.parameter.grad = torch.zeros_like(tied.parameter)
    tied.parameter.grad[0, 0] = case["grad_from_embedding"][0] + case["grad_from_head"][0]
    table = GradientNorms(inventory(model), 1)
    assert table.table(table.measure().numpy())["embed"] == case["right_norm_of_shared_parameter"]


@pytest.mark.case("G04", "G05", "G15")
@pytest.mark.parametrize("words", [[], FULL, ["model.tied=true", "placement=post"]])
def test_the_table_equals_autograd(words: list[str]):
    """Against autograd's own gradients summed by hand in float64. A float32 norm of up to 2^10 numbers is off by some
    1e-7 of itself: 1e-5 is a hundred times that."""
    model = network(*words, "model.depth=3")
    backward(model)
    gradients = GradientNorms(inventory(model), 3)
    table = gradients.table(gradients.measure().numpy())
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    named = dict(model.named_parameters())
    outside = {n: g.double() for n, g in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)}

    def norm(*marks: str) -> float:
        return sum((g**2).sum().item() for n, g in outside.items() if all(mark in f".{n}" for mark in marks)) ** 0.5

    assert table["total"] == pytest.approx(norm(""), rel=1e-5)
    assert table["embed"] == pytest.approx(norm(".embed."), rel=1e-5)
    assert table["head"] == pytest.approx(norm(".head."), rel=1e-5)
    squares = table["embed"] ** 2 + table["head"] ** 2
    for layer in (1, 2, 3):
        for matrix in ("q", "k", "v", "o", "up", "down"):
            assert table[matrix][layer - 1] == pytest.approx(norm(f".{layer - 1}.", f".{matrix}.weight"), rel=1e-5)
        block = sum(table[part][layer - 1] ** 2 for part in ("attention", "ffn", "norm", "residual"))
        assert block**0.5 == pytest.approx(norm(f".blocks.{layer - 1}."), rel=1e-5)
        squares += block
    assert squares == pytest.approx(table["total"] ** 2, rel=1e-5)


def test_a_parameter_without_gradient_counts_as_zero():
    missing = entry([3.0, 4.0], layer=2)
    missing.parameter.grad = None
    gradients = GradientNorms([entry([3.0, 4.0]), missing], depth=2)
    assert gradients.table(gradients.measure().numpy())["ffn"] == [5.0, 0.0]


def test_the_layer_where_a_forward_pass_stopped_being_finite():
    model = network("model.depth=4")
    gradients = GradientNorms(inventory(model), 4)
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        model.blocks[2].ffn.function.up.weight[0, 0] = torch.nan
    backward(model)
    norms = gradients.measure().numpy()
    assert np.isnan(norms).any()
    assert first_bad_place(model, [tokens], gradients, norms) == Place(3, "ffn.up.weight")


def test_the_layer_where_a_backward_pass_stopped_being_finite():
    """The forward pass is finite, so the layer nearest the output with a bad gradient is where it began."""
    model = network("model.depth=4")
    gradients = GradientNorms(inventory(model), 4)
    backward(model)
    for layer in (0, 1):
        model.blocks[layer].attention.function.q.weight.grad[0, 0] = torch.inf
    norms = gradients.measure().numpy()
    assert first_bad_place(model, [torch.randint(11, (2, 9))], gradients, norms) == Place(2, "attention.q.weight")
    model.head.weight.grad[0, 0] = torch.nan
    assert first_bad_place(model, [], gradients, gradients.measure().numpy()) == Place(None, "head.weight")
