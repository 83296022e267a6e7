"""Which places hold a norm, layer by layer."""

from typing import Any

import pytest

from model.placement import ByLayer, Early, Placement
from model.site import Site

PRE, POST = Placement(places=["in", "head"]), Placement(places=["sum"])


def of_layers(placement: Placement, depth: int, branch: Any = "ffn") -> list[frozenset[str]]:
    return [placement.at(Site(branch, layer, depth)) for layer in range(1, depth + 1)]


@pytest.mark.parametrize("depth, share, early", [(12, 0.25, 3), (4, 0.25, 1), (6, 0.25, 1), (7, 0.25, 1), (3, 0.25, 0), (32, 0.0625, 2)])  # fmt: skip
def test_mix_ln_rounds_down(depth: int, share: float, early: int):
    """The first floor(share * depth) layers (arXiv 2412.13795); 6.25% of 32 layers is its 7B setting."""
    placement = Early(first=POST, then=PRE, share=share)
    assert of_layers(placement, depth) == [{"sum"}] * early + [{"in"}] * (depth - early)
    assert placement.ends == {"head"}
    assert bool(placement.refusal(depth)) == (early == 0)


def test_branches_may_differ():
    placement = Placement(places=["in", "embed"], attention=["qkv", "out"], ffn=["inner"])
    assert placement.at(Site("attention", 1, 2)) == {"in", "qkv", "out"}
    assert placement.at(Site("ffn", 2, 2)) == {"in", "inner"}
    assert placement.ends == {"embed"}


def test_early_layers_by_their_number():
    placement = Early(first=Placement(places=["in"], attention=["qkv"]), then=POST, count=1)
    assert of_layers(placement, 4, "attention") == [{"in", "qkv"}, *[{"sum"}] * 3]
    assert placement.ends == frozenset() and placement.refusal(2) is None
    assert "has early layers alone, 1 of 1" in placement.refusal(1)


def by_layer(*layers: str, spread: Any = "parts") -> ByLayer:
    return ByLayer(
        layers=layers,
        kinds={"pre": PRE, "post": POST, "peri": Placement(places=["embed", "in", "out", "head"])},
        spread=spread,
    )


@pytest.mark.parametrize(
    "placement, depth, expected",
    [
        (by_layer("post", "post", "pre", "pre"), 4, "ssii"),
        (by_layer("post", "pre"), 12, "ssssssiiiiii"),
        (by_layer("post", "pre"), 5, "sssii"),
        (by_layer("pre", "post", "pre"), 8, "iiisssii"),
        (by_layer("pre"), 3, "iii"),
        (by_layer("post", "pre", spread="repeat"), 6, "sisisi"),
        (by_layer("post", "pre", "pre", spread="repeat"), 6, "siisii"),
    ],
)
def test_a_placement_for_each_layer(placement: ByLayer, depth: int, expected: str):
    """One name a layer, runs, or a pattern: s has a norm on the sum, i before the branch."""
    assert "".join("s" if "sum" in at else "i" for at in of_layers(placement, depth)) == expected
    assert placement.refusal(depth) is None


def test_the_ends_are_those_of_the_first_and_the_last_layer():
    assert by_layer("post", "pre").ends == {"head"}
    assert by_layer("pre", "post").ends == frozenset()
    assert by_layer("peri", "post").ends == {"embed"}
    assert by_layer("pre", "peri").ends == {"head"}


@pytest.mark.parametrize(
    "placement, depth, said",
    [
        (by_layer("pre", "post", "pre"), 4, "has 3 names; name each of the 4 layers, or a pattern of 2 at most"),
        (by_layer(*["pre", "post"] * 6), 11, "has 12 names; name each of the 11 layers, or a pattern of 6 at most"),
        (by_layer("post", "pre"), 1, "has 2 names"),
        (by_layer("post", "pre", spread="repeat"), 5, "repeats 2 names; use a model.depth that divides by 2"),
    ],
)
def test_lists_of_a_wrong_length(placement: ByLayer, depth: int, said: str):
    assert said in str(placement.refusal(depth))


@pytest.mark.parametrize(
    "build, said",
    [
        (lambda: Placement(places=["inn"]), "placement.places knows both, in, inner, out, sum, embed, head; found inn"),
        (lambda: Placement(places=["qkv"]), "placement.places knows both, in, inner, out, sum, embed, head; found qkv"),
        (lambda: Placement(ffn=["qkv"]), "placement.ffn knows both, in, inner, out, sum; found qkv"),
        (lambda: Placement(attention=["head"]), "placement.attention knows both, in, inner, out, sum, qkv; found head"),
        (lambda: Placement(places=["in"], out_gain=0.0), "placement.out_gain=0, out_power=0 need the place out"),
        (lambda: Placement(places=["out"], out_gain=-1.0), "placement.out_gain must be >= 0, found -1"),
        (lambda: Early(first=POST, then=PRE, share=1.5), r"placement.share must be in \[0, 1\]"),
        (lambda: Early(first=POST, then=PRE, count=-1), "placement.count must be >= 0"),
        (lambda: by_layer(), "placement.layers needs a name"),
        (lambda: by_layer("pre", "pst"), "placement.layers knows peri, post, pre; found pst"),
    ],
)
def test_places_that_are_not_there(build, said: str):
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize("share, depth, early", [(0.7, 90, 63), (0.29, 100, 29), (0.35, 180, 63), (0.25, 12, 3)])
def test_a_share_loses_no_layer_to_binary_fractions(share: float, depth: int, early: int):
    placement = Early(first=Placement(places=["sum"]), then=Placement(places=["in", "head"]), share=share)
    sites = [Site("ffn", layer, depth) for layer in range(1, depth + 1)]
    assert sum(placement.at(site) == {"sum"} for site in sites) == early


@pytest.mark.parametrize(
    "knobs, said", [({"share": 1.0}, "12 of 12"), ({"count": 12}, "12 of 12"), ({}, "no early layer")]
)
def test_a_share_that_is_another_placement_is_refused(knobs: dict[str, float], said: str):
    placement = Early(first=Placement(places=["sum"]), then=Placement(places=["in", "head"]), **knobs)
    assert said in placement.refusal(12)
