"""What an engine of a sweep needs: its package, and knobs that it has. A mistake is a ValueError before anything is written."""

from importlib.util import find_spec
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from conf.check import check_knobs

OURS = "hydra_plugins."
QUEUES = {  # a class of `hydra_plugins.queues` -> its extra, Hydra's plugin, the engine itself
    "Slurm": ("slurm", "hydra_plugins.hydra_submitit_launcher", "submitit"),
    "Local": ("slurm", "hydra_plugins.hydra_submitit_launcher", "submitit"),
    "Ray": ("ray", "hydra_plugins.hydra_ray_launcher", "ray"),
    "Optuna": ("optuna", "hydra_plugins.hydra_optuna_sweeper", "optuna"),
}


def check_engine(kind: str, hydra: DictConfig) -> None:
    """ValueError, one line, for the `kind` (launcher, sweeper) of this command line, where it is one of ours: without its
    package Hydra would speak of a class that cannot be found, and of a knob that is not there when the sweep has begun."""
    word, node = f"hydra/{kind}={hydra.runtime.choices[f'hydra/{kind}']}", hydra[kind]
    module, _, name = node._target_.rpartition(".")
    if module not in ("hydra_plugins.launchers", "hydra_plugins.queues"):
        return
    extra, *packages = QUEUES.get(name, ("",))
    if not all(map(find_spec, packages)):
        raise ValueError(f"{word} needs a package more: pip install -c constraints.txt -e '.[{extra}]'")
    target = get_class(node._target_)
    plain: Any = OmegaConf.to_container(node, resolve=True)
    check_knobs(f"hydra.{kind}", plain, getattr(target, "knobs", target))
    if more := getattr(target, "check", None):
        more(plain)
