"""How initial matrices, branches, logits and the optimizer follow width and depth, so that a small network's best settings
are a large one's."""

from dataclasses import dataclass

from model.site import Site
from model.sizes import Sizes


@dataclass(frozen=True)
class Pace:
    """Factors on the optimizer's learning rate, weight decay and eps for one parameter."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


class NoScaling:
    """Every factor 1. The base of the others."""

    def matrix(self, sizes: Sizes) -> float:
        """On the initial std of the blocks' matrices."""
        return 1.0

    def branch(self, site: Site) -> float:
        """On what each branch adds (beta)."""
        return 1.0

    def scores(self, sizes: Sizes) -> float:
        """On the attention's scores, beside 1/sqrt(head_dim)."""
        return 1.0

    def logits(self, sizes: Sizes) -> float:
        """On the logits."""
        return 1.0

    def pace(self, kind: str, part: str, sizes: Sizes) -> Pace:
        """Of a parameter by its kind and part (`model/inventory.py`)."""
        return Pace()
