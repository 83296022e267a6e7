"""Where norms stand.

A branch has three places, `x <- N_sum(alpha x + beta N_out(F(s N_in(x))))`, and the network two more: `embed`, after
the embeddings, and `head`, before the output matrix. A placement names those that hold a norm.
"""

from collections.abc import Sequence
from math import floor

from model.site import Site

AT_BRANCH = ("in", "out", "sum")
AT_ENDS = ("embed", "head")


class Placement:
    """The places that hold a norm: the same in every layer, but for the first `share` of the layers, which hold the
    branch places `early` instead.

    The first floor(share * depth) layers are early (Mix-LN's rounding, arXiv 2412.13795, section 4).
    """

    def __init__(self, *, places: Sequence[str], early: Sequence[str] = (), share: float = 0.0) -> None:
        for key, names, known in (("places", places, AT_BRANCH + AT_ENDS), ("early", early, AT_BRANCH)):
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"placement.{key} knows {', '.join(known)}; found {', '.join(unknown)}")
        if not 0 <= share <= 1:
            raise ValueError(f"placement.share must be in [0, 1], found {share}")
        self.places, self.early, self.share = frozenset(places), frozenset(early), share

    def at(self, site: Site) -> frozenset[str]:
        """The branch places that hold a norm at this site: a subset of {in, out, sum}."""
        is_early = site.layer <= floor(self.share * site.depth)
        return self.early if is_early else self.places & frozenset(AT_BRANCH)

    @property
    def ends(self) -> frozenset[str]:
        """The places at the ends of the network that hold a norm: a subset of {embed, head}."""
        return self.places & frozenset(AT_ENDS)
