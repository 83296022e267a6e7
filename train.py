"""Train one model, or sweep over many: read the config, check it, build the parts, fit.

    python train.py norm=rmsnorm placement=pre
    python train.py --help

What a user can get wrong is answered in one line and exit code 2, before lightning, datasets or wandb are imported.
"""

import json
import os
import secrets
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.explain import explain
from conf.help import text as help_text
from conf.resume import as_overrides, check_same
from conf.schema import AXES, SCALARS, Run

if TYPE_CHECKING:
    from model.transformer import Choices, Transformer

ConfigStore.instance().store(name="schema", node=Run)
# cached, so that a run's directory has one name however often it is asked for
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
OmegaConf.register_new_resolver("axes", help_text, replace=True)

USAGE, FAILED = 2, 1  # exit codes; training/run.py has the others


def choices_of(plain: dict[str, Any]) -> "Choices":
    """One choice per axis of the network, from a checked config."""
    from model.transformer import Choices

    return Choices(**{field.name: instantiate(plain[field.name]) for field in fields(Choices)})


def network(plain: dict[str, Any], choices: "Choices", vocab: int) -> "Transformer":
    """The network of a checked config, initialised by its seed."""
    model: Transformer = instantiate(plain["model"])(vocab, choices, plain["seed"])
    return model


def train(cfg: DictConfig, directory: Path, axes: dict[str, str], overrides: list[str]) -> tuple[dict[str, Any], int]:
    """One run in `directory`: (its summary, its exit code). ValueError, one line, for what the user can mend."""
    from conf.check import check

    plain = check(cfg)
    check_same(plain, directory)
    import torch

    from model.compatibility import refusals
    from training import device as machine
    from training.describe import closing, describe

    scalars, names = {key: plain[key] for key in SCALARS}, {axis: axes.get(axis, "") for axis in AXES}
    choices, sizes = choices_of(plain), plain["model"]
    # one layer of the real sizes, so that whatever does not fit together is said before any data is read
    network(plain | {"model": sizes | {"depth": min(sizes["depth"], 1)}}, choices, vocab=2)
    for refusal in refusals(choices, names, **{key: sizes[key] for key in ("depth", "dim", "qk_norm")}):
        if not scalars["allow_unstable"]:
            raise ValueError(f"{refusal}; allow_unstable=true runs it all the same")
        print(f"allow_unstable=true: {refusal}")
    schedule = instantiate(plain["schedule"])
    schedule.warmup_steps(scalars["steps"])
    device = machine.accelerator()
    machine.precision(scalars["precision"], device)
    rows = scalars["batch"] // scalars["accumulate"]
    torch.set_num_threads(machine.threads(scalars["threads"], tokens=rows * sizes["context"], dim=sizes["dim"]))

    from data.tokens import prepare
    from data.windows import Windows, train_loader, val_loader, validation_windows

    corpus = instantiate(plain["data"])
    tokens = prepare(corpus, instantiate(plain["tokenizer"]), context=sizes["context"])
    order = {key: scalars[key] for key in ("batch", "accumulate", "steps", "seed")}
    windows = Windows(tokens.train, context=sizes["context"], **order)
    held_out = validation_windows(tokens.val, sizes["context"], corpus.val_windows)

    torch.manual_seed(scalars["seed"])  # dropout; matrices and windows have generators of their own
    model = network(plain, choices, tokens.vocab)
    described, facts = describe(model, choices, plain, names, tokens, device, directory)
    print(described, flush=True)

    from training.run import Parts, fit, resume_point

    directory.mkdir(parents=True, exist_ok=True)
    checkpoint, start = resume_point(directory, resuming=scalars["resume"] is not None)
    if start >= scalars["steps"] and (directory / "summary.json").is_file():
        print(f"nothing to do: all {start} steps are done")
        return json.loads((directory / "summary.json").read_text(encoding="utf-8")), 0
    OmegaConf.save(OmegaConf.create(plain), directory / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), directory / "overrides.yaml")
    built = Parts(
        directory=directory,
        model=model,
        optimizer=instantiate(plain["optimizer"]),
        schedule=schedule,
        windows=windows,
        train=train_loader(windows, start=start * scalars["accumulate"], pin_memory=device == "cuda"),
        val=val_loader(held_out, batch=rows),
        tokens=tokens,
        log=instantiate(plain["logger"])(directory, facts["name"], plain),
        device=device,
        checkpoint=checkpoint,
        start=start,
    )
    summary, code = fit(built, scalars, facts)
    print(closing(summary, directory), flush=True)
    return summary, code


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(cfg: DictConfig) -> float | None:
    """Hydra's task function: in a sweep it never raises or exits, since that would lose the jobs that follow."""
    here = HydraConfig.get()
    directory, sweep = Path(here.runtime.output_dir), here.mode == RunMode.MULTIRUN
    # unresolved: a word of the command line may hold an interpolation
    words = OmegaConf.to_container(here.overrides.task, resolve=False)
    assert isinstance(words, list)
    try:
        summary, code = train(cfg, directory, dict(here.runtime.choices), words)
    except (ValueError, InstantiationException) as error:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        summary, code = {"verdict": "refused", "reason": _own_words(error)}, USAGE
        print(f"normlab: {summary['reason']}", file=sys.stderr)
    except Exception as error:
        if not sweep:
            raise
        summary, code = {"verdict": "failed", "reason": f"{type(error).__name__}: {error}"}, FAILED
        print(f"normlab: {summary['reason']}", file=sys.stderr)
    if not sweep:
        sys.exit(code)
    return summary.get("final_loss")


def main() -> None:
    """The command line: Hydra's own errors become one line that names the key and the way out."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise them here, not print them with advice
    try:
        sys.argv[1:] = as_overrides(sys.argv[1:])
        job()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_usage(explain(error)))
    except ValueError as error:
        sys.exit(_usage(str(error)))


def _own_words(error: Exception) -> str:
    """What a constructor said, without Hydra's frame around it."""
    return str(error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error)


def _usage(line: str) -> int:
    print(f"normlab: {line}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    main()
