"""What a scaling does to the network: its equations, its stds, and that what moves it does not hang on width or depth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import train
from model.compatibility import refusals
from model.equation import equation
from model.sizes import Sizes
from stability.trace import trace
from tests.conftest import network, plain
from tests.reference import Reference, agree, stds
from training.optim import adamw

SMALLER = ["scaling.base_dim=4", "scaling.base_head_dim=2"]  # than the network of 16 features and heads of 8
PRE = [("mup", [], 1.0), ("depth_mup", ["scaling.base_depth=2"], (3 / 2) ** -0.5), ("completep", [], 2 / 3)]


def scaled(beta: float) -> Callable[[Reference, Tensor], Tensor]:
    """x <- x + beta F(N(x)), scores q k^T sqrt(2) / 8, logits W N(x) / 4."""

    def on_q(q: Tensor) -> Tensor:  # and k: the reference divides their product by sqrt(8)
        return q * (2 / 8) ** 0.25

    def equations(r: Reference, tokens: Tensor) -> Tensor:
        x = r.embedding(tokens)
        for layer in range(1, r.depth + 1):
            at = f"blocks.{layer - 1}"
            heads = r.heads_of(layer, r.N(f"{at}.attention.stream.norm_in", x), on_q)
            x = x + beta * r.matrix(f"{at}.attention.function.o", heads)
            x = x + beta * r.M(layer, r.N(f"{at}.ffn.stream.norm_in", x))
        return r.logits(x) / 4

    return equations


@pytest.mark.parametrize("choice, words, beta", PRE)
def test_equals_its_equations(choice: str, words: list[str], beta: float):
    agree([f"scaling={choice}", *SMALLER, *words], scaled(beta))


@pytest.mark.parametrize(
    "choice, branch", [("mup", "F(N(x))"), ("depth_mup", "beta F(N(x))"), ("completep", "beta F(N(x))")]
)
def test_the_equation_says_it(choice: str, branch: str):
    built = train.choices_of(plain(f"scaling={choice}"))
    assert equation(built, 3, logits=0.25) == f"x <- x + {branch};  logits = c W N(x)"
    assert equation(built, 3).endswith("logits = W N(x)")


WIDE = ["model.dim=64", "model.depth=4", "scaling=mup", "scaling.base_dim=16"]


@pytest.mark.parametrize(
    "init, square, ffn, head",
    [
        ("xavier", 64**-0.5, (2 / (64 + 256)) ** 0.5, 16**-0.5),
        ("fan_in", 64**-0.5, None, 16**-0.5),
        ("normal", 0.02 * (16 / 64) ** 0.5, 0.02 * (16 / 64) ** 0.5, 0.02),
    ],
)
def test_every_std_is_the_papers(init: str, square: float, ffn: float | None, head: float):
    """sigma m^-1/2 of hidden matrices, sigma of the output matrix, sigma that of the base width 16; 2% is four standard errors
    of 4 layers' 64 x 64 numbers, and more of the others."""
    model = network(*WIDE, f"init={init}", vocab=257)
    expected = dict.fromkeys("qkvo", square) | {"up": ffn or 64**-0.5, "down": ffn or 256**-0.5}
    assert stds(model) == pytest.approx(expected, rel=0.02)
    assert model.head.weight.std().item() == pytest.approx(head, rel=0.02)
    assert model.embed.token.std().item() == pytest.approx(0.02 if init == "normal" else 1, rel=0.02)


def test_a_tied_matrix_is_the_same_at_every_width():
    """Its std is the head's, N(0, 1/base_dim), and the embedding enters with RMS 1."""
    model = network(*WIDE, "model.tied=true", vocab=257)
    assert model.embed.token.std().item() == pytest.approx(16**-0.5, rel=0.02)
    assert model.embed.scale == 4 and model.head.scale == 0.25


@pytest.mark.parametrize("choice", ["mup", "depth_mup", "completep"])
@pytest.mark.parametrize("init", ["xavier", "normal"])
def test_at_the_base_sizes_it_is_scaling_none(choice: str, init: str):
    base = ["scaling.base_dim=16", "scaling.base_head_dim=8"] + ["scaling.base_depth=3"] * (choice != "mup")
    words = ["model.depth=3", f"init={init}"]
    one, other = network(*words), network(*words, f"scaling={choice}", *base)
    tokens = torch.arange(8)[None]
    assert torch.equal(one(tokens), other(tokens))
    for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)


def test_the_other_form_of_the_output_matrix_is_the_same_training():
    """The docstring's (std / t, logits t, lr / t, decay t, eps / t), t = sqrt(m): N(0, 1/dim) for the output matrix. float64,
    five steps of some 1e4 operations: 1e-9; without one of the five it is off by 1e-4 at least."""
    words = ["scaling=mup", "scaling.base_dim=4", "model.depth=1"]
    one, other = (network(*words, vocab=11).double() for _ in range(2))
    t = (16 / 4) ** 0.5
    with torch.no_grad():
        other.head.weight /= t
    other.head.scale *= t
    knobs: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    optimizers = adamw(one, **knobs), adamw(other, **knobs)
    (group,) = [g for g in optimizers[1].param_groups if any(p is other.head.weight for p in g["params"])]
    group.update(lr=group["lr"] / t, weight_decay=group["weight_decay"] * t, eps=group["eps"] * t)
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
    torch.testing.assert_close(one(tokens[:, :-1]), other(tokens[:, :-1]), rtol=1e-9, atol=1e-9)
    assert (other.head.weight * t - network(*words, vocab=11).head.weight).abs().max() > 1e-2  # it has moved


def test_the_probe_measures_the_scores_that_attention_uses():
    """The first layer of both reads the same, so that its largest score is the factor times as large; in float64."""
    windows = [torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))]
    words = ["scaling=mup", "scaling.base_dim=16", "scaling.base_head_dim=2"]
    plain_, other = (trace(network(*more).double(), windows).logit_max[0] for more in ([], words))
    assert other == pytest.approx(plain_ * (2 / 8) ** 0.5, rel=1e-12)


@pytest.mark.parametrize(
    "words, said",
    [
        (["scaling=mup", "scaling.base_dim=0"], r"scaling\.base_dim must be >= 1, found 0"),
        (["scaling=mup", "scaling.base_head_dim=-1"], r"scaling\.base_head_dim must be >= 1, found -1"),
        (["scaling=completep", "scaling.base_depth=0"], r"scaling\.base_depth must be >= 1, found 0"),
        (["scaling=completep", "scaling.alpha=0.4"], r"scaling\.alpha must be in \[0\.5, 1\], found 0\.4"),
    ],
)
def test_what_no_scaling_can_be(words: list[str], said: str):
    with pytest.raises(Exception, match=said):
        network(*words)


@pytest.mark.parametrize(
    "residual, twice", [("standard", False), ("learned_scalars", False), ("gpt2", True), ("deepnorm", True)]
)
def test_depth_is_followed_once(residual: str, twice: bool):
    names = {"placement": "post", "residual": residual, "scaling": "completep", "norm": "rmsnorm", "init": "xavier"}
    built = train.choices_of(plain("placement=post", f"residual={residual}", "scaling=completep"))
    said = list(refusals(built, names, Sizes(12, 64, 4, 8)))
    assert [("follow the depth" in line) for line in said] == [True] * twice
    assert not list(refusals(built, names, Sizes(2, 64, 4, 8)))  # the base depth: nothing is followed


# Coordinate checks: Yang et al. 2022, arXiv 2203.03466, appendix D.1; Dey et al. 2025, arXiv 2505.01618, figure 7.


def looked_at(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Of the last block: the stream after it, what its branches give, the scores; and the logits."""
    seen: dict[str, Tensor] = {}
    block = model.blocks[-1]
    attention = block.attention.function
    places = {"stream": block, "attention": attention, "ffn": block.ffn.function}
    places |= {"q": attention.head_norm_q, "k": attention.head_norm_k}
    hooks = [
        place.register_forward_hook(lambda *a, n=name: seen.update({n: a[2].clone()})) for name, place in places.items()
    ]
    with torch.no_grad():
        seen["logits"] = model(tokens)
    for hook in hooks:
        hook.remove()
    seen["scores"] = seen.pop("q") @ seen.pop("k").transpose(-1, -2) * attention.scale
    return seen


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def coordinates(*words: str, steps: int = 5) -> dict[str, float]:
    """The RMS of each after `steps` of AdamW at lr 1e-2 on one batch, and of how far it is then from where it began."""
    model = network("position=none", "model.context=16", *words, vocab=64)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    optimizer, before = adamw(model, lr=1e-2), looked_at(model, tokens[:, :-1])
    for _ in range(steps):
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    after = looked_at(model, tokens[:, :-1])
    return {name: rms(x) for name, x in after.items()} | {
        f"change of {n}": rms(x - before[n]) for n, x in after.items()
    }


def spread(found: list[dict[str, float]]) -> dict[str, float]:
    """Largest over least, of each."""
    return {name: max(one[name] for one in found) / min(one[name] for one in found) for name in found[0]}


def of_width(dim: int, *words: str) -> dict[str, float]:
    return coordinates(f"model.dim={dim}", f"model.heads={dim // 16}", "model.depth=2", *words)


def of_depth(depth: int, *words: str) -> dict[str, float]:
    return coordinates(f"model.depth={depth}", "model.dim=64", "model.heads=4", *words)


# Measured on a CPU: muP's largest spread over widths 64 to 512 is 1.40 with Xavier (logits; all else 1.12), CompleteP's over
# depths 4 to 64 1.25 (the stream; all else 1.15). scaling=none has 8 and 36 in the stream's change. With init=normal the first
# steps begin from branches that are nearly zero: 1.71, and 3.9 in the scores.
WITHIN = 1.6


def test_moves_alike_at_every_width():
    """muP: what the last block holds, and how far five steps of AdamW move it, at widths 64 and 256 with heads of 16. The
    control, scaling=none, moves its stream 2.7 times as far at 256."""
    assert max(spread([of_width(dim, "scaling=mup") for dim in (64, 256)]).values()) < WITHIN
    assert spread([of_width(dim) for dim in (64, 256)])["change of stream"] > 2


def test_moves_alike_at_every_depth():
    """CompleteP and Depth-muP, at 4 and 16 blocks. The control's stream moves 5.4 times as far at 16; two of its blocks are
    two of CompleteP's base, so that 4 blocks differ from it by a factor of 2."""
    for choice in ("completep", "depth_mup"):
        assert max(spread([of_depth(depth, f"scaling={choice}") for depth in (4, 16)]).values()) < WITHIN, choice
    assert spread([of_depth(depth) for depth in (4, 16)])["change of stream"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("init", ["xavier", "normal"])
def test_coordinate_check_of_width(init: str):
    """Widths 64 to 512. The control's stream moves 8 times as far with Xavier, 65 times with init=normal. With init=normal the
    scores are left out: they begin at 1e-3."""
    widths, word = (64, 128, 256, 512), f"init={init}"
    found = spread([of_width(dim, "scaling=mup", word) for dim in widths])
    assert max(value for name, value in found.items() if init == "xavier" or "scores" not in name) < 2
    assert spread([of_width(dim, word) for dim in widths])["change of stream"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["completep", "depth_mup"])
def test_coordinate_check_of_depth(choice: str):
    """4 to 64 blocks: 1.25 and 1.54 (Depth-muP's feed-forward). The control's stream moves 36 times as far."""
    depths = (4, 8, 16, 32, 64)
    assert max(spread([of_depth(depth, f"scaling={choice}") for depth in depths]).values()) < 2
    assert spread([of_depth(depth) for depth in depths])["change of stream"] > 10


@pytest.mark.slow
def test_scores_do_not_grow_with_the_heads_width():
    """Heads of 16 to 128 after 20 steps: with 1/d_h the scores' change falls from 2.2 to 1.0, the random part of q k as
    m^-1/2, what is learnt not at all; with 1/sqrt(d_h) it grows 45-fold."""

    def change(dim: int, *words: str) -> float:
        return coordinates(f"model.dim={dim}", "model.heads=4", "model.depth=2", *words, steps=20)["change of scores"]

    assert 0.3 < change(512, "scaling=mup") / change(64, "scaling=mup") < 1.1
    assert change(512) / change(64) > 5
