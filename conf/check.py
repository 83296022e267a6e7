"""Types everything before anything is built: the root by its dataclass, every node by its constructor's signature.

Hydra passes `model.depth=twelve`, `+nrom=rmsnorm` and an interpolation that nobody reads. Here each is a ValueError of
one line that names the full key, what was found, and the nearest known name.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

from hydra.conf import HydraConf
from hydra.errors import InstantiationException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from conf.help import choices
from conf.schema import AXES, SCALARS
from stability import observables

NEED_TORCH = ("norm", "residual", "stream", "ramp", "init", "linear", "attention", "ffn", "position")
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """The same of names in whatever order, sorted."""
    return observables.nearest(name, sorted(known))


def check(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain containers; ValueError, one line, for whatever does not fit. Without torch:
    `check_network` does the rest."""
    if unknown := sorted(set(map(str, cfg)) - set(SCALARS) - set(AXES) - {"study"}):
        raise ValueError(f"{unknown[0]!r} is no key of the config; {nearest(unknown[0], [*SCALARS, *AXES])}")
    if cfg.get("study") is not None:
        raise ValueError("a study is a sweep of its own: it can be no job of another, and no single run")
    plain: dict[str, Any] = {key: _resolve(cfg, key) for key in map(str, cfg) if key != "study"}
    for key, scalar in SCALARS.items():
        _fit(key, plain[key], scalar.metadata["kind"])
    for axis in AXES:
        node = plain.get(axis)
        if node is None and axis != "recipe":
            raise ValueError(f"{axis} has no choice: {axis}= one of {', '.join(choices(axis))}")
        if node is not None and not isinstance(node, dict):
            raise ValueError(f"{axis}={node!r} is none of its choices")
        if axis not in NEED_TORCH:
            _check_node(axis, node or {})
    return plain


def unlisted(words: list[str]) -> list[str]:
    """Of a study's command line: `seed=[0,1]` as `seed=0,1`. No scalar takes a list, and Hydra refuses one before it is known
    that `seed` is a param."""
    if not any(word.startswith("study=") for word in words):
        return words
    found = [re.fullmatch(r"(\w+)=\[(.+)\]", word) for word in words]
    return [f"{m[1]}={m[2]}" if m and m[1] in SCALARS else word for m, word in zip(found, words, strict=True)]


def check_hydra(words: list[str]) -> None:
    """ValueError for `+hydra.KEY=...` where Hydra has no such key: it would take it, and never look at it. And for a study
    that is no one file of those to choose from."""
    schema = OmegaConf.structured(HydraConf)
    for word in words:
        if found := re.fullmatch(r"\+*study=(.*)", word):
            if re.search(r"[,(\[]", found[1]):
                raise ValueError(f"{word}: one study at a time")
            if found[1].startswith("_"):
                raise ValueError(f"{word} is no choice of study; choose from {', '.join(choices('study'))}")
        path = word.partition("=")[0].lstrip("+").split(".")
        if path == ["hydra", "job", "chdir"] and word.partition("=")[2].lower() != "false":
            raise ValueError("hydra.job.chdir: a run stays in the working directory; its own is hydra.run.dir")
        if not word.startswith("+") or path[0] != "hydra":
            continue
        node: Any = schema
        for depth, key in enumerate(path[1:], start=1):
            if not OmegaConf.is_dict(node) or not is_dataclass(OmegaConf.get_type(node)):
                break  # a place for the user's own keys
            if key not in node.keys():  # noqa: SIM118 (`in` does not see a key that has no value yet)
                parent = ".".join(path[:depth])
                raise ValueError(f"{parent}.{key} is no key of Hydra's; {nearest(key, map(str, node))}")
            node = None if OmegaConf.is_missing(node, key) else node[key]


def check_network(plain: dict[str, Any]) -> None:
    """The axes whose constructors load torch, which takes two seconds: apart, so that the others are answered before."""
    for axis in NEED_TORCH:
        _check_node(axis, plain[axis])


def _resolve(cfg: DictConfig, key: str) -> Any:
    """One key with every interpolation below it resolved, so that a broken one is found even where nobody reads it."""
    try:
        value = cfg[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        found = OmegaConf.to_container(cfg, resolve=False)
        text = found[key] if isinstance(found, dict) else found
        full = error.full_key or key
        raise ValueError(f"{full}: {text!r} does not resolve: {str(error).splitlines()[0]}") from None


def _check_node(axis: str, node: dict[str, Any]) -> None:
    """Every key of a node against the signature of its `_target_`; a node without one has no keys."""
    if "_target_" not in node:
        if node:
            raise ValueError(f"{axis}.{next(iter(node))} is no key of the config: this choice of {axis} has no knobs")
        return
    try:
        target: Callable[..., Any] = get_object(node["_target_"])
    except (InstantiationException, ImportError, ValueError) as error:
        raise ValueError(f"{axis}._target_={node['_target_']!r} cannot be imported: {_first(error)}") from None
    check_knobs(axis, node, target)


def check_knobs(place: str, node: dict[str, Any], target: Callable[..., Any]) -> None:
    """ValueError for a key of the node at `place` that `target` is not called with, or a value of the wrong kind."""
    parameters = inspect.signature(target).parameters
    # what a partial node is called with later stands before the *; its knobs stand behind it
    partial = node.get("_partial_", False)
    known = {name for name, p in parameters.items() if not partial or p.kind is p.KEYWORD_ONLY}
    for key, value in node.items():
        if key in ("_target_", "_partial_"):
            continue
        if key not in known:
            names = [f"{place}.{name}" for name in node if name in known]
            raise ValueError(f"{place}.{key} is no knob of {node['_target_']}; {nearest(f'{place}.{key}', names)}")
        kind = parameters[key].annotation
        # where anything goes, what is built is a library's own business
        if kind is not Any and (built := _nodes(f"{place}.{key}", value)):
            for path, inner in built.items():
                _check_node(path, inner)
        else:
            _fit(f"{place}.{key}", value, kind)


def _nodes(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """The nodes that a value is, or is a mapping of, by their full keys: what Hydra makes of them is not there yet."""
    if _is_node(value):
        return {key: value}
    found = {f"{key}.{name}": node for name, node in value.items()} if isinstance(value, dict) else {}
    if any(map(_is_node, found.values())) and (other := [name for name, node in found.items() if not _is_node(node)]):
        raise ValueError(f"{other[0]}={found[other[0]]!r} has no _target_, as its neighbours have")
    return found if all(map(_is_node, found.values())) else {}


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _fit(key: str, value: Any, kind: Any) -> None:
    try:
        TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        said = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise ValueError(f"{key}{where}={first['input']!r} {said}") from None


def _first(error: Exception) -> str:
    return str(error).splitlines()[0]
