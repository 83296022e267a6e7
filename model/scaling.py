"""How initial matrices, branches, logits and the optimizer follow width and depth, so that a small network's best settings
are a large one's."""

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from model.site import Site
from model.sizes import Sizes

if TYPE_CHECKING:  # a bad knob is refused without loading torch
    from model.coefficient import Coefficient


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

    def learnt(self, vocab: int, dim: int) -> "Coefficient":
        """On each logit, one number a token, that is learnt."""
        return 1.0

    def pace(self, kind: str, part: str, sizes: Sizes) -> Pace:
        """Of a parameter by its kind and part (`model/inventory.py`)."""
        return Pace()


class LearntLogits(NoScaling):
    """logits = s_z * (W x), s_z one learnt number a token, 1 at the start and stored as 1/sqrt(dim): of a row of W and an x of
    length 1 the product is a cosine, and no softmax of cosines is sharp.

    Source: Loshchilov et al. 2024 (nGPT), arXiv 2410.01131, section 2.1.
    """

    def learnt(self, vocab: int, dim: int) -> "Coefficient":
        import torch

        from model.coefficient import Scaled

        return Scaled(sqrt(dim), torch.nn.Parameter(torch.full((vocab,), 1 / sqrt(dim))))
