"""Each norm against a reference of its equation in float64, written out here."""

from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from conf.help import choices
from model import norm as norms
from model.attention import Attention
from model.equation import equation
from model.length import ScaleNorm
from model.pointwise import Derf, DyT
from model.sizes import Sizes
from stability.theory import predict
from tests.conftest import network, plain, setting
from tests.reference import Reference, agree
from train import choices_of

DIM = 16
NAMES = [name for name in choices("norm") if name != "none"]
POINTWISE = ("dyt", "derf")  # no statistics, so no eps


def build(name: str, dim: int = DIM, **knobs: float | str) -> nn.Module:
    return instantiate(plain(f"norm={name}")["norm"], **knobs)(dim)


def spread(module: nn.Module, seed: int = 0) -> None:
    """Parameters that are like no other and no start: vectors about 1, scalars about 0.7, a learnt eps about exp(-3)."""
    torch.manual_seed(seed)
    for leaf, parameter in module.named_parameters():
        mean, std = (1.0, 0.3) if parameter.ndim else (-3.0, 0.1) if leaf == "log_eps" else (0.7, 0.1)
        nn.init.normal_(parameter, mean, std)


def rms(x: Tensor, eps: float) -> Tensor:
    return torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def reference(name: str, x: Tensor, eps: float, p: dict[str, Tensor]) -> Tensor:
    """The equation at the head of each class, in the letters of the papers."""
    dim = x.shape[-1]
    mean = x.sum(-1, keepdim=True) / dim
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / dim
    if name == "batchnorm":
        flat = x.reshape(-1, x.shape[-1])
        mean = flat.sum(0) / len(flat)
        variance = ((flat - mean) ** 2).sum(0) / len(flat)
        return p["gain"] * (x - mean) / torch.sqrt(variance + eps) + p["bias"]
    if name == "group_rmsnorm":
        return p["gain"] * torch.cat([part / rms(part, eps) for part in x.split(dim // 4, -1)], -1)
    if name == "crmsnorm":  # of dim + 1 entries that sum to zero
        whole = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
        return p["gain"] * (whole / rms(whole, eps))[..., :-1]
    length = torch.sqrt((x * x).sum(-1, keepdim=True) + dim * eps)
    equations = {
        "layernorm": lambda: p["gain"] * (x - mean) / torch.sqrt(variance + eps) + p["bias"],
        "layernorm_no_bias": lambda: p["gain"] * (x - mean) / torch.sqrt(variance + eps),
        "simple_layernorm": lambda: (x - mean) / torch.sqrt(variance + eps),
        "scalenorm": lambda: p["gain"] * x / length,
        "l2norm": lambda: x / length,
        "dyt": lambda: p["gain"] * (1 - 2 / (torch.exp(2 * p["alpha"] * x) + 1)) + p["bias"],
        "derf": lambda: p["gain"] * torch.erf(p["alpha"] * x + p["shift"]) + p["bias"],
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
    module = build(name, **({} if name in POINTWISE else {"eps": eps})).double().train()
    spread(module)
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
def test_one_explicit_eps_for_all_that_divide(name: str):
    knobs = plain(f"norm={name}")["norm"]
    if name in POINTWISE:
        assert "eps" not in knobs and not isinstance(build(name), norms.Dividing)
    else:
        assert knobs["eps"] == 1e-6 and build(name).eps == 1e-6


@pytest.mark.case("N06")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_out_is_dtype_in_with_float32_weights(name: str, dtype: torch.dtype):
    module = build(name)
    assert module(torch.randn(2, 3, DIM).to(dtype)).dtype == dtype


@pytest.mark.case("N01 meta-llama/llama#1048, pytorch/pytorch PR #133085")
@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_worked_in_at_least_float32(name: str):
    """300^2 = 90000 is inf in float16; squared there, RMSNorm would give 0 for a row whose answer is +-1. A pointwise one has
    none, and is worked in float32 too: see the next test."""
    signs = torch.tensor([1.0, -1.0]).repeat(4 * DIM // 2).reshape(4, DIM)
    if name == "batchnorm":
        signs = signs.T.contiguous().reshape(-1, 1).repeat(1, DIM)  # over the batch each feature has both signs
    module = build(name).train()
    y = module(300 * signs.half())
    exact = reference(name, 300 * signs.double(), 1e-6, dict(module.double().named_parameters()))
    assert exact.abs().min() > 0.2
    torch.testing.assert_close(y, exact.half(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", POINTWISE)
def test_a_pointwise_function_is_worked_in_float32(name: str):
    """Rounded once, at the end: every bfloat16 is what float32 gives of it, rounded."""
    module, x = build(name), torch.linspace(-4, 4, 16 * 64).reshape(64, DIM).bfloat16()
    spread(module)
    assert torch.equal(module(x), module(x.float()).bfloat16())
    step_by_step = module.bfloat16()
    assert not torch.equal(module(x), torch.tanh(step_by_step.alpha * x) * step_by_step.gain + step_by_step.bias)


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
    node = plain(f"norm={name}")["norm"]
    for knobs in [{}, {"cast": "before_gain"}] if "cast" in node else [{}]:
        build(name, **knobs)(torch.randn(2, 3, DIM).to(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert seen == [{wide}] * len(seen)
    written_out = ("learnable_eps_rmsnorm", "partial_rmsnorm", "crmsnorm", "batchnorm", *POINTWISE)
    assert bool(seen) == (name not in written_out)


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
        (partial(ScaleNorm, 4, eps=-1.0), "norm.eps must be >= 0"),
        (partial(DyT, 4, alpha=0.0), "norm.alpha must be > 0, found 0"),
        (partial(Derf, 4, alpha=-1.0), "norm.alpha must be > 0"),
    ],
)
def test_knobs_that_cannot_be(call, words: str):
    with pytest.raises(ValueError, match=words):
        call()


# --------------------------------------------------------------------------------------------------------------- cast order

CAST = [name for name in NAMES if "cast" in plain(f"norm={name}")["norm"]]


def in_bfloat16(name: str, x: Tensor, p: dict[str, Tensor], *, before_gain: bool) -> Tensor:
    """As Llama and DeBERTa have it, and as Gemma has it: x and the result in bfloat16, the parameters float32."""
    wide = x.float()
    if "layernorm" in name:
        wide = wide - wide.mean(-1, keepdim=True)
    unit = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    gain, bias = 1 + p["weight"] if name == "zero_rmsnorm" else p["gain"], p.get("bias")
    if before_gain:
        y = unit.bfloat16() * gain.bfloat16()
        return y if bias is None else y + bias.bfloat16()
    y = unit * gain
    return (y if bias is None else y + bias).bfloat16()


def away_from_borders(y: Tensor) -> Tensor:
    """Where y is not halfway between two neighbours in bfloat16, which keeps 8 binary digits, to 2^-17 of it."""
    mantissa = torch.frexp(y).mantissa.abs()  # 0.5 to 1
    return ((256 * mantissa) % 1 - 0.5).abs() > 2**-9


def test_those_with_a_gain_that_people_cast_have_the_knob():
    assert set(CAST) == {"layernorm", "layernorm_no_bias", "rmsnorm", "rmsnorm_bias", "zero_rmsnorm"}


@pytest.mark.case("N05 google/gemma_pytorch PR #67, huggingface/transformers#33133")
@pytest.mark.parametrize("name", CAST)
def test_both_cast_orders_bit_for_bit(name: str):
    """On rows without a number that lies so near to a border between two bfloat16 that a float32 summed in another order
    could round the other way."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, DIM, generator=generator).bfloat16()
    module = build(name).double()
    spread(module)
    unit = module.unit(x.double())
    x = x[(away_from_borders(unit) & away_from_borders(module(x.double()))).all(-1)]
    assert len(x) > 32
    for cast in ("last", "before_gain"):
        module = build(name, cast=cast)
        spread(module)
        parameters = dict(module.named_parameters())
        want = in_bfloat16(name, x, parameters, before_gain=cast == "before_gain")
        other = in_bfloat16(name, x, parameters, before_gain=cast == "last")
        assert torch.equal(module(x), want), cast
        assert (want != other).float().mean() > 0.1
        for dtype in (torch.float32, torch.float64):  # there is nothing to round there
            assert torch.equal(module(x.to(dtype)), super(norms.Gained, module).forward(x.to(dtype)))


def test_the_published_order_of_llama(oracle):
    case = oracle("oracle_cast_order.json")
    x, w = (torch.tensor(case[key], dtype=torch.float32) for key in ("x", "w"))
    want = torch.tensor(next(value for key, value in case.items() if key.startswith("order_A")))
    module = norms.RMSNorm(64, eps=case["eps"], cast="before_gain")
    with torch.no_grad():
        module.gain.copy_(w)
    assert torch.equal(module(x.bfloat16()).float(), want)


def test_the_gain_learns_in_either_order():
    """The gradient passes the rounding as it passes any cast: that of float32 to the 2^-8 that bfloat16 keeps."""
    for name in CAST:
        found = []
        for cast in ("last", "before_gain"):
            module, x = build(name, cast=cast), torch.linspace(-2, 3, 4 * DIM).view(4, DIM).bfloat16().requires_grad_()
            (module(x).float() * torch.linspace(1, 2, DIM)).sum().backward()
            found.append([x.grad.float(), *(p.grad for p in module.parameters())])
        assert all(p.grad.dtype == torch.float32 for p in module.parameters())
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    "words, idle",
    [
        (["precision=fp32", "placement=sandwich"], True),
        (["precision=bf16-mixed", "placement=pre"], True),  # the stream is float32
        (["precision=bf16-mixed", "placement=sandwich"], False),
        (["precision=bf16-mixed", "placement=pre", "model.qk_norm=head"], False),
    ],
)
def test_an_order_that_changes_nothing_is_said_to_and_one_that_does_is_not(words: list[str], idle: bool, run, capsys):
    given = ["steps=2", "picture=false", "save_every=0", "data.val_windows=4", *words]
    after, _ = run(*given, "norm.cast=before_gain")
    assert ("norm.cast=before_gain changes nothing here" in capsys.readouterr().out) == idle
    before, _ = run(*given)
    assert (after[-1]["val_loss"] == before[-1]["val_loss"]) == idle


@pytest.mark.parametrize("name, known", [("scalenorm", True), ("simple_layernorm", True), ("l2norm", False), ("dyt", False), ("derf", False), ("crmsnorm", False)])  # fmt: skip
def test_theory_speaks_of_those_that_give_an_rms_of_one(name: str, known: bool):
    words = [f"norm={name}", "model.dim=64", "model.heads=4"]
    predicted = predict(choices_of(plain(*words)), network(*words).sizes)
    assert (predicted.stream is not None) == (predicted.gradient is not None) == known


# ----------------------------------------------------------------------------------------------------- lengths, equivalences


def test_scalenorm_starts_as_rmsnorm_without_a_gain_and_l2norm_is_its_direction():
    x = torch.randn(3, 5, DIM)
    assert torch.equal(build("scalenorm")(x), build("simple_rmsnorm")(x))
    assert build("scalenorm").gain.item() == 4.0  # sqrt(16)
    torch.testing.assert_close(build("l2norm", eps=0.0)(x).norm(dim=-1), torch.ones(3, 5))


def test_fixnorm_is_scalenorm_at_the_embedding():
    """Embeddings of length 1 times a learnt scale; the network's other places as ever."""
    words = ["norm=scalenorm", "placement.places=[embed,in,head]"]

    def fixed(r: Reference, tokens: Tensor) -> Tensor:
        def scaled(name: str, x: Tensor) -> Tensor:
            return r.p[f"{name}.gain"] * x / torch.sqrt((x * x).sum(-1, keepdim=True) + r.dim * 1e-6)

        x = scaled("embed.norm", r.embedding(tokens))
        for layer in range(1, r.depth + 1):
            x = x + r.A(layer, scaled(f"blocks.{layer - 1}.attention.stream.norm_in", x))
            x = x + r.M(layer, scaled(f"blocks.{layer - 1}.ffn.stream.norm_in", x))
        return scaled("head.norm", x) @ r.p["head.weight"].T

    model = agree(words, fixed)
    assert equation(choices_of(plain(*words)), 3) == "x <- N(embedding);  x <- x + F(N(x));  logits = W N(x)"
    lengths = model.embed(torch.arange(model.embed.token.shape[0])[None]).norm(dim=-1)
    torch.testing.assert_close(lengths, model.embed.norm.gain.expand_as(lengths), rtol=1e-4, atol=0)  # eps


def test_crmsnorm_is_rmsnorm_of_the_vector_that_it_stands_for():
    """Its own class for the one of dim + 1 entries that sum to zero; the last is left out again."""
    x = torch.randn(3, DIM, dtype=torch.float64)
    whole = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
    torch.testing.assert_close(
        build("crmsnorm").double()(x), norms.RMSNorm(DIM + 1).double()(whole)[..., :DIM], rtol=1e-12, atol=1e-12
    )


def test_crmsnorm_of_what_is_centred_starts_at_an_rms_of_one():
    """Nothing is left out of a stream that starts with mean zero: (dim + 1) / dim of the mean square, to what is biased by
    eps. Of independent entries half is."""
    for centred, low, high in ((True, 17 / 16 - 1e-3, 17 / 16 + 1e-3), (False, 0.4, 0.8)):
        model = network(
            "norm=crmsnorm", f"init.centred={str(centred).lower()}", "placement=peri", "model.depth=4", vocab=64
        )
        x = model.embed(torch.arange(64).view(8, 8))
        assert low < x.square().mean().item() < high


@pytest.mark.parametrize("name", POINTWISE)
def test_a_pointwise_function_may_have_no_bias(name: str):
    assert dict(build(name, bias=False).named_parameters()).keys() == dict(build(name).named_parameters()).keys() - {
        "bias"
    }
    x = torch.randn(3, DIM)
    torch.testing.assert_close(build(name, bias=False)(x), build(name)(x))


# --------------------------------------------------------------------------------------------------------------- in a network


@pytest.mark.parametrize("qk_norm", ["head", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_qk_norm_with_any_of_them(name: str, qk_norm: str):
    """float64, a softmax of sums of 16 products: 1e-10 is a thousand times what that leaves."""
    sizes = Sizes(1, DIM, 2, 5, qk_norm=qk_norm)
    module = Attention(setting(sizes, norm=partial(build, name))).double().train()
    for matrix in (module.q, module.k, module.v, module.o):
        nn.init.normal_(matrix.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    for seed, norm in enumerate((module.full_norm_q, module.full_norm_k, module.head_norm_q, module.head_norm_k)):
        spread(norm, seed)
    u = torch.randn(2, 5, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def normed(norm: nn.Module, x: Tensor) -> Tensor:
        return reference(name, x, 1e-6, dict(norm.named_parameters()))

    def heads(x: Tensor) -> Tensor:
        return x.view(2, 5, 2, 8).transpose(1, 2)

    q, k, v = (u @ matrix.weight.T for matrix in (module.q, module.k, module.v))
    if qk_norm == "full":
        q, k = heads(normed(module.full_norm_q, q)), heads(normed(module.full_norm_k, k))
    else:
        q, k = normed(module.head_norm_q, heads(q)), normed(module.head_norm_k, heads(k))
    scores = q @ k.transpose(-1, -2) / 8**0.5
    weights = scores.masked_fill(torch.ones(5, 5).tril() == 0, -torch.inf).softmax(-1)
    expected = (weights @ heads(v)).transpose(1, 2).flatten(2) @ module.o.weight.T
    torch.testing.assert_close(module(u), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_is_one_graph(name: str):
    """`fullgraph` raises where a graph would break; what comes in is bfloat16, where `cast` acts."""
    node = plain(f"norm={name}")["norm"]
    module = build(name, **({"cast": "before_gain"} if "cast" in node else {})).eval()
    x = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))
