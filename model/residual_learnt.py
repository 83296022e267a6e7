"""Coefficients that are learnt: on the branch from near 0, so that the network starts as the identity, or on the skip.

At exactly 0 the first step moves the coefficient alone: what stands behind it has no gradient yet.
"""

from math import log, sqrt

import torch
from torch import nn

from model.residual import Residual
from model.site import Site


def rezero(site: Site, dim: int) -> Residual:
    """x <- x + a_l F(x), one scalar a_l a layer, which both branches share; 0 at the start. Meant for norm=none.

    Source: Bachlechner et al. 2020 (ReZero), arXiv 2003.04887, section 4; one scalar a layer as in its Transformer.
    """
    return Residual(beta=nn.Parameter(torch.zeros(())), shared=True)


def skipinit(site: Site, dim: int, *, start: float = 0.0) -> Residual:
    """x <- x + a F(x), one scalar a for every branch; `start` at the start.

    Source: De, Smith 2020 (SkipInit), arXiv 2002.10444, section 4, of residual networks without BatchNorm: a = 0, or at
    most 1/sqrt(number of branches).
    """
    return Residual(beta=nn.Parameter(torch.tensor(float(start))))


def layerscale(site: Site, dim: int, *, start: float | None = None) -> Residual:
    """x <- x + diag(g) F(N(x)), g one learnt number a feature for every branch; at the start 0.1 up to 18 layers, 1e-5 up to
    24, 1e-6 beyond. A number takes the schedule's place: the authors' code has 1e-4 as its default.

    Source: Touvron et al. 2021 (CaiT), arXiv 2103.17239, section 2, which names the depths 18 and 24; those between are
    taken for 24.
    """
    if start is None:
        start = 0.1 if site.depth <= 18 else 1e-5 if site.depth <= 24 else 1e-6
    return Residual(beta=nn.Parameter(torch.full((dim,), float(start))))


def admin(site: Site, dim: int, *, profile: bool = True) -> Residual:
    """x <- N(w x + F(x)), w one learnt number a feature on the skip. With w = 1 one forward pass measures the variance of
    each branch; w_i then starts at the root of what stands before branch i (`model/profile.py`).

    Source: Liu et al. 2020 (Admin), arXiv 2004.08249, section 4. `profile=false` starts each w at sqrt((n + 1) / ln(n + 1) -
    1) of n = 2N branches, for a change of the output of O(log n): the closed form of the authors' later admin-torch, whose
    w is a constant unless it is asked for as a parameter.
    """
    branches = 2 * site.depth
    start = 1.0 if profile else sqrt((branches + 1) / log(branches + 1) - 1)
    return Residual(alpha=nn.Parameter(torch.full((dim,), start)), profiled=profile)
