"""What a study's file becomes: its runs, their words and their names; and that its arms differ in what they name alone."""

from hashlib import sha256
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

import train
from conf.check import check
from conf.help import CONF, choices
from conf.study import Job, Study
from data.windows import Windows
from model.linear import Linear
from stability.claims import parse
from tests.conftest import config

STUDIES = choices("study")


def composed(*words: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(words), return_hydra_config=True)


def study(**own: Any) -> Study:
    given = {"question": "?", "arms": {"a": ["norm=rmsnorm"], "b": ["norm=layernorm"]}, "scale": "laptop"}
    return Study.of(DictConfig({"study": given | {"scales": {"laptop": {}}} | own}))


def jobs(study: Study, *typed: str) -> list[Job]:
    return study.jobs(OverridesParser.create().parse_overrides(list(typed)))


def shipped(name: str, scale: str) -> tuple[Study, list[Job]]:
    cfg = composed(f"study={name}", f"study.scale={scale}")
    assert cfg.hydra.mode.name == "MULTIRUN" and cfg.hydra.sweep.dir == f"runs/study/{name}-{scale}"
    return (found := Study.of(cfg)), jobs(found)


def every_scale() -> list[tuple[str, str]]:
    return [(name, scale) for name in STUDIES for scale in Study.of(composed(f"study={name}")).scales]


@pytest.mark.parametrize(("name", "scale"), every_scale())
def test_every_run_of_a_study_is_one_that_train_would_start(name: str, scale: str):
    """Composed and checked, and of each arm the whole: constructors, sizes, traps. Its claims name what there is."""
    found, all_jobs = shipped(name, scale)
    parse(found.claims, arms=found.arms, params=found.everywhere(), scales=found.scales)
    seen = set()
    for job in all_jobs:
        if job.arm in seen and name != "lr_sensitivity":
            continue
        cfg, axes = config(*job.words)
        train.check_whole(check(cfg), axes)
        seen.add(job.arm)
    assert seen == set(found.arms)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_both_sizes_and_says_what_it_costs(name: str):
    found, _ = shipped(name, "laptop")
    text = (CONF / "study" / f"{name}.yaml").read_text(encoding="utf-8")
    assert {"laptop", "gpu"} <= set(found.scales)
    assert text.splitlines()[1].startswith(f"#   python train.py study={name} ") and "on two CPU cores" in text
    assert found.claims and "Expected" in text


def matrices_of(plain: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each initial matrix of a network of 3 layers, over the factor that the residual method puts on it."""
    model = train.network(plain, train.choices_of(plain), vocab=19)
    gains = {f"{name}.weight": module.gain for name, module in model.named_modules() if isinstance(module, Linear)}
    return {name: p.detach() / gains.get(name, 1) for name, p in model.named_parameters() if p.ndim > 1}


def hash_of(*tensors: torch.Tensor) -> str:
    return sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.mark.parametrize("name", STUDIES)
def test_arms_start_from_the_same_matrices_and_see_the_same_windows(name: str):
    """By their hashes; a matrix that a method scales is rounded otherwise, and compared by its numbers to float32's digits. An
    arm that says `init` itself is one whose matrices are to differ."""
    found, all_jobs = shipped(name, "laptop")
    first = [next(job for job in all_jobs if job.arm == arm) for arm in found.arms]
    windows, drawn = set(), {}
    for job in first:
        plain = check(config(*job.words, "model.depth=3")[0])
        order = {key: plain[key] for key in ("batch", "accumulate", "steps", "seed")}
        seen = Windows(torch.arange(5000) % 19, context=plain["model"]["context"], **order)
        windows.add(hash_of(*(seen[i] for i in range(min(4, plain["steps"] * plain["accumulate"])))))
        if not any(word.startswith("init") for word in found.arms[job.arm]):
            drawn[job.arm] = matrices_of(plain)
    assert len(windows) == 1
    base = drawn[first[0].arm]
    assert len(drawn) >= 2 and len(base) == 3 * 6 + 3
    for arm, matrices in drawn.items():
        assert matrices.keys() == base.keys(), arm
        for key, matrix in matrices.items():
            assert hash_of(matrix) == hash_of(base[key]) or torch.allclose(matrix, base[key], rtol=1e-6), (arm, key)
        unscaled = [key for key in base if key.rpartition(".")[0].endswith((".q", ".k"))] + ["embed.token"]
        assert len(unscaled) == 7 and all(hash_of(matrices[key]) == hash_of(base[key]) for key in unscaled), arm


def test_jobs_are_arms_crossed_with_params():
    one = study(params={"seed": [0, 1], "model.depth": [2, 4]}, base=["steps=5"], words=["steps=6", "batch=2"])
    found = jobs(one)
    assert len(found) == 8
    assert [job.name for job in found][:3] == ["a_seed=0_depth=2", "b_seed=0_depth=2", "a_seed=0_depth=4"]
    assert found[2].words == ["steps=6", "batch=2", "seed=0", "model.depth=4", "norm=rmsnorm"]


def test_the_command_line_narrows_params_and_sets_the_rest():
    one = study(params={"seed": [0, 1], "model.depth": [2, 4]}, words=["steps=6"])
    found = jobs(one, "study=x", "study.scale=laptop", "hydra.sweep.dir=here", "model.depth=3,5", "seed=7", "steps=9")
    assert [(job.arm, job.params) for job in found[:2]] == [(arm, {"seed": 7, "model.depth": 3}) for arm in "ab"]
    assert len(found) == 4 and found[0].words == ["steps=9", "seed=7", "model.depth=3", "norm=rmsnorm"]
    more = jobs(one, "optimizer.lr=1e-3,1e-2")
    assert {job.params["optimizer.lr"] for job in more} == {1e-3, 1e-2} and len(more) == 16


def test_an_arm_may_be_run_at_fewer_points():
    one = study(params={"seed": [0, 1], "model.depth": [2, 4]}, only={"b": {"model.depth": [4]}})
    assert [job.name for job in jobs(one)] == [
        "a_seed=0_depth=2", "a_seed=0_depth=4", "b_seed=0_depth=4", "a_seed=1_depth=2", "a_seed=1_depth=4", "b_seed=1_depth=4"
    ]  # fmt: skip


def test_values_keep_their_type_and_names_stay_file_names():
    one = study(params={"model.tied": [True], "data.note": ["a/b_c"], "optimizer.lr": [1e-3]})
    (job, _) = jobs(one)
    assert job.words[:3] == ["model.tied=True", "data.note=a/b_c", "optimizer.lr=0.001"]
    assert job.name == "a_tied=True_note=a-b_c_lr=0.001" and "/" not in job.name


@pytest.mark.parametrize(
    ("own", "typed", "said"),
    [
        ({"arm": {}}, [], "study.arm is no key of a study; did you mean 'arms'?"),
        ({"scales": {"laptop": {"param": {}}}}, [], "study.scales.laptop.param is no key of a study; did you mean 'params'?"),
        ({"arms": {}}, [], "study.arms: Dictionary should have at least 1 item"),
        ({"arms": {"a": "norm=rmsnorm"}}, [], "study.arms.a: Input should be a valid list"),
        ({"scale": "huge"}, [], "study.scale=huge: this study knows laptop"),
        ({"draw": {"seeds": 0}, "params": {"seed": [0]}}, [], "study.draw.seeds names nothing in this study; did you mean 'seed'?"),
        ({"only": {"c": {}}}, [], "study.only.c names nothing in this study; known: a, b"),
        ({"only": {"a": {"x": [1]}}}, [], "study.only.a.x names nothing in this study"),
        ({}, ["norm=none"], "norm is set by the arms of this study (a, b): leave it out"),
        ({}, ["optimizer.lr=interval(0,1)"], "optimizer.lr=interval(0,1): a study takes lists of values, not intervals"),
        ({"params": {"x": ["a b", "a-b"]}}, [], "two runs of this study have the same name"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(own: dict[str, Any], typed: list[str], said: str):
    with pytest.raises(ValueError) as caught:
        jobs(study(**own), *typed)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_study_is_no_run():
    with pytest.raises(ValueError, match="a study is a sweep"):
        check(config("study=warmup")[0])
