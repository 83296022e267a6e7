"""`python train.py --help`: each axis with its choices, read from the first line of each file, and the shared scalars."""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.schema import AXES, SCALARS

CONF = Path(__file__).parent

HEAD = """\
normlab trains a small decoder-only language model and records, layer by layer, how stable it was.

  python train.py norm=rmsnorm placement=pre                 one run
  python train.py -m norm=layernorm,rmsnorm placement=pre,post   a sweep: every combination
  python train.py -m seed=0,1,2,3 hydra/launcher=joblib          the same, one job a core; also submitit_slurm, ray
  python train.py -m hydra/sweeper=optuna                        Optuna's search for the best optimizer.lr
  python train.py recipe=deepnorm model=deep model.depth=100     a paper's choices at once

Overrides are key=value. An axis takes one of its choices, and AXIS.KEY=value sets what stands in its file in conf/.
"""


def folders() -> list[Path]:
    """Where the choices are, in the order in which Hydra looks: here, and in the folder of --config-dir."""
    pairs = [word.partition("=")[::2] for word in sys.argv[1:]]
    named = [
        value or after
        for (option, value), (after, _) in pairwise([*pairs, ("", "")])
        if option in ("--config-dir", "-cd")
    ]
    return [CONF, *map(Path, named)]


def file(axis: str, choice: str) -> Path:
    """The file of a choice that there is."""
    places = [folder / axis / f"{choice}.yaml" for folder in folders()]
    return next((place for place in places if place.is_file()), places[0])


def choices(axis: str) -> list[str]:
    """The choices of an axis: the names of the files in its folders."""
    found = {path.stem for folder in folders() for path in (folder / axis).glob("*.yaml")}
    return sorted(name for name in found if not name.startswith("_"))


def summary(axis: str, choice: str) -> str:
    """What a choice is: the first comment line of its file that is not an instruction to Hydra."""
    lines = file(axis, choice).read_text(encoding="utf-8").splitlines()
    said = (line.removeprefix("# ") for line in lines if line.startswith("# ") and "@package" not in line)
    return next(said, "")


def defaults() -> dict[str, str]:
    """axis -> its choice in conf/config.yaml."""
    from omegaconf import OmegaConf

    listed: Any = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").defaults)
    return {axis: choice for item in listed if isinstance(item, dict) for axis, choice in item.items() if axis in AXES}


def text() -> str:
    """The whole page; the default of each axis is marked with a star."""
    chosen, width = defaults(), max(len(choice) for axis in AXES for choice in choices(axis)) + 2
    lines = [HEAD, "Axes (* = default)"]
    for axis in AXES:
        lines.append(f"\n  {axis}=")
        lines += [
            f"  {'*' if choice == chosen[axis] else ' '} {choice:<{width}}{summary(axis, choice)}"
            for choice in choices(axis)
        ]
    lines.append(
        "\nStudies: python train.py study=NAME runs one, judges its claims and draws it (study.scale=laptop, gpu)"
    )
    lines += [f"    {name:<{width}}{summary('study', name)}" for name in choices("study")]
    lines.append("\nShared by every run")
    for name, scalar in SCALARS.items():
        shown = {"None": "null", "True": "true", "False": "false"}.get(str(scalar.default), scalar.default)
        lines.append(f"    {f'{name}={shown}':<{width + 4}}{scalar.metadata['help']}")
    lines.append(
        "\nOften set: model.depth, model.dim, model.heads, model.context, model.kv_heads, model.qk_norm (none, head, full),"
        "\nmodel.tied, model.dropout, model.checkpointing (auto, groups, none), model.logit_cap, attention.logit_cap, attention.qk_clip,"
        "\ntrainer.cuda_graphs, norm.eps, norm.cast, placement.layers, optimizer.lr, optimizer.weight_decay, optimizer.norm_decay,"
        "\nschedule.warmup (below 1: a share of the steps), data.paths, data.val_fraction, tokenizer.vocab, logger.mode,"
        "\nhydra.run.dir. `python train.py --cfg job` prints the whole config of a command line without running it."
    )
    return os.linesep.join(lines)
