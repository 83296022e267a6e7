"""What the tests share: the project's own config, a network from it, and a run from it, all in this process."""

import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import train
from conf.check import check, check_network
from conf.help import CONF, choices
from conf.recipes import settle
from conf.sweep import without_schemas
from model.linear import Linear
from model.norm import RMSNorm
from model.setting import Setting
from model.site import Site
from model.sizes import Sizes

ROOT = Path(__file__).parents[1]
without_schemas()
SHARED = ROOT.parent / "shared"
torch.set_num_threads(1)  # the networks are small: handing work over costs more than it saves
SMALL = ["model.depth=2", "model.dim=16", "model.heads=2", "model.context=8"]


def environment(cache: Path) -> dict[str, str]:
    """Of a command that a test starts: this checkout importable, a cache of its own, W&B offline."""
    return os.environ | {"NORMLAB_CACHE": str(cache), "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}


def config(*overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """(The composed config, axis -> choice)."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("config", list(overrides), return_hydra_config=True)
    chosen = dict(cfg.hydra.runtime.choices)
    own = DictConfig({key: value for key, value in cfg._content.items() if key != "hydra"})
    settle(own, chosen, overrides)
    return own, chosen


@cache
def _checked(overrides: tuple[str, ...]) -> dict[str, Any]:
    settings = check(config(*overrides)[0])
    check_network(settings)
    return settings


def plain(*overrides: str) -> dict[str, Any]:
    """The checked config. Composing takes 0.2 s and there are hundreds of cells, so that a plain choice of a norm, a
    placement or a residual is composed once and put into a config that is composed once."""
    alone = {word for word in overrides if re.fullmatch(r"(norm|placement|residual)=\w+", word)}
    rest = tuple(word for word in overrides if word not in alone)
    tuned = {word.partition(".")[0] for word in rest}
    if "recipe" in str(rest) or {word.partition("=")[0] for word in alone} & tuned:
        return deepcopy(_checked(overrides))
    nodes = {axis: _checked((word,))[axis] for word in alone for axis in [word.partition("=")[0]]}
    return deepcopy(_checked(rest) | nodes)


def network(*overrides: str, vocab: int = 11) -> Any:
    """A network of the project's config, small unless an override says otherwise."""
    settings = plain(*SMALL, *overrides)
    return train.network(settings, train.choices_of(settings), vocab)


def setting(sizes: Sizes, **more: Any) -> Setting:
    """Around a branch's function that stands in no network."""
    given = {"places": frozenset(), "norm": RMSNorm, "linear": Linear} | more
    return Setting(sizes, Site("attention", 1, sizes.depth), **given)


GAINLESS = {"none", "simple_rmsnorm", "simple_layernorm", "l2norm"}
GROWS = {"deepnorm", "glm130b", "keel", "admin"}  # residual methods whose skip needs a norm on the sum


def brought_back(norm: str, placement: str) -> bool:
    """Whether in every layer a norm stands on the sum, or on what skip and branch share, so that a skip may multiply the
    stream."""
    places = train.choices_of(plain(f"placement={placement}")).placement
    layers = [places.at(Site("attention", layer, 12)) | places.at(Site("ffn", layer, 12)) for layer in range(1, 13)]
    return norm != "none" and all(at & {"sum", "both"} for at in layers)


CORE = {"pre", "post"}, {"standard", "deepnorm"}


def cells() -> list[tuple[str, str, str]]:
    """norm x placement x residual: every norm with the core's placements and residuals, and each pair of choices of two axes in
    at least one cell, since a product of all would take an hour."""
    axes = [choices(axis) for axis in ("norm", "placement", "residual")]
    norms, placements, residuals = axes
    found = [(norm, place, method) for norm in norms for place in CORE[0] for method in CORE[1]]
    every = [(n, p, residuals[(i + j) % len(residuals)]) for i, n in enumerate(norms) for j, p in enumerate(placements)]
    every += [(norms[(i + j) % len(norms)], p, r) for i, p in enumerate(placements) for j, r in enumerate(residuals)]
    every += [
        (n, placements[(i + j) % len(placements)], r) for i, n in enumerate(norms) for j, r in enumerate(residuals)
    ]
    seen = {pair for cell in found for pair in _pairs(cell)}
    for cell in every:
        if not seen.issuperset(_pairs(cell)):
            found.append(cell)
            seen |= _pairs(cell)
    return sorted(found)


def _pairs(cell: tuple[str, str, str]) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(cell), 2))


def is_trap(norm: str, placement: str, residual: str) -> bool:
    """Whether a cell is to be refused: a norm that sees the future, a skip above 1 that no norm follows, or a gain to be set
    where there is none."""
    growing = residual in GROWS and not brought_back(norm, placement)
    return norm == "batchnorm" or growing or (placement == "res_post" and norm in GAINLESS)


@pytest.fixture
def oracle() -> Callable[[str], Any]:
    """The content of a file of `../shared/cases`; skips where the folder is absent."""

    def read(name: str) -> Any:
        path = SHARED / "cases" / name
        if not path.is_file():
            pytest.skip(f"{name} is not here")
        return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()

    return read


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Call with overrides: a run in this process on a small synthetic text; (its records, its summary)."""
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    count = iter(range(100))

    def start(
        *overrides: str, directory: Path | None = None, drop: str = "-"
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        words = [*SMALL, "data=synthetic", "data.tokens=20000", "logger=none", "threads=1", *overrides]
        words = [word for word in words if not word.startswith(drop)]
        given = {word.partition("=")[0] for word in overrides}
        words = [w for i, w in enumerate(words) if i >= len(words) - len(overrides) or w.partition("=")[0] not in given]
        where = directory or tmp_path / f"run{next(count)}"
        cfg, chosen = config(*words)
        summary, code = train.train(cfg, where, chosen, words)
        lines = (where / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], summary | {"code": code, "directory": where}

    return start
