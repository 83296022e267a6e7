"""The keys that W&B is given, a run that stays offline, and one whose server does not answer."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb
import yaml
from lightning.pytorch.callbacks import Callback
from wandb.util import get_core_path

from tests.conftest import ROOT, SMALL
from tests.conftest import environment as environment_of
from training import run as run_module
from training.wandb import PROBE, WandbLog, _logged_in, flat, log_report


def record(depth: int) -> dict:
    layers = {part: [float(i) for i in range(1, depth + 1)] for part in ("attention", "ffn", "norm", "residual")}
    norms = {"total": 2.0, "embed": 0.5, "head": 0.25, **layers}
    return {"step": 3, "tokens": 30, "loss": 1.5, "lr": 0.1, "grad_norm": norms, "clip_coefficient": 0.5}


def test_it_never_asks_for_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode, environment in (("online", "offline"), ("auto", "online")):
        monkeypatch.setenv("WANDB_MODE", environment)
        with pytest.raises(ValueError, match=r"logger\.mode=online needs a key: `wandb login`"):
            WandbLog(tmp_path, "a name", {}, mode=mode)


@pytest.mark.case("G11 Lightning-AI/pytorch-lightning#1462, wandb/wandb#4759")
@pytest.mark.parametrize("depth, layers, parted", [(2, 2, True), (32, 32, True), (33, 33, False), (128, 128, False), (1000, 128, False)])  # fmt: skip
def test_layers_are_numbered_and_few_enough_for_a_browser(depth: int, layers: int, parted: bool):
    keys = flat(record(depth))
    charts = sorted(key for key in keys if key.startswith("grad_norm/layer_") and key.count("/") == 1)
    assert len(charts) == layers
    assert charts[0] == "grad_norm/layer_0001" and charts[-1] == f"grad_norm/layer_{depth:04d}"
    assert keys["grad_norm/layer_0001"] == 2.0  # sqrt(4 * 1^2)
    assert ("grad_norm/layer_0001/attention" in keys) == parted
    assert (keys["loss/train"], keys["grad_norm/total"], keys["lr"], keys["tokens"]) == (1.5, 2.0, 0.1, 30)


def test_a_step_without_arrays_and_a_validation():
    assert flat({"step": 2, "tokens": 20, "loss": 1.0, "lr": 0.1, "grad_norm": {"total": 1.0}}) == {
        "loss/train": 1.0, "lr": 0.1, "tokens": 20, "grad_norm/total": 1.0,
    }  # fmt: skip
    assert flat({"step": 2, "tokens": 20, "val_loss": 1.0}) == {"loss/val": 1.0, "tokens": 20}


def test_a_probe_is_a_few_charts_whatever_the_depth():
    """The worst of the layers, or the last place of the stream."""
    places = {name: np.array([1.0, 5.0, 3.0]) for name in PROBE if name not in ("loss", "model_update")}
    others = {"ffn_rms": np.ones(2), "stream_grad_norm": np.ones(3), "future_leak": 0.0}
    seen = {"loss": 4.0, "model_update": 0.5} | places | others
    assert flat({"step": 2, "tokens": 20, "probe": seen}) == {
        "tokens": 20, "probe/loss": 4.0, "probe/model_update": 0.5, "probe/logit_max": 5.0, "probe/update_ratio": 5.0,
        "probe/gain_max": 5.0, "probe/gain_min": 1.0, "probe/attention_entropy": 1.0, "probe/stream_rms": 3.0,
        "probe/token_cosine": 3.0,
    }  # fmt: skip


def test_online_only_where_a_key_is_at_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = "https://api.example.org"
    assert not _logged_in(server)
    (tmp_path / "netrc").write_text("machine api.example.org login user password key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert _logged_in(server)
    assert not _logged_in("https://other.example.org")
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert _logged_in(server)


def inspected(path: Path) -> list[dict[str, Any]]:
    """The records of a W&B file, read by W&B itself: what its command `wandb leet inspect --json PATH` starts, without the
    second that the command's Python takes. Its Python reads such files no more, and `wandb sync` only to send them."""
    words = ["leet", "inspect", "--json", "--no-observability", "--run-file", str(path), str(path.parents[1])]
    read = subprocess.run([get_core_path(), *words], capture_output=True, text=True, timeout=60)
    assert read.returncode == 0, read.stderr
    records = [json.loads(line) for line in read.stdout.splitlines()]
    assert [record["num"] for record in records] == list(range(1, len(records) + 1))
    return records


def number(value: Any) -> Any:
    """What JSON lacks, W&B writes as text."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def kept(directory: Path) -> list[SimpleNamespace]:
    """The W&B runs of a run directory, the earliest first: `id`, `group`, `job_type`, `config`, `summary`, `artifacts`,
    `exit_code`, and `history`, a dict for each step."""
    wandb.teardown()  # as at the end of the process: W&B's own process then has written everything
    runs = []
    for path in sorted(directory.glob("wandb/*run-*/run-*.wandb")):
        found: Any = SimpleNamespace(id=None, config={}, exit_code=None, history=[], summary={}, artifacts=[])
        for record in inspected(path):
            kind, content = record["type"], record[record["type"]]
            if kind == "run":
                found.id, found.config = content["run_id"], found.config | content["config"].get("update", {})
                found.group, found.job_type = content.get("run_group"), content.get("job_type")
            elif kind == "history":
                found.history.append({key: number(value) for key, value in content["item"].items()})
            elif kind == "summary":
                found.summary |= content.get("update", {})
            elif kind == "artifact":
                found.artifacts.append(content)
            elif kind == "exit":
                found.exit_code = content.get("exit_code", 0)
        runs.append(found)
    return runs


@pytest.mark.case("R13")
def test_a_resumed_run_is_the_same_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for name in ("run", "run", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        log = WandbLog(tmp_path / name, "a name", {})
        ids.append(log.run.id)
        log.finish({}, 0)
    assert ids[0] == ids[1] != ids[2]


def test_an_offline_run_holds_every_value(tmp_path, monkeypatch):
    """Read back from the run's own file."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(tmp_path, "a name", {"seed": 3, "norm": {"eps": 1e-6}})
    log.record(record(2))
    log.record({"step": 4, "tokens": 40, "val_loss": 1.25})
    log.finish({"verdict": "stable"}, 0)
    (run,) = kept(tmp_path)
    first, second = run.history
    assert first["loss/train"] == 1.5 and second["loss/val"] == 1.25
    assert first["grad_norm/layer_0002/ffn"] == 2.0
    assert (first["_step"], second["_step"]) == (3, 4)
    assert run.config["seed"] == 3
    assert run.exit_code == 0


class Break(Callback):
    """At the start of `step`: raise, send a signal, or make every loss from then on nan."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_train_batch_start(self, trainer, module, *_):
        if trainer.global_step + 1 != self.step:
            return
        how, self.how = self.how, ""
        if how == "crash":
            raise OSError("the machine stopped")
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "nan":
            module.model.head.register_forward_hook(lambda module, _, y: y * float("nan") if module.training else y)


def broken(monkeypatch, how: str, step: int) -> None:
    original, added = run_module._trainer, Break(how, step)
    monkeypatch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, added], **k))


@pytest.mark.case("W02 wandb/wandb#4591", "L04")
@pytest.mark.parametrize("how, code", [("", 0), ("crash", 1), ("nan", 3), ("signal", 143)])
def test_a_run_that_failed_is_no_finished_run_for_wandb(run, monkeypatch, tmp_path, how: str, code: int):
    monkeypatch.setenv("WANDB_MODE", "offline")
    broken(monkeypatch, how, 4)
    words = ["steps=9", "logger=wandb", "log_every=3"]
    if how == "crash":
        with pytest.raises(RuntimeError, match="the machine stopped"):
            run(*words, directory=tmp_path / "here")
    else:
        assert run(*words, directory=tmp_path / "here")[1]["code"] == code
    (found,) = kept(tmp_path / "here")
    assert found.exit_code == code
    if how == "nan":
        losses = {step["_step"]: step["loss/train"] for step in found.history if "loss/train" in step}
        assert losses[3] < 10 and math.isnan(losses[4])  # never the last good value, nor left out


@pytest.mark.case("W01 wandb/wandb#1314")
def test_each_job_of_a_process_has_a_run_of_its_own(run, monkeypatch, tmp_path):
    """Also the one after a job that raised, and after one that W&B was never told the end of."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "forgotten").mkdir()
    forgotten = WandbLog(tmp_path / "forgotten", "forgotten", {"seed": 9})
    for seed in (0, 1, 2):
        with monkeypatch.context() as patch:
            broken(patch, "crash" if seed == 1 else "", 2)
            words = ["steps=2", "logger=wandb", f"seed={seed}"]
            if seed == 1:
                with pytest.raises(RuntimeError):
                    run(*words, directory=tmp_path / "1")
            else:
                run(*words, directory=tmp_path / str(seed))
    forgotten.finish({}, 0)
    found = [run for name in ("forgotten", *"012") for run in kept(tmp_path / name)]
    assert [run.config["seed"] for run in found] == [9, 0, 1, 2]
    assert len({run.id for run in found}) == 4
    assert [run.exit_code for run in found] == [0, 0, 1, 0]


@pytest.mark.case("R13 KempnerInstitute/KempnerForge#19, wandb/wandb#7951")
def test_a_resume_gives_wandb_every_step_once_and_in_order(run, monkeypatch, tmp_path):
    """Crashed at 8, the last checkpoint of 5: the steps after it are told again, to the same run and with the same
    numbers, so that it does not matter which of the two the server keeps."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["steps=10", "save_every=5", "val_every=4", "log_every=1", "logger=wandb"]
    with monkeypatch.context() as patch:
        broken(patch, "crash", 8)
        with pytest.raises(RuntimeError):
            run(*words, directory=tmp_path / "here")
    time.sleep(1)  # W&B names its folders by the second
    run(*words, f"resume={tmp_path / 'here'}", directory=tmp_path / "here")
    before, after = kept(tmp_path / "here")
    assert before.id == after.id
    told = [{step["_step"]: step for step in part.history if "loss/train" in step} for part in (before, after)]
    assert list(told[0]) == list(range(1, 8)) and list(told[1]) == list(range(6, 11))
    for step in (6, 7):
        shared = [key for key in told[0][step] if not key.startswith(("_", "report"))]
        assert [told[0][step][key] for key in shared] == [told[1][step][key] for key in shared]
    validations = [step["_step"] for part in (before, after) for step in part.history if "loss/val" in step]
    assert validations == [0, 4, 8, 10]


def test_a_run_goes_on_where_wandb_dies(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(tmp_path, "a name", {})
    alive = log.run
    log.run = None  # whatever is asked of it raises
    log.record(record(2))
    log.record(record(2))
    log.image("report", tmp_path / "report.png")
    log.finish({}, 0)
    assert capsys.readouterr().out.count("W&B takes no more of this run") == 1
    alive.finish()


# Studies


def studied(directory: Path, **also: str) -> Path:
    """The directory, with files of a study's end in it; `also`: name -> text of others."""
    files = {
        "claims.json": "{}",
        "report.html": "<p>old</p>",
        "figures/a.svg": "<svg/>",
        "figures/more/b.svg": "",
    } | also
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def files_of(artifact: dict[str, Any]) -> dict[str, str]:
    """Name -> text of each file of an artifact, as `wandb sync` would send it."""
    return {each["path"]: Path(each["local_path"]).read_text() for each in artifact["manifest"]["contents"]}


REPORT = """
import sys
from pathlib import Path
from training.wandb import log_report

study = Path(sys.argv[1])
files = [study / name for name in ("report.html", "claims.json", "report.png", "figures")]
log_report(study, "depth-laptop", files, {"post_fails": "holds", "pre": "undecided"}, group="by hand")
assert not {"torch", "lightning"} & set(sys.modules)
"""


def report(study: Path, **variables: str) -> str:
    known = environment_of(study / "cache") | {"WANDB_RUN_GROUP": "of the runs"} | variables
    ended = subprocess.run([sys.executable, "-c", REPORT, str(study)], env=known, capture_output=True, text=True)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    return ended.stdout


def test_the_end_of_a_study_is_a_run_with_its_report(tmp_path):
    """Ended twice, the first end keeps its own report, though none has been sent when the second is drawn."""
    assert report(studied(tmp_path)) == ""
    time.sleep(1)  # W&B names its folders by the second
    report(studied(tmp_path, **{"report.html": "<p>new</p>", "report.png": "png"}))
    first, second = kept(tmp_path)
    assert first.id == second.id
    assert (first.group, first.job_type, first.exit_code) == ("by hand", "study", 0)
    assert (first.summary["claims/post_fails"], first.summary["claims/pre"]) == ("holds", "undecided")
    told = {"claims.json": "{}", "report.html": "<p>old</p>", "figures/a.svg": "<svg/>", "figures/more/b.svg": ""}
    (artifact,), (again,) = first.artifacts, second.artifacts
    assert (artifact["name"], artifact["type"]) == (again["name"], again["type"]) == ("depth-laptop-report", "report")
    assert files_of(artifact) == told
    assert files_of(again) == told | {"report.html": "<p>new</p>", "report.png": "png"}
    assert all(Path(each["local_path"]).is_relative_to(tmp_path) for each in artifact["manifest"]["contents"])


@pytest.mark.parametrize("mode, said", [("disabled", ""), ("online", "W&B has no report of this study (ValueError: ")])
def test_a_study_ends_without_wandb(tmp_path, mode: str, said: str):
    """Nobody is logged in: nothing is asked."""
    (tmp_path / "tmp").mkdir()
    nobody = {"NETRC": str(tmp_path / "none"), "WANDB_API_KEY": "", "TMPDIR": str(tmp_path / "tmp")}
    assert report(studied(tmp_path), WANDB_MODE=mode, **nobody).startswith(said)
    assert [path.parent for path in tmp_path.rglob("claims.json")] == [tmp_path]  # and nothing is copied


def test_what_wandb_cannot_take_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Artifact, "add_file", lambda *_, **__: 1 / 0)
    log_report(studied(tmp_path), "depth", [tmp_path / "claims.json"], {}, group="depth")
    assert capsys.readouterr().out.startswith("W&B has no report of this study (ZeroDivisionError: ")
    (run,) = kept(tmp_path)
    assert run.exit_code == 1  # no report that looks complete


STUDY = """\
# Does it matter where the norm is?
defaults: [_base, _self_]

question: Does it matter where the norm is?
arms:
  pre: [placement=pre]
  none: [norm=none, optimizer.lr=1e9]
params:
  seed: [0, 1]
scales:
  laptop:
    words: [WORDS]
claims:
  none_diverges:
    says: without a norm it diverges
    source: nobody
    of: {arm: none}
    observe: verdict
    expect: {is: diverged}
  pre_diverges:
    says: with one too
    source: nobody
    of: {arm: pre}
    observe: verdict
    expect: {is: diverged}
""".replace("WORDS", ", ".join([
    *SMALL, "steps=25", "batch=4", "val_every=10", "probe_every=10", "data=synthetic", "data.tokens=20000", "logger=wandb"
]))  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wandb_holds_all_that_a_study_recorded(tmp_path):
    """A study of one command, read back from what W&B would send: of each run every line of metrics.jsonl in its place
    with each of its keys, and every setting; the group, which the command names itself; and the study's own run, with the
    claims' verdicts and the report."""
    (tmp_path / "conf/study").mkdir(parents=True)
    (tmp_path / "conf/study/mine.yaml").write_text(STUDY)
    known = environment_of(tmp_path / "cache")
    known.pop("WANDB_RUN_GROUP", None)
    ended = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config-dir", str(tmp_path / "conf"), "study=mine"],
        cwd=tmp_path, env=known, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0 and "W&B" not in ended.stdout, ended.stdout + ended.stderr
    study = tmp_path / "runs/study/mine-laptop"
    ids = set()
    for arm, seed in (("pre", 0), ("pre", 1), ("none", 0), ("none", 1)):
        directory = study / f"{arm}_seed={seed}"
        (run,) = kept(directory)
        ids.add(run.id)
        assert (run.group, run.job_type) == ("mine-laptop", None)
        assert run.exit_code == (0 if arm == "pre" else 3)
        config = yaml.safe_load((directory / "config.yaml").read_text())
        assert run.config == config | {"_wandb": run.config["_wandb"]} and run.config["seed"] == seed
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        # W&B has the lines of one step as one: their keys differ but for the tokens so far
        wanted = {(each["step"], key): value for each in records for key, value in flat(each).items()}
        found = [
            ((step["_step"], key), value)
            for step in run.history
            for key, value in step.items()
            if not key.startswith("_") and not key.startswith("report")
        ]
        assert len(found) == len(wanted) and (arm != "pre" or len(wanted) > 25 * 5)
        for place, value in found:  # what is not finite is null in metrics.jsonl; 9 digits
            assert wanted[place] is None or value == pytest.approx(wanted[place], rel=1e-8, nan_ok=True), place
        summary = json.loads((directory / "summary.json").read_text())
        assert {key: run.summary.get(key) for key in summary} == summary
    (run,) = kept(study)
    assert len(ids | {run.id}) == 5
    assert (run.group, run.job_type, run.exit_code) == ("mine-laptop", "study", 0)
    assert {key: verdict for key, verdict in run.summary.items() if key.startswith("claims/")} == {
        "claims/none_diverges": "holds",
        "claims/pre_diverges": "fails",
    }
    (artifact,) = run.artifacts
    assert (artifact["name"], artifact["type"]) == ("mine-laptop-report", "report")
    files = {each["path"]: Path(each["local_path"]).read_bytes() for each in artifact["manifest"]["contents"]}
    assert {"report.html", "claims.json", "report.png"} < set(files)
    assert any(name.startswith("figures/") for name in files)
    assert files == {name: (study / name).read_bytes() for name in files}


# Command lines whose network is a socket of ours


class Silent:
    """A server that takes every connection and never answers."""

    def __init__(self) -> None:
        self.socket, self.taken = socket.create_server(("127.0.0.1", 0)), []
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self._take)
        self.thread.start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self.socket.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # ends the accept under way
        self.thread.join()
        for each in (*self.taken, self.socket):
            each.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


# reports whatever Python looks up or connects to beyond this machine; waits a second, not eight, for a server
WATCHED = r"""
import os, socket, sys

HERE = (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname())

def watch(event, args):
    if event == "socket.getaddrinfo" and args[0] not in HERE:
        os.write(2, f"looks up {args[0]}\n".encode())
    if event == "socket.connect" and isinstance(args[1], tuple) and not args[1][0].startswith(("127.", "::1")):
        os.write(2, f"connects to {args[1]}\n".encode())

sys.addaudithook(watch)
import train, training.wandb
training.wandb.PATIENCE = 1
train.main()
"""


def watched(cwd: Path, mode: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A run of two steps with `logger.mode=mode`; (how it ended, the seconds that it took)."""
    words = [*SMALL, "data=synthetic", "data.tokens=20000", "threads=1", "steps=2", f"logger.mode={mode}"]
    known = environment_of(cwd / "cache")
    # WANDB_MODE would settle for W&B's other clients what `logger.mode` is to settle
    known = {key: value for key, value in known.items() if key != "WANDB_MODE" and not key.lower().endswith("_proxy")}
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED, *words, "hydra.run.dir=run"],
        cwd=cwd,
        env=known | variables,
        capture_output=True,
        text=True,
    )
    return ended, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.case("W05 wandb/wandb#4217, wandb/wandb#8957")
def test_an_offline_run_opens_no_connection(tmp_path, silent):
    """W&B's own process is not Python's to watch: it is given a proxy for every address, and nobody may call there. A
    key is at hand, as it is where somebody is logged in."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), silent.url)
    ended, took = watched(tmp_path, "offline", WANDB_API_KEY="0" * 40, **proxies)
    assert ended.returncode == 0 and ended.stderr == ""
    assert silent.taken == []
    assert took < 60  # nothing was waited for
    (run,) = kept(tmp_path / "run")
    assert run.exit_code == 0 and len(run.history) >= 3


@pytest.mark.slow
@pytest.mark.case("W04 wandb/wandb#9865, wandb/wandb#8003")
@pytest.mark.parametrize("answers", ["refuses", "is silent"])
def test_a_server_that_cannot_be_reached_costs_seconds_and_no_run(tmp_path, silent, answers: str):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = silent.url if answers == "is silent" else f"http://127.0.0.1:{port}"
    ended, took = watched(tmp_path, "online", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=url)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.count("W&B cannot be reached") == 1 and "this run is logged offline" in ended.stdout
    assert took < 60
    (offline,) = (tmp_path / "run").glob("wandb/offline-run-*")
    tried, run = sorted(kept(tmp_path / "run"), key=lambda each: len(each.history))
    assert offline.name.endswith(run.id)
    assert [step["_step"] for step in run.history][:3] == [0, 1, 2] and run.exit_code == 0
    assert tried.history == []
    assert bool(silent.taken) == (answers == "is silent")


@pytest.mark.slow
def test_a_silent_server_costs_seconds_and_no_report(tmp_path, silent):
    started = time.monotonic()
    said = report(studied(tmp_path), WANDB_MODE="online", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=silent.url)
    assert said.startswith("W&B cannot be reached") and said.count("\n") == 1
    assert time.monotonic() - started < 60 and silent.taken
    _, offline = sorted(kept(tmp_path), key=lambda run: len(run.artifacts))
    assert offline.artifacts and offline.exit_code == 0
