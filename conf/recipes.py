"""A recipe's knobs belong to the choices that it makes: `recipe=gpt2 ffn=swiglu` is GPT-2 with SwiGLU's own activation."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from conf.help import CONF, file
from conf.schema import AXES


def settle(cfg: DictConfig, axes: dict[str, str], words: Sequence[str]) -> list[str]:
    """Give each axis on which `words`, the command line's, choose otherwise than the run's recipe the knobs that it has without
    the recipe; what to say of it. Knobs of an axis that the recipe leaves open (model.tied) stay, whatever is chosen there.

    Hydra composes a recipe behind the choices, and merges its knobs into any of them.
    """
    made = _choices(axes.get("recipe") or "none")
    others = [axis for axis, choice in made.items() if axes.get(axis) not in (choice, None)]
    if not others:
        return []
    kept = [word for word in words if not word.startswith(("recipe=", "~"))]
    typed = {word.partition("=")[0] for word in kept}
    up = GlobalHydra.instance().is_initialized()
    with nullcontext() if up else initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        own = compose("config", [*kept, *(f"{axis}={axes[axis]}" for axis in made if axis not in typed)])
    notes = []
    for axis in others:
        if cfg[axis] == own[axis]:
            continue
        with open_dict(cfg):
            cfg[axis] = own[axis]
        notes.append(
            f"recipe={axes['recipe']} has knobs for {axis}={made[axis]}, which {axis}={axes[axis]} does without"
        )
    return notes


def _choices(recipe: str) -> dict[str, str]:
    """Axis -> choice, of the axes that a recipe, or one that it builds on, names in its defaults."""
    made: dict[str, str] = {}
    own: Any = OmegaConf.load(file("recipe", recipe))
    for item in own.get("defaults", []):
        if isinstance(item, str):
            made |= {} if item == "_self_" else _choices(item)
        else:
            named = {str(key).removeprefix("override ").removeprefix("/"): str(choice) for key, choice in item.items()}
            made |= {axis: choice for axis, choice in named.items() if axis in AXES}
    return made
