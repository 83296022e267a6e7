"""The comment that cannot lie: a configuration's equation, got by running its stream on symbols."""

from dataclasses import replace
from itertools import groupby

from torch import nn

from model.coefficient import Coefficient
from model.site import Site
from model.stream import State
from model.transformer import Choices, residual_at


class Symbol(str):
    """A term that `+`, `*` and a call of `N` or `F` write out in place of computing it."""

    def __add__(self, other: str) -> "Symbol":
        return Symbol(f"{self!s} + {other!s}")

    def __mul__(self, other: str) -> "Symbol":  # type: ignore[override]
        return Symbol(f"{self!s} {_bracketed(other)}")


class Call(nn.Module):
    """A function of one symbol, by its name; with an inner norm the last matrix W stands outside of it."""

    def __init__(self, name: str, *, inner: bool = False) -> None:
        super().__init__()
        self.name, self.inner = name, inner

    def forward(self, x: str) -> Symbol:
        return Symbol(f"W N({self.name}({x!s}))" if self.inner else f"{self.name}({x!s})")


def _bracketed(text: str) -> str:
    return f"({text!s})" if " + " in text else f"{text!s}"


def _letter(name: str, value: Coefficient) -> Coefficient:
    """A coefficient by its letter, but a constant 1, which stays away."""
    return value if isinstance(value, float) and value == 1.0 else Symbol(name)  # type: ignore[return-value]


def _branch(site: Site, choices: Choices, before: tuple[str, ...], name: str, has_norm: bool) -> str:
    """What a branch with the function `name` does to the tensors that are there before it: those that it changes."""
    places, residual = choices.placement.at(site) if has_norm else frozenset(), residual_at(choices, 1, site)
    alpha, s, beta = (_letter(name, getattr(residual, name)) for name in ("alpha", "s", "beta"))
    stream = choices.stream.at(
        site,
        1,
        places=places,
        norm=lambda dim: Call("N") if has_norm else nn.Identity(),
        residual=replace(residual, alpha=alpha, s=s, beta=beta),
        ramp=_letter("r", choices.ramp.at(site)),
    )
    state = stream.base(_symbols(before))
    function = Call(f"{name}_N" if "qkv" in places else name, inner="inner" in places)
    after = stream.write(state, function(stream.read(state)))
    pairs = zip(choices.stream.after(site), after if isinstance(after, tuple) else (after,), strict=True)
    return ", ".join(f"{letter} <- {text}" for letter, text in pairs if letter != text)


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


def equation(choices: Choices, depth: int, *, has_norm: bool = True, logits: float = 1.0) -> str:
    """The whole network in one line: embedding, branches (F is attention, then feed-forward), logits.

    Without a norm (`norm=none`) its places are empty. Layers that differ are told apart by their numbers:
    `layers 1-3: x <- N(x + F(x)); layers 4-12: ...`. A_N is attention with a norm on each head's q, k and v; W N(F(x)) a
    branch with a norm before its last matrix W; r a ramp that follows the steps; c the factor `logits` where it is not 1.
    """
    of_layer = [(_layer(layer, choices, depth, has_norm), layer) for layer in range(1, depth + 1)]
    ends = choices.placement.ends if has_norm else frozenset()
    runs = [(text, [layer for _, layer in run]) for text, run in groupby(of_layer, key=lambda pair: pair[0])]
    parts = ["x <- N(embedding)"] if "embed" in ends else []
    for text, run in runs:
        where = f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}-{run[-1]}"
        parts.append(text if len(runs) == 1 else f"{where}: {text}")
    outlet = choices.stream.outlet(depth, 1, lambda dim: Call("N") if has_norm else nn.Identity())
    read = outlet(_symbols(choices.stream.letters))
    c = "" if logits == 1 else "c "
    parts.append(f"logits = {c}W N({read})" if "head" in ends else f"logits = {c}W {_bracketed(read)}")
    return ";  ".join(parts)
