"""What training by normlab costs beside a bare loop, and what the record of every layer costs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import train
import training.run
from benchmarks.ratios import Measurement, Row, Target, neighbours, now
from benchmarks.step import ALONE, Shape, bare, composed, run
from conf.check import check
from data.windows import Windows
from training import device as machine
from training.optim import adamw
from training.task import Task

STRETCH = 4  # steps of the run, then as many of the bare loop
TEXT = ["data=synthetic", "data.tokens=100000"]  # read in a blink


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    """The whole training path over a bare loop, in tokens per second, at the default size; the step with the record over
    the step without."""
    size = Shape(depth=4, dim=128, batch=16, context=128)  # the defaults
    words = ["log_every=1", *(["model.depth=1", "batch=4", "threads=1", *TEXT] if quick else [])]
    deep = Shape(depth=8, dim=64, batch=1) if quick else Shape(depth=1000, dim=64, batch=1)
    wide, alone = Shape(depth=2 if quick else 12, dim=128, batch=8), "clip_grad_norm_ alone"
    return [
        Measurement(
            Row("overhead", "tokens per second, default size", "bare loop", size.threads, Target(">=", 0.97)),
            partial(against_bare, words, rounds=rounds if quick else 4 * rounds),
        ),
        *(
            Measurement(
                Row("overhead", f"step that records every layer, {shape}", alone, shape.threads, target),
                partial(recording, shape.words, rounds=rounds if quick else count * rounds),
            )
            for shape, target, count in ((wide, Target("<=", 1.01), 12), (deep, Target("<=", 1.03), 2))
        ),
    ]


@contextmanager
def fetching(mark: Any) -> Iterator[None]:
    """`mark(item)` just before a run fetches micro-batch `item`, which is between two steps."""
    fetch = Windows.__getitem__

    def marked(self: Windows, item: int) -> Tensor:
        mark(item)
        return fetch(self, item)

    with patch.object(Windows, "__getitem__", marked):
        yield


def against_bare(words: Sequence[str], *, rounds: int) -> list[float]:
    """Tokens per second of `train.train` over those of the bare loop. The loop takes its steps where the run is between two of
    its own, so that both meet the same machine."""
    words = [*words, *ALONE, f"steps={STRETCH * (rounds + 1) + 1}"]
    loop = bare_loop(words)
    ours: list[float] = []
    theirs: list[float] = []
    began = now()

    def mark(item: int) -> None:
        nonlocal began
        if item == 0 or item % STRETCH:
            return
        ours.append(now() - began)
        began = now()
        for _ in range(STRETCH):
            next(loop)
        theirs.append(now() - began)
        began = now()

    with fetching(mark):
        run(words)
    return [1 / ratio for ratio in neighbours(ours[1:], theirs[1:])]  # the first has start-up in it


def bare_loop(words: Sequence[str]) -> Iterator[Tensor]:
    """The bare loop with the network, windows, optimizer (AdamW as it is by default) and schedule of a run of these words."""
    cfg, axes = composed(words)
    plain = check(cfg)
    choices, schedule, corpus = train.check_whole(plain, axes)
    tokens, windows = train.text_of(plain, corpus)
    device = machine.accelerator()
    model = train.network(plain, choices, tokens.vocab).train().to(device)
    batches = [windows[item] for item in range(len(windows))]
    bf16 = machine.precision(plain["precision"], device) == "bf16-mixed"
    return bare(model, adamw(model), schedule, batches, steps=plain["steps"], clip=plain["clip"], bf16=bf16)


class ByTurns(Task):
    """Every second step only clips, as torch does it."""

    def configure_gradient_clipping(self, optimizer: Any, *rest: Any, **named: Any) -> None:
        if self.trainer.global_step % 2 == 0:
            super().configure_gradient_clipping(optimizer, *rest, **named)
        else:
            clip_grad_norm_(self.model.parameters(), self.clip)
            self._loss = None


def recording(words: Sequence[str], *, rounds: int) -> list[float]:
    """Time of a step with norms, guard, clipping and the line of metrics.jsonl over that of a step with clipping alone, in one
    run, by turns."""
    began: list[float] = []
    with fetching(lambda item: began.append(now())), patch.object(training.run, "Task", ByTurns):
        run([*words, *TEXT, *ALONE, "log_every=1", f"steps={2 * rounds + 3}"])
    times = torch.tensor(began, dtype=torch.float64).diff()[2:].tolist()
    return neighbours(times[::2], times[1::2])
