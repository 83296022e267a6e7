"""What is installed is what is needed: every YAML file, every module, and the entry point, away from the checkout."""

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def version_of(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


@pytest.mark.case("H10 facebookresearch/hydra#2125")
def test_every_file_that_a_run_needs_is_declared():
    """Packages name each folder with modules, package data each file that is none."""
    setuptools = PROJECT["tool"]["setuptools"]
    imported = {"conf", "hydra_plugins", "model", "data", "training", "stability", "benchmarks"}
    assert set(setuptools["packages"]) == imported
    for package in imported:
        folders = {path.parent for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts}
        assert folders == {ROOT / package}  # a folder below would need a name of its own
        others = {p for p in (ROOT / package).rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
        declared = {
            p for glob in setuptools.get("package-data", {}).get(package, []) for p in (ROOT / package).glob(glob)
        }
        assert others <= declared, package
    module, _, function = PROJECT["project"]["scripts"]["normlab"].partition(":")
    assert module in setuptools["py-modules"]
    body = ast.parse((ROOT / f"{module}.py").read_text(encoding="utf-8")).body
    assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.case("H10")
@pytest.mark.skipif(version_of("setuptools") < (77,), reason="building needs setuptools 77")
def test_the_wheel_runs_away_from_the_checkout(tmp_path: Path):
    """Built from a copy, unpacked, and started by its entry point with nothing else of the project at hand."""
    source, site, away = (tmp_path / name for name in ("source", "site", "away"))
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "tests", "build")
    )
    away.mkdir()
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(site)
    found = {path.relative_to(site) for path in (site / "conf").rglob("*.yaml")}
    assert found == {path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}

    start = (
        "import sys; from importlib.metadata import distribution\n"
        "(entry,) = distribution('normlab').entry_points.select(group='console_scripts', name='normlab')\n"
        "main = entry.load()\n"
        f"assert sys.modules['train'].__file__.startswith({str(site)!r})\n"
        "main()"
    )
    words = [*SMALL, "data=synthetic", "data.tokens=20000", "threads=1", "logger=none", "steps=1"]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", start, *words, "hydra.run.dir=run"],
        cwd=away,
        env=environment(tmp_path / "cache") | {"PYTHONPATH": os.fspath(site)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert (away / "run" / "summary.json").is_file()
