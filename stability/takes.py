"""What a claim may take of the numbers along an axis: functions of the values x of a param, in order, and of the numbers y."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np

from stability.observables import Unread, ratio
from stability.records import Array

# The two-sided 95% quantile of Student's t at 1, 2, ..., 30 degrees of freedom, and of the normal distribution, which stands
# for more. NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975.
T95: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T95 += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
T95 += (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
NORMAL95 = 1.960


def exponent(x: Sequence[Any], y: Array) -> float:
    """p of y ~ x^p: the least-squares slope of log y on log x."""
    at = np.asarray(x, dtype=np.float64)
    if min(at.min(), y.min()) <= 0:
        raise Unread("an exponent needs numbers above 0")
    return float(np.polyfit(np.log(at), np.log(y), 1)[0])


def mean_above_least(x: Sequence[Any], y: Array) -> float:
    """mean(y) - min(y): of `loss_or_start` along the learning rates of a grid, the learning rate sensitivity.

    Source: Wortsman et al. 2023, arXiv 2309.14322: E_lr[min(loss(A(lr)), loss at init) - best loss].
    """
    return float(y.mean() - y.min())


def largest(x: Sequence[Any], y: Array) -> float:
    """The largest x with y = 1, be there smaller ones without; 0 where there is none. Of `stable` along learning rates,
    the largest stable one."""
    return float(max((at for at, value in zip(x, y, strict=True) if value == 1), default=0.0))


def best(x: Sequence[Any], y: Array) -> float:
    """The x of the least y, the smallest of them where several are."""
    return float(x[int(y.argmin())])


def significance(x: Sequence[Any], y: Array) -> float:
    """t / t*: t = |mean(y)| / (std(y) / sqrt(n)), std with n - 1, and t* the two-sided 95% quantile of Student's t at n - 1
    degrees of freedom. Along `seed`, of paired differences: a max of 1 expects no difference that these seeds can tell,
    a min of 1 one that they can, whatever their number.

    Few seeds tell little: beside a max of 1 let a second claim bound the `mean` itself. 0 where every y is 0. Unread where
    every y is the same other number: what the seed does not reach is one sample, not n, and has no t.
    """
    if y.max() == y.min():
        if y[0] == 0:
            return 0.0
        raise Unread("is the same at every value: no spread to judge it by")
    n = len(y)
    t = abs(float(y.mean())) / (float(y.std(ddof=1)) / sqrt(n))
    return t / (T95[n - 2] if n - 2 < len(T95) else NORMAL95)


def mean(x: Sequence[Any], y: Array) -> float:
    """mean(y). Along `seed` that is what `seeds: mean` gives, but of two seeds at least."""
    return float(y.mean())


def spread(x: Sequence[Any], y: Array) -> float:
    """max(y) - min(y)."""
    return float(y.max() - y.min())


def _largest_over_least(x: Sequence[Any], y: Array) -> float:
    return ratio(float(y.max()), float(y.min()))


def _last_over_first(x: Sequence[Any], y: Array) -> float:
    return ratio(float(y[-1]), float(y[0]))


TAKES: dict[str, Callable[[Sequence[Any], Array], float]] = {
    "max/min": _largest_over_least,
    "last/first": _last_over_first,
    **{f.__name__: f for f in (exponent, mean, mean_above_least, largest, best, significance, spread)},
}
OF_NUMBERS = {"exponent", "largest", "best"}  # which read x itself, not its order alone
