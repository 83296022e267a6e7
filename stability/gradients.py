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
        sharded = any(hasattr(entry.parameter, "full_tensor") for entry in entries)
        self._norms = _norms_of_parts if sharded else _norms
        self._ends = {part: np.array([e.part == part for e in entries]) for part in ("embed", "head")}

    def measure(self) -> Tensor:
        """The norm of each entry's gradient, shape (entries,), accumulated in at least float32; 0 where there is none.

        One `_foreach_norm` for all parameters, and where each rank has a part of them one message; nothing is sent to the host.
        """
        gradients = [entry.parameter.grad for entry in self.entries]
        present = [gradient for gradient in gradients if gradient is not None]
        dtype = torch.float64 if present and present[0].dtype == torch.float64 else torch.float32
        norms = iter(self._norms(present, dtype))
        zero = torch.zeros((), dtype=dtype, device=self.entries[0].parameter.device)
        return torch.stack([zero if gradient is None else next(norms) for gradient in gradients])

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


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    return torch._foreach_norm(gradients, 2, dtype=dtype) if gradients else ()


def _norms_of_parts(gradients: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Of gradients of which each rank has a part, but for some that are whole: the norms of the whole ones."""
    parted = [hasattr(gradient, "full_tensor") for gradient in gradients]
    whole = iter(_norms([g for g, parts in zip(gradients, parted, strict=True) if not parts], dtype))
    parts: Any = torch.stack(list(_norms([g for g, parts in zip(gradients, parted, strict=True) if parts], dtype)))
    together = iter(parts.full_tensor().unbind())
    return [next(together if parts else whole) for parts in parted]
