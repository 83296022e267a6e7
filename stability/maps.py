"""What is drawn as cells: the gradient norm of a run by layer and step, and the verdicts of runs by two of their facts."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import NDArray

from stability.curves import drawable
from stability.gather import Entry
from stability.groups import ARM, SEED, Group, grouped, numeric, short, values
from stability.observables import verdict
from stability.panel import GREY, LAYER, VERDICTS, cut_off, decades, ink, log_ticks, page, plain, positive, rate
from stability.records import Array, Run
from stability.sheets import STEP, TEXT, WIDTH, Drawing, columns_for, left_out, legend, sheet

MAPS, COLUMNS, ROWS = 15, 400, 200  # panels, and the cells of each: steps, layers
LETTERS = {
    "stable": "S", "spiky": "K", "stalled": "L", "diverged": "D", "too_short": "T", "unfinished": "U", "interrupted": "I",
    "failed": "F", "refused": "R",
}  # fmt: skip
LARGEST = 30  # values of an axis that get a row or a column each

# ------------------------------------------------------------------------------------------------ layers by steps


def heat_maps(entries: Sequence[Entry]) -> Drawing | None:
    """Of each group one run, of at most 15 groups, on one colour scale; None where no run has two logged steps."""
    groups = grouped(entry for entry in entries if entry.run and len(drawable(entry.run)) > 1)
    if not groups:
        return None
    shown, columns = _representatives(groups)
    runs = [group.runs[0] for group in shown]
    figure, panels = sheet([group.name for group in shown], columns, shared=False, height=1.9)
    scale = colour_scale(runs)
    for panel, run in zip(panels, runs, strict=True):
        mesh = heat_map(panel, run, scale, COLUMNS, ROWS)
        panel.grid(False)
        panel.xaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    figure.supxlabel(STEP, fontsize=TEXT)
    figure.supylabel(LAYER, fontsize=TEXT)
    colour_bar(figure, mesh, panels, location="top", aspect=50).ax.tick_params(labelsize=TEXT - 1)
    which = "every group of runs" if len(shown) == len(groups) else f"{len(shown)} of {len(groups)} groups of runs"
    caption = f"Gradient norm of each block by layer and logged step, on one colour scale: the first seed of {which}."
    if any(run.depth > ROWS for run in runs):
        caption += f" More than {ROWS} layers are averaged over neighbours, in the logarithm."
    return figure, caption + left_out(entries, [run for group in groups for run in group.runs], "two logged steps")


def _representatives(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """At most 15 groups, and how many stand side by side. Where groups differ in one fact alone, they stand in a row, the
    arms below one another; else groups at equal distances."""
    keys = sorted(dict.fromkeys(key for group in groups for key in group.facts), key=lambda key: key == ARM)
    tables = [_table(groups, across) for across in keys]
    table, columns, _ = max(tables, key=lambda found: (found[2], len(found[0]), found[1]), default=([], 0, False))
    few = _spread(groups, MAPS)
    return (table, columns) if len(table) >= min(len(few), MAPS - 6) else (few, columns_for(len(few)))


def _table(groups: Sequence[Group], across: str) -> tuple[list[Group], int, bool]:
    """Groups by row, how many stand in a row, and whether all rows without a gap and all of `across` that is no number are
    there: up to three of its values from end to end, or where that leaves no room for all rows its ends."""
    rows: dict[tuple[tuple[str, str], ...], dict[str, Group]] = {}
    for group in groups:
        rest = tuple((key, short(value)) for key, value in group.facts.items() if key != across)
        rows.setdefault(rest, {}).setdefault(short(group.facts.get(across)), group)
    found = values((group.facts for group in groups), across)
    known, measure = [short(value) for value in found], numeric(found)
    fit = []
    for most in (3, 2):
        columns = _spread(known, most)
        whole = [[row[column] for column in columns] for row in rows.values() if row.keys() >= set(columns)]
        room = MAPS // len(columns)
        complete = len(whole) <= room and (measure or len(columns) == len(known))
        fit.append(([group for row in _spread(whole, room) for group in row], len(columns), complete))
    return fit[0] if fit[0][2] else max(reversed(fit), key=lambda found: found[2])


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, the first and the last among them, at equal distances."""
    return [items[place] for place in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]


def colour_scale(runs: Sequence[Run]) -> LogNorm:
    """From the smallest to the largest norm of all of them, so that their maps can be compared; of several runs six decades
    (`decades`)."""
    norms = [run.layers["block"] for run in runs]
    known = np.concatenate([positive(own).ravel() for own in norms])
    known = known[np.isfinite(known)]
    low, high = decades(norms) or ((known.min(), known.max()) if len(known) else (0.1, 1.0))
    return LogNorm(low, high) if low < high else LogNorm(low / 3, high * 3)


def heat_map(panel: Axes, run: Run, scale: LogNorm, columns: int, rows: int) -> QuadMesh:
    """A cell for each layer and logged step; grey where the norm is zero or not finite. Of more than `columns` steps that
    many are picked; of more than `rows` layers neighbours are averaged (`cells`)."""
    steps, borders, norms = cells(run, columns, rows)
    if not norms.size:
        steps, borders, norms = np.array([1]), np.array([0.5, 1.5]), np.full((1, 1), np.nan)
        panel.text(0.5, 0.5, "no layers recorded", transform=panel.transAxes, ha="center", fontsize=11)
    drawn = np.ma.masked_invalid(norms.T)
    mesh = panel.pcolormesh(_edges(steps), borders, drawn, norm=scale, cmap="viridis", rasterized=True)
    panel.set_facecolor("0.75")  # what is masked shows the ground
    return mesh


def cells(run: Run, columns: int, rows: int) -> tuple[NDArray[np.int64], Array, Array]:
    """(steps, borders between the rows in layers, norms by step and row). A row of several layers is the mean of their
    logarithms, and nan where one of them is zero or not finite: a layer without a gradient must not vanish among others.
    """
    steps, norms = run.layer_step, positive(run.layers["block"])
    if len(steps) > columns:
        kept = np.linspace(0, len(steps) - 1, columns).round().astype(int)
        steps, norms = steps[kept], norms[kept]
    borders = np.arange(run.depth + 1)
    if run.depth > rows:
        borders = np.linspace(0, run.depth, rows + 1).round().astype(int)
        norms = np.exp(np.add.reduceat(np.log(norms), borders[:-1], axis=1) / np.diff(borders))
    return steps, borders.astype(np.float64) + 0.5, norms


def colour_bar(figure: Figure | SubFigure, mesh: QuadMesh, panels: Sequence[Axes], **form: Any) -> Colorbar:
    norms: list[Any] = [np.ma.asarray(drawn.get_array()) for panel in panels for drawn in panel.collections]
    low, high = (float(end or 0.0) for end in mesh.get_clim())
    cut = cut_off([own.filled(np.nan) for own in norms], (low, high))
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(
        ("falls" in cut, "rises" in cut), "neither"
    )
    bar = figure.colorbar(mesh, ax=list(panels), extend=ends, **form)
    grey = "grey: zero or not finite" if any(np.ma.is_masked(own) for own in norms) else ""
    between = "\n" if bar.orientation == "vertical" else "; "
    bar.minorformatter = NullFormatter()
    if ticks := log_ticks(*bar.ax.get_xlim() if bar.orientation == "horizontal" else bar.ax.get_ylim()):
        bar.locator, bar.formatter = ticks
    bar.set_label(between.join(filter(None, ["gradient norm of the block (L2)", cut, grey])), fontsize=11)
    return bar


def _edges(middles: NDArray[np.int64]) -> Array:
    """The borders of cells around increasing `middles`: halfway between neighbours, and half a unit beyond the ends."""
    return np.concatenate([[middles[0] - 0.5], (middles[1:] + middles[:-1]) / 2, [middles[-1] + 0.5]])


# --------------------------------------------------------------------------------------------- verdicts by facts


def crossed(facts: Sequence[dict[str, Any]]) -> list[str]:
    """The two facts, of those but the seed, that part the runs into the most cells; one or none where there are no more."""
    found = {key: values(facts, key) for key in dict.fromkeys(key for own in facts for key in own) if key != SEED}
    keys = sorted((key for key in found if len(found[key]) > 1), key=lambda key: -len(found[key]))
    pairs = combinations(keys, 2)
    return list(
        max(pairs, key=lambda pair: len({tuple(short(own.get(k)) for k in pair) for own in facts}), default=keys)
    )


def stability_map(entries: Sequence[Entry]) -> Drawing | None:
    """Verdicts by the two facts that part the runs best; None where no fact but the seed does, or where no run was long
    enough to be judged."""
    there = [(entry.facts, entry.run) for entry in entries if entry.run]
    facts, runs = [own for own, _ in there], [run for _, run in there]
    keys, verdicts = crossed(facts), [verdict(run) for run in runs]
    if not keys or set(verdicts) == {"too_short"}:
        return None
    axes = {key: values(facts, key) for key in keys}
    keys.sort(
        key=lambda key: (not numeric(axes[key]), max(map(len, _names(key, axes[key]))))
    )  # words stand beside the rows
    across, down = keys if len(keys) == 2 else ("", keys[0])
    columns, rows = axes.get(across, [None]), axes[down]
    if max(len(columns), len(rows)) > LARGEST:
        figure, panel = _verdict_points(facts, verdicts, across, down)
        how = "Each letter is a run."
    else:
        cells: dict[tuple[int, int], list[str]] = {}
        for own, word in zip(facts, verdicts, strict=True):
            cells.setdefault((_rank(columns, own.get(across)), _rank(rows, own.get(down))), []).append(word)
        figure, panel = _verdict_cells(cells, _names(across, columns), _names(down, rows))
        if not numeric(rows):
            panel.invert_yaxis()  # arms are read from the top, numbers from below
        how = "A cell of several runs is split by their verdicts; it names the worst and how many of them came to it."
    panel.set_xlabel(across, fontsize=TEXT)
    panel.set_ylabel(down, fontsize=TEXT)
    counts = {word: verdicts.count(word) for word in _worst_last(verdicts)}
    legend(
        figure,
        [Patch(color=_colour(word), label=f"{_letter(word)}  {_said(word)} ({n})") for word, n in counts.items()],
    )
    return figure, f"Verdicts of {len(runs)} runs by {' and '.join(keys)}. {how}" + left_out(entries, runs, "a record")


def _verdict_cells(
    cells: dict[tuple[int, int], list[str]], columns: Sequence[str], rows: Sequence[str]
) -> tuple[Figure, Axes]:
    """In a cell the worst verdict stands on the left."""
    figure = page(WIDTH, 1.4 + len(rows) * (0.45 if len(rows) <= 15 else 0.34))
    panel = figure.add_subplot(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    corners, colours = [], []
    for (column, row), words in cells.items():
        left = column - 0.47
        for word in reversed(_worst_last(words)):
            right = left + 0.94 * words.count(word) / len(words)
            corners.append([(left, row - 0.45), (left, row + 0.45), (right, row + 0.45), (right, row - 0.45)])
            colours.append(_colour(word))
            left = right
    panel.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none"))
    width = (WIDTH - 0.6 - 0.08 * max(map(len, rows))) / len(columns)
    under = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    for place, text in _cell_texts(cells, width).items():
        mixed = len(set(cells[place])) > 1
        colour, box = ("black", under) if mixed else (ink(_colour(cells[place][0])), None)
        panel.text(*place, text, color=colour, fontsize=TEXT - 1, ha="center", va="center", linespacing=0.95, bbox=box)
    panel.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) * 0.08 > width else 0)
    panel.set_yticks(range(len(rows)), rows)
    panel.tick_params(labelsize=TEXT - 1, length=0)
    panel.spines[:].set_visible(False)
    return figure, panel


def _cell_texts(cells: dict[tuple[int, int], list[str]], width: float) -> dict[tuple[int, int], str]:
    """What stands in the cells: the worst verdict, in words or where those do not fit everywhere as its letter, and the
    count, beside it or below it."""
    worst = {place: _worst_last(words)[-1] for place, words in cells.items()}
    counts = {place: f"{words.count(worst[place])}/{len(words)}" for place, words in cells.items()}
    several = any(len(words) > 1 for words in cells.values())
    for name in (_said, _letter):
        for between in (" ", "\n"):
            texts = {place: name(word) + (between + counts[place] if several else "") for place, word in worst.items()}
            if max(len(line) for text in texts.values() for line in text.splitlines()) * 0.075 < width:
                return texts
    return texts


def _verdict_points(
    facts: Sequence[dict[str, Any]], verdicts: Sequence[str], across: str, down: str
) -> tuple[Figure, Axes]:
    """A letter for each run, at its values, or at their ranks where they are no numbers."""
    figure = page(WIDTH, 6.5)
    panel = figure.add_subplot()
    at: list[list[Any]] = []
    for key, axis, scale in ((across, panel.xaxis, panel.set_xscale), (down, panel.yaxis, panel.set_yscale)):
        known, own = values(facts, key), [fact.get(key) for fact in facts]
        if not numeric(known):
            own = [_rank(known, value) for value in own]
            axis.set_ticks(_spread(range(len(known)), LARGEST), labels=_spread(_names(key, known), LARGEST))
        elif known[0] > 0 and known[-1] > 8 * known[0]:
            scale("log")
        at.append(own)
    for word in _worst_last(verdicts):
        x, y = ([value for value, its in zip(own, verdicts, strict=True) if its == word] for own in at)
        panel.plot(x, y, linestyle="", marker=f"${_letter(word)}$", markersize=7, color=_colour(word))
    panel.tick_params(labelsize=TEXT - 1)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel


def _names(key: str, known: Sequence[Any]) -> list[str]:
    """What stands at the ticks of a fact."""
    if not key:
        return [""] * len(known)
    rates = key.split(".")[-1] == "lr" and numeric(known)
    return [rate(value) if rates else plain(short(value)) for value in known]


def _rank(known: Sequence[Any], value: Any) -> int:
    return [short(own) for own in known].index(short(value))


def _worst_last(verdicts: Sequence[str]) -> list[str]:
    """The different ones."""
    return [word for word in dict.fromkeys([*VERDICTS, *verdicts]) if word in verdicts]


def _letter(word: str) -> str:
    return LETTERS.get(word, "?")


def _said(word: str) -> str:
    return word.replace("_", " ")


def _colour(word: str) -> str:
    return VERDICTS.get(word, GREY)
