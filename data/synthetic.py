"""Text whose true entropy is known, so that a loss can be read against the floor beneath it."""

import bisect
import math
from collections.abc import Iterator

import numpy as np

from data.corpus import Corpus


class Synthetic(Corpus):
    """A first-order Markov chain over printable characters, whose true entropy is known.

        H = -sum_i pi_i sum_j P_ij ln P_ij,   pi = pi P,   P_i = 0.99 Dirichlet(concentration) + 0.01 / symbols

    H, in nats per character (= byte token), is `floor`. The uniform hundredth keeps every symbol within reach and the
    chain's memory short, so that a text of moderate length has the chain's entropy.

    Args:
        symbols: how many characters, 2 to 94.
        concentration: small = predictable; None = uniform, independent characters (H = ln symbols).
        tokens: characters of the training document; the validation document continues it for val_fraction as many.
        seed: the chain's and the text's own, apart from the run's.
    """

    def __init__(
        self,
        symbols: int = 64,
        concentration: float | None = 0.1,
        tokens: int = 2_000_000,
        seed: int = 0,
        val_fraction: float = 0.05,
        val_windows: int = 64,
    ):
        super().__init__("synthetic", val_fraction, val_windows)
        if not 2 <= symbols <= 94:
            raise ValueError(f"data.symbols={symbols}: needs 2 to 94, the printable ASCII characters")
        if concentration is not None and not 0 < concentration < math.inf:
            raise ValueError(
                f"data.concentration={concentration}: needs a number over 0, or null for uniform characters"
            )
        if tokens < 2 or seed < 0:
            raise ValueError(f"data.tokens={tokens} data.seed={seed}: needs at least 2 tokens and a seed of at least 0")
        self.tokens, self._rng = tokens, np.random.default_rng(seed)
        uniform = np.full((symbols, symbols), 1 / symbols)
        chain = uniform if concentration is None else self._rng.dirichlet([concentration] * symbols, size=symbols)
        self.transition = 0.99 * chain + 0.01 * uniform
        # pi (P - I) = 0 and sum(pi) = 1 together
        system = np.vstack([self.transition.T - np.eye(symbols), np.ones(symbols)])
        stationary = np.linalg.lstsq(system, np.append(np.zeros(symbols), 1.0), rcond=None)[0]
        self.floor = float(-stationary @ (self.transition * np.log(self.transition)).sum(1))
        self._text: str | None = None

    def read(self) -> Iterator[tuple[str, str]]:
        yield "training", self._chain()[: self.tokens]

    def validation(self) -> Iterator[str]:
        return iter([self._chain()[self.tokens :]])

    def _chain(self) -> str:
        if self._text is None:
            rows = [row.tolist() for row in self.transition.cumsum(1)]
            last, state, states = len(rows) - 1, 0, bytearray()
            for u in self._rng.random(self.tokens + max(1, round(self.val_fraction * self.tokens))).tolist():
                state = min(bisect.bisect_right(rows[state], u), last)  # a row's sum may fall short of 1 by rounding
                states.append(33 + state)
            self._text = states.decode()
        return self._text
