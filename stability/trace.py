"""One forward and backward pass looked at from within: the stream, its branches, its gradient and attention, by layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.attention import Attention
from model.block import Branch
from model.coefficient import times
from model.execution import eagerly
from model.inventory import Entry, inventory
from model.loss import next_token_loss
from model.transformer import Transformer
from stability.gradients import GradientNorms
from stability.metrics import attention_entropy, attention_logits, effective_gain, mean_square, token_cosine, wide
from stability.records import Array

BRANCHES = ("attention", "ffn")
Look = Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class Trace:
    """The step that a training would take, before it is taken. N blocks; float64.

    At N + 1 places, the stream after the embedding (0) and after each block (of a stream of several tensors, mean squares and
    cosines are means over them, and the gradient's norm is of all of them together):
        stream_rms: sqrt(mean(x^2)) over batch, time and features.
        stream_grad_norm: L2 norm of the gradient of the loss with respect to the stream.
        token_cosine: mean cosine between different tokens of a sequence (`stability/metrics.py`).
    For each of N blocks:
        attention_rms, ffn_rms: RMS of r beta N_out(F(u)), what the branch adds, r a ramp (SiameseNorm adds it damped to one of
        its streams).
        attention_skip_rms, ffn_skip_rms: RMS of alpha x, what it is added to.
        logit_max: largest attention logit among all keys that a query sees, as the softmax has it: with a cap, after it.
        attention_entropy: mean over heads and queries, in nats.
        gain_min, gain_mean, gain_max: over all norms of the block, QK-norms included, of the effective gain (1 + w for the
        zero-centred one); nan where there is none.
    loss: nats per token. grad_norm: as a run's record of step 1 has it (`GradientNorms.table`).
    """

    loss: float
    stream_rms: Array
    stream_grad_norm: Array
    token_cosine: Array
    attention_rms: Array
    ffn_rms: Array
    attention_skip_rms: Array
    ffn_skip_rms: Array
    logit_max: Array
    attention_entropy: Array
    gain_min: Array
    gain_mean: Array
    gain_max: Array
    grad_norm: dict[str, Any]

    @property
    def attention_ratio(self) -> Array:
        """RMS of what attention adds over that of what it is added to."""
        return _ratio(self.attention_rms, self.attention_skip_rms)

    @property
    def ffn_ratio(self) -> Array:
        """The same for the feed-forward."""
        return _ratio(self.ffn_rms, self.ffn_skip_rms)


def trace(model: Transformer, windows: Sequence[Tensor], *, autocast: bool = False) -> Trace:
    """Trace one step's `windows`, its micro-batches of int64 (rows, context + 1), in training mode and eagerly.

    `autocast` is training's bf16-mixed. Leaves gradients, buffers, generators and training mode as it finds them; holds
    no activation beyond what autograd does, and sends nothing to the host before the end.
    """
    seen, entries, share = _Seen(len(windows)), inventory(model), 1 / len(windows)
    gradients = GradientNorms(entries, model.depth)
    device, losses = entries[0].parameter.device.type, []
    with as_found(model), _hooked(model, seen, device):
        for batch in windows:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = next_token_loss(model, batch) * share
            seen.looking = False  # at what is computed again in the backward pass
            torch.autograd.backward(loss)
            seen.looking = True
            losses.append(wide(loss.detach()))
        norms = gradients.measure()
    scalars = seen.values | _gains(entries, model.depth) | {("loss", 0): torch.stack(losses).sum()}
    found = dict(zip(scalars, torch.stack([wide(value) for value in scalars.values()]).cpu().tolist(), strict=True))

    by_place: dict[str, list[float]] = {}
    for name, place in sorted(found):
        by_place.setdefault(name, []).append(found[name, place])
    roots = {f"{branch}{part}_rms" for branch in BRANCHES for part in ("", "_skip")} | {
        "stream_rms",
        "stream_grad_norm",
    }
    (total,) = by_place.pop("loss")
    arrays = {name: np.array(values) for name, values in by_place.items()}
    return Trace(
        loss=total,
        grad_norm=gradients.table(norms.cpu().numpy()),
        **{name: np.sqrt(array) if name in roots else array for name, array in arrays.items()},
    )


class _Seen:
    """(name, place) -> a scalar on the device: the mean over the micro-batches, or their sum, or their largest. They have
    as many tokens each, so that a mean of means is the mean."""

    def __init__(self, batches: int) -> None:
        self.batches, self.looking = batches, True
        self.values: dict[tuple[str, int], Tensor] = {}

    def mean(self, name: str, place: int, value: Tensor) -> None:
        self.sum(name, place, value / self.batches)

    def sum(self, name: str, place: int, value: Tensor) -> None:
        before = self.values.get((name, place))
        self.values[name, place] = value if before is None else before + value

    def largest(self, name: str, place: int, value: Tensor) -> None:
        before = self.values.get((name, place))
        self.values[name, place] = value if before is None else torch.maximum(before, value)


@contextmanager
def as_found(model: Transformer, *, training: bool = True) -> Iterator[None]:
    """What is done within in training (or evaluation) mode and without gradients at the start moves nothing: afterwards
    gradients, buffers, generators and modes are where they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    devices = [parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"][:1]
    try:
        with torch.random.fork_rng(devices), eagerly(model):
            model.train(training)
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _hooked(model: Transformer, seen: _Seen, device: str) -> Iterator[None]:
    """Hooks on the modules that every placement has: a place without a norm is an Identity, of the same name."""
    with ExitStack() as hooks:

        def quietly(look: Look, x: Any) -> None:
            """Looking is no part of the step: no graph, and not in the step's reduced precision."""
            if seen.looking:
                with torch.no_grad(), torch.autocast(device, enabled=False):
                    look(x)

        def after(module: nn.Module, look: Look) -> None:
            hooks.callback(module.register_forward_hook(lambda _, __, output: quietly(look, output)).remove)

        tensors = model.stream.tensors

        def left(layer: int, state: Any) -> None:
            _stream(seen, layer, tensors, model.of_stream(state))

        after(model.embed, partial(_stream, seen, 0, lambda x: (x,)))
        for layer, block in enumerate(model.blocks, start=1):
            after(block, partial(left, layer))
            for name in BRANCHES:
                branch = block.get_submodule(name)
                assert isinstance(branch, Branch)
                stream, ms = branch.stream, partial(_mean_square, seen, layer)
                after(
                    stream.norm_both, partial(_of_state, tensors, partial(ms, f"{name}_skip_rms", stream, ("alpha",)))
                )
                after(stream.norm_out, partial(ms, f"{name}_rms", stream, ("beta", "ramp")))
                if isinstance(branch.function, Attention):
                    _on_attention(branch.function, partial(_attention, seen, layer, branch.function), after)
        yield


def _of_state(tensors: Callable[[Any], tuple[Tensor, ...]], look: Callable[..., None], state: Any) -> None:
    look(*tensors(state))


def _stream(seen: _Seen, place: int, tensors: Callable[[Any], tuple[Tensor, ...]], state: Any) -> None:
    def reduce(gradient: Tensor) -> None:
        seen.sum("stream_grad_norm", place, wide(gradient).square().sum())

    parts = tensors(state)
    for x in parts:
        seen.mean("stream_rms", place, mean_square(x) / len(parts))
        seen.mean("token_cosine", place, token_cosine(x) / len(parts))
    for x in (state,) if isinstance(state, Tensor) else parts:  # the parts of one tensor are on no path to the loss
        x.register_hook(reduce)  # type: ignore[no-untyped-call]


def _mean_square(seen: _Seen, layer: int, name: str, stream: nn.Module, letters: Sequence[str], *state: Tensor) -> None:
    """Of tensors times coefficients, as they are within the pass: before it a rank may have a part of one."""
    for x in state:
        for letter in letters:
            x = times(getattr(stream, letter), x)
        seen.mean(name, layer, mean_square(x) / len(state))


def _on_attention(
    attention: Attention, look: Callable[[Tensor, Tensor], None], after: Callable[[nn.Module, Look], None]
) -> None:
    """q and k leave the norms of the heads, k second; `Attention.compared` makes of them what the attention compares."""
    held: list[Tensor] = []

    def with_keys(k: Tensor) -> None:
        look(held.pop(), k)

    after(attention.head_norm_q, held.append)
    after(attention.head_norm_k, with_keys)


def _attention(seen: _Seen, layer: int, attention: Attention, q: Tensor, k: Tensor) -> None:
    logits = attention_logits(*attention.compared(q, k), scale=attention.scale, cap=attention.logit_cap)
    seen.largest("logit_max", layer, logits.max())
    seen.mean("attention_entropy", layer, attention_entropy(logits))


def _gains(entries: Sequence[Entry], depth: int) -> dict[tuple[str, int], Tensor]:
    scalars: dict[tuple[str, int], Tensor] = {}
    of_layer: dict[int, list[Tensor]] = {layer: [] for layer in range(1, depth + 1)}
    for entry in entries:
        if entry.kind == "norm" and entry.layer:
            of_layer[entry.layer].append(effective_gain(entry.name, entry.parameter.detach()).flatten())
    for layer, gains in of_layer.items():
        one = wide(torch.cat(gains) if gains else entries[0].parameter.new_full((1,), torch.nan))
        scalars |= {("gain_min", layer): one.min(), ("gain_mean", layer): one.mean(), ("gain_max", layer): one.max()}
    return scalars


def _ratio(added: Array, skip: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return added / skip
