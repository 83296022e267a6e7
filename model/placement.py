"""Where norms stand.

A branch has places around its function, `x <- N_both(x)`, then `x <- N_sum(alpha x + beta N_out(F(s N_in(x))))`, and within
it `inner`, before the last matrix W_o or W_down, and `qkv`, on each head's queries, keys and values. The network has two
more: `embed`, after the embeddings, and `head`, before the output matrix. A placement names those that hold a norm.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Literal

from model.site import Site

AT_FFN = ("both", "in", "inner", "out", "sum")
AT_ATTENTION = (*AT_FFN, "qkv")
AT_ENDS = ("embed", "head")


class Placement:
    """The same places in every layer: `places` in both branches and at the ends, `attention` and `ffn` in one branch besides.

    The gain of N_out starts `out_gain` * depth^(-out_power) times as large. Source: 0, at which a network starts as the
    identity, is Swin-v2's (Liu et al. 2021, arXiv 2111.09883, released code); c and 1/2 are the depth-scaled sandwich-norm of
    Pangu Ultra (2025, arXiv 2504.07866), whose c was not verified.
    """

    def __init__(
        self,
        *,
        places: Sequence[str] = (),
        attention: Sequence[str] = (),
        ffn: Sequence[str] = (),
        out_gain: float = 1.0,
        out_power: float = 0.0,
    ) -> None:
        known = {"places": AT_FFN + AT_ENDS, "attention": AT_ATTENTION, "ffn": AT_FFN}
        for key, names in (("places", places), ("attention", attention), ("ffn", ffn)):
            _known(f"placement.{key}", names, known[key])
        if out_gain < 0:
            raise ValueError(f"placement.out_gain must be >= 0, found {out_gain}")
        if not 0 <= out_power <= 4:
            raise ValueError(f"placement.out_power must be in [0, 4], found {out_power}")
        if (out_gain, out_power) != (1, 0) and "out" not in {*places, *attention, *ffn}:
            raise ValueError(
                f"placement.out_gain={out_gain:g}, out_power={out_power:g} need the place out, which is not there"
            )
        inside = frozenset(places) - set(AT_ENDS)
        self._at = {"attention": inside | set(attention), "ffn": inside | set(ffn)}
        self._ends, self._out_gain, self._out_power = frozenset(places) & set(AT_ENDS), out_gain, out_power

    def at(self, site: Site) -> frozenset[str]:
        """The places of the branch at this site that hold a norm."""
        return self._at[site.branch]

    def gain(self, site: Site) -> float:
        """The factor on the initial gain of N_out at this site."""
        return float(self._out_gain * site.depth**-self._out_power)

    @property
    def ends(self) -> frozenset[str]:
        """The places at the ends of the network that hold a norm: a subset of {embed, head}."""
        return self._ends

    def refusal(self, depth: int) -> str | None:
        """Why a network of this depth would silently be another placement's, and what to use; None where it is not."""
        return None


class Varying(Placement):
    """Layers that differ, each as another placement has it."""

    def _of(self, site: Site) -> Placement:
        """The one at this site."""
        raise NotImplementedError

    def at(self, site: Site) -> frozenset[str]:
        return self._of(site).at(site)

    def gain(self, site: Site) -> float:
        return self._of(site).gain(site)


class Early(Varying):
    """Another placement in the first layers: the first floor(share * depth), and at least `count`, have the places of
    `first`, the others those of `then`, and the ends are those of `then`.

    Source: Mix-LN (Li, Yin, Liu 2024, arXiv 2412.13795, section 4: "the first floor(aL) layers"); HybridNorm* (Zhuo et al.
    2025, arXiv 2503.04598) treats one layer so.
    """

    def __init__(self, *, first: Placement, then: Placement, share: float = 0.0, count: int = 0) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"placement.share must be in [0, 1], found {share}")
        if count < 0:
            raise ValueError(f"placement.count must be >= 0, found {count}")
        self._first, self._then, self._share, self._count = first, then, share, count

    def _of(self, site: Site) -> Placement:
        return self._first if site.layer <= self._early(site.depth) else self._then

    def _early(self, depth: int) -> int:
        """How many layers are early; a share such as 0.7 is a little less in binary, and 0.7 * 90 is 63 layers all the same."""
        return max(self._count, floor(self._share * depth + 1e-9))

    @property
    def ends(self) -> frozenset[str]:
        return self._then.ends

    def refusal(self, depth: int) -> str | None:
        early = self._early(depth)
        if early >= depth:
            return f"has early layers alone, {early} of {depth}: use fewer (placement.share, count), or the placement of those"
        if not early and not self._share:
            return "has no early layer: placement.share and count are 0; use the placement of the others"
        if not early:
            need = ceil(1 / self._share)
            return f"has no early layer: floor({self._share:g} * {depth}) = 0; use model.depth={need} or more, or placement=pre"
        return None


class ByLayer(Varying):
    """Each layer has the places of a placement by its name among `kinds`. `layers` has n names for N layers:

    spread=parts: runs of equal length, as near as can be: layer l has name 1 + floor((l - 1) n / N). One name a layer, n = N,
    is the plain list. spread=repeat: again and again, layer l has name 1 + (l - 1) mod n.

    The norm on the embedding is that of the first layer's placement, and the one before the head that of the last one's, so
    that there is none behind a last layer that ends in a norm on its sum.
    """

    def __init__(
        self, *, layers: Sequence[str], kinds: Mapping[str, Placement], spread: Literal["parts", "repeat"] = "parts"
    ) -> None:
        if not layers:
            raise ValueError("placement.layers needs a name, found none")
        _known("placement.layers", layers, sorted(kinds))
        self._layers, self._kinds, self._repeat = tuple(layers), kinds, spread == "repeat"

    def _of(self, site: Site) -> Placement:
        count = len(self._layers)
        number = (site.layer - 1) % count if self._repeat else (site.layer - 1) * count // site.depth
        return self._kinds[self._layers[number]]

    @property
    def ends(self) -> frozenset[str]:
        first, last = (self._kinds[self._layers[number]].ends for number in (0, -1))
        return first & {"embed"} | last & {"head"}

    def refusal(self, depth: int) -> str | None:
        """A list that is longer than half of the layers was meant to name each of them."""
        count = len(self._layers)
        if self._repeat and depth % count:
            return (
                f"does not come out: placement.layers repeats {count} names; use a model.depth that divides by {count}"
            )
        if count != depth and 2 * count > depth + 1:
            return (
                f"does not come out: placement.layers has {count} names; name each of the {depth} layers, or a pattern of "
                f"{(depth + 1) // 2} at most"
            )
        return None


def _known(key: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{key} knows {', '.join(known)}; found {', '.join(unknown)}")
