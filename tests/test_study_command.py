"""A study as a user writes one: a YAML file in a folder of his own, one command, and no code."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, SMALL, environment

MINE = """\
# Does it matter where the norm is?
defaults:
  - _base
  - _self_

question: Does it matter where the norm is?
arms:
  pre: [placement=pre]
  post: [placement=post]
  none: [norm=none, optimizer.lr=1e9]
params:
  seed: [0, 1]
scales:
  laptop:
    words: [WORDS]
claims:
  same_start:
    says: both start at the same loss
    source: nobody
    of: {arm: pre}
    observe: probe
    knobs: {name: loss, step: 0}
    against: {arm: post}
    compare: difference
    expect: {min: -0.001, max: 0.001}
  none_diverges:
    says: without a norm it diverges
    source: nobody
    of: {arm: none}
    observe: verdict
    expect: {is: diverged}
""".replace(
    "WORDS", ", ".join([*SMALL, "steps=30", "batch=4", "probe_every=10", "data=synthetic", "data.tokens=20000"])
)

MORE = """\
# The same, with a claim more.
defaults:
  - mine
  - _self_

claims:
  gradient_is_there:
    says: the first layer has a gradient
    source: nobody
    of: {arm: [pre, post]}
    observe: gradient
    knobs: {layer: first}
    expect: {min: 1e-6}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf/study").mkdir(parents=True)
    (tmp_path / "conf/study/mine.yaml").write_text(MINE)
    (tmp_path / "conf/study/more.yaml").write_text(MORE)
    return tmp_path


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "--config-dir", str(folder / "conf"), *words]


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(folder, *words), cwd=folder, env=environment(folder / "cache"), capture_output=True, text=True, timeout=300
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def claims(folder: Path, name: str) -> dict[str, dict]:
    return json.loads((folder / name / "claims.json").read_text())["claims"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_study_and_a_claim_need_a_file_each(folder: Path):
    code, said, errors = run(folder, "study=mine")
    assert code == 0, said + errors  # neither a claim that fails nor a run that diverges is a failure
    directory = folder / "runs/study/mine-laptop"
    assert sorted(path.parent.name for path in directory.glob("*/summary.json")) == sorted(
        f"{arm}_seed={seed}" for arm in ("pre", "post", "none") for seed in (0, 1)
    )
    assert "run 1 of 6: pre_seed=0" in said and "Does it matter where the norm is?" in said
    found = claims(folder, "runs/study/mine-laptop")
    assert {name: claim["verdict"] for name, claim in found.items()} == {
        "same_start": "fails",
        "none_diverges": "holds",
    }
    assert len(found["same_start"]["numbers"]) == 2
    assert (directory / "report.png").stat().st_size > 20_000
    assert said.splitlines()[-2] == f"page:    {directory.relative_to(folder)}/report.html"
    page = (directory / "report.html").read_text()
    assert "both start at the same loss" in page
    assert f"python train.py --config-dir {folder / 'conf'} study=mine study.scale=laptop" in page
    assert not list(directory.glob("*/report.png")) and not list(directory.glob("*/checkpoints/*"))

    # each run is one that its own words repeat
    words = ["hydra.run.dir=again", *yaml.safe_load((directory / "post_seed=1/overrides.yaml").read_text())]
    assert run(folder, "threads=1", *words)[0] == 0
    assert (folder / "again/metrics.jsonl").read_bytes() == (directory / "post_seed=1/metrics.jsonl").read_bytes()

    # one more claim, over the runs that are there
    before = {path: path.stat().st_mtime_ns for path in directory.glob("*/metrics.jsonl")}
    code, said, errors = run(folder, "study=more", f"hydra.sweep.dir={directory}")
    assert code == 0, said + errors
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [claim["verdict"] for claim in claims(folder, "runs/study/mine-laptop").values()] == [
        "fails",
        "holds",
        "holds",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_of_other_words_are_not_judged(folder: Path):
    """What a directory holds of another command is refused, and no claim is said to hold of it."""
    assert run(folder, "study=mine")[0] == 0
    for forced in ([], ["resume_force=true"]):
        code, said, errors = run(folder, "study=mine", "model.context=16", *forced)
        assert code == 1, said + errors
        assert said.count("  refused: resume=") == 6 and "6 of 6 runs have no result" in said
        found = claims(folder, "runs/study/mine-laptop")
        assert {claim["verdict"] for claim in found.values()} == {"undecided"}
    assert run(folder, "study=mine")[0] == 0
    assert claims(folder, "runs/study/mine-laptop")["none_diverges"]["verdict"] == "holds"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_study_that_was_stopped_goes_on(folder: Path):
    process = subprocess.Popen(
        command(folder, "study=mine"), cwd=folder, env=environment(folder / "cache"), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    directory = folder / "runs/study/mine-laptop"
    while not (directory / "none_seed=0/summary.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "the same command" in said and not (directory / "claims.json").exists()
    kept = (directory / "pre_seed=0/metrics.jsonl").stat().st_mtime_ns
    code, said, errors = run(folder, "study=mine")
    assert code == 0, said + errors
    assert (directory / "pre_seed=0/metrics.jsonl").stat().st_mtime_ns == kept
    assert len(claims(folder, "runs/study/mine-laptop")) == 2


@pytest.mark.parametrize(("words", "said"), [
    (["study.claims.none_diverges.observe=verdikt"], "study.claims.none_diverges.observe"),
    (["study.scale=gpu"], "study.scale=gpu: this study knows laptop"),
    (["placement=pre"], "placement is set by the arms of this study (pre, post, none): leave it out"),
    (["study.question=null"], "study.question is missing"),
    (["modle.depth=3"], "modle.depth is no key of the config; did you mean 'model'?"),
    (["hydra.mode=RUN"], "a study is a sweep: leave out hydra.mode"),
    (["hydra/sweeper=basic"], "hydra/sweeper=basic: a study has a sweeper of its own: leave it out"),
    (["hydra/sweeper=nope"], "hydra/sweeper=nope is no choice of hydra/sweeper; choose from optuna, basic, study"),
    (["-m", "study=mine,more"], "study=mine,more: one study at a time"),
    (["study=mien"], "study=mien is no choice of study; choose from mine, "),
    (["study=bare"], "study=bare: its file must begin with defaults: [_base, _self_]"),
    (["study=bare", "-m"], "study=bare: its file must begin with defaults: [_base, _self_]"),
    (["study=broken"], "conf/study/broken.yaml, line 2: found duplicate key question"),
    (["study.arms.pre=[ffn swiglu]"], "study.arms.pre[0]='ffn swiglu' cannot be read as KEY=VALUE"),
    (["study.arms.pre=['ffn=swigluu']"], "ffn=swigluu is no choice of ffn"),
    (["~logger"], "~logger: a study sets keys and deletes none"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_the_first_run(folder: Path, words: list[str], said: str):
    (folder / "conf/study/bare.yaml").write_text("")
    (folder / "conf/study/broken.yaml").write_text("question: a\nquestion: b\n")
    code, out, errors = run(folder, *([] if "study=" in str(words) else ["study=mine"]), *words)
    assert code == 2 and errors.startswith("normlab: ") and said in errors, out + errors
    assert errors.count("\n") == 1 and not (folder / "runs").exists()


def test_a_study_of_a_shipped_ones_name_is_refused(folder: Path):
    """Hydra reads the shipped one, and never looks at his."""
    (folder / "conf/study/warmup.yaml").write_text(MINE)
    code, out, errors = run(folder, "study=warmup")
    assert code == 2 and errors.startswith(f"normlab: {folder}/conf/study/warmup.yaml would not be read: "), (
        out + errors
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["hydra.launcher.n_jobs=1"], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]]
)
def test_a_study_takes_words_of_hydras_own(folder: Path, launcher: list[str]):
    """A directory with an apostrophe, and keys of the launcher that it has, chosen or not."""
    words = ["steps=1", "probe_every=0", "seed=[0,1]", "study.claims=null", *launcher]
    code, out, errors = run(folder, "study=mine", *words, "hydra.sweep.dir='it\\'s'")
    assert code == 0, out + errors
    assert len(list((folder / "it's").glob("*_seed=*/metrics.jsonl"))) == 6


def test_help_lists_the_studies(folder: Path):
    code, said, _ = run(folder, "--help")
    assert code == 0 and "post_vs_pre" in said and "_base" not in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("words", [
    ["study=rank_collapse", "model.depth=4"],
    ["study=model_update", "model.depth=2,4"],
    ["study=zero_init", "steps=12"],
    ["study=lr_sensitivity", "steps=12", "optimizer.lr=1e-3,1e-1"],
], ids=lambda words: words[0])  # fmt: skip
def test_a_shipped_study_runs_to_its_claims(folder: Path, words: list[str]):
    """On tiny networks, of which no claim need be true: what its claims read is in the records of its runs."""
    small = [word for word in SMALL if not word.startswith("model.depth")]
    small += ["data=synthetic", "data.tokens=20000", "data.val_windows=4", "batch=4", "seed=0"]
    code, said, errors = run(folder, *words, *small)
    assert code == 0, said + errors
    (directory,) = (folder / "runs/study").iterdir()
    found = claims(folder, f"runs/study/{directory.name}")
    assert found and (directory / "report.png").is_file()
    narrowed = ("is not run at scale", "values of")  # the command line has left out what these claims need
    open_ = {name: claim["reason"] for name, claim in found.items() if claim["verdict"] == "undecided"}
    assert all(any(word in reason for word in narrowed) for reason in open_.values()), open_


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_shipped_study_comes_to_its_answer(folder: Path):
    """One seed of the shortest of them, at its own size."""
    code, said, errors = run(folder, "study=warmup", "seed=0")
    assert code == 0, said + errors
    found = claims(folder, "runs/study/warmup-laptop")
    answers = {name: claim["verdict"] for name, claim in found.items() if claim["verdict"] != "not judged"}
    assert len(answers) == 3 and set(answers.values()) == {"holds"}, {k: v["found"] for k, v in found.items()}
