"""The probe's command: its numbers are those of step 1 of a training run, its answers one line; and the papers' claims about
initialisation, held against it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from scripts import probe
from stability.probe import slope
from stability.trace import Trace
from tests.conftest import SMALL

TEXT = ["data=synthetic", "data.tokens=20000"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    if "slow" not in request.keywords:  # these read the machine's own library, which other tests have tokenised
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
    assert found.loss == pytest.approx(record["loss"], rel=1e-5)
    assert found.grad_norm.keys() == record["grad_norm"].keys()
    for name, norms in record["grad_norm"].items():
        assert found.grad_norm[name] == pytest.approx(norms, rel=1e-5, abs=1e-9), name


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
    assert probe.configurations("a=1 vs b=2 c=3".split()) == [["a=1"], ["b=2", "c=3"]]
    assert probe.configurations("d=4 : a=1 vs b=2".split()) == [["d=4", "a=1"], ["d=4", "b=2"]]


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
