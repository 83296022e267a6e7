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


NEED_WHOLE = {
    "sgd": "torch's fused SGD takes no part of a matrix",
    "stable_adamw": "it takes a mean over each whole tensor, and a device has a part of it",
    "muon": "it makes whole matrices orthogonal, and a device has a part of each",
}


def check_sharing(plain: dict[str, Any], axes: dict[str, str], network: "Module") -> None:
    """ValueError, one line, for what the devices of a checked config cannot share; `network` is of its choices."""
    from data.windows import rows
    from model.linear import Linear
    from model.norm import Norm

    devices, sharded = plain["devices"] * plain["num_nodes"], plain["trainer"]["_target_"].endswith(".FSDP")
    if sharded and devices == 1:
        raise ValueError(
            "trainer=fsdp parts a network among devices, and devices=1: say devices=2 or more, or trainer=ddp"
        )
    rows(plain["batch"], plain["accumulate"], devices)
    optimizer = plain["optimizer"]["_target_"].rpartition(".")[2]
    if sharded and (why := NEED_WHOLE.get(optimizer)):
        raise ValueError(f"optimizer={optimizer} with trainer=fsdp: {why}; use optimizer=adamw, or trainer=ddp")
    if sharded and plain["compile"]:
        raise ValueError("compile=true with trainer=fsdp: a compiled group of blocks cannot be gathered; leave one out")
    if sharded and plain["attention"].get("qk_clip"):
        raise ValueError(
            "attention.qk_clip with trainer=fsdp: it scales whole matrices; say attention.qk_clip=0, or trainer=ddp"
        )
    if sharded and plain["probe_every"]:
        raise ValueError(
            "probe_every with trainer=fsdp: a probe reads whole matrices; say probe_every=0, or trainer=ddp"
        )
    if devices > 1 and plain["trainer"].get("cuda_graphs"):
        raise ValueError(
            f"trainer.cuda_graphs=true records the work of one device, and devices={devices}: leave one out"
        )
    if sharded and any(module.needs_whole for module in network.modules() if isinstance(module, Linear)):
        raise ValueError(
            f"linear={axes['linear']} with trainer=fsdp: its rule is of a whole matrix, and a device has a part of each; use "
            "linear=plain, or trainer=ddp"
        )
    persistent = network.state_dict().keys()
    norms = {name: module for name, module in network.named_modules() if isinstance(module, Norm)}
    buffers = [f"{name}.{leaf}" for name, module in norms.items() for leaf, _ in module.named_buffers()]
    statistics = [name for name in buffers if name in persistent]
    if devices > 1 and statistics:
        raise ValueError(
            f"norm={axes['norm']} with devices={devices}: its running statistics ({min(statistics)}) would be of one "
            "device's share of the windows; use another norm, or devices=1"
        )
