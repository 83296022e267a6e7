"""`resume=DIR`: DIR's own overrides first, the command line's after them, in DIR."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

# what changes how a run is watched, not what it computes
FREE = {"resume", "name", "log_every", "val_every", "save_every", "allow_unstable", "logger"}


def as_overrides(words: list[str]) -> list[str]:
    """The command line as it is, or, where it says `resume=DIR`, with what DIR was started with before it.

    Raises ValueError where DIR is no run directory.
    """
    given = {_key(word): word.partition("=")[2] for word in words}
    if given.get("resume") in (None, "null"):
        return words
    directory = Path(given["resume"])
    started = directory / "overrides.yaml"
    if not started.is_file():
        raise ValueError(f"resume={directory}: no run to continue there ({started.name} is missing)")
    before = [word for word in yaml.safe_load(started.read_text(encoding="utf-8")) if _key(word) not in given]
    return [*before, *words, f"hydra.run.dir={directory}"]


def recorded(plain: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`environment.json` of the run that `directory` continues; empty for a new run.

    Raises ValueError where a new run would write into another's directory, and where a resumed run's config differs in
    anything that changes its numbers.
    """
    if plain["resume"] is None:
        if (directory / "metrics.jsonl").exists():
            raise ValueError(
                f"{directory} already holds a run: resume={directory} continues it, hydra.run.dir=... goes elsewhere"
            )
        return {}
    from omegaconf import OmegaConf

    try:
        before = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        written = directory / "environment.json"  # missing where the run was killed before its first step
        environment: dict[str, Any] = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"resume={directory}: its record cannot be read: {error}") from None
    differing = {key.removesuffix("._target_") for key in _differing(before, plain)}
    changed = [key for key in sorted(differing) if key.partition(".")[0] not in FREE]
    if changed:
        raise ValueError(
            f"resume={directory}: {', '.join(changed)} differ from the run's own config, which would change its numbers: "
            "leave them out, or start a new run"
        )
    return environment


def check_text(before: dict[str, Any], now: str, directory: Path) -> None:
    """ValueError where the text is no longer the one that the resumed run saw; `now` is its hash."""
    then = before["corpus"]["hash"] if before else now
    if then != now:
        raise ValueError(
            f"resume={directory}: the text has changed since (its hash is {now}, the run's {then}): put the old text back, "
            "or start a new run"
        )


def store(content: Any, path: Path) -> None:
    """Write YAML so that whoever is killed meanwhile leaves the old file or the new one, never half of it."""
    from omegaconf import OmegaConf

    unfinished = path.with_suffix(".unfinished")
    OmegaConf.save(OmegaConf.create(content), unfinished)
    os.replace(unfinished, path)


def _differing(a: Any, b: Any, key: str = "") -> set[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        inner = f"{key}." if key else ""
        return set().union(*(_differing(a.get(k), b.get(k), f"{inner}{k}") for k in {*a, *b}))
    return set() if a == b else {key}


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
