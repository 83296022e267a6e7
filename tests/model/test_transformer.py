"""The whole network: every cell of the cross product, causality by gradient, sizes."""

import math
import re

import pytest
import torch
from torch.nn import functional as F

import train
from conf.help import choices
from model.block import Branch
from model.coefficient import Computed, number
from model.compatibility import refusals
from model.equation import equation
from model.norm import BatchNorm, Norm
from model.sizes import Sizes
from tests.conftest import cells, is_trap, network, plain

VOCAB = 11


def deep_enough(placement: str) -> list[str]:
    """Mix-LN's first quarter is a layer from depth 4 on."""
    return ["model.depth=4"] if placement == "mix" else []


def allowed(norm: str, placement: str, residual: str) -> bool:
    names = {"norm": norm, "placement": placement, "residual": residual}
    built = train.choices_of(plain(*[f"{axis}={name}" for axis, name in names.items()]))
    return not list(refusals(built, names, Sizes(4, 16, 2, 8)))


# of an output norm whose gain starts at 0, what stands before the gain, and what multiplies the norm
SHUT = ("stream.beta", "norm_out.log_eps", "norm_out.alpha", "norm_out.shift")


def behind_a_zero(model) -> set[str]:
    """The parameters whose gradient is 0 at the first step, since a coefficient, the last matrix of their branch or the head
    starts at 0."""
    if not model.head.weight.any():
        return {name for name, _ in model.named_parameters()} - {"head.weight"}
    silent = set()
    for name, branch in model.named_modules():
        if isinstance(branch, Branch):
            inner = {f"{name}.{inner}" for inner, _ in branch.named_parameters()}
            on_skip = {
                leaf for leaf in inner if leaf.startswith((f"{name}.stream.norm_sum.", f"{name}.stream.norm_both."))
            }
            if not number(branch.stream.beta):
                silent |= inner - on_skip - {f"{name}.stream.{letter}" for letter in ("alpha", "beta")}
    return silent


@pytest.mark.case("P11")
@pytest.mark.parametrize("norm, placement, residual", cells())
def test_every_cell_that_is_allowed_trains(norm: str, placement: str, residual: str):
    """Finite loss, a finite gradient for every parameter, zero everywhere only behind what starts at zero, and one step lowers
    the loss."""
    if not allowed(norm, placement, residual):
        assert is_trap(norm, placement, residual)
        return
    model = network(
        f"norm={norm}", f"placement={placement}", f"residual={residual}", *deep_enough(placement), vocab=VOCAB
    ).double()  # a loss of 2e6, as of the RMS of one feature, has no room for a small step in float32
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (8, 9))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    silent = behind_a_zero(model)
    before = loss()
    before.backward()
    assert torch.isfinite(before)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # exp(r) is 1e-6 at the start, so its gradient can be as small as float32 shows; it is not required to be more
        shut = placement == "res_post" and (".function." in name or name.endswith(SHUT))
        open_ = name not in silent and not shut
        assert (parameter.grad.abs().max() > 0) == open_ or name.endswith("log_eps"), name
    total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    step = min(
        1e-4, 0.01 / total
    )  # partial_rmsnorm, of 1 feature of 16 here, has gradients of 10^3 and more, and curves as much
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= step * parameter.grad / total
    assert loss() < before


# where norms stand and what the coefficients are do not hang together: each choice with a few of the other axis
EQUATIONS = {(p, r) for p in choices("placement") for r in ("standard", "learned_scalars", "lns")}
EQUATIONS |= {(p, r) for p in ("pre", "post", "sandwich") for r in choices("residual")}


@pytest.mark.case("P01")
@pytest.mark.parametrize("placement, residual", sorted(EQUATIONS))
def test_the_equation_is_what_the_network_computes(placement: str, residual: str):
    """The printed line, read by Python with N, F and the coefficients of each branch, gives the network's logits."""
    words = [f"placement={placement}", f"residual={residual}", "allow_unstable=true", "model.depth=4"]
    built = train.choices_of(plain(*words))
    model = network(*words, vocab=VOCAB).double()
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.rand_like(parameter))  # so that no norm and no coefficient is like another
    tokens = torch.randint(VOCAB, (2, 5))
    text = equation(built, 4)
    *body, head = text.split(";  ")
    embedding = model.embed.token[tokens] * model.embed.scale
    x = model.embed.norm(embedding) if body[0] == "x <- N(embedding)" else embedding
    of_layer: dict[int, str] = {}
    for line in body:
        where, _, formula = line.rpartition(": ")
        runs = [run.split("-") for run in re.findall(r"[\d-]+", where)] or [["1", "4"]]
        if formula != "x <- N(embedding)":
            for run in runs:
                of_layer |= dict.fromkeys(range(int(run[0]), int(run[-1]) + 1), formula.removeprefix("x <- "))
    for layer, block in enumerate(model.blocks, start=1):
        first, _, second = of_layer[layer].partition(" then x <- ")
        x = _evaluate(first, x, block.attention)
        x = _evaluate(second or first, x, block.ffn)
    x = model.head.norm(x) if head == "logits = W N(x)" else x
    torch.testing.assert_close(x @ model.head.weight.T, model(tokens), rtol=1e-12, atol=1e-12)


class Last:
    """W, the last matrix of a branch: `W ** N(...)`, which Python binds before the `*` of a coefficient."""

    def __init__(self, function) -> None:
        self.matrix = function.o if hasattr(function, "o") else function.down

    def __pow__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.matrix(hidden)


def _evaluate(formula: str, x: torch.Tensor, branch) -> torch.Tensor:
    """A formula of the form x + beta N(F(N(x))), evaluated; its N's are the branch's norms, the innermost first."""
    stream, function = branch.stream, branch.function
    norms = (stream.norm_both, stream.norm_in, function.inner_norm, stream.norm_out, stream.norm_sum)
    inner_first = iter([norm for norm in norms if hasattr(norm, "eps")])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def N(v: torch.Tensor) -> torch.Tensor:
        """The next norm, but for what has been normalised already: N(x) + F(N(x)) has one."""
        known = next((value for given, value in seen if given is v), None)
        if known is None:
            known = next(inner_first)(v)
            seen.append((v, known))
        return known

    def F(u: torch.Tensor) -> torch.Tensor:
        """The branch, or what is given to its inner norm if it has one."""
        hidden: list[torch.Tensor] = []
        with function.inner_norm.register_forward_pre_hook(lambda _, given: hidden.append(given[0])):
            y = function(u)
        return hidden[0] if "W N(" in formula else y

    normed = isinstance(getattr(function, "head_norm_v", None), Norm)  # that is what A_N says
    scalars = {name: getattr(stream, name) for name in ("alpha", "beta", "s")}
    scalars = {name: value() if isinstance(value, Computed) else value for name, value in scalars.items()}
    text = formula
    for name in scalars:
        text = text.replace(f"{name} ", f"{name} * ")
    text = text.replace("W ", "W ** ")
    # Python evaluates the innermost call first, which is the order of `norms`, and N_both(x) + ... from left to right
    known = {"A_N" if normed else "A": F, "M": F} | ({} if normed else {"F": F})
    value = eval(text, {"x": x, "N": N, "W": Last(function), **known, **scalars})
    assert next(inner_first, None) is None, "a norm that the formula does not show"
    return value


# a norm sees what it is given, wherever that is
CAUSAL = {(norm, place) for norm in choices("norm") if norm != "none" for place in ("pre", "post")}
CAUSAL |= {(norm, place) for norm in ("rmsnorm", "batchnorm") for place in choices("placement")}


@pytest.mark.case("L07")
@pytest.mark.parametrize("norm, placement", sorted(CAUSAL))
@pytest.mark.parametrize("training", [True, False])
def test_causal_by_gradient(norm: str, placement: str, training: bool):
    """d logits_t / d embedding_u is exactly 0 for u > t. BatchNorm in training mode leaks, to later positions and to
    other sequences: that is why it is refused, and this documents it."""
    words = [f"norm={norm}", f"placement={placement}", "model.qk_norm=head", *deep_enough(placement)]
    model = network(*words, vocab=VOCAB).train(training)
    captured: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda *a: captured.append(a[2].requires_grad_()) or a[2].retain_grad())
    logits = model(torch.randint(VOCAB, (2, 8)))
    logits[0, 3].sum().backward()
    gradient = captured[0].grad
    leak = max(gradient[0, 4:].abs().max(), gradient[1].abs().max())
    assert gradient[0, :4].abs().max() > 0
    # under peri the embedding's own norm stands inside what is hooked, so its leak has happened already
    if norm == "batchnorm" and training:
        assert leak > 1e-4
    else:
        assert leak == 0


@pytest.mark.parametrize("placement", choices("placement"))
def test_the_first_loss_is_near_ln_v(placement: str):
    """Logits of variance 1 give ln V + 1/2 on average; without a head norm (post) the sum's norm does the same."""
    model = network(f"placement={placement}", "model.dim=64", "model.context=64", "model.depth=4", vocab=257)
    tokens = torch.randint(257, (16, 65), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert abs(loss - math.log(257)) < 0.7


@pytest.mark.parametrize(
    "model, vocab, expected",
    [("gpt2", 50257, 124_439_808 - (12 * 2 + 1) * 768), ("tiny", 257, 853_376)],
)
def test_published_sizes(model: str, vocab: int, expected: int):
    """GPT-2 small has 124,439,808 parameters with LayerNorm; RMSNorm has no bias in its 25 norms."""
    settings = plain(f"model={model}", "init=normal")
    built = train.network(settings, train.choices_of(settings), vocab)
    assert sum(parameter.numel() for parameter in built.parameters()) == expected


def test_a_model_preset_chooses_its_axes_and_the_command_line_wins():
    assert plain("model=llama")["ffn"]["_target_"].endswith("GatedMLP")
    assert plain("model=gpt2")["position"]["_target_"].endswith("LearnedPosition")
    assert plain("model=llama", "ffn=gelu")["ffn"]["_target_"].endswith(".MLP")
    recipe = plain("recipe=deepnorm", "model=llama")
    assert recipe["ffn"]["_target_"].endswith(".MLP") and recipe["position"]["_target_"].endswith("Rotary")
    assert plain("recipe=deepnorm", "init=normal")["init"]["_target_"].endswith("Normal")
    assert recipe["placement"]["places"] == ["sum"] and recipe["residual"]["_target_"].endswith("deepnorm")


@pytest.mark.case("G15 karpathy/nanoGPT PR #21, Modalities/modalities#357")
def test_a_tied_matrix_learns_from_both_ends():
    """Its gradient is the sum of those that embedding and head have apart. float64, some hundred terms: 1e-12."""
    tied, apart = network("model.tied=true", vocab=VOCAB).double(), network(vocab=VOCAB).double()
    copied = {n: p for n, p in tied.state_dict().items() if n not in ("embed.token", "head.weight")}
    apart.load_state_dict(copied | dict.fromkeys(("embed.token", "head.weight"), tied.embed.token.detach()))
    apart.embed.scale = tied.embed.scale
    tokens = torch.randint(VOCAB, (4, 9))
    for model in (tied, apart):
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    both = apart.embed.token.grad + apart.head.weight.grad
    torch.testing.assert_close(tied.embed.token.grad, both, rtol=1e-12, atol=1e-12)
    assert min(apart.embed.token.grad.norm(), apart.head.weight.grad.norm()) > 1e-3


@pytest.mark.case("P09 huggingface/transformers#5651", "N06 huggingface/transformers#30236")
@pytest.mark.parametrize("placement", choices("placement"))
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "none"])
def test_the_stream_is_float32_under_bf16(placement: str, norm: str):
    """Between any two branches, and at both ends; each branch is still given to the bfloat16 matrices."""
    model = network(f"norm={norm}", f"placement={placement}", *deep_enough(placement), vocab=VOCAB)
    stream, inner = set(), set()
    for branch in [branch for block in model.blocks for branch in (block.attention, block.ffn)]:
        branch.register_forward_hook(lambda _, given, y: stream.update((given[0].dtype, y.dtype)))
        branch.function.register_forward_hook(lambda _, given, y: inner.add(y.dtype))
    model.head.register_forward_hook(lambda _, given, y: stream.add(given[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(VOCAB, (2, 8)))
    assert stream == {torch.float32}
    assert inner == {torch.bfloat16}


@pytest.mark.parametrize(
    "words, said",
    [
        ("model.heads=3", r"model\.dim=16 must divide by model\.heads=3 \(16 % 3 = 1\)"),
        ("model.kv_heads=3", r"model\.heads=2 must divide by model\.kv_heads=3"),
        ("model.depth=0", r"model\.depth must be >= 1, found 0"),
        ("model.dropout=1.0", r"model\.dropout must be in \[0, 1\)"),
    ],
)
def test_sizes_that_do_not_fit(words: str, said: str):
    with pytest.raises(Exception, match=said):
        network(words)


def test_batchnorm_sees_the_future_is_said_where_it_is_true():
    assert BatchNorm.sees_future


ELSEWHERE = ("stream", "ramp", "scaling", "linear", "attention", "ffn", "init", "position")
POST_NORM = ("b2t", "span", "dual", "siamese")
WITH = {f"stream={kind}": ["placement=post"] for kind in POST_NORM}  # "axis=choice" -> what it is defined together with


@pytest.mark.parametrize("axis, choice", [(axis, choice) for axis in ELSEWHERE for choice in choices(axis)])
def test_every_other_choice_trains(axis: str, choice: str):
    """As the cells do: a finite loss and gradients, and a small step that lowers the loss."""
    word = f"{axis}={choice}"
    model = network(word, *WITH.get(word, []), "model.depth=3", vocab=VOCAB)
    model.at_step(500)
    tokens = torch.randint(VOCAB, (8, 9), generator=torch.Generator().manual_seed(0))
    before = model(tokens[:, :-1], tokens[:, 1:])
    before.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients.values())
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-4 * parameter.grad / total
    model.after_step()
    assert torch.isfinite(before) and model(tokens[:, :-1], tokens[:, 1:]) < before
