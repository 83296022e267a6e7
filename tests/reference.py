"""A decoder in plain float64 arithmetic, from a network's parameters by their names: what the methods of papers are held
against. Nothing of `model` is called here, so that a fault there is none here.

A test writes a method's equations with the letters below, and `agree` compares logits and every gradient.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.conftest import network

VOCAB, TIME = 11, 6


class Reference:
    """`N(name, x)` the RMSNorm of that name, `A(layer, u)` and `M(layer, u)` attention and feed-forward of a layer (from 1), for
    norm=rmsnorm, position=none, ffn=gelu, as many key-value heads as heads, no dropout; `p` the parameters and buffers."""

    def __init__(self, model: Any) -> None:
        self.p: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        self.depth, self.dim, self.heads = model.depth, model.dim, model.sizes.heads

    def N(self, name: str, x: Tensor) -> Tensor:
        return self.p[f"{name}.gain"] * x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)

    def matrix(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.p[f"{name}.weight"].T
        return y + self.p[f"{name}.bias"] if f"{name}.bias" in self.p else y

    def heads_of(
        self,
        layer: int,
        u: Tensor,
        on_q: Callable[[Tensor], Tensor] = lambda q: q,
        on_v: Callable[[Tensor], Tensor] = lambda v: v,
    ) -> Tensor:
        """What the heads of a layer give, side by side, before W_o; `on_q` acts on each head's q and k, `on_v` on its v."""
        at, h = f"blocks.{layer - 1}.attention.function", self.dim // self.heads
        q, k, v = (self.matrix(f"{at}.{name}", u) for name in "qkv")
        out = []
        for head in range(self.heads):
            part = slice(head * h, (head + 1) * h)
            scores = on_q(q[..., part]) @ on_q(k[..., part]).transpose(-1, -2) / math.sqrt(h)
            seen = torch.ones(u.shape[-2], u.shape[-2], dtype=torch.bool).tril()
            weights = torch.where(seen, scores.exp(), torch.zeros_like(scores))
            out.append(weights / weights.sum(-1, keepdim=True) @ on_v(v[..., part]))
        return torch.cat(out, -1)

    def A(self, layer: int, u: Tensor) -> Tensor:
        return self.matrix(f"blocks.{layer - 1}.attention.function.o", self.heads_of(layer, u))

    def hidden(self, layer: int, u: Tensor) -> Tensor:
        """gelu(W_up u)."""
        z = self.matrix(f"blocks.{layer - 1}.ffn.function.up", u)
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2

    def M(self, layer: int, u: Tensor) -> Tensor:
        return self.matrix(f"blocks.{layer - 1}.ffn.function.down", self.hidden(layer, u))

    def embedding(self, tokens: Tensor) -> Tensor:
        return self.p["embed.token"][tokens]

    def logits(self, x: Tensor, *, norm: bool = True) -> Tensor:
        """W N(x), or W x."""
        return (self.N("head.norm", x) if norm else x) @ self.p["head.weight"].T


def agree(
    words: list[str],
    equations: Callable[[Reference, Tensor], Tensor],
    *,
    spread: float = 0.3,
    prepare: Callable[[Any], object] = lambda model: None,
    **more: Any,
) -> Any:
    """The network of `words`, in float64 and with what starts at 0 or 1 spread out, gives what `equations(reference, tokens)`
    does, and so does every gradient; `prepare` is called with the network first. The network, for more to be asked of it.

    float64 keeps 1e-16 an operation; a logit comes of some 1e4 of them on numbers of order 1 to 100: 1e-10, and 1e-8 for a
    gradient, which is a sum over positions and layers of such. A wrong formula is off by 1e-3 or more.
    """
    model = network("position=none", "model.depth=3", *words, vocab=VOCAB, **more).double()
    prepare(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2 or ((parameter == 0) | (parameter == 1)).all():
                parameter.add_(spread * torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    tokens = torch.randint(VOCAB, (2, TIME), generator=generator)
    logits, expected = model(tokens), equations(Reference(model), tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    got = torch.autograd.grad((logits * direction).sum(), parameters, allow_unused=True)
    want = torch.autograd.grad((expected * direction).sum(), parameters, allow_unused=True)
    for name, one, other in zip(names, got, want, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    return model


def stds(model: nn.Module) -> dict[str, float]:
    """Matrix (q, k, v, o, up, gate, down) -> the std over all layers of its weights, about zero."""
    found: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if ".function." in name and name.endswith(".weight") and parameter.ndim == 2:
            found.setdefault(name.split(".")[-2], []).append(parameter.detach().flatten())
    return {name: torch.cat(weights).square().mean().sqrt().item() for name, weights in found.items()}
