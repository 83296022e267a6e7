"""What a resume may change, what it refuses, and what it says of it."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
import yaml

from conf import resume
from scripts import generate
from tests.training.test_run import Kick, poisoned, steps
from training import run as run_module
from training.schedule import WSD, Constant, Cosine


def go_on(run, summary, *words: str, **more):
    """Resume the run of a summary."""
    return run(*words, f"resume={summary['directory']}", directory=summary["directory"], **more)


def broken_off(run, monkeypatch, step: int | None, *words: str, **more):
    """The summary of a run that a signal ended after `step`."""
    original = run_module._trainer
    with monkeypatch.context() as patch:
        if step:
            kick = Kick(step, signal.SIGTERM)
            patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, kick], **k))
        return run(*words, **more)[1]


@pytest.mark.parametrize("schedule, stop", [("constant", None), ("constant", 9), ("constant", 2), ("wsd", 9)])
def test_more_steps_follow_where_the_rates_already_used_stay(run, monkeypatch, schedule: str, stop: int | None):
    """A constant rate never looks at the end; warm-up, stable, decay can go on while it is stable. From a complete run
    (None) as from one that was interrupted."""
    words = [f"schedule={schedule}", "schedule.warmup=4", "model.dropout=0.1", "accumulate=2", "val_every=6"]
    unbroken, _ = run(*words, "log_every=1", "steps=30")
    summary = broken_off(run, monkeypatch, stop, *words, "log_every=1", "steps=18")
    resumed, again = go_on(run, summary, *words, "log_every=1", "steps=30")
    assert again["steps_done"] == 30
    assert resumed == unbroken
    changed = json.loads((summary["directory"] / "environment.json").read_text())["changed"]
    assert changed == [{"after_step": stop or 18, "steps": {"was": 18, "is": 30}}]


def test_more_steps_are_refused_where_they_would_have_changed_the_rates(run):
    _, summary = run("steps=12", "schedule=cosine")
    with pytest.raises(ValueError, match=r"steps would have given step \d+ .* resume_force=true, or start a new run"):
        go_on(run, summary, "steps=20", "schedule=cosine")
    _, summary = run("steps=40", "schedule=wsd")
    with pytest.raises(ValueError, match="before the decay of schedule=wsd"):
        go_on(run, summary, "steps=60", "schedule=wsd")


@pytest.mark.parametrize(
    "then, now, done, fits",
    [
        (Constant(warmup=0), Constant(warmup=0), 20, True),
        (Constant(warmup=0.1), Constant(warmup=0.1), 20, False),  # a tenth of 20 steps, of 40
        (Constant(warmup=0.1), Constant(warmup=2), 20, True),  # the same two steps
        (WSD(warmup=2), WSD(warmup=2), 15, True),
        (WSD(warmup=2), WSD(warmup=2), 19, False),
        (Cosine(warmup=2), Cosine(warmup=2), 3, True),  # the warm-up and the first step after it
        (Cosine(warmup=2), Cosine(warmup=2), 4, False),
    ],
)
def test_a_schedule_is_judged_by_the_steps_already_taken(then, now, done: int, fits: bool):
    before = resume.Before("run", {"steps": 40}, {"steps": 20}, changed=("steps",))
    if fits:
        before.check_schedule(then, now, done)
    else:
        with pytest.raises(ValueError, match="resume=run: steps would have given step"):
            before.check_schedule(then, now, done)


def test_force_takes_other_settings_and_they_act(run, monkeypatch):
    """The checkpoint's own learning rate and decay would otherwise come back with the optimizer's state."""
    words = ["schedule=constant", "schedule.warmup=0", "log_every=1", "val_every=5"]
    summary = broken_off(run, monkeypatch, 4, *words, "steps=10")
    other = ["optimizer.lr=3e-5", "optimizer.weight_decay=0", "optimizer.norm_decay=0.3", "batch=8"]
    with pytest.raises(
        ValueError, match=r"batch, optimizer\.lr, optimizer\.norm_decay, optimizer\.weight_decay differ"
    ):
        go_on(run, summary, *words, "steps=10", *other)
    seen = []
    original = run_module._trainer

    class Look(run_module.pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append([(g["lr"], g["weight_decay"]) for g in trainer.optimizers[0].param_groups])

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_trainer", lambda d, s, c, **k: original(d, s, [*c, Look()], **k))
        records, summary = go_on(run, summary, *words, "steps=10", *other, "resume_force=true")
    assert [record["lr"] for record in steps(records)] == [1e-3] * 4 + [3e-5] * 6
    assert {group for row in seen for group in row} == {(3e-5, 0.0), (3e-5, 0.3)}
    environment = json.loads((summary["directory"] / "environment.json").read_text())
    assert environment["changed"] == [
        {
            "after_step": 4,
            "batch": {"was": 16, "is": 8},
            "optimizer.lr": {"was": 1e-3, "is": 3e-5},
            "optimizer.norm_decay": {"was": 0, "is": 0.3},
            "optimizer.weight_decay": {"was": 0.1, "is": 0},
        }
    ]
    assert "resume_force: false" in (summary["directory"] / "config.yaml").read_text()


@pytest.mark.parametrize("word", ["optimizer=sgd", "optimizer.update=blocks"])
def test_force_cannot_give_an_optimizer_another_s_state(run, monkeypatch, word: str):
    summary = broken_off(run, monkeypatch, 2, "steps=4")
    with pytest.raises(
        ValueError, match=rf"{word.partition('=')[0]}.* differ .* what the optimizer keeps: leave them out"
    ):
        go_on(run, summary, "steps=4", word, "resume_force=true")


def test_frozen_parameters_have_each_step_s_gradient(run):
    """At a rate that moves nothing: their gradient is that of the step, not of all the steps so far."""
    words = ["steps=3", "log_every=1", "optimizer=sgd", "optimizer.lr=1e-12", "clip=0"]
    everything, blocks = (run(*words, f"optimizer.update={update}")[0] for update in ("all", "blocks"))
    for a, b in zip(steps(everything), steps(blocks), strict=True):
        for part in ("embed", "head", "total"):
            assert b["grad_norm"][part] == pytest.approx(a["grad_norm"][part], rel=1e-5)


def test_force_cannot_put_weights_into_another_network(run, capsys):
    _, summary = run("steps=2")
    (summary["directory"] / "summary.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint there can be used"):
        go_on(run, summary, "steps=2", "model.depth=3", "resume_force=true")
    assert "holds another network (blocks.2." in capsys.readouterr().out


def test_what_is_only_watched_may_change(run, monkeypatch):
    unbroken, _ = run("steps=12")
    summary = broken_off(run, monkeypatch, 5, "steps=12")
    words = ["log_every=3", "save_every=5", "val_every=4", "name=other", "workers=1", "patience=5"]
    words += ["picture=false", "probe_every=4"]
    resumed, again = go_on(run, summary, "steps=12", *words)
    assert [r["loss"] for r in steps(resumed)] == [r["loss"] for r in steps(unbroken)]
    assert [r["step"] for r in resumed if "val_loss" in r] == [0, 8, 12]
    assert again["name"] == "other"
    assert "changed" not in json.loads((again["directory"] / "environment.json").read_text())


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_is_completed(run):
    records, summary = run("steps=12", "val_every=5")
    where = summary["directory"]
    for name in ("summary.json", "report.png"):
        (where / name).unlink()
    resumed, again = go_on(run, summary, "steps=12", "val_every=5")
    assert resumed == records
    assert (where / "report.png").is_file()
    timed = {"wall_time_s", "tokens_per_second", "peak_memory_bytes"}
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in summary.items() if k not in timed}


def test_another_torch_is_said_and_kept(run, capsys):
    _, summary = run("steps=4")
    path = summary["directory"] / "environment.json"
    environment = json.loads(path.read_text())
    environment["versions"]["torch"] = "2.11.0"
    path.write_text(json.dumps(environment))
    (summary["directory"] / "summary.json").unlink()
    go_on(run, summary, "steps=4")
    now = torch.__version__
    assert f"resumed: torch was 2.11.0, is {now} from step 5 on" in capsys.readouterr().out
    environment = json.loads(path.read_text())
    assert environment["changed"] == [{"after_step": 4, "torch": {"was": "2.11.0", "is": now}}]
    assert environment["versions"]["torch"] == now


@pytest.mark.parametrize("patience, stops", [(1, 12), (2, 13), (0, None)])
def test_how_long_bad_steps_are_put_up_with(run, monkeypatch, patience: int, stops: int | None):
    poisoned(monkeypatch, 1, 12, count=5)
    records, summary = run("steps=60", "log_every=1", f"patience={patience}")
    if stops:
        assert (summary["verdict"], summary["code"]) == ("diverged", 3)
        assert steps(records)[-1]["step"] == stops
    else:
        assert (summary["verdict"], summary["skipped_steps"], summary["code"]) == ("stalled", 5, 0)
        assert summary["steps_done"] == 60
    assert summary["first_bad_step"] == 12
    assert steps(records)[11]["began"] == {"layer": 1, "parameter": None}
    assert ["began" in record for record in steps(records)].count(True) == 1


def test_a_diverged_run_goes_on_when_it_is_resumed(run, monkeypatch):
    """Its record keeps the bad steps; they do not end it a second time."""
    with monkeypatch.context() as patch:
        poisoned(patch, 2, 12)
        _, summary = run("steps=60", "log_every=1")
    assert summary["verdict"] == "diverged"
    records, again = go_on(run, summary, "steps=60", "log_every=1")
    assert (again["verdict"], again["steps_done"], again["skipped_steps"]) == ("stalled", 60, 3)
    assert (again["first_bad_step"], again["first_bad_layer"]) == (12, 2)
    assert [record["step"] for record in steps(records)] == list(range(1, 61))
    assert all(math.isfinite(record["loss"]) for record in steps(records)[14:])


def test_a_parameter_that_is_not_finite_is_named(run, monkeypatch):
    """In the weights, where the forward pass finds it, and in a gradient, where nothing else does."""
    original = run_module._trainer

    class Corrupt(run_module.pl.Callback):
        def __init__(self, what):
            self.what = what

        def on_train_batch_start(self, trainer, module, *_):
            if trainer.global_step == 7:
                weight = module.model.get_parameter("blocks.1.ffn.function.down.weight")
                if self.what == "weight":
                    weight.data[0, 0] = torch.nan
                else:
                    weight.register_hook(lambda gradient: gradient * torch.inf)

    for what in ("weight", "gradient"):
        added = Corrupt(what)
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "_trainer", lambda d, s, c, added=added, **k: original(d, s, [*c, added], **k))
            _, summary = run("steps=60", "save_every=2")
        assert (summary["verdict"], summary["first_bad_step"], summary["first_bad_layer"]) == ("diverged", 8, 2)
        assert summary["first_bad_parameter"] == "ffn.down.weight"
        assert "begun in layer 2 (ffn.down.weight)" in summary["reason"]
        kept = torch.load(summary["directory"] / "checkpoints/last.ckpt", weights_only=True)
        assert all(torch.isfinite(value).all() for value in kept["state_dict"].values())
        # what is in the weights is never saved; a step that was skipped left them good
        assert kept["global_step"] == (6 if what == "weight" else 10)


def test_a_finished_directory_needs_no_torch_to_say_so(run, monkeypatch):
    _, summary = run("steps=3")
    monkeypatch.setattr("train._train", lambda *_, **__: pytest.fail("it should not get so far"))
    again = go_on(run, summary, "steps=3")[1]
    assert again["steps_done"] == 3
    with pytest.raises(ValueError, match=r"3 steps are done, and steps=2: ask for more, or start a new run"):
        go_on(run, summary, "steps=2")


def test_too_little_space_is_said_before_the_first_step(run, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    # 14,448 weights of 4 bytes, three times, in three files, and the records
    with pytest.raises(ValueError, match=r"0.1 MB free, 0.6 MB needed for checkpoints and records: make room"):
        run("steps=60", directory=tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_run_that_keeps_nothing_needs_no_room_for_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    run("steps=60", "save_every=0")  # 43 kB of records
    with pytest.raises(ValueError, match=r"0.1 MB free, 0.3 MB needed for records: make room"):
        run("steps=60", "save_every=0", "probe_every=1", "log_every=1", "model.depth=7")


def test_a_run_without_checkpoints_starts_anew(run, monkeypatch, capsys):
    words = ["steps=12", "save_every=0", "val_every=0", "picture=false", "log_every=1", "model.dropout=0.1"]
    unbroken, _ = run(*words)
    assert [record["step"] for record in unbroken if "val_loss" in record] == [0, 12]
    summary = broken_off(run, monkeypatch, 5, *words)
    assert summary["reason"] == "SIGTERM after step 5 of 12"
    where = summary["directory"]
    capsys.readouterr()
    resumed, again = go_on(run, summary, *words)
    said = capsys.readouterr().out
    assert f"{where} holds no checkpoint: the run starts again from step 0" in said
    assert f"record: {where}" in said and "picture" not in said
    assert resumed == unbroken and again["steps_done"] == 12
    assert not (where / "checkpoints").exists() and not (where / "report.png").exists()
    assert generate.main([str(where)]) == 2
    assert (
        capsys.readouterr().err
        == f"generate.py: {where}: no weights to sample from: the run kept none (save_every=0)\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["precision=fp64"],
        ["precision=bf16-mixed"],
        ["norm=batchnorm", "allow_unstable=true"],
        ["model.tied=true", "tokenizer=bpe", "tokenizer.vocab=300"],
        ["optimizer.update=blocks"],
        ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.update=blocks"],
    ],
)
def test_a_resume_is_exact_in_every_precision_and_with_running_statistics(run, monkeypatch, words):
    words = ["steps=16", "model.dropout=0.1", "accumulate=2", "val_every=6", "log_every=1", *words]
    unbroken, whole = run(*words)
    summary = broken_off(run, monkeypatch, 7, *words)
    resumed, again = go_on(run, summary, *words)
    assert resumed == unbroken
    weights = [
        torch.load(s["directory"] / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for s in (whole, again)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_text_of_a_forced_resume_is_the_one_that_counts_from_then_on(run, monkeypatch, tmp_path):
    """Old, new, new is one change; the old text put back is another."""
    text = tmp_path / "text.txt"
    old, new = ("".join(f"{word} {i} of a text\n" for i in range(900)) for word in ("line", "row"))
    text.write_text(old)
    words = ["data=files", f"data.paths=[{text}]", "steps=40"]
    summary = broken_off(run, monkeypatch, 4, *words, drop="data.tokens")
    text.write_text(new)
    with pytest.raises(ValueError, match="the text has changed since"):
        go_on(run, summary, *words, drop="data.tokens")
    changes = []
    for stop, content, force in ((9, new, True), (14, new, False), (19, old, True)):
        text.write_text(content)
        force = ["resume_force=true"] if force else []
        broken_off(
            run,
            monkeypatch,
            stop,
            *words,
            *force,
            f"resume={summary['directory']}",
            drop="data.tokens",
            directory=summary["directory"],
        )
        changes.append(len(json.loads((summary["directory"] / "environment.json").read_text()).get("changed", [])))
    assert changes == [1, 1, 2]
    text.write_text(new)
    with pytest.raises(ValueError, match="the text has changed since"):
        go_on(run, summary, *words, drop="data.tokens")


@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
def test_a_record_with_a_gap_is_not_gone_on_with_in_silence(run, monkeypatch, damage: str):
    summary = broken_off(run, monkeypatch, 10, "steps=60", "val_every=1000")
    path = summary["directory"] / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = {"empty": [], "half": lines[: len(lines) // 2], "missing": []}[damage]
    path.write_text("".join(kept))
    if damage == "missing":
        path.unlink()
    first = max(1, len(kept))  # the first line is the validation before the first step
    with pytest.raises(
        ValueError, match=rf"lacks {11 - first} of the 10 steps done \(the first is {first}\): put it back"
    ):
        go_on(run, summary, "steps=60", "val_every=1000")
    records, again = go_on(run, summary, "steps=60", "val_every=1000", "resume_force=true")
    assert again["steps_done"] == 60
    assert steps(records)[-1]["step"] == 60


def test_a_run_without_its_environment_keeps_its_checkpoints(run, monkeypatch):
    words = ["steps=20", "val_every=1000"]
    unbroken, _ = run(*words)
    summary = broken_off(run, monkeypatch, 5, *words)
    where = summary["directory"]
    run_id = json.loads((where / "environment.json").read_text())["run"]
    (where / "environment.json").unlink()
    broken_off(run, monkeypatch, 9, *words, f"resume={where}", directory=where)
    assert json.loads((where / "environment.json").read_text())["run"] == run_id
    resumed, _ = go_on(run, summary, *words)
    assert [r["loss"] for r in steps(resumed)] == [r["loss"] for r in steps(unbroken)]


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "summary.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b'"a', b"a: b: c"])
def test_a_damaged_file_is_named_in_one_line(run, monkeypatch, name: str, content: bytes):
    summary = broken_off(run, monkeypatch, 2, "steps=4")
    (summary["directory"] / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} (cannot be read: .*|is damaged: it holds no mapping)") as caught:
        go_on(run, summary, "steps=4")
    assert "\n" not in str(caught.value)


def test_a_run_of_an_older_version_goes_on(run):
    """Its config lacks the axes, scalars and knobs that came later; what the command line says of one of them is a change."""
    words = ["schedule=constant", "schedule.warmup=1", "log_every=1"]
    unbroken, _ = run(*words, "steps=6")
    _, summary = run(*words, "steps=3")
    path = summary["directory"] / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for axis in ("stream", "ramp", "scaling", "linear", "attention", "clip_by", "z_loss"):
        del config[axis]
    del config["norm"]["cast"], config["model"]["logit_cap"]
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"norm\.cast, stream, .* differ from the run's own config"):
        go_on(run, summary, *words, "steps=6", "stream=hyper", "norm.cast=before_gain")
    resumed, again = go_on(run, summary, *words, "steps=6")
    assert again["steps_done"] == 6
    assert [line for line in resumed if "val_loss" not in line] == [line for line in unbroken if "val_loss" not in line]
