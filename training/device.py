"""What the run runs on: device, precision, threads, and the record of all that in `environment.json`."""

import os
import platform
import secrets
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal

import torch

from data.tokens import Tokens
from model.norm import Norm
from model.transformer import Transformer

PACKAGES = ("torch", "lightning", "hydra-core", "datasets", "tokenizers", "wandb", "numpy")
LightningPrecision = Literal["32-true", "bf16-mixed", "64-true"]


def accelerator() -> Literal["cuda", "mps", "cpu"]:
    """The best of what is there."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def name(device: str) -> str:
    """As the vendor has it on CUDA."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def precision(asked: str, device: str) -> LightningPrecision:
    """auto: bf16-mixed on a CUDA device with bf16 matrix units (compute capability 8.0 and up), float32 elsewhere."""
    if asked == "auto":
        native = device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        return "bf16-mixed" if native else "32-true"
    if asked == "fp64" and device == "mps":
        raise ValueError("precision=fp64 does not exist on MPS: use precision=fp32")
    known: dict[str, LightningPrecision] = {"fp32": "32-true", "bf16-mixed": "bf16-mixed", "fp64": "64-true"}
    return known[asked]


def prepare(plain: dict[str, Any], asked: int | None, *, local: int) -> Literal["cuda", "mps", "cpu"]:
    """The device of this process, the `local`th of the run on this machine, chosen and checked; its threads set, as `asked` or by
    the rule. ValueError, one line, for what this machine lacks."""
    device, devices = accelerator(), plain["devices"]
    precision(plain["precision"], device)
    check_devices(devices, device)
    if device == "cuda":
        torch.cuda.set_device(local)
    flush_denormals()
    windows = plain["batch"] // (plain["accumulate"] * devices * plain["num_nodes"])
    sizes = {"tokens": windows * plain["model"]["context"], "dim": plain["model"]["dim"]}
    torch.set_num_threads(threads(asked, **sizes, processes=devices))
    return device


def check_devices(devices: int, device: str) -> None:
    """ValueError, one line, for what this machine lacks. CPU processes may be more than its cores: slower, and right, so that a
    run of eight devices can be tried, or gone on with, anywhere."""
    if device == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(f"devices={devices}: {torch.cuda.device_count()} GPUs found")
    if device == "mps" and devices > 1:
        raise ValueError(f"devices={devices}: MPS is one device")


def check_compiler(device: str) -> None:
    """ValueError where `torch.compile` lacks what it writes code for: Triton on CUDA, a C++ compiler on a CPU."""
    if device == "cuda" and find_spec("triton") is None:
        raise ValueError("compile=true needs Triton on a GPU: pip install triton, or leave it out")
    names = [os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "g++", "clang++", "c++", "cl"]
    if device != "cuda" and not any(which(name.split()[0]) for name in names if name):
        raise ValueError(
            "compile=true needs a C++ compiler on a CPU, and finds none: install g++ or clang, or leave it out"
        )


def flush_denormals() -> None:
    """Numbers below float32's smallest normal one, 1.2e-38, count as 0 on a CPU. Where a gradient vanishes Adam's second
    moments are such numbers, which cost a CPU several times the time of others and are far below Adam's eps."""
    torch.set_flush_denormal(True)


def threads(asked: int | None, *, tokens: int, dim: int, processes: int = 1) -> int:
    """CPU threads: as asked, else one for each 2^14 elements of the stream in a micro-batch (`tokens` * `dim`), at least
    one and at most one a core that the `processes` of this machine share.

    Below that size handing work over costs more than it saves. A rule of shape and cores, never measured at run time: bit
    equality of two runs is promised at equal threads (which `accumulate` can change, through the size of a micro-batch).
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, min(cores // processes, tokens * dim // 2**14))


def reset_peak_memory(device: str) -> None:
    """Let the peak begin anew, after another job of the process or a probe. Where that is not possible (off Linux, or in a
    sandbox that forbids it) it stays the process's, with all that these took."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_memory(device: str) -> int:
    """Bytes: the device allocator's peak on CUDA, the process's resident peak elsewhere, in which what an earlier job or a
    probe freed can stand on: the C library keeps some of it for later."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux alone has it; getrusage there counts the peak of the process that started this one too
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def kernels(device: str, norm: Norm | None) -> dict[str, str]:
    """What works out the run's norms, and attention, there where nothing is compiled: speeds of two norms, or of two machines,
    compare only with that in view. Of attention the backends that are allowed: torch takes the first that can do the shape."""
    names = ("flash", "mem_efficient", "cudnn", "math") if device == "cuda" else ("flash", "math")
    backends = ", ".join(name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())
    return {
        "norm": norm.kernel(torch.device(device)) if norm else "none",
        "attention": "scaled_dot_product_attention" + (f": {backends}" if device != "mps" else ""),
    }


def environment(device: str, tokens: Tokens, model: Transformer) -> dict[str, Any]:
    """What a run's numbers depend on beside its config, and `run`, which its checkpoints are known by."""
    return {
        "run": secrets.token_hex(8),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": name(device),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "execution": asdict(model.execution),
        "kernels": kernels(device, next((part for part in model.modules() if isinstance(part, Norm)), None)),
        "git": _revision(),
        "corpus": {
            "name": tokens.name,
            "hash": tokens.hash,
            "tokenizer": tokens.tokenizer.name,
            "vocab": tokens.vocab,
            "train_tokens": len(tokens.train),
            "val_tokens": len(tokens.val),
            "unigram_entropy": tokens.unigram_entropy,
            "floor": tokens.floor,
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of this checkout, with `+` where files differ from it; None outside git."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
