"""How the blocks are run changes no number: groups that are computed again, groups that are compiled, the loss in parts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from conf.help import choices
from model import execution
from model.execution import Execution, cross_entropy, eagerly, through
from model.loss import next_token_loss
from tests.conftest import cells, network

# the compiler looks at what its inputs keep, and filters the warning that the tests would raise
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
WINDOWS = torch.arange(36).reshape(4, 9) % 11


def step(model, how: Execution = Execution(), *, seed: int = 0) -> list[Tensor]:  # noqa: B008 (it cannot change)
    """The loss and the gradients of one step."""
    torch.manual_seed(seed)
    model.zero_grad()
    model.execution = how
    loss = next_token_loss(model, WINDOWS)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_recomputing_gives_the_same_numbers_bit_by_bit(group: int):
    model = network("model.depth=7", "model.dropout=0.2", "ffn=swiglu")
    plain = step(model)
    assert same(step(model, Execution(recompute=group)), plain)
    assert not same(step(model, seed=1), plain)  # dropout was at work


def test_recomputing_keeps_a_group_and_the_inputs_of_the_others():
    """Counted by what autograd is given to keep in the forward pass: one tensor a group in place of some twenty a block."""
    model = network("model.depth=9")

    def kept(how: Execution) -> int:
        model.execution, seen = how, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            model.execution(model.blocks, torch.zeros(1, 8, 16, requires_grad=True))
        return len(seen)

    assert kept(Execution()) > 9 * 15
    assert kept(Execution(recompute=3)) <= 3 * 2


def test_nothing_is_recomputed_without_a_gradient():
    model, calls = network("model.depth=4"), []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    model.execution = Execution(recompute=2)
    with torch.no_grad():
        next_token_loss(model, WINDOWS)
    assert len(calls) == 1
    next_token_loss(model, WINDOWS).backward()
    assert len(calls) == 3


@pytest.mark.parametrize(
    "depth, size", [(1, 1), (3, 3), (4, 4), (12, 4), (25, 5), (100, 5), (1000, 5), (7, 7), (14, 7)]
)
def test_groups_that_are_compiled_divide_the_depth(depth: int, size: int):
    assert Execution.of(depth, recompute=False, compiled=True) == Execution(0, size)


@pytest.mark.parametrize("depth, kept", [(1, 1), (10, 3), (100, 10), (1000, 32)])
def test_groups_that_are_recomputed_have_the_root_of_the_depth(depth: int, kept: int):
    assert Execution.of(depth, recompute=True, compiled=False) == Execution(kept, 0)
    assert Execution.of(depth, recompute=False, compiled=False) == Execution()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs that are made, and runs them eagerly."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(through, backend=counter, fullgraph=True)
    monkeypatch.setattr(execution, "_compiled", lambda: compiled)
    yield counter
    torch.compiler.reset()


@pytest.mark.parametrize(
    "words, graphs",
    [
        (["model.depth=8"], 1),
        (["model.depth=40"], 1),
        (["model.depth=11"], 2),  # 4 + 4 + 3
        (["model.depth=12", "placement=mix"], 2),  # 3 post-norm blocks and 1 pre-norm block, then 4 + 4
        (["model.depth=8", "recipe=deepnorm"], 1),
        (["model.depth=8", "residual=learned_scalars"], 1),
    ],
)
def test_equal_groups_are_one_graph_over_training_and_validation(counter, words: list[str], graphs: int):
    model = network(*words)
    plain = step(model)
    how = Execution.of(model.depth, recompute=False, compiled=True)
    for _ in range(3):
        compiled = step(model, how)
        model.eval()
        with torch.no_grad(), eagerly(model):
            next_token_loss(model, WINDOWS[:3])
        model.train()
    assert model.execution == how
    assert counter.frame_count == graphs
    for x, y in zip(compiled, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_coefficients_that_differ_from_block_to_block_are_an_input(counter):
    """Not a graph for each, up to a limit of eight."""
    model = network("model.depth=24")
    for layer, block in enumerate(model.blocks, start=1):
        block.attention.stream.s = block.ffn.stream.s = layer**-0.5
    plain = step(model)
    for x, y in zip(step(model, Execution(compiled=2)), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("norm", choices("norm"))
def test_every_cell_is_one_graph(counter, norm: str):
    """No break, which `fullgraph` would raise for, whatever the choices."""
    for _, placement, residual in (cell for cell in cells() if cell[0] == norm and {"standard", "peri"} & {*cell}):
        torch.compiler.reset()
        counter.frame_count = 0
        model = network(f"norm={norm}", f"placement={placement}", f"residual={residual}", "model.depth=4")
        layered = placement in ("mix", "hybrid_star", "by_layer") and norm != "none"  # two kinds of block
        step(model, Execution(compiled=1 if layered else 2))
        graphs = 2 if layered else 1
        # s differs from layer to layer, and is no operation where it is 1
        assert graphs <= counter.frame_count <= graphs + (residual == "lns"), (placement, residual)


@pytest.mark.parametrize(
    "words", [["ffn=swiglu", "model.qk_norm=head", "model.kv_heads=1"], ["position=learned", "model.bias=true"]]
)
def test_the_other_choices_are_one_graph(counter, words: list[str]):
    step(network("model.depth=4", *words), Execution(compiled=2))
    assert counter.frame_count == 1


def test_compiled_groups_can_be_recomputed(counter):
    model = network("model.depth=16", "model.dropout=0.1")
    plain = step(model)
    both = step(model, Execution(recompute=4, compiled=2))
    assert counter.frame_count == 1
    for x, y in zip(both, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [Execution(compiled=2), Execution(recompute=4, compiled=2)], ids=str)
def test_under_bf16_the_compiler_keeps_and_recomputes_what_it_should(monkeypatch, how: Execution):
    """With its own backward pass, which `backend="eager"` leaves to autograd. Of bfloat16 products summed in float32."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(through, backend=counter, fullgraph=True)
    monkeypatch.setattr(execution, "_compiled", lambda: compiled)
    model = network("model.depth=8")
    with torch.autocast("cpu", torch.bfloat16):
        plain, found = step(model), step(model, how)
        found = step(model, how)
    assert counter.frame_count == 1
    for x, y in zip(found, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-3)
    torch.compiler.reset()


@pytest.mark.parametrize("at_once", [1, 5, 31, 32])
def test_the_loss_in_parts_is_the_loss(monkeypatch: pytest.MonkeyPatch, at_once: int):
    """In float64 both are sums of 32 terms in another order: 32 * 2^-53 of values near 3."""
    monkeypatch.setattr(execution, "LOGITS", 11 * at_once)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 8, 6, dtype=torch.float64, requires_grad=True)
    targets, seen = torch.randint(0, 11, (4, 8)), []

    def head(rows: Tensor) -> Tensor:
        seen.append(len(rows))
        return F.linear(rows, weight)

    loss = cross_entropy(head, x, targets, 11)
    got = [loss, *torch.autograd.grad(loss, (x, weight))]
    assert max(seen) == at_once
    reference = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten())
    for a, b in zip(got, [reference, *torch.autograd.grad(reference, (x, weight))], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
