"""Whether what autograd keeps of a step fits into memory, and how the network is run for that."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import Attention
from model.execution import Execution
from model.norm import Norm
from model.transformer import Transformer
from training.device import check_compiler, precision

SHARE = 0.5  # of the free memory: the rest is for what a step allocates in passing, and for other jobs
CGROUPS = Path("/sys/fs/cgroup")


def execution(model: Transformer, plain: dict[str, Any], *, rows: int, device: str) -> tuple[Execution, str]:
    """(How the network of a checked config runs on micro-batches of `rows` windows a device, why in words).

    ValueError where `model.checkpointing` asks for what cannot be, since a norm with running statistics would move them twice,
    and where there is nothing to compile with.
    """
    if plain["compile"]:
        if model.stream.grows:
            raise ValueError(
                "compile=true with a stream that has more tensors from block to block would compile a graph for every group "
                "of blocks: leave compile=true out"
            )
        check_compiler(device)
        torch.compiler.reset()  # the graphs of another job of this process
    asked = plain["model"]["checkpointing"]
    statistics = any(isinstance(module, Norm) and module.sees_future for module in model.modules())
    if asked == "groups" and statistics:
        raise ValueError(
            "model.checkpointing=groups would move this norm's running statistics twice a step: use "
            "model.checkpointing=none, or another norm"
        )
    sharing = plain["devices"] if device == "cpu" else 1  # the processes of a CPU share one memory
    needed, free = sharing * activations(model, plain, rows=rows, device=device), free_memory(device)
    state = sharing * state_bytes(model, plain, device)
    tight = free is not None and needed > SHARE * (free - state)
    recompute = asked == "groups" or (asked == "auto" and tight and not statistics)
    chosen = Execution.of(len(model.blocks), recompute=recompute, compiled=plain["compile"])
    there = f" of {_size(free)} free" if free is not None else ""
    words = f"activations take about {_size(needed)}, weights and optimizer {_size(state)}{there}: "
    words += f"kept of one block in {chosen.recompute}, the rest computed again" if recompute else "all are kept"
    words += f"; compiled in groups of {chosen.compiled} blocks" if plain["compile"] else ""
    return chosen, words


def state_bytes(model: Transformer, plain: dict[str, Any], device: str) -> int:
    """Of a device, what is not there yet before the first step: gradients, two moments, on a GPU the weights; of a sharded
    network this device's part."""
    wide = 2 if precision(plain["precision"], device) == "64-true" else 1
    copies = 3 if device == "cpu" else 4
    parts = plain["devices"] * plain["num_nodes"] if plain["trainer"]["_target_"].endswith(".FSDP") else 1
    return (
        wide * copies * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // parts
    )


def activations(model: Transformer, plain: dict[str, Any], *, rows: int, device: str) -> int:
    """Bytes that autograd keeps of `rows` windows in all blocks: those of the first, of one window and of two, from which what
    does not hang on their number is known apart (under bf16-mixed a copy of the weights)."""
    kind = precision(plain["precision"], device)
    block = copy.deepcopy(model.blocks[0]).to(torch.float64 if kind == "64-true" else torch.float32)
    for module in block.modules():
        if isinstance(module, Attention) and device != "cpu" and not module.logit_cap:
            module.dropout = 0.0  # a CPU's attention keeps all scores where it drops some, a GPU's does not

    def pass_through(x: Tensor) -> Any:
        return block(model.enter(x))

    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16-mixed"):
        one, two = (_kept(pass_through, block, (count, model.context, model.dim)) for count in (1, 2))
    return len(model.blocks) * (one + (two - one) * (rows - 1))


def _kept(run: Callable[[Tensor], Any], block: nn.Module, shape: tuple[int, int, int]) -> int:
    """Bytes that autograd keeps of a forward pass on the CPU, parameters apart, each piece of memory counted once."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:  # held until the end, so that no address comes twice
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    dtype = next(block.parameters()).dtype
    with torch.random.fork_rng([]), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = run(torch.zeros(shape, dtype=dtype, requires_grad=True))
    del output
    return sum(kept.values())


def free_memory(device: str) -> int | None:
    """Bytes that this process can still have: of the GPU's, or of the machine's and of the control groups that it is in; None
    where no one says."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if device != "cpu":
        return None
    lines = _numbers(Path("/proc/meminfo"), unit=1024)
    found = [lines["MemAvailable"]] if "MemAvailable" in lines else []
    try:
        inside = Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("::")[2].strip()
    except OSError:
        inside = ""
    here = CGROUPS / inside.lstrip("/")
    for group in (here, *here.parents[: len(here.parts) - len(CGROUPS.parts)]):
        try:
            limit, used = (
                (group / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current")
            )
        except OSError:
            continue
        if limit != "max":  # what files have been read into counts as used, and is given back when it is wanted
            found.append(int(limit) - int(used) + _numbers(group / "memory.stat").get("inactive_file", 0))
    return min(found, default=None)


def _numbers(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Of a file of the kernel with a name and a number a line; empty where it is not there."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): unit * int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
