"""A decoder-only Transformer: embedding, blocks, head."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.block import Block, Branch
from model.cap import capped
from model.carry import Carrying, Passing, with_nothing
from model.coefficient import Coefficient, Ramped, scaled, times
from model.execution import Execution, cross_entropy, eagerly
from model.gain import scale_gain_
from model.init import Init, draw_, initialise_
from model.linear import Linear
from model.placement import Placement
from model.position import NoPosition
from model.profile import profile_
from model.ramp import NoRamp
from model.residual import Method, Residual
from model.scaling import NoScaling
from model.setting import Setting
from model.site import Site
from model.sizes import Sizes
from model.stream import Parts, Single, State


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


PROFILED = 4096  # tokens that an initialisation which looks at data sees


class Embedding(nn.Module):
    """x = N_embed(c E[token] + position), c such that token and learned position have RMS 1 in sum (`init=normal`:
    c = 1), or what the residual method has in its place. A tied E is drawn as the head's matrix, N(0, 1/dim), and c makes up for
    it.

    `shrink` multiplies what the gradient gives to E here and nothing else: E[token] <- shrink E[token] + (1 - shrink)
    detach(E[token]), whose value is E[token]. Source: Zeng et al. 2022 (GLM-130B), arXiv 2210.02414, section 3, with 0.1.
    """

    def __init__(
        self,
        token: nn.Parameter,
        scale: float,
        position: NoPosition,
        norm: nn.Module,
        dropout: float,
        shrink: float = 1.0,
    ) -> None:
        super().__init__()
        self.token, self.scale, self.position, self.norm, self.dropout = token, scale, position, norm, dropout
        self.shrink = shrink

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.token)
        if self.shrink != 1.0:
            x = x.detach() + self.shrink * (x - x.detach())  # to the last bit x
        x = self.position.embed(x if self.scale == 1.0 else x * self.scale)
        return F.dropout(self.norm(x), self.dropout, self.training)


class Head(nn.Module):
    """logits = s * (c W N_head(x)): (batch, time, dim) to (batch, time, vocab); c is 1 but for a scaling that has another, and so is
    s, which is learnt, one number a token. With a `cap`, cap tanh(logits / cap) in their place (`model/cap.py`)."""

    def __init__(
        self,
        weight: nn.Parameter,
        norm: nn.Module,
        scale: float = 1.0,
        learnt: Coefficient = 1.0,
        cap: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight, self.norm, self.scale, self.learnt, self.cap = weight, norm, scale, learnt, cap

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        """Of what the matrix reads."""
        return capped(times(self.learnt, F.linear(times(self.scale, x), self.weight)), self.cap)


class Transformer(nn.Module):
    """logits = head(outlet(block_N(... block_1(enter(embedding(tokens)))))): int64 (batch, time <= context) to (batch, time,
    vocab). `enter` and `outlet` are those of the stream; a single tensor passes through them.

    With `targets`, int64 like the tokens, the mean cross-entropy of these logits, in nats, whose gradient has that of `z_loss` too
    (`model/loss.py`). `choices` says what stands at each site, `execution` how the blocks are run. Initialised in full by `seed`.
    """

    def __init__(self, vocab: int, choices: Choices, sizes: Sizes, seed: int, z_loss: float = 0.0) -> None:
        super().__init__()
        dim, norm, init = sizes.dim, choices.norm, choices.init
        self.depth, self.dim, self.context, self.sizes = sizes.depth, dim, sizes.context, sizes
        self.stream, self.ramp, self.scaling = choices.stream, choices.ramp, choices.scaling
        self.execution, self.z_loss = Execution(), z_loss

        position = choices.position(dim, sizes.head_dim, sizes.context)
        first = choices.residual(Site("attention", 1, sizes.depth), dim)
        rms = init.embedding(1 + position.terms) * first.gains.get("embedding", 1.0)
        head_std = init.head(dim) * choices.scaling.head(sizes, init) * first.gains.get("head", 1.0)
        if sizes.tied and head_std == 0:
            raise ValueError(
                "residual starts the head at 0, and model.tied=true the embedding with it: use model.tied=false"
            )
        token_std = head_std if sizes.tied else rms
        token = nn.Parameter(torch.empty(vocab, dim))
        ends = {place: norm(dim) if place in choices.placement.ends else nn.Identity() for place in ("embed", "head")}
        unit = choices.linear(1, 1, "write").unit_ends
        if unit and position.terms:
            raise ValueError(
                "linear=unit with position=learned: each token's row has length 1, and a learnt position would outweigh it; "
                "use position=rotary or none"
            )
        scale = 1.0 if unit else rms / token_std
        self.embed = Embedding(token, scale, position, ends["embed"], sizes.dropout, sizes.embed_grad)
        self.blocks = nn.ModuleList(_block(layer, choices, sizes, position) for layer in range(1, sizes.depth + 1))
        self.carries = isinstance(self.blocks[0].attention, Carrying)
        self.outlet = choices.stream.outlet(sizes.depth, dim, norm)
        output, scaling = token if sizes.tied else nn.Parameter(torch.empty(vocab, dim)), choices.scaling
        learnt = scaling.learnt(vocab, dim)
        self.head = Head(output, ends["head"], scaling.logits(sizes), learnt, sizes.logit_cap)

        self._profiled = first.profiled
        self._ramped = list(_ramped(self.blocks))
        self._ramped_to = 0  # the step that the ramps stand at; 0: not known, as after a checkpoint is loaded
        self._held: list[Any] = [m for m in self.modules() if m is not self and hasattr(m, "after_step")]

        features = -1 if init.centred else None
        draw_(token, token_std, seed=seed, name="embed.token", centred=features)
        if not sizes.tied:
            draw_(self.head.weight, head_std, seed=seed, name="head.weight")
        for name, parameter in position.named_parameters():
            draw_(parameter, rms, seed=seed, name=f"position.{name}", centred=features)
        initialise_(self.blocks.named_modules(), init, seed, choices.scaling.matrix(sizes, init))
        self._unit_rows = [token, output] if unit else []
        self._hold_rows()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.features(tokens)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        return cross_entropy(self.head, x, targets, len(self.head.weight), self.z_loss)

    def settle(self, windows: Tensor) -> None:
        """What of the initialisation looks at data, before the first step: `windows`, int64 (rows, context + 1), are those of
        step 1. Without dropout; nothing where the residual method asks for no profile."""
        if not self._profiled:
            return
        tokens, training = windows[: max(1, PROFILED // self.context), :-1], self.training
        streams = [branch.stream for _, branch in _sites(self.blocks)]
        for _, ramp in self._ramped:
            ramp.value.fill_(1.0)
        with eagerly(self.eval()):
            profile_(self.embed, streams, lambda: self.features(tokens))
        self.train(training)
        self._ramped_to = 0
        self.at_step(1)

    def features(self, tokens: Tensor) -> Tensor:
        """What the head is given, (batch, time, dim)."""
        x: Tensor = self.outlet(self.of_stream(self.execution(self.blocks, self.enter(self.embed(tokens)))))
        return x

    def enter(self, x: Tensor) -> State:
        """What the first block is given: the stream's first state, beside it what travels with it."""
        state = self.stream.enter(x)
        return with_nothing(state, x) if self.carries else state

    def of_stream(self, state: State) -> State:
        """Of what a block gives, the state of the stream."""
        return state[0] if self.carries else state

    def at_step(self, step: int) -> None:
        """Before the forward pass of optimizer step `step`, counted from 1: each ramp is where it stands then. Nothing is done
        for a step's other micro-batches, nor once every ramp is whole."""
        step = min(step, self.ramp.done(self.depth))
        if step == self._ramped_to:
            return
        for site, coefficient in self._ramped:
            coefficient.value.fill_(self.ramp.factor(site, step))
        self._ramped_to = step

    def after_step(self) -> None:
        """After each optimizer step: modules that hold their weights to a rule do so."""
        with torch.no_grad():
            for module in self._held:
                module.after_step()
        self._hold_rows()

    @torch.no_grad()
    def _hold_rows(self) -> None:
        for rows in self._unit_rows:
            rows.copy_(F.normalize(rows, dim=1))


def _sites(blocks: nn.ModuleList) -> Iterator[tuple[Site, Branch]]:
    for layer, block in enumerate(blocks, start=1):
        assert isinstance(block, Block)
        yield Site("attention", layer, len(blocks)), block.attention
        yield Site("ffn", layer, len(blocks)), block.ffn


def _ramped(blocks: nn.ModuleList) -> Iterator[tuple[Site, Ramped]]:
    for site, branch in _sites(blocks):
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
    makers: tuple[Callable[[Setting], nn.Module], ...] = choices.attention, choices.ffn
    functions = [make(setting(choices, sizes, site, position)) for site, make in zip(sites, makers, strict=True)]
    kinds = (Carrying, Passing) if getattr(functions[0], "carries", False) else (Branch, Branch)
    branches = []
    for site, residual, function, kind in zip(sites, residuals, functions, kinds, strict=True):
        parts = Parts(sizes.dim, choices.placement.at(site), choices.norm, residual, choices.ramp.at(site))
        stream = choices.stream.at(site, parts)
        scale_gain_(stream.norm_out, choices.placement.gain(site))
        branches.append(kind(function, stream, residual))
    return Block(*branches)
