"""What the residual stream is: one tensor, and what a branch does with it.

    base:   x <- N_both(x)                            what skip and branch both see
    read:   u = s N_in(x)                             what the branch is given
    write:  x <- N_sum(alpha x + r beta N_out(y))     how its answer y = F(u) joins

The verbs use `*`, `+` and calls alone, so that `model/equation.py` runs the very same code on symbols. Other kinds of
stream carry more than one tensor (`conf/stream/`): their state is a tuple, or one tensor with a dimension more.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from model.coefficient import Coefficient, times
from model.residual import Residual
from model.site import Site

State = Any  # of a single stream a Tensor (batch, time, dim); of others what their `enter` gives


@dataclass(frozen=True)
class Parts:
    """What one branch's stream is made of: its width, the places that hold a norm and what makes one, its coefficients, and r, a
    factor that follows the steps of a training."""

    dim: int
    places: Set[str]
    norm: Callable[[int], nn.Module]
    residual: Residual
    ramp: Coefficient = 1.0


class Stream(nn.Module):
    """The norms at the places of one branch and its coefficients. A place without a norm is `nn.Identity`, so that
    hooks find the same names under every placement."""

    alpha: Coefficient
    s: Coefficient
    beta: Coefficient
    ramp: Coefficient

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        norms = [parts.norm(parts.dim) if at in parts.places else nn.Identity() for at in ("both", "in", "out", "sum")]
        self.norm_both, self.norm_in, self.norm_out, self.norm_sum = norms
        residual = parts.residual
        self.alpha, self.s, self.beta, self.ramp = residual.alpha, residual.s, residual.beta, parts.ramp

    def base(self, x: State) -> State:
        return self.norm_both(x)

    def read(self, x: State) -> Tensor:
        return times(self.s, self.norm_in(x))

    def write(self, x: State, y: Tensor) -> State:
        return self.norm_sum(times(self.alpha, x) + self.branch(y))

    def branch(self, y: Tensor) -> Tensor:
        """r beta N_out(y): what the branch adds."""
        return times(self.ramp, times(self.beta, self.norm_out(y)))


class Single:
    """One tensor from the embedding to the head: the base of the other kinds.

    A kind makes the `Stream` of each branch (`at`), turns the embedding into the first state (`enter`) and the last state
    into what the head reads (`outlet`). `letters` names the tensors of the state in the equation. `grows`: whether the state
    has more tensors after some blocks than before them, so that no compiled graph serves two groups of blocks.
    """

    letters: tuple[str, ...] = ("x",)
    grows = False
    learns = False  # weights of its own, gains apart

    def at(self, site: Site, parts: Parts) -> Stream:
        return Stream(parts)

    def enter(self, x: Tensor) -> State:
        """(batch, time, dim) to the state before the first block."""
        return x

    def outlet(self, depth: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        """A module from the state after the last block to (batch, time, dim), before the head's norm."""
        return nn.Identity()

    def after(self, site: Site) -> tuple[str, ...]:
        """The letters of the state that the branch at this site leaves: for the equation."""
        return self.letters

    def tensors(self, state: State) -> tuple[Tensor, ...]:
        """Those of a state that measurements of the stream take their mean over, each (batch, time, dim)."""
        return state if isinstance(state, tuple) else (state,)

    def symbolic(self, letter: Callable[[str], Any]) -> "Single":
        """This kind for the equation: with a `letter` for whatever is neither `*` nor `+` nor a call of one of its norms."""
        return self

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        """Why this kind does not go with these places or this residual method, and what does; None where it does."""
        return None


def not_after_the_sum(places: frozenset[str]) -> str | None:
    """A refusal, for kinds that are post-norm."""
    return (
        None
        if places == {"sum"}
        else "it is defined with a norm after each sum and nowhere else; use placement=post and a norm"
    )


def own_skip(residual: Residual) -> str | None:
    """A refusal, for kinds that leave the skip no factor of its own."""
    constant = isinstance(residual.alpha, float) and residual.alpha == 1.0
    return None if constant else "it leaves no place for a factor alpha on the skip; use residual=standard"
