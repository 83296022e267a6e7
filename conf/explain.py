"""Hydra's, OmegaConf's and YAML's answers to a bad command line, as one line that names the key and the way out."""

import re
from difflib import get_close_matches

import yaml
from hydra.errors import InstantiationException, OverrideParseException
from omegaconf import OmegaConf

from conf.check import nearest
from conf.help import choices, file
from conf.schema import AXES, SCALARS


def explain(error: Exception) -> str:
    """One line for an error of Hydra, OmegaConf or YAML; its own first line where the kind is not known."""
    text = _whole(error)
    if isinstance(error, yaml.YAMLError):
        return _misspelt(error)
    if found := re.search(r"Could not find '([\w/]+)/([^'/]*)'", text):
        axis, choice = found.groups()
        # as Hydra lists them: with those of --config-dir, and of its own groups those that are installed
        known = [name for name in re.findall(r"^\t(\S+)$", text, re.MULTILINE) if not name.startswith("_")]
        known = list(dict.fromkeys(known))  # an error that came from another process says all twice
        near = get_close_matches(choice, known, n=max(1, len(known)), cutoff=0.4)
        ordered = near + [name for name in known if name not in near]
        return f"{axis}={choice} is no choice of {axis}; choose from {', '.join(ordered)}"
    if found := re.search(r"Interpolation key 'hydra\.runtime\.choices\.(\w+)'", text):
        return f"{found[1]} has no choice: {found[1]}= one of {', '.join(choices(found[1]))}"
    if "Config group override must be a string" in text:
        return "an axis takes the name of one of its choices: `python train.py --help` lists them"
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found[1]} names several values: add -m (--multirun) to sweep over them, or quote it to mean the text"
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown(found[1])
    if found := re.search(r"Key '([^']+)' (?:is not in struct|not in)", text):
        full = re.search(r"full_key: (\S+)", text)
        return _unknown(full[1] if full else found[1])
    if found := re.search(r"(Value '.*' .*)\n\s*full_key: (\S+)", text):
        return f"{found[2]}: {found[1]}"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override} cannot be read as KEY=VALUE; a value that holds =, spaces, commas or brackets needs quotes "
            "inside the shell's, as in 'name=\"a = b\"'"
        )
    return " ".join(text.splitlines()[:1])


def own_words(error: Exception) -> str:
    """What a constructor said, without Hydra's frame around it."""
    return str(error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error)


def where(error: OSError) -> str:
    """A place that cannot be written or read; any other error of the system is raised again."""
    if error.filename is None:
        raise error
    return f"{error.filename}: {error.strerror}; hydra.run.dir or hydra.sweep.dir names another place"


def _misspelt(error: yaml.YAMLError) -> str:
    """A file that is no YAML: the place of it, where YAML says one."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{mark.name}, line {mark.line + 1}: {getattr(error, 'problem', None) or 'no YAML'}"


def _whole(error: BaseException) -> str:
    """The messages of an error and of what caused it: Hydra puts the full key in either."""
    said: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        said.append(str(seen))
        seen = seen.__cause__
    return "\n".join(said)


def _unknown(key: str) -> str:
    """An unknown key, with the nearest known one: inside its axis where it has one, else at the top."""
    axis, _, knob = key.partition(".")
    if found := re.match(r"hydra\.(launcher|sweeper)\.", key):
        return f"{key} is no key of the {found[1]}; `--cfg hydra --package {found[0][:-1]}` lists those that it has"
    if knob and axis in AXES:
        if owners := [choice for choice in choices(axis) if knob in _knobs_of(axis, choice)]:
            return (
                f"{key} is no knob of the choice made; it belongs to {', '.join(f'{axis}={name}' for name in owners)}"
            )
        known = _knobs(axis)
        return f"{key} is no key of the config" + (f"; {nearest(key, known)}" if known else f": {axis} has no knobs")
    return f"{key} is no key of the config; {nearest(axis, [*SCALARS, *AXES, 'hydra.run.dir'])}"


def _knobs(axis: str) -> list[str]:
    """Every key that some choice of an axis has."""
    return [f"{axis}.{name}" for choice in choices(axis) for name in _knobs_of(axis, choice)]


def _knobs_of(axis: str, choice: str) -> list[str]:
    path = file(axis, choice)
    if path.read_text(encoding="utf-8").startswith("# @package _global_"):
        return []  # what stands there are other axes' keys
    names = map(str, OmegaConf.load(path))
    return [name for name in names if not name.startswith("_") and name != "defaults"]
