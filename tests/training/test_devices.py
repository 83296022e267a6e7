"""Several devices: the same record as one leaves, one end for all ranks, and nothing that the other ranks say or write.

Two processes of a CPU stand for two GPUs. Sums in another order differ by some 1e-7 after a few steps; 1e-5 is held.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf.sweep import Sweep, check_devices
from tests.conftest import ROOT, SMALL, config, environment
from training import device as machine
from training import launch, meeting
from training import ranks as processes
from training.checkpoint import save
from training.launch import PARENT, follows, rank
from training.pace import WholeFiles
from training.ranks import Ranks
from training.signals import STOPS

BOTH = ["ddp", "fsdp"]
slow = pytest.mark.slow
WORDS = [*SMALL, "data=synthetic", "data.tokens=20000", "logger=none", "picture=false", "threads=1", "batch=8"]
AXES = ["residual=learned_scalars", "norm=learnable_eps_rmsnorm", "position=learned", "model.qk_norm=full"]


def start(cwd: Path, directory: str, *words: str, program: tuple[str, ...] = (), **more: str) -> subprocess.Popen[str]:
    where = [] if any(word.startswith("resume=") for word in words) else [f"hydra.run.dir={directory}"]
    settings = [*WORDS, *where] if where else []
    command = [sys.executable, *program, str(ROOT / "train.py"), *settings, *words]
    env = environment(ROOT / ".pytest_cache" / "devices") | more
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=pipe, stderr=pipe, start_new_session=True)


def finished(cwd: Path, directory: str, *words: str, code: int = 0, **more: Any) -> str:
    """What a run that ends with `code` has printed, stdout and stderr."""
    process = start(cwd, directory, *words, **more)
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    return out + err


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same(one: Path, other: Path, rel: float = 1e-5) -> None:
    """Line by line and number by number: losses, norms of every layer, validations, probes."""

    def numbers(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in pairs:
            yield from numbers(value, f"{name}.{key}")
        if not isinstance(node, dict | list):
            yield name, node

    ours, theirs = records(one), records(other)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for record, counterpart in zip(ours, theirs, strict=True):
        assert dict(numbers(record)) == pytest.approx(dict(numbers(counterpart)), rel=rel, abs=1e-9)


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def until(there: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := there()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def others(process: subprocess.Popen[str]) -> list[int]:
    """The ranks that rank 0 has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{PARENT}={process.pid}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def lines(run: Path) -> int:
    return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").is_file() else 0


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
TORCHRUN += ("--rdzv-endpoint=127.0.0.1:0",)


def under_slurm(cwd: Path, directory: str, *tasks: list[str], first: int = 0, there: int = 0) -> list[tuple[int, str]]:
    """(Exit code, stderr) of the tasks of a step, each with its words, as srun starts them on one machine; the last first."""
    count = str(there or len(tasks))
    slurm = {"SLURM_STEP_NUM_TASKS": count, "SLURM_NTASKS": count, "SLURM_NTASKS_PER_NODE": count, "SLURM_NODEID": "0"}
    slurm |= {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NAME": "test"}
    processes = []
    for number, words in reversed([*enumerate(tasks, first)]):
        task = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        processes.insert(0, start(cwd, directory, *words, **slurm, **task))
    said = [process.communicate(timeout=240) for process in processes]
    assert not any(out for out, _ in said[1:]), "another rank speaks"
    return [(process.returncode, err) for process, (_, err) in zip(processes, said, strict=True)]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """Runs of one device, in `plain` and `rich`, beside which the others are put."""
    cwd = tmp_path_factory.mktemp("one")
    finished(cwd, "plain", "steps=12", "val_every=5")
    finished(cwd, "rich", "steps=12", "val_every=5", "accumulate=2", "model.tied=true", "clip=0.5", *AXES)
    return cwd


@slow
@pytest.mark.case("G09 pytorch/torchtitan#766", "P11 Lightning-AI/pytorch-lightning#6706")
@pytest.mark.parametrize("trainer", BOTH)
def test_two_devices_leave_the_record_of_one(one, tmp_path, trainer: str):
    said = finished(tmp_path, "two", "steps=12", "val_every=5", "devices=2", f"trainer={trainer}")
    same(tmp_path / "two", one / "plain")
    assert f"2 x cpu ({trainer.upper()}), 32-true, 1 CPU threads each" in said
    assert said.count("step 0/12") == said.count("too_short: 12 steps") == 1, "another rank has spoken"
    assert [path.name for path in tmp_path.iterdir()] == ["two"], "another rank has a directory"
    environment = json.loads((tmp_path / "two/environment.json").read_text())
    assert [environment[key] for key in ("devices", "num_nodes", "trainer")] == [2, 1, trainer]


@slow
@pytest.mark.case("G09", "P11")
@pytest.mark.parametrize("trainer", BOTH)
def test_so_they_do_with_accumulation_a_tied_matrix_and_learnt_scalars(one, tmp_path, trainer: str):
    """Scalars have no parts: under FSDP they are whole on each rank, and averaged all the same."""
    words = ["accumulate=2", "model.tied=true", "clip=0.5", *AXES]
    finished(tmp_path, "two", "steps=12", "val_every=5", "devices=2", f"trainer={trainer}", *words)
    same(tmp_path / "two", one / "rich")


@slow
@pytest.mark.parametrize("precision, rel", [("bf16-mixed", 2e-2), ("fp64", 1e-8)])
def test_a_sharded_network_has_the_precisions_of_a_whole_one(tmp_path, precision: str, rel: float):
    """bfloat16 has 8 bits: a sum in another order is another in the third digit."""
    finished(tmp_path, "one", "steps=8", f"precision={precision}")
    finished(tmp_path, "two", "steps=8", f"precision={precision}", "devices=2", "trainer=fsdp")
    same(tmp_path / "two", tmp_path / "one", rel=rel)


@slow
def test_a_checkpoint_is_the_same_whoever_wrote_it(tmp_path):
    """12 steps in one go, and 4 each by one device, by DDP and by FSDP, and 4 more by one again."""
    words = ["schedule=constant", "schedule.warmup=3", "val_every=4", "log_every=1"]
    finished(tmp_path, "whole", "steps=16", *words)
    finished(tmp_path, "parts", "steps=4", *words)
    for steps, change in ((8, ["devices=2"]), (12, ["trainer=fsdp"]), (16, ["devices=1", "trainer=ddp"])):
        said = finished(tmp_path, "", "resume=parts", f"steps={steps}", *change)
        assert f"from step {steps - 3} on" in said
    same(tmp_path / "parts", tmp_path / "whole")
    keys = [set(torch.load(tmp_path / run / "checkpoints/last.ckpt")["state_dict"]) for run in ("parts", "whole")]
    assert keys[0] == keys[1]
    changed = json.loads((tmp_path / "parts/environment.json").read_text())["changed"]
    assert [(entry["after_step"], entry.get("devices")) for entry in changed] == [
        (4, {"was": 1, "is": 2}),
        (8, None),
        (12, {"was": 2, "is": 1}),
    ]


@slow
def test_dropout_differs_between_ranks_and_resumes_exactly(tmp_path):
    words = ["devices=2", "model.dropout=0.2", "schedule=constant", "schedule.warmup=2", "val_every=5"]
    words += ["log_every=1"]
    finished(tmp_path, "whole", "steps=10", *words, PL_GLOBAL_SEED="1")  # Lightning's, for all ranks
    finished(tmp_path, "parts", "steps=5", *words)
    first, second = torch.load(tmp_path / "parts/checkpoints/last.ckpt")["rng"]
    assert not torch.equal(first, second)
    finished(tmp_path, "", "resume=parts", "steps=10")
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


@slow
@pytest.mark.parametrize("words", [["model.checkpointing=groups"], ["compile=true", "log_every=1"]])
def test_however_the_network_is_run(tmp_path, words: list[str]):
    finished(tmp_path, "one", "steps=6", *words)
    finished(tmp_path, "two", "steps=6", *words, "devices=2")
    same(tmp_path / "two", tmp_path / "one")


@slow
def test_probes_see_the_windows_of_all_ranks(tmp_path):
    words = ["steps=4", "probe_every=2", "accumulate=2", "workers=1"]
    finished(tmp_path, "one", *words)
    finished(tmp_path, "two", *words, "devices=2")
    same(tmp_path / "two", tmp_path / "one", rel=1e-4)  # the update of a step is a small difference


@slow
@pytest.mark.parametrize("trainer", BOTH)
def test_a_run_that_diverges_ends_on_all_ranks_and_says_where(tmp_path, trainer: str):
    words = ["steps=100", "optimizer.lr=1e9", "schedule.warmup=0", "accumulate=2"]
    for name, more in (("one", []), ("two", ["devices=2", f"trainer={trainer}"])):
        finished(tmp_path, name, *words, *more, code=3)
    one, two = (summary(tmp_path / name) for name in ("one", "two"))
    keys = ("verdict", "steps_done", "first_bad_step", "first_bad_layer", "first_bad_parameter", "skipped_steps")
    assert [two[key] for key in keys] == [one[key] for key in keys]
    assert two["verdict"] == "diverged" and two["first_bad_layer"]


@slow
@pytest.mark.parametrize("trainer, number, whole_group", [("ddp", 2, True), ("ddp", 15, False), ("fsdp", 15, False)])
def test_a_signal_ends_all_ranks_after_one_step(tmp_path, trainer: str, number: int, whole_group: bool):
    """Ctrl-C goes to all of them, SIGTERM to rank 0 alone."""
    process = start(tmp_path, "two", "steps=100000", "devices=2", f"trainer={trainer}", "val_every=0")
    until(lambda: lines(tmp_path / "two") > 20)
    second = others(process)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and len(second) == 1
    found = summary(tmp_path / "two")
    assert found["verdict"] == "interrupted" and signal.Signals(number).name in found["reason"]
    assert out.count("interrupted: ") == 1
    done = torch.load(tmp_path / "two/checkpoints/last.ckpt")["global_step"]
    assert done == found["steps_done"] == lines(tmp_path / "two") - 1
    assert not others(process)
    finished(tmp_path, "", "resume=two", f"steps={done + 1}", "schedule=constant", "resume_force=true")


@slow
def test_a_signal_to_another_rank_counts_too(tmp_path):
    process = start(tmp_path, "two", "steps=100000", "devices=2")
    until(lambda: lines(tmp_path / "two") > 20)
    os.kill(*others(process), signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and summary(tmp_path / "two")["verdict"] == "interrupted"


@slow
def test_two_signals_to_another_rank_end_it_at_once_and_then_the_run(tmp_path):
    process = start(tmp_path, "two", "steps=100000", "devices=2")
    until(lambda: lines(tmp_path / "two") > 20)
    (other,) = others(process)
    os.kill(other, signal.SIGINT)
    os.kill(other, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 130, 143) and "Traceback" not in err
    if process.returncode == 1:
        assert re.match("rank 1 of 2 ended with exit code (130|143):", summary(tmp_path / "two")["reason"])


@slow
@pytest.mark.parametrize("number, end", [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)])
def test_a_signal_while_the_others_start_leaves_nothing_running(tmp_path, number: int, end: Callable[[int, int], None]):
    process = start(tmp_path, "two", "steps=100000", "devices=2")
    until(lambda: others(process))
    end(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and f"{signal.Signals(number).name} before its first step" in err
    assert "Traceback" not in err
    assert not others(process) and not lines(tmp_path / "two")


@slow
@pytest.mark.parametrize("when", ["starting", "training"])
def test_a_rank_that_is_killed_ends_the_run_with_one_line(tmp_path, when: str):
    process = start(tmp_path, "three", "steps=100000", "devices=3", "batch=9")
    ranks = until(lambda: len(found := others(process)) == 2 and found)
    if when == "training":
        until(lambda: lines(tmp_path / "three") > 20)
    os.kill(ranks[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in out + err
    assert len(re.findall(r"rank [12] of 3 was ended by SIGKILL", out + err)) == 1
    assert not others(process)
    assert (when == "starting") == (not (tmp_path / "three/overrides.yaml").exists())


@slow
def test_ranks_end_with_rank_0(tmp_path):
    process = start(tmp_path, "two", "steps=100000", "devices=2")
    until(lambda: lines(tmp_path / "two") > 20)
    process.kill()
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    until(lambda: not others(process), seconds=10)


def another(tmp_path: Path, broken: str) -> str:
    """A PYTHONPATH by which rank 1 runs `broken` before it trains."""
    broken = f"import os\nif os.environ.get('RANK') == '1':\n exec({broken!r})"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Late:\n def find_spec(self, name, *a):\n"
        f"  if name == 'training.run':\n   sys.meta_path.remove(self)\n   exec({broken!r})\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    return f"{tmp_path}{os.pathsep}{ROOT}"


@slow
@pytest.mark.parametrize("error", ["AttributeError", "ValueError"])
def test_an_error_of_one_rank_is_shown_once_with_its_traceback(tmp_path, error: str):
    broken = f"from training.task import Task\ndef bad(*a, **k): raise {error}('on purpose')\n"
    path = another(tmp_path, broken + "Task.configure_gradient_clipping = bad")
    said = finished(tmp_path, "two", "steps=9", "devices=2", code=1, PYTHONPATH=path)
    assert said.count(f"normlab: rank 1 of 2: the run failed: {error}: on purpose\n") == 1
    assert said.count(f"[rank1]: RuntimeError: the run failed: {error}: on purpose\n") == 1
    assert said.count("rank 1 of 2 ended with exit code 1") == 1
    assert "gloo" not in said
    assert summary(tmp_path / "two")["verdict"] == "failed"


@slow
def test_a_record_that_not_all_ranks_see_is_refused(tmp_path):
    finished(tmp_path, "two", "steps=2", "devices=2", "schedule=constant", "schedule.warmup=1")
    path = another(tmp_path, "from training.record import NoRecord\nNoRecord.keep = lambda self, done: []")
    said = finished(tmp_path, "", "resume=two", "steps=4", code=2, PYTHONPATH=path)
    assert re.findall("normlab: .*", said) == [
        "normlab: two: the ranks read [4, 0] lines of its record: it has to be on a disk that all share"
    ]


@slow
def test_a_refusal_that_all_ranks_share_is_said_once_and_soon(tmp_path):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(ROOT / "train.py"), *WORDS, "devices=2", "trainer=fsdp", "compile=true"],
        cwd=tmp_path,
        env=environment(ROOT / ".pytest_cache" / "devices"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.count("compile=true with trainer=fsdp") == 1 and done.returncode
    assert time.monotonic() - began < 30
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@slow
def test_so_it_is_under_slurm_and_what_one_rank_refuses_alone_is_its_own(tmp_path):
    began = time.monotonic()
    said = under_slurm(tmp_path, "two", ["devices=2", "batch=7"], ["devices=2", "batch=7"])
    assert [code for code, _ in said] == [2, 2] and "batch=7: needs" in said[0][1] and not said[1][1]
    assert time.monotonic() - began < 30
    said = under_slurm(tmp_path, "two", ["devices=2"], ["devices=2", "batch=7"])
    assert said[0] == (1, "normlab: rank 1 of 2 has ended before its first step\n")
    assert said[1][0] == 2 and said[1][1].startswith("normlab: rank 1 of 2: batch=7: needs")
    assert said[1][1].count("\n") == 1


@slow
def test_sruns_tasks_of_one_device_are_runs_of_their_own(one, tmp_path):
    words = ["steps=12", "val_every=5"]
    for task in "01":
        (code, err), *_ = under_slurm(tmp_path, f"task{task}", words, first=int(task), there=2)
        assert (code, err) == (0, "")
        same(tmp_path / f"task{task}", one / "plain", rel=0)
        assert {path.name for path in (tmp_path / f"task{task}/checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}


@slow
def test_torchruns_ranks_are_found_and_have_no_directory_of_their_own(one, tmp_path):
    process = subprocess.run(
        [sys.executable, *TORCHRUN, str(ROOT / "train.py"), *WORDS, "steps=12", "val_every=5", "devices=2"],
        cwd=tmp_path,
        env=environment(ROOT / ".pytest_cache" / "devices"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (run,) = (tmp_path / "runs").iterdir()
    same(run, one / "plain")
    said = finished(tmp_path, "", f"resume={run}", "devices=2", program=TORCHRUN)
    assert said.count("nothing to do") == 1


@slow
def test_slurms_ranks_are_found(one, tmp_path):
    words = ["steps=12", "val_every=5", "devices=2"]
    assert under_slurm(tmp_path, "two", words, words) == [(0, ""), (0, "")]
    same(tmp_path / "two", one / "plain")


REFUSED = {
    "devices=2 trainer=fsdp optimizer=sgd": "optimizer=sgd with trainer=fsdp",
    "devices=2 trainer=fsdp optimizer=muon": "optimizer=muon with trainer=fsdp: it makes whole matrices orthogonal",
    "devices=2 trainer=fsdp optimizer=stable_adamw": "optimizer=stable_adamw with trainer=fsdp",
    "devices=2 trainer=fsdp linear=unit": "linear=unit with trainer=fsdp: its rule is of a whole matrix",
    "devices=2 trainer=fsdp linear=sigma_reparam": "linear=sigma_reparam with trainer=fsdp",
    "devices=2 batch=7": "batch=7: needs a multiple of accumulate * devices = 1 * 2",
    "devices=2 norm=batchnorm allow_unstable=true": "norm=batchnorm with devices=2",
    "trainer=fsdp": "trainer=fsdp parts a network among devices, and devices=1",
    "devices=2 trainer=fsdp probe_every=2": "probe_every with trainer=fsdp",
    "devices=2 trainer=fsdp compile=true": "compile=true with trainer=fsdp",
    "devices=2 trainer.cuda_graphs=true": "trainer.cuda_graphs=true records the work of one device",
    "num_nodes=2": "num_nodes=2: torchrun or srun starts the same command on each machine",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_devices_cannot_share_is_refused_in_one_line(tmp_path, monkeypatch, words: str):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    typed = [*SMALL, "data=synthetic", "data.tokens=20000", "logger=none", *words.split()]
    cfg, axes = config(*typed)
    with pytest.raises(ValueError, match=re.escape(REFUSED[words])) as caught:
        train.train(cfg, tmp_path / "run", axes, typed)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "the text has been read"


def test_another_program_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launch.Others, "start", None)
    typed = [*SMALL, "data=synthetic", "data.tokens=20000", "logger=none", "devices=2"]
    cfg, axes = config(*typed)
    with pytest.raises(ValueError, match=r"devices: .* cannot be started again as another rank"):
        train.train(cfg, tmp_path / "run", axes, typed)


def test_what_the_machine_lacks_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ValueError, match="devices=4: 3 GPUs found"):
        machine.check_devices(4, "cuda")
    machine.check_devices(3, "cuda")
    machine.check_devices(64, "cpu")  # slower, and right


def test_the_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    assert machine.threads(None, tokens=10**6, dim=10**3, processes=2) == 4
    assert machine.threads(None, tokens=10**6, dim=10**3, processes=16) == 1


def test_a_rank_is_what_whoever_started_it_says(monkeypatch):
    monkeypatch.setenv("RANK", "7")  # of somebody else's
    assert (rank(), Ranks(2, 1).rank, Ranks(2, 1).first) == (0, 0, True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    found = Ranks(4, 2)
    assert (rank(), found.rank, found.local, found.world, found.first) == (7, 7, 3, 8, False)
    assert follows()
    with pytest.raises(ValueError, match="devices=1 num_nodes=1: torchrun has started 8 processes"):
        Ranks(1, 1)
    with pytest.raises(ValueError, match="devices is those of one machine"):
        Ranks(2, 4)  # there is a fourth on this one


def test_sruns_tasks_are_ranks_and_a_batch_script_is_none(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert Ranks(2, 1).by == ""
    for key, value in {"STEP_NUM_TASKS": "2", "PROCID": "1", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    with pytest.raises(ValueError, match="say --ntasks-per-node=2"):
        Ranks(2, 1)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert (Ranks(2, 1).rank, Ranks(2, 1).by) == (1, "srun")
    own = Ranks(1, 1)
    assert (own.rank, own.local, own.by) == (0, 0, "") and not follows(), "a run of one device each"
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert (Ranks(2, 1).rank, Ranks(2, 1).by) == (0, "")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"


def test_a_message_that_did_not_come_is_told_from_an_error_of_ones_own():
    for error in (RuntimeError(GLOO), torch.distributed.DistNetworkError("x")):
        assert Ranks(2, 1).lost(error) == "another rank has ended"
        assert Ranks(1, 1).lost(error) is None
    for own in (OSError(28, "No space left", "gloo/peer"), RuntimeError("the peer of gloo"), ValueError(GLOO)):
        found = Ranks(2, 1)
        assert found.lost(own) is None and not found.together


def test_rank_0_does_not_wait_for_ever_and_says_how_many_are_missing(monkeypatch):
    monkeypatch.setattr(meeting, "GATHERING", 0.2)
    with pytest.raises(meeting.RankLost, match="2 of 3 ranks have not come within"):
        meeting.Meeting(0, 3, "").gather()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("code", [0, 3, 143])
def test_a_rank_that_ends_while_another_may_wait_for_it_ends_the_run(monkeypatch, code: int, together: bool):
    ended: list[int] = []
    monkeypatch.setattr(processes, "GRACE", 0.2)
    monkeypatch.setattr(os, "_exit", ended.append)
    found = Ranks(2, 1)
    found._met.set()
    if not together:
        found.lost(ValueError())  # rank 0 is at its closing
    found._others.start([sys.executable, "-S", "-c", f"raise SystemExit({code})"])
    assert found._others.first_ended(20) == f"rank 1 of 2 ended with exit code {code}"
    time.sleep(0.5)
    assert ended == ([1] if together else [])


def test_a_checkpoint_may_be_replaced_while_ranks_read_it(tmp_path):
    path, ones = tmp_path / "last.ckpt", torch.ones(1000)
    save({"state_dict": {"weight": ones}}, path)
    found = WholeFiles(mapped=True).load_checkpoint(path)["state_dict"]["weight"]
    kept = torch.nn.Parameter(torch.zeros(1000))
    with torch.no_grad():
        kept.copy_(found)
    save({"state_dict": {"weight": 2 * ones}}, path)
    found += 1  # is this process's own, as moments are that an optimizer takes as they are
    assert torch.equal(kept.detach(), ones) and torch.equal(found, 2 * ones)
    assert torch.equal(torch.load(path)["state_dict"]["weight"], 2 * ones)


def test_each_rank_draws_its_own_and_rank_0_what_one_device_draws():
    ranks = [Ranks(3, 1) for _ in range(3)]
    for number, found in enumerate(ranks):
        found.rank = number
    seeds = [found.seed(5) for found in ranks]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert not set(seeds) & {found.seed(5, done=10) for found in ranks}, "after another number of devices: new draws"


def test_one_rank_agrees_with_itself():
    loss, total, asked = Ranks(1, 1).agree(torch.tensor(2.0), torch.tensor(3.0), signal.SIGTERM)
    assert (loss.item(), total.item(), len(asked)) == (2.0, 3.0, 0)


def test_what_ranks_agree_on_goes_in_one_message(monkeypatch):
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda row: sent.append(row.clone()) or row.mul_(2))
    loss, total, asked = Ranks(2, 1).agree(torch.tensor(2.0), torch.tensor(3.0), signal.SIGTERM)
    assert (loss.item(), total.item(), len(sent)) == (2.0, 3.0, 1)
    assert [number for number, one in zip(STOPS, asked.tolist(), strict=True) if one] == [signal.SIGTERM]


@pytest.mark.parametrize(
    "jobs", [[["seed=0", "devices=2"]], [["num_nodes=1"], ["num_nodes=2", "seed=0"]], [["+devices=4"]]]
)
def test_a_sweep_has_one_device_a_job(jobs: list[list[str]]):
    with pytest.raises(ValueError, match="a job of a sweep has one device"):
        check_devices(Sweep(Path("x"), jobs), [])
    check_devices(Sweep(Path("x"), [["devices=1", "seed=0"], ["num_nodes=1"]]), [])


@pytest.mark.case("H02 Lightning-AI/pytorch-lightning PR #11617")
@pytest.mark.parametrize(
    "words", [["-m", "devices=1,2"], ["study=warmup", "devices=2"], ["-m", "hydra/sweeper=optuna", "devices=2"]]
)
def test_such_a_sweep_is_refused_before_anything_is_written(tmp_path, words: list[str]):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=tmp_path,
        env=environment(tmp_path / "cache"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"normlab: devices=2: a job of a sweep has one device; .*\n", done.stderr)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("trainer", BOTH)
def test_gpu_two_leave_the_record_of_one(tmp_path, trainer: str):
    """CUDA adds up the embedding's gradient in no fixed order."""
    words = ["steps=12", "val_every=5", "precision=fp32", "accumulate=2"]
    finished(tmp_path, "one", *words)
    finished(tmp_path, "two", *words, "devices=2", f"trainer={trainer}")
    same(tmp_path / "two", tmp_path / "one", rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_gpu_a_signal_ends_both_after_one_step(tmp_path):
    process = start(tmp_path, "two", "steps=100000", "devices=2", "log_every=5")
    until(lambda: lines(tmp_path / "two") > 20)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143 and summary(tmp_path / "two")["verdict"] == "interrupted"
