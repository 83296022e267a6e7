"""What a run leaves behind, written and read: one line of `metrics.jsonl`, and a whole run directory as arrays.

Nothing here imports torch or a plotting library, so that a notebook, the report and the tests can all read a run cheaply.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

Array = NDArray[np.float64]

BLOCK_PARTS = ("attention", "ffn", "norm", "residual")  # these part a block's parameters: their squares add up
MATRICES = ("q", "k", "v", "o", "up", "gate", "down")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it, is ten times faster
STREAM = ("stream_rms", "stream_grad_norm", "token_cosine")  # of a probe, after the embedding (0) and after each block
CHUNK = 1 << 16  # bytes of the end of a record that are read first

# of `summary.json`, beside verdict and reason
SUMMARY: tuple[str, ...] = (
    "name",
    "depth",
    "axes",
    "equation",
    "unigram_entropy",
    "floor",
    "steps",
    "steps_done",
    "first_bad_step",
)
SUMMARY += ("first_bad_layer", "first_bad_parameter", "skipped_steps", "first_loss", "final_loss", "best_loss")
SUMMARY += ("best_val_loss", "final_val_loss", "spike_score", "tokens_per_second", "wall_time_s", "peak_memory_bytes")
SUMMARY += ("flops_per_token",)


def block_norms(table: Mapping[str, Sequence[float] | Array]) -> Array:
    """The gradient norm of each block as a whole, from the arrays of its parts: sqrt of the sum of their squares."""
    return np.sqrt(np.sum([np.square(table[part]) for part in BLOCK_PARTS], axis=0))


# ---------------------------------------------------------------------------------------------------- one line, written


def metrics_line(record: dict[str, Any]) -> str:
    """One record as one line of strict JSON, without the line feed.

    Floats keep at most 9 significant digits (every float32 survives that). What is not finite becomes `null` and is
    named under `"nonfinite"`, since NaN is not JSON: `loss`, `grad_norm.total`, `ffn[12]` for layer 12 of `grad_norm.ffn`
    (layers count from 1), `probe.stream_rms[0]` for the embedding. Whatever has a `tolist` (an array, a tensor) is written
    as its list.
    """
    nonfinite: list[str] = list(record.get("nonfinite", []))
    clean = {key: _finite(value, key, nonfinite) for key, value in record.items() if key != "nonfinite"}
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return json.dumps(clean, allow_nan=False)


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _finite(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        part, first = name.removeprefix("grad_norm."), 0 if name.removeprefix("probe.") in STREAM else 1
        return [_finite(item, f"{part}[{place}]", nonfinite) for place, item in enumerate(value, start=first)]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        nonfinite.append(name)
        return None
    return float(f"{value:.9g}")


def without_steps(verdict: str, reason: str, **known: Any) -> dict[str, Any]:
    """The `summary.json` of a run that took no step: what is `known`, and null for the rest."""
    return {"verdict": verdict, "reason": reason} | dict.fromkeys(SUMMARY) | {"steps_done": 0} | known


# -------------------------------------------------------------------------------------------------- a directory, read


@dataclass(frozen=True, eq=False)
class Run:
    """A run directory in memory. Losses are in nats per token; what was not finite, or not written, is nan.

    `step` and the arrays beside it have one entry per optimizer step; `val_step`, `val_loss` one per validation;
    `layer_step`, `embed`, `head` one per step on which every layer was measured, and `layers[part]` has the shape
    (len(layer_step), depth): row i is `layer_step[i]`, column j is layer j + 1. `layers["block"]` is the gradient norm
    of the block as a whole. `skipped` is true where the gradient was not finite and the step not taken.

    `probe_step` has one entry per probe line, 0 being the one before the first step. `probe[key]` has the shape
    (len(probe_step), places) where the key is measured in several (N + 1 places of the stream, else N blocks), and
    (len(probe_step),) where it is one number; nan where a line lacks it.
    """

    directory: Path
    config: dict[str, Any]
    summary: dict[str, Any] | None
    step: NDArray[np.int64]
    loss: Array
    lr: Array
    grad_norm_total: Array
    clip_coefficient: Array
    skipped: NDArray[np.bool_]
    val_step: NDArray[np.int64]
    val_loss: Array
    layer_step: NDArray[np.int64]
    layers: dict[str, Array]
    embed: Array
    head: Array
    probe_step: NDArray[np.int64]
    probe: dict[str, Array]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return str((self.summary or {}).get("name") or self.config.get("name") or self.directory.resolve().name)

    @property
    def verdict(self) -> str:
        return str((self.summary or {}).get("verdict") or "no verdict")

    @property
    def depth(self) -> int:
        return int(self.layers["block"].shape[1])


def read(directory: str | Path, parts: Collection[str] | None = None) -> Run:
    """Read a run directory, finished or not.

    parts: which of `layers` to keep, `block` or a name of `BLOCK_PARTS` and `MATRICES`; None for all. Of many deep runs all
    would not fit into memory.

    A missing summary or config, and a line cut short by a crash, are put up with and said in `notes`. A step that
    stands twice (written before and after a resume) counts once: the later line wins.

    Raises ValueError if the directory is no run, or if its layer arrays disagree about the depth.
    """
    directory = Path(directory)
    if not (directory / "metrics.jsonl").is_file() and not (directory / "summary.json").is_file():
        raise ValueError(
            f"{directory} is not a run directory: a run holds metrics.jsonl, summary.json and config.yaml"
            + ("" if directory.is_dir() else " (there is no such directory)")
        )
    notes: list[str] = []
    kept = {*(BLOCK_PARTS if parts is None or "block" in parts else ()), *(MATRICES if parts is None else parts)}
    records = list(lines(directory / "metrics.jsonl", notes, partial(_as_arrays, kept=kept)))
    summary = mapping(directory / "summary.json", notes)
    config = mapping(directory / "config.yaml", notes)

    steps = _by_step(record for record in records if "loss" in record)
    validations = _by_step(record for record in records if "val_loss" in record)
    probes = _by_step(record for record in records if "probe" in record)
    measured = [record for record in steps if any(isinstance(part, np.ndarray) for part in _norms(record).values())]
    layers = _layers(measured, directory)
    told = layers if parts is None else {"block", *parts} & layers.keys()
    return Run(
        directory=directory,
        config=config or {},
        summary=summary,
        step=_step(steps),
        loss=_numbers(record["loss"] for record in steps),
        lr=_numbers(record.get("lr") for record in steps),
        grad_norm_total=_numbers(_norms(record).get("total") for record in steps),
        clip_coefficient=_numbers(record.get("clip_coefficient") for record in steps),
        skipped=np.array([bool(record.get("skipped")) for record in steps], dtype=bool),
        val_step=_step(validations),
        val_loss=_numbers(record["val_loss"] for record in validations),
        layer_step=_step(measured),
        layers={part: layers[part] for part in layers if part in told},
        embed=_numbers(_norms(record).get("embed") for record in measured),
        head=_numbers(_norms(record).get("head") for record in measured),
        probe_step=_step(probes),
        probe=_probe([record["probe"] for record in probes], directory),
        notes=tuple(notes),
    )


def _checked(record: Any) -> dict[str, Any]:
    record["step"] = int(record["step"])
    np.int64(record["step"])  # raises where it is too large
    _numbers(record.get(key) for key in ("loss", "val_loss", "lr", "clip_coefficient"))
    if not isinstance(_norms(record), dict):
        raise TypeError("grad_norm is no mapping")
    for value in record.get("probe", {}).values():
        _vector(value if isinstance(value, list) else [value])
    return record


def lines(path: Path, notes: list[str], record_of: Callable[[Any], Any] = _checked) -> Iterator[dict[str, Any]]:
    """Each record of `metrics.jsonl` in its order; a line that a crash cut short is dropped, with a word in `notes`.
    `record_of` makes a record of what a line holds, or raises."""
    if not path.is_file():
        notes.append(f"{path.name} is {'no file' if path.exists() else 'missing: the run took no step'}")
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = record_of(orjson.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                notes.append(f"line {number} of {path.name} is cut short or no record: dropped")
            else:
                yield record


def last_step(path: Path) -> dict[str, Any] | None:
    """The last whole line of `metrics.jsonl` that is a step's, found from the end; None where there is none (yet)."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        size, length = os.fstat(file.fileno()).st_size, 0
        while length < size:
            length = min(size, 4 * length or CHUNK)  # a line of 1,000 layers is longer than one chunk
            file.seek(size - length)
            *whole, _ = file.read(length).split(b"\n")  # what stands behind the last line feed is not written yet
            for line in reversed(whole if length == size else whole[1:]):
                with suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict) and "loss" in record and isinstance(record.get("step"), int):
                        return record
    return None


def _as_arrays(record: Any, kept: Collection[str]) -> dict[str, Any]:
    """The record with the lists of its gradient norms as arrays, of the parts that are kept: lists take four times the room."""
    record = _checked(record)
    norms = {key: value for key, value in _norms(record).items() if not isinstance(value, list)}
    _numbers(norms.get(key) for key in ("total", "embed", "head"))
    arrays = {key: _vector(value) for key, value in _norms(record).items() if key in kept and key not in norms}
    return {**record, "grad_norm": norms | arrays}


def _vector(values: list[Any]) -> Array:
    vector = np.array(values, dtype=np.float64)
    if vector.ndim != 1:
        raise TypeError("numbers, or a list of them")
    return vector


def lost(path: Path, done: int) -> list[int]:
    """The steps up to `done` that have no line in `metrics.jsonl`."""
    there = {record["step"] for record in lines(path, []) if "loss" in record}
    return [step for step in range(1, done + 1) if step not in there]


def mapping(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A JSON or YAML file that holds one mapping, or None with a note (JSON is read as JSON: YAML takes 1e-05 for text)."""
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.load(text, LOADER)
    except (ValueError, RecursionError, yaml.YAMLError):
        document = None
    if not isinstance(document, dict):
        notes.append(f"{path.name} cannot be read: ignored")
        return None
    return document


def _by_step(records: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    latest = {record["step"]: record for record in records}
    return [latest[step] for step in sorted(latest)]


def _norms(record: dict[str, Any]) -> dict[str, Any]:
    return record.get("grad_norm") or {}


def _step(records: list[dict[str, Any]]) -> NDArray[np.int64]:
    return np.array([record["step"] for record in records], dtype=np.int64)


def _numbers(values: Iterable[Any]) -> Array:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _layers(records: list[dict[str, Any]], directory: Path) -> dict[str, Array]:
    parts = [part for part in BLOCK_PARTS + MATRICES if any(len(_array(record, part)) for record in records)]
    depths = {len(_array(record, part)) for record in records for part in parts} - {0}
    if len(depths) > 1:
        raise ValueError(f"{directory}/metrics.jsonl mixes runs of different depths: {sorted(depths)} layers")
    absent = np.full(depths.pop() if depths else 0, math.nan)
    layers = {part: np.array([rows if len(rows := _array(r, part)) else absent for r in records]) for part in parts}
    squares = [layers[part] ** 2 for part in BLOCK_PARTS if part in layers]
    layers["block"] = np.sqrt(sum(squares)) if squares else np.full((len(records), len(absent)), math.nan)
    return layers


def _array(record: dict[str, Any], part: str) -> Array:
    found = _norms(record).get(part)
    return found if isinstance(found, np.ndarray) else np.empty(0)


def _probe(probes: Sequence[dict[str, Any]], directory: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for key in dict.fromkeys(key for probe in probes for key in probe):
        values = [probe.get(key) for probe in probes]
        places = {len(value) for value in values if isinstance(value, list)}
        if len(places) > 1:
            raise ValueError(
                f"{directory}/metrics.jsonl mixes runs of different depths: {key} has {sorted(places)} places"
            )
        absent = [None] * places.pop() if places else None
        rows = [value if isinstance(value, list) == isinstance(absent, list) else absent for value in values]
        arrays[key] = np.array(rows, dtype=np.float64)
    return arrays
