"""What `clip_by` does to a gradient, against its definition in numpy, and what the record says of it."""

from typing import get_args

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conf.schema import ClipBy
from model.inventory import inventory
from stability import report
from stability.gradients import GradientNorms
from stability.records import read
from tests.conftest import network
from tests.training.test_devices import finished, same
from tests.training.test_task import clipped
from training.clipping import CLIPS

DEPTH = 3


def gradients(words: list[str], scale: float = 1.0) -> GradientNorms:
    """Of a network whose layers' gradients differ, in float64."""
    model = network(f"model.depth={DEPTH}", *words).double()
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for entry in inventory(model):
        entry.parameter.grad *= scale * (1 + entry.layer)
    return GradientNorms(inventory(model), DEPTH)


def flat(found: GradientNorms) -> dict[str, np.ndarray]:
    return {e.name: e.parameter.grad.flatten().numpy().copy() for e in found.entries if e.parameter.grad is not None}


def norm(parts: list[np.ndarray]) -> float:
    return float(np.sqrt(sum((part**2).sum() for part in parts)))


def factor(parts: list[np.ndarray], bound: float) -> float:
    return min(1.0, bound / (norm(parts) + 1e-6))


def expected(kind: str, before: dict[str, np.ndarray], bound: float) -> dict[str, np.ndarray]:
    if kind == "norm":
        return {name: factor([*before.values()], bound) * g for name, g in before.items()}
    if kind == "value":
        return {name: np.maximum(-bound, np.minimum(bound, g)) for name, g in before.items()}
    layer = {name: ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in before}
    assert sorted(set(layer.values())) == ["blocks.0", "blocks.1", "blocks.2", "embed", "head"]
    parts = {one: [g for name, g in before.items() if layer[name] == one] for one in layer.values()}
    return {name: factor(parts[layer[name]], bound) * g for name, g in before.items()}


def taken(kind: str, found: GradientNorms, bound: float) -> float:
    norms = found.measure()
    return CLIPS[kind](found, norms, torch.linalg.vector_norm(norms), bound).item()


@pytest.mark.parametrize(
    "words", [["placement=peri"], ["position=learned", "model.bias=true", "stream=single"]], ids=str
)
@pytest.mark.parametrize("kind, bound", [("norm", 0.5), ("layer", 0.5), ("value", 0.01)])
def test_each_kind_is_its_definition(kind: str, bound: float, words: list[str]):
    """float64, sums of some thousand squares: 1e-12. The coefficient is the share of the norm that is left."""
    found = gradients(words)
    before = flat(found)
    wanted = expected(kind, before, bound)
    kept = taken(kind, found, bound)
    for name, gradient in flat(found).items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-12, atol=1e-15, err_msg=name)
    assert kept == pytest.approx(norm([*wanted.values()]) / norm([*before.values()]), rel=1e-12)
    assert 0.01 < kept < 0.9  # it did clip


def test_each_kind_clips_what_it_bounds_and_spares_the_rest():
    """A bound between the norms of the layers touches the larger ones alone, one between the entries' sizes those alone."""
    found = gradients([])
    table = found.table(found.measure().numpy())
    layers = np.sqrt(sum(np.array(table[part]) ** 2 for part in ("attention", "ffn", "norm", "residual")))
    bound, before = 1.001 * float(np.sort(layers)[1]), flat(found)
    taken("layer", found, bound)
    after = flat(found)
    changed = {name for name, g in before.items() if not np.array_equal(g, after[name])}
    largest = int(layers.argmax())
    assert changed and all(name.startswith((f"blocks.{largest}.", "embed", "head")) for name in changed)
    assert any(name.startswith(f"blocks.{largest}.") for name in changed)

    found = gradients([])
    before = np.concatenate([*flat(found).values()])
    bound = float(np.quantile(np.abs(before), 0.9))
    taken("value", found, bound)
    after = np.concatenate([*flat(found).values()])
    assert np.array_equal(after != before, np.abs(before) > bound)
    assert 0.05 < (after != before).mean() < 0.15


@pytest.mark.parametrize("kind", CLIPS)
def test_what_is_not_clipped_stays_bit_by_bit_and_its_coefficient_is_1(kind: str):
    for scale in (1.0, 0.0):
        found = gradients([], scale)
        before = flat(found)
        assert taken(kind, found, 1e9) == 1.0
        after = flat(found)
        assert all(np.array_equal(g, after[name]) for name, g in before.items())


def test_every_kind_can_be_chosen():
    assert set(CLIPS) == set(get_args(ClipBy))


@pytest.mark.parametrize("kind", CLIPS)
def test_a_gradient_that_is_not_finite_moves_no_weight(kind: str):
    _, weight, optimizer = clipped([1.0, float("inf")], 1.0, clip_by=CLIPS[kind])
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", CLIPS)
def test_the_record_has_the_norm_before_and_what_clipping_kept(run, kind: str):
    """With plain SGD a step is lr times the clipped gradient: its length over the norm before is the coefficient."""
    words = ["optimizer=sgd", "optimizer.lr=1", "schedule=constant", "schedule.warmup=0", "picture=false", "steps=1"]
    records, first = run(*words, "clip=1e-3", f"clip_by={kind}")
    free, _ = run(*words, "clip=0")
    (record,), (unclipped,) = ([r for r in each if "loss" in r] for each in (records, free))
    assert record["grad_norm"] == unclipped["grad_norm"] and unclipped["clip_coefficient"] == 1.0
    start = {name: p.detach() for name, p in network("data=synthetic", vocab=len_of(first)).named_parameters()}
    saved = torch.load(first["directory"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    moved = norm([(saved[f"model.{name}"] - value).double().numpy() for name, value in start.items()])
    # weights of order 0.1 and moves of order 1e-4 leave three digits in float32
    assert record["clip_coefficient"] == pytest.approx(moved / record["grad_norm"]["total"], rel=1e-2)
    assert record["clip_coefficient"] < 0.9


def len_of(summary) -> int:
    saved = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return len(saved["model.head.weight"])


def test_a_run_with_another_kind_is_no_longer_the_same_run(run):
    words = ["steps=2", "picture=false", "schedule=constant", "schedule.warmup=0"]
    _, first = run(*words, "clip_by=layer")
    again = {"directory": first["directory"]}
    with pytest.raises(ValueError, match=r"clip_by differ from the run's own config, which would change its numbers"):
        run(*words, "steps=3", "clip_by=value", f"resume={first['directory']}", **again)
    with pytest.raises(ValueError, match=r"^clip_by='length' should be 'norm', 'layer' or 'value'"):
        run("clip_by=length")


@pytest.mark.parametrize("kind, drawn", [("norm", True), ("layer", False)])
def test_the_threshold_is_drawn_where_it_is_one_of_the_whole(run, monkeypatch, kind: str, drawn: bool):
    _, summary = run("steps=2", "picture=false", "clip=0.7", f"clip_by={kind}")
    labels, furnish = [], report.furnish
    monkeypatch.setattr(
        report,
        "furnish",
        lambda panel, *rest: (labels.extend(panel.get_legend_handles_labels()[1]), furnish(panel, *rest)),
    )
    report.draw_run(read(summary["directory"]), summary["directory"] / "again.png")
    assert ("clip threshold 0.7" in labels) == drawn


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind, bound", [("layer", 0.2), ("value", 0.01)])
def test_two_devices_clip_as_one(tmp_path, trainer: str, kind: str, bound: float):
    words = ["steps=6", f"clip={bound}", f"clip_by={kind}", "log_every=1", "residual=learned_scalars"]
    finished(tmp_path, "one", *words)
    finished(tmp_path, "two", *words, "devices=2", f"trainer={trainer}")
    same(tmp_path / "two", tmp_path / "one")
