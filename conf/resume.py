"""`resume=DIR`: DIR's own overrides first, the command line's after them, in DIR."""

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


def check_same(plain: dict[str, Any], directory: Path) -> None:
    """ValueError, naming the keys, where a resumed run's config differs in anything that changes its numbers."""
    written = directory / "config.yaml"
    if plain["resume"] is None or not written.is_file():
        return
    from omegaconf import OmegaConf

    before = OmegaConf.to_container(OmegaConf.load(written))
    assert isinstance(before, dict)
    changed = [key for key in sorted(_differing(before, plain)) if key.partition(".")[0] not in FREE]
    if changed:
        raise ValueError(
            f"resume={plain['resume']}: {', '.join(changed)} differ from the run's own config, which would change its "
            "numbers: leave them out, or start a new run"
        )


def _differing(a: Any, b: Any, key: str = "") -> set[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        inner = f"{key}." if key else ""
        return set().union(*(_differing(a.get(k), b.get(k), f"{inner}{k}") for k in {*a, *b}))
    return set() if a == b else {key}


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
