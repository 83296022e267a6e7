"""A number that cannot grow beyond a bound."""

from torch import Tensor


def capped(z: Tensor, cap: float) -> Tensor:
    """cap tanh(z / cap), between -cap and cap and about z where z is small; cap = 0: z. Source: Bello et al. 2016, arXiv
    1611.09940, appendix A.1, for logits; Gemma 2 (arXiv 2408.00118, section 2) for attention's (50) and the output's (30)."""
    return cap * (z / cap).tanh() if cap else z
