"""What the figures show is what the record holds, also for the runs that went wrong."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from stability import deep_panels, report
from stability.records import Run, metrics_line, read

ROOT = Path(__file__).parents[2]
EQUATIONS = {"pre": "x <- x + F(N_in(x))\nlogits = head(N_head(x))", "post": "x <- N_sum(x + F(x))"}
PRE_LOSSES, ENTROPY, FLOOR = (5.6, 2.1), 3.147, 1.62


def write_run(directory: Path, kind: str) -> Path:
    """A run directory: `stable` (12 layers), `stalled` (100, vanishing), `diverged` (nulls), `single` (1 step, 1 layer)."""
    depth, steps, log_every = {
        "stable": (12, 300, 10), "stalled": (100, 300, 10), "diverged": (24, 120, 10), "single": (1, 1, 1),
    }[kind]  # fmt: skip
    placement = "post" if kind == "stalled" else "pre"
    random = np.random.default_rng(depth)
    layer = np.arange(1, depth + 1)
    plateau = ENTROPY if kind == "stalled" else PRE_LOSSES[1]
    directory.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "val_loss": PRE_LOSSES[0]}]
    for step in range(1, steps + 1):
        loss = plateau + (PRE_LOSSES[0] - plateau) * math.exp(-step / 25) + 0.08 * random.standard_normal()
        profile = 0.3 / np.sqrt(layer) * np.exp(-step / 400)
        if kind == "stalled":  # vanishing towards the input, worse and worse
            profile = 10 ** (-1 - 7 * (1 - layer / depth) * min(1, step / 60))
        if kind == "diverged" and step > 70:
            loss, profile = loss * 1.25 ** (step - 70), profile * 1.4 ** (step - 70)
        bad = kind == "diverged" and (step > 110 or step == 40)
        profile = profile * np.exp(0.15 * random.standard_normal(depth))
        norm: dict[str, Any] = {"total": math.nan if bad else math.sqrt((profile**2).sum()) + 0.05}
        if step == 1 or step % log_every == 0 or step == steps:
            parts = {"attention": 0.6 * profile, "ffn": 0.8 * profile, "norm": 0 * profile, "residual": 0 * profile}
            if bad:
                parts["ffn"] = np.where(layer > 6, math.nan, parts["ffn"])
            norm |= parts | {"embed": 0.05, "head": 0.04}
        line = {"step": step, "loss": math.nan if bad and step > 40 else loss, "lr": 1e-3, "grad_norm": norm}
        lines.append(line | {"clip_coefficient": 1.0} | ({"skipped": True} if bad else {}))
        if step % 50 == 0 or step == steps:
            lines.append({"step": step, "val_loss": line["loss"]})
    (directory / "metrics.jsonl").write_text("".join(metrics_line(line) + "\n" for line in lines))
    (directory / "config.yaml").write_text(
        f"name: {kind}\nclip: {0 if kind == 'single' else 1.0}\nmodel: {{depth: {depth}}}\n"
    )
    verdict = {"single": "too_short", "deep": "stable"}.get(kind, kind)
    summary = {
        "verdict": verdict, "reason": f"The run is {verdict}: the mean of the last tenth is {plateau:.3f} nats.",
        "name": kind, "steps": steps, "unigram_entropy": ENTROPY, "floor": FLOOR if kind == "stable" else None,
        "first_bad_step": 111 if kind == "diverged" else None, "first_bad_layer": 7 if kind == "diverged" else None,
        "final_loss": None if kind == "diverged" else plateau, "final_val_loss": None if kind == "diverged" else plateau,
        "axes": {"norm": "rmsnorm", "placement": placement}, "equation": EQUATIONS[placement], "depth": depth,
    }  # fmt: skip
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures drawn in a test, to be questioned in place of being saved (which takes a second each)."""
    figures: list[Figure] = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure))
    return figures


def draw(tmp_path: Path, drawn: list[Figure], kind: str) -> tuple[Run, dict[str, Axes]]:
    run = read(write_run(tmp_path / kind, kind))
    report.draw_run(run, tmp_path / "one.png")
    return run, panels(drawn[-1])


def check_layout(figure: Figure) -> None:
    """Nothing runs off the page, and no panel, with its labels and legend, lies over another."""
    figure.draw_without_rendering()
    page = figure.bbox.expanded(1.001, 1.001)
    boxes = {panel.get_title(loc="left") or panel.get_ylabel(): panel.get_tightbbox() for panel in figure.axes}
    for name, box in boxes.items():
        assert box is not None and page.x0 <= box.x0 and box.x1 <= page.x1, f"{name!r} runs off the side"
        assert page.y0 <= box.y0 and box.y1 <= page.y1, f"{name!r} runs off the top or bottom"
        for other, its in boxes.items():
            assert other == name or its is None or not box.padded(-2).overlaps(its.padded(-2)), f"{name!r} on {other!r}"


def check_png(path: Path) -> None:
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size < 1_000_000


def panels(figure: Figure) -> dict[str, Axes]:
    return {panel.get_title(loc="left"): panel for panel in figure.axes}


def legend(panel: Axes) -> list[str]:
    shown = panel.get_legend()
    return [text.get_text() for text in shown.get_texts()] if shown else []


def curve(panel: Axes, name: str) -> Any:
    return next(line for line in panel.lines if line.get_label() == name)


def heat(panel: Axes) -> Any:
    return panel.collections[0]


def badge_colour(figure: Figure) -> Any:
    badge = figure.axes[0].texts[0].get_bbox_patch()
    assert badge is not None
    return badge.get_facecolor()


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.axes[0].texts)


def test_loss_panel_shows_record_mean_and_named_levels(tmp_path: Path, drawn: list[Figure]) -> None:
    run, shown = draw(tmp_path, drawn, "stable")
    panel = shown["Loss"]
    assert legend(panel) == [
        "training, each step", "mean of 6 steps", "validation", "unigram entropy 3.147 nats", "floor 1.620 nats",
    ]  # fmt: skip
    np.testing.assert_array_equal(curve(panel, "training, each step").get_ydata(), run.loss)
    np.testing.assert_allclose(curve(panel, "mean of 6 steps").get_ydata()[-1], run.loss[-6:].mean())
    assert curve(panel, "validation").get_xdata().tolist() == [0, 50, 100, 150, 200, 250, 300]
    assert set(curve(panel, "unigram entropy 3.147 nats").get_ydata()) == {ENTROPY}
    assert panel.get_yscale() == "linear" and panel.get_ylabel() == "loss (nats per token)"


def test_norm_panel_is_logarithmic_and_marks_clip_and_skipped(tmp_path: Path, drawn: list[Figure]) -> None:
    run, shown = draw(tmp_path, drawn, "diverged")
    panel = shown["Gradient norm of the whole model"]
    assert panel.get_yscale() == "log"
    skipped = curve(panel, "skipped (11 of 120 steps)")
    assert skipped.get_xdata().tolist() == [40, *range(111, 121)]
    assert set(curve(panel, "clip threshold 1").get_ydata()) == {1.0}
    assert set(curve(panel, "first bad: step 111, layer 7").get_xdata()) == {111}
    np.testing.assert_array_equal(curve(panel, "before clipping").get_ydata(), run.grad_norm_total)
    low, high = shown["Loss"].get_ylim()  # the exploded loss would flatten the rest
    assert 1.5 < low < 2.5 and 7 < high < 9
    assert "cut off: it rises to 1.58e+04" in shown["Loss"].get_ylabel()


def test_no_clipping_draws_no_threshold(tmp_path: Path, drawn: list[Figure]) -> None:
    _, shown = draw(tmp_path, drawn, "single")
    assert legend(shown["Gradient norm of the whole model"]) == ["before clipping"]


@pytest.mark.parametrize("kind", ["stable", "stalled", "diverged", "single"])
def test_heat_map_is_the_record(tmp_path: Path, drawn: list[Figure], kind: str) -> None:
    run, shown = draw(tmp_path, drawn, kind)
    panel = shown["Gradient norm of each block"]
    mesh, block = heat(panel), run.layers["block"].T
    np.testing.assert_array_equal(mesh.get_array().filled(np.nan), block)
    assert isinstance(mesh.norm, LogNorm)
    low, high = np.nanmin(block), np.nanmax(block)
    assert (mesh.norm.vmin, mesh.norm.vmax) == ((low, high) if low < high else (low / 3, high * 3))
    assert panel.get_ylim() == (0.5, run.depth + 0.5) and "1 = nearest the input" in panel.get_ylabel()
    edges = mesh.get_coordinates()[0, :, 0]
    assert ((edges[:-1] < run.layer_step) & (run.layer_step < edges[1:])).all()
    grey = "grey: zero or not finite" in drawn[-1].axes[-1].get_ylabel() + drawn[-1].axes[-2].get_ylabel()
    assert grey == bool(np.isnan(block).any()) == (kind == "diverged")


def test_profile_shows_first_middle_and_last_step(tmp_path: Path, drawn: list[Figure]) -> None:
    run, shown = draw(tmp_path, drawn, "stalled")
    panel = shown["Gradient norm against depth"]
    assert legend(panel) == ["step 1 (first logged)", "step 150 (middle logged)", "step 300 (last logged)"]
    last = curve(panel, "step 300 (last logged)").get_ydata()
    np.testing.assert_array_equal(last, run.layers["block"][-1])
    assert last[0] < 1e-7 and last[-1] > 1e-2 and panel.get_yscale() == "log"


def test_heading_says_verdict_name_reason_and_equation(tmp_path: Path, drawn: list[Figure]) -> None:
    draw(tmp_path, drawn, "stable")
    assert words(drawn[-1]).splitlines() == [
        "STABLE", "stable", "The run is stable: the mean of the last tenth is 2.100 nats.", *EQUATIONS["pre"].splitlines(),
    ]  # fmt: skip
    draw(tmp_path, drawn, "diverged")
    stable, diverged = (badge_colour(figure) for figure in drawn)
    assert stable != diverged


@pytest.mark.slow
def test_a_run_of_zeros_or_of_nothing_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    zero = tmp_path / "zero"
    zero.mkdir()
    (zero / "metrics.jsonl").write_text('{"step": 1, "loss": 0, "grad_norm": {"total": 0, "ffn": [0, 0]}}\n')
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "metrics.jsonl").write_text("")
    for directory in (zero, nothing):
        report.draw_run(read(directory), tmp_path / "x.png")
        check_layout(drawn[-1])
        mesh = heat(panels(drawn[-1])["Gradient norm of each block"])
        assert mesh.get_array().mask.all()
    report.draw_runs([read(zero), read(nothing)], tmp_path / "x.png")
    check_layout(drawn[-1])


def deepened(run: Run, depth: int) -> Run:
    block = np.random.default_rng(0).lognormal(size=(1000, depth))
    return replace(run, layers={"block": block}, layer_step=np.arange(1, 1001))


def test_more_logged_steps_than_pixels_are_thinned(tmp_path: Path, drawn: list[Figure]) -> None:
    deep = deepened(read(write_run(tmp_path / "single", "single")), 3)
    report.draw_run(deep, tmp_path / "deep.png")
    drawn_block = heat(panels(drawn[-1])["Gradient norm of each block"]).get_array()
    assert drawn_block.shape == (3, report.COLUMNS)
    np.testing.assert_array_equal(drawn_block[:, [0, -1]], deep.layers["block"][[0, -1]].T)


@pytest.mark.slow
def test_a_thousand_layers_make_a_small_file(tmp_path: Path) -> None:
    report.draw_run(deepened(read(write_run(tmp_path / "single", "single")), 1000), tmp_path / "deep.png")
    check_png(tmp_path / "deep.png")


@pytest.mark.slow
def test_no_panel_lies_over_another(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [read(write_run(tmp_path / kind, kind)) for kind in ("diverged", "stable", "single")]
    for run in runs[:2]:
        report.draw_run(run, tmp_path / "one.png")
    report.draw_runs(runs * 2, tmp_path / "six.png")
    for figure in drawn:
        check_layout(figure)


def test_comparison_shares_one_colour_scale_and_one_legend(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [read(write_run(tmp_path / kind, kind)) for kind in ("stable", "stalled")]
    report.draw_runs(runs, tmp_path / "two.png")
    figure = drawn[0]
    maps = [panel for panel in figure.axes if any(mesh.get_array() is not None for mesh in panel.collections[:1])]
    first, second = [panel for panel in maps if "placement=" in panel.get_title(loc="left")]
    assert heat(first).norm is heat(second).norm
    blocks = np.concatenate([run.layers["block"].ravel() for run in runs])
    assert (heat(first).norm.vmin, heat(first).norm.vmax) == (blocks.min(), blocks.max())
    texts = [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]
    assert texts == ["placement=pre model.depth=12  [stable]", "placement=post model.depth=100  [stalled]"]
    profile = panels(figure)["Gradient norm against depth, last step"]
    assert profile.get_xlabel().startswith("layer / depth")  # 12 layers against 100
    assert np.asarray(profile.lines[0].get_xdata())[[0, -1]].tolist() == [1 / 12, 1.0]
    loss = panels(figure)["Loss: running mean, validation as points"]
    assert legend(loss) == ["unigram entropy 3.147 nats"]


def test_more_than_eight_runs_are_said(tmp_path: Path, drawn: list[Figure]) -> None:
    run = read(write_run(tmp_path / "single", "single"))
    report.draw_runs([run] * 9, tmp_path / "nine.png")
    assert "the first 8 of 9 runs" in drawn[0].subfigs[1].get_suptitle()
    assert len(panels(drawn[0])["Gradient norm of the whole model"].lines) == 9
    with pytest.raises(ValueError, match="at least one run"):
        report.draw_runs([], tmp_path / "none.png")


def test_rolling_mean_leaves_nan_out_and_forgets_a_spike() -> None:
    mean = report.rolling_mean(np.array([1.0, 1e30, math.nan, 3.0, 5.0, math.nan, math.nan]), 2)
    np.testing.assert_array_equal(mean, [1.0, 5e29, 1e30, 3.0, 4.0, 5.0, math.nan])


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = str(ROOT / "scripts" / "report.py")
    return subprocess.run(
        [sys.executable, script, *arguments], check=False, capture_output=True, text=True, cwd=cwd, env=environment
    )


@pytest.mark.slow
def test_command_draws_lists_and_refuses(tmp_path: Path) -> None:
    write_run(tmp_path / "stable", "stable")
    write_run(tmp_path / "diverged", "diverged")
    one = command("stable", cwd=tmp_path)
    assert (one.returncode, one.stderr) == (0, "")
    assert one.stdout.splitlines() == [
        "stable/report.png",
        "stable  stable       loss  2.100  val  2.100  steps 300/300",
    ]
    check_png(tmp_path / "stable" / "report.png")

    two = command("stable", "diverged", "--out", "comparison.png", cwd=tmp_path)
    assert two.stdout.splitlines()[0] == "comparison.png" and len(two.stdout.splitlines()) == 3
    assert "diverged     loss      -  val      -  steps 120/120" in two.stdout
    check_png(tmp_path / "comparison.png")

    for arguments, sentence in (
        (["nowhere"], "nowhere is not a run"),
        (["stable", "--out", "x.pdf"], "must end in .png"),
    ):
        wrong = command(*arguments, cwd=tmp_path)
        assert wrong.returncode == 2 and wrong.stdout == ""
        assert sentence in wrong.stderr and wrong.stderr.count("\n") == 1


STREAM, EXTREMES = (
    "Stream against depth, on the fixed probe batch",
    "Attention logits and updates, the largest over the layers",
)


def probed(tmp_path: Path, drawn: list[Figure], kind: str, probes: dict[int, dict[str, Any]]) -> dict[str, Axes]:
    """The panels of a run of this kind with probe lines, by step."""
    directory = write_run(tmp_path / kind, kind)
    with (directory / "metrics.jsonl").open("a") as file:
        for step, seen in probes.items():
            file.write(metrics_line({"step": step, "probe": seen}) + "\n")
    report.draw_run(read(directory), tmp_path / "one.png")
    return panels(drawn[-1])


def test_a_run_without_probes_has_no_panels_for_them(tmp_path: Path, drawn: list[Figure]) -> None:
    _, shown = draw(tmp_path, drawn, "stable")
    assert not {STREAM, EXTREMES} & shown.keys()


def test_the_probes_panels_show_the_record(tmp_path: Path, drawn: list[Figure]) -> None:
    probes: dict[int, dict[str, Any]] = {
        step: {"stream_rms": [1.0 + step, 2.0, math.nan], "logit_max": [3.0, 4.0 + step], "update_ratio": [0.5, 0.1]}
        for step in (0, 100, 200, 300)
    }
    del probes[0]["update_ratio"]
    probes[200]["logit_max"] = [3.0, math.inf]
    shown = probed(tmp_path, drawn, "stable", probes)
    assert legend(shown[STREAM]) == ["step 0 (first probe)", "step 200 (middle probe)", "step 300 (last probe)"]
    np.testing.assert_equal(curve(shown[STREAM], "step 200 (middle probe)").get_ydata(), [201.0, 2.0, math.nan])
    assert shown[STREAM].get_yscale() == "log"
    np.testing.assert_equal(shown[EXTREMES].lines[0].get_ydata(), [4.0, 104.0, math.nan, 304.0])
    (other,) = (panel for panel in drawn[-1].axes if panel.get_ylabel() == "largest |update| / |weight| of a block")
    assert shown[EXTREMES].get_ylabel() == "largest attention logit"
    np.testing.assert_equal(other.lines[0].get_xdata(), [0, 100, 200, 300])
    np.testing.assert_equal(other.lines[0].get_ydata(), [math.nan, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    "seen", [{}, {"stream_rms": [math.nan] * 2, "logit_max": [math.nan]}, {"logit_max": 3.0, "stream_rms": []}]
)
def test_a_probe_with_nothing_to_draw_is_drawn(tmp_path: Path, drawn: list[Figure], seen: dict[str, Any]) -> None:
    shown = probed(tmp_path, drawn, "single", {0: seen})
    assert {STREAM, EXTREMES} <= shown.keys() and legend(shown[STREAM]) == []
    drawn[-1].draw_without_rendering()


def test_a_probe_of_one_step_is_seen(tmp_path: Path, drawn: list[Figure]) -> None:
    shown = probed(
        tmp_path, drawn, "single", {1: {"stream_rms": [1.0, 2.0], "logit_max": [3.0], "update_ratio": [0.1]}}
    )
    assert shown[EXTREMES].lines[0].get_marker() == "o"
    drawn[-1].draw_without_rendering()


def test_runs_of_one_step_are_drawn_as_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(deep_panels, "save", lambda figure, path: figures.append(figure))
    runs = []
    for name, cosine in (("a", [0.1, 0.9]), ("b", [0.1, 0.2])):
        directory = write_run(tmp_path / name, "single")
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(metrics_line({"step": 0, "probe": {"stream_rms": [1.0, 2.0], "token_cosine": cosine}}) + "\n")
        runs.append(read(directory))
    report.draw_runs(runs, tmp_path / "starts.png", names=["first", "second"])
    shown = panels(figures[-1])
    assert list(shown) == ["Gradient norm at step 1", "Stream before step 1", "Likeness of tokens before step 1"]
    cosines = [line.get_ydata() for line in shown["Likeness of tokens before step 1"].lines]
    np.testing.assert_array_equal(cosines, [[0.1, 0.9], [0.1, 0.2]])
    assert [text.get_text() for text in figures[-1].legends[0].get_texts()] == ["first", "second"]
    check_layout(figures[-1])
