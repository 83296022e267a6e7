"""Claims judged by the cases of a study, hand-made, with numbers worked out by hand; and what is said of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stability.claims import parse
from stability.judging import Case, Judged, found, judge, table, write
from stability.records import read, without_steps
from tests.stability.test_claims import ARMS, PARAMS, SCALES, claim
from tests.stability.test_observables import Stub, run


def judged(
    cases: list[Case], scale: str = "laptop", values: dict[str, list[Any]] | None = None, **words: Any
) -> Judged:
    claims = parse({"x": claim(**words)}, arms=ARMS, params=PARAMS, scales=SCALES)
    return judge(claims, cases, scale, values=values)[0]


def cases(losses: dict[tuple[str, int, int], float | None]) -> list[Case]:
    return [Case(arm, {"model.depth": depth, "seed": seed}, run(loss)) for (arm, depth, seed), loss in losses.items()]


GRID = {  # losses: of post the depth, of pre half of it; seed 1 one more
    (arm, depth, seed): depth * (1.0 if arm == "post" else 0.5) + seed
    for depth in (12, 6, 24)
    for seed in (0, 1)
    for arm in ARMS
}
LOSS = {"observe": "summary", "knobs": {"key": "final_loss"}}


def test_every_number_counts():
    holds = judged(cases(GRID), **LOSS, of={"arm": "pre", "model.depth": [6.0, 12]}, expect={"min": 3, "max": 7})
    numbers = [
        ("pre depth=12 seed=0", 6),
        ("pre depth=12 seed=1", 7),
        ("pre depth=6 seed=0", 3),
        ("pre depth=6 seed=1", 4),
    ]
    assert (holds.verdict, holds.numbers, holds.reason) == ("holds", numbers, "")
    fails = judged(cases(GRID), **LOSS, of={"arm": "pre", "model.depth": [6, 12]}, expect={"max": 6.9})
    assert fails.verdict == "fails" and fails.reason == "1 of 4 numbers not <= 6.9"
    assert found(fails) == "3 to 7 (3 of 4 hold)" and found(holds) == "3 to 7 (4 numbers)"


def test_runs_are_paired_by_what_against_leaves_open():
    words = {**LOSS, "of": {"arm": "post", "model.depth": [12, 24]}, "against": {"arm": "pre"}}
    ratios = judged(cases(GRID), **words, compare="ratio", expect={"min": 1})
    assert [label for label, _ in ratios.numbers] == [
        f"post depth={depth} seed={seed} against pre" for depth in (12, 24) for seed in (0, 1)
    ]
    assert [value for _, value in ratios.numbers] == pytest.approx([2, 13 / 7, 2, 25 / 13])
    words["against"] = {"model.depth": 6}
    differences = judged(cases(GRID), **words, compare="difference", expect={"min": 1})
    assert differences.numbers[-1] == ("post depth=24 seed=1 against depth=6", 18)  # its own arm, its own seed
    assert [value for _, value in differences.numbers] == [6, 6, 18, 18]


def test_each_run_meets_every_arm_that_against_names():
    words = {**LOSS, "of": {"arm": "post", "model.depth": 6, "seed": 0}, "compare": "ratio", "expect": {"min": 1}}
    both = judged(cases(GRID), **words, against={"arm": ["post", "pre"]})
    assert both.numbers == [("post depth=6 seed=0 against post", 1), ("post depth=6 seed=0 against pre", 2)]


def test_the_mean_over_seeds_comes_after_the_pairing_and_before_the_axis():
    words = {**LOSS, "of": {"arm": "post"}, "against": {"arm": "pre"}, "compare": "ratio", "seeds": "mean"}
    means = judged(cases(GRID), **words, expect={"min": 1})
    by_depth = {6: (2 + 7 / 4) / 2, 12: (2 + 13 / 7) / 2, 24: (2 + 25 / 13) / 2}
    assert dict(means.numbers) == pytest.approx({f"post depth={d} against pre": by_depth[d] for d in (12, 6, 24)})
    along = judged(cases(GRID), **words, along="model.depth", take="last/first", expect={"min": 1})
    assert along.numbers == [("post against pre", pytest.approx(by_depth[24] / by_depth[6]))]  # in order of depth


def test_an_axis_leaves_one_number_for_what_differs_otherwise():
    words = {**LOSS, "of": {"model.depth": [6, 24]}, "along": "model.depth", "expect": {"min": 0, "max": 2}}
    slopes = judged(cases(GRID), **words, take="exponent")
    want = {"post seed=0": 1, "pre seed=0": 1, "post seed=1": math.log(25 / 7, 4), "pre seed=1": math.log(13 / 4, 4)}
    assert slopes.verdict == "holds" and dict(slopes.numbers) == pytest.approx(want)
    seeds = {"of": {"arm": "post", "model.depth": 6}, "along": "seed", "expect": {"max": 14}}
    t = judged(cases(GRID), **LOSS, **seeds, take="significance")
    assert t.numbers == [("post depth=6", pytest.approx(13 / 12.706))]  # 6, 7: mean 6.5, std sqrt(1/2)
    assert judged(cases(GRID), **LOSS, **seeds, take="mean").numbers == [("post depth=6", 6.5)]


def test_what_does_not_commute_is_taken_first_where_asked():
    losses = {"post": [2.0, 4], "pre": [3.0, 1]}
    grid = [
        Case(arm, {"optimizer.lr": lr}, run(loss))
        for arm, row in losses.items()
        for lr, loss in zip([0.001, 0.01], row, strict=True)
    ]
    words = {"observe": "loss_or_start", "of": {"arm": "post"}, "against": {"arm": "pre"}, "compare": "difference"}
    words |= {"along": "optimizer.lr", "take": "mean_above_least", "expect": {"min": -9}}
    assert judged(grid, **words, take_first=True).numbers == [("post against pre", 0)]  # 1 - 1
    assert judged(grid, **words).numbers == [("post against pre", 2)]  # of -1 and 3


def test_a_run_that_is_missing_leaves_it_undecided_unless_another_breaks_it():
    some = [*cases({("pre", 6, 0): 2.0}), Case("pre", {"model.depth": 6, "seed": 1}, None)]
    some += [Case("pre", {"model.depth": 6, "seed": 2}, run(verdict="interrupted"))]
    open_ = judged(some, expect={"min": 1})
    said = "pre depth=6 seed=1: has not run; pre depth=6 seed=2: is interrupted"
    assert (open_.verdict, open_.reason, len(open_.numbers)) == ("undecided", said, 1)
    assert found(open_) == f"1; {said}"
    broken = judged(some, expect={"min": 2})
    assert broken.verdict == "fails" and broken.reason == f"1 of 1 numbers not >= 2; unknown: {said}"
    whole = judged(some, seeds="mean", expect={"min": 2})  # no mean of those that happen to be there
    assert whole.verdict == "undecided" and whole.numbers == [] and whole.reason == said


def test_of_many_reasons_the_first_are_told():
    gone = judged([Case("pre", {"model.depth": 6, "seed": seed}, None) for seed in range(5)])
    assert gone.reason.endswith("pre depth=6 seed=2: has not run; and 2 more")


def test_a_partner_that_is_missing_leaves_the_pair_undecided():
    words = {"of": {"arm": "post"}, "against": {"arm": "pre"}, "compare": "ratio"}
    one = judged([*cases({("post", 6, 0): 2.0}), Case("pre", {"model.depth": 6, "seed": 0}, None)], **words)
    assert (one.verdict, one.reason) == ("undecided", "pre depth=6 seed=0: has not run")
    none = judged(cases({("post", 6, 0): 2.0, ("pre", 6, 1): 2.0}), **words)
    assert (none.verdict, none.reason) == ("undecided", "post depth=6 seed=0: nothing to compare it with")
    assert judged(cases({("post", 6, 0): 2.0}), **words).reason.startswith("arm=pre is not run at scale laptop; ")
    shared = [*cases({("pre", 12, 0): 2.0, ("pre", 24, 0): 2.0}), Case("pre", {"model.depth": 6, "seed": 0}, None)]
    once = judged(shared, of={"model.depth": [12, 24]}, against={"model.depth": 6}, compare="ratio")
    assert once.reason == "pre depth=6 seed=0: has not run"
    zero = judged(cases({("post", 6, 0): 2.0, ("pre", 6, 0): 3.0}), **words)
    assert zero.reason == "post depth=6 seed=0 against pre: a division by 0"


def test_a_diverged_run_without_a_final_loss_is_undecided_but_has_a_start():
    one = [Case("pre", {"seed": 0}, run(None, "diverged"))]
    assert judged(one).reason == "pre seed=0: diverged"
    assert judged([Case("pre", {"seed": 0}, run(None))]).reason == "pre seed=0: summary.json has no final_loss"
    assert judged(one, observe="loss_or_start").numbers == [("pre seed=0", 5)]
    assert judged(one, observe="verdict", expect={"is": "stable"}).verdict == "fails"
    nan = judged([Case("pre", {}, Stub())], observe="probe", knobs={"name": "logit_max"}, expect={"max": 1})
    assert nan.reason == "pre: is not finite"


def test_verdicts_are_words():
    two = [Case("post", {"seed": seed}, run(verdict=word)) for seed, word in enumerate(["stalled", "stable"])]
    fails = judged(two, observe="verdict", expect={"is": "stalled"})
    assert (fails.verdict, found(fails), fails.reason) == ("fails", "1 stalled, 1 stable", "1 of 2 numbers not stalled")
    assert judged(two[:1], observe="verdict", expect={"is": "stalled"}).verdict == "holds"


def test_a_value_that_the_scale_does_not_run_leaves_it_undecided():
    one = judged(cases({("pre", 6, 0): 2.0}), of={"arm": "pre", "model.depth": [6, 24]}, expect={"min": 1})
    assert (one.verdict, one.reason) == ("undecided", "model.depth=24 is not run at scale laptop")
    assert judged(cases({("pre", 6, 0): 2.0}), of={"norm": "dyt"}).reason == "norm=dyt is not run at scale laptop"
    assert judged([Case("post", {}, run())], of={"arm": "pre"}).reason == "arm=pre is not run at scale laptop"
    axis = judged(cases({("pre", 6, 0): 2.0}), along="model.depth", take="max/min")
    assert axis.reason == "pre seed=0: fewer than 2 values of model.depth"
    assert judged([]).reason == "no run is what `of` names"


def test_a_part_of_an_axis_is_not_judged_as_the_whole():
    values = {"model.depth": [6, 12, 24], "seed": [0, 1]}
    words = {
        **LOSS,
        "of": {"arm": "post", "seed": 0},
        "along": "model.depth",
        "take": "exponent",
        "expect": {"min": 0.9},
    }
    whole, part = cases(GRID), [case for case in cases(GRID) if case.params["model.depth"] != 12]
    assert judged(whole, values=values, **words).verdict == judged(part, **words).verdict == "holds"
    open_ = judged(part, values=values, **words)
    said = "post seed=0: 2 of 3 values of model.depth were run"
    assert (open_.verdict, open_.numbers, open_.reason) == ("undecided", [], said)
    assert judged(part, values=values, **words | {"expect": {"max": 0}}).verdict == "undecided"  # nor broken by it
    more = [*whole, *cases({("post", 7, 0): 7.0})]
    assert judged(more, values=values, **words).verdict == "holds"
    typed = cases({("post", depth, 0): float(depth) for depth in (2, 3, 4)})
    assert judged(typed, values=values, **words).reason == "post seed=0: 0 of 3 values of model.depth were run"
    words["of"] = {"arm": "post", "model.depth": [6, 24]}  # all that the claim asks for
    assert judged(part, values=values, **words).verdict == "holds"
    one = [case for case in whole if case.params["seed"] == 0]
    words = {**LOSS, "of": {"arm": "pre", "model.depth": 6}, "along": "seed", "take": "mean"}
    assert judged(one, values=values, **words).reason == "pre depth=6: 1 of 2 values of seed were run"


@pytest.mark.parametrize("narrow", ARMS)
def test_both_sides_need_the_whole_axis_where_it_is_taken_first(narrow: str):
    part = [case for case in cases(GRID) if case.arm != narrow or case.params["model.depth"] != 12]
    words = {**LOSS, "of": {"arm": "post", "seed": 0}, "against": {"arm": "pre"}, "compare": "ratio"}
    words |= {"along": "model.depth", "take": "max/min", "take_first": True}
    found = judged(part, values={"model.depth": [6, 12, 24]}, **words)
    assert found.verdict == "undecided" and f"{narrow} seed=0: 2 of 3 values of model.depth were run" in found.reason


def test_another_scale_is_not_judged():
    one = judged(cases({("pre", 6, 0): 2.0}), scales=["gpu"])
    assert (one.verdict, one.numbers, one.reason) == ("not judged", [], "judged at scale gpu alone")
    assert judged(cases({("pre", 6, 0): 2.0}), scale="gpu", scales=["gpu"]).verdict == "holds"


def test_true_is_no_1_and_a_name_that_two_params_share_is_told_whole():
    params = {"a.on": [True, 1]}
    claims = parse({"x": claim(of={"a.on": True})}, arms=ARMS, params=params, scales=SCALES)
    both = [Case("pre", {"a.on": on, "b.on": 2}, run()) for on in (True, 1)]
    assert judge(claims, both, "laptop")[0].numbers == [("pre a.on=True b.on=2", 1)]


@pytest.mark.parametrize("summary", [None, "stable", "diverged", "stalled"])
@pytest.mark.parametrize("observe", ["gradient", "summary", "verdict", "below_entropy", "loss_or_start", "stable"])
def test_an_empty_record_is_no_exception(tmp_path: Path, observe: str, summary: str | None):
    (tmp_path / "metrics.jsonl").write_text("")
    if summary:
        (tmp_path / "summary.json").write_text(json.dumps(without_steps(summary, "")))
    knobs = {"key": "final_loss"} if observe == "summary" else {}
    expect = {"is": "spiky"} if observe == "verdict" else {"min": 2}
    one = judged([Case("pre", {}, read(tmp_path))], observe=observe, knobs=knobs, expect=expect)
    told = summary and observe in ("verdict", "stable")
    assert one.verdict == ("fails" if told else "undecided") and (told or one.reason.startswith("pre: "))


@pytest.mark.parametrize("observe", ["gradient", "probe", "mean_square", "mean_square_from_one", "mean_square_bounds"])
@pytest.mark.parametrize("shape", [(0, 0), (1, 0)])
def test_arrays_without_rows_or_layers_are_no_exception(observe: str, shape: tuple[int, int]):
    steps, numbers = np.zeros(shape[0], int), np.zeros(shape)
    empty = Stub({"verdict": "stable"}, steps + 1, {"block": numbers}, steps, {"stream_rms": numbers})
    knobs = {"probe": {"name": "stream_rms"}, "mean_square_bounds": {"low": 0.0, "high": 1.0}}.get(observe, {})
    for lacking in (empty, Stub({"verdict": "stable"}, steps + 1, {}, steps, {})):
        one = judged([Case("pre", {}, lacking)], observe=observe, knobs=knobs)
        assert one.verdict == "undecided" and one.reason.startswith("pre: ")


# ---------------------------------------------------------------------------------------------------------- what is said


def several() -> list[Judged]:
    words = "in post-norm the gradient of the last feed-forward [down] does not depend on the depth of the network"
    source = "Xiong et al. 2020, arXiv 2002.04745, Theorem 1"
    some = [*cases(GRID), Case("pre", {"model.depth": 6, "seed": 2}, None)]
    raw = {
        "holds": claim(says=words, source=source, **LOSS, of={"arm": "pre", "seed": [0, 1]}, expect={"min": 3}),
        "fails": claim(
            says=words,
            source=source,
            **LOSS,
            of={"arm": "post"},
            expect={"min": 0.3, "max": 20},
            note="why not",
            tolerance="measured on 2 seeds",
        ),
        "undecided": claim(says=words, source=source, **LOSS, of={"arm": "pre"}, expect={"min": 3}),
        "not_judged": claim(says=words, source=source, scales=["gpu"]),
        "word": claim(observe="verdict", of={"arm": "post"}, expect={"is": "stable"}),
    }
    return judge(parse(raw, arms=ARMS, params=PARAMS, scales=SCALES), some, "laptop")


def test_the_table_says_all_within_100_columns():
    console = Console(width=100, record=True)
    console.print(table(several()))
    text = console.export_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    flat = " ".join(text.split())
    for word in ("[down]", "0.3 to 20", "4 of 6 hold", "undecided", "not judged", "6 stable", "judged at scale gpu"):
        assert word in flat
    assert "holds" in flat and "fails" in flat


def test_the_file_holds_everything_and_is_strict(tmp_path: Path):
    write(several(), tmp_path / "claims.json", study="depth", scale="laptop", question="why?")
    text = (tmp_path / "claims.json").read_text()
    content = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (content["study"], content["scale"], content["question"]) == ("depth", "laptop", "why?")
    fails = content["claims"]["fails"]
    assert fails["verdict"] == "fails" and fails["expected"] == "0.3 to 20" and fails["observe"] == "summary"
    assert fails["numbers"][-1] == {"of": "post depth=24 seed=1", "value": 25, "holds": False}
    assert len(fails["numbers"]) == 6 and fails["found"] == "6 to 25 (4 of 6 hold)"
    assert (fails["note"], fails["tolerance"]) == ("why not", "measured on 2 seeds")
    assert content["claims"]["word"]["expect"] == {"is": "stable"}
    undecided = content["claims"]["undecided"]
    assert undecided["reason"] == "pre depth=6 seed=2: has not run" and len(undecided["numbers"]) == 6
