"""alpha, beta and the initial std of every matrix, against the papers' constants."""

import pytest
import torch

from model.init import Normal, Xavier, std_of
from model.linear import Linear
from model.residual import deepnorm, gpt2, learned_scalars, standard
from model.site import Site
from tests.conftest import network


def matrices(model) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for name, module in model.blocks.named_modules():
        if isinstance(module, Linear):
            found.setdefault(name.rpartition(".")[2], []).append(module.weight.detach())
    return found


@pytest.mark.case("P02 facebookresearch/xformers PR #284", "P06 huggingface/transformers#47458, karpathy/llama2.c#579")
def test_published_constants(oracle):
    for depth, case in oracle("oracle_deepnorm.json")["by_layers"].items():
        n = int(depth)
        residual = deepnorm(Site("attention", 1, n), 768)
        assert residual.alpha == pytest.approx(case["alpha"], rel=1e-14)
        assert residual.gains == {"carry": pytest.approx(case["beta"]), "write": pytest.approx(case["beta"])}
        for role, inner, outer, key in (
            ("carry", 768, 768, "xavier_normal_std_for_768x768_v_proj"),
            ("carry", 768, 3072, "xavier_normal_std_for_768x3072_fc"),
            ("score", 768, 768, "xavier_normal_std_for_768x768_q_k"),
        ):
            linear = Linear(inner, outer, role=role)
            linear.gain = residual.gains.get(role, 1.0)
            assert std_of(linear, Xavier()) == pytest.approx(case[key], rel=1e-12)
        write = Linear(768, 768, role="write")
        write.gain = gpt2(Site("ffn", 1, n), 768).gains["write"]
        assert std_of(write, Normal()) == pytest.approx(case["gpt2_residual_std"], rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 6, 12, 24, 100, 1000])
def test_alpha_times_beta_is_the_same_at_every_depth(depth: int):
    residual = deepnorm(Site("ffn", depth, depth), 8)
    assert residual.alpha * residual.gains["carry"] == pytest.approx(0.25**0.25, rel=1e-14)


@pytest.mark.case("P02", "P06")
@pytest.mark.parametrize(
    "residual, ffn, expected",
    [
        ("standard", "gelu", dict.fromkeys(["q", "k", "v", "o", "up", "down"], 1.0)),
        ("gpt2", "gelu", {"q": 1, "k": 1, "v": 1, "o": 8**-0.5, "up": 1, "down": 8**-0.5}),
        ("gpt2", "swiglu", {"q": 1, "k": 1, "v": 1, "o": 8**-0.5, "gate": 1, "up": 1, "down": 8**-0.5}),
        ("deepnorm", "gelu", {"q": 1, "k": 1} | dict.fromkeys(["v", "o", "up", "down"], 32**-0.25)),
        ("deepnorm", "swiglu", {"q": 1, "k": 1, "gate": 1} | dict.fromkeys(["v", "o", "up", "down"], 32**-0.25)),
        ("deepnorm residual.scale_gate=true", "swiglu", {"q": 1, "k": 1} | dict.fromkeys(["v", "o", "gate", "up", "down"], 32**-0.25)),
    ],
)  # fmt: skip
def test_the_std_of_every_matrix_by_role(residual: str, ffn: str, expected: dict[str, float]):
    """A sample std of n draws is off by 1/sqrt(2n): 0.8% for the smallest, 96 x 96 (4 layers pooled: 0.4%); 2% is five
    times that."""
    words = [f"residual={residual.split()[0]}", *residual.split()[1:], f"ffn={ffn}", "placement=post"]
    model = network(*words, "model.depth=4", "model.dim=96", "model.heads=4", "model.kv_heads=2")
    found = matrices(model)
    assert found.keys() == expected.keys()
    for name, gain in expected.items():
        out, inner = found[name][0].shape
        out *= 2 if name in "kv" else 1  # two query heads share each key-value head
        pooled = torch.cat([weight.flatten() for weight in found[name]])
        assert pooled.std().item() == pytest.approx(gain * (2 / (out + inner)) ** 0.5, rel=0.02), name


def test_learned_scalars_are_parameters_of_each_branch():
    model = network("residual=learned_scalars", "residual.alpha=2")
    scalars = [(n, p.item()) for n, p in model.named_parameters() if n.endswith((".alpha", ".beta"))]
    assert len(scalars) == 2 * 2 * 2
    assert {value for name, value in scalars if name.endswith("alpha")} == {2.0}
    assert learned_scalars(Site("ffn", 1, 1), 4).gains == {} == standard(Site("ffn", 1, 1), 4).gains


@pytest.mark.parametrize(
    "knobs, alpha, gain",
    [({"beta": 1}, 2.0, 1.0), ({"alpha": 1}, 1.0, 64**-0.25), ({"alpha": 3.0, "beta": 0.5}, 3.0, 0.5)],
)
def test_a_number_takes_the_place_of_deepnorm_s_formula(knobs: dict[str, float], alpha: float, gain: float):
    residual = deepnorm(Site("ffn", 1, 8), 16, **knobs)
    assert residual.alpha == pytest.approx(alpha) and isinstance(residual.alpha, float)
    assert residual.gains == {"carry": pytest.approx(gain), "write": pytest.approx(gain)}


@pytest.mark.parametrize("knob", ["alpha", "beta"])
def test_a_constant_that_is_no_scale_is_refused(knob: str):
    with pytest.raises(ValueError, match=rf"residual\.{knob} must be > 0, or null for the paper's, found 0"):
        network("residual=deepnorm", f"residual.{knob}=0", "placement=post")
