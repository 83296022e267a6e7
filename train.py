"""Train one model, or sweep over many: read the config, check it, build the parts, fit.

    python train.py norm=rmsnorm placement=pre
    python train.py --help

What a user can get wrong is answered in one line and exit code 2, before lightning, datasets or wandb are imported.
"""

import gc
import json
import logging
import os
import sys
import traceback
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import resume
from conf.check import check, check_hydra, check_network, unlisted
from conf.explain import explain, own_words, where
from conf.help import text as help_text
from conf.output import guarded, logged, silence
from conf.recipes import settle
from conf.schema import AXES
from conf.sweep import PENALTY, Lost, Remember, Sweep, without_schemas
from stability import sweep as jobs
from stability.records import lost, mapping, without_steps
from stability.verdict import DIVERGED, FAILED, REFUSED
from stability.whole import document, replace
from training.launch import follows, listen, same_command
from training.meeting import RankLost, Start
from training.ranks import Ranks
from training.signals import REQUEUE, Interrupted, Signals, requeue, requeued
from training.strategy import check_sharing

if TYPE_CHECKING:
    from data.corpus import Corpus
    from data.tokens import Tokens
    from data.windows import Windows
    from model.transformer import Choices, Transformer
    from training.schedule import Constant

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler speaks to the terminal
logging.raiseExceptions = False  # a library whose own log cannot be written, on a full disk, prints a traceback else
OmegaConf.register_new_resolver("axes", help_text, replace=True)


def choices_of(plain: dict[str, Any]) -> "Choices":
    """One choice per axis of the network, from a checked config."""
    from model.transformer import Choices

    found: dict[str, Any] = {field.name: instantiate(plain[field.name]) for field in fields(Choices)}
    # Hydra's own partial judges its target anew at each call, of which a thousand layers make ten thousand
    found |= {key: partial(part.func, **part.keywords) for key, part in found.items() if isinstance(part, partial)}
    return Choices(**found)


def network(plain: dict[str, Any], choices: "Choices", vocab: int) -> "Transformer":
    """The network of a checked config, initialised by its seed."""
    from model.transformer import Transformer

    return Transformer(vocab, choices, instantiate(plain["model"]), plain["seed"], plain["z_loss"])


def text_of(plain: dict[str, Any], corpus: "Corpus", known: dict[str, Any] | None = None) -> tuple["Tokens", "Windows"]:
    """(The text of a checked config as token ids, made now or found in the cache; the micro-batches of its every step.)
    `known`: texts that need not be read again."""
    from data.tokens import prepare
    from data.windows import Windows

    context, order = plain["model"]["context"], {key: plain[key] for key in ("batch", "accumulate", "steps", "seed")}
    wanted = json.dumps([plain["data"], plain["tokenizer"], context])
    known = {} if known is None else known
    if wanted not in known:
        known[wanted] = prepare(corpus, instantiate(plain["tokenizer"]), context=context)
    tokens: Tokens = known[wanted]
    return tokens, Windows(tokens.train, context=context, **order)


def check_whole(plain: dict[str, Any], axes: dict[str, str]) -> tuple["Choices", "Constant", "Corpus"]:
    """(The network's choices, the schedule, the corpus), once all that the text does not decide is known to fit together.

    ValueError, one line, for what does not. No text has been read by then, nothing written; torch is loaded last.
    """
    schedule: Constant = instantiate(plain["schedule"])
    schedule.warmup_steps(plain["steps"])
    corpus: Corpus = instantiate(plain["data"])
    sizes = instantiate(plain["model"])

    check_network(plain)
    from model.compatibility import refusals

    choices = choices_of(plain)
    # one layer of the real sizes: the constructors of its parts say what does not fit
    layer = network(plain | {"model": plain["model"] | {"depth": 1}}, choices, vocab=2)
    check_sharing(plain, axes, layer)
    if choices.scaling.paced:
        instantiate(plain["optimizer"])(layer)  # which says whether it goes with a scaling
    for refusal in refusals(choices, axes, sizes):
        if not plain["allow_unstable"]:
            raise ValueError(f"{refusal}; allow_unstable=true runs it all the same")
        print(f"allow_unstable=true: {refusal}")
    return choices, schedule, corpus


def train(
    cfg: DictConfig, directory: Path, axes: dict[str, str], overrides: list[str], *, sweep: bool = False
) -> tuple[dict[str, Any], int]:
    """One run in `directory`: (its summary, its exit code). ValueError, one line, for what the user can mend.

    In a `sweep` it takes one thread where none are asked for, and a run that diverged is not taken up again.
    """
    notes = settle(cfg, axes, overrides)
    plain, axes = check(cfg), {axis: axes.get(axis, "") for axis in AXES}
    if sweep and plain["devices"] * plain["num_nodes"] > 1:
        raise ValueError("devices, num_nodes: a job of a sweep has one device")
    ranks = Ranks(plain["devices"], plain["num_nodes"])
    if not ranks.first:
        _hush()
    print(*notes, sep="\n", end="\n" * bool(notes), flush=True)
    with Signals() as signals, ranks, resume.claimed(directory) if ranks.first else nullcontext():
        before = resume.recorded(plain, directory) if ranks.first else resume.Before(directory)
        verdict = before.summary.get("verdict")
        judged = verdict in jobs.JUDGED and before.summary.get("steps") == before.config["steps"]
        if judged and (before.done >= plain["steps"] or (sweep and verdict == "diverged")):
            if before.changed:  # `resume_force` has no step to take them in
                raise before.refuse(f"it is done, with another {', '.join(before.changed)}: leave them out")
            print(f"nothing to do: {before.done} of {plain['steps']} steps are done ({verdict})", flush=True)
            return before.summary, DIVERGED if verdict == "diverged" else 0
        try:
            summary, code = _train(plain, before, directory, axes, overrides, ranks, signals, sweep=sweep)
        except Interrupted as stop:
            reason = f"{stop} before its {'next' if before.config else 'first'} step"
            print(f"normlab: {reason}; resume={directory} goes on", file=sys.stderr)
            summary, code = without_steps("interrupted", reason, axes=axes, steps=plain["steps"]), 0
            if ranks.first and not before.config:
                resume.lay_down(directory, plain, overrides, {"summary.json": summary})
        # one that came too late to interrupt still ends the process, and the sweep
        return summary, 128 + signals.received if signals.received else code


def _train(
    plain: dict[str, Any],
    before: resume.Before,
    directory: Path,
    axes: dict[str, str],
    overrides: list[str],
    ranks: Ranks,
    signals: Signals,
    sweep: bool,
) -> tuple[dict[str, Any], int]:
    choices, schedule, corpus = check_whole(plain, axes)
    signals.check()
    import torch

    from data.windows import train_loader, val_loader, validation_windows
    from training import device as machine
    from training import graphs
    from training.checkpoint import check_space, resume_point
    from training.describe import closing, describe
    from training.memory import execution

    threads = plain["threads"] or before.threads or (1 if sweep else None)
    device = machine.prepare(plain, threads, local=ranks.local)
    with signals.at_once():
        tokens, windows = text_of(plain, corpus, Remember.texts if sweep else None)
    windows = windows.share(ranks.rank, ranks.world)
    before.check_text(tokens.hash)
    held_out = validation_windows(tokens.val, windows.context, corpus.val_windows)
    torch.manual_seed(ranks.seed(plain["seed"]))  # dropout; matrices and windows have generators of their own
    model = network(plain, choices, tokens.vocab)
    model.settle(windows.first_step())
    model.execution, memory = execution(model, plain, rows=windows.rows, device=device)
    if plain["trainer"].get("cuda_graphs"):
        graphs.check(device, model.execution)
    described, facts = describe(model, choices, schedule, plain, axes, tokens, device, memory, directory)

    checkpoint, start = None, 0
    environment = machine.environment(device, tokens, model) | resume.machinery(plain, axes)
    notes: list[str] = []
    if plain["resume"] is not None and ranks.first:
        checkpoint, start, run_id = resume_point(directory, model, before.environment.get("run"))
        before.check_record(start, lost(directory / "metrics.jsonl", start))
        before.check_schedule(instantiate(before.config["schedule"]), schedule, start)
        environment, notes = before.goes_on(environment | {"run": run_id or environment["run"]}, start)
    if ranks.first:
        check_space(directory, model, plain, depth=model.depth)
    ranks.start(lambda: same_command(resume.quoted(directory)))
    from training.run import Parts, fit
    from training.wandb import NoLog

    signals.check()  # the last: from here on there is something to lose
    here = Start(directory, checkpoint, start, environment["run"], torch.get_num_threads(), model.execution)
    begin = ranks.meet(here, signals, device)
    if begin is None:
        return {}, 0
    torch.set_num_threads(begin.threads)
    model.execution = begin.execution
    built = Parts(
        begin=begin,
        model=model,
        ranks=ranks,
        trainer=instantiate(plain["trainer"]),
        optimizer=instantiate(plain["optimizer"]),
        schedule=schedule,
        windows=windows,
        train=train_loader(
            windows, start=begin.steps * plain["accumulate"], workers=plain["workers"], pin_memory=device == "cuda"
        ),
        val=val_loader(held_out, batch=4 * windows.rows),  # without gradients one layer at a time is held
        tokens=tokens,
        log=(instantiate(plain["logger"]) if ranks.first else NoLog)(directory, facts["name"], plain),
        signals=signals,
        device=device,
    )
    print(described, *notes, sep="\n", flush=True)
    laid = {"environment.json": environment, "tokenizer.json": tokens.tokenizer.to_json()}
    if ranks.first:
        resume.lay_down(directory, plain, overrides, laid)
    summary, code = fit(built, plain, facts)
    print(closing(summary, directory), flush=True)
    return summary, code


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def job(cfg: DictConfig) -> float:
    """Hydra's task function: the final loss, or PENALTY for a job of a sweep that has none."""
    here = HydraConfig.get()
    directory, sweep = Path(here.runtime.output_dir), here.mode == RunMode.MULTIRUN
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())  # as people type it
    words: Any = OmegaConf.to_container(here.overrides.task, resolve=False)  # a word may hold an interpolation
    if (directory / "config.yaml").is_file() and (sweep or requeued()):
        cfg.resume = str(directory)  # the same command in the same place: what is there is completed
    try:
        if directory.resolve() == Path.cwd():
            raise ValueError("hydra.run.dir is the working directory: name one for the run, or leave it out")
        if sweep:
            return _one_of_many(cfg, directory, dict(here.runtime.choices), words, here.job.num)
        _, code = train(cfg, directory, dict(here.runtime.choices), words)
    except (ValueError, InstantiationException) as error:
        code = _usage(own_words(error))
    except OSError as error:
        code = _usage(where(error))
    except RankLost as error:
        print(f"normlab: {error}", file=sys.stderr)
        code = FAILED
    finally:
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
    sys.exit(code)


def _one_of_many(cfg: DictConfig, directory: Path, axes: dict[str, str], words: list[str], number: int) -> float:
    """A job of a sweep: it never raises or exits, since that would lose the jobs that follow, except for a signal, which
    belongs to the sweep. What it says, with the traceback of an error, stands in `job.log`, and there alone where the
    sweep's progress is shown instead, or another process started this one."""
    Remember.begin()
    quiet = Remember.sweep is None or Remember.shown
    with logged(directory / "job.log", echo=not quiet) as log:
        print(f"\njob {number}: {' '.join(words)}", flush=True)
        try:
            summary, code = train(cfg, directory, axes, words, sweep=True)
        except (ValueError, InstantiationException) as error:
            summary, code = without_steps("refused", own_words(error)), REFUSED
        except Exception as error:
            traceback.print_exc(file=log)
            summary, code = without_steps("failed", f"{type(error).__name__}: {error}"), FAILED
        if not (directory / "config.yaml").is_file():
            replace(directory / "summary.json", document(summary))
            replace(directory / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(words)))
        if code in (REFUSED, FAILED):
            for place in (log,) if quiet else (log, sys.stderr):
                print(f"normlab: job {number} {summary['verdict']}: {summary['reason']}", file=place, flush=True)
    Remember.ran[number] = directory, summary
    with Signals():  # noted here, and found by the next job: what is raised in a destructor is lost
        gc.collect()  # a trainer refers to itself: the next job may need its memory
    if code > 128:
        sys.exit(code)
    return PENALTY if code or summary["final_loss"] is None else min(float(summary["final_loss"]), PENALTY)


def main() -> None:
    """The command line. A sweep ends with its table, and with 1 where a job was refused, failed or diverged."""
    with guarded():
        if follows():
            _hush()
        code = _run()
        if (sweep := Remember.sweep) and code != REFUSED:
            ended = _end(sweep, whole=code == 0)
            code = code or ended
        if code == 128 + REQUEUE and Signals.spoken:
            requeue()
    sys.exit(code)


def _hush() -> None:
    """Of the ranks of a run the first alone speaks."""
    Signals.spoken = False
    silence()


def _end(sweep: Sweep, *, whole: bool) -> int:
    """The table that ends a sweep, and where it ran to its end as a `whole`, the claims of a study. The exit code."""
    rows = jobs.end(sweep.directory, sweep.jobs, Remember.ran, sweep.names)
    verdicts = {row.verdict for row in rows}
    if sweep.study is None or not whole:
        return 0 if verdicts <= jobs.DONE else FAILED
    from stability.study import conclude

    judged = conclude(sweep.directory)
    log = (mapping(sweep.directory / sweep.names[0] / "config.yaml", []) or {}).get("logger") or {}
    if "mode" in log:  # W&B has the runs
        from training.wandb import log_study

        log_study(sweep.directory, {one.name: one.verdict for one in judged}, mode=log["mode"], project=log["project"])
    return 0 if verdicts <= jobs.JUDGED else FAILED  # to diverge is an answer to the question


def _run() -> int:
    """The exit code; Hydra's own errors become one line that names the key and the way out."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise them here, not print them with advice
    try:
        with Signals() as signals, signals.at_once(), ExitStack() as Remember.until_end:
            listen()
            sys.argv[1:] = unlisted(resume.as_overrides(sys.argv[1:]))
            check_hydra(sys.argv[1:])
            without_schemas()
            job()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else 0
    except InstantiationException as error:  # of a part of an engine
        return _usage(own_words(error).splitlines()[0])
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        return _usage(explain(error))
    except OSError as error:
        return _usage(where(error))
    except Interrupted as stop:
        print(f"normlab: {stop}", file=sys.stderr)
        return 128 + stop.number
    except Lost as error:
        print(f"normlab: {error}", file=sys.stderr)
        return FAILED
    return 0


def _usage(line: str) -> int:
    print(f"normlab: {line}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    main()
