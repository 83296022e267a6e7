"""What an engine is asked for, before anything is started or written; and what the engines' launchers add to Hydra's."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import conf.engines
from conf.engines import QUEUES, check_engine
from conf.help import CONF
from conf.sweep import PENALTY, Lost, Remember, Sweep
from hydra_plugins import launchers
from hydra_plugins.queues import Handed

ENGINES = sorted(f"{path.parent.name}={path.stem}" for path in (CONF / "hydra").glob("*/*.yaml"))


def hydra_of(*words: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", list(words), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg.hydra


@pytest.mark.parametrize("engine", ENGINES)
def test_every_knob_in_a_shipped_file_is_one_of_its_engine(engine: str):
    check_engine(engine.partition("=")[0], hydra_of(f"hydra/{engine}"))


@pytest.mark.parametrize(("engine", "word", "said"), [
    ("launcher=joblib", "n_jobs=0", "hydra.launcher.n_jobs=0 should be greater than or equal to 1"),
    ("launcher=joblib", "n_jobs=-1", "hydra.launcher.n_jobs=-1 should be greater"),
    ("launcher=joblib", "n_jobs=two", "hydra.launcher.n_jobs='two' should be a valid integer"),
    ("launcher=joblib", "+verbose=1", "hydra.launcher.verbose is no knob of hydra_plugins.launchers.Joblib; did you mean"),
    ("launcher=submitit_local", "+partition=a", "hydra.launcher.partition is no knob of hydra_plugins.queues.Local"),
    ("launcher=submitit_slurm", "timeout_min=1h", "hydra.launcher.timeout_min='1h' should be a valid integer"),
    ("launcher=ray", "+ray.init.adress=auto", "hydra.launcher.ray.init.adress is no knob of ray.init; did you mean 'address'"),
    ("launcher=ray", "+ray.remote.gpus=1", "hydra.launcher.ray.remote: Invalid option keyword gpus"),
    ("sweeper=optuna", "n_jobs=0", "hydra.sweeper.n_jobs=0 should be greater than or equal to 1"),
    ("sweeper=optuna", "+trials=9", "hydra.sweeper.trials is no knob of hydra_plugins.queues.Optuna; did you mean"),
])  # fmt: skip
def test_a_knob_that_an_engine_lacks_is_named(engine: str, word: str, said: str):
    kind = engine.partition("=")[0]
    plus, knob = "+" * word.startswith("+"), word.lstrip("+")
    with pytest.raises(ValueError) as found:
        check_engine(kind, hydra_of(f"hydra/{engine}", f"{plus}hydra.{kind}.{knob}"))
    assert str(found.value).startswith(said) and "\n" not in str(found.value)


@pytest.mark.parametrize("engine", ["launcher=submitit_slurm", "launcher=submitit_local", "launcher=ray", "sweeper=optuna"])  # fmt: skip
@pytest.mark.parametrize("which", [1, 2])
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, engine: str, which: int):
    kind, _, _ = engine.partition("=")
    hydra = hydra_of(f"hydra/{engine}")
    known = QUEUES[hydra[kind]._target_.rpartition(".")[2]]
    monkeypatch.setattr(conf.engines, "find_spec", lambda name: None if name == known[which] else name)
    with pytest.raises(ValueError, match=rf"hydra/{engine} needs a package more: pip install .* -e '\.\[{known[0]}\]'"):
        check_engine(kind, hydra)


@pytest.fixture
def sweep(monkeypatch, tmp_path: Path) -> Path:
    """The directory of a sweep that has not begun."""
    for name, value in {"sweep": Sweep(tmp_path / "sweep", [["seed=0"], ["seed=1"]]), "_begun": False}.items():
        monkeypatch.setattr(Remember, name, value)
    monkeypatch.setattr(Remember, "shown", False)
    return tmp_path / "sweep"


def test_a_sweep_begins_once(sweep: Path):
    Remember.begin()
    assert len((sweep / "sweep.jsonl").read_text().splitlines()) == 2
    (sweep / "sweep.jsonl").unlink()
    Remember.begin()
    assert not (sweep / "sweep.jsonl").exists() and not Remember.shown


class Broken:
    def launch(self, job_overrides, initial_job_idx):
        raise RuntimeError("the queue is closed\nsince yesterday")


class Queue(Handed, Broken):
    pass


def test_an_engines_own_error_is_one_line(monkeypatch):
    monkeypatch.setattr(Remember, "sweep", None)
    with pytest.raises(Lost, match=r"^Queue lost a job: RuntimeError: the queue is closed$"):
        Queue().launch([["seed=0"]], 0)


def test_a_process_that_did_not_hear_of_the_end_starts_no_job(monkeypatch, tmp_path: Path):
    """The signal came while it was being started."""
    from hydra_plugins.hydra_joblib_launcher import _core

    def started(number: int) -> None:
        raise AssertionError(number)

    monkeypatch.setattr(_core, "execute_job", started)
    with pytest.raises(AssertionError):
        launchers._work(str(tmp_path), 3)
    launchers._pass_on(tmp_path, 15)
    number, returned, ran = launchers._work(str(tmp_path), 3)
    assert (number, returned.return_value, ran) == (3, PENALTY, None)
