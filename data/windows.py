"""Token arrays to batches, in an order that is a function of the seed and the step alone."""

import signal
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


class Windows(Dataset[Tensor]):
    """The micro-batches of a whole run: item i is int64 (batch / accumulate / world, context + 1), inputs and targets
    at once: x = item[:, :-1], y = item[:, 1:].

    Step s = 1, 2, ... is the items (s - 1) accumulate .. s accumulate - 1 of all ranks together. In an epoch the
    windows lie end to end from a phase in [0, context), so that no token is predicted twice, and come in the order of a
    permutation; phase and permutation are drawn from (seed, epoch). They are dealt out in that order, `batch` a step;
    hence neither accumulate, world, workers nor a resume changes what a step sees.

    Args:
        tokens: ids, at least context + 1.
        batch: windows a step, over all micro-batches and ranks.

    Raises ValueError where batch does not divide by accumulate * world.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        context: int,
        batch: int,
        accumulate: int,
        steps: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ):
        self.rows = rows(batch, accumulate, world)
        if seed < 0:
            raise ValueError(f"seed={seed}: needs a whole number of at least 0")
        if len(tokens) < context + 1:
            raise ValueError(f"model.context={context}: {len(tokens)} tokens found, {context + 1} needed")
        self.tokens, self.context, self.batch, self.accumulate, self.steps = tokens, context, batch, accumulate, steps
        self.seed, self.rank, self.world = seed, rank, world
        # as many as fit behind the largest phase: every epoch has the same number, so that a step's epoch is a division
        self.windows_per_epoch = max(1, (len(tokens) - context) // context)
        self._epoch = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __getitem__(self, item: int) -> Tensor:
        return gather(self.tokens, self.starts(item), self.context)

    def seeded(self, seed: int) -> "Windows":
        """The same text and sizes in the order of another seed."""
        return self._with(seed=seed)

    def share(self, rank: int, world: int) -> "Windows":
        """What `rank` of `world` sees of the same run. ValueError where the batch has no equal shares."""
        return self._with(rank=rank, world=world)

    def first_step(self) -> Tensor:
        """All windows of step 1, int64 (batch, context + 1), whichever the number of micro-batches and ranks."""
        return torch.cat([part for item in range(self.accumulate) for part in self.of_all_ranks(item)])

    def of_all_ranks(self, item: int) -> list[Tensor]:
        """Micro-batch `item` of each rank, which together are that of one device."""
        return [gather(self.tokens, self._starts(item, rank), self.context) for rank in range(self.world)]

    def _with(self, **other: int) -> "Windows":
        sizes = {"batch": self.batch, "accumulate": self.accumulate, "steps": self.steps, "context": self.context}
        return Windows(self.tokens, **sizes | {"seed": self.seed, "rank": self.rank, "world": self.world} | other)

    def starts(self, item: int) -> np.ndarray:
        """Where the windows of micro-batch `item` start in the tokens. Raises IndexError outside the run."""
        if not 0 <= item < len(self):
            raise IndexError(f"micro-batch {item} of {len(self)}")
        return self._starts(item, self.rank)

    def _starts(self, item: int, rank: int) -> np.ndarray:
        first = (item * self.world + rank) * self.rows
        epochs, slots = np.divmod(np.arange(first, first + self.rows), self.windows_per_epoch)
        return np.array([self._order(epoch)[slot] for epoch, slot in zip(epochs.tolist(), slots.tolist(), strict=True)])

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            span = self.windows_per_epoch * self.context
            phase = rng.integers(min(self.context, len(self.tokens) - span))
            self._epoch = (epoch, phase + self.context * rng.permutation(self.windows_per_epoch))
        return self._epoch[1]


def rows(batch: int, accumulate: int, world: int) -> int:
    """Windows of a micro-batch on each of `world` devices. Raises ValueError where `batch` has no equal shares."""
    if batch < 1 or accumulate < 1:
        raise ValueError(f"batch={batch} accumulate={accumulate}: both need to be at least 1")
    if batch % (accumulate * world):
        raise ValueError(
            f"batch={batch}: needs a multiple of accumulate * devices = {accumulate} * {world}; "
            f"use batch={-(-batch // (accumulate * world)) * accumulate * world}, or another accumulate"
        )
    return batch // (accumulate * world)


def gather(tokens: np.ndarray, starts: np.ndarray, context: int) -> Tensor:
    """int64 (len(starts), context + 1): the ids from each start on."""
    return torch.from_numpy(np.asarray(tokens)[starts[:, None] + np.arange(context + 1)].astype(np.int64))


def validation_windows(tokens: np.ndarray, context: int, count: int) -> Tensor:
    """int64 (up to count, context + 1): evenly spaced windows, no token predicted twice, the same ones at every call.

    Raises ValueError for fewer than context + 1 tokens.
    """
    there = (len(tokens) - 1) // context
    if there < 1:
        raise ValueError(f"model.context={context}: {len(tokens)} validation tokens found, {context + 1} needed")
    taken = min(count, there)
    return gather(tokens, np.arange(taken) * there // taken * context, context)


def _own_generator() -> torch.Generator:
    """A DataLoader draws a seed each time it is iterated: from this, so that validation does not move dropout's draws."""
    return torch.Generator().manual_seed(0)


class _From(Sampler[int]):
    """start, start + 1, ... up to length, of which it has the length, so that a resumed run counts as the whole one."""

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.length))


def _unsignalled(worker: int) -> None:
    """A signal to the whole group is the training process's to answer: its workers end with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def train_loader(windows: Windows, *, start: int = 0, workers: int = 0, pin_memory: bool = False) -> DataLoader[Tensor]:
    """The micro-batches of a run from item `start` (= steps done * accumulate) on, in order."""
    return DataLoader(
        windows,
        batch_size=None,
        sampler=_From(start, len(windows)),
        num_workers=workers,
        pin_memory=pin_memory,
        generator=_own_generator(),
        worker_init_fn=_unsignalled,
    )


def val_loader(windows: Tensor, *, batch: int, workers: int = 0, pin_memory: bool = False) -> DataLoader[Tensor]:
    """The validation windows, `batch` at a time; the last may be fewer, so weigh each batch by its rows."""
    batches: Sequence[Tensor] = torch.split(windows, batch)
    return DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=pin_memory, generator=_own_generator())  # type: ignore[arg-type]
