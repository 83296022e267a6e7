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

from conf import resume
from conf.check import check, check_network
from conf.explain import explain
from conf.help import text as help_text
from conf.schema import AXES, Run

if TYPE_CHECKING:
    from data.corpus import Corpus
    from model.sizes import Sizes
    from model.transformer import Choices, Transformer
    from training.schedule import Constant

ConfigStore.instance().store(name="schema", node=Run)
# cached, so that a run's directory has one name however often it is asked for
OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
OmegaConf.register_new_resolver("axes", help_text, replace=True)

USAGE, FAILED = 2, 1  # exit codes; training/run.py has the others
CODES: list[int] = []  # of the jobs of a sweep
# nats: what a sweeper is told of a job that diverged, failed or was refused; finite, since nan would end the sweep
PENALTY = 100.0


def choices_of(plain: dict[str, Any]) -> "Choices":
    """One choice per axis of the network, from a checked config."""
    from model.transformer import Choices

    return Choices(**{field.name: instantiate(plain[field.name]) for field in fields(Choices)})


def network(plain: dict[str, Any], choices: "Choices", vocab: int) -> "Transformer":
    """The network of a checked config, initialised by its seed."""
    from model.transformer import Transformer

    return Transformer(vocab, choices, instantiate(plain["model"]), plain["seed"])


def check_whole(plain: dict[str, Any], axes: dict[str, str]) -> tuple["Choices", "Constant", "Corpus"]:
    """(The network's choices, the schedule, the corpus), once all that the text does not decide is known to fit together.

    ValueError, one line, for what does not. No text has been read by then, nothing written; torch is loaded last.
    """
    schedule: Constant = instantiate(plain["schedule"])
    schedule.warmup_steps(plain["steps"])
    corpus: Corpus = instantiate(plain["data"])
    sizes: Sizes = instantiate(plain["model"])

    check_network(plain)
    from model.compatibility import refusals

    choices = choices_of(plain)
    # one layer of the real sizes: the constructors of its parts say what does not fit
    network(plain | {"model": plain["model"] | {"depth": 1}}, choices, vocab=2)
    for refusal in refusals(choices, axes, sizes):
        if not plain["allow_unstable"]:
            raise ValueError(f"{refusal}; allow_unstable=true runs it all the same")
        print(f"allow_unstable=true: {refusal}")
    return choices, schedule, corpus


def train(cfg: DictConfig, directory: Path, axes: dict[str, str], overrides: list[str]) -> tuple[dict[str, Any], int]:
    """One run in `directory`: (its summary, its exit code). ValueError, one line, for what the user can mend."""
    plain, axes = check(cfg), {axis: axes.get(axis, "") for axis in AXES}
    before = resume.recorded(plain, directory)
    choices, schedule, corpus = check_whole(plain, axes)
    import torch

    from data.tokens import prepare
    from data.windows import Windows, train_loader, val_loader, validation_windows
    from training import device as machine
    from training.describe import closing, describe

    device, context, steps = machine.accelerator(), plain["model"]["context"], plain["steps"]
    machine.precision(plain["precision"], device)
    rows = plain["batch"] // plain["accumulate"]
    asked = plain["threads"] or before.get("threads")
    torch.set_num_threads(machine.threads(asked, tokens=rows * context, dim=plain["model"]["dim"]))

    tokens = prepare(corpus, instantiate(plain["tokenizer"]), context=context)
    resume.check_text(before, tokens.hash, directory)
    order = {key: plain[key] for key in ("batch", "accumulate", "steps", "seed")}
    windows = Windows(tokens.train, context=context, **order)
    held_out = validation_windows(tokens.val, context, corpus.val_windows)
    torch.manual_seed(plain["seed"])  # dropout; matrices and windows have generators of their own
    model = network(plain, choices, tokens.vocab)
    described, facts = describe(model, choices, schedule, plain, axes, tokens, device, directory)

    from training.run import DIVERGED, Parts, fit, resume_point

    checkpoint, start = resume_point(directory, resuming=plain["resume"] is not None)
    if start >= steps and (directory / "summary.json").is_file():
        print(f"nothing to do: all {start} steps are done")
        summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
        return summary, DIVERGED if summary["verdict"] == "diverged" else 0
    directory.mkdir(parents=True, exist_ok=True)
    built = Parts(
        directory=directory,
        model=model,
        optimizer=instantiate(plain["optimizer"]),
        schedule=schedule,
        windows=windows,
        train=train_loader(windows, start=start * plain["accumulate"], pin_memory=device == "cuda"),
        val=val_loader(held_out, batch=rows),
        tokens=tokens,
        log=instantiate(plain["logger"])(directory, facts["name"], plain),
        device=device,
        checkpoint=checkpoint,
        start=start,
    )
    print(described, flush=True)
    resume.store(plain | {"resume": None}, directory / "config.yaml")
    resume.store([word for word in overrides if not word.startswith("resume=")], directory / "overrides.yaml")
    summary, code = fit(built, plain, facts)
    print(closing(summary, directory), flush=True)
    return summary, code


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(cfg: DictConfig) -> float:
    """Hydra's task function: in a sweep it never raises or exits, since that would lose the jobs that follow."""
    here = HydraConfig.get()
    directory, sweep = Path(here.runtime.output_dir), here.mode == RunMode.MULTIRUN
    # unresolved: a word of the command line may hold an interpolation
    words = OmegaConf.to_container(here.overrides.task, resolve=False)
    assert isinstance(words, list)
    who = f"job {here.job.num} ({' '.join(words)}): " if sweep else ""
    try:
        if directory.resolve() == Path.cwd():
            raise ValueError("hydra.run.dir is the working directory: name one for the run, or leave it out")
        summary, code = train(cfg, directory, dict(here.runtime.choices), words)
    except (ValueError, InstantiationException) as error:
        summary, code = {}, USAGE
        print(f"normlab: {who}{_own_words(error)}", file=sys.stderr)
    except Exception as error:
        if not sweep:
            raise
        summary, code = {}, FAILED
        print(f"normlab: {who}{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
    if not sweep or code > 128:  # a signal belongs to the sweep: the jobs that follow are not started
        sys.exit(code)
    CODES.append(code)
    return PENALTY if code or summary["final_loss"] is None else float(summary["final_loss"])


def main() -> None:
    """The command line: Hydra's own errors become one line that names the key and the way out. A sweep exits with 1
    where a job was refused, failed or diverged."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise them here, not print them with advice
    # argparse takes `-m` only before the overrides
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        sys.argv[1:] = resume.as_overrides(sys.argv[1:])
        job()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        sys.exit(_usage(explain(error)))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(_usage(f"{error.filename}: {error.strerror}; hydra.run.dir or hydra.sweep.dir names another place"))
    except KeyboardInterrupt:
        print("normlab: interrupted before the first step", file=sys.stderr)
        sys.exit(130)
    if any(CODES):
        print(
            f"normlab: {sum(map(bool, CODES))} of {len(CODES)} jobs were refused, failed or diverged", file=sys.stderr
        )
        sys.exit(FAILED)


def _own_words(error: Exception) -> str:
    """What a constructor said, without Hydra's frame around it."""
    return str(error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error)


def _usage(line: str) -> int:
    print(f"normlab: {line}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    main()
