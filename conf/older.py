"""What the config of a run leaves unsaid where an older version recorded it: the default, since a new key changes nothing where
it is not given."""

from inspect import signature
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from conf.help import defaults, file
from conf.schema import AXES, SCALARS


def completed(config: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`config` with each scalar, axis and knob of a choice that `now` has and it lacks."""
    filled = {key: _default(key) for key in now if key not in config} | config
    for axis in AXES:
        then, here = filled.get(axis), now.get(axis)
        if not (isinstance(then, dict) and isinstance(here, dict) and _choice(then) == _choice(here)):
            continue
        if missing := here.keys() - then.keys():  # to look at a class may load torch
            knobs = signature(get_object(_choice(here))).parameters
            filled[axis] = then | {key: knobs[key].default for key in missing if key in knobs}
    return filled


def _choice(node: dict[str, Any]) -> str:
    return str(node.get("_target_"))


def _default(key: str) -> Any:
    if key in SCALARS:
        return SCALARS[key].default
    return OmegaConf.to_container(OmegaConf.load(file(key, defaults()[key])))
