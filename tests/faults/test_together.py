"""Runs that start in the same instant: each has a directory of its own and the record of a run that was alone, and one
of them makes the tokens."""

from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.faults.test_kill import finished, start

WORDS = [*SMALL, "threads=1", "logger=none", "steps=20", "val_every=10"]
# seconds of work to make the tokens, so that the others arrive meanwhile
WORDS += ["data=synthetic", "data.tokens=1000000", "tokenizer=bpe"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_runs_at_once_are_eight_runs(tmp_path: Path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    assert finished(alone, *WORDS, "hydra.run.dir=run").count("tokens: made now") == 1
    processes = [start(together, *WORDS) for _ in range(8)]
    said = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, "\n".join(said)
    directories = [path for path in (together / "runs").iterdir() if path.is_dir()]
    assert len(directories) == 8
    record = (alone / "run" / "metrics.jsonl").read_bytes()
    assert record.count(b"\n") >= 20
    assert [(path / "metrics.jsonl").read_bytes() for path in directories] == [record] * 8
    assert sorted("tokens: made now" in words for words in said) == [False] * 7 + [True]
    assert sum(words.count("tokens: found") for words in said) == 7
    assert not list((together / "cache").rglob(".partial*"))
    assert len(list((together / "cache").glob("*/meta.json"))) == 1
