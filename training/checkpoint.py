"""Checkpoints: written whole or not at all, verified before they are used, and room for them before the first step.

They hold plain containers and tensors alone: no pickled code is ever loaded.
"""

import shutil
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from stability.whole import whole

NAMES = ("best", "last")


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Whoever is killed or runs out of space meanwhile still has the old one. Raises OSError, with the file's name, where
    it cannot be written."""
    with whole(path) as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:  # torch hides why a write failed behind an error of its own
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load(path: Path, model: nn.Module, run_id: str | None = None) -> dict[str, Any]:
    """A checkpoint of `model`, and of the run `run_id` where that is known, its tensors mapped from the file; ValueError
    with the reason where it is not whole or another's."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # every byte against its checksum, which torch.load does not do
        if damaged:
            raise ValueError(f"damaged ({damaged})")
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        weights, owner, _ = found["state_dict"], found["run"], int(found["global_step"])
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"no whole checkpoint of a run ({type(error).__name__}: {str(error)[:60].strip()})") from None
    if run_id is not None and owner != run_id:
        raise ValueError("it belongs to another run")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name, tensor in model.state_dict().items():
        there = shapes.pop(f"model.{name}", None)
        if there != tuple(tensor.shape):
            raise ValueError(f"it holds another network ({name}: {there} there, {tuple(tensor.shape)} here)")
    if shapes:
        raise ValueError(f"it holds another network ({next(iter(shapes))} is not in this one)")
    return found


def resume_point(directory: Path, model: nn.Module, run_id: str | None) -> tuple[Path | None, int, str | None]:
    """(The newest checkpoint of this run that is whole, the steps that it has done, the run's id), or (None, 0, run_id)
    where it has none yet.

    Says which files it leaves aside and why, and where there is none; ValueError where no other is left.
    """
    good: dict[int, tuple[Path, str]] = {}
    paths = [path for name in NAMES if (path := directory / "checkpoints" / f"{name}.ckpt").is_file()]
    for path in paths:
        try:
            found = load(path, model, run_id)
            good[found["global_step"]] = path, found["run"]
        except ValueError as error:
            print(f"{path} is left aside: {error}")
    if not good and paths:
        raise ValueError(
            f"resume={directory}: no checkpoint there can be used; with checkpoints/ moved away it starts again from step 0"
        )
    if not paths:
        print(f"{directory} holds no checkpoint: the run starts again from step 0")
    start = max(good, default=0)
    return (good[start][0], start, good[start][1]) if good else (None, 0, run_id)


def check_space(directory: Path, model: nn.Module, scalars: dict[str, Any], *, depth: int) -> None:
    """ValueError where the disk lacks room for the run's checkpoints (none with save_every=0) and records.

    A checkpoint holds each weight and the optimizer's two moments of it; there are `last`, `best` and the one that is being
    written, less those that are there already. A record line takes about 250 bytes, and 13 arrays over the layers, of
    about 14 bytes a number, on each log step, as many on each probe step; W&B's file is about as large.
    """
    there = next(path for path in (directory, *directory.resolve().parents) if path.is_dir())
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    old = sum((directory / "checkpoints" / f"{name}.ckpt").is_file() for name in NAMES)
    steps, log_every, probe_every = (scalars[key] for key in ("steps", "log_every", "probe_every"))
    measured = steps // log_every + 2 + (steps // probe_every + 2 if probe_every else 0)
    checkpoints = 3 * weights * (3 - old) if scalars["save_every"] else 0
    needed, free = checkpoints + 2 * (250 * steps + 13 * 14 * depth * measured), shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{directory}: {free / 1e6:,.1f} MB free, {needed / 1e6:,.1f} MB needed for "
            f"{'checkpoints and ' if checkpoints else ''}records: make room, "
            "or name another place by hydra.run.dir (hydra.sweep.dir)"
        )
