"""y = g x / RMS(x) and its derived backward against the equation in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model import norm as norms
from model import rms
from model.rms import reference, rms_norm

SHAPES = [(7,), (3, 5), (1, 1), (4, 1), (0, 6), (2, 0, 6), (2, 3, 16), (2, 3, 4, 8), (33, 257), (512, 65)]
EPS = 1e-6


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, gain and a gradient of y; every gradient has a mean, which a layer norm's backward would take away."""
    torch.manual_seed(0)
    x, direction = torch.randn(2, *shape, dtype=torch.float64)
    gain = 1 + 0.3 * torch.randn(shape[-1], dtype=torch.float64)
    return x.to(dtype).requires_grad_(), gain.to(dtype).requires_grad_(), (direction + 0.5).to(dtype)


def torch_own(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain, eps)


def results(kernel: Callable[..., Tensor], x: Tensor, gain: Tensor | None, direction: Tensor) -> list[Tensor]:
    """y, then the gradients of all that asks for one."""
    y = kernel(x, gain, EPS)
    wanted = [each for each in (x, gain) if each is not None and each.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, direction)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_gain", [True, False], ids=["gain", "no_gain"])
def test_equals_its_equation_in_float64(shape: tuple[int, ...], with_gain: bool):
    """A sum of n products of numbers of order 1 is off by at most n 2^-53 of the sum of their sizes. The longest is over the
    512 rows of a gain's gradient: 512 x 512 x 1.1e-16 = 3e-11. y takes the root of a sum: half of 257 x 1.1e-16."""
    x, gain, direction = inputs(*shape)
    got = results(rms_norm, x, gain if with_gain else None, direction)
    want = results(reference, x, gain if with_gain else None, direction)
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_gain", [True, False], ids=["gain", "no_gain"])
def test_once_and_twice_differentiated_against_differences(with_gain: bool):
    x, gain, _ = inputs(3, 5)
    arguments = (x, gain) if with_gain else (x,)

    def function(x: Tensor, gain: Tensor | None = None) -> Tensor:
        return rms_norm(x, gain, 1e-2)

    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize("frozen", ["x", "gain"])
def test_twice_differentiated_with_one_of_the_two_frozen(frozen: str):
    x, gain, direction = inputs(3, 5)
    {"x": x, "gain": gain}[frozen].requires_grad_(False)
    moving = gain if frozen == "x" else x
    second = []
    for kernel in (rms_norm, reference):
        (first,) = torch.autograd.grad(kernel(x, gain, EPS), moving, direction.requires_grad_(), create_graph=True)
        second.append(torch.autograd.grad(first.sin().sum(), direction)[0])
    torch.testing.assert_close(*second, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e15], ids=str)
@pytest.mark.parametrize("shape", [(33, 7), (512, 64), (64, 768), (2048, 32)], ids=str)
def test_exact_in_float32(shape: tuple[int, ...], scale: float):
    """The largest error by the largest number, against float64. y and dx are products of some ten roundings of 2^-24 and
    sums along a row, taken in blocks: 2^-20, and no more than twice torch's own error, which may by luck be a rounding. The
    sum over n rows in dg is one after another, as a layer norm's is: its error walks as n^(1/2) 2^-24, twice that at most."""
    x, gain, direction = (each.detach() for each in inputs(*shape, dtype=torch.float32))
    arguments = [(x * scale).requires_grad_(), gain.requires_grad_(), direction]
    exact = results(reference, *(each.detach().double().requires_grad_(each.requires_grad) for each in arguments))
    ours, torchs = (
        [((got - want).abs().max() / want.abs().max()).item() for got, want in zip(found, exact, strict=True)]
        for found in (results(rms_norm, *arguments), results(torch_own, *arguments))
    )
    for mine, theirs in zip(ours[:2], torchs[:2], strict=True):
        assert mine <= min(2**-20, 2 * theirs + 2**-23)
    assert ours[2] <= shape[0] ** 0.5 * 2**-23


def test_rows_where_the_cube_of_r_is_no_float32():
    """At |x| = 1e-15 and eps = 0, r^3 = 1e45 is inf: dx is 1e15, and torch's own composite gives inf."""
    x, gain, direction = inputs(3, 16)
    small = (x.detach() * 1e-15).requires_grad_()
    (want,) = torch.autograd.grad(reference(small, gain, 0.0), small, direction)
    narrow = small.detach().float().requires_grad_()
    (got,) = torch.autograd.grad(rms_norm(narrow, gain.float(), 0.0), narrow, direction.float())
    assert (got - want).abs().max() <= 2**-20 * want.abs().max()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("with_gain", [True, False], ids=["gain", "no_gain"])
def test_what_is_not_finite_stays_where_torch_has_it(bad: float, with_gain: bool):
    x, gain, direction = inputs(3, 16, dtype=torch.float32)
    with torch.no_grad():
        x[1, 2] = bad
    ours = results(rms_norm, x, gain if with_gain else None, direction)
    torchs = results(torch_own, x, gain if with_gain else None, direction)
    for got, want in zip(ours, torchs, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
    assert not ours[0][1, 2].isfinite() and ours[1][0].isfinite().all()


@pytest.mark.parametrize("scale", [1e19, 1e25, 1e37])
def test_squares_that_overflow_give_what_torch_gives(scale: float):
    """x.x is inf and r = 0: zeros, and no nan."""
    x, gain, direction = inputs(3, 16, dtype=torch.float32)
    with torch.no_grad():
        x *= scale
    torch.testing.assert_close(results(rms_norm, x, gain, direction), results(torch_own, x, gain, direction))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("with_gain", [True, False], ids=["gain", "no_gain"])
def test_a_row_of_zeros(eps: float, with_gain: bool):
    """r = eps^(-1/2): dx = g dy / sqrt(eps), and nothing for the gain."""
    x, gain, direction = inputs(2, 8)
    with torch.no_grad():
        x.zero_()
    y = rms_norm(x, gain if with_gain else None, eps)
    y.backward(direction)
    assert y.abs().max() == 0
    torch.testing.assert_close(x.grad, direction * (gain.detach() if with_gain else 1) / eps**0.5)
    assert gain.grad is None or gain.grad.abs().max() == 0


def test_rows_and_gradients_that_do_not_lie_one_after_the_other():
    x, gain, direction = inputs(6, 5, 4)
    turned = x.transpose(0, 2)  # (4, 5, 6), the last stride 20
    gain = torch.ones(6, dtype=torch.float64, requires_grad=True)
    got = results(rms_norm, turned, gain, direction.transpose(0, 2))
    want = results(reference, turned, gain, direction.transpose(0, 2))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert got[0].is_contiguous()  # as a layer norm's: what comes next may view it
    one = torch.ones((), dtype=torch.float64).expand(6, 5, 4)  # as the backward of a sum hands it on: all strides 0
    gain = torch.ones(4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        results(rms_norm, x, gain, one), results(reference, x, gain, one), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("moving", ["x", "gain"])
def test_only_what_needs_a_gradient_gets_one(moving: str):
    x, gain, direction = inputs(4, 6)
    both = dict(zip(("x", "gain"), results(rms_norm, x, gain, direction)[1:], strict=True))
    for name, each in (("x", x), ("gain", gain)):
        each.requires_grad_(name == moving)
    (alone,) = results(rms_norm, x, gain, direction)[1:]
    assert torch.equal(alone, both[moving])


def test_without_gradients():
    x, gain, _ = inputs(4, 6)
    with torch.no_grad():
        y = rms_norm(x, gain, EPS)
    assert not y.requires_grad
    assert torch.equal(y, rms_norm(x, gain, EPS))
    with torch.inference_mode():
        assert torch.equal(y, rms_norm(x, gain, EPS))


def test_an_input_is_left_as_it_was():
    x, gain, direction = inputs(4, 6)
    before = [each.detach().clone() for each in (x, gain, direction)]
    results(rms_norm, x, gain, direction)
    assert all(torch.equal(one, other) for one, other in zip(before, (x, gain, direction), strict=True))


def test_autocast_changes_nothing_in_either_direction():
    x, gain, direction = inputs(64, 96, dtype=torch.float32)
    plainly = results(rms_norm, x, gain, direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(rms_norm, x, gain, direction)
    assert all(torch.equal(one, other) for one, other in zip(plainly, inside, strict=True))


def test_recomputed_in_the_backward_pass_bit_by_bit():
    x, gain, direction = inputs(64, 96, dtype=torch.float32)
    again = results(lambda *arguments: checkpoint(rms_norm, *arguments, use_reentrant=False), x, gain, direction)
    assert all(torch.equal(one, other) for one, other in zip(results(rms_norm, x, gain, direction), again, strict=True))


@pytest.mark.parametrize("kind", [norms.RMSNorm, norms.ZeroRMSNorm, norms.SimpleRMSNorm, norms.BiasedRMSNorm])
def test_compiled_it_is_one_graph_of_plain_operations(kind: type[norms.Norm]):
    """aot_eager traces both directions and needs no C++ compiler; `fullgraph` raises where a graph would break."""
    seen = []

    def watched(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    module = nn.Sequential(nn.Linear(8, 8), kind(8))
    x = torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend=watched)
    torch.testing.assert_close(compiled(x), module(x))
    assert any("rsqrt" in each for each in seen)
    assert not any("autograd_function" in each or "vector_norm" in each for each in seen)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x).sin().sum(), x)
    (want,) = torch.autograd.grad(module(x).sin().sum(), x)
    torch.testing.assert_close(got, want)


def test_another_device_has_its_own_kernel(monkeypatch):
    calls = []
    monkeypatch.setattr(rms.F, "rms_norm", lambda *arguments: calls.append(arguments))
    x = torch.empty(2, 4, device="meta")
    rms_norm(x, None, EPS)
    assert calls == [(x, (4,), None, EPS)]
    rms_norm(torch.ones(2, 4), None, EPS)
    assert len(calls) == 1
    assert "model/rms.py" in rms.kernel(torch.device("cpu"))
    assert rms.kernel(torch.device("cuda")) == "torch F.rms_norm"
