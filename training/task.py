"""The training step under Lightning: loss, gradient norms, clipping, the guard against a non-finite step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from model.loss import next_token_loss
from model.qk_clip import QKClip
from model.transformer import Transformer
from stability.gradients import GradientNorms
from training.clipping import Clip, by_norm
from training.graphs import recorded, zero_gradients
from training.ranks import Ranks
from training.recorder import Recorder
from training.schedule import Constant
from training.signals import Signals


class Task(pl.LightningModule):
    """Lightning calls, in one optimizer step: `training_step` and backward for each micro-batch, then once
    `configure_gradient_clipping` with the whole gradient, unclipped, then the optimizer and the schedule.

    `record`: windows of a micro-batch, of which forward and backward pass become CUDA graphs (`training/graphs.py`); None: no
    graphs."""

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        schedule: Constant,
        gradients: GradientNorms,
        recorder: Recorder,
        *,
        run_id: str,
        steps: int,
        accumulate: int,
        clip: float,
        clip_by: Clip = by_norm,
        record: Tensor | None = None,
        ranks: Ranks,
        signals: Signals,
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.model, self.recorder = model, recorder
        self._optimizer, self._schedule, self._gradients = optimizer, schedule, gradients
        self.run_id, self.steps, self.accumulate, self.clip = run_id, steps, accumulate, clip
        self._clip_by = clip_by
        self._ranks, self._signals, self._apart = ranks, signals, apart
        self._clips = [module for module in model.modules() if isinstance(module, QKClip)]
        self._loss: Tensor | None = None
        self._record = record
        self._micro_batch: Callable[[Tensor], Tensor] = partial(next_token_loss, model)

    def on_fit_start(self) -> None:
        """The model is on its device, and no thread fetches windows yet."""
        if self._record is not None:
            bf16 = self.trainer.precision == "bf16-mixed"
            self._micro_batch = recorded(self.model, self._record.to(self.device), bf16=bf16)

    def configure_optimizers(self) -> Any:
        schedule = LambdaLR(self._optimizer, lambda done: self._schedule.factor(done + 1, self.steps))
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_zero_grad(self, *_: Any, **__: Any) -> None:
        """Of every parameter, those too that the optimizer does not move: theirs would add up from step to step."""
        if self._record is not None and self.accumulate > 1:
            zero_gradients(self.model)
        else:
            self.model.zero_grad()

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        self.model.at_step(self.trainer.global_step + 1)
        loss = self._micro_batch(windows)
        # every micro-batch has as many tokens, so the mean of means is the mean over tokens; the quotient is a copy
        part = loss.detach() / self.accumulate
        self._loss = part if self._loss is None else self._loss + part
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Measure, guard, clip, all from the same norms and all on the device: what each rank decides by is one number."""
        assert self._loss is not None
        self._ranks.average(self._apart)
        norms = self._gradients.measure()
        loss, total, asked = self._ranks.agree(self._loss, torch.linalg.vector_norm(norms), self._signals.received)
        finite = torch.isfinite(total) & torch.isfinite(loss)
        optimizer.found_inf = (~finite).to(torch.float32)  # the fused kernel then leaves weights and moments alone
        kept = self._clip_by(self._gradients, norms, total, self.clip) if self.clip else torch.ones_like(total)
        self._agree_on_scores(finite)
        step = self.trainer.global_step + 1
        lr = optimizer.defaults["lr"] * self._schedule.factor(step, self.steps)  # that of a parameter whose pace is 1
        self.recorder.step(step, lr, loss, norms, total, kept, asked)
        self._loss = None
        if self.recorder.reason:
            self.trainer.should_stop = True

    def _agree_on_scores(self, taken: Tensor) -> None:
        """The largest of each head over all ranks, and none of a step that is not taken."""
        if self._clips:
            found = self._ranks.largest(torch.stack([clip.largest for clip in self._clips]))
            for clip, largest in zip(self._clips, torch.where(taken, found, -torch.inf), strict=True):
                clip.largest.copy_(largest)

    def optimizer_step(self, *args: Any, **knobs: Any) -> None:
        super().optimizer_step(*args, **knobs)
        self.model.after_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Beside weights and optimizer: whose they are, and what dropout draws next. Plain containers and tensors alone."""
        checkpoint["run"] = self.run_id
        checkpoint["rng"] = _one_or_all(self._ranks.of_all(torch.get_rng_state()))
        if self.device.type in ("cuda", "mps"):
            checkpoint["device_rng"] = _one_or_all(self._ranks.of_all(getattr(torch, self.device.type).get_rng_state()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The generators, new ones where there were others than these ranks; and the optimizer's settings as the config has
        them now, which a checkpoint would undo."""
        done, groups = checkpoint["global_step"], self._optimizer.param_groups
        bases = [group.get("initial_lr", group["lr"]) for group in groups]  # the schedule is there or not yet
        rates = [base * self._schedule.factor(done + 1, self.steps) for base in bases]
        (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        for stored, group, base, lr in zip(optimizer["param_groups"], groups, bases, rates, strict=True):
            stored.update({key: value for key, value in group.items() if key != "params"})
            stored.update(initial_lr=base, lr=lr)
        schedule.update(base_lrs=bases, _last_lr=rates)
        if len(states := _as_list(checkpoint["rng"])) != self._ranks.world:
            torch.manual_seed(self._ranks.seed(torch.initial_seed(), done))
            return
        torch.set_rng_state(states[self._ranks.rank])
        if self.device.type in ("cuda", "mps") and "device_rng" in checkpoint:
            getattr(torch, self.device.type).set_rng_state(_as_list(checkpoint["device_rng"])[self._ranks.rank])


def _one_or_all(states: list[Tensor]) -> Tensor | list[Tensor]:
    return states if len(states) > 1 else states[0]


def _as_list(states: Tensor | list[Tensor]) -> list[Tensor]:
    return [states] if isinstance(states, Tensor) else states
