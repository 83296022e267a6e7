"""Post-norm blocks whose feed-forward adds to what the whole block was given, x, beside or in place of what attention left, h.

    h <- N(alpha x + r beta A(s x))                   attention: the state is then (x, h)
    x <- N(alpha (x + h) + r beta M(s h))             B2T, and SpanNorm without the h in the sum

Between blocks the state is x alone. alpha, s, beta and r are those of the run's residual method and ramp, 1 in the papers.
"""

from dataclasses import replace

from torch import Tensor

from model.coefficient import times
from model.residual import Residual
from model.site import Site
from model.stream import Parts, Single, State, Stream, not_after_the_sum


class ToMiddle(Stream):
    """Attention's: x to (x, h)."""

    def write(self, x: State, y: Tensor) -> State:
        return x, super().write(x, y)


class FromMiddle(Stream):
    """The feed-forward's: (x, h) to x, by way of (what is skipped, h)."""

    def base(self, state: State) -> State:
        x, h = state
        return self.norm_both(self.skip(x, h)), h

    def skip(self, x: Tensor, h: Tensor) -> Tensor:
        raise NotImplementedError

    def read(self, state: State) -> Tensor:
        return times(self.s, self.norm_in(state[1]))

    def write(self, state: State, y: Tensor) -> State:
        return super().write(state[0], y)


class BottomToTop(FromMiddle):
    def skip(self, x: Tensor, h: Tensor) -> Tensor:
        return x + h


class Spanning(FromMiddle):
    def skip(self, x: Tensor, h: Tensor) -> Tensor:
        return x


class B2T(Single):
    """h = LN(x + A(x)), y = LN(x + h + M(h)): a skip from the bottom of the block to its top, past the first norm.

    For placement=post. The authors' code also starts every matrix of the blocks N^(-1/2) times as large: residual=b2t.
    Source: Takase, Kiyono, Kobayashi, Suzuki 2022, arXiv 2206.00330, section 4 (the B2T connection).
    """

    top: type[FromMiddle] = BottomToTop

    def at(self, site: Site, parts: Parts) -> Stream:
        kind = ToMiddle if site.branch == "attention" else self.top
        return kind(parts)

    def after(self, site: Site) -> tuple[str, ...]:
        return ("x", "h") if site.branch == "attention" else self.letters

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        return not_after_the_sum(places)


class Span(B2T):
    """SpanNorm: h = LN(x + A(x)), y = LN(x + M(h)), the skip of the feed-forward spanning the whole block; in the first block
    attention reads LN(x), which the skip does not.

    For placement=post. The paper scales the initial matrices with the depth; its constants could not be verified and are not
    set here: residual=gpt2 or b2t are such scalings. Source: SpanNorm, arXiv 2601.22580, eq. 5 to 8, read by way of
    implementations alone.
    """

    top = Spanning

    def at(self, site: Site, parts: Parts) -> Stream:
        first = site.layer == 1 and site.branch == "attention"
        return super().at(site, replace(parts, places=parts.places | {"in"}) if first else parts)
