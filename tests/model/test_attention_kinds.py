"""Kinds of attention, each against its own equations; what travels beside the stream; what a trace sees of them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train
from model import execution
from model.equation import equation
from model.execution import Execution, through
from model.loss import next_token_loss
from stability.change import features
from stability.theory import predict
from stability.trace import trace
from tests.conftest import network, plain, setting
from tests.reference import Reference, agree, stds

KINDS = ["cosine", "gated", "head_scale", "value_residual"]
WINDOWS = torch.arange(36).reshape(4, 9) % 11


def same(head: int, x: Tensor) -> Tensor:
    return x


def function(layer: int) -> str:
    return f"blocks.{layer - 1}.attention.function"


def attention(
    r: Reference,
    layer: int,
    u: Tensor,
    *,
    scores: Callable[[int, Tensor, Tensor], Tensor] = lambda head, q, k: (
        q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    ),
    of_v: Callable[[int, Tensor], Tensor] = same,
    of_head: Callable[[int, Tensor], Tensor] = same,
) -> Tensor:
    """W_o of the heads: each head's scores from q and k, the values through `of_v`, what it gives through `of_head`."""
    h = r.dim // r.heads
    out = []
    for head in range(r.heads):
        q, k, v = (r.matrix(f"{function(layer)}.{name}", u)[..., head * h : (head + 1) * h] for name in "qkv")
        weights = scores(head, q, k).exp() * torch.ones(u.shape[-2], u.shape[-2], dtype=torch.float64).tril()
        out.append(of_head(head, weights / weights.sum(-1, keepdim=True) @ of_v(head, v)))
    return r.matrix(f"{function(layer)}.o", torch.cat(out, -1))


def pre(A: Callable[[Reference, int, Tensor], Tensor]) -> Callable[[Reference, Tensor], Tensor]:
    """A pre-norm network with the attention A."""

    def equations(r: Reference, tokens: Tensor) -> Tensor:
        x = r.embedding(tokens)
        for layer in range(1, r.depth + 1):
            x = x + A(r, layer, r.N(f"blocks.{layer - 1}.attention.stream.norm_in", x))
            x = x + r.M(layer, r.N(f"blocks.{layer - 1}.ffn.stream.norm_in", x))
        return r.logits(x)

    return equations


def head_scale(r: Reference, layer: int, u: Tensor) -> Tensor:
    gamma = r.p[f"{function(layer)}.head_scale"]
    return attention(r, layer, u, of_head=lambda head, y: gamma[head] * y)


def cosine(r: Reference, layer: int, u: Tensor, limit: float = 100.0) -> Tensor:
    """Swin-v2: cos(q, k) * min(exp(log g), limit) for each head."""

    def scores(head: int, q: Tensor, k: Tensor) -> Tensor:
        lengths = (q * q).sum(-1).sqrt()[..., :, None] * (k * k).sum(-1).sqrt()[..., None, :]
        g = r.p[f"{function(layer)}.log_scale"][head].exp()
        return q @ k.transpose(-1, -2) / lengths * torch.where(g < limit, g, torch.full_like(g, limit))

    return attention(r, layer, u, scores=scores)


def gated(r: Reference, layer: int, u: Tensor, each: str = "feature") -> Tensor:
    """Qiu et al. 2025: Y * sigmoid(X W)."""
    gate = 1 / (1 + (-r.matrix(f"{function(layer)}.head_gate", u)).exp())
    h = 1 if each == "head" else r.dim // r.heads
    return attention(r, layer, u, of_head=lambda head, y: y * gate[..., head * h : (head + 1) * h])


def value_residual(r: Reference, tokens: Tensor, scalars: Callable[[int], tuple] = lambda layer: (0.5, 0.5)) -> Tensor:
    """Zhou et al. 2024: layer l > 1 reads lambda_1 V_1 + lambda_2 V_l."""
    x, values, h = r.embedding(tokens), {}, r.dim // r.heads
    for layer in range(1, r.depth + 1):
        u = r.N(f"blocks.{layer - 1}.attention.stream.norm_in", x)
        values[layer] = r.matrix(f"{function(layer)}.v", u)
        first, own = scalars(layer) if layer > 1 else (0.0, 1.0)
        mixed = first * values[1] + own * values[layer]
        x = x + attention(r, layer, u, of_v=lambda head, v, mixed=mixed: mixed[..., head * h : (head + 1) * h])
        x = x + r.M(layer, r.N(f"blocks.{layer - 1}.ffn.stream.norm_in", x))
    return r.logits(x)


@pytest.mark.parametrize(
    "words, equations",
    [
        (["attention=head_scale"], pre(head_scale)),
        (["attention=cosine"], pre(cosine)),
        (["attention=cosine", "attention.limit=10"], pre(lambda r, layer, u: cosine(r, layer, u, 10.0))),
        (["attention=gated", "model.bias=true"], pre(gated)),
        (["attention=gated", "attention.each=head"], pre(lambda r, layer, u: gated(r, layer, u, "head"))),
        (["attention=value_residual"], value_residual),
        (
            ["attention=value_residual", "attention.first=0.2", "attention.own=0.9"],
            lambda r, tokens: value_residual(r, tokens, lambda layer: (0.2, 0.9)),
        ),
        (
            ["attention=value_residual", "attention.learnt=true"],
            lambda r, tokens: value_residual(
                r, tokens, lambda layer: tuple(r.p[f"{function(layer)}.{name}"] for name in ("first", "own"))
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_equals_its_equations(words: list[str], equations):
    agree(words, equations)


def test_where_the_scale_of_a_cosine_starts():
    """Swin-v2: 10. Henry et al.: log2(L^2 - L) of the context L = 8, 5.807."""
    start = network("attention=cosine").blocks[0].attention.function.log_scale
    assert start.exp().tolist() == pytest.approx([10, 10], rel=1e-6)
    henry = network("attention=cosine", "attention.start=null", "attention.limit=null").blocks[0].attention.function
    assert henry.log_scale.exp().tolist() == pytest.approx([5.8073549] * 2, rel=1e-6)


@pytest.mark.parametrize(
    "words, said",
    [
        (["attention.start=0"], r"attention.start must be > 0 and at most attention.limit=100"),
        (["attention.start=200"], r"attention.start must be > 0 and at most attention.limit=100.0, found 200"),
        (
            ["attention.start=null", "model.context=2"],
            "attention.start=null is .* it needs model.context >= 3, found 2",
        ),
    ],
)
def test_scales_that_cannot_be(words: list[str], said: str):
    with pytest.raises(Exception, match=said):
        network("attention=cosine", *words)


def test_a_query_of_zeros_has_finite_gradients():
    module = network("attention=cosine").blocks[0].attention.function
    u = torch.randn(1, 4, 16)
    u[0, 1] = 0
    u.requires_grad_()
    module(u).square().sum().backward()
    assert torch.isfinite(u.grad).all() and module.log_scale.grad.abs().max() > 0


def test_a_gate_is_drawn_as_a_gate():
    """Xavier: 1/sqrt(dim), of a head's gate too, which counts for each of its features. A feed-forward's gate is what a residual
    method scales, this one it does not."""
    words = ["attention=gated", "model.depth=4", "model.dim=96", "model.heads=4", "model.context=8"]
    found = stds(network(*words, "placement=post", "residual=deepnorm", "residual.scale_gate=true", "ffn=swiglu"))
    assert found["head_gate"] == pytest.approx(96**-0.5, rel=0.02)
    assert found["gate"] == pytest.approx(32**-0.25 * (2 / (96 + 256)) ** 0.5, rel=0.02)
    # 4 x 4 x 96 numbers: a std that is off by 1.8%
    assert stds(network(*words, "attention.each=head"))["head_gate"] == pytest.approx(96**-0.5, rel=0.08)


def test_neutral_scales_change_nothing():
    plain_logits = network()(WINDOWS[:, :-1])
    assert torch.equal(network("attention=head_scale")(WINDOWS[:, :-1]), plain_logits)
    alone = network("attention=value_residual", "attention.first=0", "attention.own=1")(WINDOWS[:, :-1])
    torch.testing.assert_close(alone, plain_logits, rtol=1e-6, atol=1e-6)


def test_the_equation_says_that_the_first_values_are_read():
    line = equation(train.choices_of(plain("attention=value_residual", "placement=hybrid")), 4)
    assert line == (
        "layer 1: x <- x + A_N(x) then x <- N(x) + M(N(x));  layers 2-4: x <- x + A_N(x, v_1) then x <- N(x) + M(N(x));  "
        "logits = W N(x)"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more", [["model.kv_heads=1", "model.qk_norm=head"], ["placement=hybrid"], ["placement=sub_ln"]]
)
def test_goes_with_shared_keys_and_norms_within(kind: str, more: list[str]):
    """Causal by the gradient, in training as in bfloat16 with the stream in float32."""
    model = network(f"attention={kind}", *more, "model.dropout=0.1")
    given: list[Tensor] = []
    model.embed.register_forward_hook(lambda *a: given.append(a[2].requires_grad_()) or a[2].retain_grad())
    seen = set()
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, x: seen.add(model.of_stream(x).dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(WINDOWS[:1, :8])[0, 3].float().sum().backward()
    assert seen == {torch.float32}
    assert given[0].grad[0, 4:].abs().max() == 0 < given[0].grad[0, :4].abs().min(-1).values.max()


# the compiler looks at what its inputs keep, and filters the warning that the tests would raise
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_runs_in_groups_and_as_one_graph(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Computed again: the same numbers bit by bit. Compiled: the first layer's values make it another graph."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(through, backend=counter, fullgraph=True)
    monkeypatch.setattr(execution, "_compiled", lambda: compiled)
    model = network(f"attention={kind}", "model.depth=4", "model.dropout=0.1")

    def step(how: Execution) -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model.execution = how
        loss = next_token_loss(model, WINDOWS)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    kept = step(Execution())
    assert all(torch.equal(one, other) for one, other in zip(step(Execution(recompute=3)), kept, strict=True))
    for one, other in zip(step(Execution(compiled=2)), kept, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == (2 if kind == "value_residual" else 1)
    torch.compiler.reset()


@pytest.mark.parametrize(
    "words", [["attention=cosine"], ["attention=value_residual", "stream=single"], ["attention=gated"]]
)
def test_a_trace_sees_the_logits_and_the_stream(words: list[str]):
    """The logits that the softmax is given: of a cosine, g cos(q, k), between -10 and 10 at the start."""
    model = network(*words, "position=rotary").double()
    found = trace(model, [WINDOWS])
    x = model.embed(WINDOWS[:, :-1])
    state = model.enter(x)
    for layer, block in enumerate(model.blocks):
        a = block.attention.function
        u = block.attention.stream.norm_in(model.of_stream(state))
        q, k = (a.rotate(m(u).unflatten(-1, (2, 8)).transpose(1, 2)) for m in (a.q, a.k))
        logits = q @ k.transpose(-1, -2) / math.sqrt(8)
        if "attention=cosine" in words:
            logits = 10 * q @ k.transpose(-1, -2) / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])
        logits = logits.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
        p = logits.softmax(-1)
        entropy = -(p * p.clamp_min(1e-300).log()).sum(-1).mean()
        assert found.logit_max[layer] == pytest.approx(logits.max().item(), rel=1e-6)  # log 10 is stored in float32
        assert found.attention_entropy[layer] == pytest.approx(entropy.item(), rel=1e-6)
        state = block(state)
        stream = model.of_stream(state)
        assert found.stream_rms[layer + 1] == pytest.approx(stream.square().mean().sqrt().item(), rel=1e-10)
    (read,) = features(model.eval(), [WINDOWS])
    torch.testing.assert_close(read, model.head.norm(stream))


def test_no_theory_where_the_attention_is_another():
    words = ["position=none", "ffn=gelu", "init=xavier"]
    sizes = network(*words).sizes
    assert predict(train.choices_of(plain(*words)), sizes).stream is not None
    assert predict(train.choices_of(plain(*words, "attention=gated")), sizes).stream is None


def test_what_is_carried_is_nothing_before_the_first_layer():
    from model.attention_kinds import ValueResidualAttention

    model = network("attention=value_residual")
    x = model.embed(WINDOWS[:, :-1])
    _, carried = model.enter(x)
    assert carried.numel() == 0
    _, carried = model.blocks[0](model.enter(x))
    assert carried.shape == (4, 2, 8, 8)
    _, again = model.blocks[1]((x, carried))
    assert again is carried
    assert not list(ValueResidualAttention(setting(model.sizes), learnt=True).parameters(recurse=False))
