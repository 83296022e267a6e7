"""Which places hold a norm, layer by layer."""

import pytest

from model.placement import Placement
from model.site import Site


@pytest.mark.parametrize("depth, share, early", [(12, 0.25, 3), (4, 0.25, 1), (6, 0.25, 1), (7, 0.25, 1), (3, 0.25, 0), (32, 0.0625, 2)])  # fmt: skip
def test_mix_ln_rounds_down(depth: int, share: float, early: int):
    """The first floor(share * depth) layers (arXiv 2412.13795); 6.25% of 32 layers is its 7B setting."""
    placement = Placement(places=["in", "head"], early=["sum"], share=share)
    places = [placement.at(Site("ffn", layer, depth)) for layer in range(1, depth + 1)]
    assert places == [{"sum"}] * early + [{"in"}] * (depth - early)
    assert placement.ends == {"head"}


@pytest.mark.parametrize(
    "words, said",
    [
        ({"places": ["inn"]}, "placement.places knows in, out, sum, embed, head; found inn"),
        ({"places": ["in"], "early": ["head"]}, "placement.early knows in, out, sum; found head"),
        ({"places": ["in"], "share": 1.5}, r"placement.share must be in \[0, 1\]"),
    ],
)
def test_places_that_are_not_there(words: dict, said: str):
    with pytest.raises(ValueError, match=said):
        Placement(**words)
