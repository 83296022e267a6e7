"""The processes of a run, one a device: which of them this is, how the others are started, how all of them end.

Rank 0 has the directory, the voice and the decisions. It starts the others once all is checked, unless torchrun or Slurm
has; they go through `train.py` like it, are told where to begin, keep their numbers and write nothing. Without torch until
they meet, so that a bad command line is answered at once.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals as Number
from typing import TYPE_CHECKING, Any

from stability.verdict import DIVERGED, FAILED
from training.signals import STOPS, Signals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from model.execution import Execution

PARENT = "NORMLAB_RANK_0"  # in the environment of a rank that rank 0 has started: the number of its process
TOLD, HERE = "normlab/told", "normlab/here"
GRACE = 10.0  # seconds that a collective has to raise when a rank is lost; under NCCL it can wait for ever
ENDED_WELL = (0, DIVERGED, *(128 + number for number in STOPS))


@dataclass(frozen=True)
class Start:
    """Where all ranks begin: the run's directory and id, its checkpoint and the steps that it has done, threads a process, how
    the network is run."""

    directory: Path
    checkpoint: Path | None
    steps: int
    run: str
    threads: int
    execution: "Execution"

    def dumped(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loaded(cls, text: str | bytes) -> "Start":
        from model.execution import Execution

        known = json.loads(text)
        paths = {name: known[name] and Path(known[name]) for name in ("directory", "checkpoint")}
        return cls(**known | paths | {"execution": Execution(**known["execution"])})


class RankLost(RuntimeError):
    """Another process of the run has ended before its time."""


def started_by() -> str:
    """Who has started several processes of this run: rank 0, torchrun, srun; empty where there is one, or this is the first."""
    if PARENT in os.environ:
        return "rank 0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else ""


def rank() -> int:
    """From 0, of this process, as whoever started it says."""
    by = started_by()
    return int(os.environ["SLURM_PROCID" if by == "srun" else "RANK"]) if by else 0


class Ranks:
    """`world` processes, `rank` of them this one, `local` its number on this machine. As a context it ends with the run:
    ranks that rank 0 has started end with it, and those that wait for it are let go.

    Raises ValueError, one line, where those that were started are not those asked for.
    """

    def __init__(self, devices: int, num_nodes: int) -> None:
        self.rank, self.world, self.by = rank(), devices * num_nodes, started_by()
        self.local = int(os.environ["SLURM_LOCALID" if self.by == "srun" else "LOCAL_RANK"]) if self.by else 0
        there = (
            int(os.environ["SLURM_STEP_NUM_TASKS" if self.by == "srun" else "WORLD_SIZE"]) if self.by else self.world
        )
        if there != self.world or self.local >= devices:
            raise ValueError(
                f"devices={devices} num_nodes={num_nodes}: {self.by} has started {there} processes; devices is those of one machine"
            )
        if num_nodes > 1 and not self.by:
            raise ValueError(f"num_nodes={num_nodes}: torchrun or srun starts the same command on each machine")
        if self.by == "srun" and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise ValueError(f"devices={devices}: say --ntasks-per-node={devices} to sbatch or srun")
        self._store: Any = None  # torch's, where the ranks meet
        self._others: dict[int, subprocess.Popen[bytes]] = {}
        self._failed: list[tuple[int, int]] = []  # of these, as they ended: rank, exit code
        self._met = self._broken = self._over = False

    @property
    def first(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over, well = True, self._met and not self._broken and kind is None
        if self.first and self.by and self.world > 1 and not self._met:
            self._dismiss()
        for other in self._others.values():
            try:
                other.wait(GRACE if well else 0)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()
        if well:
            _torch_distributed().destroy_process_group()

    def start(self, command: Callable[[], list[str]]) -> None:
        """The other ranks, by `command`, where this is the first and nobody has."""
        if self.world == 1 or self.by:
            return
        mine = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(self.world)}
        os.environ |= mine | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._meeting_place().port)}
        for number in range(1, self.world):
            environment = os.environ | {PARENT: str(os.getpid()), "RANK": str(number), "LOCAL_RANK": str(number)}
            self._others[number] = subprocess.Popen(command(), env=environment, stdin=subprocess.DEVNULL)
            threading.Thread(target=self._watch, args=(number,), daemon=True).start()

    def meet(self, start: Start, signals: Signals, device: str) -> Start | None:
        """Rank 0's `start`, once all are there; None where it has nothing to do.

        Raises Interrupted for a signal meanwhile, RankLost for a rank that ended.
        """
        if self.world == 1:
            return start
        import torch

        dist = _torch_distributed()
        try:
            store = self._meeting_place()
            if self.first:
                store.set(TOLD, start.dumped())
            else:
                _until(lambda: store.check([TOLD]), signals.check)
                told = store.get(TOLD)
                store.add(HERE, 1)
                if not told:
                    return None
                start = Start.loaded(told)
            _until(lambda: store.add(HERE, 0) == self.world - 1, signals.check, self._all_alive)
        except dist.DistError as error:
            raise RankLost(f"rank 0 cannot be reached ({str(error).splitlines()[0]})") from None
        self._met = True
        place = torch.device("cuda", self.local) if device == "cuda" else None
        dist.init_process_group(
            "nccl" if place else "gloo",
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world,
            device_id=place,
        )
        return start

    def seed(self, seed: int, done: int = 0) -> int:
        """Of this rank's generators after `done` steps: at the start the run's for rank 0, another for each other."""
        import numpy as np

        return int(np.random.SeedSequence((seed, self.rank, done)).generate_state(1)[0]) if self.rank or done else seed

    def mean(self, values: "Tensor") -> "Tensor":
        """Over the ranks, on the device, and the same bits on each."""
        if self.world > 1:
            values = values / self.world
            _torch_distributed().all_reduce(values)
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
            _torch_distributed().all_gather_object(found, value)
        return found

    def lost(self, error: Exception) -> str | None:
        """Which rank has failed where `error` is a message that did not come; None for an error of this rank's own."""
        if not isinstance(error, _torch_distributed().DistError) and not re.search(r"gloo|peer", str(error)):
            return None
        self._broken = True
        until = time.monotonic() + 2  # the end of a process is not known at once
        while self._others and not self._failed and time.monotonic() < until:
            time.sleep(0.02)
        return self._obituary(*self._failed[0]) if self._failed else "another rank has ended"

    def _meeting_place(self) -> Any:
        dist = _torch_distributed()
        if self._store is None:
            if self.by == "srun":
                from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

                slurm = SLURMEnvironment(auto_requeue=False)
                os.environ |= {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": str(slurm.main_port)}
            if self.by:
                self._store = next(dist.rendezvous("env://", self.rank, self.world))[0]
            else:  # the system picks a free port
                self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store

    def _watch(self, number: int) -> None:
        code = self._others[number].wait()
        if code in ENDED_WELL:
            return
        self._failed.append((number, code))
        if self._met:
            time.sleep(GRACE)
            if not self._over:  # the main thread waits for the lost one
                os.write(2, f"normlab: {self._obituary(number, code)}\n".encode())
                os._exit(FAILED)

    def _all_alive(self) -> None:
        for number, other in self._others.items():
            if other.poll() is not None:
                raise RankLost(f"{self._obituary(number, other.returncode)} before its first step")

    def _obituary(self, number: int, code: int) -> str:
        how = f"was ended by {Number(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {number} of {self.world} {how}"

    def _dismiss(self) -> None:
        """Those that wait for rank 0 are told that there is nothing to do; it may be their meeting place."""
        dist = _torch_distributed()
        try:
            store, until = self._meeting_place(), time.monotonic() + 3 * GRACE
            store.set(TOLD, "")
            while store.add(HERE, 0) < self.world - 1 and time.monotonic() < until:
                time.sleep(0.05)
        except dist.DistError:
            pass


def follows() -> bool:
    """Whether this is another rank than the first. It says nothing, and ends with rank 0, however that ends."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(FAILED)

    if PARENT in os.environ:
        threading.Thread(target=watch, args=(int(os.environ[PARENT]),), daemon=True).start()
    if rank():
        Signals.spoken = False
    return rank() > 0


def same_command(directory: str) -> list[str]:
    """This process's own, in the run's directory, as a word of Hydra's."""
    words = sys.orig_argv[1:]
    return [
        sys.executable,
        *words,
        *([] if any(w.startswith("resume=") for w in words) else [f"hydra.run.dir={directory}"]),
    ]


def _torch_distributed() -> Any:
    """Loaded when the ranks meet; Any, since most of it is exported from C++."""
    import torch.distributed

    return torch.distributed


def _gradient(parameter: "Parameter") -> "Tensor":
    assert parameter.grad is not None
    return parameter.grad


def _until(true: Callable[[], bool], *checks: Callable[[], None]) -> None:
    while not true():
        for check in checks:
            check()
        time.sleep(0.02)
