"""A matrix that knows its role."""

from typing import Literal

from torch import nn

Role = Literal["score", "carry", "gate", "write"]


class Linear(nn.Linear):
    """y = W x (+ b), W of shape (fan_out, fan_in), with what its initialisation needs to know.

    `role`: score (q, k: they set where attention looks), carry (v, up: what flows through), gate, write (o, down: back
    to the stream). `gain`: the residual method's factor on the initial std, set by the block. `repeats`: how many
    query heads share each key-value head; the matrix that acts is then the repeated one, with fan_out * repeats rows.
    The network initialises it (`model/init.py`); on its own it holds whatever memory held.

    Of another kind (`conf/linear/`): `keeps_std`, whether what acts has the std that init and residual method give;
    `needs_whole`, whether it reads its matrix but by y = W x, so that no device can do with a part of it; `unit_ends`, whether
    the rows of embedding and head are held to length 1 with it. One that has `after_step` is called by it after each step
    of the optimizer.
    """

    keeps_std = True
    needs_whole = False
    unit_ends = False

    def __init__(self, fan_in: int, fan_out: int, role: Role, bias: bool = False, repeats: int = 1) -> None:
        super().__init__(fan_in, fan_out, bias=bias)
        self.role: Role = role
        self.gain = 1.0
        self.repeats = repeats

    def reset_parameters(self) -> None:
        """Nothing: every draw is made once, by name and seed, when the network is whole."""

    def drawn(self) -> None:
        """Called once the matrix holds its initial numbers: what depends on them is set here."""

    def acting_std(self, std: float) -> float:
        """The std at the start of the matrix that acts, where that of the draw is `std`."""
        return std
