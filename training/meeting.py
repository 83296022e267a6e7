"""Where the ranks of a run meet before its first step: a store of torch's, in which rank 0 tells where to begin, and each of the
others whether it is there."""

import atexit
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.execution import Execution

TOLD = "told"  # where to begin, or nothing
HERE = "here"  # how many others have heard
LEFT = "left"  # how many have not, and end
GONE = "gone"  # which has ended
GATHERING = 300.0  # seconds that rank 0 waits for all to come
REACHING = 1800.0  # that another has to find rank 0, which may still be verifying a checkpoint
PARTING = 10.0  # that one which ends waits for what rank 0 says


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


class Meeting:
    """Of `rank` of `world` processes that `by` has started (`launch.started_by`). Each method but `serve` waits for rank 0 to
    be there, and raises torch's DistError where it is not."""

    def __init__(self, rank: int, world: int, by: str) -> None:
        self.rank, self.world, self.by = rank, world, by
        self._server: Any = None

    def serve(self) -> int:
        """The port at which the others find rank 0, where nobody else has started them."""
        self._reached()
        return int(self._server.port)

    def tell(self, start: Start) -> None:
        self._reached().set(TOLD, start.dumped())

    def hear(self, *checks: Callable[[], None]) -> Start | None:
        """What rank 0 tells the others; None where there is nothing to do. `checks` are called while it is awaited."""
        store = self._reached()
        _until(lambda: store.check([TOLD]), *checks)
        told = store.get(TOLD)
        store.add(HERE, 1)
        return Start.loaded(told) if told else None

    def gather(self, *checks: Callable[[], None]) -> Any:
        """Wait until all are there; the store, for their process group. Raises RankLost where one has ended, or does not come."""
        store, began = self._reached(), time.monotonic()

        def hopeful() -> None:
            if store.check([GONE]):
                raise RankLost(f"rank {store.get(GONE).decode()} of {self.world} has ended before its first step")
            if time.monotonic() > began + GATHERING:
                missing = self.world - 1 - store.add(HERE, 0)
                raise RankLost(f"{missing} of {self.world} ranks have not come within {GATHERING / 60:.0f} minutes")

        _until(lambda: store.add(HERE, 0) == self.world - 1, *checks, hopeful)
        return store

    def dismiss(self) -> None:
        """The others are told that there is nothing to do. Rank 0 may be where they meet, and ends last, when it has said why."""
        store = self._reached()

        def all_gone() -> bool:
            return bool(store.add(HERE, 0) + store.add(LEFT, 0) >= self.world - 1)

        def wait() -> None:
            until = time.monotonic() + 3 * PARTING
            try:
                while not all_gone() and time.monotonic() < until:
                    time.sleep(0.02)
            except distributed().DistError:
                pass

        store.set(TOLD, "")
        atexit.register(wait)

    def part(self, say: Callable[[], None]) -> None:
        """Another rank ends before it has heard anything: rank 0 is not to wait for it. Where rank 0 has nothing to do either,
        for the same reason as a rule, it speaks for all; else this one has to `say` why."""
        store, until = self._reached(PARTING), time.monotonic() + PARTING
        store.add(LEFT, 1)
        while not store.check([TOLD]) and time.monotonic() < until:
            time.sleep(0.02)
        if not store.check([TOLD]) or store.get(TOLD):
            say()
        store.set(GONE, str(self.rank))

    def _reached(self, seconds: float = REACHING) -> Any:
        dist = distributed()
        if self._server is None:
            address, port = "127.0.0.1", 0  # the system picks a free one
            if self.by == "srun":
                from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

                slurm = SLURMEnvironment(auto_requeue=False)
                address, port = slurm.main_address, slurm.main_port
            elif self.by:
                address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            agents = self.by == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._server = dist.TCPStore(
                address,
                port,
                is_master=self.rank == 0 and not agents,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of torchrun, whose store outlives the ranks
        return dist.PrefixStore(f"normlab/{attempt}", self._server)


def distributed() -> Any:
    """torch's, loaded when the ranks meet; Any, since most of it is exported from C++."""
    import torch.distributed

    return torch.distributed


def _until(true: Callable[[], bool], *checks: Callable[[], None]) -> None:
    while not true():
        for check in checks:
            check()
        time.sleep(0.02)
