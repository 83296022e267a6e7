"""What a report is about: the runs below some directories, told apart, and what is wrong with each."""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stability.label import Facts, facts, label, param, words
from stability.records import SUMMARY, Run, read
from stability.study import PLAN, Plan, Point
from stability.sweep import overrides, same_job

PAGE, FIGURES = "report.html", "figures"
SEED = re.compile(r"(?:^|[ _])seed=\d+")
RECORD = ("metrics.jsonl", "summary.json")
NO_RUN = "a run holds metrics.jsonl, summary.json and config.yaml"
WORDS = {"name", "equation", "first_bad_parameter"}  # of a summary; `axes` is a mapping, the rest are numbers
LONGEST = 100  # characters of a name: where more differs than it can say, directories tell runs apart
TOLD = 3  # notes on a run, or words of another, before the rest is counted


@dataclass(frozen=True, eq=False)
class Entry:
    """One run of a report.

    `name` tells it apart, and `group` does without the seed: runs of one group are one line with a band. `facts` is the
    same as data: key -> value, `arm` first in a study, then only what is not the same in all (`model.depth`, `seed`).
    `run` is None where there is nothing to read, and `why` says why; `why` is also what is wrong with a run that can be read.
    """

    name: str
    group: str
    facts: dict[str, Any] = field(default_factory=dict)
    run: Run | None = None
    why: str = ""


@dataclass(frozen=True)
class Gathered:
    """All that a report is about. `words[i]` are the overrides that repeat `entries[i]`, None where they are not known.

    `plan` is of a study, which then has an entry for each of its points, in order. `others`: what lies below the
    directories and is no run, or none of the study, with the reason.
    """

    title: str
    entries: list[Entry]
    words: list[list[str] | None]
    others: dict[str, str]
    plan: Plan | None = None

    @property
    def runs(self) -> list[Run]:
        return [entry.run for entry in self.entries if entry.run]


def gather(directories: Sequence[Path]) -> Gathered:
    """The runs that are, or lie below, these directories; of one that holds `study.json` its runs, missing ones too.

    Whatever is damaged is said, and put up with.
    """
    places: dict[Path, str] = {}  # of the runs, with the name of each in its directory
    others: dict[str, str] = {}
    seen: set[Path] = set()
    for directory in directories:
        for place, why in _search(directory):
            name = str(place) if len(directories) > 1 or place == directory else str(place.relative_to(directory))
            if why:
                others[name] = why
            elif (real := place.resolve()) not in seen:
                seen.add(real)
                places[place] = name
    plan = _plan(directories[0], others) if len(directories) == 1 else None
    gathered = _of_study(directories[0], plan, places, others) if plan else _of_folders(places, others)
    shown = [directory.resolve().name or str(directory) for directory in directories]
    title = plan.study if plan else ", ".join(shown) if len(shown) <= TOLD else f"{len(shown)} directories"
    return replace(gathered, title=title)


def nothing(directories: Sequence[Path], gathered: Gathered) -> str:
    """Why there is no run at all, in one line."""
    named = [*map(str, directories)]
    reasons = [why if name in named else f"{name}: {why}" for name, why in gathered.others.items()]
    reasons = [*(f"{entry.name}: {entry.why}" for entry in gathered.entries), *reasons]
    left = f"; and {len(reasons) - TOLD} more" if len(reasons) > TOLD else ""
    return f"{', '.join(named)} is not a run directory and holds none: {'; '.join(reasons[:TOLD])}{left}"


def wrong(run: Run) -> str:
    """What is wrong with a run that can be read, in words; empty where it came to its end and its record is whole."""
    summary, steps = run.summary or {}, run.config.get("steps")
    verdict, said = run.verdict, []
    if run.summary is None:
        taken = f"{run.step[-1]} of {steps or '?'} steps so far" if len(run.step) else "no step so far"
        said.append(f"unfinished: {taken}; it is still going or was killed")
    elif verdict in ("interrupted", "failed", "refused"):
        said.append(f"{verdict}: {summary.get('reason') or 'no reason is given'}")
    elif verdict == "diverged" and summary.get("first_bad_step") == 1:
        said.append(f"diverged at step 1: {summary.get('reason') or 'no reason is given'}")
    elif "verdict" not in summary:
        said.append("summary.json has no verdict")
    done, there = int(summary.get("steps_done") or 0), len(run.step)
    if there < done:
        is_file = (run.directory / "metrics.jsonl").is_file()
        where = f"truncated: it has {there} steps" if is_file else "missing"
        said.append(f"metrics.jsonl is {where}, summary.json says {done}")
    known = ("metrics.jsonl is missing", *(["summary.json is missing"] if run.summary is None else []))
    notes = [note for note in run.notes if not note.startswith(known)]
    return "; ".join([*said, *notes[:TOLD], *([f"and {len(notes) - TOLD} more"] if len(notes) > TOLD else [])])


def load(directory: Path, parts: Collection[str] | None = None) -> Run:
    """The run in `directory`, with nothing in its summary that is not of its kind. ValueError, one line, where it cannot be
    read."""
    try:
        run = read(directory, parts)
    except OSError as error:
        raise ValueError(f"{error.filename or directory}: {error.strerror or error}") from None
    if run.summary is None:
        return run
    bad = [key for key, value in run.summary.items() if value is not None and not _of_its_kind(key, value)]
    notes = [f"summary.json: {key} is not what it should be: ignored" for key in bad]
    return replace(run, summary={k: v for k, v in run.summary.items() if k not in bad}, notes=(*run.notes, *notes))


def _of_its_kind(key: str, value: Any) -> bool:
    if key in ("verdict", "reason") or key in WORDS:
        return isinstance(value, str)
    if key == "axes":
        return isinstance(value, dict)
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return number or key not in SUMMARY


# --------------------------------------------------------------------------------------------------- where the runs are


def _search(directory: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[Path, str]]:
    """The runs that are, or lie below, a directory, each with ""; and each folder that holds none, with the reason."""
    try:
        status = directory.stat()
        names = sorted((name for name in os.listdir(directory) if not name.startswith(".")), key=_natural)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        yield directory, "there is no such directory" if missing else (error.strerror or str(error)).lower()
        return
    if any((directory / name).is_file() for name in RECORD):
        yield directory, ""
        return
    inode = (status.st_dev, status.st_ino)
    below = [directory / name for name in names if (directory / name).is_dir()]
    found = [] if inode in above else [pair for folder in below for pair in _search(folder, (*above, inode))]
    if any(not why for _, why in found) or (above == () and PLAN in names):
        yield from found
    elif above == () or (PAGE not in names and directory.name != FIGURES):  # what a report has left is not said
        yield directory, _foreign(names)


def _natural(name: str) -> list[str | int]:
    """An order in which 2 comes before 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def _foreign(names: list[str]) -> str:
    if not names:
        return "is empty"
    if damaged := [name for name in RECORD if name in names]:
        return f"no run: {' and '.join(damaged)} should be a file"
    if "config.yaml" in names or "overrides.yaml" in names:
        return "started, but left no metrics.jsonl and no summary.json"
    return f"no run: {NO_RUN}"


# -------------------------------------------------------------------------------------------------- what they are called


def _of_folders(places: dict[Path, str], others: dict[str, str]) -> Gathered:
    """Runs told apart by what differs in their settings, or by their directories where that is too much."""
    loaded = _loaded(list(places), {"block"})
    runs = {place: run for place, run in loaded.items() if isinstance(run, Run)}
    told = facts([*runs.values()])
    names = label([*runs.values()], told)
    if max(map(len, names), default=0) > LONGEST:
        names = [places[place] for place in runs]
    known = dict(zip(runs, zip(names, _groups(names, told), told, strict=True), strict=True))
    entries = []
    for place, run in loaded.items():
        if isinstance(run, Run):
            name, group, own = known[place]
            entries.append(Entry(name, group or run.name, own, run, wrong(run)))
        else:
            entries.append(Entry(places[place], places[place], {}, None, run))
    return Gathered("", entries, [overrides(place / "overrides.yaml") for place in loaded], others)


def _groups(names: Sequence[str], told: Sequence[Facts]) -> list[str]:
    """Each name without its seed, where the runs that then have the same name differ in no other setting."""
    cut = [SEED.sub("", name).strip() for name in names]
    settings: dict[str, set[str]] = {}
    for name, own in zip(cut, told, strict=True):
        settings.setdefault(name, set()).add(words({key: value for key, value in own.items() if key != "seed"}))
    return [short if len(settings[short]) == 1 else name for short, name in zip(cut, names, strict=True)]


def _of_study(directory: Path, plan: Plan, places: dict[Path, str], others: dict[str, str]) -> Gathered:
    """The points of a study, each with the run that has its words."""
    recorded = {place: overrides(place / "overrides.yaml") for place in places}
    by_words = {same_job(own): place for place, own in reversed(recorded.items()) if own is not None}
    found: list[Path | None] = []
    for point in plan.points:
        own = directory / point.directory
        place = by_words.get(same_job(point.words))
        found.append(place or (own if own in places and recorded[own] is None else None))
    loaded = _loaded([place for place in found if place], {"block", *_matrices(plan)})
    params_of = plan.points[0].params if plan.points else {}
    told = [key for key in params_of if len({str(point.params.get(key)) for point in plan.points}) > 1]
    entries = []
    for point, place in zip(plan.points, found, strict=True):
        params = {key: point.params[key] for key in told if key in point.params}
        names = {key: param(point.params, key) for key in params}
        name = " ".join([point.arm, *names.values()])
        group = " ".join([point.arm, *(text for key, text in names.items() if key != "seed")])
        run = loaded[place] if place else _absent(point, directory, recorded, others)
        why = wrong(run) if isinstance(run, Run) else run
        if place and recorded[place] is None:
            why = "; ".join([*([why] if why else []), "overrides.yaml cannot be read: taken for its directory's name"])
        entries.append(Entry(name, group, {"arm": point.arm, **params}, run if isinstance(run, Run) else None, why))
    claimed = {*found, *(directory / point.directory for point in plan.points)}
    stray = {name: f"no run of this study as {PLAN} has it" for place, name in places.items() if place not in claimed}
    own_names = {point.directory for point in plan.points}
    others = {name: why for name, why in others.items() if name not in own_names} | stray
    return Gathered("", entries, [point.words for point in plan.points], others, plan)


def _plan(directory: Path, others: dict[str, str]) -> Plan | None:
    if not (directory / PLAN).exists():
        return None
    try:
        plan = Plan.read(directory)
        plan.judged([None] * len(plan.points))  # its claims are checked
        return plan
    except (ValueError, OSError) as error:
        others[PLAN] = f"{error}; no claim is judged"
        return None


def _matrices(plan: Plan) -> Iterator[str]:
    """What the claims of a study read beside whole blocks."""
    for claim in plan.claims.values():
        knobs = claim.get("knobs") if isinstance(claim, dict) else None
        if isinstance(knobs, dict) and "matrix" in knobs:
            yield str(knobs["matrix"])


def _absent(point: Point, directory: Path, recorded: dict[Path, list[str] | None], others: dict[str, str]) -> str:
    """Why a point of a study has no run."""
    other = recorded.get(directory / point.directory)
    if other is None:
        why = others.get(point.directory)
        return f"has not run: {point.directory}: {why}" if why else f"has not run: {point.directory} is missing"
    differ = sorted({*same_job(other)} ^ {*same_job(point.words)})
    return f"{point.directory} holds the run of other words: {', '.join(differ[:TOLD])}"


def _loaded(places: Sequence[Path], parts: Collection[str]) -> dict[Path, Run | str]:
    """The run in each directory, or why it cannot be read."""
    runs: dict[Path, Run | str] = {}
    for place in tqdm(places, desc="reading", unit=" runs", disable=None, delay=1, leave=False):
        try:
            runs[place] = load(place, parts)
        except ValueError as error:
            runs[place] = f"cannot be read: {error}"
    return runs
