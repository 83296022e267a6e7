"""Whatever lies below a directory, a report says what it is and never breaks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stability.gather import Gathered, gather, nothing
from stability.judging import Judged
from stability.label import facts, label
from stability.records import metrics_line
from stability.study import Plan, Point


def lines_of(steps: int, loss: float = 2.0) -> str:
    """Of a run of 3 layers."""
    block = {"attention": [3.0, 3.0, 3.0], "ffn": [4.0, 4.0, 4.0], "norm": [0.0, 0.0, 0.0], "residual": [0.0, 0.0, 0.0]}
    norms = {"total": 8.7, "embed": 0.1, "head": 0.2, **block, "q": [1.0, 2.0, 3.0]}
    records = [{"step": step, "loss": loss + 1 / step, "lr": 1e-3, "grad_norm": norms} for step in range(1, steps + 1)]
    return "".join(metrics_line(record) + "\n" for record in records)


def write_run(
    directory: Path, lines: str, *, lr: float = 0.1, seed: int = 0, number: int = 0, depth: int = 3, **summary: Any
) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(lines)
    (directory / "config.yaml").write_text(
        f"seed: {seed}\nsteps: 200\nmodel:\n  depth: {depth}\noptimizer:\n  lr: {lr}\nclip: 1.0\n"
    )
    (directory / "overrides.yaml").write_text(f"- seed={seed}\n- optimizer.lr={lr}\n- model.depth={depth}\n")
    axes = {"norm": "rmsnorm", "placement": "pre", "model": "deep"}
    known = {"verdict": "stable", "reason": "it is", "name": f"run {number}", "steps": 200, "steps_done": 200}
    known |= {"axes": axes, "depth": depth, "first_loss": 5.5, "final_loss": 2.0 + number / 7, "best_loss": 2.0}
    known |= {"final_val_loss": 2.1 + number / 7, "best_val_loss": 2.05, "unigram_entropy": 3.2, "floor": None}
    known |= {
        "tokens_per_second": 9990.0 + number,
        "wall_time_s": 10.5,
        "peak_memory_bytes": 2**29,
        "first_bad_step": None,
    }
    (directory / "summary.json").write_text(json.dumps(known | summary))
    return directory


def write_study(directory: Path) -> dict[str, Point]:
    """Twenty runs of which five are broken, each in its way; its points by directory."""
    lrs, seeds, points = [0.1, 0.01, 0.001, 0.0001], [0, 1, 2, 3, 4], []
    for number, (lr, seed) in enumerate((lr, seed) for lr in lrs for seed in seeds):
        words = [f"seed={seed}", f"optimizer.lr={lr}", "model.depth=3"]
        points.append(Point("pre", {"seed": seed, "optimizer.lr": lr}, words, f"pre_seed={seed}_lr={lr}"))
        write_run(directory / points[-1].directory, lines_of(5), lr=lr, seed=seed, number=number, steps_done=5, steps=5)
    claim = {"says": "it learns <well>", "source": "nobody & co", "of": {"arm": "pre"}, "observe": "summary"}
    claim |= {"knobs": {"key": "final_loss"}, "expect": {"max": 9.0}, "tolerance": "a guess"}
    q = claim | {"says": "q has a gradient", "observe": "gradient", "knobs": {"matrix": "q", "layer": "last"}}
    q |= {"of": {"optimizer.lr": 0.0001}, "expect": {"min": 3.0, "max": 3.0}}
    fails = claim | {"says": "it learns all", "of": {"seed": 4}, "expect": {"max": 2.7}}
    later = claim | {"says": "at length", "scales": ["gpu"]}
    params: dict[str, Any] = {"seed": seeds, "optimizer.lr": lrs}
    Plan(
        study="twenty", question="Does it \"learn\"?", scale="laptop", words=["study=twenty", "name=it's"], arms=["pre"],
        params=params, values=params, scales=["laptop", "gpu"], draw={}, points=points,
        claims={"learns": claim, "q": q, "fails": fails, "later": later},
    ).write(directory)  # fmt: skip
    return {point.directory: point for point in points}


def remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def break_five(directory: Path) -> None:
    remove(directory / "pre_seed=0_lr=0.1")
    metrics = directory / "pre_seed=1_lr=0.1/metrics.jsonl"
    metrics.write_text(lines_of(5)[: -len(lines_of(5)) // 5 - 40])
    for name, known in {
        "pre_seed=2_lr=0.1": {"verdict": "interrupted", "reason": "signal 15 after step 3", "final_loss": None},
        "pre_seed=3_lr=0.1": {"verdict": "diverged", "reason": "not finite from step 1 on", "first_bad_step": 1, "final_loss": None},
    }.items():  # fmt: skip
        path = directory / name / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | known))
    foreign = directory / "pre_seed=4_lr=0.1"
    remove(foreign)
    foreign.mkdir()
    (foreign / "photo.jpg").write_bytes(b"\xff\xd8")


@pytest.fixture
def twenty(tmp_path: Path) -> Path:
    write_study(tmp_path / "twenty-laptop")
    break_five(tmp_path / "twenty-laptop")
    return tmp_path / "twenty-laptop"


def whys(gathered: Gathered) -> dict[str, str]:
    return {entry.name: entry.why for entry in gathered.entries if entry.why} | gathered.others


def judged(gathered: Gathered) -> dict[str, Judged]:
    assert gathered.plan
    return {one.name: one for one in gathered.plan.judged([entry.run for entry in gathered.entries])}


def test_a_study_knows_its_runs_and_what_became_of_each(twenty: Path):
    (twenty / "notes").mkdir()
    (twenty / "notes/todo.txt").write_text("rest")
    gathered = gather([twenty])
    assert gathered.title == "twenty" and len(gathered.entries) == 20 and len(gathered.runs) == 18
    assert whys(gathered) == {
        "pre seed=0 lr=0.1": "has not run: pre_seed=0_lr=0.1 is missing",
        "pre seed=1 lr=0.1": "metrics.jsonl is truncated: it has 3 steps, summary.json says 5; "
        "line 4 of metrics.jsonl is cut short or no record: dropped",
        "pre seed=2 lr=0.1": "interrupted: signal 15 after step 3",
        "pre seed=3 lr=0.1": "diverged at step 1: not finite from step 1 on",
        "pre seed=4 lr=0.1": "has not run: pre_seed=4_lr=0.1: no run: a run holds metrics.jsonl, summary.json and config.yaml",
        "notes": "no run: a run holds metrics.jsonl, summary.json and config.yaml",
    }
    first, last = gathered.entries[0], gathered.entries[-1]
    assert first.run is None and first.facts == {"arm": "pre", "seed": 0, "optimizer.lr": 0.1}
    assert (last.name, last.group) == ("pre seed=4 lr=0.0001", "pre lr=0.0001")
    assert gathered.words[-1] == ["seed=4", "optimizer.lr=0.0001", "model.depth=3"]


def test_claims_are_judged_by_the_runs_that_are_there(twenty: Path):
    found = judged(gather([twenty]))
    assert {name: one.verdict for name, one in found.items()} == {
        "learns": "undecided",
        "q": "holds",  # a matrix that a claim names is read, though no figure needs it
        "fails": "fails",
        "later": "not judged",
    }
    assert found["learns"].reason.startswith("pre seed=0 lr=0.1: has not run; pre seed=2 lr=0.1: is interrupted; ")


def test_the_run_of_other_words_is_none_of_the_study(twenty: Path):
    other = twenty / "pre_seed=4_lr=0.01/overrides.yaml"
    other.write_text(other.read_text().replace("depth=3", "depth=4"))
    write_run(twenty / "old", lines_of(5), seed=9)
    gathered = gather([twenty])
    said = whys(gathered)
    assert said["pre seed=4 lr=0.01"] == "pre_seed=4_lr=0.01 holds the run of other words: model.depth=3, model.depth=4"
    assert said["old"] == "no run of this study as study.json has it" and len(gathered.entries) == 20
    other.unlink()  # nobody can tell: its directory's name is believed, and that is said
    again = gather([twenty])
    assert whys(again)["pre seed=4 lr=0.01"] == "overrides.yaml cannot be read: taken for its directory's name"
    assert len(again.runs) == len(gathered.runs) + 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"study": "x"}', "claims"])
def test_a_damaged_plan_is_said_and_its_runs_are_those_of_a_folder(twenty: Path, damage: str):
    if damage == "claims":
        plan = json.loads((twenty / "study.json").read_text())
        plan["claims"]["learns"]["observe"] = "nothing"
        damage = json.dumps(plan)
    (twenty / "study.json").write_text(damage)
    gathered = gather([twenty])
    assert gathered.plan is None and len(gathered.runs) == 18 and gathered.title == "twenty-laptop"
    assert gathered.others["study.json"].endswith("; no claim is judged")


def test_runs_of_a_folder_are_told_apart_by_their_settings(tmp_path: Path):
    for number, (lr, seed) in enumerate([(0.1, 0), (0.1, 1), (0.01, 0)]):
        write_run(tmp_path / f"{8 + number}", lines_of(5), lr=lr, seed=seed, number=number, steps_done=5)
    entries = gather([tmp_path]).entries
    assert [(entry.name, entry.group) for entry in entries] == [
        ("seed=0 optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("seed=1 optimizer.lr=0.1", "optimizer.lr=0.1"),
        ("seed=0 optimizer.lr=0.01", "optimizer.lr=0.01"),  # 10 comes after 8 and 9
    ]
    assert [entry.facts for entry in entries][1] == {"seed": 1, "optimizer.lr": 0.1}
    named = gather([tmp_path / "9", tmp_path / "8", tmp_path / "8", tmp_path / "void"])
    assert [entry.name for entry in named.entries] == ["seed=1", "seed=0"] and named.entries[0].group == "run 1"
    assert named.others == {str(tmp_path / "void"): "there is no such directory"}


def test_runs_that_differ_in_too_much_go_by_their_directories(tmp_path: Path):
    for number in range(4):
        directory = write_run(tmp_path / f"{'ab'[number % 2]}/lr_seed={number // 2}", lines_of(5), seed=number // 2)
        with (directory / "config.yaml").open("a") as file:
            file.writelines(f"setting_{place}: {number % 2}\n" for place in range(9))
    entries = gather([tmp_path]).entries
    assert [(entry.name, entry.group) for entry in entries][::3] == [("a/lr_seed=0", "a/lr"), ("b/lr_seed=1", "b/lr")]
    with (tmp_path / "a/lr_seed=0/config.yaml").open("a") as file:
        file.write("setting_0: 7\n")
    assert [entry.group for entry in gather([tmp_path]).entries][:2] == ["a/lr_seed=0", "a/lr_seed=1"]


def test_a_run_without_an_end_is_named_like_the_others(tmp_path: Path):
    """It has not written its axes yet: they are those of a run with the same settings."""
    for number, placement in enumerate(["pre", "post", "post"]):
        axes = {"placement": placement, "logger": "none"}
        directory = write_run(tmp_path / f"{number}", lines_of(5), seed=number // 2, steps_done=5, axes=axes)
        with (directory / "config.yaml").open("a") as file:
            file.write(f"placement: {{places: {placement}}}\n")
    (tmp_path / "2/summary.json").unlink()
    write_run(tmp_path / "3", "", steps_done=0, verdict="refused", reason="too deep", axes=None)
    (tmp_path / "3/config.yaml").unlink()
    entries = gather([tmp_path]).entries
    assert [entry.name for entry in entries] == [
        "placement=pre seed=0", "placement=post seed=0", "placement=post seed=1", "run 0",
    ]  # fmt: skip
    assert entries[2].why.startswith("unfinished: 5 of 200 steps so far")
    assert entries[3].why.startswith("refused: too deep; ") and entries[3].run


def test_what_an_axis_implies_is_not_said_and_what_it_does_not_is(tmp_path: Path):
    runs = []
    for number, (choice, lr, decay) in enumerate([("adamw", 0.1, 1), ("adamw", 0.2, 1), ("sgd", 0.3, 0)]):
        directory = write_run(tmp_path / f"{number}", lines_of(5), steps_done=5, axes={"optimizer": choice})
        (directory / "config.yaml").write_text(f"optimizer: {{lr: {lr}, decay: {decay}}}\n")
        runs.append(directory)
    found = gather(runs).runs
    assert label(found) == ["optimizer=adamw optimizer.lr=0.1", "optimizer=adamw optimizer.lr=0.2", "optimizer=sgd optimizer.lr=0.3"]  # fmt: skip
    assert "optimizer.decay" not in facts(found)[0]


BROKEN: dict[str, tuple[Any, str]] = {  # file and content, or what is done; the reason
    "metrics.jsonl": ("\x00\xff{]", "metrics.jsonl is truncated: it has 0 steps, summary.json says 5"),
    "summary.json": ("[1, 2]", "unfinished: 5 of 200 steps so far; it is still going or was killed; summary.json cannot be read: ignored"),
    "config.yaml": ("a: [", "config.yaml cannot be read: ignored"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_a_reason(tmp_path: Path, name: str):
    write_run(tmp_path / "good", lines_of(5), seed=1, steps_done=5)
    content, reason = BROKEN[name]
    (write_run(tmp_path / "bad", lines_of(5), steps_done=5) / name).write_text(content)
    (entry,) = (entry for entry in gather([tmp_path]).entries if entry.why)
    assert entry.run and entry.run.directory.name == "bad" and entry.why.startswith(reason)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.yaml"])
def test_a_folder_in_the_place_of_a_file_is_put_up_with(tmp_path: Path, name: str):
    directory = write_run(tmp_path / "bad", lines_of(5), steps_done=5)
    (directory / name).unlink()
    (directory / name).mkdir()
    (entry,) = gather([tmp_path]).entries
    assert entry.run and entry.why


def test_values_of_another_kind_are_ignored_and_said(tmp_path: Path):
    odd = {"final_loss": "low", "axes": ["x"], "steps_done": None, "verdict": 7, "wall_time_s": True, "more": [1]}
    write_run(tmp_path / "odd", lines_of(5), **odd)
    write_run(tmp_path / "bare", lines_of(5), seed=1)
    (tmp_path / "bare/summary.json").write_text("{}")
    entries = {entry.run.directory.name: entry for entry in gather([tmp_path]).entries if entry.run}
    summary = entries["odd"].run and entries["odd"].run.summary
    assert summary and not {"final_loss", "axes", "verdict", "wall_time_s"} & summary.keys() and summary["more"] == [1]
    assert "summary.json has no verdict; summary.json: verdict is not what it should be" in entries["odd"].why
    assert entries["bare"].why == "summary.json has no verdict"


@pytest.mark.parametrize("line", [
    '{"step": 6, "loss": 1, "grad_norm": {"total": "much"}}',
    '{"step": 6, "loss": 1, "grad_norm": {"ffn": ["x"]}}',
    '{"step": 6, "loss": 1, "grad_norm": {"ffn": [[1, 2, 3]]}}',
    '{"step": 1' + "0" * 30 + ', "loss": 1}',
    '{"step": 6, "loss": NaN}',
    "[" * 5000,
])  # fmt: skip
def test_a_line_of_another_kind_is_dropped_and_said(tmp_path: Path, line: str):
    write_run(tmp_path / "run", lines_of(5) + line + "\n", steps_done=5)
    (entry,) = gather([tmp_path]).entries
    assert (
        entry.run
        and entry.run.step.tolist() == [1, 2, 3, 4, 5]
        and entry.run.layers["block"].tolist() == [[5.0] * 3] * 5
    )
    assert entry.why == "line 6 of metrics.jsonl is cut short or no record: dropped"


def test_what_cannot_be_read_is_an_entry_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "good", lines_of(5), steps_done=5)
    write_run(tmp_path / "mixed", lines_of(5) + '{"step": 6, "loss": 1, "grad_norm": {"ffn": [1.0]}}\n')
    locked, opened = write_run(tmp_path / "locked", lines_of(5)) / "metrics.jsonl", Path.open

    def refuse(path: Path, *words: Any, **named: Any) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *words, **named)

    monkeypatch.setattr(Path, "open", refuse)
    said = {entry.name: entry.why for entry in gather([tmp_path]).entries if entry.run is None}
    assert said["locked"] == f"cannot be read: {locked}: Permission denied"
    assert said["mixed"].startswith("cannot be read: ") and "different depths: [1, 3] layers" in said["mixed"]


def test_what_is_no_run_is_told_by_its_topmost_folder(tmp_path: Path):
    write_run(tmp_path / "sweep/0", lines_of(5), steps_done=5)
    for name in (
        "sweep/foreign/deep/er",
        "sweep/empty",
        "sweep/killed",
        "sweep/0/wandb",
        "sweep/figures",
        "sweep/report",
        "sweep/.hidden",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sweep/killed/config.yaml").write_text("a: 1")
    (tmp_path / "sweep/report/report.html").write_text("of before")
    (tmp_path / "sweep/folders/metrics.jsonl").mkdir(parents=True)
    os.symlink(tmp_path, tmp_path / "sweep/foreign/round", target_is_directory=True)
    found = gather([tmp_path])
    assert len(found.runs) == 1 and found.others == {
        "sweep/empty": "is empty",
        "sweep/folders": "no run: metrics.jsonl should be a file",
        "sweep/foreign": "no run: a run holds metrics.jsonl, summary.json and config.yaml",
        "sweep/killed": "started, but left no metrics.jsonl and no summary.json",
    }


def test_of_many_reasons_for_nothing_the_first_are_told(tmp_path: Path):
    write_study(tmp_path)
    for path in tmp_path.glob("pre_*"):
        remove(path)
    said = nothing([tmp_path], gather([tmp_path]))
    assert said.startswith(f"{tmp_path} is not a run directory and holds none: pre seed=0 lr=0.1: has not run: ")
    assert said.endswith("; and 17 more") and "\n" not in said
