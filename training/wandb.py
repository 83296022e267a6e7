"""The same numbers for Weights & Biases, and the report of a study. Nothing here ever asks a question, or waits more than
`PATIENCE` seconds, once, for a server that does not answer."""

import netrc
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

import numpy as np

from stability.records import block_norms

Mode = Literal["auto", "offline", "online", "disabled"]
PATIENCE = 8  # seconds for a server that does not answer
UPLOAD = 60  # seconds for a report to come to a server that did; what has not by then is sent by `wandb sync`
MOST_LAYERS, MOST_PARTED = 128, 32  # thousands of charts freeze the page; metrics.jsonl is always complete
# what a probe line comes to: its largest or smallest over the layers, its last, or the number itself
PROBE: dict[str, Callable[[Any], Any]] = {"loss": float, "model_update": float}
PROBE |= {
    "logit_max": np.max,
    "update_ratio": np.max,
    "gain_max": np.max,
    "attention_entropy": np.min,
    "gain_min": np.min,
}
PROBE |= {"stream_rms": itemgetter(-1), "token_cosine": itemgetter(-1)}


class Log(Protocol):
    def record(self, record: dict[str, Any]) -> None: ...

    def image(self, key: str, path: Path) -> None: ...

    def finish(self, summary: dict[str, Any], exit_code: int) -> None: ...


class NoLog:
    """`logger=none`."""

    def __init__(self, directory: Path, name: str, config: dict[str, Any]) -> None: ...

    def record(self, record: dict[str, Any]) -> None: ...

    def image(self, key: str, path: Path) -> None: ...

    def finish(self, summary: dict[str, Any], exit_code: int) -> None: ...


class WandbLog:
    """One W&B run, its files below the run directory; a resumed run goes on in the same one.

    `mode=auto` is online where a key is at hand (WANDB_API_KEY or the netrc entry that `wandb login` writes), else
    offline; WANDB_MODE, if set, decides. An offline run is sent later by `wandb sync`.
    """

    def __init__(
        self, directory: Path, name: str, config: dict[str, Any], *, mode: Mode = "auto", project: str = "normlab"
    ) -> None:
        self._wandb, self.run = _started(directory, name, mode, project, config=config)
        self._lost = False

    def record(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        numbers = flat(record)
        self._try(lambda: self.run.log(numbers, step=record["step"]))

    def image(self, key: str, path: Path) -> None:
        self._try(lambda: self.run.log({key: self._wandb.Image(str(path))}))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self._try(lambda: self.run.summary.update(summary))
        self._try(lambda: self.run.finish(exit_code=exit_code))

    def _try(self, call: Callable[[], Any]) -> None:
        """W&B's own process may die in the middle of a run, which then goes on without it."""
        if self._lost:
            return
        try:
            call()
        except Exception as error:
            self._lost = True
            print(f"W&B takes no more of this run ({_line(error)}): metrics.jsonl has all of it")


def log_report(
    directory: Path,
    name: str,
    files: Sequence[Path],
    verdicts: Mapping[str, str],
    *,
    group: str,
    mode: Mode = "auto",
    project: str = "normlab",
) -> None:
    """The end of the study in `directory`, as a W&B run of job type `study` in the `group` of the study's runs: an artifact
    of type `report` with those of the `files` and folders that are there, and in the summary `claims/NAME` with each
    claim's verdict. The same study, ended again, goes on in the same W&B run, with a new version of the artifact.

    `mode` as for a run. What W&B cannot take is said in a line, and is no error: the directory has all of it.
    """
    try:
        wandb, run = _started(directory, name, mode, project, group=group, job_type="study", finish_timeout=UPLOAD)
        with run:
            if run.disabled:
                return
            artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", f"{name}-report"), type="report")
            for path, inside in _copied(files, Path(run.dir).with_name("report")):
                artifact.add_file(str(path), name=inside, policy="immutable", skip_cache=True)
            run.log_artifact(artifact)
            run.summary.update({f"claims/{claim}": verdict for claim, verdict in verdicts.items()})
    except Exception as error:
        print(f"W&B has no report of this study ({_line(error)}): {directory} has all of it")


def log_study(directory: Path, verdicts: Mapping[str, str], *, mode: Mode, project: str) -> None:
    """The end of a study whose runs W&B has: the files that it leaves, and its claims' verdicts, in the group of its runs."""
    files = [directory / name for name in ("report.html", "claims.json", "report.png", "figures")]
    group = os.environ["WANDB_RUN_GROUP"]
    log_report(directory, directory.name, files, verdicts, group=group, mode=mode, project=project)


def _copied(files: Sequence[Path], place: Path) -> Iterator[tuple[Path, str]]:
    """(A copy, its name in the artifact) of each file in `files` and in their folders. An offline run is sent later, when
    the study may have been judged anew: it keeps its own."""
    for path in files:
        inside = [(each, each.relative_to(path.parent)) for each in sorted(path.rglob("*"))] or [
            (path, Path(path.name))
        ]
        for each, name in inside:
            if each.is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                yield Path(shutil.copyfile(each, place / name)), name.as_posix()


def _started(
    directory: Path, name: str, mode: Mode, project: str, *, finish_timeout: float = 0.0, **more: Any
) -> tuple[Any, Any]:
    """(W&B, the W&B run of this directory, begun or gone on with). WANDB_RUN_GROUP, if set, is its group.

    ValueError where it is to be online and no key is at hand."""
    # W&B reports on itself at the end of a process, offline too, and waits seconds for an answer
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    known = _logged_in(wandb.Settings().base_url)
    chosen: Any = os.environ.get("WANDB_MODE", "online" if known else "offline") if mode == "auto" else mode
    if chosen == "online" and not known:  # wandb would ask for one
        raise ValueError("logger.mode=online needs a key: `wandb login` first, or leave logger.mode=auto (offline)")
    settings = wandb.Settings(console="off", silent=True, quiet=True, init_timeout=PATIENCE)
    settings.finish_timeout, settings.finish_timeout_raises = finish_timeout, True
    start: dict[str, Any] = more | {
        "id": _run_id(directory),
        "resume": "allow" if chosen == "online" else None,
        "dir": str(directory.resolve()),
        "name": name,
        "project": project,
        "settings": settings,
        "reinit": "create_new",  # never the run of a job before, should that have ended without `finish`
    }
    try:
        return wandb, wandb.init(mode=chosen, **start)
    except wandb.errors.Error as error:
        print(f"W&B cannot be reached ({str(error).splitlines()[0]}): this run is logged offline")
        wandb.teardown()  # W&B's own process still holds the run's id, and would refuse it
        return wandb, wandb.init(mode="offline", **start | {"resume": None})


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record under W&B's keys: `loss/train`, `loss/val`, `grad_norm/total`, `grad_norm/layer_0001` and on, layers
    counted from 1 and zero-padded so that they sort; all up to 128 layers, 128 evenly spaced ones beyond; with
    `/attention` and `/ffn` below each up to 32.

    Of a probe line a number each: loss, model_update, and over the layers the largest logit_max, update_ratio and gain_max,
    the smallest attention_entropy and gain_min, and stream_rms and token_cosine after the last."""
    names = {"loss": "loss/train", "val_loss": "loss/val", "lr": "lr", "clip_coefficient": "clip_coefficient"}
    out = {names[key]: record[key] for key in names if key in record} | {"tokens": record["tokens"]}
    probe = record.get("probe", {})
    out |= {f"probe/{key}": float(PROBE[key](probe[key])) for key in PROBE if key in probe}
    norms = record.get("grad_norm", {})
    out |= {f"grad_norm/{key}": norms[key] for key in ("total", "embed", "head") if key in norms}
    if "attention" in norms:
        block = block_norms(norms)
        depth = len(block)
        for layer in np.unique(np.linspace(1, depth, min(depth, MOST_LAYERS)).round().astype(int)).tolist():
            out[f"grad_norm/layer_{layer:04d}"] = float(block[layer - 1])
            if depth <= MOST_PARTED:
                for part in ("attention", "ffn"):
                    out[f"grad_norm/layer_{layer:04d}/{part}"] = norms[part][layer - 1]
    return out


def _run_id(directory: Path) -> str:
    """The id of this directory's W&B run, drawn when it is first asked for."""
    path = directory / "wandb" / "id"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _logged_in(base_url: str) -> bool:
    """Whether a key for the server is at hand, without asking it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", base_url)).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
