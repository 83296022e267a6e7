"""The processes of a run, one a device: which of them this is, what they tell each other, how all end.

Rank 0 has the directory, the voice and the decisions. It starts the others once all is checked, unless torchrun or Slurm
has; they go through `train.py` like it, are told where to begin, keep their numbers and write nothing. Without torch until
they meet, so that a bad command line is answered at once.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from signal import Signals as Number
from typing import TYPE_CHECKING, Any

from stability.verdict import FAILED
from training.launch import Others, rank, started_by
from training.meeting import Meeting, RankLost, Start, distributed
from training.signals import STOPS, Signals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

GRACE = 10.0  # seconds that a collective has to raise when a rank is lost; under NCCL it can wait for ever
GLOO = re.compile(r"(Gloo \w+ failed with )?\[\S*\bgloo/\S+:\d+\] ")  # how an error of its own begins


class Ranks:
    """`world` processes, `rank` of them this one, `local` its number on this machine. As a context it ends with the run:
    ranks that rank 0 has started end with it, those that wait for it are let go, and why another has failed is said.

    One device is a run of its own, whoever has started the process; but torchrun starts processes of one run alone.

    Raises ValueError, one line, where those that were started are not those asked for.
    """

    def __init__(self, devices: int, num_nodes: int) -> None:
        self.world, by = devices * num_nodes, started_by()
        self.by = by if self.world > 1 else ""
        there = int(os.environ["SLURM_STEP_NUM_TASKS" if by == "srun" else "WORLD_SIZE"]) if by else self.world
        self.rank = rank() if self.by else 0
        self.local = int(os.environ["SLURM_LOCALID" if by == "srun" else "LOCAL_RANK"]) if self.by else 0
        if (there != self.world and (self.by or by == "torchrun")) or self.local >= devices:
            raise ValueError(
                f"devices={devices} num_nodes={num_nodes}: {by} has started {there} processes; devices is those of one machine"
            )
        if num_nodes > 1 and not self.by:
            raise ValueError(f"num_nodes={num_nodes}: torchrun or srun starts the same command on each machine")
        if self.by == "srun" and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise ValueError(f"devices={devices}: say --ntasks-per-node={devices} to sbatch or srun")
        self._meeting = Meeting(self.rank, self.world, self.by)
        self._others = Others(self.world, self._unless_apart)
        self._heard = self._in_order = False
        self._met, self._apart = threading.Event(), threading.Event()  # all are there; none waits for another any more

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def together(self) -> bool:
        """Whether a message to all would arrive, as far as is known."""
        return not self._apart.is_set()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._apart.set()
        try:
            if not self.first and not self._heard:
                self._meeting.part(lambda: self._say(error))
            elif not self.first and not (self._met.is_set() and kind is RankLost):
                self._say(error)
            elif self.first and self.by and not self._met.is_set():
                self._meeting.dismiss()
        except distributed().DistError:
            self._say(error)
        self._others.end(GRACE if self._in_order and kind is None else 0)

    def start(self, command: Callable[[], list[str]]) -> None:
        """The other ranks, by `command`, where this is the first and nobody has."""
        if self.world == 1 or self.by:
            return
        words, mine = command(), {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(self.world)}
        os.environ |= mine | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._meeting.serve())}
        self._others.start(words)

    def meet(self, start: Start, signals: Signals, device: str) -> Start | None:
        """Rank 0's `start`, once all are there; None where it has nothing to do.

        Raises Interrupted for a signal meanwhile, RankLost for a rank that ended or does not come.
        """
        if self.world == 1:
            return start
        import torch

        dist, place = distributed(), torch.device("cuda", self.local) if device == "cuda" else None
        try:
            if self.first:
                self._meeting.tell(start)
            else:
                told = self._meeting.hear(signals.check)
                self._heard = True
                if told is None:
                    return None
                start = told
            store = self._meeting.gather(signals.check, self._all_alive)
            self._met.set()
            dist.init_process_group(
                "nccl" if place else "gloo",
                store=dist.PrefixStore("group", store),
                rank=self.rank,
                world_size=self.world,
                device_id=place,
            )
        except RankLost:
            raise
        except Exception as error:
            if lost := self.lost(error):
                raise RankLost(f"{lost} before the first step") from None
            raise
        return start

    def leave(self) -> None:
        """Training is over on all ranks, at the same time on each; from here on none waits for another."""
        if self.world > 1:
            dist = distributed()
            dist.barrier()
            self._apart.set()
            dist.destroy_process_group()
            self._in_order = True

    def seed(self, seed: int, done: int = 0) -> int:
        """Of this rank's generators after `done` steps: at the start the run's for rank 0, another for each other."""
        import numpy as np

        return int(np.random.SeedSequence((seed, self.rank, done)).generate_state(1)[0]) if self.rank or done else seed

    def mean(self, values: "Tensor") -> "Tensor":
        """Over the ranks, on the device, and the same bits on each."""
        if self.world > 1:
            values = values / self.world
            distributed().all_reduce(values)
        return values

    def largest(self, values: "Tensor") -> "Tensor":
        """Of each over the ranks, on the device."""
        if self.world > 1:
            dist = distributed()
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def agree(self, loss: "Tensor", total: "Tensor", received: int | None) -> tuple["Tensor", "Tensor", "Tensor"]:
        """(The loss, the gradient's total norm, (3,) which of STOPS some rank has received), the same on each; one message, and
        no rank waits for its device. Nothing of the third with one rank, which knows it."""
        import torch

        if self.world == 1:
            return loss, total, loss.new_empty(0)
        row = torch.cat((loss.reshape(1), total.reshape(1), loss.new_zeros(len(STOPS))))
        if received:
            row[2 + STOPS.index(Number(received))].fill_(1)
        loss, total, *asked = self.mean(row).unbind()
        return loss, total, torch.stack(asked)

    def average(self, parameters: Sequence["Parameter"]) -> None:
        """The gradients of parameters that nobody else averages, in one message."""
        import torch

        if parameters:
            gradients = self.mean(torch.stack([_gradient(parameter) for parameter in parameters]))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def of_all(self, value: Any) -> list[Any]:
        """What each rank calls it with, on the host."""
        found = [value] * self.world
        if self.world > 1:
            distributed().all_gather_object(found, value)
        return found

    def lost(self, error: Exception) -> str | None:
        """Which rank has failed where `error` is a message that did not come; None for an error of this rank's own. No message
        is sent after either."""
        if self.world == 1:
            return None
        self._apart.set()
        gloo = type(error) is RuntimeError and GLOO.match(str(error))
        if not gloo and not isinstance(error, distributed().DistError):
            return None
        return (
            self._others.first_ended(seconds=2) or f"{'another rank' if self.first else 'rank 0 or another'} has ended"
        )

    def _unless_apart(self, ended: str) -> None:
        """Called in a thread when a rank has ended: the main thread may wait for it, and for ever."""
        self._met.wait()
        if not self._apart.wait(GRACE):
            os.write(2, f"normlab: {ended}\n".encode())
            os._exit(FAILED)

    def _all_alive(self) -> None:
        if ended := self._others.first_ended():
            raise RankLost(f"{ended} before its first step")

    def _say(self, error: BaseException | None) -> None:
        """Of another rank, whose voice is taken away: why it ends."""
        if error and not self.first:
            line = f"{error}".partition("\n")[0] or type(error).__name__
            os.write(2, f"normlab: rank {self.rank} of {self.world}: {line}\n".encode())


def _gradient(parameter: "Parameter") -> "Tensor":
    assert parameter.grad is not None
    return parameter.grad
