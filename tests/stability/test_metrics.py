"""Each metric on input small enough to work by hand."""

from math import log, sqrt

import pytest
import torch

from stability.metrics import attention_entropy, attention_logits, effective_gain, mean_square, token_cosine


def test_mean_square_of_what_float32_cannot_square():
    assert mean_square(torch.tensor([3.0, 4.0])).item() == 12.5
    assert mean_square(torch.full((2, 2), 1e30)).item() == pytest.approx(1e60, rel=1e-6)  # float32's 1e30 is near 1e30


def test_token_cosine_by_hand():
    """Angles of 60, 60 and 120 degrees at three lengths: (1/2 + 1/2 - 1/2) / 3; a second sequence of equal tokens: 1."""
    half, height = 0.5, sqrt(3) / 2
    one = torch.tensor([[1.0, 0.0], [2 * half, 2 * height], [-5 * half, 5 * height]], dtype=torch.float64)
    equal = torch.tensor([[1.0, 1.0]] * 3, dtype=torch.float64)
    assert token_cosine(one[None]).item() == pytest.approx(1 / 6, abs=1e-15)
    assert token_cosine(torch.stack([one, equal])).item() == pytest.approx((1 / 6 + 1) / 2, abs=1e-15)
    pairs = torch.nn.functional.cosine_similarity(one[:, None], one[None], dim=-1)
    assert token_cosine(one[None]).item() == pytest.approx(((pairs.sum() - pairs.trace()) / 6).item(), abs=1e-15)


def test_token_cosine_of_zeros_and_of_one_token():
    assert token_cosine(torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])).item() == 0
    assert token_cosine(torch.ones(2, 1, 3)).isnan()


def test_attention_logits_share_keys_and_hide_the_future():
    q = torch.tensor([[[[1.0], [2.0]], [[3.0], [4.0]]]])  # 2 heads of width 1, 2 tokens
    k = torch.tensor([[[[5.0], [7.0]]]])  # one head for both
    expected = [[[5.0, -torch.inf], [10.0, 14.0]], [[15.0, -torch.inf], [20.0, 28.0]]]
    assert attention_logits(q, k).tolist() == [expected]
    assert attention_logits(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)).item() == 4 / sqrt(4)


def test_attention_entropy_of_even_and_of_sharp_attention():
    hidden = -torch.inf
    even = torch.tensor([[0.0, hidden], [0.0, 0.0]], dtype=torch.float64)
    assert attention_entropy(even).item() == pytest.approx((0 + log(2)) / 2, abs=1e-15)
    uneven = torch.tensor([[0.0, hidden], [log(3), 0.0]], dtype=torch.float64)
    assert attention_entropy(uneven).item() == pytest.approx((3 / 4 * log(4 / 3) + log(4) / 4) / 2, abs=1e-15)
    assert attention_entropy(torch.tensor([[0.0, hidden], [1000.0, 0.0]])).item() == 0


def test_effective_gain():
    w = torch.tensor([0.0, -0.25])
    assert effective_gain("blocks.0.attention.stream.norm_in.gain", w).tolist() == [0.0, -0.25]
    assert effective_gain("blocks.0.attention.stream.norm_in.weight", w).tolist() == [1.0, 0.75]
