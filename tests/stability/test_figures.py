"""The figures of a comparison: which there are, that they show the record, and that broken and many runs are drawn."""

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection, QuadMesh
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.figure import Figure

from stability import maps
from stability.curves import over_runs, rolling, smooth_loss, thin, thread
from stability.figures import PLATES, Plate, plates
from stability.gather import Entry
from stability.panel import VERDICTS, log_y
from stability.records import Run

ENTROPY = 3.2


def run(
    verdict: str = "stable", depth: int = 4, steps: int = 60, logged: int = 4, seed: int = 0, lr: float = 1e-3
) -> Run:
    """A run of random numbers; one that diverged climbs, and is nan from two thirds of its steps on."""
    random, step = np.random.default_rng(seed), np.arange(1, steps + 1)
    loss = 3.0 + 3.0 * np.exp(-step / 10) + 0.05 * random.standard_normal(steps)
    norm = np.exp(0.3 * random.standard_normal(steps))
    if verdict == "diverged":
        loss[steps // 3 :] += 0.5 * np.arange(steps - steps // 3)
        loss[2 * steps // 3 :] = norm[2 * steps // 3 :] = math.nan
    layer_step = np.unique(np.linspace(1, steps, logged).astype(int)) if steps else np.empty(0, int)
    block = random.lognormal(size=(len(layer_step), depth))
    summary = {"verdict": verdict, "unigram_entropy": ENTROPY, "first_loss": float(loss[0]) if steps else None}
    summary["final_loss"] = float(loss[-1]) if steps and verdict != "diverged" else None
    none, many = np.full(len(layer_step), math.nan), np.full(steps, math.nan)
    return Run(
        Path("run"), {"optimizer": {"lr": lr}, "model": {"depth": depth}}, summary, step, loss, many, norm, many,
        np.zeros(steps, bool), np.empty(0, int), np.empty(0), layer_step, {"block": block}, none, none,
        np.empty(0, int), {}, (),
    )  # fmt: skip


def entry(its: Run | None, seed: int = 0, **facts: Any) -> Entry:
    facts = {key.replace("__", "."): value for key, value in facts.items()}
    group = " ".join(f"{key}={value}" for key, value in facts.items())
    return Entry(f"{group} seed={seed}", group, {**facts, "seed": seed}, its, "" if its else "nothing there")


def drawn(entries: Sequence[Entry], *only: str) -> dict[str, Plate]:
    """The plates by name, or those alone that are asked for; not laid out, which takes most of the time."""
    found = {name: (title, draw(entries)) for name, (title, draw) in PLATES.items() if not only or name in only}
    return {name: Plate(name, title, own[1], own[0]) for name, (title, own) in found.items() if own}


def plate_of(name: str, entries: Sequence[Entry]) -> Plate:
    return drawn(entries, name)[name]


def legend(plate: Plate) -> list[str]:
    return [text.get_text() for found in plate.figure.legends for text in found.get_texts()]


def titles(plate: Plate) -> list[str]:
    found = [panel.get_title(loc="left").replace("\n", " ") for panel in plate.figure.axes]
    return [title for title in found if title]


def crosses(panel: Axes) -> list[list[float]]:
    found = [np.column_stack(line.get_data()) for line in panel.lines if line.get_marker() == "x"]
    return np.concatenate(found).tolist() if found else []


def curves(panel: Axes) -> list[Any]:
    """The lines of groups: neither crosses, nor points, nor levels."""
    return [line for line in panel.lines if line.get_linestyle() != "None" and line.get_linewidth() == 1.5]


def grid(**of: Any) -> list[Entry]:
    """Three arms at four rates."""
    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    return [
        entry(run(seed=7 * n + m, lr=lr, **of), arm=arm, optimizer__lr=lr)
        for n, arm in enumerate(("pre", "post", "peri"))
        for m, lr in enumerate(rates)
    ]


# ------------------------------------------------------------------------------------------------- which there are


def test_a_study_of_rates_has_no_figure_of_depth():
    names = list(drawn(grid()))
    assert names == ["loss", "gradient_norm", "heat_maps", "depth_profile", "loss_against_lr", "stability_map"]


def test_depth_is_drawn_where_it_differs():
    entries = [entry(run(depth=depth), arm="pre", model__depth=depth) for depth in (4, 8)]
    assert list(drawn(entries))[-2:] == ["loss_against_depth", "stability_map"]


def test_seeds_alone_make_no_map():
    assert "stability_map" not in drawn([entry(run(seed=seed), seed, arm="pre") for seed in range(3)])


def test_a_start_has_a_profile_and_nothing_else():
    entries = [entry(run("too_short", steps=1, depth=depth), arm="pre", model__depth=depth) for depth in (4, 8)]
    shown = drawn(entries)
    assert list(shown) == ["depth_profile"] and "at the one logged step" in shown["depth_profile"].caption


def test_nothing_makes_nothing_and_figures_come_one_at_a_time():
    assert drawn([]) == {} and drawn([entry(None, arm="pre")]) == {}
    one = plates(grid())
    assert next(one).name == "loss" and next(one).name == "gradient_norm"


# -------------------------------------------------------------------------------------------------- what they show


def test_a_line_is_the_median_of_the_seeds_and_the_band_their_range():
    runs = [run(seed=seed) for seed in range(3)]
    plate = plate_of("loss", [entry(its, seed, arm="pre") for seed, its in enumerate(runs)])
    (panel,) = plate.figure.axes
    losses = np.array([smooth_loss(its).y for its in runs])
    (line,) = curves(panel)
    np.testing.assert_array_equal(line.get_xdata(), runs[0].step)
    np.testing.assert_allclose(line.get_ydata(), np.median(losses, axis=0))
    band = panel.collections[0].get_paths()[0].vertices
    for step in (1, 30, 60):
        at = band[band[:, 0] == step, 1]
        np.testing.assert_allclose([at.min(), at.max()], [losses[:, step - 1].min(), losses[:, step - 1].max()])
    assert any(set(np.asarray(line.get_ydata())) == {ENTROPY} and line.get_linestyle() == "--" for line in panel.lines)
    assert legend(plate) == ["arm=pre", "unigram entropy 3.200 nats"] and "median over seeds" in plate.caption


def test_the_band_of_the_gradient_norm_keeps_every_spike():
    its = run(steps=200)
    its.grad_norm_total[100] = 1e4
    plate = plate_of("gradient_norm", [entry(its, arm="pre")])
    (panel,) = plate.figure.axes
    assert panel.get_yscale() == "log" and panel.collections[0].get_paths()[0].vertices[:, 1].max() == 1e4
    assert max(curves(panel)[0].get_ydata()) < 1e3 and "largest norm of those steps" in plate.caption


def test_a_diverged_run_ends_at_its_cross_and_the_axis_is_cut_off():
    lost = run("diverged", seed=1)
    entries = [entry(run(), 0, arm="pre"), entry(lost, 1, arm="pre")]
    plate = plate_of("loss", entries)
    (panel,) = plate.figure.axes
    ((step, top),) = crosses(panel)
    assert step == 40 and top == pytest.approx(1.5 * lost.loss[0], rel=0.05) and top < panel.get_ylim()[1] < 1.1 * top
    assert "cut off: it rises to" in panel.get_ylabel() and "diverged" in legend(plate)
    np.testing.assert_allclose(curves(panel)[0].get_ydata(), smooth_loss(entries[0].run).y)  # the sound seed alone
    own = next(found for found in panel.collections if isinstance(found, LineCollection)).get_segments()[0]
    np.testing.assert_allclose(own[:, 1], smooth_loss(lost).y)


def test_many_groups_are_a_panel_for_each_rate_with_the_arms_as_lines():
    plate = plate_of("loss", grid())
    assert titles(plate) == [f"optimizer.lr={lr}" for lr in ("0.001", "0.003", "0.01", "0.03")]
    assert legend(plate)[:3] == ["pre", "post", "peri"]
    looks = [[(line.get_color(), line.get_linestyle()) for line in curves(panel)] for panel in plate.figure.axes]
    assert looks[0] == looks[3] and len({colour for colour, _ in looks[0]}) == len({dash for _, dash in looks[0]}) == 3
    assert len({panel.get_ylim() for panel in plate.figure.axes}) == 1
    for panel, its in zip(plate.figure.axes, grid()[:4], strict=True):
        np.testing.assert_allclose(curves(panel)[0].get_ydata(), smooth_loss(its.run).y)


def test_a_panel_with_one_line_shows_the_others_in_grey():
    plate = plate_of("loss", [entry(run(seed=n), arm=f"arm{n}") for n in range(9)])
    assert titles(plate) == [f"arm{n}" for n in range(9)] and legend(plate)[0] == "the other panels' lines"
    assert all(len([line for line in panel.lines if line.get_color() == "0.7"]) == 9 for panel in plate.figure.axes)


def test_three_facts_are_parted_by_two():
    entries = [entry(run(depth=d, lr=lr), arm=arm, model__depth=d, optimizer__lr=lr)
               for arm in "abcd" for d in (4, 8, 12) for lr in (1e-3, 1e-2)]  # fmt: skip
    shown = drawn(entries)
    assert len(titles(shown["loss"])) == 3 and len(legend(shown["loss"])) == 8 + 1  # by depth: arm and rate as lines
    assert titles(shown["loss_against_lr"]) == ["model.depth=4", "model.depth=8", "model.depth=12"]


def test_heat_maps_are_the_records_on_one_colour_scale():
    entries = [entry(run(seed=3 * n + seed, depth=4 + n), seed, arm=f"arm{n}") for n in range(3) for seed in range(2)]
    entries[2].run.layers["block"][1, 2] = 0.0
    plate = plate_of("heat_maps", entries)
    panels = plate.figure.axes[:3]
    meshes = [next(mesh for mesh in panel.collections if isinstance(mesh, QuadMesh)) for panel in panels]
    blocks = [entries[place].run.layers["block"] for place in (0, 2, 4)]
    for mesh, block in zip(meshes, blocks, strict=True):
        np.testing.assert_array_equal(mesh.get_array().filled(0.0), block.T)
        assert mesh.norm is meshes[0].norm and isinstance(mesh.norm, LogNorm) and mesh.get_rasterized()
    known = np.concatenate([block[block > 0] for block in blocks])
    assert (meshes[0].norm.vmin, meshes[0].norm.vmax) == (known.min(), known.max())
    assert "grey: zero or not finite" in plate.figure.axes[3].get_xlabel()
    assert "the first seed of every group" in plate.caption


def test_a_scale_of_several_runs_is_of_the_decades_that_hold_the_most():
    """One run whose gradient vanishes, to 1e-17, would leave the others a single colour, and one stroke."""
    entries = [entry(run(seed=seed), arm=f"arm{seed}") for seed in range(3)]
    vanishing = entries[0].run.layers["block"]
    vanishing[:] = 10.0 ** np.array([-17, -11, -5, 1])
    norms = [own.run.layers["block"] for own in entries]
    plate = plate_of("heat_maps", entries)
    *panels, bar = plate.figure.axes
    scale = panels[0].collections[0].norm
    assert (scale.vmin, scale.vmax) == pytest.approx((1e-5, max(own.max() for own in norms)))
    assert bar.get_xlabel() == "gradient norm of the block (L2); cut off: it falls to 1e-17"
    plate = plate_of("depth_profile", entries)
    low, high = plate.figure.axes[0].get_ylim()
    assert 5e-6 < low <= 1e-5 and max(own.max() for own in norms) < high < 20
    assert plate.figure.get_supylabel() == "gradient norm of the block (L2)\ncut off: it falls to 1e-17"
    (panel,) = plate_of("heat_maps", entries[:1]).figure.axes[:1]
    assert panel.collections[0].norm.vmin == pytest.approx(1e-17)  # there is nothing to compare it with


def test_a_norm_that_explodes_leaves_the_others_to_be_seen():
    entries = [entry(run(seed=0), arm="pre"), entry(run("diverged", seed=1), arm="post")]
    entries[1].run.grad_norm_total[30:40] = 1e30
    plate = plate_of("gradient_norm", entries)
    (panel,) = plate.figure.axes
    assert panel.get_ylim()[1] < 1e9 and panel.get_ylabel() == "total gradient norm (L2)\ncut off: it rises to 1e+30"
    assert crosses(panel)[0][1] < panel.get_ylim()[1]


def test_a_long_legend_takes_no_room_from_the_panels():
    entries = [
        entry(run(seed=n), arm=f"a long name of an arm, such as is put together from directories {n}") for n in range(7)
    ]
    (plate,) = [plate for plate in plates(entries) if plate.name == "depth_profile"]
    place = plate.figure.axes[0].get_position()
    assert place.height * plate.figure.get_figheight() > 1.8
    (label,) = [text for text in plate.figure.texts if text.get_rotation() == 90]
    assert label.get_position()[1] == pytest.approx((place.y0 + place.y1) / 2)


def test_heat_maps_stand_in_rows_of_what_differs_in_one_fact():
    """Every arm is there before a third value is, and an arm that lacks a depth breaks no row."""
    depths = (12, 96, 200)
    entries = [entry(run(depth=2), arm=f"arm{arm}", model__depth=depth) for depth in depths for arm in range(7)]
    assert titles(plate_of("heat_maps", entries)) == [
        f"arm=arm{arm} model.depth={depth}" for arm in range(7) for depth in (12, 200)
    ]
    rates = (1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.4)
    entries = [entry(run(depth=2), arm=f"arm{arm}", optimizer__lr=lr) for lr in rates for arm in range(4)]
    found = titles(plate_of("heat_maps", entries))  # more rows would be left of the rates, without two of the arms
    assert found == [f"arm=arm{arm} optimizer.lr={lr}" for arm in range(4) for lr in (1e-4, 0.1, 0.4)]
    entries = [
        entry(run(depth=2), arm=arm, schedule__warmup=warmup, model__depth=depth)
        for depth in depths
        for warmup in (0, 9)
        for arm in ("pre", "post", *(["peri"] if (depth, warmup) == (96, 0) else []))
    ]
    found = titles(plate_of("heat_maps", entries))
    assert len(found) == 12 and found[:3] == [f"arm=pre schedule.warmup=0 model.depth={depth}" for depth in depths]


def test_what_is_left_out_changes_no_colour():
    entries = [entry(run(seed=seed), seed, arm=arm) for seed in range(2) for arm in ("pre", "post", "peri")]
    entries[0] = replace(entries[0], run=run(steps=0))
    assert legend(plate_of("loss", entries))[:3] == ["arm=pre", "arm=post", "arm=peri"]


def test_a_few_runs_that_differ_in_more_than_the_rate_are_no_line_along_it():
    entries = [entry(run(lr=lr), optimizer__lr=lr, batch=n) for n, lr in enumerate((1e-3, 1e-2, 1e-1))]
    assert "loss_against_lr" not in drawn(entries)


def test_fifteen_heat_maps_say_of_how_many():
    entries = [
        entry(run(), arm=f"arm{arm}", optimizer__lr=lr) for arm in range(5) for lr in (1e-3, 1e-2, 1e-1, 0.2, 0.3)
    ]
    plate = plate_of("heat_maps", entries)
    assert "the first seed of 15 of 25 groups" in plate.caption
    assert titles(plate)[:3] == [
        "arm=arm0 optimizer.lr=0.001",
        "arm=arm0 optimizer.lr=0.1",
        "arm=arm0 optimizer.lr=0.3",
    ]
    assert titles(plate)[-1] == "arm=arm4 optimizer.lr=0.3"


def test_more_layers_than_rows_are_averaged_in_the_logarithm():
    its = run(depth=450, logged=2)
    its.layers["block"][1, 7] = 0.0
    steps, borders, norms = maps.cells(its, 400, 200)
    assert steps.tolist() == [1, 60] and norms.shape == (2, 200) and borders[[0, -1]].tolist() == [0.5, 450.5]
    first = its.layers["block"][0, : int(borders[1])]
    assert norms[0, 0] == pytest.approx(np.exp(np.log(first).mean()))
    assert np.isnan(norms[1]).sum() == 1  # a layer without a gradient is seen among others


def test_the_profile_is_the_first_and_the_last_logged_step():
    its, other = run(), run(depth=8, seed=1)
    first, last = plate_of("depth_profile", [entry(its, arm="pre"), entry(other, arm="post")]).figure.axes
    for panel, row in ((first, 0), (last, -1)):
        np.testing.assert_array_equal(curves(panel)[0].get_ydata(), its.layers["block"][row])
        np.testing.assert_array_equal(curves(panel)[1].get_xdata(), np.arange(1, 9) / 8)  # depths differ
    assert first.get_yscale() == "log" and first.get_title(loc="left") == "first logged step"
    plate = plate_of("depth_profile", grid())
    assert len(titles(plate)) == 4 and "at the first as a thin line" in plate.caption
    faint = [line for line in plate.figure.axes[0].lines if line.get_linewidth() == 0.7]
    np.testing.assert_array_equal(faint[0].get_ydata(), grid()[0].run.layers["block"][0])


def test_the_final_loss_against_the_rate():
    rates, verdicts = (1e-3, 3e-3, 1e-1), ("stable", "stalled", "diverged")
    runs = [run(verdict, lr=lr, seed=n) for n, (lr, verdict) in enumerate(zip(rates, verdicts, strict=True))]
    runs[1].summary["final_loss"] = 99.0  # worse than the start, which it then counts as
    incomplete = replace(run(lr=0.5), summary=None)
    plate = plate_of(
        "loss_against_lr",
        [entry(its, arm="pre", optimizer__lr=its.config["optimizer"]["lr"]) for its in [*runs, incomplete]],
    )
    (panel,) = plate.figure.axes
    assert panel.get_xscale() == "log"
    assert [text.get_text() for text in panel.get_xticklabels()] == ["1e-3", "3e-3", "1e-1"]
    expected = [runs[0].loss[-1], runs[1].loss[0], runs[2].loss[0]]
    np.testing.assert_allclose(curves(panel)[0].get_ydata(), expected)
    np.testing.assert_allclose(crosses(panel), [[1e-1, expected[2]]])
    assert "Left out: 1 of 4 runs, without a final loss" in plate.caption


def test_depths_that_lie_far_apart_are_on_a_log_axis():
    for depths, scale in (((4, 8, 32), "linear"), ((4, 8, 40), "log")):
        plate = plate_of(
            "loss_against_depth", [entry(run(depth=depth), arm="pre", model__depth=depth) for depth in depths]
        )
        assert plate.figure.axes[0].get_xscale() == scale


# ------------------------------------------------------------------------------------------------------- the verdicts


def cells(plate: Plate) -> tuple[dict[tuple[float, float], str], PolyCollection]:
    (panel,) = plate.figure.axes
    return {text.get_position(): text.get_text() for text in panel.texts}, panel.collections[0]


def test_a_cell_is_split_by_verdict_and_names_the_worst():
    entries = [
        entry(run(verdict), seed, arm=arm, optimizer__lr=lr)
        for arm, lr, verdicts in (
            ("pre", 1e-3, ["stable"] * 3), ("pre", 1e-2, ["stable", "diverged", "spiky"]), ("post", 1e-3, ["stalled"] * 3),
        )
        for seed, verdict in enumerate(verdicts)
    ]  # fmt: skip
    plate = plate_of("stability_map", entries)
    texts, boxes = cells(plate)
    assert texts == {(0, 0): "stable 3/3", (1, 0): "diverged 1/3", (0, 1): "stalled 3/3"}
    panel = plate.figure.axes[0]
    assert [text.get_text() for text in panel.get_xticklabels()] == ["1e-3", "1e-2"]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["pre", "post"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("optimizer.lr", "arm")
    split = [tuple(colour) for colour in boxes.get_facecolors()[1:4]]
    assert split == [to_rgba(VERDICTS[word]) for word in ("diverged", "spiky", "stable")]
    widths = [np.ptp(path.vertices[:, 0]) for path in boxes.get_paths()[:4]]
    np.testing.assert_allclose(widths, [0.94, *[0.94 / 3] * 3])
    assert legend(plate) == ["S  stable (4)", "K  spiky (1)", "L  stalled (3)", "D  diverged (1)"]


def test_where_words_do_not_fit_there_are_letters():
    entries = [
        entry(run("stable" if n < 20 else "too_short", steps=2), seed, arm=arm, optimizer__lr=n / 100)
        for arm in ("pre", "post") for n in range(1, 25) for seed in range(2)
    ]  # fmt: skip
    texts, _ = cells(plate_of("stability_map", entries))
    assert texts == {(n, row): "S\n2/2" if n < 19 else "T\n2/2" for n in range(24) for row in range(2)}
    texts, _ = cells(
        plate_of("stability_map", [replace(own, group="") for own in entries if own.facts["arm"] == "pre"])
    )
    assert set(texts.values()) == {"stable 2/2", "too short 2/2"}  # one fact: a row each


def test_every_verdict_has_its_colour_and_its_letter():
    assert len(set(VERDICTS.values())) == len(VERDICTS) == 9
    assert maps.LETTERS.keys() == VERDICTS.keys() and len(set(maps.LETTERS.values())) == 9


def test_runs_that_took_no_step_are_on_the_map_alone():
    failed = replace(run("failed", steps=0), summary={"verdict": "failed"})
    entries = [entry(run(), arm="pre"), entry(failed, arm="post"), entry(None, arm="peri")]
    shown = drawn(entries)
    assert cells(shown["stability_map"])[0] == {(0, 0): "stable", (0, 1): "failed"}
    assert "Left out: 1 of 3 runs, without a record" in shown["stability_map"].caption
    assert "Left out: 2 of 3 runs, without two losses" in shown["loss"].caption


# ---------------------------------------------------------------------------------------------- broken, and very many


def broken() -> dict[str, Run]:
    blank = run()
    blank.loss[:] = blank.grad_norm_total[:] = blank.layers["block"][:] = math.nan
    endless = run()
    endless.loss[20], endless.grad_norm_total[20], endless.layers["block"][1] = math.inf, math.inf, math.inf
    zero = run()
    zero.grad_norm_total[:] = zero.layers["block"][:] = 0.0
    return {
        "sound": run(), "longer $x_1": run(steps=90, depth=9), "blank": blank, "endless": endless, "zero": zero, "_one": run(steps=1),
        "layerless": replace(run(), layers={"block": np.empty((0, 0))}, layer_step=np.empty(0, int)),
        "unfinished": replace(run(), summary=None), "unset": replace(run(), config={}), "odd": replace(run(), config={"optimizer": 3}),
        "flat": run(depth=1), "diverged": run("diverged"), "at once": run("diverged", steps=2), "new": run("a new word"),
    }  # fmt: skip


def test_broken_runs_are_drawn_or_left_out():
    entries = [Entry(name, name, {"arm": name}, its) for name, its in broken().items()]
    shown = {plate.name: plate for plate in plates([*entries, Entry("nothing", "nothing")])}
    assert {"loss", "heat_maps", "depth_profile", "stability_map"} <= shown.keys()
    assert all("Left out" in plate.caption for plate in shown.values())


@pytest.mark.parametrize("name", broken())
def test_each_broken_run_alone(name: str):
    for plate in drawn([Entry(name, name, {}, broken()[name])]).values():
        assert all(np.isfinite(panel.get_ylim()).all() for panel in plate.figure.axes)


def test_hundreds_of_runs_without_an_order_are_thin_lines_by_verdict():
    random, words = np.random.default_rng(0), ["stable", "stable", "stalled", "diverged"]
    entries = [
        entry(run(words[n % 4], seed=n, lr=lr), optimizer__lr=lr, init__gain=float(random.uniform()))
        for n, lr in enumerate(10 ** random.uniform(-4, -1, 300))
    ]
    shown = drawn(entries)
    (panel,) = shown["loss"].figure.axes
    lines = [found for found in panel.collections if isinstance(found, LineCollection)]
    assert [len(found.get_segments()) for found in lines] == [150, 75, 75]
    assert all(found.get_rasterized() for found in lines) and len(crosses(panel)) == 75
    assert legend(shown["loss"])[:3] == ["stable (150 runs)", "stalled (75 runs)", "diverged (75 runs)"]
    marks = {line.get_marker(): len(line.get_xdata()) for line in shown["stability_map"].figure.axes[0].lines}
    assert marks == {"$S$": 150, "$L$": 75, "$D$": 75} and shown["stability_map"].figure.axes[0].get_yscale() == "log"
    points = [line for line in shown["loss_against_lr"].figure.axes[0].lines if line.get_linestyle() == "None"]
    assert sum(len(line.get_xdata()) for line in points) == 300
    svg = io.BytesIO()
    shown["loss"].figure.savefig(svg, format="svg")
    assert svg.tell() < 700_000


def test_thinning_keeps_the_extremes_and_the_gaps():
    values = np.random.default_rng(0).standard_normal(10_007)
    values[5000], values[777], values[2000:2500] = 50.0, -50.0, math.nan
    kept = thin(values, 400)
    assert len(kept) <= 400 and (np.diff(kept) > 0).all()
    assert {777, 5000} <= set(kept.tolist()) and np.isnan(values[kept]).any()
    assert thin(values[:400], 400).tolist() == list(range(400))


def test_the_median_is_over_the_runs_that_are_there():
    whole = over_runs(
        [thread(np.array([1.0, 2.0, 3.0]), np.array([1.0, math.nan, 5.0])), thread(np.array([3.0]), np.array([9.0]))]
    )
    np.testing.assert_array_equal(whole.x, [1, 2, 3])
    np.testing.assert_array_equal(whole.y, [1, math.nan, 7])
    np.testing.assert_array_equal((whole.low[2], whole.high[2]), (5, 9))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_a_rolling_extreme(width: int):
    values = np.random.default_rng(0).standard_normal(20)
    expected = [values[max(0, place - width + 1) : place + 1].max() for place in range(20)]
    np.testing.assert_array_equal(rolling(np.fmax, values, width), expected)


@pytest.mark.parametrize("level", [1.0, 2.3, 3.2, 4.2, 7.1])
def test_what_is_flat_looks_flat(level: float):
    """Two numbers at least stand on the axis, and a change of a hundredth is not drawn as large as the panel."""
    panel = Figure().subplots()
    panel.plot([1, 2, 3], [0.99 * level, level, level])
    log_y(panel, "RMS")
    low, high = panel.get_ylim()
    assert high / low == pytest.approx(5) and low < 0.99 * level and high > level
    assert sum(low < tick < high for tick in panel.yaxis.get_majorticklocs()) >= 2
