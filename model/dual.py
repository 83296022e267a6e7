"""Two streams, one that a norm holds and one that nothing does: every branch adds to both, and the head reads

first + N(second).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from model.coefficient import Coefficient, times
from model.residual import Residual
from model.site import Site
from model.stream import Parts, Single, State, Stream, not_after_the_sum, own_skip


class Beside(Stream):
    """p <- N_sum(alpha p + o), d <- d + o, o = r beta F(s p)."""

    def base(self, state: State) -> State:
        p, d = state
        return self.norm_both(p), d

    def read(self, state: State) -> Tensor:
        return super().read(state[0])

    def write(self, state: State, y: Tensor) -> State:
        (p, d), o = state, self.branch(y)
        return self.norm_sum(times(self.alpha, p) + o), d + o


class Coupled(Beside):
    """X <- N_sum(alpha X + damping o), Y <- Y + o, o = r beta F(s N_in(X + N_other(Y)))."""

    damping: Coefficient

    def __init__(self, damping: Coefficient, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_other, self.damping = parts.norm(parts.dim), damping

    def read(self, state: State) -> Tensor:
        x, y = state
        return times(self.s, self.norm_in(x + self.norm_other(y)))

    def write(self, state: State, y: Tensor) -> State:
        (first, second), o = state, self.branch(y)
        return self.norm_sum(times(self.alpha, first) + times(self.damping, o)), second + o


class WithNorm(nn.Module):
    """(first, second) to first + N(second)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> Tensor:
        first, second = state
        out: Tensor = first + self.norm(second)
        return out


class Dual(Single):
    """ResiDual: p' = LN(p + F(p)), d' = d + F(p), d_0 = p_0 the embedding; the head reads p_N + LN(d_N), without a norm of its
    own.

    For placement=post; a residual method's alpha stands before p in every sum. The authors' code has one, by default 1, before
    p at the output alone, and scales d by a constant, by default 1 too, which the last norm takes out again: not here.
    Source: Xie et al. 2023, arXiv 2304.14802, section 3.
    """

    letters = ("p", "d")

    def at(self, site: Site, parts: Parts) -> Stream:
        return Beside(parts)

    def enter(self, x: Tensor) -> State:
        return x, x

    def outlet(self, depth: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return WithNorm(norm(dim))

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        return not_after_the_sum(places)


class Siamese(Dual):
    """SiameseNorm: o = F(LN_in(X + LN_Y(Y))), X' = LN_X(X + o / sqrt(l + 1)), Y' = Y + o, both the embedding at first; the head
    reads X_N + LN_f(Y_N), without a norm of its own.

    For placement=post, whose norm is LN_X; the other two belong to the stream. l counts branches from 1: attention and
    feed-forward of block b are 2b - 1 and 2b. What the paper's l counts could not be read; the authors' code divides both
    branches of block b by sqrt(2b), which is this l at attention. That code further normalises X before the first branch
    and X_N + LN_f(Y_N) before the head, and drops LN_in or LN_X at some sites for its hybrid variant: not here.
    Source: Li et al. 2026, arXiv 2602.08064.
    """

    letters = ("X", "Y")

    def damping(self, site: Site) -> Coefficient:
        """1 / sqrt(l + 1)."""
        return (2 * site.layer + (site.branch == "ffn")) ** -0.5

    def at(self, site: Site, parts: Parts) -> Stream:
        return Coupled(self.damping(site), replace(parts, places=parts.places | {"in"}))

    def symbolic(self, letter: Callable[[str], Any]) -> Single:
        return Written(letter)

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        return not_after_the_sum(places) or own_skip(residual)


class Written(Siamese):
    """With a letter for the number that differs from branch to branch."""

    def __init__(self, letter: Callable[[str], Any]) -> None:
        self._damping = letter("(l + 1)^-1/2")

    def damping(self, site: Site) -> Coefficient:
        damping: Coefficient = self._damping
        return damping
