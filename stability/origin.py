"""Where runs come from: the environment that they share, what differs in it, and the commands that repeat them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stability.gather import Entry, Gathered
from stability.label import Facts, differing, leaves
from stability.records import mapping
from stability.study import Plan

OWN = {"run"}  # of `environment.json`: a name that every run has alone


@dataclass(frozen=True)
class Origin:
    """What is recorded of the environments: `shared` by all runs, `differs` (key -> value -> the runs that have it), and the
    runs that recorded none. `settings`: what their configs have in common."""

    shared: Facts
    differs: dict[str, dict[str, list[str]]]
    unknown: list[str]
    settings: Facts


def origin(entries: Sequence[Entry]) -> Origin:
    """Of the entries that have a run."""
    known: dict[str, Facts] = {}
    unknown, configs = [], []
    for entry in entries:
        if entry.run is None:
            continue
        if found := _environment(entry):
            known[entry.name] = found
        else:
            unknown.append(entry.name)
        if entry.run.config:
            configs.append(dict(leaves(entry.run.config)))
    told = differing([*known.values()])
    differs: dict[str, dict[str, list[str]]] = {key: {} for key in told}
    for name, facts in known.items():
        for key in told:
            differs[key].setdefault(worded(facts.get(key)), []).append(name)
    return Origin(_common([*known.values()]), differs, unknown, _common(configs))


def study_command(plan: Plan) -> str:
    """The line that repeats a study; its words name it, and may name its scale."""
    named = ("study=", "study.scale=")
    words = [word for word in plan.words if not word.startswith(named)]
    where = ["--config-dir", plan.config_dir] if plan.config_dir else []
    return shlex.join(["python", "train.py", *where, f"study={plan.study}", f"study.scale={plan.scale}", *words])


def run_commands(gathered: Gathered) -> list[tuple[str, str]]:
    """(Name, the line that repeats it) of each run whose overrides are known."""
    pairs = zip(gathered.entries, gathered.words, strict=True)
    return [(entry.name, shlex.join(["python", "train.py", *words])) for entry, words in pairs if words is not None]


def worded(value: Any) -> str:
    """A value of a record for people: `11,512,623`, `0.003`, `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def _environment(entry: Entry) -> Facts:
    """Flat; the versions of packages as one fact."""
    try:
        found = mapping(entry.run.directory / "environment.json", []) if entry.run else None
    except OSError:
        found = None
    flat = leaves(found or {})
    facts = {key.replace(".", " "): value for key, value in flat if key not in OWN and not key.startswith("versions.")}
    if str(facts.get("git")).endswith("+"):
        facts["git"] = f"{facts['git'][:-1]}, with changes that were not committed"
    versions = (found or {}).get("versions")
    if isinstance(versions, dict):
        facts["packages"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return facts


def _common(facts: Sequence[Facts]) -> Facts:
    told = set(differing(facts))
    return {key: value for key, value in (facts[0] if facts else {}).items() if key not in told}
