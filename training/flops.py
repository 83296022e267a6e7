"""How much arithmetic a token takes in training, and what share of a device's peak a run makes use of (MFU)."""

import re

from model.linear import Linear
from model.transformer import Transformer

# Dense bf16 matrix products with float32 sums, operations a second, by the name that CUDA gives the whole device: a slice of one
# (MIG), a laptop's or another variant has a peak of its own and matches nothing. Vendors print the rate with 2:4 sparsity, twice
# the dense one, first. Sources: NVIDIA's data sheets of A100, H100, H200, B200 (HGX), L4, L40, L40S; for GeForce the white papers
# of GA102 and AD102, whose rate with float32 sums is half of that with float16 sums.
PEAKS = {
    r"NVIDIA A100(-SXM4-\d+GB|-PCIE-\d+GB| 80GB PCIe)": 312e12,
    r"NVIDIA H100 80GB HBM3": 989.4e12,
    r"NVIDIA H100 PCIe": 756e12,
    r"NVIDIA H100 NVL": 835.5e12,
    r"NVIDIA H200": 989.4e12,
    r"NVIDIA B200": 2250e12,
    r"NVIDIA L4": 121e12,
    r"NVIDIA L40": 181e12,
    r"NVIDIA L40S": 362e12,
    r"NVIDIA GeForce RTX 3090": 71e12,
    r"NVIDIA GeForce RTX 4090": 165.2e12,
}


def flops_per_token(model: Transformer) -> int:
    """6 N + 12 L H Q T floating-point operations for one token's forward and backward pass: N entries of the matrices that a
    token is multiplied with (a multiplication and an addition forward, twice as many back), L layers, H heads of width Q
    (H Q = dim), T the context, for the products q k^T and with v.

    N counts the head, tied or not, and neither embeddings, which are looked up, nor gains and biases. A causal mask leaves half
    of the attention's products unneeded; as in the paper they count all the same, and the recomputation of activations does not.
    Source: Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B.
    """
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return 6 * (matrices + model.head.weight.numel()) + 12 * model.depth * model.dim * model.context


def peak_flops(device: str, precision: str) -> float | None:
    """Operations a second of one device by its name (`torch.cuda.get_device_name`); None where that is not known, or where the
    `precision` is not Lightning's bf16-mixed."""
    if precision != "bf16-mixed":
        return None
    return next((peak for name, peak in PEAKS.items() if re.fullmatch(name, device)), None)


def utilisation(tokens_per_second: float | None, per_token: int, peak: float | None, devices: int) -> float | None:
    """MFU = tokens per second * operations per token / (devices * peak), between 0 and 1; None where a part is not known, or where
    it exceeds 1: the peak is then not this device's."""
    if not tokens_per_second or peak is None:
        return None
    share = tokens_per_second * per_token / (devices * peak)
    return share if share <= 1 else None
