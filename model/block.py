"""One block: attention, then feed-forward, each joined to the stream the same way."""

from torch import nn

from model.linear import Linear
from model.residual import Residual
from model.stream import State, Stream


class Branch(nn.Module):
    """x <- N_sum(alpha x + beta N_out(F(s N_in(x)))): one branch F and its stream, whose state may be more than one x."""

    def __init__(self, function: nn.Module, stream: Stream, residual: Residual) -> None:
        super().__init__()
        self.function, self.stream = function, stream
        for module in function.modules():
            if isinstance(module, Linear):
                module.gain = residual.gains.get(module.role, 1.0)

    def forward(self, x: State) -> State:
        x = self.stream.base(x)
        return self.stream.write(x, self.function(self.stream.read(x)))


class Block(nn.Module):
    """From one state of the stream to the next. It does not know its number: what depends on the layer is a coefficient."""

    def __init__(self, attention: Branch, ffn: Branch) -> None:
        super().__init__()
        self.attention, self.ffn = attention, ffn

    def forward(self, x: State) -> State:
        return self.ffn(self.attention(x))
