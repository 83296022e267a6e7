"""How far a step moves a network, against numbers by hand, and whether a position sees the future."""

import numpy as np
import pytest
import torch

from model import transformer
from model.inventory import inventory
from stability import change
from stability.change import features, future_leak, matrices, model_update, update_ratio
from tests.conftest import network


def windows(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_features_are_what_the_head_reads(placement: str):
    model = network(f"placement={placement}", "model.dropout=0.5").eval()
    (found,) = features(model, [windows()])
    assert torch.equal(found @ model.head.weight.T, model(windows()[:, :-1]))
    model.train()
    assert torch.equal(features(model, [windows()])[0], found)
    assert all(module.training for module in model.modules())


def test_the_model_update_of_a_scaled_head_norm():
    """A gain of 1 + h moves what the head reads by h times itself, whose RMS is 1 to eps = 1e-6."""
    model = network("placement=pre").double()
    before = features(model, [windows(), windows(seed=1)])
    with torch.no_grad():
        model.head.norm.gain.mul_(1.25)
    after = features(model, [windows(), windows(seed=1)])
    assert model_update(before, after).item() == pytest.approx(0.25, rel=1e-5)


def test_the_update_ratio_by_block():
    model = network("model.depth=3", "model.bias=true")
    entries = matrices(inventory(model))
    assert {entry.layer for entry in entries} == {1, 2, 3} and len(entries) == 3 * 6
    before = [entry.parameter.detach().clone() for entry in entries]
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(1.5)
        model.blocks[2].ffn.function.down.weight.add_(0.01)
    down = [old for entry, old in zip(entries, before, strict=True) if entry.layer == 3]
    third = 0.01 * 32 / np.sqrt(sum((old.double() ** 2).sum().item() for old in down))  # sqrt(16 * 64) = 32
    assert update_ratio(entries, before, 3) == pytest.approx([0, 0.5, third], rel=1e-6)


@pytest.mark.parametrize("words", [[], ["model.dropout=0.3"], ["model.context=1"], ["norm=batchnorm"]])
def test_only_batchnorm_sees_the_future(words: list[str]):
    model = network(*words)
    batch = windows()[:, : model.context + 1]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(5)
    leak = future_leak(model, batch).item()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert leak > 1e-2 if words == ["norm=batchnorm"] else leak == 0


@pytest.mark.parametrize("words", [["norm=batchnorm"], ["norm=batchnorm", "placement=post", "model.dropout=0.3"]])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_leak_is_that_of_all_logits_and_is_read_row_by_row(monkeypatch, words: list[str], autocast: bool):
    model, batch = network(*words), windows()
    tokens = batch[:, :-1]
    other = torch.cat((tokens[:, :-1], (tokens[:, -1:] + 1) % 11), dim=1)
    logits = []
    for given in (tokens, other):
        with change.as_found(model), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits.append(model(given)[:, :-1].double())
    made, linear = [], transformer.F.linear

    def seen(x, weight, *rest):
        made.append((*x.shape[:-1], len(weight)))
        return linear(x, weight, *rest)

    monkeypatch.setattr(transformer.F, "linear", seen)
    leak = future_leak(model, batch, autocast=autocast).item()
    assert leak > 1e-2
    # a product of fewer rows may add up in another order, and bfloat16 rounds at 2^-8 of a logit
    assert leak == pytest.approx((logits[1] - logits[0]).abs().max().item(), rel=2e-2 if autocast else 1e-5)
    assert [shape for shape in made if shape[-1] == 11] == [(7, 11)] * 2 * len(batch)
