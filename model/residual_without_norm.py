"""Initial matrices that stand in for norms: for norm=none."""

import torch
from torch import nn

from model.residual import Residual
from model.site import Site


def fixup(site: Site, dim: int, *, zero_head: bool = True) -> Residual:
    """x <- x + a F(x), a a learnt scalar for every branch, 1 at the start; the last matrix of a branch (o, down) and the head
    start at 0, the one before (v, up) L^(-1/(2m - 2)) times as large, L = 2N branches of m = 2 matrices: (2N)^(-1/2).

    Source: Zhang, Dauphin, Ma 2019 (Fixup), arXiv 1901.09321, section 3, of residual networks. For a Transformer: m counts
    the matrices that a value passes; q, k and a gate start as they are, since the branch's first updates do not grow
    with them. The scalar biases before each matrix and activation are those that `model.bias=true` has as vectors, also 0 at
    the start. He's std is init=fan_in times sqrt(2). `zero_head=false` lets the head start as `init` has it.
    """
    gains = {"carry": (2 * site.depth) ** -0.5, "write": 0.0} | ({"head": 0.0} if zero_head else {})
    return Residual(beta=nn.Parameter(torch.ones(())), gains=gains)


def t_fixup(site: Site, dim: int) -> Residual:
    """x <- x + F(x): the embedding and v, o, up, down start (9N)^(-1/4) times as large, on Xavier's std.

    Source: Huang et al. 2020 (T-Fixup), ICML, section 3.2, the constants of its decoder, whose layers attend to an encoder
    too. Its embedding N(0, 1/dim) enters times sqrt(dim), as fairseq does it: with RMS 1, as here. Its code multiplies v by
    sqrt(2), to undo the gain of fairseq's fused matrix, which there is none of here. A gate starts as it is.
    """
    gain = (9 * site.depth) ** -0.25
    return Residual(gains={"carry": gain, "write": gain, "embedding": gain})
