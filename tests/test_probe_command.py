"""The probe's command: its numbers are those of step 1 of a training run, its answers one line; and the papers' claims about
initialisation, held against it."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import probe
from stability.probe import slope
from stability.trace import Trace
from tests.conftest import SMALL

TEXT = ["data=synthetic", "data.tokens=20000"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("words", [
    ["model.depth=12", "placement=post"],
    ["recipe=deepnorm", "norm=layernorm", "model.bias=true", "seed=5"],
    ["residual=learned_scalars", "model.dropout=0.2", "accumulate=4"],
    ["norm=batchnorm", "allow_unstable=true", "tokenizer=bpe", "tokenizer.vocab=300"],
    ["precision=fp64"],
    ["precision=bf16-mixed"],
], ids=lambda words: words[0])  # fmt: skip
def test_the_numbers_are_those_of_step_1(run, words: list[str]):
    records, _ = run("steps=3", "clip=1e-3", *words)
    (record,) = [record for record in records if record["step"] == 1 and "loss" in record]
    given = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if word.partition("=")[0] not in given]
    checked = probe.Checked([*small, *TEXT, "steps=3", "threads=1", *words])
    found = checked.trace(checked.plain["seed"])
    rel = 1e-8 if "precision=fp64" in words else 1e-5  # the record has 9 digits
    assert found.loss == pytest.approx(record["loss"], rel=rel)
    assert found.grad_norm.keys() == record["grad_norm"].keys()
    for name, norms in record["grad_norm"].items():
        assert found.grad_norm[name] == pytest.approx(norms, rel=rel, abs=1e-9), name


def test_another_seed_is_another_run(run):
    """The probe's second seed is the run of that seed: its matrices, and its windows."""
    records, _ = run("steps=1", "seed=1")
    found = probe.Checked([*SMALL, *TEXT, "steps=1", "threads=1"]).trace(1)
    (loss,) = [record["loss"] for record in records if record["step"] == 1 and "loss" in record]
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_the_command_compares_and_writes(tmp_path: Path, capsys):
    words = [*SMALL, *TEXT, ":", "placement=pre", "vs", "placement=post", "model.depth=3", "vs", "norm=none"]
    assert probe.main([*words, "--seeds", "2", "--out", str(tmp_path / "new" / "out")]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "placement=post model.depth=3" in said.out
    assert "norm=none: no theory known for the stream" in said.out
    assert said.out.split()[-2:] == [str(tmp_path / "new" / "out" / f"probe.{kind}") for kind in ("png", "json")]
    found = json.loads((tmp_path / "new" / "out" / "probe.json").read_text())["configurations"]
    assert [one["depth"] for one in found] == [2, 3, 2] and found[0]["seeds"] == [0, 1]
    assert found[1]["overrides"] == [*SMALL, *TEXT, "placement=post", "model.depth=3"]
    assert found[1]["config"]["model"]["depth"] == 3 and found[1]["config"]["norm"]["eps"] == 1e-6
    assert np.array(found[1]["arrays"]["stream_rms"]).shape == (2, 4)
    assert (tmp_path / "new" / "out" / "probe.png").stat().st_size > 10_000


def test_by_default_it_writes_below_runs(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert probe.main([*SMALL, *TEXT, "--seeds", "1"]) == 0
    (directory,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"probe-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}", directory.name)
    assert {path.name for path in directory.iterdir()} == {"probe.json", "probe.png"}


@pytest.mark.parametrize("words, answer", [
    (["a=1", "vs"], "vs and : need a configuration on both sides"),
    ([":", "a=1"], ""),
    (["a=1", ":"], "vs and : need a configuration on both sides"),
    (["a=1", "vs", "b=1", ":", "c=1"], "one colon, before the first vs"),
])  # fmt: skip
def test_configurations_that_cannot_be_told_apart(words: list[str], answer: str):
    if not answer:
        assert probe.configurations(words) == [["a=1"]]
        return
    with pytest.raises(ValueError, match=answer):
        probe.configurations(words)


def test_configurations():
    assert probe.configurations([]) == [[]]
    assert probe.configurations(["a=1", "b=2"]) == [["a=1", "b=2"]]
    assert probe.configurations(["a=1", "vs", "b=2", "c=3"]) == [["a=1"], ["b=2", "c=3"]]
    assert probe.configurations(["d=4", ":", "a=1", "vs", "b=2"]) == [["d=4", "a=1"], ["d=4", "b=2"]]


@pytest.mark.parametrize("words, answer", [
    (["nrom=rmsnorm"], "nrom is no key of the config; did you mean 'norm'?"),
    (["norm=rmsnrm"], "norm=rmsnrm is no choice of norm; choose from rmsnorm"),
    (["model.depth=twelve"], "model.depth='twelve'"),
    (["norm.eps=-1.0"], "norm.eps must be >= 0"),
    (["placement=pre", "vs", "model.dim=30"], "model.dim=30 must divide by model.heads=4"),
    (["placement=pre,post"], "put vs between configurations"),
    (["norm=batchnorm"], "allow_unstable=true runs it all the same"),
    (["batch=3", "accumulate=2", *TEXT], "batch=3: needs a multiple of accumulate"),
    (["resume=runs/x"], "resume=runs/x: a probe starts no run"),
    (["hydra.run.dir=x"], "hydra.run.dir=x: a probe starts no run; --out"),
    (["placement=pre", "--seeds", "0"], "--seeds must be >= 1, found 0"),
])  # fmt: skip
def test_bad_input_is_answered_in_one_line(words: list[str], answer: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert probe.main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("probe.py: ") and said.err.count("\n") == 1 and answer in said.err
    assert not (tmp_path / "runs").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys):
    (tmp_path / "file").write_text("")
    assert probe.main([*SMALL, *TEXT, "--out", str(tmp_path / "file" / "out")]) == 2
    assert re.fullmatch(r"probe.py: \S+/file\S*: .*; --out names another place\n", capsys.readouterr().err)


def test_what_is_refused_can_be_measured_all_the_same(tmp_path: Path, capsys):
    """DeepNorm's alpha on a pre-norm stream, to where float32 ends: told as what it is, in all three."""
    words = [*SMALL[1:], *TEXT, "placement=pre", "residual=deepnorm", "model.depth=60", "allow_unstable=true"]
    assert probe.main([*words, "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "allow_unstable=true: placement=pre with residual=deepnorm" in capsys.readouterr().out
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["configurations"][0]["arrays"]["stream_rms"][0][-1] is None and found["nonfinite"]


# ------------------------------------------------------------------ what papers say of the start, held against the probe
# Width 64, 4 heads, context 64, 32 windows of a Markov chain, which is the same text on every machine. The tolerances were
# set for another network on other text; three seeds are taken together, since single ones leave them now and then. What
# does not hold for this architecture is said where it is tested, and in docs/log.md.

DEPTHS = (6, 12, 24, 48)


@cache
def measured(depth: int, *words: str) -> list[Trace]:
    sizes = ["model=deep", f"model.depth={depth}", "batch=32", "accumulate=4", "data=synthetic", "data.tokens=200000"]
    checked = probe.Checked([*sizes, *words])
    return [checked.trace(seed) for seed in range(3)]


def mean(depth: int, get: Callable[[Trace], Any], *words: str) -> Any:
    return np.mean([get(trace) for trace in measured(depth, *words)], axis=0)


def squares(trace: Trace) -> np.ndarray:
    return trace.stream_rms**2


def down(trace: Trace) -> np.ndarray:
    return np.array(trace.grad_norm["down"])


def q_ratio(trace: Trace) -> float:
    return trace.grad_norm["q"][-1] / trace.grad_norm["q"][0]


@pytest.mark.slow
def test_claim_1_the_last_gradient_of_deeper_networks():
    """Xiong et al. 2020, Theorem 1: post-norm's does not depend on the depth, pre-norm's falls as N^(-1/2)."""
    post = [mean(depth, lambda t: down(t)[-1], "placement=post") for depth in DEPTHS]
    pre = [mean(depth, lambda t: down(t)[-1], "placement=pre") for depth in DEPTHS]
    assert max(post) / min(post) <= 1.8
    assert slope(DEPTHS, pre) == pytest.approx(-0.45, abs=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_claim_2_growth_of_the_stream(depth: int):
    """Xiong et al. 2020, Lemma 2; Kim et al. 2025 (Peri-LN)."""
    layer = np.arange(1, depth + 1)
    lemma = 1 + layer / 2, 1 + 3 * layer / 2
    as_in_the_paper = mean(depth, squares, "placement=pre", "ffn.activation=relu", "ffn.ratio=1.0")[1:]
    assert (as_in_the_paper >= 0.98 * lemma[0]).all() and (as_in_the_paper <= 1.02 * lemma[1]).all()
    # a GELU of ratio 4 adds 0.233, where the paper's ReLU adds 1/2: the lower bound is 1 + 0.233 l, and the paper's is
    # undercut in the first blocks, where attention is a mean of unlike tokens
    pre = mean(depth, squares, "placement=pre")[1:]
    assert (pre >= 0.98 * (1 + 0.2329 * layer)).all() and (pre <= 1.02 * lemma[1]).all()
    assert pre[0] < 1.5 and (pre[5:] >= 0.98 * lemma[0][5:]).all()
    for words in ("placement=post", "recipe=deepnorm"):
        assert mean(depth, squares, words)[1:] == pytest.approx(np.ones(depth), abs=0.02)
    assert mean(depth, squares, "placement=peri")[-1] == pytest.approx(2 * depth, rel=0.25)
    assert mean(depth, squares, "residual=gpt2").max() < 1.5


@pytest.mark.slow
def test_claim_4_shape_of_the_gradient():
    """NormFormer; GPT-2's initialisation; DeepNorm. Pre-norm's first layers have the larger gradient."""
    assert 1.8 <= mean(12, lambda t: down(t)[0] / down(t)[-1], "placement=pre") <= 4
    for depth in DEPTHS:
        assert mean(depth, lambda t: down(t).max() / down(t).min(), "residual=gpt2") <= 1.6
        assert mean(depth, lambda t: down(t).max() / down(t).min(), "recipe=deepnorm") <= 1.3


@pytest.mark.slow
def test_claim_4_queries_vanish_with_learned_positions_and_less_with_rotary():
    """Noci et al. 2022. Keys that are all alike leave no gradient to a query: sum_s (dL/da_s) k_s with sum_s dL/da_s = 0.
    Rotary turns alike keys apart, so that one of the two small factors is gone."""
    assert mean(24, q_ratio, "placement=post", "position=learned") < 0.15  # 0.10 here, 0.037 on Python's own source
    assert mean(48, q_ratio, "placement=post", "position=learned") < 5e-3
    assert mean(48, q_ratio, "placement=post") > 0.05


@pytest.mark.slow
def test_claim_5_rank_collapse_and_its_cure():
    """Noci et al. 2022, arXiv 2206.03126: post-norm's tokens become one, unless the residual is scaled or the branch small."""

    def cosine(*words: str) -> list[float]:
        return [mean(depth, lambda t: t.token_cosine[-1], *words) for depth in DEPTHS]

    assert min(cosine("placement=post")[1:]) > 0.95
    assert max(cosine("recipe=deepnorm")) < 0.15
    assert max(cosine("residual=gpt2")) < 0.25
    assert max(cosine("placement=post", "init=normal")) < 0.15
