"""Train one model, or sweep over many: read the config, check it, build the parts, fit.

    python train.py norm=rmsnorm placement=pre
    python train.py --help

What a user can get wrong is answered in one line and exit code 2, before lightning, datasets or wandb are imported.
"""

import os
import secrets
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.explain import explain
from conf.help import text as help_text
from conf.resume import as_overrides, check_same
from conf.schema import AXES, SCALARS, Run

ConfigStore.instance().store(name="schema", node=Run)
# cached, so that a run's directory has one name however often it is asked for
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
OmegaConf.register_new_resolver("axes", help_text, replace=True)

USAGE, FAILED = 2, 1  # exit codes; training/run.py has the others


def train(cfg: DictConfig, directory: Path, axes: dict[str, str], overrides: list[str]) -> tuple[dict[str, Any], int]:
    """One run in `directory`: (its summary, its exit code). ValueError, one line, for what the user can mend."""
    from conf.check import check

    plain = check(cfg)
    check_same(plain, directory)
    import torch
    from hydra.utils import instantiate

    from model.compatibility import refusals
    from model.transformer import Choices
    from training import device as machine
    from training.describe import describe

    scalars, names = {key: plain[key] for key in SCALARS}, {axis: axes.get(axis, "") for axis in AXES}
    parts = {axis: instantiate(plain[axis]) for axis in ("norm", "placement", "residual", "init", "ffn", "position")}
    choices, sizes = Choices(**parts), plain["model"]
    # one layer of the real sizes, so that whatever does not fit together is said before any data is read
    instantiate(sizes | {"depth": min(sizes["depth"], 1)})(2, choices, scalars["seed"])
    for refusal in refusals(choices, names, sizes["depth"]):
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
    model = instantiate(sizes)(tokens.vocab, choices, scalars["seed"])
    described, facts = describe(model, choices, plain, names, tokens, device, directory)
    print(described, flush=True)

    from training.run import Parts, fit, resume_point

    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(plain), directory / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), directory / "overrides.yaml")
    checkpoint, start = resume_point(directory, resuming=scalars["resume"] is not None)
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
    return fit(built, scalars, facts)


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
        error = error.__cause__ or error if isinstance(error, InstantiationException) else error
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        summary, code = {"verdict": "refused", "reason": str(error)}, USAGE
        print(f"normlab: {error}", file=sys.stderr)
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


def _usage(line: str) -> int:
    print(f"normlab: {line}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    main()
