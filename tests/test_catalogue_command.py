"""The table of all methods: each choice has its row, and a row is measured once."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conf.help import choices
from scripts import catalogue
from stability.records import BLOCK_PARTS
from tests.conftest import SMALL, plain

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
    monkeypatch.setattr(catalogue, "_run", lambda script, words, place: again.append(script))
    assert catalogue.main(asked, depths=(2, 3), trained=2) == 0
    assert page.read_text(encoding="utf-8") == text and not again

    # other words are another row
    monkeypatch.setattr(catalogue, "listed", lambda: ([], [catalogue.Row("Pre-LN", "x", ("ffn=swiglu",))]))
    assert catalogue.main(words, depths=(2, 3), trained=2) == 0
    assert again == ["probe.py", "../train.py", "../train.py"]


def test_what_is_refused_stands_in_its_row(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        catalogue.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stderr="a\nno: use b\n")
    )
    row = catalogue.Row("one", "paper", ("norm=none",))
    catalogue.measure(row, [], tmp_path, (2,), 2, ["1e-3"])
    line = catalogue.table([row], tmp_path, (2,), ["1e-3"]).splitlines()[-1]
    assert line == "| one (paper) | `norm=none` | - | - | no: use b |"


def test_a_row_that_is_not_there_is_said(capsys):
    assert catalogue.main(["--only", "Pre-LM"]) == 2
    assert "--only knows Pre-LN, Post-LN" in capsys.readouterr().err


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
    (tmp_path / "one").mkdir()
    norms = {part: [[None, 2.0]] for part in BLOCK_PARTS}
    document = {"arrays": {"stream_rms": [[1.0, 2.0, None]]}, "grad_norm": norms}
    (tmp_path / "one/probe.json").write_text(json.dumps({"configurations": [document]}))
    line = catalogue.table([catalogue.Row("one", "paper", ())], tmp_path, (2,), []).splitlines()[-1]
    assert line.count("| overflow ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("row", catalogue.listed()[1], ids=lambda row: row.name)
def test_every_row_is_a_configuration(row: catalogue.Row):
    plain(*catalogue.listed()[0], *row.words)
