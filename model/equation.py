"""The comment that cannot lie: a configuration's equation, got by running its `Stream` on symbols."""

from dataclasses import replace
from itertools import groupby

from torch import nn

from model.placement import Placement
from model.residual import Coefficient, Method, Residual
from model.site import Site
from model.stream import Stream


class Symbol(str):
    """A term that `+`, `*` and a call of `N` or `F` write out in place of computing it."""

    def __add__(self, other: str) -> "Symbol":
        return Symbol(f"{self!s} + {other!s}")

    def __mul__(self, other: str) -> "Symbol":  # type: ignore[override]
        return Symbol(f"{self!s} {other!s}" if " + " not in other else f"{self!s} ({other!s})")


class Call(nn.Module):
    """A function of one symbol, by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: str) -> Symbol:
        return Symbol(f"{self.name}({x!s})")


def _named(residual: Residual) -> Residual:
    """The coefficients by their letters, but a constant 1, which stays away."""

    def letter(name: str, value: Coefficient) -> Coefficient:
        return value if isinstance(value, float) and value == 1.0 else Symbol(name)  # type: ignore[return-value]

    alpha, s, beta = (letter(name, getattr(residual, name)) for name in ("alpha", "s", "beta"))
    return replace(residual, alpha=alpha, s=s, beta=beta)


def _branch(site: Site, placement: Placement, method: Method, has_norm: bool) -> str:
    places, residual = placement.at(site) if has_norm else frozenset(), _named(method(site, 1))
    stream = Stream(1, places=places, norm=lambda dim: Call("N"), residual=residual)
    x = Symbol("x")
    return f"x <- {stream.write(x, Call('F')(stream.read(x)))}"  # type: ignore[arg-type]


def equation(placement: Placement, method: Method, depth: int, *, has_norm: bool = True) -> str:
    """The whole network in one line: embedding, branches (F is attention, then feed-forward), logits.

    Without a norm (`norm=none`) its places are empty. Layers that differ are told apart by their numbers: `layers 1-3: x <- N(x + F(x)); layers 4-12: ...`.
    """
    layers = range(1, depth + 1)
    of_layer = [(_branch(Site("attention", layer, depth), placement, method, has_norm), layer) for layer in layers]
    ends = placement.ends if has_norm else frozenset()
    runs = [(text, [layer for _, layer in run]) for text, run in groupby(of_layer, key=lambda pair: pair[0])]
    parts = ["x <- N(embedding)"] if "embed" in ends else []
    for text, run in runs:
        parts.append(text if len(runs) == 1 else f"layers {run[0]}-{run[-1]}: {text}")
    parts.append("logits = W N(x)" if "head" in ends else "logits = W x")
    return ";  ".join(parts)
