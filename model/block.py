"""One block: attention, then feed-forward, each joined to the stream the same way."""

from torch import Tensor, nn

from model.linear import Linear
from model.residual import Residual
from model.stream import Stream


class Branch(nn.Module):
    """x <- N_sum(alpha x + beta N_out(F(s N_in(x)))): one branch F and its stream."""

    def __init__(self, function: nn.Module, stream: Stream, residual: Residual) -> None:
        super().__init__()
        self.function, self.stream = function, stream
        for module in function.modules():
            if isinstance(module, Linear):
                module.gain = residual.gains.get(module.role, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.stream.write(x, self.function(self.stream.read(x)))


class Block(nn.Module):
    """(batch, time, dim) to the same. It does not know its number: what depends on the layer is a coefficient."""

    def __init__(self, attention: Branch, ffn: Branch) -> None:
        super().__init__()
        self.attention, self.ffn = attention, ffn

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.attention(x))
