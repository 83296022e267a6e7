"""Who may import whom: data flows one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = {"conf", "model", "data", "training", "stability", "benchmarks", "scripts", "train"}
MAY = {  # layer -> what of the house it may import, and which large libraries it may not
    "model": ({"model"}, {"lightning", "hydra", "omegaconf", "datasets", "tokenizers", "wandb"}),
    "data": ({"data"}, {"lightning", "hydra", "omegaconf", "wandb"}),
    "stability": ({"stability", "model"}, {"lightning", "hydra", "omegaconf", "datasets", "tokenizers", "wandb"}),
    "training": ({"training", "stability", "model", "data"}, {"hydra", "omegaconf", "datasets"}),
    "conf": ({"conf", "stability"}, {"lightning", "datasets", "tokenizers", "wandb", "torch"}),
    "benchmarks": (HOUSE - {"scripts"}, {"lightning", "datasets", "tokenizers", "wandb"}),
}
FILES = sorted(path for layer in MAY for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The first words of all modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_what_it_may(path: Path):
    layer = path.relative_to(ROOT).parts[0]
    house, banned = MAY[layer]
    found = imports(path)
    assert not (wrong := (found & HOUSE) - house), (
        f"{layer}/ may import {sorted(house)} of the house, not {sorted(wrong)}"
    )
    assert not (wrong := found & banned), f"{layer}/ may not import {sorted(wrong)}"


READERS = [
    "records",
    "sweep",
    "progress",
    "label",
    "panel",
    "report",
    "deep_panels",
    "figures",
    "groups",
    "curves",
    "sheets",
    "maps",
    "probe",
    "probe_report",
    "verdict",
    "claims",
    "judging",
    "observables",
    "gather",
    "origin",
    "page",
]


@pytest.mark.parametrize("name", [*READERS, "study"])
def test_reading_a_run_needs_no_torch(name: str):
    assert "torch" not in imports(ROOT / "stability" / f"{name}.py")


def test_only_train_instantiates():
    callers = [
        p for p in ROOT.rglob("*.py") if ".venv" not in p.parts and "instantiate(" in p.read_text(encoding="utf-8")
    ]
    assert [p.relative_to(ROOT).parts[0] for p in callers if p.relative_to(ROOT).parts[0] != "tests"] == ["train.py"]


def test_no_file_whose_name_says_nothing():
    names = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    assert not names & {"utils", "common", "helpers", "misc"}


def test_no_forward_reads_a_layer_number():
    """An integer of the layer read in a forward makes the compiler build a graph for each layer."""
    for path in (ROOT / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in ("forward", "read", "write"):
                assert not {"layer", "layer_idx", "site"} & {
                    n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
                }
