"""The gradient norms of one step, by parameter, by part of a layer, and in all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.inventory import Entry
from stability.records import BLOCK_PARTS, MATRICES


class GradientNorms:
    """||g||_2 of the gradient that the optimizer is about to use: after accumulation, before clipping.

    `measure` stays on the device; `table` and `last_bad` are for the host, after one transfer of all.
    """

    def __init__(self, entries: Sequence[Entry], depth: int) -> None:
        self.entries, self.depth = entries, depth
        layer = np.array([entry.layer for entry in entries])
        self._rows = {part: (np.array([e.part == part for e in entries]), layer) for part in BLOCK_PARTS}
        for name in MATRICES:
            chosen = np.array([e.matrix == name and e.kind == "matrix" for e in entries])
            if chosen.any():
                self._rows[name] = (chosen, layer)
        self._ends = {part: np.array([e.part == part for e in entries]) for part in ("embed", "head")}

    def measure(self) -> Tensor:
        """The norm of each entry's gradient, shape (entries,), accumulated in at least float32; 0 where there is none.

        One `_foreach_norm` for all parameters, and where each rank has a part of them one message; nothing is sent to the host.
        """
        gradients = {i: e.parameter.grad for i, e in enumerate(self.entries) if e.parameter.grad is not None}
        double = any(g.dtype == torch.float64 for g in gradients.values())
        dtype = torch.float64 if double else torch.float32
        norms: dict[int, Tensor] = {}
        for sharded in (False, True):
            chosen = {i: g for i, g in gradients.items() if hasattr(g, "full_tensor") == sharded}
            norms |= zip(chosen, _norms(list(chosen.values()), dtype), strict=True)
        zero = torch.zeros((), dtype=dtype, device=self.entries[0].parameter.device)
        return torch.stack([norms.get(i, zero) for i in range(len(self.entries))])

    def table(self, norms: np.ndarray) -> dict[str, Any]:
        """`grad_norm` of a record: total, embed, head, and an array over the layers for each part and each matrix.

        The squares of embed, head, attention, ffn, norm and residual add up to the total's.
        """
        squares = norms.astype(np.float64) ** 2
        table: dict[str, Any] = {"total": float(np.sqrt(squares.sum()))}
        table |= {name: float(np.sqrt(squares[chosen].sum())) for name, chosen in self._ends.items()}
        for name, (chosen, layer) in self._rows.items():
            sums = np.bincount(layer[chosen], squares[chosen], minlength=self.depth + 1)[1:]
            table[name] = np.sqrt(sums).tolist()
        return table

    def last_bad(self, norms: np.ndarray) -> Entry | None:
        """The entry nearest the output whose norm is not finite: backward runs from the output, so there it began."""
        bad = [entry for entry, norm in zip(self.entries, norms, strict=True) if not np.isfinite(norm)]
        heads = [entry for entry in bad if entry.part == "head"]
        return heads[0] if heads else max(bad, key=lambda entry: entry.layer, default=None)


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of gradients that are all whole, or all sharded: the norms of the whole ones, of which each rank has a part."""
    if not gradients:
        return []
    norms: Any = torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype))
    return list((norms.full_tensor() if hasattr(norms, "full_tensor") else norms).unbind())
