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
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stability.curves import drawable
from stability.gather import Entry
from stability.groups import ARM, SEED, Group, grouped, short, values
from stability.observables import verdict
from stability.panel import GREY, LAYER, VERDICTS, ink, page, plain, positive
from stability.records import Array, Run
from stability.sheets import STEP, TEXT, WIDTH, Drawing, columns_for, left_out, legend, sheet

MAPS, COLUMNS, ROWS = 12, 400, 200  # panels, and the cells of each: steps, layers
LETTERS = {
    "stable": "S", "spiky": "K", "stalled": "L", "diverged": "D", "too_short": "T", "unfinished": "U", "interrupted": "I",
    "failed": "F", "refused": "R",
}  # fmt: skip
LARGEST = 30  # values of an axis that get a row or a column each

# ------------------------------------------------------------------------------------------------ layers by steps


def heat_maps(entries: Sequence[Entry]) -> Drawing | None:
    """Of each group one run, of at most 12 groups, on one colour scale; None where no run has two logged steps."""
    groups = grouped(entry for entry in entries if entry.run and len(drawable(entry.run)) > 1)
    if not groups:
        return None
    shown, across = _representatives(groups)
    runs = [group.runs[0] for group in shown]
    columns = across or columns_for(len(runs))
    figure, panels = sheet([group.name for group in shown], columns, shared=False)
    scale = colour_scale(runs)
    for panel, run in zip(panels, runs, strict=True):
        mesh = heat_map(panel, run, scale, COLUMNS, ROWS)
        panel.grid(False)
        panel.xaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1))
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    figure.supxlabel(STEP, fontsize=TEXT)
    figure.supylabel(LAYER, fontsize=TEXT)
    colour_bar(figure, mesh, panels, location="top", aspect=50).ax.tick_params(labelsize=TEXT - 1)
    which = "every group of runs" if len(shown) == len(groups) else f"{len(shown)} of {len(groups)} groups of runs"
    caption = f"Gradient norm of each block by layer and logged step, on one colour scale: the first seed of {which}."
    if any(run.depth > ROWS for run in runs):
        caption += f" More than {ROWS} layers are averaged over neighbours, in the logarithm."
    return figure, caption + left_out(entries, [run for group in groups for run in group.runs], "two logged steps")


def _representatives(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """At most 12 groups, and how many stand side by side (0: no matter). Where two facts cross, the groups of up to 4 values
    of the one, the arms where there are any, by as many of the other, from end to end; else groups at equal distances."""
    facts = [group.facts for group in groups]
    if len(keys := crossed(facts)) == 2:
        across, down = sorted(keys, key=lambda key: key != ARM)
        columns = _spread(values(facts, across), 4)
        rows = _spread(values(facts, down), MAPS // len(columns))
        at = {(short(group.facts.get(across)), short(group.facts.get(down))): group for group in reversed(groups)}
        table = [at.get((short(column), short(row))) for row in rows for column in columns]
        shown = [group for group in table if group]
        if len(shown) == len(table) and len(shown) >= min(len(groups), MAPS - 3):
            return shown, len(columns)
    return _spread(groups, MAPS), 0


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, the first and the last among them, at equal distances."""
    return [items[place] for place in np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)]


def colour_scale(runs: Sequence[Run]) -> LogNorm:
    """From the smallest to the largest norm of all of them, so that their maps can be compared."""
    known = np.concatenate([positive(run.layers["block"]).ravel() for run in runs])
    known = known[np.isfinite(known)]
    low, high = (known.min(), known.max()) if len(known) else (0.1, 1.0)
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
    bar = figure.colorbar(mesh, ax=list(panels), **form)
    grey = any(np.ma.is_masked(drawn.get_array()) for panel in panels for drawn in panel.collections)
    between = "\n" if bar.orientation == "vertical" else "; "
    bar.set_label(
        "gradient norm of the block (L2)" + (f"{between}grey: zero or not finite" if grey else ""), fontsize=11
    )
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
    keys.sort(
        key=lambda key: max(len(short(value)) for value in values(facts, key))
    )  # long words stand beside the rows
    across, down = keys if len(keys) == 2 else ("", keys[0])
    columns, rows = values(facts, across), values(facts, down)
    places = [(_place(columns, own.get(across)), _place(rows, own.get(down))) for own in facts]
    if max(len(columns), len(rows)) > LARGEST:
        figure, panel = _map_page(len(rows) * 0.1, columns, rows)
        _letters(panel, places, verdicts)
        how = "Each letter is a run, at the rank of its values where they are too many to be named."
    else:
        figure, panel = _map_page(len(rows) * (0.45 if len(rows) <= 15 else 0.34), columns, rows)
        cells: dict[tuple[int, int], list[str]] = {}
        for place, word in zip(places, verdicts, strict=True):
            cells.setdefault(place, []).append(word)
        _split_cells(panel, cells, (WIDTH - 0.6 - 0.08 * max(len(short(row)) for row in rows)) / len(columns))
        how = "A cell of several runs is split by their verdicts; it names the worst and how many of them came to it."
    panel.set_xlabel(across, fontsize=TEXT)
    panel.set_ylabel(down, fontsize=TEXT)
    counts = {word: verdicts.count(word) for word in _worst_last(verdicts)}
    legend(
        figure,
        [Patch(color=_colour(word), label=f"{_letter(word)}  {_said(word)} ({n})") for word, n in counts.items()],
    )
    by = " and ".join(key for key in keys)
    return figure, f"Verdicts of {len(runs)} runs by {by}. {how}" + left_out(entries, runs, "a record")


def _map_page(height: float, columns: Sequence[Any], rows: Sequence[Any]) -> tuple[Figure, Axes]:
    figure = page(WIDTH, 1.4 + min(height, 12.0))
    panel = figure.add_subplot()
    for axis, shown in ((panel.xaxis, columns), (panel.yaxis, rows)):
        named = _spread(range(len(shown)), LARGEST)
        axis.set_ticks(named, [plain(short(shown[place])) if shown != [None] else "" for place in named])
    letters = sum(max(len(short(column)), 2) for column in _spread(columns, LARGEST))
    panel.tick_params(labelsize=TEXT - 1, length=0)
    panel.tick_params(axis="x", labelrotation=90 if letters > 70 else 0)
    panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    panel.spines[:].set_visible(False)
    return figure, panel


def _split_cells(panel: Axes, cells: dict[tuple[int, int], list[str]], width: float) -> None:
    """Cells of so many inches: the worst verdict stands on the left."""
    corners, colours = [], []
    for (column, row), words in cells.items():
        left = column - 0.47
        for word in reversed(_worst_last(words)):
            right = left + 0.94 * words.count(word) / len(words)
            corners.append([(left, row - 0.45), (left, row + 0.45), (right, row + 0.45), (right, row - 0.45)])
            colours.append(_colour(word))
            left = right
    panel.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="none", gid="cells"))
    texts = _cell_texts(cells, width)
    for place, text in texts.items():
        worst = _worst_last(cells[place])[-1]
        mixed = len(set(cells[place])) > 1
        under = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        colour = "black" if mixed else ink(_colour(worst))
        panel.text(*place, text, color=colour, fontsize=TEXT - 1, ha="center", va="center", linespacing=0.95, bbox=under if mixed else None)  # fmt: skip


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


def _letters(panel: Axes, places: Sequence[tuple[int, int]], verdicts: Sequence[str]) -> None:
    for word in _worst_last(verdicts):
        at = np.array([place for place, own in zip(places, verdicts, strict=True) if own == word]).T
        panel.plot(*at, linestyle="", marker=f"${_letter(word)}$", markersize=6, color=_colour(word), gid=word)
    panel.grid(alpha=0.25)


def _place(known: Sequence[Any], value: Any) -> int:
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
