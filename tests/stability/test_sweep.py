"""What is said of a sweep's jobs, from hand-made directories."""

import json
from pathlib import Path

import pytest

from stability.records import SUMMARY, without_steps
from stability.sweep import DONE, JUDGED, MISSING, rows, show, write

JOBS = [["steps=3", f"seed={seed}", "norm=rmsnorm"] for seed in range(5)]


def job(place: Path, words: list[str], **summary) -> None:
    place.mkdir(parents=True)
    (place / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    if summary:
        (place / "summary.json").write_text(json.dumps(without_steps(**summary)))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    done = {"final_loss": 1.25, "final_val_loss": 1.5, "wall_time_s": 61.25}
    job(tmp_path / "0", JOBS[0], verdict="stable", reason="well", **done)
    job(tmp_path / "deep/er/1", JOBS[1], verdict="diverged", reason="not finite", final_loss=9.0)
    job(tmp_path / "2", JOBS[2], verdict="refused", reason="model.dim=65 [odd]")
    job(tmp_path / "3", JOBS[3])
    return tmp_path


def test_a_job_is_known_by_its_overrides_wherever_it_lies(sweep: Path):
    found = rows(sweep, JOBS, {})
    assert [(row.job, row.directory, row.verdict) for row in found] == [
        (0, "0", "stable"), (1, "deep/er/1", "diverged"), (2, "2", "refused"), (3, "3", "unfinished"),
        (4, None, "not_started"),
    ]  # fmt: skip
    assert (found[0].final_loss, found[0].final_val_loss, found[0].wall_time_s) == (1.25, 1.5, 61.25)
    assert found[4].final_loss is None and found[4].reason == ""


def test_without_a_list_the_jobs_are_those_that_left_a_record(sweep: Path):
    assert sorted(row.overrides[1] for row in rows(sweep, None, {})) == ["seed=0", "seed=1", "seed=2", "seed=3"]


def test_what_ran_in_this_process_counts_before_what_lies_there(sweep: Path):
    ran = {0: (sweep / "0", without_steps("refused", "the text has changed")), 4: (sweep / "x", {"verdict": "stable"})}
    found = rows(sweep, JOBS, ran)
    assert [row.verdict for row in found] == ["refused", "diverged", "refused", "unfinished", "stable"]
    assert found[0].reason == "the text has changed" and found[4].directory == "x"


def test_a_job_is_known_though_its_words_are_escaped_forced_or_copied(sweep: Path):
    job(sweep / "5", ["optimizer.lr=$\\{clip\\}", "seed=0"], verdict="stable", reason="well")
    job(sweep / "0.bak", JOBS[0], verdict="stalled", reason="a copy")
    found = rows(sweep, [["optimizer.lr=${clip}", "resume_force=true", "seed=0"], JOBS[0]], {})
    assert [(row.verdict, row.directory) for row in found] == [("stable", "5"), ("stable", "0")]


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_summary_is_an_unfinished_job(sweep: Path, content: bytes):
    (sweep / "0/summary.json").write_bytes(content)
    (sweep / "2/overrides.yaml").write_bytes(b'"a')
    found = rows(sweep, JOBS, {})
    assert [row.verdict for row in found] == ["unfinished", "diverged", "not_started", "unfinished", "not_started"]


def test_a_line_a_job(sweep: Path):
    write(sweep, rows(sweep, JOBS, {}))
    lines = [json.loads(line) for line in (sweep / "sweep.jsonl").read_text().splitlines()]
    assert [line["verdict"] for line in lines] == ["stable", "diverged", "refused", "unfinished", "not_started"]
    assert lines[0]["overrides"] == JOBS[0]


def test_the_table_tells_what_differs_and_why_there_is_no_result(sweep: Path, capsys):
    show(rows(sweep, JOBS, {}), sweep)
    said = capsys.readouterr().out
    assert "steps=3" not in said and "norm=rmsnorm" not in said  # the same in all
    table = [line.split() for line in said.splitlines()]
    assert ["0", "seed=0", "stable", "1.2500", "1.5000", "61.2"] in table
    assert ["1", "seed=1", "diverged", "9.0000"] in table
    assert ["4", "seed=4", "not", "started"] in table
    assert "job 2, refused: model.dim=65 [odd]\n" in said  # no markup
    assert "job 0," not in said
    assert f"the same command with hydra.sweep.dir={sweep} does what is missing" in said


def test_nothing_is_missing_where_all_are_judged(tmp_path: Path, capsys):
    job(tmp_path / "0", JOBS[0], verdict="stable", reason="well")
    show(rows(tmp_path, JOBS[:1], {}), tmp_path)
    assert "the same command" not in capsys.readouterr().out


def test_every_verdict_has_its_place():
    assert {"stable", "spiky", "stalled", "too_short"} == DONE
    assert not JUDGED & MISSING
    assert {"refused"} | JUDGED | MISSING >= {"diverged", "interrupted", "failed", "unfinished", "not_started"}


def test_a_summary_without_steps_has_every_key(tmp_path: Path):
    summary = without_steps("refused", "why", axes={"norm": "rmsnorm"})
    assert list(summary) == ["verdict", "reason", *SUMMARY]
    assert (summary["axes"], summary["steps_done"], summary["final_loss"]) == ({"norm": "rmsnorm"}, 0, None)
