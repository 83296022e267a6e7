"""The placements of papers, each against its own equations, and what starts with them: gains and stds."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import train
from conf.check import check
from model.compatibility import refusals
from model.gain import has_gain, scale_gain_
from model.norm import BatchNorm, LayerNorm, RMSNorm, SimpleRMSNorm, ZeroRMSNorm
from model.sizes import Sizes
from stability.theory import predict
from tests.conftest import config, network, plain
from tests.reference import Reference, agree, stds


def at(layer: int, branch: str, place: str) -> str:
    return f"blocks.{layer - 1}.{branch}.stream.norm_{place}"


def inner(layer: int, branch: str) -> str:
    return f"blocks.{layer - 1}.{branch}.function.inner_norm"


def heads(
    r: Reference,
    layer: int,
    u: Tensor,
    of_head: Callable[[int, Tensor], Tensor] = lambda head, y: y,
    *,
    qkv: bool = False,
) -> Tensor:
    """What the heads give, side by side: each head's q, k, v normalised where `qkv`, what it gives through `of_head`."""
    function, h = f"blocks.{layer - 1}.attention.function", r.dim // r.heads
    out = []
    for head in range(r.heads):
        part = slice(head * h, (head + 1) * h)
        q, k, v = (r.matrix(f"{function}.{name}", u)[..., part] for name in "qkv")
        if qkv:
            q, k, v = (r.N(f"{function}.head_norm_{name}", x) for name, x in zip("qkv", (q, k, v), strict=True))
        scores = q @ k.transpose(-1, -2) / math.sqrt(h)
        weights = scores.exp() * torch.ones_like(scores).tril()
        out.append(of_head(head, weights / weights.sum(-1, keepdim=True) @ v))
    return torch.cat(out, -1)


def attention(r: Reference, layer: int, u: Tensor, *, qkv: bool = False) -> Tensor:
    return r.matrix(f"blocks.{layer - 1}.attention.function.o", heads(r, layer, u, qkv=qkv))


def hybrid_layer(r: Reference, layer: int, x: Tensor) -> Tensor:
    """Zhuo et al. 2025: Y = MHA_QKV(X) + X, X' = FFN(Norm(Y)) + Norm(Y)."""
    y = attention(r, layer, x, qkv=True) + x
    z = r.N(at(layer, "ffn", "both"), y)
    return r.M(layer, z) + z


def hybrid(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        x = hybrid_layer(r, layer, x)
    return r.logits(x)


def hybrid_star(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    y = x + attention(r, 1, r.N(at(1, "attention", "in"), x), qkv=True)
    x = y + r.M(1, r.N(at(1, "ffn", "in"), y))
    for layer in range(2, r.depth + 1):
        x = hybrid_layer(r, layer, x)
    return r.logits(x)


def normformer(r: Reference, tokens: Tensor) -> Tensor:
    """Shleifer et al. 2021: x + LN(HeadScaleMHA(LN(x))), then x + W_2 LN(act(W_1 LN(x)))."""
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        function, gamma = (
            f"blocks.{layer - 1}.attention.function",
            r.p[f"blocks.{layer - 1}.attention.function.head_scale"],
        )
        u = r.N(at(layer, "attention", "in"), x)
        scaled = heads(r, layer, u, lambda head, y, gamma=gamma: gamma[head] * y)
        x = x + r.N(at(layer, "attention", "out"), r.matrix(f"{function}.o", scaled))
        hidden = r.N(inner(layer, "ffn"), r.hidden(layer, r.N(at(layer, "ffn", "in"), x)))
        x = x + r.matrix(f"blocks.{layer - 1}.ffn.function.down", hidden)
    return r.logits(x)


def sub_ln(r: Reference, tokens: Tensor) -> Tensor:
    """Wang et al. 2022: x + W_o LN(attn(LN(x))), then x + W_2 LN(act(W_1 LN(x)))."""
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        y = r.N(inner(layer, "attention"), heads(r, layer, r.N(at(layer, "attention", "in"), x)))
        x = x + r.matrix(f"blocks.{layer - 1}.attention.function.o", y)
        y = r.N(inner(layer, "ffn"), r.hidden(layer, r.N(at(layer, "ffn", "in"), x)))
        x = x + r.matrix(f"blocks.{layer - 1}.ffn.function.down", y)
    return r.logits(x)


def keel(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        for branch, F in (("attention", r.A), ("ffn", r.M)):
            x = r.N(at(layer, branch, "sum"), x + F(layer, r.N(at(layer, branch, "in"), x)))
    return r.logits(x, norm=False)


def res_post(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        for branch, F in (("attention", r.A), ("ffn", r.M)):
            x = x + r.N(at(layer, branch, "out"), F(layer, x))
    return r.logits(x)


def layers(r: Reference, tokens: Tensor, kinds: str) -> Tensor:
    """`s` for a layer x <- N(x + F(x)), `i` for x <- x + F(N(x))."""
    x = r.embedding(tokens)
    for layer, kind in enumerate(kinds, start=1):
        for branch, F in (("attention", r.A), ("ffn", r.M)):
            if kind == "s":
                x = r.N(at(layer, branch, "sum"), x + F(layer, x))
            else:
                x = x + F(layer, r.N(at(layer, branch, "in"), x))
    return r.logits(x, norm=kinds[-1] == "i")


@pytest.mark.parametrize(
    "words, equations",
    [
        (["placement=hybrid"], hybrid),
        (["placement=hybrid_star"], hybrid_star),
        (["placement=normformer", "attention=head_scale"], normformer),
        (["placement=sub_ln", "residual=sub_ln"], sub_ln),
        (["placement=keel"], keel),
        (["placement=res_post"], res_post),
        (["placement=mix", "model.depth=4"], lambda r, tokens: layers(r, tokens, "siii")),
        (["placement=by_layer"], lambda r, tokens: layers(r, tokens, "ssi")),
        (["placement=by_layer", "placement.layers=[pre,pre,post]"], lambda r, tokens: layers(r, tokens, "iis")),
        (
            ["placement=by_layer", "placement.layers=[pre,post]", "placement.spread=repeat", "model.depth=4"],
            lambda r, tokens: layers(r, tokens, "isis"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_equals_its_equations(words: list[str], equations):
    agree(words, equations)


def sub_ln_gain(depth: int) -> float:
    return math.log(2 * depth) ** 0.5


@pytest.mark.parametrize("depth, gain", [(4, 1.4420), (12, 1.7827)])
@pytest.mark.parametrize("gate", [False, True])
def test_sub_ln_enlarges_v_o_up_and_down(depth: int, gain: float, gate: bool):
    """sqrt(ln 2N), with a natural logarithm (1.7827 at N = 12: arXiv 2210.06423's formula, computed). Xavier's std of a square
    matrix is 1/sqrt(dim). A sample std of 4 layers of 96 x 96 is off by 0.4%."""
    words = [
        "residual=sub_ln",
        f"residual.scale_gate={str(gate).lower()}",
        "placement=sub_ln",
        "ffn=swiglu",
        "ffn.ratio=1",
    ]
    found = stds(network(*words, f"model.depth={depth}", "model.dim=96", "model.heads=4"))
    assert sub_ln_gain(depth) == pytest.approx(gain, abs=5e-5)
    expected = dict.fromkeys(("v", "o", "up", "down"), gain) | {"q": 1, "k": 1, "gate": gain if gate else 1}
    assert found == {name: pytest.approx(g * 96**-0.5, rel=0.02) for name, g in expected.items()}


@pytest.mark.parametrize("norm", [RMSNorm, ZeroRMSNorm, LayerNorm, BatchNorm])
def test_a_gain_is_scaled_whatever_holds_it(norm):
    """By what the norm gives: factor times what it gave, its bias apart."""
    x = torch.randn(5, 8, dtype=torch.float64)
    one = norm(8).double()
    before = one(x)
    scale_gain_(one, 0.25)
    torch.testing.assert_close(one(x), before / 4, rtol=1e-12, atol=1e-12)
    scale_gain_(one, 0.0)
    assert one(x).abs().max() == 0 and has_gain(one)
    assert not has_gain(SimpleRMSNorm(8))


@pytest.mark.parametrize("norm", ["rmsnorm", "zero_rmsnorm", "layernorm"])
def test_res_post_starts_as_the_identity(norm: str):
    """Swin-v2: every block gives what it is given, and the first gradient of all but the output norms' gains is zero."""
    model = network("placement=res_post", "attention=cosine", f"norm={norm}", "model.depth=3")
    x = torch.randn(2, 8, 16)
    for block in model.blocks:
        assert torch.equal(block(x), x)
    model(torch.arange(8)[None], torch.arange(1, 9)[None]).backward()
    opened = {n for n, p in model.named_parameters() if n.startswith("blocks.") and p.grad.abs().max() > 0}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in opened} == {"norm_out"}


def test_the_depth_scaled_sandwich():
    """N_out starts with c / sqrt(N) (Pangu Ultra); N_in does not."""
    words = ["placement=sandwich", "placement.out_gain=0.5", "placement.out_power=0.5", "model.depth=4"]
    for branch in [branch for block in network(*words).blocks for branch in (block.attention, block.ffn)]:
        assert branch.stream.norm_out.gain.tolist() == [0.25] * 16
        assert branch.stream.norm_in.gain.tolist() == [1.0] * 16


def test_theory_knows_the_gain_of_the_output_norm_and_what_it_does_not_know():
    """Each branch adds gain^2; at inner norms, or norms on q, k and v, nothing is predicted."""
    words = ["position=none", "placement=sandwich"]
    sizes = network(*words, "model.depth=4").sizes
    for gain in (1.0, 0.5):
        stream = predict(train.choices_of(plain(*words, f"placement.out_gain={gain}")), sizes).stream
        assert (
            stream[0].tolist() == stream[1].tolist() == pytest.approx([1 + 2 * layer * gain**2 for layer in range(5)])
        )
    for placement in ("hybrid", "normformer", "sub_ln"):
        assert predict(train.choices_of(plain("position=none", f"placement={placement}")), sizes).stream is None


def lines(*words: str, depth: int = 12, norm: str = "rmsnorm", qk_norm: str = "none") -> list[str]:
    names = {word.partition("=")[0]: word.partition("=")[2] for word in words if "." not in word.partition("=")[0]}
    built = train.choices_of(plain(f"norm={norm}", *words))
    names = {"norm": norm, "placement": "pre", "residual": "standard", "init": "xavier"} | names
    return list(refusals(built, names, Sizes(depth, 64, 4, 8, qk_norm=qk_norm)))  # type: ignore[arg-type]


def test_which_combinations_are_traps():
    for placement in ("keel", "hybrid"):  # no stretch without a norm on the stream grows with the depth
        assert not lines(f"placement={placement}", "residual=deepnorm")
    (line,) = lines("placement=hybrid_star", "residual=deepnorm")
    assert "at each of 2 branches" in line and "10^0.7 in all" in line  # both of the first layer
    for placement in ("normformer", "sub_ln", "res_post"):
        (line,) = lines(f"placement={placement}", "residual=deepnorm")
        assert "at each of 24 branches" in line
    (line,) = lines("placement=hybrid", norm="batchnorm")
    assert "sees the future" in line
    for norm in ("simple_rmsnorm", "none"):
        (line,) = lines("placement=res_post", norm=norm)
        assert f"norm={norm} has none" in line
    (line,) = lines("placement=by_layer", "placement.layers=[pre,post,pre]", depth=4)
    assert line.startswith("placement=by_layer with model.depth=4 does not come out: placement.layers has 3 names")


def test_the_reordered_norm_is_no_trap_where_its_scores_are_bounded():
    assert lines("placement=out", depth=48) and not lines("placement=out", "attention=cosine", depth=48)
    assert not lines("placement=res_post", depth=48)  # the identity at the start
    assert lines("placement=res_post", "placement.out_gain=1.0", depth=48)


@pytest.mark.parametrize(
    "word, said",
    [
        ("placement.share=0.5", None),
        ("placement.then.out_gain=0.5", "placement.then.out_gain"),
        ("+placement.then.shar=1", "placement.then.shar is no knob of model.placement.Placement"),
        ("placement.first.places=3", "placement.first.places=3 should be an instance of Sequence"),
        ("placement.first=3", "placement.first=3 "),
    ],
)
def test_a_placement_within_a_placement_is_checked_as_one(word: str, said: str | None):
    if said is None:
        assert check(config("placement=mix", word)[0])["placement"]["first"]["places"] == ["sum"]
    else:
        with pytest.raises(Exception, match=said):
            check(config("placement=mix", word)[0])


def test_a_kind_of_one_s_own():
    node = "+placement.kinds.mine={_target_: model.placement.Placement, places: [in, sum]}"
    words = ["placement=by_layer", "placement.layers=[mine]", node]
    assert not network(*words).head.norm.state_dict()  # a norm on the last sum, none before the head
    with pytest.raises(ValueError, match=r"placement\.kinds\.mine=3 has no _target_, as its neighbours have"):
        check(config("placement=by_layer", "+placement.kinds.mine=3")[0])
