"""The references of the placements and residual methods that everything else builds on."""

import pytest
from torch import Tensor

from tests.reference import Reference, agree


def pre(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        x = x + r.A(layer, r.N(f"blocks.{layer - 1}.attention.stream.norm_in", x))
        x = x + r.M(layer, r.N(f"blocks.{layer - 1}.ffn.stream.norm_in", x))
    return r.logits(x)


def post(r: Reference, tokens: Tensor, alpha: float = 1.0) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        x = r.N(f"blocks.{layer - 1}.attention.stream.norm_sum", alpha * x + r.A(layer, x))
        x = r.N(f"blocks.{layer - 1}.ffn.stream.norm_sum", alpha * x + r.M(layer, x))
    return r.logits(x, norm=False)


def sandwich(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer in range(1, r.depth + 1):
        for name, F in (("attention", r.A), ("ffn", r.M)):
            at = f"blocks.{layer - 1}.{name}.stream"
            x = x + r.N(f"{at}.norm_out", F(layer, r.N(f"{at}.norm_in", x)))
    return r.logits(x)


@pytest.mark.parametrize(
    "words, equations",
    [
        (["placement=pre"], pre),
        (["placement=post"], post),
        (["placement=sandwich"], sandwich),
        (["placement=post", "residual=deepnorm"], lambda r, tokens: post(r, tokens, 6**0.25)),
    ],
)
def test_equals_its_equations(words: list[str], equations):
    agree(words, equations)
