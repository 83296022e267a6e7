"""A decoder-only Transformer: embedding, blocks, head."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import Block, Branch
from model.coefficient import Ramped, scaled, times
from model.execution import Execution, cross_entropy
from model.init import Init, draw_, initialise_
from model.linear import Linear
from model.placement import Placement
from model.position import NoPosition
from model.ramp import NoRamp
from model.residual import Method, Residual
from model.scaling import NoScaling
from model.setting import Setting
from model.site import Site
from model.sizes import Sizes
from model.stream import Single


@dataclass(frozen=True)
class Choices:
    """One choice per axis: what is put together, apart from the sizes."""

    norm: Callable[[int], nn.Module]
    placement: Placement
    residual: Method
    stream: Single
    ramp: NoRamp
    scaling: NoScaling
    init: Init
    linear: Callable[..., Linear]
    attention: Callable[[Setting], nn.Module]
    ffn: Callable[[Setting], nn.Module]
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
    """logits = c W N_head(x): (batch, time, dim) to (batch, time, vocab); c is 1 but for a scaling that has another."""

    def __init__(self, weight: nn.Parameter, norm: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.norm, self.scale = weight, norm, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        """Of what the matrix reads."""
        return F.linear(times(self.scale, x), self.weight)


class Transformer(nn.Module):
    """logits = head(outlet(block_N(... block_1(enter(embedding(tokens)))))): int64 (batch, time <= context) to (batch, time,
    vocab). `enter` and `outlet` are those of the stream; a single tensor passes through them.

    With `targets`, int64 like the tokens, the mean cross-entropy of these logits, in nats. `choices` says what stands at each
    site, `execution` how the blocks are run. Initialised in full by `seed`.
    """

    def __init__(self, vocab: int, choices: Choices, sizes: Sizes, seed: int) -> None:
        super().__init__()
        dim, norm, init = sizes.dim, choices.norm, choices.init
        self.depth, self.dim, self.context, self.sizes = sizes.depth, dim, sizes.context, sizes
        self.stream, self.ramp, self.scaling = choices.stream, choices.ramp, choices.scaling
        self.execution = Execution()

        position = choices.position(dim, sizes.head_dim, sizes.context)
        rms = init.embedding(1 + position.terms)
        head_std = init.head(dim) * choices.scaling.head(sizes, init)
        token_std = head_std if sizes.tied else rms
        token = nn.Parameter(torch.empty(vocab, dim))
        ends = {place: norm(dim) if place in choices.placement.ends else nn.Identity() for place in ("embed", "head")}
        self.embed = Embedding(token, rms / token_std, position, ends["embed"], sizes.dropout)
        self.blocks = nn.ModuleList(_block(layer, choices, sizes, position) for layer in range(1, sizes.depth + 1))
        self.outlet = choices.stream.outlet(sizes.depth, dim, norm)
        output = token if sizes.tied else nn.Parameter(torch.empty(vocab, dim))
        self.head = Head(output, ends["head"], choices.scaling.logits(sizes))

        self._ramped = list(_ramped(self.blocks))
        self._held: list[Any] = [m for m in self.modules() if m is not self and hasattr(m, "after_step")]

        features = -1 if init.centred else None
        draw_(token, token_std, seed=seed, name="embed.token", centred=features)
        if not sizes.tied:
            draw_(self.head.weight, head_std, seed=seed, name="head.weight")
        for name, parameter in position.named_parameters():
            draw_(parameter, rms, seed=seed, name=f"position.{name}", centred=features)
        initialise_(self.blocks.named_modules(), init, seed, choices.scaling.matrix(sizes, init))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.outlet(self.execution(self.blocks, self.stream.enter(self.embed(tokens))))
        return self.head(x) if targets is None else cross_entropy(self.head, x, targets, len(self.head.weight))

    def at_step(self, step: int) -> None:
        """Before the forward pass of optimizer step `step`, counted from 1: each ramp is where it stands then."""
        for site, coefficient in self._ramped:
            coefficient.value.fill_(self.ramp.factor(site, step))

    def after_step(self) -> None:
        """After each optimizer step: modules that hold their weights to a rule do so."""
        with torch.no_grad():
            for module in self._held:
                module.after_step()


def _ramped(blocks: nn.ModuleList) -> Iterator[tuple[Site, Ramped]]:
    for layer, block in enumerate(blocks, start=1):
        assert isinstance(block, Block)
        for site, branch in (
            (Site("attention", layer, len(blocks)), block.attention),
            (Site("ffn", layer, len(blocks)), block.ffn),
        ):
            if isinstance(branch.stream.ramp, Ramped):
                yield site, branch.stream.ramp


def setting(choices: Choices, sizes: Sizes, site: Site, position: NoPosition) -> Setting:
    """What the function of the branch at this site is built with."""
    places, scale = choices.placement.at(site), choices.scaling.scores(sizes)
    return Setting(sizes, site, places, choices.norm, choices.linear, position.rotate, scale)


def residual_at(choices: Choices, dim: int, site: Site) -> Residual:
    """The residual method's coefficients, what the branch adds times the scaling's factor."""
    residual = choices.residual(site, dim)
    return replace(residual, beta=scaled(choices.scaling.branch(site), residual.beta))


def _block(layer: int, choices: Choices, sizes: Sizes, position: NoPosition) -> Block:
    """What stands in one layer: two branches, each with the norms and coefficients of its site."""
    sites = Site("attention", layer, sizes.depth), Site("ffn", layer, sizes.depth)
    residuals = [residual_at(choices, sizes.dim, site) for site in sites]
    if residuals[0].shared:
        residuals[1] = replace(residuals[0], gains=residuals[1].gains)
    branches = []
    for site, residual, make in zip(sites, residuals, (choices.attention, choices.ffn), strict=True):
        function, places = make(setting(choices, sizes, site, position)), choices.placement.at(site)
        ramp, norm = choices.ramp.at(site), choices.norm
        stream = choices.stream.at(site, sizes.dim, places=places, norm=norm, residual=residual, ramp=ramp)
        branches.append(Branch(function, stream, residual))
    return Block(*branches)
