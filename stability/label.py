"""How several runs are told apart: by all that differs between them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stability.records import Run

# Settings that change how a run is watched, never what is learnt, or that others imply: no reason to tell two runs apart.
UNTOLD = {"name", "threads", "resume", "log_every", "val_every", "save_every", "logger", "recipe"}
UNTOLD |= {"allow_unstable", "resume_force", "workers", "patience", "probe_every", "picture"}

# of axes that most runs leave alone, the choice that goes without saying
USUAL = {"stream": "single", "ramp": "none", "scaling": "none", "linear": "plain", "attention": "softmax"}

Facts = dict[str, Any]


def facts(runs: Sequence[Run]) -> list[Facts]:
    """Of each run all that is not the same in all of them: axes first, then the other settings, left out where an axis
    already implies them. Everything that differs is said, so that a comparison of two things at once does not pass for a
    comparison of one. A run that has no config, or no axes, has none of its own and makes none for the others."""
    axes = _axes(runs)
    changed = differing([own for own in axes if own])
    settings = [{k: v for k, v in leaves(run.config) if not {k, k.split(".")[0]} & UNTOLD} for run in runs]
    known = [own for own in settings if own]
    more = [key for key in differing(known) if key not in changed]
    told = changed + [key for key in more if not _implied(key, changed, axes, settings)]
    return [
        {key: every[key] for key in told if key in every}
        for every in ({**own, **axis} for own, axis in zip(settings, axes, strict=True))
    ]


def label(runs: Sequence[Run], told: Sequence[Facts] | None = None) -> list[str]:
    """A short label for each run from its `facts`: `placement=post model.depth=24`. Runs that differ in nothing get their
    names, and where those are the same their directories, from where they part."""
    labels = [words(own) for own in (facts(runs) if told is None else told)]
    places = [os.path.abspath(run.directory) for run in runs]
    shared = os.path.commonpath([os.path.dirname(own) for own in places]) if places else ""
    for more in ([run.name for run in runs], [os.path.relpath(own, shared) for own in places]):
        labels = [f"{own} {extra}".strip() if labels.count(own) > 1 or not own else own
                  for own, extra in zip(labels, more, strict=True)]  # fmt: skip
    return labels


def named(axes: Mapping[str, str]) -> list[str]:
    """What a run is called: its norm, placement and residual, and what of `USUAL` is otherwise; a choice of several axes once."""
    rest = [axis for axis, usual in USUAL.items() if axes.get(axis) != usual]
    return list(dict.fromkeys(axes[axis] for axis in ("norm", "placement", "residual", *rest) if axes.get(axis)))


def words(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={short(value)}" for key, value in facts.items())


def short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def param(params: Mapping[str, Any], name: str) -> str:
    """A param of a study by the last part of its name, where that is its alone: `depth=12`."""
    last = name.rpartition(".")[2]
    alone = sum(other.rpartition(".")[2] == last for other in params) == 1
    return f"{last if alone else name}={params[name]}"


def _axes(runs: Sequence[Run]) -> list[Facts]:
    """The choice on each axis. A run that has not come to its end has not written it: it is that of a run whose settings
    of the axis are the same."""
    written = [_mapping((run.summary or {}).get("axes")) for run in runs]
    found = []
    for run, own in zip(runs, written, strict=True):
        if not own and run.config:
            own = {
                axis: choice
                for other, its in zip(runs, written, strict=True)
                for axis, choice in its.items()
                if axis in run.config and run.config[axis] == other.config.get(axis)
            }
        found.append({axis: choice for axis, choice in own.items() if axis not in UNTOLD})
    return found


def _implied(key: str, changed: Sequence[str], axes: Sequence[Facts], settings: Sequence[Facts]) -> bool:
    """Whether the choice on the key's axis, which differs, says its value already: in all runs with that choice it is the same."""
    axis = key.split(".")[0]
    if axis not in changed:
        return False
    value_of: dict[str, Any] = {}
    pairs = [(str(own.get(axis)), its.get(key)) for own, its in zip(axes, settings, strict=True) if its]
    return all(value_of.setdefault(choice, value) == value for choice, value in pairs)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(`model.depth`, 12): what a nested mapping holds, by its full key."""
    if not isinstance(node, dict):
        yield path, node
        return
    for key, value in node.items():
        if not str(key).startswith("_"):  # Hydra's own: _target_, _partial_
            yield from leaves(value, f"{path}.{key}" if path else str(key))


def _mapping(value: Any) -> Facts:
    return value if isinstance(value, dict) else {}


def differing(facts: Sequence[Facts]) -> list[str]:
    """The keys that are not the same in all, in order."""
    keys = dict.fromkeys(key for fact in facts for key in fact)  # a dict, to keep the order
    return [key for key in keys if any(fact.get(key) != facts[0].get(key) for fact in facts)]
