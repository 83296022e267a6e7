"""Equal logits with other people's code: the same weights in models of the same shape of `transformers` and `x-transformers`, float32.

Both compute in float32 with about 1e-6 of noise; 1e-5 is what is asked, on logits of order 1. Skips where a package is
absent; both are in the `test` extras.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

from tests.conftest import network, plain

VOCAB, DIM, HEADS, DEPTH, TIME, HIDDEN = 23, 32, 4, 3, 12, 64
SIZES = {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
SIZES |= {"intermediate_size": HIDDEN, "max_position_embeddings": TIME, "attention_dropout": 0.0, "use_cache": False}
OURS = [f"model.dim={DIM}", f"model.heads={HEADS}", f"model.depth={DEPTH}", f"model.context={TIME}", "ffn.ratio=2"]
MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
MATRICES |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def spread(model: Any) -> Any:
    """Every parameter drawn anew, so that no gain is 1 and no bias 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name or ".ln_" in name or name.endswith(".g")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if gain and not name.endswith("bias") else 0.0))
    return model.eval()


def compare(model: Any, theirs: dict[str, Tensor], ours: dict[str, str], there: Any) -> None:
    """Load `theirs` into `model` by `ours` (its parameter -> their name), and compare logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(theirs[ours[name]])
        tokens = torch.randint(VOCAB, (2, TIME), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model.eval()(tokens), there(tokens).logits, rtol=1e-5, atol=1e-5)


def of_llama_kind(norms: dict[str, str], qk: str | None = None) -> Callable[[Any], dict[str, str]]:
    """Names of Llama's descendants: `norms` is (branch.stream.place -> their name in a layer), `qk` ours for theirs."""

    def names(model: Any) -> dict[str, str]:
        found = {"embed.token": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
        for name, _ in model.named_parameters():
            part = name.split(".")
            if name.startswith("head.norm"):
                found[name] = "model.norm.weight"
            elif part[0] == "blocks":
                layer, inner = f"model.layers.{part[1]}", ".".join(part[2:-1])
                if part[-2] in MATRICES:
                    found[name] = f"{layer}.{MATRICES[part[-2]]}.{part[-1]}"
                elif qk and part[-2].startswith(qk):
                    found[name] = f"{layer}.self_attn.{part[-2][-1]}_norm.weight"
                else:
                    found[name] = f"{layer}.{norms[inner]}.weight"
        return found

    return names


PRE = {"attention.stream.norm_in": "input_layernorm", "ffn.stream.norm_in": "post_attention_layernorm"}
OUT = {"attention.stream.norm_out": "post_attention_layernorm", "ffn.stream.norm_out": "post_feedforward_layernorm"}
GEMMA = OUT | {"attention.stream.norm_in": "input_layernorm", "ffn.stream.norm_in": "pre_feedforward_layernorm"}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
BOTH = {"full_attention": ROPE["rope_parameters"], "sliding_attention": ROPE["rope_parameters"]}
EPS = {"rms_norm_eps": 1e-6}
GROUPED = "model.kv_heads=2"


@pytest.mark.parametrize(
    "kind, more, words, names",
    [
        ("Llama", {"num_key_value_heads": 2, **ROPE}, ["recipe=llama", GROUPED], of_llama_kind(PRE)),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8, **ROPE}, ["recipe=llama", GROUPED, "model.qk_norm=head"], of_llama_kind(PRE, "head_norm")),
        ("Olmo2", {"num_key_value_heads": 2, **BASE}, ["recipe=olmo2", GROUPED], of_llama_kind(OUT, "full_norm")),
        (
            "Gemma3",
            {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * DEPTH, "rope_parameters": BOTH},
            ["recipe=gemma3", GROUPED],
            of_llama_kind(GEMMA, "head_norm"),
        ),
    ],
)  # fmt: skip
def test_llama_and_its_kind(kind: str, more: dict[str, Any], words: list[str], names):
    transformers = pytest.importorskip("transformers")
    config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    settings = getattr(transformers, config)(**SIZES, **EPS, **more, pad_token_id=0)
    there = spread(getattr(transformers, f"{kind}ForCausalLM")(settings))
    model = network(*OURS, *words, vocab=VOCAB)
    compare(model, there.state_dict(), names(model), there)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": DEPTH, "n_head": HEADS, "n_positions": TIME}
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    there = spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropped, layer_norm_epsilon=1e-5)))
    model = network(*OURS, "recipe=gpt2", "ffn.ratio=4", vocab=VOCAB)
    theirs = {}
    for name, tensor in there.state_dict().items():
        # theirs is x W, and q, k and v are one matrix
        part = tensor.T if tensor.ndim == 2 and ".h." in name else tensor
        pieces = zip("qkv", part.chunk(3), strict=True) if "c_attn" in name else [("", part)]
        theirs |= {name.replace("c_attn", f"c_attn{letter}"): piece for letter, piece in pieces}
    inner = {"q": "attn.c_attnq", "k": "attn.c_attnk", "v": "attn.c_attnv", "o": "attn.c_proj"}
    inner |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    ours = {"embed.token": "transformer.wte.weight", "embed.position.weight": "transformer.wpe.weight"}
    for name, _ in model.named_parameters():
        part, leaf = name.split("."), {"gain": "weight"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
        if part[0] == "head":
            ours[name] = f"transformer.ln_f.{leaf}"
        elif part[0] == "blocks":
            norm = {"attention": "ln_1", "ffn": "ln_2"}[part[2]]
            ours[name] = f"transformer.h.{part[1]}.{norm if part[3] == 'stream' else inner[part[4]]}.{leaf}"
    compare(model, theirs, ours, there)


# place of ours -> the number of theirs in a layer's list of norms; a layer is one branch there
PLACES = {"norm_in": 0, "norm_out": 1, "norm_sum": 2}
INNER = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out", "up": "ff.0.0", "down": "ff.2"}
ENDS = {"embed.token": "token_emb.emb.weight", "head.weight": "to_logits.weight"}
ENDS["head.norm.gain"] = "attn_layers.final_norm.g"
ALPHA = (2 * DEPTH) ** 0.25


@pytest.mark.parametrize(
    "theirs, words",
    [
        ({"use_rmsnorm": True}, ["placement=pre"]),
        ({"use_rmsnorm": True, "pre_norm": False}, ["placement=post"]),
        ({"use_rmsnorm": True, "sandwich_norm": True}, ["placement=sandwich"]),
        ({"use_rmsnorm": True, "pre_norm": False, "scale_residual_constant": ALPHA}, ["placement=post", "residual=deepnorm"]),
        ({"use_rmsnorm": True, "pre_and_post_norm": True, "scale_residual_constant": 2 * DEPTH}, ["placement=keel", "residual=keel"]),
    ],
)  # fmt: skip
def test_placements_of_x_transformers(theirs: dict[str, Any], words: list[str]):
    package = pytest.importorskip("x_transformers")
    shape = {"dim": DIM, "depth": DEPTH, "heads": HEADS, "attn_dim_head": DIM // HEADS, "ff_mult": 2}
    layers = package.Decoder(**shape, **theirs, ff_no_bias=True, norm_add_unit_offset=False, verbose=False)
    wrapped = package.TransformerWrapper(num_tokens=VOCAB, max_seq_len=TIME, use_abs_pos_emb=False, attn_layers=layers)
    there = spread(wrapped)
    model = network(*OURS, *words, "position=none", "norm.eps=0", vocab=VOCAB)
    ours = dict(ENDS)
    for name, _ in model.named_parameters():
        part = name.split(".")
        if part[0] == "blocks":
            branch = f"attn_layers.layers.{2 * int(part[1]) + (part[2] == 'ffn')}"
            ours[name] = (
                f"{branch}.0.{PLACES[part[4]]}.g" if part[3] == "stream" else f"{branch}.1.{INNER[part[4]]}.weight"
            )
    compare(model, there.state_dict(), ours, lambda tokens: SimpleNamespace(logits=there(tokens)))


# our name of a parameter -> theirs
X = {"gain": "gamma", "bias": "beta"}
NORMS = {  # theirs, what ours is chosen by, and how ours is got from what theirs holds
    "llama.modeling_llama.LlamaRMSNorm": (["norm=rmsnorm", "norm.cast=before_gain"], {"gain": "weight"}),
    "olmo2.modeling_olmo2.Olmo2RMSNorm": (["norm=rmsnorm"], {"gain": "weight"}),
    "qwen3.modeling_qwen3.Qwen3RMSNorm": (["norm=rmsnorm", "norm.cast=before_gain"], {"gain": "weight"}),
    "gemma3.modeling_gemma3.Gemma3RMSNorm": (["norm=zero_rmsnorm"], {"weight": "weight"}),
    "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNorm": (["norm=zero_rmsnorm"], {"weight": "weight"}),
    "olmo.modeling_olmo.OlmoLayerNorm": (["norm=simple_layernorm", "norm.eps=1e-5"], {}),
    "RMSNorm": (["norm=rmsnorm", "norm.eps=0"], {"gain": "g"}),
    "LayerNorm": (["norm=layernorm_no_bias", "norm.eps=1e-5"], {"gain": "gamma"}),
    "SimpleRMSNorm": (["norm=simple_rmsnorm", "norm.eps=0"], {}),
    "DynamicTanh": (["norm=dyt"], {**X, "alpha": "pre_tanh_scale"}),
    "Derf": (["norm=derf"], {**X, "alpha": "alpha", "shift": "s"}),
}


# x-transformers normalises in the dtype that it is given
@pytest.mark.parametrize(
    "theirs, dtype",
    [(name, torch.float32) for name in NORMS] + [(name, torch.bfloat16) for name in NORMS if "." in name],
)
def test_norms(theirs: str, dtype: torch.dtype):
    """In float32 to 1e-6, a few roundings of numbers of order 1. In bfloat16 the cast before or after the gain decides the last
    bit (2^-8): `transformers`' all but one entry in a thousand, since the sums of squares are taken in another order."""
    words, names = NORMS[theirs]
    package, _, kind = theirs.rpartition(".")
    if package:
        there = getattr(pytest.importorskip(f"transformers.models.{package}"), kind)(DIM)
    else:
        there = getattr(pytest.importorskip("x_transformers.x_transformers"), kind)(DIM)
    torch.manual_seed(0)
    ours = instantiate(plain(*words)["norm"])(DIM)
    with torch.no_grad():
        for parameter in there.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for name, parameter in ours.named_parameters():
            parameter.copy_(dict(there.named_parameters())[names[name]])
        x = (3 * torch.randn(64, DIM)).to(dtype)
        there, ours = there.to(dtype), ours.to(dtype)
        got, want = ours(x), there(x)
    assert got.dtype == want.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    else:
        assert (got != want).float().mean() <= 1e-3
