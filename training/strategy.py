"""How the devices of a run share its work. Imports no torch, so that a bad knob is refused in a blink."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass(frozen=True)
class DDP:
    """Each device holds the whole network and takes an equal share of every micro-batch's windows; gradients are averaged.
    One device: nothing is shared. cuda_graphs: forward and backward of a micro-batch are recorded once and replayed, which
    takes away the time that a GPU waits for the host (`training/graphs.py`)."""

    cuda_graphs: bool = False


@dataclass(frozen=True)
class FSDP:
    """Each device holds a part of every matrix, gradient and moment, and gathers a block's as it comes to it."""


def check_sharing(plain: dict[str, Any], axes: dict[str, str], network: "Module") -> None:
    """ValueError, one line, for what the devices of a checked config cannot share; `network` is of its choices."""
    from data.windows import rows
    from model.coefficient import Ramped

    devices, sharded = plain["devices"] * plain["num_nodes"], plain["trainer"]["_target_"].endswith(".FSDP")
    if sharded and devices == 1:
        raise ValueError(
            "trainer=fsdp parts a network among devices, and devices=1: say devices=2 or more, or trainer=ddp"
        )
    rows(plain["batch"], plain["accumulate"], devices)
    if sharded and plain["optimizer"]["_target_"].endswith(".sgd"):
        raise ValueError(
            "optimizer=sgd with trainer=fsdp: torch's fused SGD takes no part of a matrix; use optimizer=adamw, or trainer=ddp"
        )
    if sharded and plain["compile"]:
        raise ValueError("compile=true with trainer=fsdp: a compiled group of blocks cannot be gathered; leave one out")
    if sharded and plain["probe_every"]:
        raise ValueError(
            "probe_every with trainer=fsdp: a probe reads whole matrices; say probe_every=0, or trainer=ddp"
        )
    if devices > 1 and plain["trainer"].get("cuda_graphs"):
        raise ValueError(
            f"trainer.cuda_graphs=true records the work of one device, and devices={devices}: leave one out"
        )
    statistics = network.state_dict().keys() - dict(network.named_parameters(remove_duplicate=False)).keys()
    # of the steps alone, so that it is the same on all
    statistics -= {f"{name}.value" for name, module in network.named_modules() if isinstance(module, Ramped)}
    if devices > 1 and statistics:
        raise ValueError(
            f"norm={axes['norm']} with devices={devices}: its running statistics ({min(statistics)}) would be of one "
            "device's share of the windows; use another norm, or devices=1"
        )
