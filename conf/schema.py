"""The scalars that every run shares, typed: name, default, range, and the line that `--help` shows."""

import secrets
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from pydantic import Field

from stability.label import named

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
ClipBy = Literal["norm", "layer", "value"]
Precision = Literal["auto", "fp32", "bf16-mixed", "fp64"]


def _scalar(default: Any, kind: Any, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass
class Run:
    """The root of the config. A field without `help` is an axis, filled from its folder."""

    seed: int = _scalar(
        0, Annotated[int, Field(ge=0, lt=2**32)], "of the initial matrices, the data's order and dropout"
    )
    steps: int = _scalar(1000, Count, "optimizer steps")
    batch: int = _scalar(16, Count, "windows in one optimizer step, over all micro-batches and devices")
    accumulate: int = _scalar(1, Count, "micro-batches that a step is split into: less memory, the same result")
    clip: float = _scalar(1.0, Annotated[float, Field(ge=0)], "bound on the gradient, as clip_by says; 0 = no clipping")
    clip_by: str = _scalar(
        "norm", ClipBy, "what clip bounds: the norm of the whole gradient, of each layer's, or the value of each entry"
    )
    z_loss: float = _scalar(
        0.0,
        Annotated[float, Field(ge=0)],
        "weight of log^2 Z in the gradient (PaLM: 1e-4); the recorded loss has none of it",
    )
    precision: str = _scalar(
        "auto", Precision, "auto, fp32, bf16-mixed or fp64; auto = bf16-mixed on a GPU made for it"
    )
    threads: int | None = _scalar(
        None, Count | None, "CPU threads; null = by the rule in training/device.py, 1 in a sweep"
    )
    devices: int = _scalar(1, Count, "devices (GPUs, or CPU processes) of each machine that share every step's windows")
    num_nodes: int = _scalar(1, Count, "machines, each started by torchrun or Slurm")
    compile: bool = _scalar(False, bool, "compile groups of blocks: up to a minute at the start, then faster steps")
    profile: bool = _scalar(False, bool, "trace a few steps: profile/trace.json and the ten dearest operations")
    workers: int = _scalar(0, Natural, "processes that fetch windows; 0 = the training process itself")
    log_every: int = _scalar(10, Count, "steps between records of every layer's gradient norm (loss: every step)")
    probe_every: int = _scalar(
        0, Natural, "steps between measurements of stream, attention and updates on a fixed probe batch; 0 = none"
    )
    val_every: int = _scalar(200, Natural, "steps between validations; 0 = before the first and after the last alone")
    save_every: int = _scalar(200, Natural, "steps between checkpoints; 0 = none: no weights are kept")
    picture: bool = _scalar(True, bool, "draw report.png at the run's end")
    patience: int = _scalar(
        3, Natural, "steps in a row with a loss or gradient that is not finite before the run stops; 0 = no end"
    )
    name: str | None = _scalar(None, str | None, "the run's name in titles and W&B; null = its axes")
    resume: str | None = _scalar(None, str | None, "a run directory to continue, in place")
    resume_force: bool = _scalar(False, bool, "resume with settings that change the numbers; environment.json says so")
    allow_unstable: bool = _scalar(False, bool, "run a combination that the check refuses")
    norm: Any = None
    placement: Any = None
    residual: Any = None
    stream: Any = None
    ramp: Any = None
    scaling: Any = None
    init: Any = None
    linear: Any = None
    attention: Any = None
    ffn: Any = None
    position: Any = None
    model: Any = None
    tokenizer: Any = None
    data: Any = None
    optimizer: Any = None
    schedule: Any = None
    trainer: Any = None
    logger: Any = None
    recipe: Any = None
    study: Any = None  # a sweep's, never a run's


# here, where every process that composes a config comes past, the workers of a sweep too
ConfigStore.instance().store(name="schema", node=Run)
OmegaConf.register_new_resolver("named", lambda choices: "_".join(named(choices)), replace=True)
# cached, so that a run's directory has one name however often it is asked for
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)

SCALARS = {f.name: f for f in fields(Run) if f.metadata}
AXES = [f.name for f in fields(Run) if not f.metadata and f.name != "study"]
