"""The learning rate of a step, as a factor on `optimizer.lr`.

Steps s count from 1 to S. With W warm-up steps the factor is s / (W + 1) for s <= W, so that the first step already
moves and step W + 1 is the first at the full rate; after it, with t = (s - 1 - W) / (S - W) from 0 to nearly 1, each
class has its own shape. Below `min_ratio` it never falls.
"""

from math import cos, pi
from typing import Annotated

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
Warmup = Annotated[float, Field(ge=0)]


class Constant:
    """factor = 1 after the warm-up."""

    def __init__(self, *, warmup: Warmup = 0.1) -> None:
        self.warmup = warmup

    def warmup_steps(self, steps: int) -> int:
        """`warmup` below 1 is a share of the steps, from 1 on a number of steps; ValueError where it leaves none."""
        warm = round(self.warmup * steps) if self.warmup < 1 else round(self.warmup)
        if warm >= steps and warm > 0:
            raise ValueError(f"schedule.warmup={self.warmup:g} is {warm} steps and leaves none of steps={steps}")
        return warm

    def factor(self, step: int, steps: int) -> float:
        warm = self.warmup_steps(steps)
        return step / (warm + 1) if step <= warm else self.after(min(1.0, (step - 1 - warm) / (steps - warm)))

    def after(self, t: float) -> float:
        return 1.0


class Decaying(Constant):
    """A schedule that ends at `min_ratio`."""

    def __init__(self, *, warmup: Warmup = 0.1, min_ratio: Share = 0.1) -> None:
        super().__init__(warmup=warmup)
        self.min_ratio = min_ratio

    def after(self, t: float) -> float:
        return self.min_ratio + (1 - self.min_ratio) * self.shape(t)

    def shape(self, t: float) -> float:
        """1 at t = 0, 0 at t = 1."""
        raise NotImplementedError


class Cosine(Decaying):
    """shape = (1 + cos(pi t)) / 2: Loshchilov, Hutter 2016, arXiv 1608.03983, eq. 5, without restarts."""

    def shape(self, t: float) -> float:
        return (1 + cos(pi * t)) / 2


class Linear(Decaying):
    """shape = 1 - t."""

    def shape(self, t: float) -> float:
        return 1 - t


class WSD(Decaying):
    """Warm-up, stable, decay: 1, then a straight line down over the last `decay` of the steps after the warm-up.

    Source: Hu et al. 2024 (MiniCPM), arXiv 2404.06395, section 4.
    """

    def __init__(self, *, warmup: Warmup = 0.1, min_ratio: Share = 0.1, decay: Share = 0.2) -> None:
        super().__init__(warmup=warmup, min_ratio=min_ratio)
        self.decay = decay

    def shape(self, t: float) -> float:
        return 1.0 if t <= 1 - self.decay else (1 - t) / self.decay
