"""Whether what autograd keeps of a step fits into memory, and how the network is run for that."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from model.execution import Execution
from model.norm import Norm
from model.transformer import Transformer
from training.device import check_compiler

SHARE = 0.5  # of the free memory: the rest is for what a step allocates in passing, and for other jobs


def execution(
    model: Transformer, *, checkpointing: str, compiled: bool, rows: int, device: str
) -> tuple[Execution, str]:
    """(How the network runs on micro-batches of `rows` windows, why in words).

    ValueError where `checkpointing` asks for what cannot be, since a norm with running statistics would move them twice, and
    where there is nothing to compile with.
    """
    if compiled:
        check_compiler(device)
        torch.compiler.reset()  # the graphs of another job of this process
    statistics = any(isinstance(module, Norm) and module.sees_future for module in model.modules())
    if checkpointing == "groups" and statistics:
        raise ValueError(
            "model.checkpointing=groups would move this norm's running statistics twice a step: use "
            "model.checkpointing=none, or another norm"
        )
    needed = len(model.blocks) * activation_bytes(model.blocks[0], model.context, model.dim) * rows
    free = free_memory(device)
    # gradients and two moments, none of which is there yet
    state = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    tight = free is not None and needed > SHARE * (free - state)
    recompute = checkpointing == "groups" or (checkpointing == "auto" and tight and not statistics)
    chosen = Execution.of(len(model.blocks), recompute=recompute, compiled=compiled)
    there = f" of {_size(free)} free" if free is not None else ""
    words = f"activations of a step take {_size(needed)}{there}: "
    words += f"kept of one block in {chosen.recompute}, the rest computed again" if recompute else "kept"
    words += f"; compiled in groups of {chosen.compiled} blocks" if compiled else ""
    return chosen, words


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def activation_bytes(block: nn.Module, context: int, dim: int) -> int:
    """What autograd keeps of one window in one block for its backward pass, its parameters apart: found by a forward pass
    of a copy in float32 on the CPU, each piece of memory counted once."""
    block = copy.deepcopy(block).float()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:  # held until the end, so that no address comes twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.random.fork_rng([]), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = block(torch.zeros(1, context, dim, requires_grad=True))
    del output
    return sum(kept.values())


def free_memory(device: str) -> int | None:
    """Bytes that a process can still have: of the GPU's, or of the machine's and of its container's; None where no one says."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device != "cpu":
        return None
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
        found += [int(limit) - int(used)] if limit.strip() != "max" else []
    except (OSError, ValueError):
        pass
    return min(found, default=None)
