"""What stands around the function of a branch, and what it is built with."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from model.linear import Linear
from model.site import Site
from model.sizes import Sizes


@dataclass(frozen=True)
class Setting:
    """Given to `Attention` and `MLP` by the block that they stand in.

    places: those of the placement at this site; `qkv` and `inner` are the function's own to fill (`norm_at`).
    linear: makes each of its matrices. rotate: (batch, heads, time, head_dim) to the same, of the position.
    score_scale: factor on 1/sqrt(head_dim) in the attention's scores.
    """

    sizes: Sizes
    site: Site
    places: frozenset[str]
    norm: Callable[[int], nn.Module]
    linear: Callable[..., Linear]
    rotate: Callable[[Tensor], Tensor] = lambda q: q
    score_scale: float = 1.0

    def norm_at(self, place: str, width: int) -> nn.Module:
        """The run's norm over the last `width` features if the placement has one here, else nothing."""
        return self.norm(width) if place in self.places else nn.Identity()
