"""nGPT against its equations, and that its vectors have length 1 at the start, in the stream, and after each step."""

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train
from conf.help import CONF
from model.compatibility import refusals
from model.equation import equation
from model.execution import Execution, through
from model.init import std_of
from model.inventory import inventory
from model.linear import Linear
from model.loss import next_token_loss
from model.sizes import Sizes
from stability.trace import trace
from tests.conftest import network, plain
from tests.reference import Reference, agree, stds
from training.optim import adamw

RECIPE = ["recipe=ngpt"]
WINDOWS = torch.arange(36).reshape(4, 9) % 11


def nrm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / ||x||, with the eps that the norms have, in the mean of squares."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + x.shape[-1] * eps)


def ngpt(r: Reference, tokens: Tensor) -> Tensor:
    """The paper's summary, section 2.6, each learnt number as stored times start / scale."""
    d, d_h = r.dim, r.dim // r.heads
    h = r.embedding(tokens)
    for layer in range(r.depth):
        for name, F in (("attention", attention), ("ffn", ffn)):
            a = r.p[f"blocks.{layer}.{name}.stream.alpha.a.inner"] * (0.05 / (1 / math.sqrt(d)))
            h = nrm(h + a * (nrm(F(r, f"blocks.{layer}.{name}.function", h, d, d_h)) - h))
    return math.sqrt(d) * r.p["head.learnt.inner"] * (h @ r.p["head.weight"].T)


def attention(r: Reference, at: str, h: Tensor, d: int, d_h: int) -> Tensor:
    q, k, v = (r.matrix(f"{at}.{name}", h) for name in "qkv")
    s = math.sqrt(d) * r.p[f"{at}.rotate.s.inner"]
    groups, out = k.shape[-1] // d_h, []
    seen = torch.ones(h.shape[-2], h.shape[-2], dtype=torch.bool).tril()
    for head in range(r.heads):
        part, shared = (slice(n * d_h, (n + 1) * d_h) for n in (head, head * groups // r.heads))
        one, other = s[shared] * nrm(q[..., part], 0.0), s[shared] * nrm(k[..., shared], 0.0)
        scores = math.sqrt(d_h) * one @ other.transpose(-1, -2)
        weights = torch.where(seen, scores.exp(), torch.zeros_like(scores))
        out.append(weights / weights.sum(-1, keepdim=True) @ v[..., shared])
    return r.matrix(f"{at}.o", torch.cat(out, -1))


def ffn(r: Reference, at: str, h: Tensor, d: int, d_h: int) -> Tensor:
    u = r.p[f"{at}.s_u"] * r.matrix(f"{at}.up", h)
    v = math.sqrt(d) * r.p[f"{at}.s_v"] * r.matrix(f"{at}.gate", h)
    return r.matrix(f"{at}.down", u * v / (1 + torch.exp(-v)))


@pytest.mark.parametrize("words", [[], ["model.kv_heads=1"]])
def test_equals_its_equations(words: list[str]):
    model = agree([*RECIPE, *words], ngpt, spread=0.03)
    assert len({id(p) for p in model.parameters()}) == 2 + 3 * (7 + 1 + 2 + 2) + 1  # a is one number, in alpha and beta


def test_its_equation_is_that_of_the_recipe():
    line = equation(train.choices_of(plain(*RECIPE)), 3)
    assert line == "x <- N(alpha x + beta N(F(x)));  logits = s W x"
    assert f"# {line}" == (CONF / "recipe" / "ngpt.yaml").read_text().splitlines()[1]


def test_the_rotation_comes_before_the_norm_and_the_scale():
    """Turned queries have the length of s_qk whatever it is, and s_qk keeps each feature its own."""
    function = network(*RECIPE).blocks[0].attention.function
    with torch.no_grad():
        function.rotate.s.inner.mul_(torch.linspace(1, 2, 16))
    q = torch.randn(1, 2, 8, 8)
    turned = function.rotate.rotate(q)
    expected = torch.linspace(1, 2, 16).view(2, 1, 8) * turned / turned.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(function.rotate(q), expected)
    assert function.scale == pytest.approx(math.sqrt(8))


def lengths(model) -> dict[str, Tensor]:
    """Of the vectors along the stream: columns of o and down, rows of all else."""
    found = {"embed": model.embed.token.norm(dim=1), "head": model.head.weight.norm(dim=1)}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[name] = module.weight.norm(dim=0 if name.endswith((".o", ".down")) else 1)
    return found


def test_every_vector_has_length_one_before_and_after_each_step():
    model = network(*RECIPE, "model.kv_heads=1")
    optimizer = adamw(model, lr=0.05, weight_decay=0.0)
    for step in range(4):
        for name, length in lengths(model).items():
            assert torch.allclose(length, torch.ones_like(length), atol=1e-6), (step, name)
        model.zero_grad()
        next_token_loss(model, WINDOWS).backward()
        optimizer.step()
        assert any((length - 1).abs().max() > 1e-3 for length in lengths(model).values())
        model.after_step()


def test_ends_can_be_left_out():
    model = network(*RECIPE, "linear.ends=false")
    assert (model.embed.token.norm(dim=1) - 1).abs().max() > 0.1
    assert network(*RECIPE, "linear.ends=false", "model.tied=true").embed.scale == 4.0


def test_a_tied_matrix_enters_the_stream_with_length_one():
    model = network(*RECIPE, "model.tied=true")
    assert torch.allclose(model.embed(torch.arange(8)[None]).norm(dim=-1), torch.ones(1, 8), atol=1e-6)


def test_stds_and_starts():
    """Unit vectors of dim numbers: RMS 1/sqrt(dim) by whatever init; and what is learnt starts as the paper has it."""
    for init in ("fan_in", "normal"):
        words = [*RECIPE, f"init={init}", "model.dim=64"]
        model, choices = network(*words), train.choices_of(plain(*words))
        assert stds(model) == pytest.approx(dict.fromkeys(["q", "k", "v", "o", "up", "gate", "down"], 1 / 8), rel=1e-5)
        for module in model.modules():
            if isinstance(module, Linear):
                assert std_of(module, choices.init) == 1 / 8
    branch = model.blocks[0].ffn
    assert torch.allclose(branch.stream.beta(), torch.full((64,), 0.05))
    assert torch.allclose(branch.stream.alpha(), torch.full((64,), 0.95))
    stored = {
        "blocks.0.ffn.stream.alpha.a.inner": 1 / 8,
        "blocks.0.attention.function.rotate.s.inner": 1 / 8,
        "head.learnt.inner": 1 / 8,
        "blocks.0.ffn.function.s_u": 1.0,
        "blocks.0.ffn.function.s_v": 1.0,
    }
    for name, value in stored.items():
        assert torch.equal(model.get_parameter(name), torch.full_like(model.get_parameter(name), value)), name
    assert torch.allclose(model.head.learnt(), torch.ones(11))
    deep = network(*RECIPE, "residual.rate=null", "model.depth=5").blocks[0].ffn.stream.beta()
    assert torch.allclose(deep, torch.full((16,), 0.2))


def test_neither_decay_nor_warm_up():
    settings = plain(*RECIPE)
    assert settings["optimizer"]["weight_decay"] == settings["schedule"]["warmup"] == 0
    assert plain(*RECIPE, "optimizer=muon")["optimizer"]["weight_decay"] == 0
    learnt = [e for e in inventory(network(*RECIPE)) if e.name.endswith((".inner", ".s_u", ".s_v"))]
    assert len(learnt) == 2 * (2 + 1 + 2) + 1 and {entry.kind for entry in learnt} == {"coefficient"}


def test_the_stream_stays_on_the_sphere_and_a_probe_sees_it():
    model = network(*RECIPE, "model.depth=12")
    found = trace(model, [WINDOWS])
    # eps is dim 1e-6 beside a squared length of 1
    assert found.stream_rms == pytest.approx([0.25] * 13, rel=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = model.embed(WINDOWS[:, :-1])
        for block in model.blocks:
            x = block(x)
            assert x.dtype == torch.float32


@pytest.mark.slow
def test_groups_are_computed_again_and_compiled_as_one_graph():
    model, counter = network(*RECIPE, "model.depth=4"), CompileCounterWithBackend("eager")
    found = []
    for how in (Execution(), Execution(recompute=2)):
        model.zero_grad()
        model.execution = how
        next_token_loss(model, WINDOWS).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    compiled = torch.compile(through, backend=counter, fullgraph=True)
    for group in (model.blocks[:2], model.blocks[2:]):
        with torch.no_grad():
            x = torch.nn.functional.normalize(torch.randn(1, 8, 16), dim=-1)
            torch.testing.assert_close(compiled(group, x), through(group, x), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_what_cannot_be_is_said_in_one_line():
    with pytest.raises(Exception, match=r"residual\.rate must be in \(0, 1\], or null for 1/depth, found 0"):
        network("residual=ngpt", "residual.rate=0.0")
    built, names = train.choices_of(plain("linear=unit", "residual=gpt2")), {"linear": "unit", "residual": "gpt2"}
    axes = {"norm": "rmsnorm", "placement": "pre", "init": "xavier"} | names
    (line,) = refusals(built, axes, Sizes(8, 16, 2, 8))
    assert "0.25 times as large, which linear=unit undoes" in line


def test_a_learnt_position_is_no_match_for_unit_rows():
    with pytest.raises(ValueError, match=r"linear=unit with position=learned: .* use position=rotary or none"):
        network("linear=unit", "optimizer.weight_decay=0", "position=learned")
