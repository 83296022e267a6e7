"""How fast a branch comes in: a factor r(l, t) on what it adds, l its layer, t the optimizer step, counted from 1."""

from model.coefficient import Coefficient
from model.site import Site


class NoRamp:
    """r = 1. The base of the others, whose `factor` says r and `done` from which step on it is 1 everywhere."""

    def at(self, site: Site) -> Coefficient:
        """The coefficient of one branch, as it is before the first step."""
        return 1.0

    def factor(self, site: Site, step: int) -> float:
        return 1.0
