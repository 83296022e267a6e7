"""The comment that cannot lie: a configuration's equation, got by running its stream on symbols."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import nn

from model.coefficient import Coefficient
from model.site import Site
from model.stream import Parts, State
from model.transformer import Choices, residual_at


class Symbol(str):
    """A term that `+`, `*` and a call of `N` or `F` write out in place of computing it."""

    def __add__(self, other: str) -> "Symbol":
        return Symbol(f"{self!s} + {other!s}")

    def __mul__(self, other: str) -> "Symbol":  # type: ignore[override]
        return Symbol(f"{self!s} {_bracketed(other)}")


class Call(nn.Module):
    """A function of one symbol, by its name, and of what else it reads; with an inner norm the last matrix W stands outside
    of it."""

    def __init__(self, name: str, *others: str, inner: bool = False) -> None:
        super().__init__()
        self.name, self.others, self.inner = name, others, inner

    def forward(self, x: str) -> Symbol:
        called = f"{self.name}({', '.join([str(x), *self.others])})"
        return Symbol(f"W N({called})" if self.inner else called)


def _bracketed(text: str) -> str:
    """In brackets where it is a sum, but for sums that stand in brackets of their own."""
    bare = f"{text!s}"
    while (shorter := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = shorter
    return f"({text!s})" if " + " in bare else f"{text!s}"


def _letter(name: str, value: Coefficient) -> Coefficient:
    """A coefficient by its letter, but a constant 1, which stays away."""
    return value if isinstance(value, float) and value == 1.0 else Symbol(name)  # type: ignore[return-value]


def _branch(site: Site, choices: Choices, before: tuple[str, ...], name: str, has_norm: bool) -> str:
    """What a branch with the function `name` does to the tensors that are there before it: those that it changes."""
    places, residual = choices.placement.at(site) if has_norm else frozenset(), residual_at(choices, 1, site)
    alpha, s, beta = (_letter(name, getattr(residual, name)) for name in ("alpha", "s", "beta"))
    parts = Parts(
        1,
        places,
        lambda dim: Call("N") if has_norm else nn.Identity(),
        replace(residual, alpha=alpha, s=s, beta=beta),
        _letter("r", choices.ramp.at(site)),
    )
    stream = choices.stream.at(site, parts)
    state = stream.base(_symbols(before))
    carried = ["v_1"] if site.branch == "attention" and site.layer > 1 and _carries(choices) else []
    function = Call(f"{name}_N" if "qkv" in places else name, *carried, inner="inner" in places)
    return _assigned(choices.stream.after(site), stream.write(state, function(stream.read(state))))


def _assigned(letters: tuple[str, ...], state: State) -> str:
    """What the tensors of a state become, those that change."""
    pairs = zip(letters, state if isinstance(state, tuple) else (state,), strict=True)
    return ", ".join(f"{letter} <- {text}" for letter, text in pairs if letter != text)


def _carries(choices: Choices) -> bool:
    """Whether its attention reads the values of the first layer."""
    return getattr(getattr(choices.attention, "func", choices.attention), "carries", False)


def _symbols(letters: tuple[str, ...]) -> State:
    """The state of a stream, each of its tensors by its letter."""
    return tuple(map(Symbol, letters)) if len(letters) > 1 else Symbol(letters[0])


def _layer(layer: int, choices: Choices, depth: int, has_norm: bool) -> str:
    """Both branches in one, with F for their functions, where they are alike; else attention A, then feed-forward M."""
    attention, ffn = Site("attention", layer, depth), Site("ffn", layer, depth)
    stream = choices.stream
    alike = (
        [_branch(site, choices, stream.letters, "F", has_norm) for site in (attention, ffn)]
        if (stream.after(attention) == stream.letters)
        else []
    )
    if alike and alike[0] == alike[1]:
        return alike[0]
    first = _branch(attention, choices, stream.letters, "A", has_norm)
    return f"{first} then {_branch(ffn, choices, stream.after(attention), 'M', has_norm)}"


def equation(choices: Choices, depth: int, *, has_norm: bool = True, cap: float = 0.0, logits: float = 1.0) -> str:
    """The whole network in one line: embedding, branches (F is attention, then feed-forward), logits.

    Without a norm (`norm=none`) its places are empty. Layers that differ are told apart by their numbers:
    `layers 1-3: x <- N(x + F(x)); layers 4-12: ...`. A_N is attention with a norm on each head's q, k and v; A(x, v_1) one that
    reads the values of the first layer too; W N(F(x)) a branch with a norm before its last matrix W; r a ramp that follows the
    steps; s a learnt number for each logit; `cap` that of the logits; c the factor `logits` where it is not 1.
    """
    choices = replace(choices, stream=choices.stream.symbolic(Symbol))
    of_layer = [_layer(layer, choices, depth, has_norm) for layer in range(1, depth + 1)]
    ends = choices.placement.ends if has_norm else frozenset()
    embedding: Any = Symbol("N(embedding)" if "embed" in ends else "embedding")
    start = _assigned(choices.stream.letters, choices.stream.enter(embedding))
    parts = [] if start == "x <- embedding" else [start]
    for text, runs in _runs(of_layer).items():
        parts.append(text if runs == [(1, depth)] else f"{_numbers(runs)}: {text}")
    outlet = choices.stream.outlet(depth, 1, lambda dim: Call("N") if has_norm else nn.Identity())
    read = outlet(_symbols(choices.stream.letters))
    c = ("" if logits == 1 else "c ") + ("" if choices.scaling.learnt(1, 1) == 1.0 else "s ")
    out = f"{c}W N({read})" if "head" in ends else f"{c}W {_bracketed(read)}"
    parts.append(f"logits = {cap:g} tanh({out} / {cap:g})" if cap else f"logits = {out}")
    return ";  ".join(parts)


def _runs(of_layer: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Each text -> the stretches of layers that have it, (first, last) from 1."""
    found: dict[str, list[tuple[int, int]]] = {}
    for text, run in groupby(enumerate(of_layer, start=1), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        found.setdefault(text, []).append((layers[0], layers[-1]))
    return found


def _numbers(runs: Sequence[tuple[int, int]]) -> str:
    """`layer 1`, `layers 1-3`, `layers 1, 3-4`; of more than six stretches the first two and the last."""
    named = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs]
    shown = named if len(named) <= 6 else [*named[:2], "...", named[-1]]
    return f"layer{'' if named == [str(runs[0][0])] else 's'} {', '.join(shown)}"
