"""How several runs are told apart: by all that differs between them."""

from collections.abc import Iterator, Sequence
from typing import Any

from stability.records import Run

# Settings that change how a run is watched, never what is learnt, or that others imply: no reason to tell two runs apart.
UNTOLD = {"name", "threads", "resume", "log_every", "val_every", "save_every", "logger", "recipe"}
UNTOLD |= {"allow_unstable", "resume_force", "workers", "patience", "probe_every", "picture"}


def label(runs: Sequence[Run]) -> list[str]:
    """A short label for each run from all that differs between them: `placement=post model.depth=24`.

    Axes come first, then the other settings, left out where an axis already implies them. Everything that differs is
    said, so that a comparison of two things at once does not pass for a comparison of one. Runs that differ in nothing
    get their names, and their directories where the names are the same.
    """
    axes = [{k: v for k, v in ((run.summary or {}).get("axes") or {}).items() if k not in UNTOLD} for run in runs]
    changed = _differing(axes)
    settings = [
        {key: value for key, value in _leaves(run.config) if not {key, key.split(".")[0]} & {*UNTOLD, *changed}}
        for run in runs
    ]
    facts = [{**own, **axis} for own, axis in zip(settings, axes, strict=True)]
    told = changed + [key for key in _differing(settings) if key not in changed]
    labels = [" ".join(f"{key}={_short(fact[key])}" for key in told if key in fact) for fact in facts]
    for more in ([run.name for run in runs], [str(run.directory) for run in runs]):
        labels = [f"{own} {extra}".strip() if labels.count(own) > 1 or not own else own
                  for own, extra in zip(labels, more, strict=True)]  # fmt: skip
    return labels


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for key, value in node.items():
        if not str(key).startswith("_"):  # Hydra's own: _target_, _partial_
            yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _differing(facts: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for fact in facts for key in fact)  # a dict, to keep the order
    return [key for key in keys if any(fact.get(key) != facts[0].get(key) for fact in facts)]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")
