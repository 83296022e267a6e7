"""A new norm is one class and one file, outside of normlab too: DyT's twin, trained by the command line alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, SMALL, environment

CLASS = """
import torch
from model.norm import Norm
from torch import Tensor, nn


class Twin(Norm):
    def __init__(self, dim: int, *, alpha: float = 0.5, bias: bool = True) -> None:
        super().__init__(dim)
        self.gain, self.alpha = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.tensor(alpha))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def normalise(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.alpha * x) * self.gain
        return y if self.bias is None else y + self.bias
"""
FILE = """\
# DyT once more
_target_: twin.Twin
_partial_: true
alpha: 0.5
bias: true
"""
TRAINING = ["steps=6", "log_every=2", "probe_every=3", "val_every=3", "data.val_windows=4", "model.qk_norm=head"]
WORDS = [*SMALL, "data=synthetic", "data.tokens=20000", "threads=1", "logger=none", "picture=false", *TRAINING]


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Path:
    """Of twin.py, and of conf/norm/twin.yaml."""
    folder = tmp_path_factory.mktemp("twin")
    (folder / "twin.py").write_text(CLASS)
    (folder / "conf" / "norm").mkdir(parents=True)
    (folder / "conf" / "norm" / "twin.yaml").write_text(FILE)
    return folder


def call(there: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(there)])
    given = [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf", *words]
    return subprocess.run(
        given, cwd=there, env=environment(there) | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record without what a clock says."""
    return [{key: each for key, each in line.items() if "second" not in key} for line in lines]


def test_it_trains_and_each_number_is_that_of_dyt(there: Path, run):
    """From the command line, against DyT in this process."""
    ended = call(there, *WORDS, "norm=twin", "norm.alpha=0.7", "hydra.run.dir=run")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "norm=twin" in ended.stdout and "x <- x + F(N(x))" in ended.stdout and "eps =" not in ended.stdout
    twins = [json.loads(line) for line in (there / "run" / "metrics.jsonl").read_text().splitlines()]
    words = ["picture=false", *TRAINING, "norm=dyt"]
    assert numbers(twins) == numbers(run(*words, "norm.alpha=0.7")[0])
    assert numbers(twins) != numbers(run(*words)[0])  # norm.alpha reached it
    assert {"loss", "val_loss", "probe"} <= set().union(*twins)


WRONG = {
    "norm.alhpa=0.7": ["norm.alhpa", "'norm.alpha'"],
    "+norm.eps=1e-5": ["norm.eps is no knob of twin.Twin", "'norm.bias'"],
    "norm.alpha=high": ["norm.alpha='high'", "number"],
    "norm.groups=2": ["norm.groups", "norm=group_rmsnorm"],
}


@pytest.mark.parametrize(
    "word, said",
    [pytest.param(*pair, marks=[] if "alhpa" in pair[0] else pytest.mark.slow) for pair in WRONG.items()],
)
def test_a_wrong_knob_is_one_line(there: Path, word: str, said: list[str]):
    ended = call(there, *WORDS, "norm=twin", word, "hydra.run.dir=wrong")
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1 and all(part in ended.stderr for part in said), ended.stderr
    assert not (there / "wrong").exists()


def test_help_lists_it_beside_the_others(there: Path):
    page = call(there, "--help").stdout
    assert re.search(r"^ {4}twin +DyT once more$", page, re.M)
    assert re.search(r"^ {4}dyt +g tanh", page, re.M)


@pytest.mark.slow
def test_it_is_named_where_a_line_goes_wrong(there: Path):
    """Where a choice is misspelt, and where its knob is used on another."""
    assert "choose from twin" in call(there, "norm=twni").stderr
    assert "norm=derf, norm=dyt, norm=twin" in call(there, "norm=rmsnorm", "norm.alpha=0.7").stderr


@pytest.mark.slow
def test_it_is_resumed(there: Path):
    for words in ([*WORDS, "norm=twin", "schedule=constant", "hydra.run.dir=part"], ["resume=part", "steps=9"]):
        ended = call(there, *words)
        assert (ended.returncode, ended.stderr) == (0, "")
    assert ", 9 steps in" in ended.stdout
