"""The deep metrics during a run: those of the probe, of a run that does not know that it is watched, and resumed exactly."""

import json
import signal

import numpy as np
import pytest
import torch

from scripts import probe
from stability.records import metrics_line
from tests.conftest import SMALL
from tests.training.test_run import Kick, poisoned
from training import device as machine
from training import probing
from training import run as run_module
from training.probing import values
from training.recorder import Recorder

WORDS = ["steps=11", "model.dropout=0.1", "accumulate=2", "val_every=6", "save_every=5"]
CASES = [
    ["log_every=1"],
    ["norm=batchnorm", "allow_unstable=true", "log_every=4", "residual=learned_scalars"],
    ["precision=bf16-mixed", "placement=peri"],
    ["precision=fp64", "placement=post"],
]


def probes(records):
    return [record for record in records if "probe" in record]


def text(summary) -> list[str]:
    return (summary["directory"] / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_a_run_does_not_know_that_it_is_watched(run, words: list[str]):
    plain = text(run(*WORDS, *words)[1])
    records, summary = run(*WORDS, *words, "probe_every=3")
    assert [line for line in text(summary) if '"probe"' not in line] == plain
    assert [record["step"] for record in probes(records)] == [0, 3, 6, 9, 11]
    # in its place: after the line of its step, before the validation that a checkpoint of the step counts on
    kinds = [next(k for k in ("probe", "val_loss", "loss") if k in r) for r in records if r["step"] in (0, 6)]
    assert kinds == ["probe", "val_loss", "loss", "probe", "val_loss"]
    for record in probes(records):
        seen = record["probe"]
        assert ("update_ratio" in seen) == ("model_update" in seen) == (record["step"] > 0)
        assert len(seen["stream_rms"]) == 3 and len(seen["ffn_rms"]) == 2
        assert (seen["future_leak"] == 0) == ("norm=batchnorm" not in words)
        assert "nonfinite" not in record and not {"grad_norm", "ffn_skip_rms"} & seen.keys()


@pytest.mark.parametrize(("words", "stop"), list(zip(CASES, [2, 3, 7, 3], strict=True)), ids=str)
def test_a_resume_has_the_same_probes(run, monkeypatch, words: list[str], stop: int):
    """Broken off before the first probe after a step, on one, and between two."""
    words = [*WORDS, *words, "probe_every=3"]
    unbroken = text(run(*words)[1])
    original, kick = run_module._trainer, Kick(stop, signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, kick], **k))
        summary = run(*words)[1]
    assert summary["verdict"] == "interrupted"
    where = summary["directory"]
    assert text(run(*words, f"resume={where}", directory=where)[1]) == unbroken


def test_a_run_that_fails_early_keeps_the_probe_of_step_0(run, monkeypatch, tmp_path):
    """Its checkpoint is that of step 0, and counts on the line."""

    class Fail(run_module.pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                raise AssertionError("in mid-run")

    words, where = [*WORDS, "probe_every=3"], tmp_path / "broken"
    unbroken, original = text(run(*words)[1]), run_module._trainer
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Fail()], **k))
        with pytest.raises(RuntimeError, match="in mid-run"):
            run(*words, directory=where)
    assert text(run(*words, f"resume={where}", directory=where)[1]) == unbroken


@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_the_line_of_step_0_is_the_probe(run, words: list[str]):
    words = [*WORDS, *words]
    records, _ = run(*words, "probe_every=100")
    text = ["data=synthetic", "data.tokens=20000", "threads=1"]
    found = probe.Checked([*SMALL, *text, *words]).trace(0)
    expected = json.loads(metrics_line({"probe": values(found)}))["probe"]
    line = probes(records)[0]["probe"]
    assert line.pop("future_leak") >= 0
    assert line == expected
    assert [record["step"] for record in probes(records)] == [0, 11]


def test_what_a_step_moved(run):
    """SGD moves a block's matrices by lr times their gradient, and twice the rate moves the output twice as far: the second
    order is of the size of the change, about 1e-4."""
    words = [
        "steps=1",
        "schedule=constant",
        "schedule.warmup=0",
        "optimizer=sgd",
        "clip=0",
        "probe_every=1",
        "precision=fp64",
    ]
    words += ["val_every=0"]
    found = {}
    for lr in (1e-4, 2e-4):
        records, _ = run(*words, f"optimizer.lr={lr}")
        found[lr] = probes(records)[1]["probe"]
        norms = next(record for record in records if "loss" in record)["grad_norm"]
        for layer in range(2):
            moved = lr * np.sqrt(sum(norms[matrix][layer] ** 2 for matrix in ("q", "k", "v", "o", "up", "down")))
            # Xavier: 16 x 16 of std 1/4, 16 x 64 of std sqrt(2/80): in all sqrt(4 * 16 + 2 * 1024 / 40) = 10.7
            assert found[lr]["update_ratio"][layer] == pytest.approx(moved / 10.7, rel=0.1)
    assert np.divide(found[2e-4]["update_ratio"], found[1e-4]["update_ratio"]) == pytest.approx(2, rel=1e-3)
    assert found[2e-4]["model_update"] / found[1e-4]["model_update"] == pytest.approx(2, rel=1e-2)


def test_a_skipped_step_moves_nothing_and_a_diverged_run_is_not_measured(run, monkeypatch):
    poisoned(monkeypatch, 1, 4, count=3)
    records, summary = run("steps=60", "log_every=1", "probe_every=1")
    assert summary["verdict"] == "diverged"
    assert [record["step"] for record in probes(records)] == [0, 1, 2, 3, 4, 5]  # three bad steps end it
    for record in probes(records)[4:]:
        assert record["probe"]["update_ratio"] == [0, 0]


def test_what_does_not_exist_is_left_out(run):
    records, _ = run("steps=1", "norm=none", "probe_every=1", "model.context=1")
    for record in probes(records):
        assert not {"gain_min", "gain_mean", "gain_max", "token_cosine"} & record["probe"].keys()
        assert "nonfinite" not in record


def test_a_run_that_diverges_by_its_loss_ends_no_sooner_for_being_watched(run):
    words = [
        "steps=60",
        "log_every=20",
        "val_every=0",
        "save_every=0",
        "clip=0",
        "schedule=constant",
        "schedule.warmup=0",
    ]
    words += ["optimizer.lr=10"]
    _, summary = run(*words)
    assert summary["verdict"] == "diverged" and summary["skipped_steps"] == 0
    _, watched = run(*words, "probe_every=7")
    assert [line for line in text(watched) if '"probe"' not in line] == text(summary)


def test_what_a_probe_takes_is_no_part_of_the_peak(run, monkeypatch):
    """Of a device that training takes 100 of, and 170 at step 4, a probe 1,000, and what is held between them 50."""
    peak = [0]

    def take(original, bytes_of):
        def taking(*args, **words):
            peak[0] = max(peak[0], bytes_of(*args))
            return original(*args, **words)

        return taking

    monkeypatch.setattr(machine, "peak_memory", lambda _: peak[0])
    monkeypatch.setattr(machine, "reset_peak_memory", lambda _: peak.__setitem__(0, 50))
    monkeypatch.setattr(Recorder, "step", take(Recorder.step, lambda _, step, *__: 170 if step == 4 else 100))
    for name in ("trace", "features", "future_leak", "model_update", "update_ratio"):
        monkeypatch.setattr(probing, name, take(getattr(probing, name), lambda *_: 1000))
    for every in ("1", "3", "100"):
        assert run(*WORDS, f"probe_every={every}")[1]["peak_memory_bytes"] == 170


def test_the_peak_of_a_cpu_begins_anew():
    try:
        machine.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("no peak that can be set back")
    machine.reset_peak_memory("cpu")
    before, large = machine.peak_memory("cpu"), torch.ones(25 * 2**20)  # 100 MiB
    assert machine.peak_memory("cpu") > before + 90 * 2**20
    del large
    machine.reset_peak_memory("cpu")
    assert machine.peak_memory("cpu") < before + 50 * 2**20
