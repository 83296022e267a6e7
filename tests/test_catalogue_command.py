"""The table of all methods: each choice has its row, and a row is measured once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conf.help import choices
from scripts import catalogue
from stability.records import BLOCK_PARTS
from tests.conftest import ROOT, SMALL, environment, plain

# what no row has: the default choices and those that are variants of one that has a row
ALIKE = {
    "norm": {"rmsnorm", "batchnorm", "rmsnorm_bias", "simple_rmsnorm", "group_rmsnorm", "partial_rmsnorm", "zero_rmsnorm"}
    | {"learnable_eps_rmsnorm", "crmsnorm", "layernorm_no_bias", "simple_layernorm", "l2norm"},
    "placement": {"by_layer", "ngpt"},
    "residual": {"standard", "learned_scalars", "olmo", "ngpt", "deepnorm"},
    "stream": {"single"},
    "ramp": {"none", "reverse"},
    "scaling": {"none", "mup", "ngpt"},
    "linear": {"plain", "unit"},
    "attention": {"softmax", "ngpt"},
}  # fmt: skip


def write_probe(place: Path, last: float | None) -> None:
    norms = {part: [[1.0, last]] for part in BLOCK_PARTS}
    document = {"arrays": {"stream_rms": [[1.0, 2.0, last and 2 * last]]}, "grad_norm": norms}
    (place / "probe.json").write_text(json.dumps({"configurations": [document]}))


@pytest.mark.parametrize("axis", ALIKE)
def test_every_method_has_a_row(axis: str):
    named = {word for row in catalogue.listed()[1] for word in row.words}
    assert set(choices(axis)) - ALIKE[axis] == {word.partition("=")[2] for word in named if word.startswith(f"{axis}=")}


@pytest.mark.slow
def test_what_is_measured_is_kept(tmp_path: Path, monkeypatch):
    """Two depths and a tiny training; the second time nothing is measured."""
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{catalogue.BEGIN}old\n{catalogue.END}after\n", encoding="utf-8")
    words = [*SMALL, "data=synthetic", "data.tokens=20000", "steps=3", "--out", str(tmp_path / "kept")]
    asked = [*words, "--only", "Pre-LN", "ReZero", "--write", str(page)]
    assert catalogue.main(asked, depths=(2, 3), trained=2) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("\n| ") == 1 + len(catalogue.listed()[1])  # all have a line, two of them numbers
    assert text.startswith(f"before\n{catalogue.BEGIN}| method") and text.endswith(f"{catalogue.END}after\n")
    assert "stream, 2 | stream, 3 | gradient, 2 | gradient, 3 | at 1e-3 | at 3e-3 |" in text and "old" not in text
    row = next(line.split(" | ") for line in text.splitlines() if line.startswith("| Pre-LN"))
    assert float(row[2]) > 1 and 0 < float(row[4]) < 2 and "too_short" in row[-1]
    again: list[str] = []
    monkeypatch.setattr(catalogue.Commands, "run", lambda _, script, *words: again.append(script))
    assert catalogue.main(asked, depths=(2, 3), trained=2) == 0
    assert page.read_text(encoding="utf-8") == text and not again

    # other words are another row
    monkeypatch.setattr(catalogue, "listed", lambda: ([], [catalogue.Row("Pre-LN", "x", ("ffn=swiglu",))]))
    assert catalogue.main(words, depths=(2, 3), trained=2) == 0
    assert again == ["probe.py", "../train.py", "../train.py"]


def test_what_is_refused_stands_in_its_row(tmp_path: Path, monkeypatch, capsys):
    answers = {"probe.py": None, "../train.py": "no: use b"}
    monkeypatch.setattr(catalogue.Commands, "run", lambda _, script, *words: answers[script])
    row = catalogue.Row("one", "paper", ("norm=none",))
    monkeypatch.setattr(catalogue, "listed", lambda: ([], [row]))
    assert catalogue.main(["--out", str(tmp_path), "--rates", "1e-3"], depths=(2,), trained=2) == 1
    out, errors = capsys.readouterr()
    assert out.splitlines()[-1] == "| one (paper) | `norm=none` | - | - | no: use b |"
    assert errors.splitlines()[-1] == "catalogue.py: one: no: use b"
    answers["../train.py"] = None
    assert catalogue.main(["--out", str(tmp_path), "--rates", "1e-3"], depths=(2,), trained=2) == 0


def test_what_was_measured_with_other_words_is_in_no_table(tmp_path: Path):
    """Of two calls into one directory, the rows of the other words are not those of this table."""
    row = catalogue.Row("one", "paper", ())
    for width in (8, 16):
        kept = catalogue.Catalogue((f"model.dim={width}",), tmp_path, (2,), 2, ["1e-3"])
        assert "| - | - | - |" in kept.table([row])
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one/words.txt").write_text(kept._asked(row))
        write_probe(tmp_path / "one", 1.0)
        assert "| 2.00 | 1.00 | - |" in kept.table([row])
    (tmp_path / "one/probe.json").write_text("{")
    assert "| - | - | - |" in kept.table([row])


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "Pre-LM"], "--only knows Pre-LN, Post-LN"),
        (["--jobs", "0"], "--jobs must be >= 1, found 0"),
        (["--out", "file"], "file: File exists"),
        (["--write", "nowhere.md"], "nowhere.md: No such file"),
        (
            ["--write", "file"],
            "--write file: it needs a line <!-- table --> and, below, a line <!-- end of the table -->",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    words: list[str], said: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text(f"a\n{catalogue.BEGIN}no end\n")
    monkeypatch.setattr(catalogue.Commands, "run", lambda *_: pytest.fail("measured"))
    assert catalogue.main(words) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("catalogue.py: ") and said in errors and errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_is_under_way_and_the_next_call_goes_on(tmp_path: Path, number: int):
    """To its whole group of processes, as a terminal sends it: each run is told once."""
    words = [*SMALL, "data=synthetic", "data.tokens=20000", "steps=100000", "--only", "Pre-LN", "--jobs", "2"]
    command = [sys.executable, str(ROOT / "scripts/catalogue.py"), *words, "--out", str(tmp_path / "kept")]
    process = subprocess.Popen(
        command, env=environment(tmp_path / "cache"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        process_group=0,
    )  # fmt: skip
    record = tmp_path / "kept/Pre-LN/1e-3/metrics.jsonl"
    while not record.is_file() and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert (
        process.returncode == 128 + number
        and errors.splitlines()[-1] == "catalogue.py: stopped; the same command goes on"
    )
    assert json.loads((record.parent / "summary.json").read_text())["verdict"] == "interrupted"
    assert (tmp_path / "kept/Pre-LN/probe.json").is_file() and not (tmp_path / "kept/Pre-LN/3e-3").exists()


@pytest.mark.parametrize(
    "first, last, text",
    [
        *[(1, 1, "1.00"), (2, 24.69, "12.35"), (1, 0.0123, "1e-2"), (0.5, 1.6e7, "3e7")],
        *[(0, 2, "inf"), (0, 0, "0/0"), (float("nan"), 1, "overflow"), (0, float("nan"), "overflow")],
    ],
)
def test_numbers_are_short(first: float, last: float, text: str):
    assert catalogue._last_over_first(np.array([first, 7.0, last])) == text


def test_what_was_not_finite_is_said(tmp_path: Path):
    """`null` in what the probe wrote."""
    row, kept = catalogue.Row("one", "paper", ()), catalogue.Catalogue((), tmp_path, (2,), 2, [])
    (tmp_path / "one").mkdir()
    (tmp_path / "one/words.txt").write_text(kept._asked(row))
    write_probe(tmp_path / "one", None)
    assert kept.table([row]).splitlines()[-1].count("| overflow ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", catalogue.listed()[1], ids=lambda row: row.name)
def test_every_row_is_a_configuration(row: catalogue.Row):
    plain(*catalogue.listed()[0], *row.words)
