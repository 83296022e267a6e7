"""The table of all methods: each choice has its row, and a row is measured once."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.help import choices
from scripts import catalogue
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
    assert "stream, 2 | stream, 3 | gradient, 2 | gradient, 3 |" in text and "old" not in text
    row = next(line.split(" | ") for line in text.splitlines() if line.startswith("| Pre-LN"))
    assert float(row[2]) > 1 and 0 < float(row[4]) < 2 and "too_short" in row[-1]
    again: list[str] = []
    monkeypatch.setattr(catalogue, "_run", lambda script, words, place: again.append(place.name))
    assert catalogue.main(asked, depths=(2, 3), trained=2) == 0
    assert page.read_text(encoding="utf-8") == text and not again

    # other words are another row
    monkeypatch.setattr(catalogue, "listed", lambda: ([], [catalogue.Row("Pre-LN", "x", ("ffn=swiglu",))]))
    assert catalogue.main(words, depths=(2, 3), trained=2) == 0
    assert again == ["Pre-LN", "Pre-LN"]


def test_what_is_refused_stands_in_its_row(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        catalogue.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stderr="a\nno: use b\n")
    )
    row = catalogue.Row("one", "paper", ("norm=none",))
    catalogue.measure(row, [], tmp_path, (2,), 2)
    assert (
        catalogue.table([row], tmp_path, (2,)).splitlines()[-1] == "| one (paper) | `norm=none` | - | - | no: use b |"
    )


def test_a_row_that_is_not_there_is_said(capsys):
    assert catalogue.main(["--only", "Pre-LM"]) == 2
    assert "--only knows Pre-LN, Post-LN" in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, text",
    [(1.0, "1.00"), (12.345, "12.35"), (0.0123, "1e-2"), (3.2e7, "3e7"), (float("inf"), "inf"), (float("nan"), "0/0")],
)
def test_numbers_are_short(value: float, text: str):
    assert catalogue._number(value) == text


@pytest.mark.slow
@pytest.mark.parametrize("row", catalogue.listed()[1], ids=lambda row: row.name)
def test_every_row_is_a_configuration(row: catalogue.Row):
    plain(*catalogue.listed()[0], *row.words)
