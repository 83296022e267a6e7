"""How large a network is. Imports no torch, so that sizes that do not fit are refused in a blink."""

from dataclasses import dataclass, replace
from typing import Literal

QKNorm = Literal["none", "head", "full"]
Checkpointing = Literal["auto", "groups", "none"]


@dataclass(frozen=True)
class Sizes:
    """depth: blocks. dim: width of the stream. heads, kv_heads: query heads, and key-value heads (null = as many).
    context: the most tokens at a time. qk_norm: where queries and keys are normalised (`model/attention.py`). tied: the
    head is the embedding's matrix. bias: in every linear map of the blocks. dropout: probability, after the embedding,
    in attention and after each branch. logit_cap: c of c tanh(logits / c) at the output (Gemma 2: 30), 0: none. embed_grad: what
    the token matrix's gradient is multiplied by at the input (GLM-130B: 0.1). checkpointing: whether the activations of groups of about sqrt(depth) blocks are
    computed again in the backward pass, for less memory and the same numbers (`model/execution.py`); auto: where they would
    take over half of the memory that is free.

    Raises ValueError, with the config key, for sizes that do not fit together.
    """

    depth: int
    dim: int
    heads: int
    context: int
    kv_heads: int | None = None
    qk_norm: QKNorm = "none"
    tied: bool = False
    bias: bool = False
    dropout: float = 0.0
    logit_cap: float = 0.0
    embed_grad: float = 1.0
    checkpointing: Checkpointing = "auto"

    def __post_init__(self) -> None:
        for key in ("depth", "dim", "heads", "context"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key} must be >= 1, found {getattr(self, key)}")
        if self.dim % self.heads:
            left = f"{self.dim} % {self.heads} = {self.dim % self.heads}"
            raise ValueError(f"model.dim={self.dim} must divide by model.heads={self.heads} ({left})")
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(f"model.kv_heads must be >= 1, found {self.kv_heads}")
        if self.heads % self.groups:
            raise ValueError(f"model.heads={self.heads} must divide by model.kv_heads={self.kv_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), found {self.dropout}")
        if self.logit_cap < 0:
            raise ValueError(f"model.logit_cap must be >= 0 (0 = no cap), found {self.logit_cap}")
        if not 0 <= self.embed_grad <= 1:
            raise ValueError(f"model.embed_grad must be in [0, 1], found {self.embed_grad}")

    @property
    def groups(self) -> int:
        """The number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def at_depth(self, depth: int) -> "Sizes":
        return replace(self, depth=depth)
