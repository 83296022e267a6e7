"""Draws depend on the seed and the parameter's name alone; embeddings have RMS 1."""

import pytest
import torch

import train
from conf.help import choices
from model.init import draw_, std_of
from model.linear import Linear
from tests.conftest import SMALL, network, plain


def test_two_runs_that_differ_in_one_axis_share_every_matrix():
    base = dict(network().named_parameters())
    for other in (
        "norm=layernorm",
        "placement=sandwich",
        "residual=learned_scalars",
        "model.qk_norm=full",
        "model.depth=3",
    ):
        changed = dict(network(other).named_parameters())
        shared = [name for name, p in base.items() if p.ndim == 2 and torch.equal(p, changed[name])]
        assert len(shared) == 2 + 2 * 6, other


def test_no_two_parameters_share_their_draws():
    first, second = torch.empty(4, 4), torch.empty(4, 4)
    draw_(first, 1.0, seed=0, name="a")
    draw_(second, 1.0, seed=0, name="b")
    assert not torch.equal(first, second)
    draw_(second, 1.0, seed=1, name="a")
    assert not torch.equal(first, second)
    draw_(second, 1.0, seed=0, name="a")
    assert torch.equal(first, second)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    network()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("init", ["xavier", "fan_in"])
@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("position", choices("position"))
def test_embeddings_have_rms_one_in_sum(init: str, tied: str, position: str):
    """Over 256 x 64 draws the RMS is off by 1/sqrt(2 * 256 * 64) = 0.6%; 3% is five times that."""
    words = [f"init={init}", f"model.tied={tied}", f"position={position}", "model.dim=64", "model.context=256"]
    model = network(*words, vocab=256)
    x = model.embed(torch.arange(256)[None])
    assert x.square().mean().sqrt().item() == pytest.approx(1, rel=0.03)
    assert model.head.weight.std().item() == pytest.approx(64**-0.5, rel=0.03)
    assert (model.head.weight is model.embed.token) == (tied == "true")


def test_init_normal_is_the_same_std_everywhere():
    model = network("init=normal", "position=learned", "model.dim=64", "model.context=64", vocab=256)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.04), name
    assert model.embed.scale == 1.0


def test_the_embedding_norm_stands_after_the_position_and_before_dropout():
    model = network("placement=peri", "position=learned", "model.dropout=0.5", "model.dim=64", vocab=32)
    tokens = torch.arange(8)[None]
    expected = model.embed.norm(model.embed.token[tokens] * model.embed.scale + model.embed.position.weight[:8])
    assert torch.allclose(model.eval().embed(tokens), expected)
    dropped = model.train().embed(tokens)
    assert 0.3 < (dropped == 0).float().mean().item() < 0.7
    kept = dropped != 0
    assert torch.allclose(dropped[kept], 2 * expected[kept])


def test_biases_start_at_zero():
    model = network("model.bias=true")
    biases = [p for n, p in model.named_parameters() if n.endswith(".bias")]
    assert len(biases) == 2 * 6
    assert all((p == 0).all() for p in biases)


@pytest.mark.parametrize("init", ["xavier", "fan_in"])
@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_layernorm_is_rmsnorm_where_what_enters_the_stream_is_centred(init: str, position: str):
    """Jiang et al. 2023, arXiv 2305.14858. In float64 the means that are left are of some 1e-17."""
    tokens = torch.arange(8)[None]
    torch.set_default_dtype(torch.float64)
    try:
        for centred, apart in (("true", (0.0, 1e-10)), ("false", (1e-3, 10.0))):
            words = [f"init={init}", f"init.centred={centred}", f"position={position}", "placement=pre"]
            layer, rms = (network(f"norm={norm}", *words)(tokens) for norm in ("layernorm", "rmsnorm"))
            assert apart[0] <= (layer - rms).abs().max().item() < apart[1]
    finally:
        torch.set_default_dtype(torch.float32)


def test_centring_takes_the_mean_of_what_enters_the_stream_and_leaves_the_rest():
    words = ["position=learned", "ffn=swiglu"]
    base = dict(network(*words).named_parameters())
    for name, centred in network(*words, "init.centred=true").named_parameters():
        enters = name in ("embed.token", "embed.position.weight") or name.endswith((".o.weight", ".down.weight"))
        over = -1 if name.startswith("embed") else 0
        drawn = base[name] - base[name].mean(over, keepdim=True) if enters else base[name]
        assert torch.equal(centred, drawn), name


def test_the_std_that_is_told_is_that_of_the_matrix():
    """A sample std of n = 2^17 draws is off by 0.2%; centring over 8 features takes 1 - sqrt(7/8) = 6.5%."""
    for centred in ("false", "true"):
        settings = plain(*SMALL, f"init.centred={centred}")
        init = train.choices_of(settings).init
        write = Linear(2**14, 8, role="write")
        draw_(write.weight, init.matrix(2**14, 8), seed=0, name="w", centred=0 if init.centred else None)
        assert write.weight.std().item() == pytest.approx(std_of(write, init), rel=0.01)
        carry = Linear(8, 8, role="carry")
        assert std_of(carry, init) == init.matrix(8, 8)
