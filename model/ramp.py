"""How fast a branch comes in: a factor r(l, t) on what it adds, l its layer, t the optimizer step, counted from 1.

r changes between steps alone: what is measured or validated before the first step sees r at step 1, what is after step t
sees r at t, and a checkpoint keeps it.
"""

from model.coefficient import Coefficient, Ramped
from model.site import Site


class NoRamp:
    """r = 1. The base of the others, whose `factor` says r and `done` from which step on it is 1 everywhere."""

    def at(self, site: Site) -> Coefficient:
        """The coefficient of one branch, as it is before the first step."""
        return 1.0

    def factor(self, site: Site, step: int) -> float:
        return 1.0

    def done(self, depth: int) -> int:
        """The first step from which on r is 1 in every layer."""
        return 1


class ProRes(NoRamp):
    """r(l, t) = min(t / (T l), 1): the first layer is whole after T = `steps_per_layer` steps, the last after T N.

    Source: Chen et al. 2026 (ProRes), arXiv 2603.05369, with T = 1000, on top of any method.
    """

    def __init__(self, *, steps_per_layer: int = 1000) -> None:
        if steps_per_layer < 1:
            raise ValueError(f"ramp.steps_per_layer must be >= 1, found {steps_per_layer}")
        self.steps_per_layer = steps_per_layer

    def at(self, site: Site) -> Coefficient:
        return Ramped(self.factor(site, 1))

    def factor(self, site: Site, step: int) -> float:
        return min(step / (self.steps_per_layer * self.place(site)), 1.0)

    def done(self, depth: int) -> int:
        return self.steps_per_layer * depth

    def place(self, site: Site) -> int:
        """How many times T this layer takes: from 1 to N, and N in one layer at least."""
        return site.layer


class Reverse(ProRes):
    """r(l, t) = min(t / (T (N + 1 - l)), 1): the last layer first. ProRes' ablation, which diverges for post-norm."""

    def place(self, site: Site) -> int:
        return site.depth + 1 - site.layer


class Equal(ProRes):
    """r(t) = r_0 + (1 - r_0) min(t / (T N), 1): all layers together, whole when ProRes' last layer is.

    Source: the schedule "equal" of ProRes, arXiv 2603.05369, which has r_0 = 0 and compares it to BranchNorm (Liu et al.
    2023, arXiv 2305.02790): a post-norm branch that grows to 1 within a number of steps of its own. From where could not be
    verified, so that `start` is a plain number.
    """

    def __init__(self, *, steps_per_layer: int = 1000, start: float = 0.0) -> None:
        super().__init__(steps_per_layer=steps_per_layer)
        if not 0 <= start <= 1:
            raise ValueError(f"ramp.start must be in [0, 1], found {start}")
        self.start = start

    def factor(self, site: Site, step: int) -> float:
        return 1 - (1 - self.start) * (1 - super().factor(site, step))

    def place(self, site: Site) -> int:
        return site.depth
