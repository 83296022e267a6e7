"""Cells of the cross product that are traps, refused before anything is built.

Each rule looks at what a combination does (places, coefficients, norms), not at its names, so that a new choice is
judged the day it is added. `allow_unstable=true` runs what is refused here, since studying failure is the trade.
"""

from collections.abc import Iterator
from math import log10, sqrt

from torch import nn

from model.coefficient import number
from model.gain import has_gain
from model.norm import Dividing
from model.site import Branch, Site
from model.sizes import Sizes
from model.stream import Single
from model.transformer import Choices, residual_at

BRANCHES: tuple[Branch, ...] = ("attention", "ffn")


def refusals(choices: Choices, names: dict[str, str], sizes: Sizes) -> Iterator[str]:
    """A line for each trap: both choices by `names` (axis -> choice), the number, and what to use in their place."""
    depth, sample = sizes.depth, choices.norm(sizes.dim)
    has_norm = not isinstance(sample, nn.Identity)
    yield from _stream_elsewhere(choices, names, depth, has_norm)
    yield from _skip_growth(choices, names, depth, has_norm)
    yield from _profile_without_sum(choices, names, depth, has_norm)
    if sizes.qk_norm != "none" and not has_norm:
        yield f"model.qk_norm={sizes.qk_norm} with norm={names['norm']} puts no norm on queries and keys: choose a norm"
    if reason := choices.placement.refusal(depth):
        yield f"placement={names['placement']} with model.depth={depth} {reason}"
    if not has_gain(sample) and any(choices.placement.gain(site) != 1 for site in _sites(depth)):
        yield (
            f"placement={names['placement']} sets the gain that its output norm starts with, and norm={names['norm']} has "
            "none: use norm=rmsnorm"
        )
    yield from _unbounded_scores(choices, names, sizes, sample)
    yield from _no_pace(choices, names)
    yield from _lost_gain(choices, names, depth)
    yield from _depth_twice(choices, names, depth)
    if getattr(sample, "sees_future", False):
        yield (
            f"norm={names['norm']} in a causal model takes its statistics over time, so that in training every "
            "position sees the future and the training loss is flattered: use norm=layernorm or norm=rmsnorm"
        )


def _sites(depth: int) -> list[Site]:
    return [Site(branch, layer, depth) for layer in range(1, depth + 1) for branch in BRANCHES]


def _stream_elsewhere(choices: Choices, names: dict[str, str], depth: int, has_norm: bool) -> Iterator[str]:
    """A kind of stream is defined for some places and coefficients alone; without a norm every place is empty."""
    for site in _sites(depth):
        places = choices.placement.at(site) if has_norm else frozenset[str]()
        reason = choices.stream.refusal(site, places, choices.residual(site, 1))
        if reason:
            said = "  ".join(f"{axis}={names[axis]}" for axis in ("placement", "residual", "norm"))
            yield f"stream={names.get('stream', '')} with {said}: {reason}"
            return


def _bare(choices: Choices, depth: int, has_norm: bool) -> list[Site]:
    """The branches after which no norm brings the stream back."""
    sites = _sites(depth)
    places = [choices.placement.at(site) if has_norm else frozenset[str]() for site in sites]
    following = [*places[1:], frozenset[str]()]
    brought_back = [here & {"sum", "both"} or "both" in after for here, after in zip(places, following, strict=True)]
    return [site for site, back in zip(sites, brought_back, strict=True) if not back]


def _skip_growth(choices: Choices, names: dict[str, str], depth: int, has_norm: bool) -> Iterator[str]:
    """alpha > 1 on a stream that no norm brings back multiplies it by alpha at each such branch: with DeepNorm's
    alpha under pre-norm by (2N)^(N/2) in all. A norm on the sum brings it back, and so does one that skip and branch share, in
    this branch or the next."""
    bare = _bare(choices, depth, has_norm)
    alphas = [abs(number(choices.residual(site, 1).alpha)) for site in bare]
    growth = sum(log10(alpha) for alpha in alphas if alpha > 0)
    if growth > 0.01:
        yield (
            f"placement={names['placement']} with residual={names['residual']} and norm={names['norm']} multiplies the "
            f"stream by alpha = {alphas[0]:.4g} at each of {len(bare)} branches that no norm follows, about "
            f"10^{growth:.1f} in all at model.depth={depth} (float32 ends near 10^38.5): use recipe=deepnorm "
            "(placement=post, norm=rmsnorm) or residual=standard"
        )


def _profile_without_sum(choices: Choices, names: dict[str, str], depth: int, has_norm: bool) -> Iterator[str]:
    """alpha that a profile sets is the RMS of what stands before the branch: sqrt(l) and more, on a stream that no norm
    brings back the same growth."""
    bare = _bare(choices, depth, has_norm)
    if bare and choices.residual(bare[0], 1).profiled:
        yield (
            f"placement={names['placement']} with residual={names['residual']} and norm={names['norm']} sets alpha to what "
            f"has been added so far, at {len(bare)} branches that no norm follows, so that the stream multiplies: use "
            "placement=post and a norm, or residual=standard"
        )


def _unbounded_scores(choices: Choices, names: dict[str, str], sizes: Sizes, sample: nn.Module) -> Iterator[str]:
    """A branch that reads the bare stream through matrices of full size: its attention scores grow with the stream, and
    at the start the gradient grows towards the input by about 10^(0.08 N) over N blocks (measured with Xavier at N = 12,
    24, 48, 100; docs/log.md). OLMo 2 (arXiv 2501.00656, section 3) uses the placement together with QK-norm. What bounds the
    scores, or makes a branch or its matrices small at the start, is out of its reach."""
    kind, knobs = getattr(choices.attention, "func", None), getattr(choices.attention, "keywords", {})
    bounded = sizes.qk_norm != "none" or getattr(kind, "bounded", False) or knobs.get("logit_cap")
    plain = type(choices.stream) is Single and choices.linear(1, 1, "write").keeps_std and isinstance(sample, Dividing)
    if bounded or not plain:
        return
    std = choices.init.matrix(sizes.dim, sizes.dim) * choices.scaling.matrix(sizes, choices.init) * sqrt(sizes.dim)

    def reads_bare(site: Site) -> bool:
        residual, ramp = residual_at(choices, 1, site), choices.ramp.at(site)
        whole = choices.placement.gain(site) * number(residual.beta) * number(ramp) >= 0.5
        return (
            choices.placement.at(site) - {"inner"} == {"out"} and whole and std * residual.gains.get("score", 1.0) > 0.5
        )

    bare = sum(reads_bare(Site("attention", layer, sizes.depth)) for layer in range(1, sizes.depth + 1))
    if bare >= 24:
        yield (
            f"placement={names['placement']} with model.qk_norm=none and init={names['init']} starts with a gradient about "
            f"10^{0.08 * bare:.0f} times as large in layer 1 as in layer {sizes.depth}: use model.qk_norm=full, as OLMo 2"
        )


def _no_pace(choices: Choices, names: dict[str, str]) -> Iterator[str]:
    """Weights of a stream of which no rule says how their learning rate follows the width."""
    if choices.scaling.paced and choices.stream.learns:
        yield (
            f"scaling={names['scaling']} with stream={names['stream']}: no paper says how the learning rate of the stream's own "
            "weights follows the width: use stream=single, or scaling=none"
        )


def _lost_gain(choices: Choices, names: dict[str, str], depth: int) -> Iterator[str]:
    """What a residual method multiplies initial matrices by, where another rule says how large they are: the run would
    silently be that of another method."""
    if choices.linear(1, 1, "write").keeps_std:
        return
    if choices.scaling.paced:
        yield (
            f"scaling={names['scaling']} says how large matrices start, which linear={names['linear']} undoes: use linear=plain, or "
            "scaling=none"
        )
    for role, gain in (pair for site in _sites(depth) for pair in choices.residual(site, 1).gains.items()):
        if gain != 1.0:
            yield (
                f"residual={names['residual']} starts the matrices of role {role} {gain:.4g} times as large, which "
                f"linear={names.get('linear', '')} undoes: use linear=plain, or a residual method without such gains, as standard"
            )
            return


def _depth_twice(choices: Choices, names: dict[str, str], depth: int) -> Iterator[str]:
    """A scaling by which the branches follow the depth, and a residual method or a placement whose constants do so too: those of
    the last layer are another at another depth."""

    def constants(of: int) -> tuple[object, ...]:
        site = Site("attention", of, of)
        residual, gain = choices.residual(site, 1), choices.placement.gain(site)
        return number(residual.alpha), number(residual.s), number(residual.beta), dict(residual.gains), gain

    profiled = choices.residual(Site("attention", 1, depth), 1).profiled
    if choices.scaling.branch(Site("attention", 1, depth)) != 1 and (
        profiled or constants(depth) != constants(2 * depth)
    ):
        yield (
            f"scaling={names['scaling']} with residual={names['residual']} and placement={names['placement']}: both follow the "
            f"depth (here {depth}), where one is meant to: use residual=standard, or scaling=mup"
        )
