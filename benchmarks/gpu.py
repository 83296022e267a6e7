"""What a GPU makes of it: the share of its arithmetic that training uses, eager, compiled and as CUDA graphs."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from benchmarks.overhead import TEXT, against_bare
from benchmarks.ratios import Measurement, Row, Target, Work, alternate, neighbours
from benchmarks.step import ALONE, run
from model.norm import LayerNorm, Norm, RMSNorm
from training import device as machine

MODES = {"eager": (), "compiled": ("compile=true",), "CUDA graphs": ("trainer.cuda_graphs=true",)}
# GPT-2's vocabulary, learnt from the text that is at hand
GPT2 = ("model=gpt2", "tokenizer=bpe", "tokenizer.vocab=50257", "batch=16")
Run = tuple[str, ...]


def measurements(rounds: int, quick: bool) -> list[Measurement]:
    """The longest come last, since what has not begun in time is left out. Each run has a start-up of its own, so that of
    deep networks there are fewer than `rounds`."""
    tiny = (*TEXT, "model.dim=16", "model.heads=2", "model.context=8")
    deep = {depth: ("model=deep", f"model.depth={depth}", *TEXT) for depth in (12, 100, 1000)}
    sizes: dict[str, tuple[Run, int, int]] = {  # words, steps, rounds
        "12 layers of width 64": (deep[12], 60, rounds),
        "GPT-2, 124M parameters": (GPT2, 30, min(rounds, 3)),
        "100 layers of width 64": (deep[100], 30, min(rounds, 3)),
        "1,000 layers of width 64": (deep[1000], 11, 1),
    }
    if quick:
        sizes = {"2 layers of width 16": (("model.depth=2", *tiny), 3, 1)}
    small: dict[str, Run] = {"the default size": (), "model=small": ("model=small", "batch=32")}
    wide = (64, 16) if quick else (16384, 1024)
    return [
        *(
            Measurement(
                Row("overhead", f"tokens per second, {name}", "bare loop", 0, Target(">=", 0.97)),
                partial(against_bare, (*words, *(tiny if quick else ())), rounds=2 * rounds),
            )
            for name, words in small.items()
        ),
        *(
            Measurement(
                Row("norms", f"RMSNorm, {direction}, {wide[0]} x {wide[1]}, {named}", "LayerNorm", 0),
                partial(norm_ratios, way, *wide, dtype, rounds=3 * rounds),
            )
            for direction, way in (("forward", forward), ("backward", backward))
            for dtype, named in ((torch.float32, "float32"), (torch.bfloat16, "bf16"))
        ),
        *(
            one
            for name, (words, steps, count) in sizes.items()
            for one in _of_size(name, (*words, f"steps={steps}"), count, mfu=words == GPT2)
        ),
    ]


def _of_size(name: str, words: Run, rounds: int, *, mfu: bool) -> list[Measurement]:
    """Tokens per second in each mode, each mode over eager, and MFU if wanted, all of the same runs."""
    speeds = [
        Measurement(
            Row("speed", f"{name}, {mode}", "", 0, unit="tokens/s"),
            partial(numbers, words, mode, "tokens_per_second", rounds=rounds),
        )
        for mode in MODES
    ]
    shares = [
        Measurement(Row("MFU", f"{name}, {mode}", "", 0), partial(numbers, words, mode, "mfu", rounds=rounds))
        for mode in (MODES if mfu else ())
    ]
    ratios = [
        Measurement(Row("speed", f"{name}, {mode}", "eager", 0), partial(over_eager, words, mode, rounds=rounds))
        for mode in MODES
        if mode != "eager"
    ]
    return [*speeds, *shares, *ratios]


@cache
def summaries(words: Run, rounds: int) -> dict[str, list[dict[str, Any]] | Exception]:
    """The summaries of runs in each mode, by turns. A mode that fails is left out from then on, and has the reason."""
    found: dict[str, list[dict[str, Any]] | Exception] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, more in MODES.items():
            so_far = found[mode]
            if isinstance(so_far, Exception):
                continue
            try:
                so_far.append(run([*words, *ALONE, "model.checkpointing=none", *more]))
            except Exception as error:
                found[mode] = error
    return found


def numbers(words: Run, mode: str, key: str, *, rounds: int) -> list[float]:
    """What the summaries of a mode say under `key`. Raises what ended the runs, and KeyError where they do not say it."""
    found = summaries(words, rounds)[mode]
    if isinstance(found, Exception):
        raise found
    return [float(summary[key]) for summary in found]


def over_eager(words: Run, mode: str, *, rounds: int) -> list[float]:
    """Tokens per second over those of eager runs."""
    first, second = (numbers(words, one, "tokens_per_second", rounds=rounds) for one in ("eager", mode))
    return [1 / ratio for ratio in neighbours(first, second)]


def norm_ratios(way: Any, rows: int, dim: int, dtype: torch.dtype, *, rounds: int) -> list[float]:
    return alternate(*(way(norm, rows, dim, dtype) for norm in (RMSNorm(dim), LayerNorm(dim))), rounds=rounds)


def forward(norm: Norm, rows: int, dim: int, dtype: torch.dtype) -> Work:
    x = torch.randn(rows, dim, device=machine.accelerator(), dtype=dtype)
    norm = norm.to(x.device)

    @torch.no_grad()
    def work() -> None:
        norm(x)

    return work


def backward(norm: Norm, rows: int, dim: int, dtype: torch.dtype) -> Work:
    """To the input and to the parameters, of one forward pass."""
    x = torch.randn(rows, dim, device=machine.accelerator(), dtype=dtype, requires_grad=True)
    y = norm.to(x.device)(x)
    wanted: Sequence[torch.Tensor] = [x, *norm.parameters()]
    weight = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, wanted, weight, retain_graph=True)
