"""Hyper-connections: n streams in place of one, H = (x_1 .. x_n)^T, all the embedding at first and summed before the head.

    H <- alpha A_r^T H + B^T r beta F(s N_in(A_m^T H))

A_m (n, 1) mixes what a branch reads, A_r (n, n) the streams among themselves, and B (1, n) deals out what the branch answers.
They are learnt, and may depend on H (`Weights`). In code H is (n, batch, time, dim), so that each x_i lies whole in memory.
Sums over streams are worked element by element: an autocast product would leave the stream in bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.coefficient import times
from model.norm import EPS
from model.residual import Residual
from model.site import Site
from model.stream import Parts, Single, State, Stream, own_skip


class Weights(nn.Module):
    """H (n, batch, time, dim) to (A_m^T H, A_r^T H, B^T), of shapes (batch, time, dim), H's and (n, batch, time, 1)."""

    def connect(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three matrices for each token, or of batch = time = 1: what is read (from, batch, time), mixed (from, to, batch,
        time) and written (to, batch, time)."""
        raise NotImplementedError

    def forward(self, H: Tensor) -> tuple[Any, Any, Any]:
        read, mixed, written = self.connect(H)
        return (
            (read.unsqueeze(-1) * H).sum(0),
            (mixed.unsqueeze(-1) * H.unsqueeze(1)).sum(0),
            written.unsqueeze(-1),
        )


class Static(Weights):
    """A_m = e_(k mod n), A_r = 1, B = (1 .. 1) at the start, k = 0, 1, ... counting the branches."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.A_m = nn.Parameter(torch.eye(n)[k % n])
        self.A_r = nn.Parameter(torch.eye(n))
        self.B = nn.Parameter(torch.ones(n))

    def connect(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.A_m[:, None, None], self.A_r[:, :, None, None], self.B[:, None, None]


class Dynamic(Static):
    """A_m(H) = s_a tanh(N(H) W_m) + A_m, A_r(H) = s_a tanh(N(H) W_r) + A_r, B(H) = s_b tanh(N(H) W_b)^T + B; each W = 0 and
    s_a = s_b = 0.01 at the start."""

    def __init__(self, n: int, k: int, dim: int, norm: nn.Module) -> None:
        super().__init__(n, k)
        self.norm = norm
        self.W_m, self.W_b = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.W_r = nn.Parameter(torch.zeros(n, dim))  # a row for each stream that it leads to
        self.s_a, self.s_b = nn.Parameter(torch.tensor(0.01)), nn.Parameter(torch.tensor(0.01))

    def connect(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read, mixed, written = super().connect(H)
        every = torch.cat([self.W_m[None], self.W_b[None], self.W_r])
        found = torch.tanh(exact(self.norm(H), every)).movedim(-1, 1)
        return self.s_a * found[:, 0] + read, self.s_a * found[:, 2:] + mixed, self.s_b * found[:, 1] + written


class Manifold(Weights):
    """x' = RMSNorm(vec(H)); H~_m = alpha_m (x' phi_m) + b_m for m = pre, post, res;
    H_pre = sigmoid(H~_pre), H_post = 2 sigmoid(H~_post), H_res = Sinkhorn-Knopp(H~_res), whose rows and columns add up to 1.

    In the letters above A_m^T = H_pre, B^T = H_post^T, A_r^T = H_res. RMSNorm has no gain: it is one with phi.
    At the start alpha = 0.01 and phi = 0; b_pre makes the weights of H_pre add up to 1, with 1/(2n) on every stream but
    k mod n, b_post makes H_post = 1, b_res is 0 on the diagonal and -8 beside it, so that H_res is nearly 1.
    """

    def __init__(self, n: int, k: int, dim: int, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        home = torch.eye(n)[k % n]
        share = (1 - home) / (2 * n) + home * (n + 1) / (2 * n)
        self.phi = nn.Parameter(torch.zeros(2 * n + n * n, n * dim))
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.tensor(0.01)) for _ in range(3))
        self.b_pre, self.b_post = nn.Parameter(share.logit()), nn.Parameter(torch.zeros(n))
        self.b_res = nn.Parameter(8 * torch.eye(n) - 8)  # (to, from)

    def connect(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = len(H)
        x = H.movedim(0, -2).flatten(-2)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        found = exact(x, self.phi).movedim(-1, 0)
        pre = self.alpha_pre * found[:n] + self.b_pre[:, None, None]
        post = self.alpha_post * found[n : 2 * n] + self.b_post[:, None, None]
        res = self.alpha_res * found[2 * n :].reshape(n, n, *found.shape[1:]) + self.b_res[:, :, None, None]
        return torch.sigmoid(pre), sinkhorn(res, self.iterations).transpose(0, 1), 2 * torch.sigmoid(post)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """M = exp(logits) with its columns (over dimension 0) and then its rows (over dimension 1) scaled to add up to 1, by turns.
    After the last turn the rows do so exactly, the columns nearly. In logarithms, so that no logit overflows."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.exp()


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the precision of x, in the midst of autocast too."""
    with torch.autocast(x.device.type, enabled=False):
        return x @ weight.T


class Connected(Stream):
    """One branch of H, with its `weights`."""

    def __init__(self, weights: nn.Module, parts: Parts) -> None:
        super().__init__(parts)
        self.weights = weights

    def base(self, H: State) -> State:
        read, mixed, written = self.weights(H)
        return read, self.norm_both(mixed), written

    def read(self, state: State) -> Tensor:
        return super().read(state[0])

    def write(self, state: State, y: Tensor) -> State:
        _, mixed, written = state
        return self.norm_sum(times(self.alpha, mixed) + times(written, self.branch(y)))


class Sum(nn.Module):
    """Of the streams."""

    def forward(self, H: Tensor) -> Tensor:
        return H.sum(0)


class Hyper(Single):
    """n = `streams` hyper-connected streams: Static weights, or with `dynamic` such as depend on H.

    At the start this is the pre-norm network: each stream is that network's, and their sum is n times as large, which the
    head's norm takes out. The paper starts the matrices that write to the stream sqrt(n) times as large besides, and decays the
    weights W: neither is done here. For placements without a norm after the sum.
    Source: Zhu et al. 2024, arXiv 2409.19606, section 2 (eq. 1 to 14), algorithms 2 and 3.
    """

    letters = ("H",)
    learns = True
    terms = ("A_m^T H", "A_r^T H", "B^T")

    def __init__(self, *, streams: int = 4, dynamic: bool = True) -> None:
        if streams < 1:
            raise ValueError(f"stream.streams must be >= 1, found {streams}")
        self.streams, self.dynamic = streams, dynamic
        if dynamic:
            self.terms = ("A_m(H)^T H", "A_r(H)^T H", "B(H)^T")

    def weights(self, k: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        """Of the k-th branch of the network, k = 0, 1, ..."""
        return Dynamic(self.streams, k, dim, norm(dim)) if self.dynamic else Static(self.streams, k)

    def at(self, site: Site, parts: Parts) -> Stream:
        weights = self.weights(2 * (site.layer - 1) + (site.branch == "ffn"), parts.dim, parts.norm)
        return Connected(weights, parts)

    def enter(self, x: Tensor) -> State:
        return x.repeat(self.streams, 1, 1, 1)

    def outlet(self, depth: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return Sum()

    def tensors(self, state: State) -> tuple[Tensor, ...]:
        return tuple(state.unbind(0))

    def symbolic(self, letter: Callable[[str], Any]) -> Single:
        return Written(self, letter)

    def refusal(self, site: Site, places: frozenset[str], residual: Residual) -> str | None:
        if places & {"both", "sum"}:
            return "it has a stream that no norm stands in; use placement=pre"
        return own_skip(residual)


class ManifoldHyper(Hyper):
    """mHC: x <- H_res x + H_post^T F(N(H_pre x)) over `streams` streams, H_res doubly stochastic by `iterations` turns of
    Sinkhorn and Knopp, so that no product of such matrices amplifies (`Manifold`).

    At the start this is the pre-norm network, as hyper-connections are: the paper gives the start of the alphas alone.
    Source: Xie et al. 2025 (DeepSeek-AI), arXiv 2512.24880, section 4.2 (eq. 7 to 9), n = 4, 20 turns, alpha = 0.01.
    """

    letters = ("x",)

    def __init__(self, *, streams: int = 4, iterations: int = 20) -> None:
        if streams < 2:
            raise ValueError(f"stream.streams must be >= 2, found {streams}: one stream is stream=single")
        if iterations < 1:
            raise ValueError(f"stream.iterations must be >= 1, found {iterations}")
        super().__init__(streams=streams)
        self.iterations, self.terms = iterations, ("H_pre(x) x", "H_res(x) x", "H_post(x)^T")

    def weights(self, k: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return Manifold(self.streams, k, dim, self.iterations)


class Written(Hyper):
    """With letters for the products with A_m, A_r and B, and for the sum."""

    def __init__(self, kind: Hyper, letter: Callable[[str], Any]) -> None:
        self.letters, self._terms, self._letter = kind.letters, [letter(term) for term in kind.terms], letter

    def weights(self, k: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return Letters(tuple(self._terms))

    def enter(self, x: Any) -> State:
        return self._letter(f"1 {x}")

    def outlet(self, depth: int, dim: int, norm: Callable[[int], nn.Module]) -> nn.Module:
        return Letters(self._letter(f"1^T {self.letters[0]}"))


class Letters(nn.Module):
    """The same whatever it is called with."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text

    def forward(self, state: Any) -> Any:
        return self.text
