"""The equation at the head of each placement and recipe file is what its `Stream` does."""

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

import train
from conf.help import choices, summary
from model.equation import equation
from model.norm import LayerNorm, RMSNorm
from model.residual import Residual, deepnorm
from model.site import Site
from model.stream import Parts, Stream
from tests.conftest import plain

FILES = [("placement", name) for name in choices("placement")]
FILES += [("recipe", name) for name in choices("recipe") if name != "none"]


@pytest.mark.parametrize("axis, name", FILES)
def test_the_first_line_of_the_file_is_its_equation(axis: str, name: str):
    settings = plain(f"{axis}={name}")
    built, sizes = train.choices_of(settings), instantiate(settings["model"])
    has_norm = not isinstance(built.norm(1), nn.Identity)
    line = equation(built, 12, has_norm=has_norm, cap=sizes.logit_cap, logits=built.scaling.logits(sizes))
    assert summary(axis, name).removesuffix("   (at depth 12)") == line


def test_without_a_norm_the_equation_shows_none():
    built = train.choices_of(plain("placement=peri", "norm=none"))
    assert equation(built, 3, has_norm=False) == "x <- x + F(x);  logits = W x"


def test_coefficients_appear_by_their_letters():
    built = train.choices_of(plain("placement=sandwich", "residual=learned_scalars"))
    assert equation(built, 3) == "x <- alpha x + beta N(F(N(x)));  logits = W N(x)"
    scaled = lambda site, dim: Residual(s=0.5, alpha=2.0)  # noqa: E731
    built = train.choices_of(plain("placement=pre"))
    assert equation(replace(built, residual=scaled), 3) == "x <- alpha x + F(s N(x));  logits = W N(x)"
    built = train.choices_of(plain("placement=post"))
    assert equation(replace(built, residual=deepnorm), 3) == "x <- N(alpha x + F(x));  logits = W x"


@pytest.mark.case("P01 labmlai/annotated_deep_learning_paper_implementations#145")
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_published_block_outputs(oracle, norm: str):
    case = oracle("oracle_block_forward.json")
    kind = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[norm]
    x = torch.tensor(case["x"], dtype=torch.float64)
    g = torch.tensor(case["sublayer_output_g"], dtype=torch.float64)

    def stream(places: set[str], residual: Residual) -> Stream:
        return Stream(Parts(4, places, lambda dim: kind(dim, eps=case["eps"]), residual)).double()

    deep = deepnorm(Site("ffn", 1, case["n_layers"]), 4)
    assert deep.alpha == pytest.approx(case["alpha"], rel=1e-15)
    post, deepnormed, pre = stream({"sum"}, Residual()), stream({"sum"}, deep), stream({"in"}, Residual())
    for got, want in (
        (post.write(x, g), case["post"]),
        (deepnormed.write(x, g), case["deepnorm"]),
        (pre.write(x, 2 * pre.read(x)), case["pre_with_g_equal_2u"]),
    ):
        # float64 over some ten operations on numbers of order 1
        torch.testing.assert_close(got, torch.tensor(want[norm], dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_every_place_and_coefficient_acts_where_the_equation_says():
    """x <- N_sum(alpha x + beta N_out(F(s N_in(x)))) with four different marks in place of norms."""

    class Mark(nn.Module):
        def __init__(self, add: float) -> None:
            super().__init__()
            self.add = add

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.add

    marks = iter((10.0, 100.0, 1000.0))  # in, out, sum, in the order in which they are made
    residual = Residual(alpha=2.0, s=3.0, beta=5.0)
    stream = Stream(Parts(1, {"in", "out", "sum"}, lambda dim: Mark(next(marks)), residual))
    x = torch.tensor([7.0])
    assert stream.read(x).item() == 3 * (7 + 10)
    assert stream.write(x, torch.tensor([1.0])).item() == 2 * 7 + 5 * (1 + 100) + 1000
