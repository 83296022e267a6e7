"""Operations of a token, a device's peak, and the share of it, by hand."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.loss import next_token_loss
from tests.conftest import SMALL, network
from training import device as machine
from training.flops import PEAKS, flops_per_token, peak_flops, utilisation


def test_six_for_each_entry_of_a_matrix_and_twelve_for_attention():
    """Width 16, 2 layers, context 8, 11 tokens: q, k, v, o of 16 x 16, up and down of 64 x 16, the head of 11 x 16."""
    by_hand = 6 * (2 * (4 * 16 * 16 + 2 * 64 * 16) + 11 * 16) + 12 * 2 * 16 * 8
    assert flops_per_token(network()) == by_hand
    assert flops_per_token(network("model.tied=true")) == by_hand  # looked up at one end, multiplied with at the other
    for other in (
        "position=learned",
        "norm=layernorm",
        "model.bias=true",
        "placement=sandwich",
        "residual=learned_scalars",
    ):
        assert flops_per_token(network(other)) == by_hand, other
    shared = 6 * 2 * 2 * 16 * 8  # one key-value head in place of two: k and v of 8 x 16; attention itself is the same
    assert flops_per_token(network("model.kv_heads=1")) == by_hand - shared


def test_it_is_what_torch_counts():
    """Of the matrix products of a forward and a backward pass; the CPU's attention is not among them: counted by hand, without
    which the formula leaves 6 N."""
    model = network("ffn=swiglu", "model.depth=3")
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model, torch.randint(0, 11, (4, 9))).backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    assert products == 4 * 8 * (flops_per_token(model) - 12 * 3 * 16 * 8)


@pytest.mark.case("T06 karpathy/nanoGPT PR #464")
def test_a_peak_is_the_devices_own_or_not_known():
    known = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA L40": 181e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
    }
    for name, peak in known.items():
        assert peak_flops(name, "bf16-mixed") == peak
        assert peak_flops(name, "32-true") is None
    strangers = ["cpu", "mps", "", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "Tesla T4"]
    strangers += ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H200 NVL"]
    assert [name for name in strangers if peak_flops(name, "bf16-mixed")] == []
    assert 1e13 < min(PEAKS.values()) < max(PEAKS.values()) < 1e16


@pytest.mark.case("T06")
def test_the_share_of_the_peak_by_hand():
    """1000 tokens of 5e9 operations a second are 5e12: half of 1e13, an eighth of four such devices."""
    assert utilisation(1000.0, 5 * 10**9, 1e13, 1) == pytest.approx(0.5)
    assert utilisation(1000.0, 5 * 10**9, 1e13, 4) == pytest.approx(0.125)
    assert utilisation(2000.0, 5 * 10**9, 1e13, 1) == 1
    assert utilisation(2001.0, 5 * 10**9, 1e13, 1) is None  # more than can be: another device's peak
    assert utilisation(None, 5 * 10**9, 1e13, 1) is None
    assert utilisation(1000.0, 5 * 10**9, None, 1) is None


@pytest.mark.case("T06")
def test_a_run_says_its_share_where_the_peak_is_known(run, monkeypatch, capsys):
    _, summary = run("steps=12", "picture=false", "precision=bf16-mixed")
    written = json.loads((summary["directory"] / "summary.json").read_text())
    vocab = json.loads((summary["directory"] / "environment.json").read_text())["corpus"]["vocab"]
    assert written["flops_per_token"] == flops_per_token(network(*SMALL, vocab=vocab))
    assert not {"mfu", "peak_flops"} & written.keys() and "MFU" not in capsys.readouterr().out

    monkeypatch.setattr(machine, "name", lambda device: "NVIDIA L4")
    _, summary = run("steps=12", "picture=false", "precision=bf16-mixed")
    assert summary["peak_flops"] == 121e12
    used = summary["tokens_per_second"] * summary["flops_per_token"] / 121e12
    assert 0 < summary["mfu"] == pytest.approx(used, rel=1e-6)
    assert "tokens/s, 0.0 % of the peak (MFU)" in capsys.readouterr().out
    _, summary = run("steps=12", "picture=false", "precision=fp32")
    assert "mfu" not in summary
