"""What a run came to: its verdict, and the numbers of `summary.json`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from stability.verdict import DIVERGED, judge, spikes, tail
from training import device as machine
from training.flops import peak_flops, utilisation
from training.recorder import Recorder
from training.signals import Signals, name


def judged(recorder: Recorder, signals: Signals, steps: int, facts: dict[str, Any]) -> tuple[str, str, int]:
    loss, skipped = np.array(recorder.loss), np.array(recorder.skipped)
    if signals.received and len(loss) < steps and not recorder.reason:
        return "interrupted", f"{name(signals.received)} after step {len(loss)} of {steps}", 128 + signals.received
    known = {"unigram_entropy": facts["unigram_entropy"], "floor": facts["floor"]}
    verdict, reason = judge(loss, skipped, steps=steps, diverged=recorder.reason, **known)
    if verdict == "stalled" and len(recorder.ends) == 2:
        (first, before), (last, after) = sorted(recorder.ends.items())
        reason += (
            f"; the gradient norm of layer 1 went from {before[0]:.1e} (step {first}) to {after[0]:.1e} (step {last}), "
            f"of layer {len(after)} from {before[-1]:.1e} to {after[-1]:.1e}"
        )
    return verdict, reason, DIVERGED if verdict == "diverged" else 0


def summarise(
    recorder: Recorder, facts: dict[str, Any], verdict: str, reason: str, steps: int, wall: float, memory: int
) -> dict[str, Any]:
    loss = np.array(recorder.loss, dtype=np.float64)
    finite = loss[np.isfinite(loss)]
    val = [value for step, value in recorder.val_loss if step]
    numbers = {
        "first_loss": finite[0] if finite.size else None,
        "final_loss": tail(loss, steps),
        "best_loss": finite.min() if finite.size else None,
        "best_val_loss": min((v for v in val if np.isfinite(v)), default=None),
        "final_val_loss": val[-1] if val else None,
        "spike_score": 100 * spikes(loss).mean() if finite.size else None,
        "tokens_per_second": recorder.tokens_per_second,
        "wall_time_s": wall,
    }
    return {
        "verdict": verdict,
        "reason": reason,
        **facts,
        "steps": steps,
        "steps_done": len(loss),
        "first_bad_step": recorder.first_bad_step,
        "first_bad_layer": recorder.first_bad_place and recorder.first_bad_place.layer,
        "first_bad_parameter": recorder.first_bad_place and recorder.first_bad_place.parameter,
        "skipped_steps": sum(recorder.skipped),
        **{
            key: float(f"{value:.9g}") if value is not None and np.isfinite(value) else None
            for key, value in numbers.items()
        },
        "peak_memory_bytes": memory,
    }


def of_peak(summary: dict[str, Any], device: str, scalars: dict[str, Any]) -> dict[str, float | None]:
    """`peak_flops` of one device, where that is known, and `mfu`, the share of all devices' that the run made use of."""
    peak = peak_flops(machine.name(device), machine.precision(scalars["precision"], device))
    if peak is None:
        return {}
    devices = scalars["devices"] * scalars["num_nodes"]
    share = utilisation(summary["tokens_per_second"], summary["flops_per_token"], peak, devices)
    return {"peak_flops": peak, "mfu": share and float(f"{share:.9g}")}


def earlier(directory: Path) -> float:
    """Seconds that a resumed run took before; 0 where it left no summary."""
    path = directory / "summary.json"
    return float(json.loads(path.read_text(encoding="utf-8"))["wall_time_s"] or 0.0) if path.is_file() else 0.0
