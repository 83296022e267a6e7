"""Whole runs in this process: the records, what must not change the result, and what becomes of a run that breaks."""

import csv
import io
import json
import math
import os
import re
import signal

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F

import train
from conf.help import choices
from conf.schema import AXES
from data.tokens import prepare
from data.windows import Windows
from stability.locate import Place
from stability.records import read
from tests.conftest import SMALL, network, plain
from training import run as run_module
from training.checkpoint import resume_point, save
from training.pace import Pace
from training.ranks import Ranks
from training.record import Record
from training.recorder import Recorder

LONG = ["steps=60", "log_every=7", "val_every=25"]


def steps(records):
    return [record for record in records if "loss" in record]


def same(a, b, rel: float) -> None:
    """Two records, number by number."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            same(value, b[key], rel)
        else:
            np.testing.assert_allclose(b[key], value, rtol=rel, atol=1e-9, err_msg=key)


@pytest.mark.case("G04 Lightning-AI/pytorch-lightning PR #16745", "R11 open-retina/open-retina PR #186", "L06")
def test_the_record_keeps_its_contract(run):
    records, summary = run(*LONG, "clip=0.7", "optimizer.lr=1e-2")
    assert [r["step"] for r in steps(records)] == list(range(1, 61))
    assert [r["step"] for r in records if "val_loss" in r] == [0, 25, 50, 60]
    for record in steps(records):
        assert {"step", "tokens", "loss", "lr", "grad_norm", "clip_coefficient"} <= record.keys()
        assert record["tokens"] == record["step"] * 16 * 8
        full = record["step"] == 1 or record["step"] % 7 == 0 or record["step"] == 60
        assert ("attention" in record["grad_norm"]) == full
        norms = record["grad_norm"]
        assert record["clip_coefficient"] == pytest.approx(min(1, 0.7 / (norms["total"] + 1e-6)), rel=1e-6)
        if full:
            assert set(norms) == {
                "total",
                "embed",
                "head",
                "attention",
                "ffn",
                "norm",
                "residual",
                *"qkvo",
                "up",
                "down",
            }
            parts = sum(sum(x * x for x in norms[part]) for part in ("attention", "ffn", "norm", "residual"))
            assert parts + norms["embed"] ** 2 + norms["head"] ** 2 == pytest.approx(norms["total"] ** 2, rel=1e-5)
    assert any(record["clip_coefficient"] < 1 for record in steps(records))
    directory = summary["directory"]
    for name in ("config.yaml", "overrides.yaml", "environment.json", "tokenizer.json", "summary.json", "report.png"):
        assert (directory / name).stat().st_size > 0, name
    assert json.loads((directory / "summary.json").read_text())["verdict"] == summary["verdict"]
    assert summary["code"] == 0
    assert summary["unigram_entropy"] > summary["floor"] > 0
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["threads"] == 1 and len(environment["corpus"]["hash"]) == 16
    for name in ("last", "best"):
        loaded = torch.load(directory / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert all(torch.isfinite(value).all() for value in loaded["state_dict"].values())
    assert read(directory).layers["block"].shape == (10, 2)


@pytest.mark.case("P08", "N02", "P02")
def test_what_is_said_before_the_first_step(run, capsys):
    """The equation, its constants, the initial std by matrix and role, and what is known to fail."""
    run("steps=1", "recipe=deepnorm", "model.depth=8", "norm=layernorm")
    said = capsys.readouterr().out
    assert "x <- N(alpha x + F(x));  logits = W x" in said
    assert "alpha = 2  s = 1  beta = 1  eps = 1e-06" in said  # (2 * 8)^(1/4)
    # Xavier of 16 x 16 is 1/4, times (8 * 8)^(-1/4) = 0.3536
    assert "q (score) 0.25  k (score) 0.25  v (carry) 0.08839  o (write) 0.08839" in said
    assert "without warm-up" not in said
    run("steps=1", "placement=post", "norm=none")
    said = capsys.readouterr().out
    assert "x <- x + F(x);  logits = W x" in said and "  eps = " not in said and "without warm-up" not in said
    run("steps=1", "placement=post", "schedule.warmup=0")
    assert "note         post-norm without warm-up seldom trains" in capsys.readouterr().out


@pytest.mark.case("L01", "T04")
def test_accumulation_does_not_change_the_result(run):
    """1e-5: sums of 128 float32 terms in another order differ by about 1e-6 of themselves."""
    one, _ = run("steps=8", "log_every=1")
    four, _ = run("steps=8", "log_every=1", "accumulate=4")
    for a, b in zip(one, four, strict=True):
        same(a, b, 1e-5)


@pytest.mark.case("G03 Lightning-AI/pytorch-lightning#18669", "G10 simchowitzlabpublic/nano-world-model PR #22")
def test_the_logged_norms_are_autograds_and_before_clipping(run):
    """The same weights and windows outside the product: composed, drawn and differentiated here."""
    records, _ = run("steps=1", "clip=0.01")
    settings = plain(*SMALL, "data=synthetic", "data.tokens=20000")
    corpus = train.instantiate(settings["data"])
    tokens = prepare(corpus, train.instantiate(settings["tokenizer"]), context=8)
    model = train.network(settings, train.choices_of(settings), tokens.vocab)
    window = Windows(tokens.train, context=8, batch=16, accumulate=1, steps=1, seed=0)[0]
    loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    total = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    (record,) = steps(records)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["grad_norm"]["total"] == pytest.approx(total, rel=1e-5)
    assert total > 0.1  # far above the clip: what is logged is before it
    assert record["clip_coefficient"] == pytest.approx(0.01 / total, rel=1e-4)


@pytest.mark.case("G02", "G03")
def test_clipping_scales_the_gradient_that_the_optimizer_sees(run, monkeypatch):
    seen = []

    class Spy(Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            if grads:
                seen.append(torch.stack([g.norm() for g in grads]).norm().item())

    spying = run_module._trainer
    monkeypatch.setattr(run_module, "_trainer", lambda d, s, c, **k: spying(d, s, [*c, Spy()], **k))
    records, _ = run("steps=4", "clip=0.05")
    # zero_grad comes before the next backward: the gradient still there is the one that was used
    assert seen == pytest.approx([0.05] * len(seen), rel=1e-4)
    assert len(seen) == 3
    assert all(record["grad_norm"]["total"] > 0.05 for record in steps(records))


@pytest.mark.case("T08 Lightning-AI/pytorch-lightning#6988")
def test_validation_logging_and_saving_leave_the_training_alone(run):
    often, _ = run("steps=12", "val_every=1", "log_every=1", "save_every=1", "model.dropout=0.2")
    never, _ = run("steps=12", "val_every=99", "log_every=5", "save_every=99", "model.dropout=0.2")
    assert [r["loss"] for r in steps(often)] == [r["loss"] for r in steps(never)]


def test_what_the_seed_decides(run):
    first, _ = run("steps=3")
    again, _ = run("steps=3")
    other, _ = run("steps=3", "seed=1")
    assert first == again
    assert steps(first)[0]["loss"] != steps(other)[0]["loss"]


def test_two_norms_see_the_same_windows_and_start_with_the_same_loss(run):
    """RMSNorm and its zero-centred form are one function at the start."""
    plain_gain, _ = run("steps=1", "norm=rmsnorm")
    centred, _ = run("steps=1", "norm=zero_rmsnorm")
    assert plain_gain[0]["val_loss"] == pytest.approx(centred[0]["val_loss"], rel=1e-6)
    assert steps(plain_gain)[0]["grad_norm"]["q"] == pytest.approx(steps(centred)[0]["grad_norm"]["q"], rel=1e-5)


def test_random_data_never_goes_below_its_entropy(run):
    """Uniform, independent symbols: ln V is the floor; only a leak of the future could go below it. The mean loss over
    16 x 8 symbols near that floor has a deviation of about 0.01 here."""
    words = ["data.concentration=null", "data.symbols=16", "steps=150", "data.tokens=200000", "optimizer.lr=3e-3"]
    records, summary = run(*words)
    assert summary["floor"] == pytest.approx(math.log(16), rel=1e-9)
    losses = [record["loss"] for record in steps(records)]
    assert np.mean(losses[-50:]) == pytest.approx(math.log(16), abs=0.1)
    assert min(losses) > math.log(16) - 0.05
    assert min(record["val_loss"] for record in records if "val_loss" in record) > math.log(16) - 0.005
    assert summary["verdict"] == "stable"


def test_a_known_floor_is_approached(run):
    words = ["data.concentration=0.05", "data.symbols=8", "steps=300", "data.tokens=200000", "optimizer.lr=1e-2"]
    _, summary = run(*words)
    assert summary["floor"] < summary["final_val_loss"] < summary["floor"] + 0.15 < summary["unigram_entropy"]


def test_best_is_the_checkpoint_of_the_lowest_validation(run):
    """So small a text is soon known by heart: the validation loss falls, then rises."""
    words = ["data.tokens=400", "data.val_fraction=0.5", "steps=200", "val_every=10", "optimizer.lr=3e-2"]
    records, summary = run(*words, "schedule=constant")
    values = {record["step"]: record["val_loss"] for record in records if "val_loss" in record and record["step"]}
    best = min(values, key=values.get)
    assert best < 200
    kept = torch.load(summary["directory"] / "checkpoints" / "best.ckpt", weights_only=True)
    assert kept["global_step"] == best
    assert summary["best_val_loss"] == values[best] < summary["final_val_loss"] == values[200]


def test_a_stall_tells_the_gradient_of_the_first_and_the_last_step(run):
    records, summary = run("steps=60", "optimizer.lr=1e-7")
    blocks = [
        [sum(r["grad_norm"][part][0] ** 2 for part in ("attention", "ffn", "norm", "residual")) ** 0.5]
        for r in (steps(records)[0], steps(records)[-1])
    ]
    assert summary["verdict"] == "stalled"
    assert f"layer 1 went from {blocks[0][0]:.1e} (step 1) to {blocks[1][0]:.1e} (step 60)" in summary["reason"]


class Poison(Callback):
    """From step `first` on, for `count` steps, layer `layer` answers nan."""

    def __init__(self, layer: int, first: int, count: int = 10**9) -> None:
        self.layer, self.first, self.count = layer, first, count

    def on_train_start(self, trainer, module):
        def poison(_, __, output):
            active = module.model.training and self.first <= trainer.global_step + 1 < self.first + self.count
            return output * torch.nan if active else output

        module.model.blocks[self.layer - 1].register_forward_hook(poison)


def poisoned(monkeypatch, *args, **words) -> None:
    original = run_module._trainer
    added = Poison(*args, **words)
    monkeypatch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, added], **k))


@pytest.mark.case(
    "L04 huggingface/trl#6702, huggingface/transformers#13758",
    "L05 mmcdermott/MEDS_EIC_AR#22",
    "L06 Lightning-AI/pytorch-lightning#1008",
    "P09",
)
@pytest.mark.parametrize("layer, first", [(1, 12), (2, 20)])
@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_that_is_not_finite_stops_and_says_where(run, monkeypatch, layer: int, first: int, log_every: int):
    poisoned(monkeypatch, layer, first)
    records, summary = run("steps=60", f"log_every={log_every}", "save_every=5")
    assert (summary["verdict"], summary["code"]) == ("diverged", 3)
    assert (summary["first_bad_step"], summary["first_bad_layer"]) == (first, layer)
    assert f"step {first}" in summary["reason"] and f"layer {layer}" in summary["reason"]
    bad = [record for record in steps(records) if record.get("skipped")]
    assert [record["step"] for record in bad][:3] == [first, first + 1, first + 2]
    assert all(record["loss"] is None and "loss" in record["nonfinite"] for record in bad)
    assert steps(records)[-1]["step"] < first + 3 + log_every
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == steps(records)[-1]["step"]  # the skipped steps left the weights as they were
    assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())
    json.loads((summary["directory"] / "summary.json").read_text(), parse_constant=pytest.fail)  # no bare NaN


@pytest.mark.case("G13 Lightning-AI/pytorch-lightning#9799", "L04")
def test_a_single_step_that_is_not_finite_is_skipped_and_counted(run, monkeypatch):
    words = ["steps=60", "optimizer.lr=3e-2", "data.concentration=0.05", "data.symbols=8"]
    clean, _ = run(*words)
    poisoned(monkeypatch, 1, 20, count=1)
    records, summary = run(*words)
    assert (summary["verdict"], summary["skipped_steps"], summary["code"]) == ("spiky", 1, 0)
    assert [r["step"] for r in steps(records)] == list(range(1, 61))
    assert steps(records)[18] == steps(clean)[18]
    # the step keeps its place in the schedule
    assert [r["lr"] for r in steps(records)] == [r["lr"] for r in steps(clean)]


@pytest.mark.case("L05", "L06")
def test_a_loss_far_above_its_start_ends_the_run(run):
    words = ["optimizer.lr=10", "clip=0", "schedule=constant", "schedule.warmup=0", "steps=100", "placement=pre"]
    records, summary = run(*words)
    assert (summary["verdict"], summary["code"]) == ("diverged", 3)
    assert summary["first_bad_step"] and len(steps(records)) < 100
    assert summary["final_val_loss"] is None  # the one before the first step is no result
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 0  # from before it diverged


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_diagnosis_leaves_the_training_alone(run, monkeypatch, log_every: int):
    """Finding the layer runs the model again, which must move neither dropout nor the record of the first bad step."""
    words = ["steps=40", "model.dropout=0.2", f"log_every={log_every}"]
    original = run_module._trainer
    twice = [Poison(2, 13, count=1), Poison(1, 23, count=1)]
    monkeypatch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, *twice], **k))
    found, summary = run(*words)
    monkeypatch.setattr("training.run.first_bad_place", lambda *_: Place(2, None))
    blind, _ = run(*words)
    assert [r["loss"] for r in steps(found)] == [r["loss"] for r in steps(blind)]
    assert (summary["first_bad_step"], summary["first_bad_layer"], summary["skipped_steps"]) == (13, 2, 2)


def test_a_skipped_step_leaves_running_statistics_alone(run, monkeypatch):
    poisoned(monkeypatch, 1, 13, count=1)
    records, summary = run("steps=60", "norm=batchnorm", "allow_unstable=true")
    assert summary["skipped_steps"] == 1
    assert summary["verdict"] != "diverged"
    assert all(math.isfinite(r["val_loss"]) for r in records if "val_loss" in r)


@pytest.mark.case("H04")
def test_a_directory_that_holds_a_run_is_not_written_into(run):
    _, summary = run("steps=2")
    before = (summary["directory"] / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run: resume="):
        run("steps=2", directory=summary["directory"])
    assert (summary["directory"] / "metrics.jsonl").read_bytes() == before


class Crash(Callback):
    """A ValueError, which in training is a fault of ours and must not pass for one of the command line."""

    def on_train_batch_start(self, trainer, module, *_):
        if trainer.global_step == 2:
            raise ValueError("the machine stopped")


def test_a_run_that_crashed_before_its_first_checkpoint_starts_again_exactly(run, monkeypatch, tmp_path):
    unbroken, _ = run("steps=4")
    original = run_module._trainer
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Crash()], **k))
        with pytest.raises(RuntimeError, match="the machine stopped"):
            run("steps=4", directory=tmp_path / "crashed")
    assert json.loads((tmp_path / "crashed" / "summary.json").read_text())["verdict"] == "failed"
    resumed, _ = run("steps=4", f"resume={tmp_path / 'crashed'}", directory=tmp_path / "crashed")
    assert resumed == unbroken


def test_a_resume_sees_the_same_text_with_the_same_threads(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(900)))
    words = ["data=files", f"data.paths=[{text}]", "data.tokens=20000"]
    words = [word for word in words if "tokens" not in word] + ["steps=4"]
    _, summary = run(*words, drop="data.tokens")
    where = summary["directory"]
    recorded = json.loads((where / "environment.json").read_text())
    (where / "environment.json").write_text(json.dumps(recorded | {"threads": 2}))
    (where / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [{"step": 0, "val_loss": 5.0}]))
    (where / "summary.json").unlink()  # killed before its end
    text.write_text(text.read_text() + "more\n")
    with pytest.raises(ValueError, match="the text has changed since"):
        run(*words, f"resume={where}", directory=where, drop="data.tokens")
    assert json.loads((where / "environment.json").read_text())["threads"] == 2


@pytest.mark.case("L01 huggingface/transformers#24725, huggingface/transformers PR #34191")
def test_validation_weighs_windows_not_batches(run):
    """50 windows in batches of 16: the last batch has 2."""
    split, _ = run("steps=1", "data.val_windows=50")
    whole, _ = run("steps=1", "data.val_windows=50", "batch=50", "data.val_windows=50")
    assert split[0]["val_loss"] == pytest.approx(whole[0]["val_loss"], rel=1e-6)


def test_a_resumed_recorder_goes_on_counting(run, tmp_path):
    """The history before a resume counts for the verdict: the first loss, and a stretch that is not finite."""
    recorder_of = lambda path: Recorder(  # noqa: E731
        Record(path),
        None,
        None,
        steps=60,
        log_every=10,
        patience=3,
        tokens_per_step=1,
        locate=lambda step, norms: None,
    )
    lines = [{"step": 0, "val_loss": 9.0}, {"step": 1, "loss": 8.0}, {"step": 2, "loss": None, "skipped": True}]
    lines += [{"step": 3, "loss": None, "skipped": True}, {"step": 4, "loss": 1.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
    recorder = recorder_of(path)
    recorder.restore(3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:4]
    assert (recorder.watch.first_loss, recorder.watch.bad, recorder.watch.first_bad_step) == (8.0, 2, 2)
    assert recorder.skipped == [False, True, True] and recorder.val_loss == [(0, 9.0)]
    recorder.close()


class Kick(Callback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, module, *_):
        if trainer.global_step + 1 == self.step and self.number:
            number, self.number = self.number, 0
            os.kill(os.getpid(), number)  # in the first micro-batch of the step


@pytest.mark.case("R01", "R02", "R05", "R09 Lightning-AI/pytorch-lightning#19916")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_its_step_and_it_resumes_exactly(run, monkeypatch, number: int, code: int):
    words = ["steps=20", "val_every=6", "model.dropout=0.1", "accumulate=2", "workers=1"]
    unbroken, _ = run(*words)
    original = run_module._trainer
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Kick(9, number)], **k))
        broken, summary = run(*words)
    assert (summary["verdict"], summary["code"]) == ("interrupted", code)
    assert steps(broken)[-1]["step"] == 9
    resumed, summary = run(*words, f"resume={summary['directory']}", directory=summary["directory"])
    assert summary["verdict"] == "too_short" and summary["steps_done"] == 20
    assert "resume" not in (summary["directory"] / "overrides.yaml").read_text()
    assert "resume: null" in (summary["directory"] / "config.yaml").read_text()
    without_arrays = [{k: v for k, v in r.items() if k != "grad_norm"} for r in resumed]
    assert without_arrays == [{k: v for k, v in r.items() if k != "grad_norm"} for r in unbroken]
    assert [r["grad_norm"]["total"] for r in steps(resumed)] == [r["grad_norm"]["total"] for r in steps(unbroken)]


def test_a_resume_that_would_change_the_numbers_is_refused(run):
    _, summary = run("steps=4")
    with pytest.raises(ValueError, match=r"optimizer\.lr differ"):
        run("steps=4", "optimizer.lr=2e-3", f"resume={summary['directory']}", directory=summary["directory"])


@pytest.mark.case("R06", "R11")
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_used(run, capsys):
    words = ["steps=12", "val_every=4", "model.dropout=0.1"]
    unbroken, summary = run(*words)
    where = summary["directory"]
    kept = torch.load(where / "checkpoints" / "best.ckpt", weights_only=True)["global_step"]
    last = where / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    model, run_id = network(vocab=257), json.loads((where / "environment.json").read_text())["run"]
    flipped = bytearray(whole)
    flipped[
        whole.index(torch.load(last, weights_only=True)["state_dict"]["model.head.weight"].numpy().tobytes()) + 9
    ] ^= 1
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint", whole[:-1], flipped):
        last.write_bytes(damaged)
        assert resume_point(where, model, run_id)[1] == kept
        assert re.search(r"last.ckpt is left aside: (no whole checkpoint of a run|damaged)", capsys.readouterr().out)
    torch.save({"weights": 1}, last)  # somebody else's
    assert resume_point(where, model, run_id)[1] == kept
    last.write_bytes(whole)
    assert resume_point(where, model, run_id)[1] == 12
    for other, of, said in ((model, "another", "belongs to another run"),
                            (network("model.depth=3", vocab=257), run_id, "holds another network (blocks.2"),
                            (network("model.dim=8", vocab=257), run_id, "holds another network (embed.token: (257, 16)")):  # fmt: skip
        with pytest.raises(ValueError, match="no checkpoint there can be used; with checkpoints/ moved away it starts"):
            resume_point(where, other, of)
        assert said in capsys.readouterr().out
    last.write_bytes(b"")
    (where / "summary.json").unlink()
    resumed, _ = run(*words, f"resume={where}", directory=where)
    assert resumed == unbroken


@pytest.mark.case("N07")
def test_float64_and_bf16_mixed_run(run):
    double, _ = run("steps=2", "precision=fp64")
    single, _ = run("steps=2", "precision=fp32")
    mixed, _ = run("steps=2", "precision=bf16-mixed")
    # float32 against float64: some 1e-6; bfloat16 has 8 bits of mantissa, 4e-3 an operation
    assert steps(single)[1]["loss"] == pytest.approx(steps(double)[1]["loss"], rel=1e-5)
    assert steps(mixed)[1]["loss"] == pytest.approx(steps(double)[1]["loss"], rel=2e-2)
    assert steps(mixed)[1]["loss"] != steps(single)[1]["loss"]


def test_every_choice_of_every_axis_composes_and_passes_the_type_check():
    for axis in AXES:
        for choice in choices(axis):
            assert plain(f"{axis}={choice}")


@pytest.mark.case("L06")
def test_pace_never_saves_weights_that_are_not_finite(run):
    _, summary = run("steps=2")
    pace = Pace(summary["directory"] / "elsewhere", None, Ranks(1, 1), val_every=1, save_every=1)

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([torch.nan]))

    class Task:
        model = Broken()

        class recorder:
            reason = None
            to_disk = pause = staticmethod(lambda: None)

    pace._save(None, Task, "last")
    assert not (summary["directory"] / "elsewhere").exists()


def broken_at(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Runs stop after `step`, by a signal."""
    original = run_module._trainer
    monkeypatch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Kick(step, number)], **k))


@pytest.mark.case("G01 Lightning-AI/pytorch-lightning#9205", "G02 Lightning-AI/pytorch-lightning#9330", "G13", "N07")
def test_no_precision_scales_the_gradient(run, monkeypatch):
    """Norms and clipping are those of the true gradient in every precision: none has a loss scale that would have to be
    taken back. bfloat16 keeps 8 bits, 4e-3 an operation, and some twenty operations lie behind a norm: 5e-2."""
    original, scalers, used = run_module._trainer, [], []

    class Spy(Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = [p.grad.double().norm() for p in module.parameters() if p.grad is not None]
            used.extend([torch.stack(grads).norm().item()] if grads else [])

    def spying(device, scalars, callbacks, **words):
        trainer = original(device, scalars, [*callbacks, Spy()], **words)
        scalers.append(getattr(trainer.precision_plugin, "scaler", None))
        return trainer

    monkeypatch.setattr(run_module, "_trainer", spying)
    words = ["steps=2", "clip=0.05", "log_every=1"]
    (double, single, mixed) = [steps(run(*words, f"precision={p}")[0])[0] for p in ("fp64", "fp32", "bf16-mixed")]
    assert scalers == [None] * 3
    assert used == pytest.approx([0.05] * 3, rel=1e-4)
    same(double["grad_norm"], single["grad_norm"], 1e-4)
    same(double["grad_norm"], mixed["grad_norm"], 5e-2)


@pytest.mark.case("G06 Lightning-AI/pytorch-lightning#272", "T08")
def test_every_norm_is_told_also_right_after_a_validation(run):
    often, _ = run("steps=12", "val_every=5", "log_every=1")
    never, _ = run("steps=12", "val_every=99", "log_every=1")
    for record in steps(often):
        for name, norm in record["grad_norm"].items():
            flat = norm if isinstance(norm, list) else [norm]
            assert name == "residual" or min(flat) > 0, (record["step"], name)  # nothing is learnt there
    assert steps(often) == steps(never)


@pytest.mark.case("G08 Lightning-AI/pytorch-lightning#21808", "T04")
def test_a_text_shorter_than_a_step_fills_every_window_of_it(run):
    """Some ten windows of text, 16 in a step: no end of the text ends a step, and each gradient is the mean of all 8
    micro-batches. 1e-5: sums of 128 float32 terms in another order differ by about 1e-6 of themselves."""
    words = ["data.tokens=90", "data.val_fraction=0.2", "steps=9", "log_every=1"]
    one, _ = run(*words)
    eight, summary = run(*words, "accumulate=8")
    assert [r["step"] for r in steps(eight)] == list(range(1, 10))
    for a, b in zip(one, eight, strict=True):
        same(a, b, 1e-5)
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 9


@pytest.mark.case("T03 Lightning-AI/pytorch-lightning#6948", "T04 Lightning-AI/pytorch-lightning#831", "T01")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_axis_counts_optimizer_steps(run, oracle, accumulate: int):
    """Row r (counted from 0) is step r + 1; nine significant digits are written."""
    words = ["steps=100", "schedule.warmup=10", "schedule.min_ratio=0.1", "optimizer.lr=1e-3", "model.depth=1"]
    records, summary = run(*words, "val_every=40", "save_every=30", f"accumulate={accumulate}")
    lr = {record["step"]: record["lr"] for record in steps(records)}
    rows = {
        int(r["step"]) + 1: float(r["lr_reference"])
        for r in csv.DictReader(io.StringIO(oracle("oracle_lr_schedule.csv")))
    }
    for step in rows.keys() & lr.keys():
        assert lr[step] == pytest.approx(rows[step], rel=1e-8), step
    assert list(lr) == list(range(1, 101))
    assert [r["step"] for r in records if "val_loss" in r] == [0, 40, 80, 100]
    assert all(record["tokens"] == record["step"] * 16 * 8 for record in records)
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == summary["steps_done"] == 100


@pytest.mark.case("R05 Lightning-AI/pytorch-lightning#4655", "R02 Lightning-AI/pytorch-lightning#19815")
@pytest.mark.parametrize("step", [7, 15])
def test_the_learning_rate_goes_on_where_it_was(run, monkeypatch, step: int):
    """Stopped within the warm-up of 10 steps, and within the decay after it."""
    words = ["steps=20", "schedule.warmup=10", "accumulate=2"]
    unbroken, _ = run(*words)
    with monkeypatch.context() as patch:
        broken_at(patch, step)
        _, summary = run(*words)
    assert summary["steps_done"] == step
    resumed, _ = run(*words, f"resume={summary['directory']}", directory=summary["directory"])
    assert [(r["step"], r["lr"], r["loss"]) for r in steps(resumed)] == [(r["step"], r["lr"], r["loss"]) for r in steps(unbroken)]  # fmt: skip
    assert len({record["lr"] for record in steps(resumed)}) > 15


@pytest.mark.case("T01 karpathy/nanoGPT#443")
def test_the_first_step_moves_every_parameter(run, monkeypatch):
    words = ["steps=20", "schedule.warmup=10"]
    broken_at(monkeypatch, 1)
    _, summary = run(*words)
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 1
    settings = plain(*SMALL, "data=synthetic", *words)
    vocab = len(kept["state_dict"]["model.head.weight"])
    start = train.network(settings, train.choices_of(settings), vocab).state_dict()
    assert [name for name, value in start.items() if torch.equal(value, kept["state_dict"][f"model.{name}"])] == []


@pytest.mark.case("R06 Lightning-AI/pytorch-lightning#688")
def test_a_save_that_is_cut_short_leaves_the_checkpoint_before_it(run, monkeypatch):
    _, summary = run("steps=2")
    where = summary["directory"]
    before = (where / "checkpoints/last.ckpt").read_bytes()

    def cut_short(checkpoint, file):
        file.write(before[: len(before) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", cut_short)
    with pytest.raises(OSError, match=r"No space left on device: '.*last\.ckpt'"):
        save({}, where / "checkpoints/last.ckpt")
    assert (where / "checkpoints/last.ckpt").read_bytes() == before
    assert resume_point(where, network(vocab=257), None)[1] == 2
    assert sorted(path.name for path in (where / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.case("G15")
def test_a_tied_matrix_is_one_tensor_in_a_resumed_run_too(run, monkeypatch):
    words = ["steps=6", "model.tied=true"]
    unbroken, _ = run(*words)
    with monkeypatch.context() as patch:
        broken_at(patch, 3)
        _, summary = run(*words)
    models, original = [], run_module.fit

    def spying(parts, *rest):
        models.append(parts.model)
        return original(parts, *rest)

    monkeypatch.setattr(run_module, "fit", spying)
    resumed, _ = run(*words, f"resume={summary['directory']}", directory=summary["directory"])
    assert [r["loss"] for r in steps(resumed)] == [r["loss"] for r in steps(unbroken)]
    assert models[0].head.weight is models[0].embed.token


@pytest.mark.case("D11", "L10 karpathy/nanoGPT#131")
def test_the_model_has_as_many_rows_as_the_tokenizer_has_tokens(run, oracle, tmp_path, capsys):
    """Asked for 5,000 where the text has 277: rows that no token reaches would never be trained."""
    (tmp_path / "text.txt").write_text(oracle("tiny_vocab.txt") * 9)
    words = [
        "data=files",
        f"data.paths=[{tmp_path / 'text.txt'}]",
        "data.val_fraction=0.5",
        "tokenizer=bpe",
        "tokenizer.vocab=5000",
    ]
    _, summary = run(*words, "steps=1", drop="data.tokens")
    said = capsys.readouterr().out
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    vocab = json.loads((summary["directory"] / "environment.json").read_text())["corpus"]["vocab"]
    assert len(kept["model.embed.token"]) == len(kept["model.head.weight"]) == vocab < 300
    assert f"asked for 5000, got {vocab}" in said


@pytest.mark.slow
@pytest.mark.case("P10 pytorch/pytorch#111686")
def test_a_thousand_layers_train_save_and_load(run):
    """Eager: nothing on the way to a checkpoint, a summary or a picture goes down one call a layer."""
    words = ["model.depth=1000", "model.dim=8", "batch=2", "data.val_windows=1", "recipe=deepnorm"]
    records, summary = run("steps=1", *words)
    assert summary["depth"] == read(summary["directory"]).depth == len(steps(records)[0]["grad_norm"]["q"]) == 1000
    deep = network("model.depth=1000", "model.dim=8", "recipe=deepnorm", vocab=257)
    assert resume_point(summary["directory"], deep, None)[1] == 1
    assert (summary["directory"] / "report.png").stat().st_size > 0


@pytest.mark.case("N09")
def test_norm_gains_move_in_bf16_mixed(run):
    """Weights are float32 in every precision: a gain of 1 in bfloat16 could not move by 6e-4."""
    _, summary = run("steps=10", "precision=bf16-mixed", "optimizer.lr=6e-4")
    kept = torch.load(summary["directory"] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    gains = {name: value for name, value in kept.items() if name.endswith("gain")}
    assert len(gains) == 5
    for name, gain in gains.items():
        assert gain.dtype == torch.float32
        assert (gain != 1).all(), name


@pytest.mark.case("W07 wandb/wandb#8666", "G11")
@pytest.mark.parametrize("depth", [2, 6])
def test_a_record_costs_one_transfer_whatever_the_depth(run, monkeypatch, depth: int):
    """Between two log steps nothing is fetched, and at one everything at once; on a CPU, whose numbers are at hand, a step
    that is not finite is looked for at each."""
    told, fetched, inside = [], [], []
    step, flush = Recorder.step, Recorder.flush

    def watch(recorder, *args):
        inside.append(args[0])
        step(recorder, *args)
        inside.pop()

    for name in ("item", "tolist", "cpu", "numpy", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(tensor, *args, original=original, name=name, **words):
            if inside:
                fetched.append((inside[-1], name))
            return original(tensor, *args, **words)

        monkeypatch.setattr(torch.Tensor, name, counted)
    monkeypatch.setattr(Recorder, "step", watch)
    monkeypatch.setattr(Recorder, "flush", lambda recorder: (told.append(len(recorder._pending)), flush(recorder)))
    run(f"model.depth={depth}", "steps=20", "log_every=10", "val_every=99", "save_every=99")
    assert fetched == [(step, name) for step in (1, 10, 20) for name in ("cpu", "numpy")]
    assert [count for count in told if count] == [1, 9, 10]


def test_a_run_of_one_device_has_no_wrapper_and_no_group(run, monkeypatch):
    trainers, original = [], run_module._trainer
    monkeypatch.setattr(run_module, "_trainer", lambda *a, **k: trainers.append(original(*a, **k)) or trainers[-1])
    run("steps=1")
    (trainer,) = trainers
    assert trainer.world_size == 1
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
