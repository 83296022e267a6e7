"""A decoder-only Transformer: embedding, blocks, head."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention, QKNorm
from model.block import Block, Branch
from model.init import Init, draw_, initialise_
from model.placement import Placement
from model.position import NoPosition
from model.residual import Method
from model.site import Branch as BranchName
from model.site import Site
from model.stream import Stream


@dataclass(frozen=True)
class Choices:
    """One choice per axis: what is put together, apart from the sizes."""

    norm: Callable[[int], nn.Module]
    placement: Placement
    residual: Method
    init: Init
    ffn: Callable[..., nn.Module]
    position: Callable[..., NoPosition]


class Embedding(nn.Module):
    """x = N_embed(c E[token] + position), c such that token and learned position have RMS 1 in sum (`init=normal`:
    c = 1). A tied E is drawn as the head's matrix, N(0, 1/dim), and c makes up for it."""

    def __init__(
        self, token: nn.Parameter, scale: float, position: NoPosition, norm: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.token, self.scale, self.position, self.norm, self.dropout = token, scale, position, norm, dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.token)
        x = self.position.embed(x if self.scale == 1.0 else x * self.scale)
        return F.dropout(self.norm(x), self.dropout, self.training)


class Head(nn.Module):
    """logits = W N_head(x): (batch, time, dim) to (batch, time, vocab)."""

    def __init__(self, weight: nn.Parameter, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.norm = weight, norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class Transformer(nn.Module):
    """logits = head(block_N(... block_1(embedding(tokens)))): int64 (batch, time <= context) to (batch, time, vocab).

    `choices` says what stands at each site; the other arguments are sizes. Initialised in full by `seed`.
    Raises ValueError, with the config key, for sizes that do not fit together.
    """

    def __init__(
        self,
        vocab: int,
        choices: Choices,
        seed: int,
        *,
        depth: int,
        dim: int,
        heads: int,
        context: int,
        kv_heads: int | None = None,
        qk_norm: QKNorm = "none",
        tied: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        kv_heads = check_sizes(depth, dim, heads, context, kv_heads, dropout)
        norm, placement, init = choices.norm, choices.placement, choices.init
        self.depth, self.dim, self.context, self.vocab = depth, dim, context, vocab

        position = choices.position(dim, dim // heads, context)
        rms = init.embedding(1 + position.terms)
        token_std = init.head(dim) if tied else rms
        token = nn.Parameter(Tensor(vocab, dim))
        ends = {place: norm(dim) if place in placement.ends else nn.Identity() for place in ("embed", "head")}
        self.embed = Embedding(token, rms / token_std, position, ends["embed"], dropout)

        def branch(name: BranchName, layer: int, function: nn.Module) -> Branch:
            site = Site(name, layer, depth)
            residual = choices.residual(site, dim)
            return Branch(function, Stream(dim, places=placement.at(site), norm=norm, residual=residual), residual)

        def block(layer: int) -> Block:
            attention = Attention(
                dim,
                heads=heads,
                kv_heads=kv_heads,
                qk_norm=qk_norm,
                norm=norm,
                rotate=position.rotate,
                bias=bias,
                dropout=dropout,
            )
            ffn = choices.ffn(dim, bias, dropout)
            return Block(branch("attention", layer, attention), branch("ffn", layer, ffn))

        self.blocks = nn.ModuleList(block(layer) for layer in range(1, depth + 1))
        self.head = Head(token if tied else nn.Parameter(Tensor(vocab, dim)), ends["head"])

        draw_(token, token_std, seed=seed, name="embed.token")
        if not tied:
            draw_(self.head.weight, init.head(dim), seed=seed, name="head.weight")
        for name, parameter in position.named_parameters():
            draw_(parameter, rms, seed=seed, name=f"position.{name}")
        initialise_(self.blocks.named_modules(), init, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def check_sizes(depth: int, dim: int, heads: int, context: int, kv_heads: int | None, dropout: float) -> int:
    """The number of key-value heads (all heads where none is asked for); ValueError for sizes that do not fit."""
    for key, value in (("depth", depth), ("dim", dim), ("heads", heads), ("context", context)):
        if value < 1:
            raise ValueError(f"model.{key} must be >= 1, found {value}")
    if dim % heads:
        raise ValueError(f"model.dim={dim} must divide by model.heads={heads} ({dim} % {heads} = {dim % heads})")
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1:
        raise ValueError(f"model.kv_heads must be >= 1, found {kv_heads}")
    if heads % kv_heads:
        raise ValueError(f"model.heads={heads} must divide by model.kv_heads={kv_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout must be in [0, 1), found {dropout}")
    return kv_heads
