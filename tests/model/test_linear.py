"""Matrices that are held to a norm, against their equations; what they keep out of the forward pass."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train
from model.compatibility import refusals
from model.equation import equation
from model.execution import Execution, through
from model.init import std_of
from model.inventory import inventory
from model.linear import Linear
from model.loss import next_token_loss
from model.sizes import Sizes
from tests.conftest import network, plain
from tests.model.test_reference import pre
from tests.reference import Reference, agree, stds
from tests.training.test_resume import broken_off, go_on
from training.optim import adamw
from training.strategy import check_sharing

WINDOWS = torch.arange(36).reshape(4, 9) % 11


def linears(model) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def reparametrised(r: Reference, tokens: Tensor) -> Tensor:
    """Pre-norm with W^ = (gamma / (u^T W v)) W in place of W."""

    def matrix(name: str, x: Tensor) -> Tensor:
        w, u, v, gamma = (r.p[f"{name}.{leaf}"] for leaf in ("weight", "u", "v", "gamma"))
        sigma = (u[:, None] * w * v[None, :]).sum()
        return x @ (gamma / sigma * w).T + r.p.get(f"{name}.bias", 0.0)

    r.matrix = matrix  # type: ignore[method-assign]
    return pre(r, tokens)


@pytest.mark.parametrize("words", [[], ["linear.gamma=null", "model.bias=true"]])
def test_sigma_reparam_equals_its_equations(words: list[str]):
    model = agree(["linear=sigma_reparam", *words], reparametrised)
    assert sum(name.endswith(".gamma") for name, _ in model.named_parameters()) == 3 * 6
    choices = train.choices_of(plain("linear=sigma_reparam", *words))
    assert equation(choices, 3) == "x <- x + F(N(x));  logits = W N(x)"


def test_its_vectors_are_the_singular_ones_of_the_initial_matrix():
    """eigh in float64, and u and v kept in float32: 1e-6. gamma=1 gives every matrix that acts the spectral norm 1; null
    leaves the initial network that of linear=plain."""
    tokens = torch.arange(8)[None] % 11
    for name, linear in linears(network("linear=sigma_reparam", "ffn=swiglu", "model.kv_heads=1")).items():
        sigma = torch.linalg.svdvals(linear.weight.detach())[0]
        assert linear.sigma().item() == pytest.approx(sigma.item(), rel=1e-6), name
        acting = linear(torch.eye(linear.in_features)).detach()
        assert torch.linalg.svdvals(acting)[0].item() == pytest.approx(1, rel=1e-5), name
    base, same = network(), network("linear=sigma_reparam", "linear.gamma=null")
    torch.testing.assert_close(same(tokens), base(tokens), rtol=1e-4, atol=1e-5)
    assert linears(same)["blocks.0.ffn.function.up"].gamma.item() > 1.5


def test_what_its_initial_std_is_said_to_be_is_that_of_what_acts():
    choices = train.choices_of(plain("linear=sigma_reparam"))
    model = network("linear=sigma_reparam", "model.dim=64")
    assert stds(model)["up"] == pytest.approx((2 / (5 * 64)) ** 0.5, rel=0.02)  # Xavier's, of the matrix that is drawn
    for name, linear in linears(model).items():
        acting = linear(torch.eye(linear.in_features)).detach()
        assert std_of(linear, choices.init) == pytest.approx(acting.square().mean().sqrt().item(), rel=0.02), name


def test_the_norm_is_followed_through_a_training():
    """One iteration a step, while Adam moves each weight by up to 1e-2: within 5% of the spectral norm, behind it where the two
    largest singular values change places."""
    torch.manual_seed(0)
    model = network("linear=sigma_reparam")
    optimizer = adamw(model, lr=1e-2)
    start = {name: (linear.u.clone(), linear.v.clone()) for name, linear in linears(model).items()}
    for _ in range(60):
        model.zero_grad()
        next_token_loss(model, torch.randint(11, (4, 9))).backward()
        optimizer.step()
        model.after_step()
    stale = []
    for name, linear in linears(model).items():
        weight, (u, v) = linear.weight.detach(), start[name]
        sigma = torch.linalg.svdvals(weight)[0].item()
        assert linear.sigma().item() == pytest.approx(sigma, rel=0.05), name
        assert linear.u.norm().item() == pytest.approx(1, abs=1e-6)
        stale.append((u @ weight @ v).item() / sigma)
    assert min(stale) < 0.8  # where the vectors of the start would be by now


@pytest.mark.parametrize("kind", ["sigma_reparam", "unit"])
def test_a_forward_pass_changes_nothing(kind: str):
    """So that groups that are computed again give the same numbers bit by bit, and evaluation those of training."""
    model = network(f"linear={kind}", "model.depth=5")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for how in (Execution(), Execution(recompute=2)):
        model.zero_grad()
        model.execution = how
        loss = next_token_loss(model, WINDOWS)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compile_as_one_graph():
    model, counter = network("linear=sigma_reparam", "model.depth=4"), CompileCounterWithBackend("eager")
    compiled, x = torch.compile(through, backend=counter, fullgraph=True), torch.randn(1, 8, 16)
    for group in (model.blocks[:2], model.blocks[2:]):
        torch.testing.assert_close(compiled(group, x), through(group, x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_its_norm_is_taken_in_float32_under_autocast():
    linear = linears(network("linear=sigma_reparam"))["blocks.0.ffn.function.up"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear.sigma().dtype == torch.float32
        assert linear(torch.ones(2, 16)).dtype == torch.bfloat16
    wide, narrow = linear.sigma(), linear.weight.bfloat16() @ linear.v.bfloat16() @ linear.u.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear.sigma(), wide) and narrow.item() != wide.item()


def test_devices_share_it_since_its_vectors_follow_the_weights_alone():
    """No running statistics of a device's own windows, which are refused."""
    words = ["linear=sigma_reparam", "devices=2"]
    check_sharing(plain(*words), {"linear": "sigma_reparam", "norm": "rmsnorm"}, network(*words))


def test_gammas_are_coefficients_and_do_not_decay():
    kinds = {
        e.name.rpartition(".")[2]: (e.kind, e.part) for e in inventory(network("linear=sigma_reparam")) if e.matrix
    }
    assert kinds == {"weight": ("matrix", "ffn"), "gamma": ("coefficient", "ffn")}


def test_gains_that_would_be_lost_are_refused():
    def lines(*words: str) -> list[str]:
        names = {word.partition("=")[0]: word.partition("=")[2] for word in words if "." not in word}
        choices = train.choices_of(plain(*words))
        axes = {"norm": "rmsnorm", "placement": "pre", "residual": "standard", "init": "xavier"} | names
        return list(refusals(choices, axes, Sizes(8, 16, 2, 8)))

    (line,) = lines("linear=sigma_reparam", "residual=gpt2")
    assert (
        "residual=gpt2 starts the matrices of role write 0.25 times as large, which linear=sigma_reparam undoes" in line
    )
    assert not lines("linear=sigma_reparam")
    assert not lines("residual=gpt2")
    assert not lines("linear=sigma_reparam", "linear.gamma=null", "residual=gpt2")


def test_what_cannot_be_is_said_in_one_line():
    with pytest.raises(Exception, match=r"linear\.gamma must be > 0, or null for the initial spectral norm, found 0"):
        network("linear=sigma_reparam", "linear.gamma=0.0")
    linear = linears(network("linear=sigma_reparam"))["blocks.0.ffn.function.up"]
    torch.nn.init.zeros_(linear.weight)
    with pytest.raises(ValueError, match="linear=sigma_reparam: a matrix that starts at 0 has no spectral norm"):
        linear.drawn()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigma_reparam", "unit"])
def test_a_resumed_run_is_the_unbroken_one(run, monkeypatch, kind: str):
    """What is kept beside the weights is in the checkpoint."""
    words = [f"linear={kind}", "steps=12", "log_every=1", "val_every=6", "picture=false"]
    unbroken, _ = run(*words)
    resumed, _ = go_on(run, broken_off(run, monkeypatch, 5, *words), *words)
    assert resumed == unbroken
