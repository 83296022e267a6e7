"""How the devices of a run share its work. Imports no torch, so that a bad knob is refused in a blink."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DDP:
    """Each device holds the whole network and takes an equal share of every micro-batch's windows; gradients are averaged.
    One device: nothing is shared. cuda_graphs: forward and backward of a micro-batch are recorded once and replayed, which
    takes away the time that a GPU waits for the host (`training/graphs.py`)."""

    cuda_graphs: bool = False


@dataclass(frozen=True)
class FSDP:
    """Each device holds a part of every matrix, gradient and moment, and gathers a block's as it comes to it."""
