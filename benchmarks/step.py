"""Networks of the project's config, and the loop that somebody would write who had no framework."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import train
from benchmarks.ratios import Work
from conf.check import check
from conf.help import CONF
from model.loss import next_token_loss
from model.transformer import Transformer
from training import device as machine
from training.optim import adamw
from training.schedule import Constant

# of a run that is timed: all that is done beside the steps is left away
ALONE = ["logger=none", "picture=false", "save_every=0", "val_every=0", "data.val_windows=1"]


@dataclass(frozen=True)
class Shape:
    """A network and the windows of a step."""

    depth: int
    dim: int
    batch: int
    context: int = 64
    vocab: int = 257

    def __str__(self) -> str:
        layers = "1 layer" if self.depth == 1 else f"{self.depth:,} layers"
        return f"{layers} of width {self.dim}, {self.batch} x {self.context} tokens"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def words(self) -> list[str]:
        sizes = {"depth": self.depth, "dim": self.dim, "context": self.context}
        return ["model=deep", f"batch={self.batch}", *(f"model.{key}={value}" for key, value in sizes.items())]

    @property
    def threads(self) -> int:
        return machine.threads(None, tokens=self.tokens, dim=self.dim)


def cores() -> int:
    """As many threads as the rule gives to the largest network."""
    return machine.threads(None, tokens=2**62, dim=1)


def composed(words: Iterable[str]) -> tuple[DictConfig, dict[str, str]]:
    """(The config that train.py gets for these words, axis -> choice)."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", list(words), return_hydra_config=True)
    chosen = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, chosen


def run(words: Iterable[str]) -> dict[str, Any]:
    """The summary of a training run by `train.train`, which is not told where its output goes.

    Raises RuntimeError for a run that ends otherwise than well, KeyboardInterrupt for one that a signal ended.
    """
    gc.collect()  # a trainer refers to itself, and the one before may hold a network
    cfg, chosen = composed(words)
    with TemporaryDirectory() as scratch, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        summary, code = train.train(cfg, Path(scratch) / "run", chosen, list(words))
    if code > 128:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"{summary['verdict']}: {summary['reason']}")
    return summary


def network(shape: Shape, *words: str) -> Transformer:
    """Of the default choices but for `words`, in training mode, on the CPU."""
    plain = check(composed([*shape.words, *words])[0])
    return train.network(plain, train.choices_of(plain), shape.vocab).train()


def windows(shape: Shape) -> Tensor:
    """int64 (batch, context + 1), any."""
    return torch.randint(shape.vocab, (shape.batch, shape.context + 1))


def training_step(
    model: Transformer, shape: Shape, loss: Callable[[nn.Module, Tensor], Tensor] = next_token_loss
) -> Work:
    """One step of the bare loop a call, always on the same windows."""
    machine.flush_denormals()  # as a run does
    batches = repeat(windows(shape).to(next(model.parameters()).device))
    steps = bare(model, adamw(model), Constant(), batches, steps=10**6, clip=1.0, loss=loss)
    return lambda: next(steps)


def bare(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Constant,
    batches: Iterable[Tensor],
    *,
    steps: int,
    clip: float,
    loss: Callable[[nn.Module, Tensor], Tensor] = next_token_loss,
    bf16: bool = False,
) -> Iterator[Tensor]:
    """The loss of each step, as it is taken: what a run does, in torch alone, and with no record of it."""
    device = next(model.parameters()).device
    scheduler = LambdaLR(optimizer, lambda done: schedule.factor(done + 1, steps))
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss(model, batch.to(device, non_blocking=True))
        torch.autograd.backward(value)
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        yield value.detach()
