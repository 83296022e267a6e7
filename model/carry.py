"""What travels from block to block beside the stream: a tensor that the attention of one layer leaves to those of later ones.

A block is then given, and gives, (state of the stream, carried). An attention with `carries` is called `(u, carried)` and
answers (F(u), carried), what it leaves; before the first block nothing is carried, a tensor without elements.
"""

from torch import Tensor

from model.block import Branch
from model.stream import State


class Carrying(Branch):
    """A branch whose function reads what is carried, and leaves it or something else."""

    def forward(self, x: tuple[State, Tensor]) -> tuple[State, Tensor]:
        state, carried = x
        state = self.stream.base(state)
        y, carried = self.function(self.stream.read(state), carried)
        return self.stream.write(state, y), carried


class Passing(Branch):
    """A branch that hands on what is carried."""

    def forward(self, x: tuple[State, Tensor]) -> tuple[State, Tensor]:
        state, carried = x
        return super().forward(state), carried


def with_nothing(state: State, like: Tensor) -> tuple[State, Tensor]:
    return state, like.new_empty(0)
