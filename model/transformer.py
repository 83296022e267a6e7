"""A decoder-only Transformer: embedding, blocks, head."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import Attention
from model.block import Block, Branch
from model.execution import Execution, cross_entropy
from model.init import Init, draw_, initialise_
from model.placement import Placement
from model.position import NoPosition
from model.residual import Method
from model.site import Branch as BranchName
from model.site import Site
from model.sizes import Sizes
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

    With `targets`, int64 like the tokens, the mean cross-entropy of these logits, in nats. `choices` says what stands at each
    site, `execution` how the blocks are run. Initialised in full by `seed`.
    """

    def __init__(self, vocab: int, choices: Choices, sizes: Sizes, seed: int) -> None:
        super().__init__()
        dim, norm, init = sizes.dim, choices.norm, choices.init
        self.depth, self.dim, self.context = sizes.depth, dim, sizes.context
        self.execution = Execution()

        position = choices.position(dim, sizes.head_dim, sizes.context)
        rms = init.embedding(1 + position.terms)
        token_std = init.head(dim) if sizes.tied else rms
        token = nn.Parameter(torch.empty(vocab, dim))
        ends = {place: norm(dim) if place in choices.placement.ends else nn.Identity() for place in ("embed", "head")}
        self.embed = Embedding(token, rms / token_std, position, ends["embed"], sizes.dropout)
        self.blocks = nn.ModuleList(_block(layer, choices, sizes, position) for layer in range(1, sizes.depth + 1))
        self.head = Head(token if sizes.tied else nn.Parameter(torch.empty(vocab, dim)), ends["head"])

        features = -1 if init.centred else None
        draw_(token, token_std, seed=seed, name="embed.token", centred=features)
        if not sizes.tied:
            draw_(self.head.weight, init.head(dim), seed=seed, name="head.weight")
        for name, parameter in position.named_parameters():
            draw_(parameter, rms, seed=seed, name=f"position.{name}", centred=features)
        initialise_(self.blocks.named_modules(), init, seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.execution(self.blocks, self.embed(tokens))
        return self.head(x) if targets is None else cross_entropy(self.head, x, targets, len(self.head.weight))


def _block(layer: int, choices: Choices, sizes: Sizes, position: NoPosition) -> Block:
    """What stands in one layer: two branches, each with the norms and coefficients of its site."""

    def branch(name: BranchName, function: nn.Module) -> Branch:
        site = Site(name, layer, sizes.depth)
        residual, places = choices.residual(site, sizes.dim), choices.placement.at(site)
        return Branch(function, Stream(sizes.dim, places=places, norm=choices.norm, residual=residual), residual)

    attention = Attention(sizes, choices.norm, position.rotate)
    return Block(branch("attention", attention), branch("ffn", choices.ffn(sizes.dim, sizes.bias, sizes.dropout)))
