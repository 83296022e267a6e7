"""What each parameter is: the one list from which gradient norms, weight decay and the start-up print are read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from model.linear import Linear
from model.norm import Norm
from model.transformer import Transformer

Part = Literal["embed", "attention", "ffn", "norm", "residual", "head"]
Kind = Literal["matrix", "bias", "norm", "coefficient", "embedding"]


@dataclass(frozen=True)
class Entry:
    """`part` parts the network: the norms of a block, QK-norms included, count as `norm`, what else its streams learn as
    `residual`, a head norm and an outlet as `head`, an embedding norm as `embed`, a tied matrix once, as `embed`. `layer` counts
    from 1, and is 0 outside the blocks. `matrix` is the short name (q, k, v, o, up, gate, down) of a block's matrix
    and of its bias."""

    name: str
    parameter: nn.Parameter
    part: Part
    kind: Kind
    layer: int = 0
    matrix: str | None = None


def _kind_in_norm(leaf: str) -> Kind:
    """A gain (`weight` where it is zero-centred), a bias, or a learnt eps, which is nothing that decay should touch."""
    kinds: dict[str, Kind] = {"gain": "norm", "weight": "norm", "bias": "bias"}
    return kinds.get(leaf, "coefficient")


def _of_block(prefix: str, block: nn.Module, layer: int) -> Iterator[Entry]:
    modules = dict(block.named_modules())
    for inner, parameter in block.named_parameters():
        path, _, leaf = inner.rpartition(".")
        name, branch, module = f"{prefix}.{inner}", path.split("."), modules[path]
        part: Part = "attention" if branch[0] == "attention" else "ffn"
        if isinstance(module, Norm):
            yield Entry(name, parameter, "norm", _kind_in_norm(leaf), layer)
        elif branch[1] == "stream":
            yield Entry(name, parameter, "residual", "coefficient", layer)
        elif isinstance(module, Linear):
            kinds: dict[str, Kind] = {"weight": "matrix", "bias": "bias"}
            yield Entry(name, parameter, part, kinds.get(leaf, "coefficient"), layer, branch[-1])
        else:
            yield Entry(name, parameter, part, "coefficient", layer)


def inventory(model: Transformer) -> list[Entry]:
    """Every parameter once, in the order of `model.named_parameters()`."""

    norms = {name for name, module in model.named_modules() if isinstance(module, Norm)}

    def at_end(name: str, parameter: nn.Parameter, part: Part, kind: Kind) -> Entry:
        path, _, leaf = name.rpartition(".")
        return Entry(name, parameter, part, _kind_in_norm(leaf) if path in norms else kind)

    entries = [at_end(f"embed.{name}", p, "embed", "embedding") for name, p in model.embed.named_parameters()]
    for layer, block in enumerate(model.blocks, start=1):
        entries += _of_block(f"blocks.{layer - 1}", block, layer)
    entries += [at_end(f"outlet.{name}", p, "head", "coefficient") for name, p in model.outlet.named_parameters()]
    seen = {id(entry.parameter) for entry in entries}
    head = [(name, p) for name, p in model.head.named_parameters() if id(p) not in seen]
    entries += [at_end(f"head.{name}", p, "head", "matrix" if name == "weight" else "coefficient") for name, p in head]
    assert [id(e.parameter) for e in entries] == [id(p) for p in model.parameters()]
    return entries
