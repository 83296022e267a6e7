"""How initial matrices, branches, logits and the optimizer follow width and depth, so that a small network's best settings
are a large one's."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from model.site import Site
from model.sizes import Sizes

if TYPE_CHECKING:  # a bad knob is refused without loading torch
    from model.coefficient import Coefficient
    from model.init import Init


@dataclass(frozen=True)
class Pace:
    """Factors on the optimizer's learning rate, weight decay and eps for one parameter."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


class NoScaling:
    """Every factor 1. The base of the others. `paced` tells whether parameters have paces of their own."""

    paced = False

    def matrix(self, sizes: Sizes, init: "Init") -> float:
        """On the initial std of the blocks' matrices."""
        return 1.0

    def head(self, sizes: Sizes, init: "Init") -> float:
        """On the initial std of the output matrix."""
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

    def pace(self, kind: str, inside: bool, sizes: Sizes) -> Pace:
        """Of a parameter by its kind (`model/inventory.py`) and whether it is inside a block."""
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


class MuP(NoScaling):
    """muP, for AdamW: m = dim / base_dim, d_h the width of a head, d_0 = base_head_dim.

                              initial std     forward                  lr     decay   eps
        embedding, position   sigma           x = E[token]             1      1       1/m
        hidden matrix         sigma m^-1/2    W x                      1/m    m       1/m
        gain, bias            as it is        as it is                 1      1       1/m
        output matrix         sigma           logits = (1/m) W N(x)    1      1       1/m
        scores                                q k^T sqrt(d_0) / d_h

    sigma is what the init gives at the width base_dim, so that the network of that width, with heads of base_head_dim, is
    that of scaling=none. decay is a factor on lambda of AdamW's lr lambda theta: their product stays.

    The init sees the width already, all but init=normal, and the factors are what is missing. Of a hidden matrix
    m^-1/2 sigma_base / sigma: 1 where sigma goes like 1/sqrt(fan_in), m^-1/2 for init=normal. Of the output matrix
    sigma_base / sigma: N(0, 1/dim) becomes N(0, 1/base_dim), since the paper shrinks the logits by 1/m in the forward pass.
    Adam trains c W alike for (c, std, lr, decay, eps) and (c t, std / t, lr / t, decay t, eps t), whatever t: with t = sqrt(m)
    the table's (1/m, sigma, 1, 1, 1/m) is N(0, 1/dim) with logits, lr and eps times m^-1/2 and decay times m^1/2. That form is
    not taken: a tied matrix has the embedding's std, and the clipped norm would be another.

    Source: Yang et al. 2022 (Tensor Programs V), arXiv 2203.03466, table 8 (std, forward, lr of Adam) and definition 4.1
    (scores 1/d_h); Dey et al. 2025, arXiv 2505.01618, table 1, its column muP (decay, eps). Their `mup` package leaves eps as it is.
    """

    paced = True

    def __init__(self, *, base_dim: int = 64, base_head_dim: int = 16) -> None:
        for key, value in (("base_dim", base_dim), ("base_head_dim", base_head_dim)):
            if value < 1:
                raise ValueError(f"scaling.{key} must be >= 1, found {value}")
        self.base_dim, self.base_head_dim = base_dim, base_head_dim

    def width(self, sizes: Sizes) -> float:
        """m."""
        return sizes.dim / self.base_dim

    def matrix(self, sizes: Sizes, init: "Init") -> float:
        at_base, here = (init.matrix(dim, dim) for dim in (self.base_dim, sizes.dim))
        return self.width(sizes) ** -0.5 * at_base / here

    def head(self, sizes: Sizes, init: "Init") -> float:
        return init.head(self.base_dim) / init.head(sizes.dim)

    def scores(self, sizes: Sizes) -> float:
        return (self.base_head_dim / sizes.head_dim) ** 0.5

    def logits(self, sizes: Sizes) -> float:
        return 1 / self.width(sizes)

    def pace(self, kind: str, inside: bool, sizes: Sizes) -> Pace:
        m = self.width(sizes)
        return Pace(1 / m, m, 1 / m) if inside and kind == "matrix" else Pace(eps=1 / m)


class CompleteP(MuP):
    """x <- x + M^-alpha F(N(x)), M = depth / base_depth, with the rules of `MuP` for the width. In the blocks lr is times
    M^(alpha - 1), for matrices, gains, biases and coefficients, and eps times M^-alpha; embedding, head and its norm know no
    depth, nor does decay. With alpha = 1 (CompleteP) the learning rates know no depth either.

    alpha = 1/2 is Depth-muP: branches times 1/sqrt(L), Adam's lr times 1/sqrt(L). Its authors derive it for branches of one
    matrix, and find for a Transformer's, of two and more, that it does not transfer the learning rate over depth.

    Derived for pre-norm. L is counted in blocks; a count of branches is the same M.
    Source: Dey et al. 2025 (CompleteP), arXiv 2505.01618, table 1; its eq. 40 for eps, which the authors' first code gave to embedding
    and head too. Yang et al. 2023 (Tensor Programs VI), arXiv 2310.02244, table 1, for 1/2.
    """

    def __init__(self, *, base_dim: int = 64, base_head_dim: int = 16, base_depth: int = 2, alpha: float = 1.0) -> None:
        super().__init__(base_dim=base_dim, base_head_dim=base_head_dim)
        if base_depth < 1:
            raise ValueError(f"scaling.base_depth must be >= 1, found {base_depth}")
        if not 0.5 <= alpha <= 1:
            raise ValueError(f"scaling.alpha must be in [0.5, 1], found {alpha}")
        self.base_depth, self.alpha = base_depth, alpha

    def branch(self, site: Site) -> float:
        return (site.depth / self.base_depth) ** -self.alpha

    def pace(self, kind: str, inside: bool, sizes: Sizes) -> Pace:
        pace, m = super().pace(kind, inside, sizes), sizes.depth / self.base_depth
        return replace(pace, lr=pace.lr * m ** (self.alpha - 1), eps=pace.eps * m**-self.alpha) if inside else pace
