"""What keeps logits, scores and the embedding's gradient small: each against its formula, in plain float64."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train
from conf.explain import own_words
from model import execution, qk_clip
from model.equation import equation
from model.execution import Execution, through
from model.loss import next_token_loss
from stability.change import future_leak
from stability.trace import trace
from tests.conftest import network, plain
from tests.reference import Reference, agree
from tests.training.test_devices import finished, same
from tests.training.test_graphs import on_cpu  # noqa: F401 (a fixture)
from training.task import Task

WINDOWS = torch.arange(36).reshape(4, 9) % 11
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def pre(r: Reference, tokens: Tensor, cap: float = 0.0) -> Tensor:
    """The pre-norm decoder; attention's scores pass through cap tanh(z / cap) before the mask."""
    x, h = r.embedding(tokens), r.dim // r.heads
    for layer in range(1, r.depth + 1):
        at = f"blocks.{layer - 1}.attention"
        u = r.N(f"{at}.stream.norm_in", x)
        q, k, v = (r.matrix(f"{at}.function.{name}", u) for name in "qkv")
        out = []
        for head in range(r.heads):
            part = slice(head * h, (head + 1) * h)
            z = q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(h)
            z = cap * torch.tanh(z / cap) if cap else z
            weights = z.exp().tril()
            out.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
        x = x + r.matrix(f"{at}.function.o", torch.cat(out, -1))
        x = x + r.M(layer, r.N(f"blocks.{layer - 1}.ffn.stream.norm_in", x))
    return r.logits(x)


# ------------------------------------------------------------------------------------------------------------------ caps


def test_the_scores_are_capped():
    """A cap of 0.3 changes every score: they are of order 1."""
    agree(["attention.logit_cap=0.3"], lambda r, tokens: pre(r, tokens, 0.3))


def test_the_logits_are_capped():
    agree(["model.logit_cap=0.7"], lambda r, tokens: 0.7 * torch.tanh(pre(r, tokens) / 0.7))


def test_shared_keys_are_capped_as_if_each_head_had_its_own():
    """Against the uncapped path at a cap that no score comes near: tanh(z/c) c = z (1 - (z/c)^2 / 3), z/c about 1e-6."""
    words = ["model.heads=4", "model.kv_heads=2", "model.depth=3"]
    one, other = (network(*words, f"attention.logit_cap={cap}").double()(WINDOWS[:, :-1]) for cap in (0, 1e6))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_cap_is_part_of_the_equation_that_is_printed():
    assert equation(train.choices_of(plain()), 3, cap=30.0) == "x <- x + F(N(x));  logits = 30 tanh(W N(x) / 30)"


@pytest.mark.parametrize("training", [True, False])
def test_capped_attention_is_causal_by_gradient(training: bool):
    model = network("attention.logit_cap=0.5", "model.kv_heads=1").train(training)
    seen: list[Tensor] = []
    model.embed.register_forward_hook(lambda *a: seen.append(a[2].requires_grad_()) or a[2].retain_grad())
    model(WINDOWS[:2, :-1])[0, 3].sum().backward()
    gradient = seen[0].grad
    assert gradient[0, :4].abs().min() > 0 and gradient[0, 4:].abs().max() == gradient[1].abs().max() == 0
    assert future_leak(model, WINDOWS) == 0


def test_capped_attention_drops_weights_and_keeps_their_mean():
    """v = 1 for every key: without dropout each head gives 1, with it on average 1: 4096 draws of a sum of 1 to 8 weights."""
    model = network("attention.logit_cap=5", "model.dropout=0.25", "model.heads=1").blocks[0].attention.function
    q, k = torch.randn(2, 512, 1, 8, 16)
    ones = torch.ones(512, 1, 8, 16)
    assert torch.allclose(model.eval().attend(q, k, ones), ones)
    torch.manual_seed(0)
    dropped = model.train().attend(q, k, ones)[..., 0]
    assert (dropped[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.08)  # 512 draws: 0.02
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.04)


def test_a_trace_has_the_scores_that_the_softmax_has():
    """Capped at 0.4, of layer 2 of a network that was not, by hand from the inputs of its attention."""
    model = network("attention.logit_cap=0.4", "model.logit_cap=0.9", "position=none").double()
    given: list[Tensor] = []
    attention = model.blocks[1].attention.function
    attention.register_forward_hook(lambda _, inputs, __: given.append(inputs[0].detach()))
    found = trace(model, [WINDOWS])
    u, entropies, largest = given[0].numpy(), [], -np.inf
    q, k = (u @ getattr(attention, name).weight.detach().numpy().T for name in "qk")
    for row in range(4):
        for part in (slice(0, 8), slice(8, 16)):
            for t in range(8):
                z = 0.4 * np.tanh(k[row, : t + 1, part] @ q[row, t, part] / np.sqrt(8) / 0.4)
                p = np.exp(z) / np.exp(z).sum()
                largest = max(largest, z.max())
                entropies.append(-(p * np.log(p)).sum())
    assert found.logit_max[1] == pytest.approx(largest, rel=1e-9) and largest < 0.4
    assert found.attention_entropy[1] == pytest.approx(np.mean(entropies), rel=1e-9)
    loss = torch.nn.functional.cross_entropy(model(WINDOWS[:, :-1]).flatten(0, 1), WINDOWS[:, 1:].flatten())
    assert found.loss == pytest.approx(loss.item(), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------- z-loss


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("at_once", [1, 5, 1000])
@pytest.mark.parametrize("cap", [0.0, 0.8])
def test_the_gradient_is_that_of_the_formula_and_the_loss_that_of_cross_entropy(monkeypatch, at_once: int, cap: float):
    """mean(log Z - z_target + 0.3 log^2 Z) by autograd from the logits, in one part and in many. float64."""
    monkeypatch.setattr(execution, "LOGITS", 11 * at_once)
    model = network("z_loss=0.3", f"model.logit_cap={cap}").double()
    logits, targets = model(WINDOWS[:, :-1]).flatten(0, 1), WINDOWS[:, 1:].flatten()
    log_z = logits.exp().sum(-1).log()
    plain_loss = (log_z - logits[torch.arange(32), targets]).mean()
    loss = next_token_loss(model, WINDOWS)
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-14)
    wanted = gradients(model, plain_loss + 0.3 * log_z.square().mean())
    without = gradients(model, model(WINDOWS[:, :-1]).flatten(0, 1).log_softmax(-1)[torch.arange(32), targets].mean())
    for got, want, less in zip(gradients(model, loss), wanted, without, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
        assert (got + less).norm() > 1e-3 * want.norm()  # the term is felt


def test_one_pass_over_the_logits(monkeypatch):
    """The head is called once for each part, as without the term, and once more in the backward pass."""
    monkeypatch.setattr(execution, "LOGITS", 11 * 8)
    calls = []
    for z_loss in (0.0, 0.1):
        model, seen = network(f"z_loss={z_loss}"), []
        model.head.norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        next_token_loss(model, WINDOWS).backward()
        calls.append(len(seen))
    assert calls == [8, 8]


def test_a_trace_measures_the_gradient_of_the_step_with_the_term():
    with_term, without = network("z_loss=0.5"), network()
    found, plain_trace = trace(with_term, [WINDOWS]), trace(without, [WINDOWS])
    total = torch.stack([g.norm() for g in gradients(with_term, next_token_loss(with_term, WINDOWS))]).norm()
    assert found.grad_norm["total"] == pytest.approx(total.item(), rel=1e-5)
    assert found.grad_norm["total"] > 1.2 * plain_trace.grad_norm["total"]
    assert found.loss == pytest.approx(plain_trace.loss, rel=1e-6)


def test_under_bf16_the_term_is_worked_in_float32():
    """bfloat16 logits have 8 bits; the loss from them and its gradient agree with float32's to about 1 %."""
    model = network("z_loss=0.1")
    wanted = gradients(model, next_token_loss(model, WINDOWS))
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model, WINDOWS)
    assert loss.dtype == torch.float32
    total = torch.stack([w.norm() for w in wanted]).norm()
    for got, want in zip(gradients(model, loss), wanted, strict=True):
        assert (got - want).norm() < 0.02 * total


# -------------------------------------------------------------------------------------------------- the embedding's gradient


@pytest.mark.parametrize("tied", [False, True])
def test_the_embeddings_gradient_is_shrunk_and_nothing_else(tied: bool):
    words = ["position=learned", f"model.tied={tied}".lower()]
    whole, shrunk = (network(*words, f"model.embed_grad={share}").double() for share in (1, 0.1))
    losses = [next_token_loss(model, WINDOWS) for model in (whole, shrunk)]
    assert torch.equal(*losses)
    names = [name for name, _ in whole.named_parameters()]
    at_input = dict(zip(names, gradients(whole, losses[0]), strict=True))
    if tied:  # what it has as the embedding's matrix alone: the head's part is left whole
        x = whole.outlet(through(whole.blocks, whole.embed(WINDOWS[:, :-1])))
        logits = torch.nn.functional.linear(whole.head.norm(x), whole.head.weight.detach()).flatten(0, 1)
        own = torch.nn.functional.cross_entropy(logits, WINDOWS[:, 1:].flatten())
        (part,) = torch.autograd.grad(own, [whole.embed.token])
    else:
        part = at_input["embed.token"]
    expected = at_input | {"embed.token": at_input["embed.token"] - 0.9 * part}
    for name, got in zip(names, gradients(shrunk, losses[1]), strict=True):
        torch.testing.assert_close(got, expected[name], **CLOSE)


# --------------------------------------------------------------------------------------------------------------- QK-clip


def heads_largest(model: Any, windows: list[Tensor], layer: int) -> np.ndarray:
    """(heads,) max of q k / sqrt(d_h) over what each query sees, one score at a time; position=none, 4 heads of width 4."""
    attention, given = model.blocks[layer].attention.function, []
    hook = attention.register_forward_hook(lambda _, inputs, __: given.append(inputs[0].detach()))
    with torch.no_grad():
        for batch in windows:
            model.eval()(batch[:, :-1])
    hook.remove()
    model.train()
    found = np.full(4, -np.inf)
    for u in given:
        q, k = (torch.nn.functional.linear(u, m.weight, m.bias).detach().numpy() for m in (attention.q, attention.k))
        shared = 4 // (k.shape[-1] // 4)
        for head in range(4):
            group = head // shared
            for row in range(len(u)):
                for t in range(u.shape[1]):
                    for s in range(t + 1):
                        score = q[row, t, head * 4 : head * 4 + 4] @ k[row, s, group * 4 : group * 4 + 4] / 2
                        found[head] = max(found[head], score)
    return found


def hot(*words: str) -> Any:
    """A network with scores of order 10 whose heads differ."""
    model = network("model.heads=4", "position=none", "model.bias=true", *words).double().train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for block in model.blocks:
            attention = block.attention.function
            for linear in (attention.q, attention.k):
                linear.weight.mul_(3)
                linear.bias.normal_(generator=generator)
            attention.q.weight.view(4, -1).mul_(torch.tensor([[0.2], [1.0], [2.0], [0.5]]))
    return model


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_heads_beyond_tau_come_back_to_it_and_no_other_moves(monkeypatch, kv_heads: int):
    """Two micro-batches; of a shared key the largest of its heads decides. A factor gamma on q k is a factor on every score,
    so that the largest is tau afterwards; rows that are within stay bit by bit."""
    monkeypatch.setattr(qk_clip, "SCORES", 4 * 64 * 3)  # in parts of 3 of the 4 rows
    probe, batches = hot(f"model.kv_heads={kv_heads}"), [WINDOWS, (WINDOWS * 7 + 3) % 11]
    largest = np.stack([heads_largest(probe, batches, layer) for layer in range(2)])
    tau = float(np.median(largest))
    model = hot(f"model.kv_heads={kv_heads}", f"attention.qk_clip={tau}")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in batches:
        next_token_loss(model, batch)
    for layer, block in enumerate(model.blocks):
        torch.testing.assert_close(block.attention.function.clip.largest.numpy(), largest[layer], rtol=1e-9, atol=0)
    model.after_step()
    clipped = 0
    for layer in range(2):
        of_group = largest[layer].reshape(kv_heads, -1).max(1)
        gamma = np.minimum(1, tau / of_group)
        clipped += (gamma < 1).sum()
        for matrix in "qk":
            for leaf in ("weight", "bias"):
                name = f"blocks.{layer}.attention.function.{matrix}.{leaf}"
                old, new = before[name].view(kv_heads, -1), model.get_parameter(name).detach().view(kv_heads, -1)
                np.testing.assert_allclose(new.numpy(), old.numpy() * np.sqrt(gamma)[:, None], rtol=1e-12)
                assert all(torch.equal(new[g], old[g]) for g in range(kv_heads) if gamma[g] == 1)
    assert 0 < clipped < 2 * kv_heads or kv_heads == 1
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if ".q." not in n and ".k." not in n)
    # layer 1 reads what the embedding gives, which no clip has moved
    after = heads_largest(model, batches, 0)
    assert after.reshape(kv_heads, -1).max(1) == pytest.approx(np.minimum(largest[0].reshape(kv_heads, -1).max(1), tau))
    model.after_step()  # nothing was seen since
    assert all(torch.isinf(block.attention.function.clip.largest).all() for block in model.blocks)


def test_what_is_no_step_is_not_seen():
    model = hot("attention.qk_clip=1")
    maxima = [block.attention.function.clip.largest for block in model.blocks]
    trace(model, [WINDOWS])
    future_leak(model, WINDOWS)
    model.eval()
    next_token_loss(model, WINDOWS)
    assert all((largest == -torch.inf).all() for largest in maxima)
    next_token_loss(model.train(), WINDOWS)
    assert all(torch.isfinite(largest).all() for largest in maxima)


@pytest.mark.parametrize("how", [Execution(recompute=2), Execution(recompute=4, compiled=2)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_however_the_blocks_are_run(monkeypatch, how: Execution):
    """Groups that are computed again look twice at the same scores; a compiled group is one graph."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(execution, "_compiled", lambda: torch.compile(through, backend=counter, fullgraph=True))
    found = []
    for each in (Execution(), how):
        model = network("model.depth=4", "attention.qk_clip=1", "attention.logit_cap=5", "model.dropout=0.1")
        model.execution = each
        torch.manual_seed(0)
        next_token_loss(model, WINDOWS).backward()
        model.after_step()
        found.append([torch.cat((p.detach().flatten(), p.grad.flatten())) for p in model.parameters()])
    assert counter.frame_count == (1 if how.compiled else 0)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


ALL = ["attention.qk_clip=0.3", "attention.logit_cap=2", "z_loss=0.1", "model.embed_grad=0.1", "model.logit_cap=3"]
STEPS = ["steps=6", "log_every=1", "val_every=3", "picture=false", "optimizer.lr=3e-2", "schedule.warmup=0"]


def test_a_run_keeps_its_scores_at_tau(run):
    """A rate at which they grow: without the clip beyond 3; with it no step leaves more than its own move."""
    words = [*STEPS, "steps=20", "probe_every=10", "log_every=10"]
    largest = {}
    for tau in (0, 1.5):
        records, _ = run(*words, f"attention.qk_clip={tau}")
        largest[tau] = max(max(r["probe"]["logit_max"]) for r in records if "probe" in r and r["step"])
    assert largest[0] > 3 and largest[1.5] < 2.5


def test_a_step_that_is_skipped_scales_nothing(run, monkeypatch):
    """Its scores are finite and beyond tau, its loss is not: the weights after it are those of the step before."""
    original, weights = Task.training_step, []

    def broken(task, *args):
        weights.append({n: p.detach().clone() for n, p in task.model.named_parameters()})
        loss = original(task, *args)
        return loss * torch.nan if task.trainer.global_step == 2 else loss

    monkeypatch.setattr(Task, "training_step", broken)
    records, _ = run(*STEPS, "attention.qk_clip=0.01")
    assert [r["step"] for r in records if r.get("skipped")] == [3]
    assert all(torch.equal(p, weights[2][n]) for n, p in weights[3].items())
    moved = {n.split(".")[-2] for n, p in weights[1].items() if not torch.equal(p, weights[0][n])}
    assert {"q", "k", "v"} <= moved


def test_recorded_micro_batches_leave_the_record_of_eager_ones(run, on_cpu):  # noqa: F811
    words = [*STEPS, *ALL, "precision=bf16-mixed", "probe_every=3", "accumulate=2"]
    one, other = (run(*words, f"trainer.cuda_graphs={graphs}")[0] for graphs in ("false", "true"))
    assert one == other and on_cpu == [1]


def test_a_resumed_run_is_the_unbroken_one(run, tmp_path):
    words = [*STEPS, *ALL, "schedule=constant", "save_every=3"]
    whole, _ = run(*words)
    _, half = run(*words, "steps=3")
    resumed, _ = run(*words, f"resume={half['directory']}", directory=half["directory"])
    pick = lambda records: [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]  # noqa: E731
    assert pick(resumed) == pick(whole)


@pytest.mark.parametrize(
    "words, said",
    [
        (["model.logit_cap=-1"], r"^model\.logit_cap must be >= 0 \(0 = no cap\), found -1"),
        (["model.embed_grad=1.5"], r"^model\.embed_grad must be in \[0, 1\], found 1\.5"),
        (["attention.logit_cap=-1.0"], r"^attention\.logit_cap must be >= 0 \(0 = none\), found -1"),
        (["attention.qk_clip=-1.0"], r"^attention\.qk_clip must be >= 0 \(0 = none\), found -1"),
        (["attention.qk_clip=100", "model.qk_norm=head"], r"^attention\.qk_clip=100 scales W_q and W_k, and a norm"),
        (["attention.qk_clip=100", "model.qk_norm=full"], r"^attention\.qk_clip=100 scales W_q and W_k, and a norm"),
        (["attention.qk_clip=9", "trainer=fsdp", "devices=2"], r"^attention\.qk_clip with trainer=fsdp"),
        (["z_loss=-1"], r"^z_loss=-1.0 should be greater than or equal to 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_line(run, words: list[str], said: str):
    with pytest.raises(Exception) as refused:
        run("steps=1", *words)
    line = own_words(refused.value)
    assert re.search(said, line) and "\n" not in line


@pytest.mark.slow
def test_two_devices_agree_on_the_largest_score(tmp_path):
    words = ["steps=6", "attention.qk_clip=0.3", "z_loss=0.1", "model.logit_cap=5", "accumulate=2", "log_every=1"]
    finished(tmp_path, "one", *words)
    finished(tmp_path, "two", *words, "devices=2")
    same(tmp_path / "two", tmp_path / "one")


def test_a_run_with_qk_clip_keeps_its_weights(run):
    """Its largest scores rest at -inf between steps, and are no part of a checkpoint."""
    _, summary = run("attention.qk_clip=0.5", "steps=3", "save_every=2")
    assert (summary["directory"] / "checkpoints/last.ckpt").is_file()
