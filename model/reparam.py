"""Matrices that are held to a norm: by what multiplies them, or by what is done to them after each step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.linear import Linear, Role


class SigmaReparam(Linear):
    """y = W^ x (+ b), W^ = (gamma / sigma) W, sigma = u^T W v the spectral norm of W; gamma learnt, u and v constants of the
    gradient.

    u (fan_out) and v (fan_in) start as singular vectors, and after each optimizer step follow W by one iteration,
    u <- W v / ||W v||, v <- W^T u / ||W^T u||: what the released code does in the next forward pass. A forward pass changes
    nothing, so that blocks that are computed again give the same numbers. `gamma` starts at 1, as in the authors' JAX code
    for speech, so that nothing is left of an initial std; null: at the spectral norm of the initial matrix, so that W^ starts as W,
    as in their PyTorch code for vision.
    The paper has it in every linear layer; here embedding and head have none.
    Source: Zhai et al. 2023, arXiv 2303.06296, section 3.2; gamma's start and the iteration: ml-sigma-reparam (released code;
    which of the two starts the paper's text has could not be read).
    """

    needs_whole = True
    u: Tensor
    v: Tensor

    def __init__(
        self, fan_in: int, fan_out: int, role: Role, bias: bool = False, repeats: int = 1, *, gamma: float | None = 1.0
    ) -> None:
        super().__init__(fan_in, fan_out, role, bias, repeats)
        if gamma is not None and gamma <= 0:
            raise ValueError(f"linear.gamma must be > 0, or null for the initial spectral norm, found {gamma}")
        self.start, self.keeps_std = gamma, gamma is None
        self.gamma = nn.Parameter(torch.tensor(1.0 if gamma is None else float(gamma)))
        self.register_buffer("u", torch.empty(fan_out))
        self.register_buffer("v", torch.empty(fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.gamma / self.sigma() * self.weight, self.bias)

    def sigma(self) -> Tensor:
        """u^T W v, a scalar, in the precision of W under autocast too."""
        with torch.autocast(self.weight.device.type, enabled=False):
            return torch.dot(self.u, self.weight @ self.v)

    def acting_std(self, std: float) -> float:
        return std * (self.gamma / self.sigma()).item()

    @torch.no_grad()
    def drawn(self) -> None:
        """The singular vectors from the smaller of the two Gram matrices, which is many times as fast as an SVD of W."""
        wide = self.weight.double()
        gram = wide @ wide.mT if len(wide) <= wide.shape[1] else wide.mT @ wide
        top = torch.linalg.eigh(gram).eigenvectors[:, -1]
        self.v.copy_(F.normalize(wide.mT @ top, dim=0) if len(wide) <= wide.shape[1] else top)
        self.after_step()
        if self.start is None:
            self.gamma.copy_(self.sigma())
        if not self.weight.any():
            raise ValueError("linear=sigma_reparam: a matrix that starts at 0 has no spectral norm to divide by")

    @torch.no_grad()
    def after_step(self) -> None:
        self.u.copy_(F.normalize(self.weight @ self.v, dim=0))
        self.v.copy_(F.normalize(self.weight.mT @ self.u, dim=0))


class Unit(Linear):
    """y = W x (+ b), each vector of W that lies along the stream of length 1, at the start and after each optimizer step: the
    columns of a matrix that writes to the stream (o, down), the rows of every other. With `ends` the rows of embedding and
    head too, and what enters the stream is such a row as it is.

    Whatever std was drawn, a weight has RMS 1/sqrt(dim). Decay would be undone by the next step: optimizer.weight_decay=0.
    Source: Loshchilov et al. 2024 (nGPT), arXiv 2410.01131, sections 2.1, 2.3 and 2.4.
    """

    keeps_std = False
    needs_whole = True

    def __init__(
        self, fan_in: int, fan_out: int, role: Role, bias: bool = False, repeats: int = 1, *, ends: bool = True
    ) -> None:
        super().__init__(fan_in, fan_out, role, bias, repeats)
        self.unit_ends = ends
        self.along = 0 if role == "write" else 1

    def drawn(self) -> None:
        if not self.weight.any():
            raise ValueError("linear=unit: a matrix that starts at 0 has no direction")
        self.after_step()

    @torch.no_grad()
    def after_step(self) -> None:
        self.weight.copy_(F.normalize(self.weight, dim=self.along))

    def acting_std(self, std: float) -> float:
        return float(self.weight.shape[self.along] ** -0.5)
