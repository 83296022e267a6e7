"""Each residual method against its own equations, its initial matrices, and what a zero at the start does."""

from collections.abc import Callable
from math import log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import train
from conf.help import choices
from data.windows import Windows
from model import execution
from model.compatibility import refusals
from model.equation import equation
from model.execution import Execution, through
from model.inventory import inventory
from model.loss import next_token_loss
from model.sizes import Sizes
from scripts.probe import Checked
from stability.theory import predict
from tests.conftest import SMALL, brought_back, network, plain
from tests.reference import Reference, agree
from training.describe import _coefficients

BARE, POST, BOTH = ["norm=none"], ["placement=post"], ["placement.places=[in,sum]"]
WINDOWS = torch.arange(36).reshape(4, 9) % 11
BRANCHES = ("attention", "ffn")


def branches(r: Reference) -> list[tuple[int, str, Callable[[int, Tensor], Tensor]]]:
    """(layer, where its stream is, F) of every branch in turn."""
    pairs = (("attention", r.A), ("ffn", r.M))
    return [(layer, f"blocks.{layer - 1}.{name}.stream", f) for layer in range(1, r.depth + 1) for name, f in pairs]


def post(alpha: Callable[[Reference, str], Any]) -> Callable[[Reference, Tensor], Tensor]:
    """x <- N(alpha x + F(x))."""

    def equations(r: Reference, tokens: Tensor) -> Tensor:
        x = r.embedding(tokens)
        for layer, at, f in branches(r):
            x = r.N(f"{at}.norm_sum", alpha(r, at) * x + f(layer, x))
        return r.logits(x, norm=False)

    return equations


def pre(s: Callable[[int], float], beta: Callable[[Reference, str], Any]) -> Callable[[Reference, Tensor], Tensor]:
    """x <- x + beta F(s N(x)), N before the head."""

    def equations(r: Reference, tokens: Tensor) -> Tensor:
        x = r.embedding(tokens)
        for layer, at, f in branches(r):
            x = x + beta(r, at) * f(layer, s(layer) * r.N(f"{at}.norm_in", x))
        return r.logits(x)

    return equations


def bare(beta: Callable[[Reference, str], Any]) -> Callable[[Reference, Tensor], Tensor]:
    """x <- x + beta F(x), and no norm anywhere."""

    def equations(r: Reference, tokens: Tensor) -> Tensor:
        x = r.embedding(tokens)
        for layer, at, f in branches(r):
            x = x + beta(r, at) * f(layer, x)
        return r.logits(x, norm=False)

    return equations


def keel(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for layer, at, f in branches(r):
        x = r.N(f"{at}.norm_sum", 6 * x + f(layer, r.N(f"{at}.norm_in", x)))
    return r.logits(x, norm=False)


def own(letter: str) -> Callable[[Reference, str], Tensor]:
    return lambda r, at: r.p[f"{at}.{letter}"]


def of_layer(r: Reference, at: str) -> Tensor:
    """One number a layer, by the name under which it is first known."""
    return r.p[f"{at.replace('ffn', 'attention')}.beta"]


def draw_zeros(model: Any) -> None:
    """Matrices that start at 0 would hide what stands before them."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4


one: Callable[..., float] = lambda *_: 1.0  # noqa: E731


@pytest.mark.parametrize(
    "words, equations",
    [
        (["residual=glm130b", *POST], post(lambda r, at: sqrt(6))),
        (["residual=keel", *BOTH], keel),
        (["residual=lns"], pre(lambda layer: 1 / sqrt(layer), one)),
        (["residual=ds_init"], pre(one, one)),
        (["residual=olmo"], pre(one, one)),
        (["residual=gpt2", "init=spike_no_more"], pre(one, one)),
        (["residual=rezero", *BARE], bare(of_layer)),
        (["residual=rezero"], pre(one, of_layer)),
        (["residual=skipinit", *BARE], bare(own("beta"))),
        (["residual=layerscale"], pre(one, own("beta"))),
        (["residual=admin", *POST], post(own("alpha"))),
        (["residual=admin", "residual.profile=false", *POST], post(own("alpha"))),
        (["residual=fixup", *BARE], bare(own("beta"))),
        (["residual=t_fixup", *BARE], bare(one)),
    ],
)
def test_equals_its_equations(words: list[str], equations):
    agree(words, equations, prepare=draw_zeros)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["residual=glm130b", *POST], "x <- N(alpha x + F(x));  logits = W x"),
        (["residual=keel", *BOTH], "x <- N(alpha x + F(N(x)));  logits = W x"),
        (["residual=lns"], "layer 1: x <- x + F(N(x));  layers 2-3: x <- x + F(s N(x));  logits = W N(x)"),
        (["residual=ds_init"], "x <- x + F(N(x));  logits = W N(x)"),
        (["residual=olmo"], "x <- x + F(N(x));  logits = W N(x)"),
        (["residual=rezero", *BARE], "x <- x + beta F(x);  logits = W x"),
        (["residual=skipinit", *BARE], "x <- x + beta F(x);  logits = W x"),
        (["residual=layerscale"], "x <- x + beta F(N(x));  logits = W N(x)"),
        (["residual=admin", *POST], "x <- N(alpha x + F(x));  logits = W x"),
        (["residual=fixup", *BARE], "x <- x + beta F(x);  logits = W x"),
        (["residual=t_fixup", *BARE], "x <- x + F(x);  logits = W x"),
        (["init=spike_no_more", "residual=gpt2"], "x <- x + F(N(x));  logits = W N(x)"),
    ],
)
def test_the_symbolic_equation(words: list[str], expected: str):
    assert equation(train.choices_of(plain(*words)), 3, has_norm=words[1:] != BARE) == expected


GLM, FIXUP, TFIXUP = 8**-0.5, 8**-0.5, 36**-0.25  # of 4 layers
MATRICES = ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.mark.parametrize(
    "words, gain",
    [
        ("residual=glm130b", {"v": GLM, "o": GLM, "gate": GLM, "up": GLM, "down": GLM}),
        ("residual=keel", {}),
        ("residual=lns", {}),
        ("residual=ds_init", lambda layer: dict.fromkeys(MATRICES, layer**-0.5)),
        ("residual=ds_init residual.scale=0.5", lambda layer: dict.fromkeys(MATRICES, 0.5 * layer**-0.5)),
        ("residual=olmo", lambda layer: dict.fromkeys(("o", "down"), (2 * layer) ** -0.5)),
        ("residual=rezero", {}),
        ("residual=skipinit", {}),
        ("residual=layerscale", {}),
        ("residual=admin", {}),
        ("residual=fixup", {"v": FIXUP, "up": FIXUP, "o": 0, "down": 0}),
        ("residual=t_fixup", {"v": TFIXUP, "o": TFIXUP, "up": TFIXUP, "down": TFIXUP}),
    ],
)
@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_the_std_of_every_matrix_by_role_and_layer(words: str, gain, ffn: str):
    """A sample std of n draws is off by 1/sqrt(2n): 0.37% for the smallest, 192 x 192; 2% is five times that."""
    sizes = ["model.depth=4", "model.dim=192", "model.heads=4", "model.kv_heads=2"]
    model = network(*words.split(), f"ffn={ffn}", *POST, *sizes, "allow_unstable=true")
    seen = 0
    for entry in inventory(model):
        if entry.kind == "matrix" and entry.layer:
            gains = gain if isinstance(gain, dict) else gain(entry.layer)
            out, inner = entry.parameter.shape
            xavier = sqrt(2 / (inner + out * (2 if entry.matrix in ("k", "v") else 1)))
            expected = gains.get(entry.matrix, 1.0) * xavier
            found = entry.parameter.detach().square().mean().sqrt().item()
            assert found == pytest.approx(expected, rel=0.02), (entry.name, found, expected)
            seen += 1
    assert seen == 4 * (7 if ffn == "swiglu" else 6)


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("position", ["rotary", "learned"])
@pytest.mark.parametrize("residual, rms", [("t_fixup", 36**-0.25), ("standard", 1.0)])
def test_the_embedding_s_gain_is_on_its_rms(residual: str, rms: float, position: str, tied: str):
    words = [f"residual={residual}", f"model.tied={tied}", f"position={position}", "model.dim=64", "model.context=256"]
    model = network(*words, "model.depth=4", vocab=256)
    x = model.embed(torch.arange(256)[None])
    assert x.square().mean().sqrt().item() == pytest.approx(rms, rel=0.03)
    assert model.head.weight.std().item() == pytest.approx(64**-0.5, rel=0.03)


def test_spike_no_more_s_std_is_the_same_in_every_matrix():
    model = network("init=spike_no_more", "residual=gpt2", "model.dim=128", "model.depth=4", "ffn=swiglu", vocab=512)
    for entry in inventory(model):
        if entry.kind == "matrix":
            expected = sqrt(2 / (5 * 128)) * (8**-0.5 if entry.matrix in ("o", "down") else 1)
            assert entry.parameter.std().item() == pytest.approx(expected, rel=0.02), entry.name
    assert model.embed(torch.arange(512)[None]).std().item() == pytest.approx(1, rel=0.02)


def test_fixup_starts_at_a_uniform_guess():
    model = network("residual=fixup", *BARE)
    assert next_token_loss(model, WINDOWS).item() == pytest.approx(log(11), rel=1e-6)
    assert not model.head.weight.any() and network("residual=fixup", "residual.zero_head=false").head.weight.any()
    with pytest.raises(ValueError, match=r"model\.tied=true the embedding with it: use model\.tied=false"):
        network("residual=fixup", "model.tied=true")
    network("residual=fixup", "residual.zero_head=false", "model.tied=true")


@pytest.mark.parametrize(
    "words, letter, count, shape, start",
    [
        (["residual=rezero"], "beta", 3, (), 0.0),
        (["residual=skipinit"], "beta", 6, (), 0.0),
        (["residual=skipinit", "residual.start=0.25"], "beta", 6, (), 0.25),
        (["residual=layerscale"], "beta", 6, (16,), 0.1),
        (["residual=layerscale", "model.depth=19"], "beta", 38, (16,), 1e-5),
        (["residual=layerscale", "model.depth=24"], "beta", 48, (16,), 1e-5),
        (["residual=layerscale", "model.depth=25"], "beta", 50, (16,), 1e-6),
        (["residual=layerscale", "residual.start=1e-4"], "beta", 6, (16,), 1e-4),
        (["residual=admin"], "alpha", 6, (16,), 1.0),
        (["residual=admin", "residual.profile=false"], "alpha", 6, (16,), sqrt(7 / log(7) - 1)),
        (["residual=fixup"], "beta", 6, (), 1.0),
    ],
)
def test_what_is_learnt_and_where_it_starts(words: list[str], letter: str, count: int, shape, start: float):
    model = network("model.depth=3", *words)
    learnt = [entry for entry in inventory(model) if entry.part == "residual"]
    assert len(learnt) == count and {entry.kind for entry in learnt} == {"coefficient"}
    for entry in learnt:
        assert entry.name.endswith(f".{letter}") and entry.parameter.shape == shape
        torch.testing.assert_close(entry.parameter.detach(), torch.full(shape, start))
    assert f"{letter} = {start:.4g}, learnt" in _coefficients(model)


def test_rezero_s_scalar_is_one_for_both_branches_of_a_layer():
    model = network("residual=rezero", "model.depth=2")
    betas = [branch.stream.beta for block in model.blocks for branch in (block.attention, block.ffn)]
    assert betas[0] is betas[1] and betas[2] is betas[3] and betas[0] is not betas[2]
    assert len(list(model.parameters())) == len(inventory(model))


@pytest.mark.parametrize("residual, steps", [("rezero", 2), ("skipinit", 2), ("fixup", 3)])
def test_what_starts_behind_a_zero_moves_soon(residual: str, steps: int):
    """At the first step the zeros alone have a gradient; after `steps` less one, all has."""
    model = network(f"residual={residual}", *BARE, vocab=11)
    for step in range(1, steps + 1):
        model.zero_grad()
        next_token_loss(model, WINDOWS).backward()
        silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert bool(silent) == (step < steps), (step, silent)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


# --------------------------------------------------------------------------------------------------------- Admin's profile


def variances(r: Reference, tokens: Tensor) -> list[float]:
    """Of x_0 and of every branch's output, in the pass with w = 1, over all numbers."""
    x = r.embedding(tokens)
    found = [((x - x.mean()) ** 2).mean().item()]
    for layer, at, f in branches(r):
        y = f(layer, x)
        found.append(((y - y.mean()) ** 2).mean().item())
        x = r.N(f"{at}.norm_sum", x + y)
    return found


def test_admin_s_weights_are_what_its_profile_measures():
    words = ["residual=admin", *POST, "position=none", "model.depth=3"]
    model = network(*words, "model.dropout=0.3").double()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    measured = variances(Reference(model), WINDOWS[:, :-1])
    model.settle(WINDOWS)
    weights = [branch.stream.alpha for block in model.blocks for branch in (block.attention, block.ffn)]
    expected = [1.0] + [sqrt(sum(measured[: i + 1])) for i in range(1, 6)]
    for weight, w in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), torch.full((16,), w, dtype=torch.float64), rtol=1e-12, atol=0)
    rest = [name for name in before if not name.endswith("alpha")]
    now = dict(model.named_parameters())
    assert all(torch.equal(before[name], now[name]) for name in rest)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_no_other_method_is_moved_by_the_windows():
    for residual in choices("residual"):
        model = network(f"residual={residual}", *POST)
        before = [parameter.clone() for parameter in model.parameters()]
        model.settle(WINDOWS)
        moved = [not torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True)]
        assert any(moved) == (residual == "admin"), residual


def test_a_run_and_a_probe_begin_with_the_profile_of_step_1_s_windows(run):
    """Those of the whole step, whatever it is split into; and a resumed run goes on with what its checkpoint has."""
    words = [
        "residual=admin",
        *POST,
        "batch=8",
        "steps=4",
        "log_every=1",
        "val_every=2",
        "save_every=2",
        "picture=false",
    ]
    words += ["schedule=constant", "schedule.warmup=1"]
    lines, summary = run(*words)
    text = torch.arange(200).numpy()
    apart = [Windows(text, context=8, batch=8, accumulate=n, steps=2, seed=0, world=m) for n, m in ((1, 1), (2, 4))]
    assert torch.equal(apart[0].first_step(), apart[0][0]) and torch.equal(apart[0][0], apart[1].first_step())
    checked = Checked([*SMALL, "data=synthetic", "data.tokens=20000", "logger=none", "threads=1", *words])
    assert checked.trace(0).loss == pytest.approx(next(line["loss"] for line in lines if "loss" in line), rel=1e-6)

    _, part = run(*words, "steps=2")
    resumed, _ = run(*words, f"resume={part['directory']}", directory=part["directory"])
    keep = ("step", "loss", "val_loss", "grad_norm")
    at = [[{key: line.get(key) for key in keep} for line in lines if line["step"] > 2] for lines in (lines, resumed)]
    assert at[0] == at[1]
    assert summary["verdict"] == "too_short"


# ------------------------------------------------------------------------------------------------- traps, theory, execution


def refused(*words: str, depth: int = 12) -> list[str]:
    names = {"norm": "rmsnorm", "placement": "pre"} | dict(w.split("=") for w in words if "." not in w.split("=")[0])
    return list(refusals(train.choices_of(plain(*words)), names, Sizes(depth, 16, 2, 8)))


@pytest.mark.parametrize("residual", ["glm130b", "keel", "admin"])
def test_a_skip_that_grows_needs_a_norm_on_the_sum(residual: str):
    assert not refused(f"residual={residual}", *POST) and not refused(f"residual={residual}", *BOTH)
    for words in (["placement=pre"], ["placement=sandwich"], ["placement=mix"], [*POST, "norm=none"]):
        (line,) = refused(f"residual={residual}", *words)
        assert f"residual={residual}" in line and "placement=post" in line


def test_admin_without_a_profile_is_refused_by_its_number():
    (line,) = refused("residual=admin", "residual.profile=false", "placement=pre")
    assert f"multiplies the stream by alpha = {sqrt(25 / log(25) - 1):.4g} at each of 24 branches" in line


@pytest.mark.parametrize(
    "words, said",
    [
        (["residual=ds_init", "residual.scale=0"], r"residual\.scale must be > 0, found 0"),
        (["residual=skipinit", "residual.start=big"], r"residual\.start='big'"),
    ],
)
def test_what_is_no_setting_is_refused(words: list[str], said: str):
    with pytest.raises(Exception, match=said):
        network(*words)


def predicted(*words: str, depth: int = 4) -> Any:
    words = ("norm=layernorm", *words)
    return predict(train.choices_of(plain(*words)), network(*words, f"model.depth={depth}").sizes)


def test_theory_knows_which_start_it_speaks_of():
    """A branch that is 0 adds nothing; a branch that reads s N(x) adds s^2 through its linear part; Xiong's gradient is that of
    plain coefficients alone, DeepNet's bound that of constants, and none is known before a profile."""
    assert predicted("residual=rezero").stream[1] == pytest.approx([1.0] * 5)
    assert predicted("placement=post").gradient is not None and predicted("placement=pre").gradient is not None
    assert predicted("residual=lns").gradient is None and predicted("residual=rezero").gradient is None
    standard, scaled = predicted("ffn.activation=relu"), predicted("ffn.activation=relu", "residual=lns")
    steps, smaller = (torch.tensor(p.stream[1]).diff() for p in (standard, scaled))
    torch.testing.assert_close(smaller, steps / torch.arange(1, 5))
    assert predicted("placement=post", "residual=glm130b").update == pytest.approx(8 * 2 / 8 / 8)
    assert predicted("placement=post", "residual=rezero").update is None
    assert predicted("placement=post", "residual=admin").stream is None
    assert predicted("residual=t_fixup").stream[0][0] == pytest.approx(36**-0.5)


@pytest.mark.parametrize("residual", choices("residual"))
def test_the_stream_is_float32_under_bf16(residual: str):
    model, seen = network(f"residual={residual}", *POST), set()
    for branch in [branch for block in model.blocks for branch in (block.attention, block.ffn)]:
        branch.register_forward_hook(lambda _, given, y: seen.update((given[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(WINDOWS[:, :-1])
    assert seen == {torch.float32}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "words, graphs",
    [
        (["residual=rezero", *BARE], 1),
        (["residual=layerscale"], 1),
        (["residual=admin", *POST], 1),
        (["residual=lns"], 2),
    ],
)
def test_equal_groups_are_one_graph(monkeypatch: pytest.MonkeyPatch, words: list[str], graphs: int):
    """Numbers that differ from layer to layer are an input of a second one. Recomputed or compiled, the same gradients."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(execution, "_compiled", lambda: torch.compile(through, backend=counter, fullgraph=True))
    model = network(*words, "model.depth=8")
    model.settle(WINDOWS)
    found = []
    for how in (Execution(), Execution(recompute=3), Execution(compiled=2)):
        model.zero_grad()
        model.execution = how
        next_token_loss(model, WINDOWS).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert counter.frame_count == graphs
    for plainly, again, compiled in zip(*found, strict=True):
        assert torch.equal(plainly, again)
        torch.testing.assert_close(compiled, plainly, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residual", choices("residual"))
def test_a_norm_on_the_sum_is_always_fit(residual: str):
    """`brought_back` says of a placement whether a skip may grow in it."""
    assert brought_back("rmsnorm", "post") and not brought_back("none", "post") and not brought_back("rmsnorm", "pre")
    assert not refused(f"residual={residual}", *POST)


def test_the_loss_falls_where_every_branch_starts_at_zero():
    model = network("residual=rezero", *BARE, "model.depth=4")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(WINDOWS[:, :-1]).flatten(0, 1), WINDOWS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(block.attention.stream.beta.abs() > 1e-3 for block in model.blocks)
