"""A trace against references that go through the network by hand in float64, and what it leaves behind: nothing."""

from math import sqrt

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.coefficient import number
from model.inventory import inventory
from model.loss import next_token_loss
from model.transformer import Transformer
from stability.gradients import GradientNorms
from stability.trace import trace
from tests.conftest import network

# Both sides work in float64 and sum in other orders: a sum of n = 1024 terms is off by at most n eps = 2e-13 of the sum of
# their sizes, and some thousand roundings of a few blocks deep come to no more than ten times that.
CLOSE = {"rel": 3e-12, "abs": 1e-14}
# a norm at every place, learnt alpha and beta, shared keys, QK-norm; the bare post-norm; DeepNorm's constants
GROUPED = ["model.heads=4", "model.kv_heads=2"]
CASES = [
    ["placement=peri", "residual=learned_scalars", "model.qk_norm=head", "norm=layernorm", *GROUPED],
    ["placement=post", "model.qk_norm=full", "norm=zero_rmsnorm", "position=learned"],
    ["recipe=deepnorm", "ffn=swiglu", "position=none"],
]


def windows(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(seed))


def shaken(*words: str) -> Transformer:
    """In float64, with gains, biases and coefficients away from where they start."""
    model = network(*words).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for entry in inventory(model):
            if entry.kind != "matrix":
                noise = torch.randn(entry.parameter.shape, generator=draw, dtype=torch.float64)
                entry.parameter.add_(0.2 * noise)
    return model


def by_hand(model: Transformer, batch: Tensor) -> tuple[list[Tensor], dict[str, list[Tensor]], Tensor]:
    """(The stream at N + 1 places, what was added and skipped, the loss), written out from the block's equation."""
    x = model.embed(batch[:, :-1])
    stream, parts = [x], {name: [] for name in ("attention", "attention_skip", "ffn", "ffn_skip")}
    for block in model.blocks:
        for name in ("attention", "ffn"):
            branch = getattr(block, name)
            places = branch.stream
            y = number(places.beta) * places.norm_out(branch.function(number(places.s) * places.norm_in(x)))
            skip = number(places.alpha) * x
            parts[name].append(y)
            parts[f"{name}_skip"].append(skip)
            x = places.norm_sum(skip + y)
        stream.append(x)
    return stream, parts, F.cross_entropy(model.head(x).flatten(0, 1), batch[:, 1:].flatten())


def rms(x: Tensor) -> float:
    return sqrt((x.detach() ** 2).sum().item() / x.numel())


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_stream_and_branches_by_hand(words: list[str]):
    model = shaken(*words)
    found = trace(model, [windows()])
    stream, parts, loss = by_hand(model, windows())
    assert found.loss == pytest.approx(loss.item(), **CLOSE)
    assert found.stream_rms == pytest.approx([rms(x) for x in stream], **CLOSE)
    assert found.attention_rms == pytest.approx([rms(x) for x in parts["attention"]], **CLOSE)
    assert found.attention_skip_rms == pytest.approx([rms(x) for x in parts["attention_skip"]], **CLOSE)
    assert found.ffn_rms == pytest.approx([rms(x) for x in parts["ffn"]], **CLOSE)
    assert found.ffn_skip_rms == pytest.approx([rms(x) for x in parts["ffn_skip"]], **CLOSE)
    ratios = [rms(y) / rms(x) for y, x in zip(parts["ffn"], parts["ffn_skip"], strict=True)]
    assert found.ffn_ratio == pytest.approx(ratios, **CLOSE)
    assert found.attention_ratio[0] == pytest.approx(rms(parts["attention"][0]) / rms(parts["attention_skip"][0]))
    cosines = []
    for x in stream:
        u = F.normalize(x.detach(), dim=-1)
        own = torch.eye(8, dtype=torch.bool)
        cosines.append((u @ u.transpose(1, 2))[:, ~own].mean().item())
    assert found.token_cosine == pytest.approx(cosines, rel=1e-9, abs=1e-12)  # a difference of two sums


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_stream_gradient_by_autograd(words: list[str]):
    model = shaken(*words)
    stream, _, loss = by_hand(model, windows())
    expected = [gradient.norm().item() for gradient in torch.autograd.grad(loss, stream)]
    assert trace(model, [windows()]).stream_grad_norm == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_attention_by_the_textbook(words: list[str]):
    """One query at a time, one head at a time, over the keys up to it."""
    model = shaken(*words)
    found = trace(model, [windows()])
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.attention.function.register_forward_hook(lambda module, given, _: inputs.append(given[0].detach()))
    model(windows()[:, :-1])
    for layer, (block, u) in enumerate(zip(model.blocks, inputs, strict=True)):
        a = block.attention.function
        q = a.head_norm_q(a.full_norm_q(a.q(u)).unflatten(-1, (-1, a.head_dim)))
        k = a.head_norm_k(a.full_norm_k(a.k(u)).unflatten(-1, (-1, a.head_dim)))
        q, k = (a.rotate(part.transpose(1, 2)).transpose(1, 2).detach() for part in (q, k))
        largest, entropies = -float("inf"), []
        for row in range(4):
            for head in range(q.shape[2]):
                own = head * k.shape[2] // q.shape[2]
                for t in range(8):
                    score = [(q[row, t, head] @ k[row, s, own]).item() / sqrt(a.head_dim) for s in range(t + 1)]
                    p = np.exp(score) / np.exp(score).sum()
                    largest = max(largest, *score)
                    entropies.append(-(p * np.log(p)).sum())
        assert found.logit_max[layer] == pytest.approx(largest, **CLOSE)
        assert found.attention_entropy[layer] == pytest.approx(np.mean(entropies), **CLOSE)


def test_gains_are_those_that_multiply():
    """Of one block: QK-norms and both branches' norms; a zero-centred w counts as 1 + w."""
    plain, centred = network("norm=rmsnorm", "model.qk_norm=head"), network("norm=zero_rmsnorm", "model.qk_norm=head")
    for model, start in ((plain, 1.0), (centred, 0.0)):
        norm = model.blocks[1].attention.function.head_norm_q
        with torch.no_grad():
            next(norm.parameters()).copy_(torch.linspace(-0.5, 0.5, 8) + start)
        found = trace(model, [windows()])
        total = 2 * 16 + 2 * 8  # two norms over the width, two over a head's
        assert found.gain_min.tolist() == [1, 0.5] and found.gain_max.tolist() == [1, 1.5]
        assert found.gain_mean == pytest.approx([1, 1 + torch.linspace(-0.5, 0.5, 8).sum().item() / total], abs=1e-7)
    assert np.isnan(trace(network("norm=simple_rmsnorm"), [windows()]).gain_mean).all()


def test_parameter_gradients_are_those_of_the_step():
    model = network("model.depth=3")
    found = trace(model, [windows()])
    next_token_loss(model, windows()).backward()
    gradients = GradientNorms(inventory(model), 3)
    assert found.grad_norm == gradients.table(gradients.measure().numpy())


def test_micro_batches_are_one_batch():
    model = shaken("placement=pre", "norm=layernorm")
    whole, halves = trace(model, [windows()]), trace(model, list(windows().split(2)))
    for name in vars(whole):
        one, two = getattr(whole, name), getattr(halves, name)
        if name == "grad_norm":
            assert {k: np.array(v) for k, v in two.items()} == {k: pytest.approx(v, **CLOSE) for k, v in one.items()}
        else:
            assert two == pytest.approx(one, rel=1e-10, abs=1e-12), name


def test_in_training_s_reduced_precision():
    """What is measured of a step in bf16 is that step, not one in float32."""
    model = network()
    found = trace(model, [windows()], autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model, windows())
    loss.backward()
    gradients = GradientNorms(inventory(model), 2)
    assert found.logit_max[0] != torch.tensor(found.logit_max[0]).bfloat16().item()  # the looking itself is in float32
    assert found.loss == loss.item() != trace(model, [windows()]).loss
    assert found.grad_norm == gradients.table(gradients.measure().numpy())


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found(training: bool):
    model = network("norm=batchnorm", "model.dropout=0.3").train(training)
    model.blocks[0].eval()
    kept = torch.ones_like(model.head.weight)
    model.head.weight.grad = kept
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    first = trace(model, [windows()])
    assert model.head.weight.grad is kept
    assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    again = trace(model, [windows()])
    assert again.loss == first.loss and (again.stream_grad_norm == first.stream_grad_norm).all()


def test_a_failure_leaves_the_model_as_it_was_found():
    model = network()
    with pytest.raises(IndexError):
        trace(model, [windows() + 1000])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_what_is_not_finite_is_told_and_a_huge_stream_is_measured():
    """DeepNorm's alpha on a pre-norm stream: its square is beyond float32 long before the stream is."""
    model = network("placement=pre", "residual=deepnorm", "model.depth=28")
    found = trace(model, [windows()])
    assert 1e22 < found.stream_rms[-1] < 1e28
    with torch.no_grad():
        model.blocks[20].ffn.function.up.weight.fill_(torch.nan)
    found = trace(model, [windows()])
    assert np.isfinite(found.stream_rms[:21]).all() and np.isnan(found.stream_rms[21:]).all()


def test_what_a_branch_adds_is_as_much_as_its_ramp_lets_in():
    whole, ramped = (network(*words) for words in ((), ("ramp=prores", "ramp.steps_per_layer=10")))
    one, other = (
        trace(model, [torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))])
        for model in (whole, ramped)
    )
    np.testing.assert_allclose(other.attention_rms[0], 0.1 * one.attention_rms[0], rtol=1e-5)
