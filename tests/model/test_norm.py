"""Each norm against a reference of its equation in float64, written out here."""

from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from conf.help import choices
from model import norm as norms
from tests.conftest import plain

DIM = 16
NAMES = [name for name in choices("norm") if name != "none"]


def build(name: str, dim: int = DIM, **knobs: float) -> nn.Module:
    return instantiate(plain(f"norm={name}")["norm"], **knobs)(dim)


def rms(x: Tensor, eps: float) -> Tensor:
    return torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def reference(name: str, x: Tensor, eps: float, p: dict[str, Tensor]) -> Tensor:
    """The equation at the head of each class, in the letters of the papers."""
    if name == "layernorm":
        mean = x.sum(-1, keepdim=True) / x.shape[-1]
        variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
        return p["gain"] * (x - mean) / torch.sqrt(variance + eps) + p["bias"]
    if name == "batchnorm":
        flat = x.reshape(-1, x.shape[-1])
        mean = flat.sum(0) / len(flat)
        variance = ((flat - mean) ** 2).sum(0) / len(flat)
        return p["gain"] * (x - mean) / torch.sqrt(variance + eps) + p["bias"]
    if name == "group_rmsnorm":
        return p["gain"] * torch.cat([part / rms(part, eps) for part in x.split(DIM // 4, -1)], -1)
    equations = {
        "rmsnorm": lambda: p["gain"] * x / rms(x, eps),
        "zero_rmsnorm": lambda: (1 + p["weight"]) * x / rms(x, eps),
        "rmsnorm_bias": lambda: p["gain"] * x / rms(x, eps) + p["bias"],
        "simple_rmsnorm": lambda: x / rms(x, eps),
        "learnable_eps_rmsnorm": lambda: p["gain"] * x / rms(x, torch.exp(p["log_eps"])),
        "partial_rmsnorm": lambda: p["gain"] * x / rms(x[..., :1], eps),  # int(0.0625 * 16) = 1
    }
    if name not in equations:
        pytest.fail(f"norm={name} has no reference: write its equation here, in plain float64 arithmetic")
    return equations[name]()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_equals_its_equation_forward_and_backward(name: str, eps: float):
    """float64 keeps 2^-53 = 1.1e-16 a operation; a row of 16 takes some 50 of them on numbers of order 1 to 10 (pRMSNorm
    divides by a single feature): 1e-12 is a hundred times that, and a thousandth of what a misplaced eps changes."""
    module = build(name, eps=eps).double().train()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim else -3.0, 0.3 if parameter.ndim else 1e-9)
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 5, DIM, dtype=torch.float64)
    y = module(x)
    expected = reference(name, x, eps, dict(module.named_parameters()))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    inputs = [x, *module.parameters()]
    got = torch.autograd.grad((y * direction).sum(), inputs)
    want = torch.autograd.grad((expected * direction).sum(), inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.case("N02 pytorch/pytorch#155527", "N13 pytorch/pytorch PR #173039")
@pytest.mark.parametrize("name", NAMES)
def test_one_explicit_eps_for_all(name: str):
    assert plain(f"norm={name}")["norm"]["eps"] == 1e-6
    assert build(name).eps == 1e-6


@pytest.mark.case("N06")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_out_is_dtype_in_with_float32_weights(name: str, dtype: torch.dtype):
    module = build(name)
    assert module(torch.randn(2, 3, DIM).to(dtype)).dtype == dtype


@pytest.mark.case("N01 meta-llama/llama#1048, pytorch/pytorch PR #133085")
@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_worked_in_at_least_float32(name: str):
    """300^2 = 90000 is inf in float16; squared there, RMSNorm would give 0 for a row whose answer is +-1."""
    signs = torch.tensor([1.0, -1.0]).repeat(4 * DIM // 2).reshape(4, DIM)
    if name == "batchnorm":
        signs = signs.T.contiguous().reshape(-1, 1).repeat(1, DIM)  # over the batch each feature has both signs
    y = build(name).train()(300 * signs.half())
    torch.testing.assert_close(y, signs.half(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_zeros_gives_finite_gradients(name: str):
    module = build(name)
    x = torch.zeros(2, 3, DIM, requires_grad=True)
    y = module(x)
    (y * torch.randn_like(y)).sum().backward()
    assert y.abs().max() == 0
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.case("N07 pytorch/pytorch#167308", "N06")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_kernel_is_given_one_dtype(name: str, dtype: torch.dtype, monkeypatch):
    """Weights of float32 and an input of bfloat16 would leave the fused kernel for a slow one, on some devices for a wrong
    one."""
    seen = []

    def watched(original):
        def call(*args):
            seen.append({each.dtype for each in args if isinstance(each, Tensor)})
            return original(*args)

        return call

    monkeypatch.setattr(norms.rms, "rms_norm", watched(norms.rms.rms_norm))
    monkeypatch.setattr(norms.F, "layer_norm", watched(norms.F.layer_norm))
    build(name)(torch.randn(2, 3, DIM).to(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert seen == [{wide}] * len(seen)
    assert seen or name in ("learnable_eps_rmsnorm", "partial_rmsnorm", "batchnorm")  # written out: no fused kernel


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_statistics_and_dtype_alone(name: str):
    module, x = build(name), torch.randn(2, 3, DIM) * 100
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = module(x)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, module(x))


@pytest.mark.case("N02")
def test_published_rows(oracle):
    for row in oracle("oracle_norms.json")["rows"]:
        x = torch.tensor(row["x"], dtype=torch.float64)
        for name, kind in (("rmsnorm", norms.RMSNorm), ("layernorm", norms.LayerNorm)):
            if row.get(name) is None:
                continue
            module = kind(len(x), eps=row["eps"]).double()
            want = torch.tensor(row[name], dtype=torch.float64)
            torch.testing.assert_close(module(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.case("N01", "N05 google/gemma_pytorch PR #67, huggingface/transformers#33133")
def test_the_other_published_cases(oracle):
    """Float16 overflow, and the cast order: multiply in float32, then cast (order B; Gemma, Qwen3.5, torch)."""
    overflow = oracle("oracle_fp16_overflow.json")
    x = torch.full((overflow["d"],), overflow["x"], dtype=torch.float16)
    assert (norms.RMSNorm(overflow["d"])(x) == overflow["right_rmsnorm_eps1e-6"]).all()

    case = oracle("oracle_cast_order.json")
    x, w = (torch.tensor(case[key], dtype=torch.float32) for key in ("x", "w"))
    want = torch.tensor(next(value for key, value in case.items() if key.startswith("order_B")))
    plain_gain, zero_centred = norms.RMSNorm(64, eps=case["eps"]), norms.ZeroRMSNorm(64, eps=case["eps"])
    with torch.no_grad():
        plain_gain.gain.copy_(w)
        zero_centred.weight.copy_(w.double() - 1)
    assert torch.equal(plain_gain(x.bfloat16()).float(), want)
    assert torch.equal(zero_centred(x.bfloat16()).float(), want)


@pytest.mark.case("N05")
def test_zero_centred_gain_is_added_in_float32(oracle):
    case = oracle("oracle_weight_decay.json")["one_plus_w_bf16"]
    module = norms.ZeroRMSNorm(1, eps=0.0).bfloat16()
    nn.init.constant_(module.weight, case["w"])
    y = module(torch.ones(1, 1, dtype=torch.float32))
    assert y.item() == case["right"]


def test_batchnorm_evaluates_with_running_statistics():
    module = build("batchnorm", momentum=1.0).train()
    x = torch.randn(64, 4, DIM) * 3 + 2
    trained = module(x)
    evaluated = module.eval()(x)
    # running variance is unbiased: n / (n - 1) of the biased one
    torch.testing.assert_close(evaluated, trained, rtol=4e-3, atol=4e-3)
    assert not torch.equal(evaluated, module(x * 2))


def test_batchnorm_keeps_running_statistics_as_its_paper_has_them():
    """running <- (1 - m) running + m now, the variance unbiased: sum (x - mean)^2 / (n - 1)."""
    module = build("batchnorm", momentum=0.25).double().train()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    module(x)
    rows = x.reshape(6, DIM)
    unbiased = ((rows - rows.mean(0)) ** 2).sum(0) / 5
    torch.testing.assert_close(module.mean, 0.25 * rows.mean(0))
    torch.testing.assert_close(module.var, 0.75 + 0.25 * unbiased)


@pytest.mark.parametrize(
    "call, words",
    [
        (partial(norms.RMSNorm, 4, eps=-1.0), "norm.eps must be >= 0"),
        (partial(norms.LearnableEpsRMSNorm, 4, eps=0.0), "norm.eps must be > 0"),
        (partial(norms.GroupRMSNorm, 6, groups=4), "norm.groups=4 must divide"),
        (partial(norms.PartialRMSNorm, 4, p=0.0), "norm.p must be in"),
    ],
)
def test_knobs_that_cannot_be(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()
