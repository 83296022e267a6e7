"""r(l, t) against its equations, in the network, over the steps of a run, and in its checkpoints."""

from fractions import Fraction

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import train
from conf.help import choices
from model.coefficient import Ramped
from model.equation import equation
from model.ramp import Equal, ProRes, Reverse
from model.site import Site
from scripts.generate import load
from stability.theory import predict
from stability.trace import trace
from tests.conftest import network, plain
from tests.reference import agree
from training.strategy import check_sharing

RAMPS = [name for name in choices("ramp") if name != "none"]
T, N = 5, 3


def prores(layer: int, step: int) -> Fraction:
    return min(Fraction(step, T * layer), Fraction(1))


def reverse(layer: int, step: int) -> Fraction:
    return min(Fraction(step, T * (N + 1 - layer)), Fraction(1))


def equal(layer: int, step: int, start: Fraction = Fraction(0)) -> Fraction:
    return start + (1 - start) * min(Fraction(step, T * N), Fraction(1))


def quarter(layer: int, step: int) -> Fraction:
    return equal(layer, step, Fraction(1, 4))


SCHEDULES = [
    (ProRes(steps_per_layer=T), prores),
    (Reverse(steps_per_layer=T), reverse),
    (Equal(steps_per_layer=T), equal),
    (Equal(steps_per_layer=T, start=0.25), quarter),
]


@pytest.mark.parametrize("ramp, schedule", SCHEDULES)
@pytest.mark.parametrize("branch", ["attention", "ffn"])
def test_the_factor_of_every_layer_at_every_step(ramp, schedule, branch):
    for layer in range(1, N + 1):
        site = Site(branch, layer, N)
        assert ramp.at(site).value.item() == pytest.approx(float(schedule(layer, 1)), rel=1e-7)
        for step in range(1, T * N + 3):
            assert ramp.factor(site, step) == pytest.approx(float(schedule(layer, step)), rel=1e-14)
    last = [step for step in range(1, 4 * T * N) if any(schedule(layer, step) < 1 for layer in range(1, N + 1))][-1]
    assert ramp.done(N) == last + 1
    assert all(ramp.factor(Site(branch, layer, N), ramp.done(N)) == 1.0 for layer in range(1, N + 1))


@pytest.mark.parametrize(
    "words, schedule",
    [
        (["ramp=prores"], prores),
        (["ramp=reverse"], reverse),
        (["ramp=equal"], equal),
        (["ramp=equal", "ramp.start=0.25"], quarter),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 40])
def test_equals_its_equations(words: list[str], schedule, step: int):
    """Post-norm with a learnt alpha and beta: r multiplies what the branch adds, and nothing else."""

    def equations(r, tokens):
        x = r.embedding(tokens)
        for layer in range(1, r.depth + 1):
            for name, F in (("attention", r.A), ("ffn", r.M)):
                at = f"blocks.{layer - 1}.{name}.stream"
                added = float(schedule(layer, step)) * r.p[f"{at}.beta"] * F(layer, x)
                x = r.N(f"{at}.norm_sum", r.p[f"{at}.alpha"] * x + added)
        return r.logits(x, norm=False)

    words = [*words, f"ramp.steps_per_layer={T}", "placement=post", "residual=learned_scalars"]
    agree(words, equations, prepare=lambda model: model.at_step(step))


def test_its_letter_stands_before_what_the_branch_adds():
    for ramp in RAMPS:
        built = train.choices_of(plain(f"ramp={ramp}", "placement=sandwich", "residual=learned_scalars"))
        assert equation(built, 3) == "x <- alpha x + r beta N(F(N(x)));  logits = W N(x)"


def test_before_the_first_step_a_network_stands_where_step_1_does():
    """What a probe measures is the step that a training would take."""
    words = ["ramp=prores", "ramp.steps_per_layer=4", "model.depth=3"]
    model, stepped = network(*words), network(*words)
    stepped.at_step(1)
    windows = [torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))]
    assert trace(model, windows).loss == trace(stepped, windows).loss
    rms = trace(model, windows).attention_rms
    plainly = trace(network("model.depth=3"), windows).attention_rms
    assert rms[0] == pytest.approx(plainly[0] / 4)  # r of layer 1 at step 1


def test_ramps_cost_nothing_once_they_are_whole():
    model = network("ramp=prores", "ramp.steps_per_layer=4", "model.depth=3")
    found = [module for module in model.modules() if isinstance(module, Ramped)]
    assert len(found) == 2 * 3

    def moves(step: int) -> bool:
        before = [ramp.value._version for ramp in found]
        model.at_step(step)
        return [ramp.value._version for ramp in found] != before

    assert moves(1) and not moves(1)  # the second micro-batch of a step
    assert moves(11) and moves(12) and not moves(13) and not moves(1000)
    assert all(ramp.value.item() == 1.0 for ramp in found)
    assert moves(2)  # a step that is taken again, from a checkpoint


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_whichever_its_factors_blocks_share_one_graph():
    """The compiler takes r for an input: a thousand layers and a new step each ask for no graph of their own."""
    model = network("ramp=prores", "ramp.steps_per_layer=4", "model.depth=6")
    torch.compiler.reset()
    counter = CompileCounter()
    run = torch.compile(lambda blocks, x: blocks[1](blocks[0](x)), backend=counter, fullgraph=True)
    for step in (1, 2, 30):
        model.at_step(step)
        x = expected = model.embed(torch.arange(8)[None])
        for first in (0, 2, 4):
            x = run(list(model.blocks[first : first + 2]), x)
        for block in model.blocks:
            expected = block(expected)
        torch.testing.assert_close(x, expected)
    assert counter.frame_count == 1


def test_nothing_is_predicted_of_a_network_that_is_not_whole():
    settings = plain("ramp=prores", "placement=post", "norm=layernorm")
    assert predict(train.choices_of(settings), network("model.depth=4").sizes).stream is None


@pytest.mark.parametrize(
    "words, said",
    [
        (["ramp=prores", "ramp.steps_per_layer=0"], r"ramp\.steps_per_layer must be >= 1, found 0"),
        (["ramp=equal", "ramp.start=1.5"], r"ramp\.start must be in \[0, 1\], found 1\.5"),
    ],
)
def test_what_is_no_ramp_is_refused(words: list[str], said: str):
    with pytest.raises(Exception, match=said):
        network(*words)


def test_a_run_that_is_resumed_in_mid_ramp_goes_on_exactly(run):
    """r of step t in step t, micro-batches and resume alike; what is sampled from a checkpoint has the r that it keeps."""
    words = [
        "ramp=prores",
        "ramp.steps_per_layer=4",
        "steps=6",
        "accumulate=2",
        "batch=4",
        "log_every=1",
        "val_every=3",
    ]
    words += [
        "save_every=3",
        "probe_every=3",
        "model.checkpointing=groups",
        "schedule=constant",
        "schedule.warmup=2",
        "picture=false",
    ]
    whole, summary = run(*words)
    _, part = run(*words, "steps=3")
    resumed, _ = run(*words, f"resume={part['directory']}", directory=part["directory"])
    keep = ("step", "loss", "val_loss", "grad_norm")
    at = [[{key: line.get(key) for key in keep} for line in lines] for lines in (whole, resumed)]
    assert [line for line in at[0] if line["step"] > 3] == [line for line in at[1] if line["step"] > 3]
    model, _ = load(summary["directory"], "last")
    values = [branch.stream.ramp.value.item() for block in model.blocks for branch in (block.attention, block.ffn)]
    assert values == [1.0, 1.0, 0.75, 0.75]


def test_devices_may_share_a_ramp():
    """Its buffer follows the steps, which are the same on all: no statistics of one device's share."""
    settings = plain("ramp=prores", "devices=2")
    check_sharing(settings, {"norm": "rmsnorm"}, network("ramp=prores"))
    with pytest.raises(ValueError, match="running statistics"):
        check_sharing(settings, {"norm": "batchnorm"}, network("ramp=prores", "norm=batchnorm"))
