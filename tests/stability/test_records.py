"""The record of a run survives being written, cut short, resumed and read back."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stability.label import label
from stability.records import metrics_line, read


def write(
    directory: Path, lines: list[dict[str, Any]], config: str = "", summary: dict[str, Any] | None = None
) -> Path:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(metrics_line(line) + "\n" for line in lines))
    if config:
        (directory / "config.yaml").write_text(config)
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def line(step: int, loss: float = 2.0, **layers: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": {"total": 0.5, **layers}, "clip_coefficient": 1.0}


@pytest.mark.case("L04")
def test_a_line_names_what_is_not_finite_and_is_strict_json() -> None:
    ffn = [0.1] * 11 + [math.inf]
    text = metrics_line(
        {"step": 3, "loss": math.nan, "grad_norm": {"total": -math.inf, "embed": math.nan, "ffn": ffn}, "skipped": True}
    )
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert record["nonfinite"] == ["loss", "grad_norm.total", "grad_norm.embed", "ffn[12]"]
    assert record["loss"] is None and record["grad_norm"]["total"] is None
    assert record["grad_norm"]["ffn"] == [0.1] * 11 + [None]
    assert record["skipped"] is True and record["step"] == 3
    assert "\n" not in text


def test_a_finite_line_names_nothing() -> None:
    assert "nonfinite" not in metrics_line(line(1, ffn=[1.0]))


def test_numbers_keep_nine_digits_and_every_float32() -> None:
    text = metrics_line({"step": 1, "third": 1 / 3, "tokens": 12345678901, "part": {"x": [2 / 3 * 1e-30]}})
    assert text == '{"step": 1, "third": 0.333333333, "tokens": 12345678901, "part": {"x": [6.66666667e-31]}}'
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(1e-20)
    back = np.array(json.loads(metrics_line({"x": values}))["x"], dtype=np.float32)
    assert np.array_equal(values, back)


def test_a_run_is_read_as_arrays(tmp_path: Path) -> None:
    parts = {"attention": [3.0, math.nan], "ffn": [4.0, 1.0], "norm": [12.0, 1.0], "residual": [84.0, 0.0], "q": [1, 2]}
    lines = [
        {"step": 0, "val_loss": 5.5},
        line(1, 5.0, embed=0.1, head=0.2, **parts),
        line(2, math.nan) | {"skipped": True},
        {"step": 2, "val_loss": 4.5},
    ]
    run = read(write(tmp_path / "run", lines, "clip: 1.0\nname: hello\n", {"verdict": "diverged"}))
    assert run.step.tolist() == [1, 2] and run.skipped.tolist() == [False, True]
    np.testing.assert_equal(run.loss, [5.0, math.nan])
    np.testing.assert_equal(run.lr, [1e-3, 1e-3])
    np.testing.assert_equal(run.grad_norm_total, [0.5, 0.5])
    np.testing.assert_equal(run.clip_coefficient, [1.0, 1.0])
    assert run.val_step.tolist() == [0, 2] and run.val_loss.tolist() == [5.5, 4.5]
    assert run.layer_step.tolist() == [1] and run.embed.tolist() == [0.1] and run.head.tolist() == [0.2]
    np.testing.assert_equal(run.layers["block"], [[85.0, math.nan]])  # 3, 4, 12, 84, 85
    np.testing.assert_equal(run.layers["q"], [[1.0, 2.0]])
    assert "gate" not in run.layers and run.depth == 2
    assert run.config["clip"] == 1.0 and run.name == "hello" and run.verdict == "diverged" and run.notes == ()


def test_a_run_cut_short_is_read_up_to_the_cut(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", [line(1), line(2)])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.')
    run = read(directory)
    assert run.step.tolist() == [1, 2]
    assert run.summary is None and run.config == {} and run.name == "run" and run.verdict == "no verdict"
    assert sorted(run.notes) == [
        "config.yaml is missing",
        "line 3 of metrics.jsonl is cut short or no record: dropped",
        "summary.json is missing",
    ]


def test_the_later_line_of_a_step_wins(tmp_path: Path) -> None:
    lines = [line(1, 3.0, ffn=[1.0]), line(2, 2.9), {"step": 2, "val_loss": 9.0}, line(3, 2.8, ffn=[7.0])]
    lines += [line(2, 1.9), {"step": 2, "val_loss": 8.0}, line(3, 1.8, ffn=[6.0])]
    run = read(write(tmp_path / "run", lines))
    assert run.step.tolist() == [1, 2, 3] and run.loss.tolist() == [3.0, 1.9, 1.8]
    assert run.val_loss.tolist() == [8.0] and run.layers["ffn"].tolist() == [[1.0], [6.0]]


def test_a_run_that_took_no_step_has_empty_arrays(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"verdict": "failed"}')
    run = read(tmp_path)
    assert len(run.step) == 0 and run.layers["block"].shape == (0, 0) and "metrics.jsonl is missing" in run.notes[0]


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{name} is not a run directory: a run holds metrics.jsonl") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_runs_of_two_depths_in_one_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different depths: \[1, 2\] layers"):
        read(write(tmp_path / "run", [line(1, ffn=[1.0]), line(2, ffn=[1.0, 2.0])]))


def test_labels_say_all_that_differs_and_nothing_else(tmp_path: Path) -> None:
    def run(name: str, placement: str, depth: int, lr: float) -> Any:
        config = f"name: {name}\nplacement: {{_target_: x, places: {placement}}}\nmodel: {{depth: {depth}, dim: 64}}\n"
        summary = {"name": name, "axes": {"norm": "rmsnorm", "placement": placement}}
        return read(write(tmp_path / name, [], config + f"optimizer: {{lr: {lr}}}\nthreads: {depth}\n", summary))

    a, b, c, d = (
        run("a", "pre", 12, 0.1),
        run("b", "post", 12, 0.1),
        run("c", "post", 24, 0.001),
        run("d", "pre", 12, 0.1),
    )
    assert label([a]) == ["a"]
    assert label([a, b]) == ["placement=pre", "placement=post"]
    assert label([a, c]) == [
        "placement=pre model.depth=12 optimizer.lr=0.1",
        "placement=post model.depth=24 optimizer.lr=0.001",
    ]
    assert label([a, d]) == ["a", "d"]
    assert label([a, d, b]) == ["placement=pre a", "placement=pre d", "placement=post"]
    assert label([a, a]) == ["a a"] * 2  # a directory, from where they part


def test_reading_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, stability.records; assert not {'torch', 'matplotlib', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def probe_line(step: int, **seen: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step, "probe": seen}


def test_a_probe_names_its_places() -> None:
    """The stream's begin with the embedding, 0; the others are layers."""
    seen = {"loss": math.nan, "stream_rms": [math.inf, 1.0, math.nan], "ffn_rms": np.array([1.0, math.inf])}
    record = json.loads(metrics_line(probe_line(3, **seen)))
    assert record["nonfinite"] == ["probe.loss", "probe.stream_rms[0]", "probe.stream_rms[2]", "probe.ffn_rms[2]"]
    assert record["probe"] == {"loss": None, "stream_rms": [None, 1.0, None], "ffn_rms": [1.0, None]}


def test_probes_are_read_as_arrays(tmp_path: Path) -> None:
    lines = [probe_line(0, loss=5.0, stream_rms=[1.0, math.inf], gain=[2.0]), line(1), line(2)]
    lines += [probe_line(2, loss=4.0, stream_rms=[3.0, 4.0], update_ratio=[0.5], model_update=0.1)]
    lines += [probe_line(2, loss=3.0, stream_rms=[5.0, 6.0], update_ratio=[0.25], model_update=0.2)]
    run = read(write(tmp_path / "run", lines))
    assert run.step.tolist() == [1, 2] and run.probe_step.tolist() == [0, 2] and run.layer_step.size == 0
    np.testing.assert_equal(run.probe["loss"], [5.0, 3.0])
    np.testing.assert_equal(run.probe["stream_rms"], [[1.0, math.nan], [5.0, 6.0]])
    np.testing.assert_equal(run.probe["gain"], [[2.0], [math.nan]])
    np.testing.assert_equal(run.probe["update_ratio"], [[math.nan], [0.25]])
    np.testing.assert_equal(run.probe["model_update"], [math.nan, 0.2])


@pytest.mark.parametrize(
    "seen", [[1.0], "x", None, {"loss": "x"}, {"ffn_rms": [1.0, "x"]}, {"ffn_rms": [[1.0]]}, {"a": {}}]
)
def test_a_damaged_probe_is_dropped(tmp_path: Path, seen: Any) -> None:
    directory = write(tmp_path / "run", [probe_line(0, ffn_rms=[1.0, 2.0])])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "probe": seen}) + "\n")
    run = read(directory)
    assert run.probe_step.tolist() == [0] and run.probe["ffn_rms"].tolist() == [[1.0, 2.0]]
    assert "line 2 of metrics.jsonl is cut short or no record: dropped" in run.notes


def test_a_number_where_others_have_a_list_is_not_known(tmp_path: Path) -> None:
    run = read(write(tmp_path / "run", [probe_line(0, ffn_rms=[1.0, 2.0]), probe_line(1, ffn_rms=7.0)]))
    np.testing.assert_equal(run.probe["ffn_rms"], [[1.0, 2.0], [math.nan, math.nan]])


def test_probes_of_two_depths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different depths: ffn_rms has \[1, 2\] places"):
        read(write(tmp_path / "run", [probe_line(0, ffn_rms=[1.0]), probe_line(1, ffn_rms=[1.0, 2.0])]))
