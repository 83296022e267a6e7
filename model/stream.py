"""What the residual stream is: one tensor, and two verbs.

    read:   u = s N_in(x)                             what the branch is given
    write:  x <- N_sum(alpha x + beta N_out(y))       how its answer y = F(u) joins

The verbs use `*`, `+` and calls alone, so that `model/equation.py` runs the very same code on symbols.
"""

from collections.abc import Callable, Set
from typing import Any

from torch import Tensor, nn

from model.residual import Coefficient, Residual


class Stream(nn.Module):
    """The norms at the places of one branch and its coefficients. A place without a norm is `nn.Identity`, so that
    hooks find the same names under every placement."""

    alpha: Coefficient
    s: Coefficient
    beta: Coefficient

    def __init__(self, dim: int, *, places: Set[str], norm: Callable[[int], nn.Module], residual: Residual) -> None:
        super().__init__()
        self.norm_in = norm(dim) if "in" in places else nn.Identity()
        self.norm_out = norm(dim) if "out" in places else nn.Identity()
        self.norm_sum = norm(dim) if "sum" in places else nn.Identity()
        self.alpha, self.s, self.beta = residual.alpha, residual.s, residual.beta

    def read(self, x: Tensor) -> Tensor:
        return times(self.s, self.norm_in(x))

    def write(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm_sum(times(self.alpha, x) + times(self.beta, self.norm_out(y)))


def times(c: Any, x: Any) -> Any:
    """c x; a constant 1 costs nothing."""
    return x if isinstance(c, float) and c == 1.0 else c * x
