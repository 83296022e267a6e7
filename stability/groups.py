"""Which runs are one line of a figure, and which lines share a panel."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stability.gather import Entry
from stability.records import Run

LINES, PANELS = 8, 12  # that can be told apart in a panel, and on a page
ARM, SEED = "arm", "seed"


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that are one line; `facts` are those that all of them share."""

    name: str
    facts: dict[str, Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """What stands in which panel: (title, its groups, each with the number of its line), and the lines' names by number."""

    keys: tuple[str, ...]
    panels: list[tuple[str, list[tuple[int, Group]]]]
    names: list[str]


def grouped(entries: Iterable[Entry]) -> list[Group]:
    """Runs that differ in the seed alone, in order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group, []).append(entry)
    return [_group(name, members) for name, members in found.items()]


def grouped_along(entries: Iterable[Entry], key: str) -> list[Group]:
    """Runs that differ in the seed and in `key` alone, in order: a line along it."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(words({k: v for k, v in entry.facts.items() if k not in (SEED, key)}), []).append(entry)
    return [_group(name, members) for name, members in found.items()]


def arranged(groups: Sequence[Group]) -> Layout | None:
    """One panel where its lines can be told apart; else a panel for each value of one or two facts, the arms last, so that
    they are lines wherever they can be; None where that too is too many."""
    if len(groups) <= LINES:
        return Layout((), [("", list(enumerate(groups)))], [group.name for group in groups])
    keys = list(dict.fromkeys(key for group in groups for key in group.facts))
    layouts = [_split(groups, chosen) for size in (1, 2) for chosen in combinations(keys, size)]
    fit = [layout for layout in layouts if _fits(layout)]
    return min(fit, key=lambda layout: (ARM in layout.keys, len(layout.keys), len(layout.names)), default=None)


def words(facts: dict[str, Any]) -> str:
    """`pre model.depth=12`: the arm needs no key."""
    return " ".join(short(value) if key == ARM else f"{key}={short(value)}" for key, value in facts.items())


def short(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def values(facts: Iterable[dict[str, Any]], key: str) -> list[Any]:
    """The different values of a fact, numbers by size and else in order of appearance; None where it is absent."""
    found = list({short(fact.get(key)): fact.get(key) for fact in facts}.values())
    return sorted(found) if numeric(found) else found


def numeric(found: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in found)


def _group(name: str, members: Sequence[Entry]) -> Group:
    first, runs = members[0].facts, tuple(entry.run for entry in members if entry.run)
    shared = {k: v for k, v in first.items() if k != SEED and all(entry.facts.get(k) == v for entry in members)}
    return Group(name, shared, runs)


def _split(groups: Sequence[Group], keys: tuple[str, ...]) -> Layout:
    ranks = {key: [short(value) for value in values((group.facts for group in groups), key)] for key in keys}
    names = list(dict.fromkeys(_without(group.facts, keys) for group in groups))
    panels: dict[tuple[int, ...], list[tuple[int, Group]]] = {}
    for group in groups:
        place = tuple(ranks[key].index(short(group.facts.get(key))) for key in keys)
        panels.setdefault(place, []).append((names.index(_without(group.facts, keys)), group))
    titles = {place: words({k: ranks[k][n] for k, n in zip(keys, place, strict=True)}) for place in panels}
    return Layout(keys, [(titles[place], panels[place]) for place in sorted(panels)], names)


def _fits(layout: Layout) -> bool:
    """A line stands once in a panel, or two groups would look the same."""
    once = all(len({number for number, _ in drawn}) == len(drawn) for _, drawn in layout.panels)
    return once and len(layout.names) <= LINES and len(layout.panels) <= PANELS


def _without(facts: dict[str, Any], keys: tuple[str, ...]) -> str:
    return words({key: value for key, value in facts.items() if key not in keys})
