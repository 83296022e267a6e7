"""Where in the network a thing stands."""

from dataclasses import dataclass
from typing import Literal

Branch = Literal["attention", "ffn"]


@dataclass(frozen=True)
class Site:
    """One residual branch: the attention or the feed-forward of one layer.

    `layer` counts blocks from 1 at the input to `depth` at the output, so that a formula of a paper in l and N
    reads `site.layer` and `site.depth`.
    """

    branch: Branch
    layer: int
    depth: int
