"""What a study's file becomes: its runs, their words and their names; and that its arms differ in what they name alone."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

import train
from conf.check import check, check_hydra, unlisted
from conf.explain import explain
from conf.help import CONF, choices
from conf.study import Job, Study
from conf.sweep import Remember, Sweep, study_of
from data.windows import Windows
from hydra_plugins.study_sweeper import StudySweeper
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
    """The first of each arm, whole: constructors, sizes, traps. Its claims name what there is."""
    found, all_jobs = shipped(name, scale)
    parse(found.claims, arms=found.arms, params=found.everywhere(), scales=found.scales)
    firsts = {job.arm: job for job in reversed(all_jobs)}
    assert firsts.keys() == found.arms.keys()
    for job in firsts.values():
        cfg, axes = config(*job.words)
        train.check_whole(check(cfg), axes)


@pytest.mark.parametrize(("name", "scale"), every_scale())
def test_every_size_of_a_study_judges_and_draws(name: str, scale: str):
    """Some claim is judged there, on runs that are made there; and the picture has runs."""
    found, all_jobs = shipped(name, scale)
    runs = [{"arm": job.arm, **job.params} for job in all_jobs]

    def chosen(selection: dict[str, Any]) -> list[dict[str, Any]]:
        listed = {key: value if isinstance(value, list) else [value] for key, value in selection.items()}
        return [run for run in runs if all(run.get(key, values[0]) in values for key, values in listed.items())]

    claims = parse(found.claims, arms=found.arms, params=found.everywhere(), scales=found.scales)
    judged = [claim for claim in claims.values() if scale in (claim.scales or [scale])]
    assert judged and all(chosen(claim.of) and chosen(claim.against or {}) for claim in judged)
    assert 1 <= len(chosen(found.draw)) <= 16


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
        if not any(word == "residual=b2t" for word in found.arms[arm]):  # which scales queries and keys too
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
        ({"arms": {}}, [], "study.arms is empty: it needs one at least"),
        ({"arms": {"a": "norm=rmsnorm"}}, [], "study.arms.a='norm=rmsnorm' should be a valid list"),
        ({"scale": "huge"}, [], "study.scale=huge: this study knows laptop"),
        ({"draw": {"seeds": 0}, "params": {"seed": [0]}}, [], "study.draw.seeds names nothing in this study; did you mean 'seed'?"),
        ({"only": {"c": {}}}, [], "study.only.c names nothing in this study; known: a, b"),
        ({"only": {"a": {"x": [1]}}}, [], "study.only.a.x names nothing in this study"),
        ({}, ["norm=none"], "norm is set by the arms of this study (a, b): leave it out"),
        ({}, ["optimizer.lr=interval(0,1)"], "optimizer.lr=interval(0,1): a study takes lists of values, not intervals or patterns"),
        ({}, ["data.paths=glob(*)"], "data.paths=glob(*): a study takes lists of values, not intervals or patterns"),
        ({"params": {"x": ["a b", "a-b"]}}, [], "two runs of this study have the same name"),
        ({}, ["++norm=none"], "norm is set by the arms of this study (a, b): leave it out"),
        ({}, ["norm=none,rmsnorm"], "norm is set by the arms of this study (a, b): leave it out"),
        ({"arms": {"a": ["+norm=none"]}}, ["norm=none"], "norm is set by the arms"),
        ({"params": {"seed": [0]}}, ["~seed"], "~seed: a study sets keys and deletes none"),
        ({"params": {"seed": [0]}}, ["seed=[]"], "seed=[]: a param takes single values, as in seed=1,2"),
        ({"params": {"seed": [0]}}, ["seed=[0,[1]]"], "seed=[0,[1]]: a param takes single values"),
        ({"words": ["~logger"]}, [], "study.words[0]='~logger': a study sets keys and deletes none"),
        ({"arms": {"a": ["ffn=gelu", "ffn swiglu"]}}, [], "study.arms.a[1]='ffn swiglu' cannot be read as KEY=VALUE"),
        ({"arms": {"a": ["ffn=gelu,swiglu"]}}, [], "study.arms.a[0]='ffn=gelu,swiglu' names several values: those stand under params"),
        ({"base": ["a=["]}, [], "study.base[0]='a=[' cannot be read as KEY=VALUE"),
        ({"common": {"gpu": ["study=warmup"]}}, [], "study.common.gpu[0]='study=warmup': a study does not hold another"),
        ({"scales": {"laptop": {"words": ["hydra/launcher=basic"]}}}, [], "study.scales.laptop.words[0]='hydra/launcher=basic': a study says itself"),
        ({"words": ["++hydra.run.dir=x"]}, [], "study.words[0]='++hydra.run.dir=x': a study says itself"),
        ({"words": ["resume=runs/x"]}, [], "study.words[0]='resume=runs/x': the same command goes on with a study"),
        ({"params": {"study.scale": [1]}}, [], "study.params: 'study.scale': a study does not hold another"),
        ({"params": {"++seed": [1]}}, [], "study.params: '++seed' is no key"),
        ({"params": {"model depth": [1]}}, [], "study.params: 'model depth' cannot be read"),
        ({"arms": {"a": ["model.depth=2"]}, "params": {"model.depth": [3, 4]}}, [], "study.arms.a[0]='model.depth=2' sets model.depth, a param of this study: leave it out"),
        ({"arms": {"a": ["++seed=2"]}, "scales": {"laptop": {}, "gpu": {"params": {"seed": [0]}}}}, [], "study.arms.a[0]='++seed=2' sets seed, a param"),
        ({"params": {"seed": []}}, [], "study.params.seed is empty: it needs one at least"),
        ({"params": {"seed": 3}}, [], "study.params.seed=3 should be a valid list"),
        ({"params": {"seed": [0, [1]]}}, [], "study.params.seed[1]=[1] is no number, text, true, false or null"),
        ({"arms": {"a": [{"steps": 3}]}}, [], "study.arms.a[0]={'steps': 3} should be a valid string"),
        ({"arms": {1: ["norm=none"]}}, [], "study.arms.1: a name is text, as '1' is"),
        ({"scales": {1: {}}}, [], "study.scales.1: a name is text"),
        ({"question": None}, [], "study.question is missing"),
        ({"only": {"b": {"seed": [1]}}, "params": {"seed": [0]}}, [], "study.only.b.seed=1 is none of 0"),
        ({"only": {"b": {"seed": [True]}}, "params": {"seed": [0, 1]}}, [], "study.only.b.seed=True is none of 0, 1"),
        ({"only": {"b": {"seed": []}}, "params": {"seed": [0]}}, [], "study.only.b.seed is empty"),
        ({"draw": {"seed": 9}, "params": {"seed": [0, 1]}}, [], "study.draw.seed=9 is none of 0, 1"),
        ({"draw": {"arm": ["a", "gatde"]}}, [], "study.draw.arm='gatde' is none of a, b"),
        ({"only": {"a": {"seed": [0]}, "b": {"seed": [0]}}, "params": {"seed": [0]}}, ["seed=1"], "study.only leaves no run at scale laptop"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(own: dict[str, Any], typed: list[str], said: str):
    with pytest.raises(ValueError) as caught:
        jobs(study(**own), *typed)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_plus_before_a_key_makes_no_other_key_of_it():
    found = jobs(study(params={"seed": [0, 1, 2]}, words=["++steps=3"]), "++seed=5", "+steps=4")
    assert [(job.name, job.words) for job in found] == [
        ("a_seed=5", ["+steps=4", "++seed=5", "norm=rmsnorm"]), ("b_seed=5", ["+steps=4", "++seed=5", "norm=layernorm"])
    ]  # fmt: skip


def test_a_list_is_the_values_of_a_param_and_else_a_value():
    one = study(params={"model.depth": [2]})
    found = jobs(one, "model.depth=[3,5]", "optimizer.betas=[0.9,0.98]")
    assert [job.params for job in found] == [{"model.depth": depth} for depth in (3, 3, 5, 5)]
    assert found[0].words[0] == "model.depth=3" and found[0].words[-1] == "optimizer.betas=[0.9,0.98]"
    words = ["study=x", "seed=[0,1]", "model.depth=[3,5]", "optimizer.betas=[0.9,0.98]"]
    assert unlisted(words) == ["study=x", "seed=0,1", *words[2:]] and unlisted(words[1:]) == words[1:]


def test_a_list_of_a_root_scalar_becomes_two_runs_of_an_arm():
    (word,) = unlisted(["study=x", "seed=[0,1]"])[1:]
    assert [job.params["seed"] for job in jobs(study(params={"seed": [7]}), word)] == [0, 0, 1, 1]


def test_what_a_file_leaves_empty_is_not_said():
    one = study(arms={"a": None}, scales={"laptop": None}, claims=None, draw=None, params=None, common={"laptop": None})
    assert (one.claims, one.draw, one.scales["laptop"].words) == ({}, {}, [])
    assert [(job.name, job.words) for job in jobs(one)] == [("a", [])]


def test_equal_numbers_are_one_value_and_true_is_not_1():
    one = study(
        params={"x": [1, 1e-3]},
        only={"b": {"x": [1.0]}},
        draw={"x": [0.001]},
        scales={"laptop": {}, "gpu": {"params": {"x": [1.0, True]}}},
    )
    assert [job.name for job in jobs(one)] == ["a_x=1", "b_x=1", "a_x=0.001"]
    assert one.everywhere() == {"x": [1, 1e-3, True]} and one.everywhere()["x"][2] is True
    assert [job.arm for job in jobs(one, "x=true")] == ["a"]


@pytest.mark.parametrize("value", ["it's", "a,b", "true", "1e-3", "[1]", "a\\", "plain", "", None, False, 1e-5])
def test_a_value_reads_as_what_it_was(value: Any):
    (word, _) = jobs(study(params={"name": [value]}))[0].words
    found = OverridesParser.create().parse_override(word).value()
    assert found == value and type(found) is type(value)


def test_an_axis_and_what_stands_below_it_are_two_keys():
    one = study(arms={"a": ["ffn=swiglu"]}, params={"ffn.activation": ["relu"]})
    assert jobs(one)[0].words == ["ffn.activation=relu", "ffn=swiglu"]


def test_a_study_is_no_run():
    with pytest.raises(ValueError, match="a study is a sweep"):
        check(config("study=warmup")[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study=warmup", "hydra/sweeper=basic"], "hydra/sweeper=basic: a study has a sweeper of its own: leave it out"),
        (["study=warmup", "hydra.sweep.subdir=x"], "hydra.sweep.subdir=x: a study names the directories of its runs itself"),
        (["study=warmup", "hydra.run.dir=x"], "hydra.run.dir=x: hydra.sweep.dir is the directory of a study"),
        (["study=warmup", "hydra.mode=RUN"], "a study is a sweep: leave out hydra.mode"),
        (["study=warmup", "resume=x", "hydra.run.dir=x"], "resume=x: the same command goes on with a study"),
        (["hydra/sweeper=study"], "no study is chosen: study=NAME"),
        (["+study.scale=gpu"], "no study is chosen: study=NAME"),
        (["study=warmup", "~study.question"], "study.question is missing"),
        (["study=warmup", "+study.claims.x=1"], "study.claims.x=1 is no mapping"),
    ],
)  # fmt: skip
def test_words_that_a_study_would_not_look_at_are_refused(words: list[str], said: str):
    with pytest.raises(ValueError) as caught:
        study_of(composed(*words))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("study=a,b", "study=a,b: one study at a time"),
        ("+study=choice(a,b)", "+study=choice(a,b): one study at a time"),
        ("study=[a,b]", "study=[a,b]: one study at a time"),
        ("study=_base", "study=_base is no choice of study; choose from adam_rate, at_init, "),
    ],
)
def test_a_study_is_one_of_its_choices(word: str, said: str):
    check_hydra(["study=warmup", "name=a,b"])
    with pytest.raises(ValueError) as caught:
        check_hydra([word])
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question: [a\nb: c", "FILE, line 2: expected ',' or ']', but got ':'"),
        ("a: 1\na: 2", "FILE, line 2: found duplicate key a"),
        ("a: \x00", "unacceptable character #x0000"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_its_line(text: str, said: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(yaml.YAMLError) as caught:
        OmegaConf.load(tmp_path / "mine.yaml")
    line = explain(caught.value)
    assert line.startswith(said.replace("FILE", str(tmp_path / "mine.yaml"))) and "\n" not in line


@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_what_hydra_has_not_installed_is_one_line(group: str):
    with pytest.raises(MissingConfigException) as caught:
        composed(f"hydra/{group}=nope")
    assert f"hydra/{group}=nope is no choice of hydra/{group}; choose from" in explain(caught.value)


def test_the_first_run_of_each_arm_is_composed_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An arm's first run is not among the first runs where `only` keeps it from them."""
    points = jobs(study(params={"seed": [0, 1]}, only={"b": {"seed": [1]}}))
    sweep = Sweep(tmp_path / "it's\\", [], study=study(), points=points)
    monkeypatch.setattr(Remember, "sweep", sweep)
    composed, sweeper = (
        [],
        object.__new__(StudySweeper),
    )  # Hydra loads plugins anew: its base is not the one imported here
    sweeper.config = OmegaConf.create(
        {"hydra": {"overrides": {"hydra": []}, "runtime": {"choices": {"hydra/launcher": "joblib"}}}}
    )
    base = StudySweeper.__mro__[1]
    monkeypatch.setattr(base, "validate_batch_is_legal", lambda _, batch: composed.extend(batch))
    monkeypatch.setattr(base, "sweep", lambda *_: None)
    sweeper.sweep([])
    assert sorted(composed) == [
        ["seed=0", "norm=rmsnorm", "hydra/launcher=joblib"],
        ["seed=1", "norm=layernorm", "hydra/launcher=joblib"],
    ]
    (batch,) = sweeper.split_arguments([], None)
    read = OverridesParser.create().parse_overrides(batch[2])
    assert [word.value() for word in read[-2:]] == [str(sweep.directory), "b_seed=1"]
