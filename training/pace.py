"""When: validations, checkpoints, the stop that a signal asks for, and what the terminal shows meanwhile."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from model.execution import eagerly
from model.loss import next_token_loss
from training.checkpoint import save
from training.parallel import local
from training.ranks import Ranks
from training.recorder import Recorder
from training.signals import Signals
from training.task import Task


class Pace(Callback):
    """Validates before the first step, every `val_every` (0: never between) and after the last, always over the same
    windows; saves before the first step, every `save_every` (0: nothing at all) and at the end, `last.ckpt`, and where the
    validation loss is the lowest so far, `best.ckpt`.

    Weights that are not finite are never saved, nor are those of a run whose loss diverged. A run that stops because its
    steps are not finite still has the weights of the last one that was: they are saved. Every rank validates the same
    windows; the first writes.
    """

    def __init__(
        self, directory: Path, loader: DataLoader[Tensor], ranks: Ranks, *, val_every: int, save_every: int
    ) -> None:
        self.directory, self.loader, self.ranks = directory, loader, ranks
        self.val_every, self.save_every = val_every, save_every

    def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        assert isinstance(task, Task)
        if not task.recorder.val_loss:
            self._validate(trainer, task)
            self._save(trainer, task, "last")

    def on_train_batch_end(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
        assert isinstance(task, Task)
        if not ends_step(trainer, task):
            return
        step = trainer.global_step
        last = step >= task.steps or trainer.should_stop
        if due(step, self.val_every) or step >= task.steps:
            self._validate(trainer, task)
        if due(step, self.save_every) or last:
            self._save(trainer, task, "last")

    def _validate(self, trainer: pl.Trainer, task: Task) -> None:
        recorder, model, step = task.recorder, task.model, trainer.global_step
        recorder.flush()
        recorder.pause()
        model.eval()
        with torch.no_grad(), eagerly(model), trainer.precision_plugin.val_step_context():
            batches = [windows.to(task.device) for windows in self.loader]
            total = torch.stack([next_token_loss(model, windows) * len(windows) for windows in batches]).sum()
        model.train()
        loss = self.ranks.mean(total).item() / sum(len(windows) for windows in batches)
        lowest = min((value for _, value in recorder.val_loss), default=float("inf"))
        recorder.validation(step, loss)
        if loss < lowest and step:
            self._save(trainer, task, "best")

    def _save(self, trainer: pl.Trainer, task: Task, name: str) -> None:
        if not self.save_every:
            return
        recorder = task.recorder
        recorder.to_disk()
        recorder.pause()
        loss_diverged = recorder.reason and not (recorder.skipped and recorder.skipped[-1])
        if loss_diverged or not all(self.ranks.of_all(_finite(task.model))):
            return
        if self.ranks.first:
            self.directory.mkdir(exist_ok=True)
        trainer.save_checkpoint(self.directory / f"{name}.ckpt")


def _finite(model: torch.nn.Module) -> bool:
    """What a checkpoint keeps, parameters and running statistics, of sharded ones this rank's part."""
    kept = [local(tensor.detach()) for tensor in model.state_dict().values() if tensor.is_floating_point()]
    norms = torch._foreach_norm(kept)
    return bool(torch.isfinite(torch.stack(norms)).all())


class WholeFiles(CheckpointIO):
    """Has Lightning read and write checkpoints as `training/checkpoint.py` does. `mapped`: read from the file as they are taken,
    for ranks of which each would have the whole in memory; the file may be replaced meanwhile."""

    def __init__(self, *, mapped: bool = False) -> None:
        self.mapped = mapped

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any | None = None, weights_only: bool | None = None) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=self.mapped)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class Stop(Callback):
    """Ends the run after the step under way, all its micro-batches, once a signal has been received; with several ranks after
    the same step on each, which is the first whose line says so (`Recorder.asked`)."""

    def __init__(self, signals: Signals, ranks: Ranks) -> None:
        self.signals, self.ranks = signals, ranks

    def on_train_start(self, *_: Any) -> None:
        self.signals.install()  # Lightning has put a handler of its own before ours, which would raise in mid-step

    def on_train_batch_end(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
        assert isinstance(task, Task)
        if not ends_step(trainer, task):
            return
        received = self.signals.received if self.ranks.world == 1 else task.recorder.asked
        if received:
            self.signals.received = self.signals.received or received
            trainer.should_stop = True


def due(step: int, every: int) -> bool:
    """Whether a thing that is done `every` steps, 0 = never, is done after `step`."""
    return every > 0 and step % every == 0


def ends_step(trainer: pl.Trainer, task: pl.LightningModule) -> bool:
    """Whether the micro-batch that has just ended was the last of its optimizer step."""
    assert isinstance(task, Task)
    return (trainer.fit_loop.epoch_loop.batch_idx + 1) % task.accumulate == 0


class Bar(TQDMProgressBar):
    """Lightning's bar with loss, gradient norm and speed of the latest record (nothing is fetched for it)."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(refresh_rate=recorder.log_every)
        self.recorder = recorder

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description("training")  # one endless epoch: its number says nothing

    def get_metrics(self, *_: Any) -> dict[str, int | str | float | dict[str, float]]:
        return {**shown(self.recorder)}


class Lines(Callback):
    """Where the output is no terminal: a line at each validation."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.seen = recorder, 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._say(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._say(trainer)

    def _say(self, trainer: pl.Trainer) -> None:
        if len(self.recorder.val_loss) > self.seen:
            self.seen = len(self.recorder.val_loss)
            words = "  ".join(f"{key} {value}" for key, value in shown(self.recorder).items()) or "resumed"
            print(f"step {trainer.global_step}/{self.recorder.steps}  {words}", flush=True)


def shown(recorder: Recorder) -> dict[str, str]:
    """The latest loss, validation loss, total gradient norm and tokens per second, as they are shown."""
    numbers = {"loss": "loss", "val": "val_loss", "grad": "grad_norm"}
    out = {
        key: f"{recorder.latest[name]:.4g}" for key, name in numbers.items() if recorder.latest.get(name) is not None
    }
    return out | ({"tok/s": f"{recorder.tokens_per_second:,.0f}"} if recorder.tokens_per_second else {})
