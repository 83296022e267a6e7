"""What a claim may say, and the one line that each fault gets."""

import math
from typing import Any

import pytest

from stability.claims import expected, parse
from stability.records import SUMMARY

ARMS = ["post", "pre"]
PARAMS = {"model.depth": [6, 12, 24], "seed": [0, 1, 2], "optimizer.lr": [0.001, 0.01], "norm": ["rmsnorm", "dyt"]}
SCALES = ["laptop", "gpu"]


def claim(**words: Any) -> dict[str, Any]:
    base = {"says": "it learns", "source": "Someone 2020", "of": {}, "observe": "below_entropy", "expect": {"min": 0.5}}
    return {key: value for key, value in {**base, **words}.items() if value is not ...}


DEPTH = {"along": "model.depth", "take": "exponent"}
PRE = {"against": {"arm": "pre"}, "compare": "ratio"}


@pytest.mark.parametrize(
    "words, said",
    [
        ({"says": ...}, ".says is missing"),
        ({"says": ""}, ".says='' String should have at least 1 character"),
        ({"say": "a", "says": ...}, ".say is no key of a claim; did you mean 'says'?"),
        ({"of": {"am": "pre"}}, ".of.am is no param of the study; did you mean 'arm'?"),
        ({"of": {"model.dept": 6}}, ".of.model.dept is no param of the study; did you mean 'model.depth'?"),
        ({"of": {"arm": ["pre", "pots"]}}, ".of.arm='pots' is in no run of the study; did you mean 'post'?"),
        ({"of": {"model.depth": 7}}, ".of.model.depth=7 is in no run of the study; known: 6, 12, 24"),
        ({"of": {"norm": "rmsnrm"}}, ".of.norm='rmsnrm' is in no run of the study; did you mean 'rmsnorm'?"),
        ({"of": {"seed": True}}, ".of.seed=True is in no run of the study; known: 0, 1, 2"),
        ({"of": {"seed": []}}, ".of.seed is empty: name a value, or leave it out for all"),
        ({"observe": "gradeint"}, ".observe='gradeint' is not known; did you mean 'gradient'?"),
        ({"observe": "summary"}, ".knobs.key is missing: summary needs it"),
        ({"observe": "summary", "knobs": {"key": "final_los"}},
         ".knobs.key='final_los' is not known; did you mean 'final_loss'?"),
        ({"observe": "gradient", "knobs": {"layr": 1}}, ".knobs.layr is no knob of gradient; did you mean 'layer'?"),
        ({"observe": "gradient", "knobs": {"layer": 0}}, ".knobs.layer=0 is below 1"),
        ({"observe": "gradient", "knobs": {"layer": 1.5}}, ".knobs.layer=1.5 should be a valid integer"),
        ({"observe": "gradient", "knobs": {"layer": True}}, ".knobs.layer=True should be a valid integer"),
        ({"observe": "gradient", "knobs": {"matrix": "donw"}},
         ".knobs.matrix='donw' is not known; did you mean 'down'?"),
        ({"knobs": {"layer": 1}}, ".knobs.layer is no knob of below_entropy; it has none"),
        ({"against": {"arm": "pre"}}, ".compare is missing: against needs it"),
        ({"compare": "ratio"}, ".against is missing: compare needs it"),
        ({**PRE, "compare": "quotient"}, ".compare='quotient' should be 'ratio' or 'difference'"),
        ({**PRE, "against": {"arm": "per"}}, ".against.arm='per' is in no run of the study; did you mean 'pre'?"),
        ({**PRE, "against": {"seed": [0, 1]}},
         ".against pairs each run with itself: name an arm, or one value of a param"),
        ({"seeds": "all"}, ".seeds='all' should be 'each' or 'mean'"),
        ({"seeds": "mean", "along": "seed", "take": "significance"}, ".along=seed: seeds=mean leaves one number; leave it out"),
        ({"along": "model.depth"}, ".take is missing: along needs it"),
        ({"take": "exponent"}, ".along is missing: take needs it"),
        ({**DEPTH, "take": "exponnet"}, ".take='exponnet' is not known; did you mean 'exponent'?"),
        ({**DEPTH, "along": "depth"}, ".along='depth' is not known; did you mean 'model.depth'?"),
        ({**DEPTH, "of": {"model.depth": 6}}, ".of.model.depth is one value: along=model.depth needs several"),
        ({**DEPTH, "along": "norm"}, ".take=exponent needs numbers: norm has 'rmsnorm'"),
        ({**DEPTH, "take_first": True}, ".take_first=true needs against and along: it says which comes first"),
        ({**DEPTH, "against": {"model.depth": 6}, "compare": "ratio", "take_first": True},
         ".against.model.depth is one value: along=model.depth needs several"),
        ({"expect": {}}, ".expect is empty: give min or above, max or below"),
        ({"expect": {"min": 2, "max": 1}}, ".expect.min=2 and max=1: no number is both"),
        ({"expect": {"above": 1, "max": 1}}, ".expect.above=1 and max=1: no number is both"),
        ({"expect": {"min": 1, "below": 1}}, ".expect.min=1 and below=1: no number is both"),
        ({"expect": {"above": 1, "below": 1}}, ".expect.above=1 and below=1: no number is both"),
        ({"expect": {"min": 1, "above": 1}}, ".expect has both min and above: give one of them"),
        ({"expect": {"max": 1, "below": 2}}, ".expect has both max and below: give one of them"),
        ({"expect": {"mn": 2}}, ".expect.mn is no key of a claim; did you mean 'min'?"),
        ({"expect": {"belw": 2}}, ".expect.belw is no key of a claim; did you mean 'below'?"),
        ({"tolerance": 2}, ".tolerance=2 should be a valid string"),
        ({"expect": {"min": "2"}}, ".expect.min='2' should be a valid number"),
        ({"expect": {"max": math.inf}}, ".expect.max=inf should be a finite number"),
        ({"expect": {"is": "stable"}}, ".expect.is='stable': below_entropy is a number: give min or above, max or below"),
        ({"observe": "verdict"}, ".expect: a verdict is a word: give `is`, and nothing else"),
        ({"observe": "verdict", "expect": {"is": "stable", "above": 0}},
         ".expect: a verdict is a word: give `is`, and nothing else"),
        ({"observe": "verdict", "expect": {}}, ".expect is empty: give is"),
        ({"observe": "verdict", "expect": {"is": "staled"}}, ".expect.is='staled' is not known; did you mean 'stalled'?"),
        ({"observe": "verdict", "expect": {"is": "stable"}, "seeds": "mean"},
         ".observe=verdict is a word: it takes no against, along or seeds=mean"),
        ({"scales": ["latop"]}, ".scales='latop' is not known; did you mean 'laptop'?"),
    ],
)  # fmt: skip
def test_a_claim_that_does_not_fit_is_one_line(words: dict[str, Any], said: str):
    with pytest.raises(ValueError) as error:
        parse({"x": claim(**words)}, arms=ARMS, params=PARAMS, scales=SCALES)
    assert str(error.value) == "study.claims.x" + said


def test_claims_and_each_of_them_are_mappings():
    with pytest.raises(ValueError, match=r"^study.claims is no mapping of names to claims$"):
        parse([claim()], arms=ARMS, params=PARAMS, scales=SCALES)
    with pytest.raises(ValueError, match=r"^study.claims.x='it learns' is no mapping; its keys: says, source, of"):
        parse({"x": "it learns"}, arms=ARMS, params=PARAMS, scales=SCALES)
    with pytest.raises(ValueError, match=r"^study.claims.x.seeds=mean: the study has no param seed$"):
        parse({"x": claim(seeds="mean")}, arms=ARMS, params={}, scales=SCALES)


def test_the_numbers_of_a_summary_are_those_that_a_run_writes():
    for key in set(SUMMARY) - {"name", "axes", "equation", "first_bad_parameter"}:
        parse({"x": claim(observe="summary", knobs={"key": key})}, arms=ARMS, params=PARAMS, scales=SCALES)


@pytest.mark.parametrize(
    "expect, words",
    [({"max": 1.8}, "<= 1.8"), ({"min": 1e-4}, ">= 0.0001"), ({"min": -0.57, "max": -0.33}, "-0.57 to -0.33"),
     ({"min": 1, "max": 1}, "1"), ({"above": 0}, "> 0"), ({"below": 0.06}, "< 0.06"),
     ({"above": -0.06, "below": 0.06}, "> -0.06 and < 0.06"), ({"min": 0, "below": 1}, ">= 0 and < 1"),
     ({"above": 0, "max": 1}, "> 0 and <= 1")],
)  # fmt: skip
def test_what_is_expected_in_words(expect: dict[str, float], words: str):
    (one,) = parse({"x": claim(expect=expect)}, arms=ARMS, params=PARAMS, scales=SCALES).values()
    assert expected(one) == words
    verdict = claim(observe="verdict", expect={"is": "stalled"})
    assert expected(parse({"x": verdict}, arms=ARMS, params=PARAMS, scales=SCALES)["x"]) == "stalled"


@pytest.mark.parametrize(
    "expect, held",
    [({"min": 1}, [1, 2]), ({"above": 1}, [2]), ({"max": 1}, [0, 1]), ({"below": 1}, [0]),
     ({"min": 0, "below": 1}, [0]), ({"above": 0, "max": 1}, [1])],
)  # fmt: skip
def test_min_and_max_are_included_above_and_below_are_not(expect: dict[str, float], held: list[int]):
    (one,) = parse({"x": claim(expect=expect)}, arms=ARMS, params=PARAMS, scales=SCALES).values()
    assert [number for number in (0, 1, 2) if one.expect.holds(number)] == held
