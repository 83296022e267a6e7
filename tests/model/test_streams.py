"""Each kind of stream against its paper's equations, and what a stream of several tensors must not break."""

import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import train
from conf.help import choices
from model import execution
from model.compatibility import refusals
from model.equation import equation
from model.execution import Execution, through
from model.hyper import sinkhorn
from model.inventory import inventory
from model.loss import next_token_loss
from model.site import Site
from model.sizes import Sizes
from stability.trace import trace
from tests.conftest import network, plain
from tests.model.test_execution import same, step
from tests.model.test_transformer import WITH
from tests.reference import VOCAB, Reference, agree, stds

KINDS = [kind for kind in choices("stream") if kind != "single"]


def words(kind: str) -> list[str]:
    return [f"stream={kind}", *WITH.get(f"stream={kind}", [])]


def some(kinds: Iterable[str], *, fast: set[str]) -> list:
    """The others are slow."""
    return [pytest.param(kind, marks=[] if kind in fast else pytest.mark.slow) for kind in sorted(kinds)]


def branches(r: Reference) -> Iterator[tuple[str, int, Callable[[int, Tensor], Tensor]]]:
    """(Where the stream of a branch has its parameters, its layer, its function), from the input on."""
    for layer in range(1, r.depth + 1):
        yield f"blocks.{layer - 1}.attention.stream", layer, r.A
        yield f"blocks.{layer - 1}.ffn.stream", layer, r.M


def b2t(r: Reference, tokens: Tensor, alpha: float = 1.0) -> Tensor:
    x = r.embedding(tokens)
    for i in range(r.depth):
        h = r.N(f"blocks.{i}.attention.stream.norm_sum", alpha * x + r.A(i + 1, x))
        x = r.N(f"blocks.{i}.ffn.stream.norm_sum", alpha * (x + h) + r.M(i + 1, h))
    return r.logits(x, norm=False)


def span(r: Reference, tokens: Tensor) -> Tensor:
    x = r.embedding(tokens)
    for i in range(r.depth):
        at = f"blocks.{i}.attention.stream"
        h = r.N(f"{at}.norm_sum", x + r.A(i + 1, x if i else r.N(f"{at}.norm_in", x)))
        x = r.N(f"blocks.{i}.ffn.stream.norm_sum", x + r.M(i + 1, h))
    return r.logits(x, norm=False)


def dual(r: Reference, tokens: Tensor) -> Tensor:
    p = d = r.embedding(tokens)
    for at, layer, F in branches(r):
        f = F(layer, p)
        p, d = r.N(f"{at}.norm_sum", p + f), d + f
    return r.logits(p + r.N("outlet.norm", d), norm=False)


def siamese(r: Reference, tokens: Tensor) -> Tensor:
    X = Y = r.embedding(tokens)
    for branch, (at, layer, F) in enumerate(branches(r), start=1):
        o = F(layer, r.N(f"{at}.norm_in", X + r.N(f"{at}.norm_other", Y)))
        X, Y = r.N(f"{at}.norm_sum", X + o / math.sqrt(branch + 1)), Y + o
    return r.logits(X + r.N("outlet.norm", Y), norm=False)


def connected(
    r: Reference, tokens: Tensor, weights: Callable[[str, list[Tensor]], tuple[Tensor, Tensor, Tensor]], n: int = 4
) -> Tensor:
    """n streams, `weights` as (to read: from; to mix: from, to; to write: to), each a number or one for every token."""
    H = [r.embedding(tokens)] * n
    for at, layer, F in branches(r):
        read, mix, write = weights(f"{at}.weights", H)
        y = F(layer, r.N(f"{at}.norm_in", sum(read[i][..., None] * H[i] for i in range(n))))
        H = [write[j][..., None] * y + sum(mix[i][j][..., None] * H[i] for i in range(n)) for j in range(n)]
    return r.logits(sum(H))


def hyper_static(r: Reference, tokens: Tensor) -> Tensor:
    return connected(r, tokens, lambda at, H: (r.p[f"{at}.A_m"], r.p[f"{at}.A_r"], r.p[f"{at}.B"]))


def hyper(r: Reference, tokens: Tensor) -> Tensor:
    def weights(at: str, H: list[Tensor]) -> tuple:
        A_m, A_r, B, W_m, W_b, W_r, s_a, s_b = (
            r.p[f"{at}.{name}"] for name in ("A_m", "A_r", "B", "W_m", "W_b", "W_r", "s_a", "s_b")
        )
        bar = [r.N(f"{at}.norm", h) for h in H]
        read = [s_a * torch.tanh(h @ W_m) + A_m[i] for i, h in enumerate(bar)]
        mix = [[s_a * torch.tanh(h @ W_r[j]) + A_r[i, j] for j in range(4)] for i, h in enumerate(bar)]
        return read, mix, [s_b * torch.tanh(h @ W_b) + B[i] for i, h in enumerate(bar)]

    return connected(r, tokens, weights)


def mhc(r: Reference, tokens: Tensor) -> Tensor:
    def weights(at: str, H: list[Tensor]) -> tuple:
        x = torch.cat(H, -1)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        phi, bias = r.p[f"{at}.phi"], {name: r.p[f"{at}.b_{name}"] for name in ("pre", "post", "res")}
        alpha = {name: r.p[f"{at}.alpha_{name}"] for name in bias}
        pre = [1 / (1 + torch.exp(-alpha["pre"] * (x @ phi[i]) - bias["pre"][i])) for i in range(4)]
        post = [2 / (1 + torch.exp(-alpha["post"] * (x @ phi[4 + i]) - bias["post"][i])) for i in range(4)]
        M = torch.stack([alpha["res"] * (x @ phi[8 + i]) + bias["res"].flatten()[i] for i in range(16)], -1)
        M = M.exp().unflatten(-1, (4, 4))  # rows: to, columns: from
        for _ in range(20):
            M = M / M.sum(-2, keepdim=True)
            M = M / M.sum(-1, keepdim=True)
        return pre, [[M[..., j, i] for j in range(4)] for i in range(4)], post

    return connected(r, tokens, weights)


def recalled(r: Reference, name: str, values: list[Tensor]) -> Tensor:
    scores = [(v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-6)) @ r.p[name] for v in values]
    total = sum(torch.exp(score) for score in scores)
    return sum((torch.exp(score) / total)[..., None] * v for score, v in zip(scores, values, strict=True))


def attention_residuals(r: Reference, tokens: Tensor, starts: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> Tensor:
    """`starts`: the branches, from 1, whose answer stands apart from those before it."""
    values = [r.embedding(tokens)]
    for branch, (at, layer, F) in enumerate(branches(r), start=1):
        y = F(layer, r.N(f"{at}.norm_in", recalled(r, f"{at}.mix.w", values)))
        values = [*values, y] if branch in starts else [*values[:-1], values[-1] + y]
    return r.logits(recalled(r, "outlet.w", values))


@pytest.mark.parametrize(
    "kind, knobs, equations",
    [
        ("b2t", [], b2t),
        ("b2t", ["residual=deepnorm"], lambda r, tokens: b2t(r, tokens, 6**0.25)),
        ("span", [], span),
        ("dual", [], dual),
        ("siamese", [], siamese),
        ("hyper_static", [], hyper_static),
        ("hyper", [], hyper),
        ("mhc", [], mhc),
        ("attention_residuals", [], attention_residuals),
        # 2 groups of 3 layers: floor(2 (l - 1) / 3) is 0, 0, 1, so that layers 1 and 3 start one
        ("attention_residuals", ["stream.blocks=2"], lambda r, tokens: attention_residuals(r, tokens, (1, 5))),
        ("attention_residuals", ["stream.blocks=8"], lambda r, tokens: attention_residuals(r, tokens, (1, 3, 5))),
    ],
)
def test_equals_its_equations(kind: str, knobs: list[str], equations):
    agree([*words(kind), *knobs], equations)


@pytest.mark.parametrize(
    "kind, line",
    [
        ("b2t", "h <- N(x + A(x)) then x <- N(x + h + M(h));  logits = W x"),
        (
            "span",
            "layer 1: h <- N(x + A(N(x))) then x <- N(x + M(h));  layers 2-12: h <- N(x + A(x)) then x <- N(x + M(h));  "
            "logits = W x",
        ),
        ("dual", "p <- embedding, d <- embedding;  p <- N(p + F(p)), d <- d + F(p);  logits = W (p + N(d))"),
        (
            "siamese",
            "X <- embedding, Y <- embedding;  X <- N(X + (l + 1)^-1/2 F(N(X + N(Y)))), Y <- Y + F(N(X + N(Y)));  "
            "logits = W (X + N(Y))",
        ),
        ("hyper_static", "H <- 1 embedding;  H <- A_r^T H + B^T F(N(A_m^T H));  logits = W N(1^T H)"),
        ("hyper", "H <- 1 embedding;  H <- A_r(H)^T H + B(H)^T F(N(A_m(H)^T H));  logits = W N(1^T H)"),
        ("mhc", "x <- 1 embedding;  x <- H_res(x) x + H_post(x)^T F(N(H_pre(x) x));  logits = W N(1^T x)"),
        (
            "attention_residuals",
            "v <- (embedding), h = sum_i softmax_i(w . RMSNorm(v_i)) v_i;  v <- (v, F(N(h)));  logits = W N(h)",
        ),
    ],
)
def test_the_printed_equation(kind: str, line: str):
    assert equation(train.choices_of(plain(*words(kind))), 12) == line


def test_the_equation_tells_coefficients_and_groups():
    built = train.choices_of(plain(*words("b2t"), "residual=deepnorm"))
    assert equation(built, 3) == "h <- N(alpha x + A(x)) then x <- N(alpha (x + h) + M(h));  logits = W x"
    built = train.choices_of(plain("stream=attention_residuals", "stream.blocks=2", "placement=peri"))
    assert equation(built, 4) == (
        "v <- (N(embedding)), h = sum_i softmax_i(w . RMSNorm(v_i)) v_i;  "
        "layers 1, 3: v <- (v, N(A(N(h)))) then v <- (.., v_n + N(M(N(h))));  layers 2, 4: v <- (.., v_n + N(F(N(h))));  "
        "logits = W N(h)"
    )


def test_b2t_starts_every_matrix_smaller():
    """N^(-1/2) times Xavier's std, to 2 %: of 4 layers of 64 by 64 at least, a sample std is off by 1/sqrt(2 * 16384), 0.6 %."""
    model = network(
        "residual=b2t", "stream=b2t", "placement=post", "init=xavier", "ffn=swiglu", "model.depth=4", "model.dim=64"
    )
    hidden = model.blocks[0].ffn.function.up.out_features
    for name, std in stds(model).items():
        other = hidden if name in ("up", "gate", "down") else 64
        assert std == pytest.approx(4**-0.5 * math.sqrt(2 / (64 + other)), rel=0.02), name


@pytest.mark.parametrize("kind", ["hyper", "hyper_static", "mhc"])
@pytest.mark.parametrize("streams", [2, 4, 5])
def test_hyper_connections_start_as_the_pre_norm_network(kind: str, streams: int):
    """Each stream is its stream, and the norm of n of them the norm of one, but for eps. float64: 1e-12, some 1e3 operations."""
    knobs = ["norm.eps=0", "model.depth=5"]
    one, several = (network(*w, *knobs).double() for w in ([], [f"stream={kind}", f"stream.streams={streams}"]))
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(several(tokens), one(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["hyper", "hyper_static", "mhc"])
def test_each_branch_starts_by_reading_a_stream_of_its_own(kind: str):
    """Branch k, counted from 0, the stream k mod n: alone, or under mHC by 1/2 more than each other's 1/(2n)."""
    model = network(f"stream={kind}", "stream.streams=3", "model.depth=2")
    H = torch.randn(3, 2, 8, 16)
    for k, branch in enumerate(branch for block in model.blocks for branch in (block.attention, block.ffn)):
        read, mixed, written = branch.stream.weights.connect(H)
        home, share = torch.eye(3)[k % 3], (1, 0) if kind != "mhc" else (1 / 2, 1 / 6)
        torch.testing.assert_close(read.mean((1, 2)), share[0] * home + share[1])
        torch.testing.assert_close(mixed.mean((2, 3)), torch.eye(3), rtol=0, atol=1e-3)
        torch.testing.assert_close(written.mean((1, 2)), torch.ones(3))


@pytest.mark.parametrize("kind", ["hyper", "mhc"])
def test_the_weights_of_streams_are_worked_in_float32(kind: str):
    weights = network(f"stream={kind}").blocks[0].ffn.stream.weights
    H = torch.randn(4, 2, 8, 16)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = weights.connect(H)
    for one, other in zip(mixed, weights.connect(H), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["hyper", "hyper_static", "mhc"])
def test_streams_part_from_the_first_step_on(kind: str):
    """They start alike: were they read alike too, their gradients would be one, and so they would stay."""
    model = network(f"stream={kind}")
    next_token_loss(model, torch.arange(36).reshape(4, 9) % 11).backward()
    weights = model.blocks[0].ffn.stream.weights
    gradient = weights.b_post.grad if kind == "mhc" else weights.B.grad
    assert gradient.std() > 1e-3 * gradient.abs().max() > 0


def test_mhc_mixes_by_doubly_stochastic_matrices():
    """After 20 turns, of logits with std 1: rows add up to 1 but for rounding, columns to 1e-3; and no logit overflows."""
    logits = torch.randn(4, 4, 50, 7, generator=torch.Generator().manual_seed(0))
    for scale in (1, 200):
        M = sinkhorn(scale * logits, 20)
        assert torch.isfinite(M).all() and M.min() >= 0
        torch.testing.assert_close(M.sum(1), torch.ones(4, 50, 7), rtol=1e-5, atol=1e-5)
    assert (sinkhorn(logits, 20).sum(0) - 1).abs().max() < 1e-3
    model = network("stream=mhc").double()
    weights = model.blocks[1].ffn.stream.weights
    with torch.no_grad():
        weights.phi.normal_()
        read, mixed, written = weights.connect(torch.randn(4, 2, 8, 16, dtype=torch.float64))
    assert read.shape == written.shape == (4, 2, 8) and mixed.shape == (4, 4, 2, 8)
    ones = torch.ones(4, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(mixed.sum(0), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixed.sum(1), ones, rtol=0, atol=1e-3)  # near 1 the turns converge slowly
    assert ((read > 0) & (read < 1)).all() and ((written > 0) & (written < 2)).all()


def test_attention_residuals_start_as_a_mean_and_keep_no_copies():
    """Of 2N + 1 tensors; autograd keeps each of them once, not once for each branch that looks at it."""
    model = network("stream=attention_residuals", "model.depth=6")
    values = tuple(torch.randn(2, 8, 16) for _ in range(7))
    torch.testing.assert_close(model.outlet(values), torch.stack(values).mean(0))

    def kept(depth: int) -> int:
        seen: dict[int, int] = {}
        model = network("stream=attention_residuals", f"model.depth={depth}")

        def note(x: Tensor) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = next_token_loss(model, torch.arange(9)[None] % 11)
        loss.backward()
        return sum(seen.values())

    assert kept(32) < 2.5 * kept(16)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_by_gradient(kind: str):
    model = network(*words(kind), vocab=VOCAB)
    entered: list[Tensor] = []
    model.embed.register_forward_hook(lambda *a: entered.append(a[2].requires_grad_()) or a[2].retain_grad())
    model(torch.randint(VOCAB, (2, 8)))[0, 3].sum().backward()
    gradient = entered[0].grad
    assert gradient[0, :4].abs().max() > 0
    assert max(gradient[0, 4:].abs().max(), gradient[1].abs().max()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_stream_is_float32_under_bf16(kind: str):
    model = network(*words(kind), vocab=VOCAB)
    stream, inner = set(), set()
    for block in model.blocks:
        for branch in (block.attention, block.ffn):
            branch.register_forward_hook(
                lambda _, __, y: stream.update(x.dtype for x in (y if isinstance(y, tuple) else (y,)))
            )
            branch.function.register_forward_hook(lambda _, __, y: inner.add(y.dtype))
    model.head.register_forward_hook(lambda _, given, __: stream.add(given[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(VOCAB, (2, 8)))
    assert (stream, inner) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_groups_give_the_same_numbers_bit_by_bit(kind: str):
    model = network(*words(kind), "model.depth=5", "model.dropout=0.2")
    assert same(step(model, Execution(recompute=2)), step(model))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", some(set(KINDS) - {"attention_residuals"}, fast={"siamese", "hyper"}))
def test_groups_of_blocks_share_a_graph(monkeypatch: pytest.MonkeyPatch, kind: str):
    """The first may have one of its own: where its tensors are one and the same, and in SpanNorm, whose first block differs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(through, backend=counter, fullgraph=True)
    monkeypatch.setattr(execution, "_compiled", lambda: compiled)
    model = network(*words(kind), "model.depth=10")
    plain_step = step(model)
    for x, y in zip(step(model, Execution(compiled=1)), plain_step, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
    assert counter.frame_count <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_probe_sees(kind: str):
    """The mean square over the tensors of the stream, and the gradient of all of them, by hand."""
    model = network(*words(kind), "model.depth=3").double()
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.ndim < 2):
            parameter.add_(torch.rand_like(parameter))  # so that no tensor of the stream is like another
    windows = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    found = trace(model, [windows])
    state = model.stream.enter(model.embed(windows[:, :-1]))
    for layer, block in enumerate(model.blocks, start=1):
        state = block(state)
        parts = state if isinstance(state, tuple) else list(state) if state.ndim == 4 else [state]
        parts = parts[-1:] if kind == "attention_residuals" else parts  # the newest
        rms = math.sqrt(sum(part.square().mean().item() for part in parts) / len(parts))
        assert found.stream_rms[layer] == pytest.approx(rms, rel=1e-12)
        held = [state] if isinstance(state, Tensor) else parts
        loss = next_token_loss(Rest(model, layer, state), windows)
        gradients = torch.autograd.grad(loss, held, retain_graph=True)
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
        assert found.stream_grad_norm[layer] == pytest.approx(norm, rel=1e-9)
    assert all((found.attention_rms > 0) & (found.attention_skip_rms > 0) & (found.ffn_skip_rms > 0))


class Rest:
    """The network from after a layer on, whatever its tokens."""

    def __init__(self, model, layer: int, state) -> None:
        self.model, self.layer, self.state = model, layer, state

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.head(self.model.outlet(through(self.model.blocks[self.layer :], self.state)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stream_learns_counts_as_residual_or_head(kind: str):
    for entry in inventory(network(*words(kind))):
        if ".stream." in entry.name:
            assert entry.part == ("norm" if entry.kind in ("norm", "bias") else "residual"), entry.name
        if entry.name.startswith("outlet."):
            assert entry.part == "head"


@pytest.mark.parametrize(
    "kind, others, said",
    [
        ("b2t", ["placement=pre"], "use placement=post and a norm"),
        ("span", ["placement=peri"], "use placement=post and a norm"),
        ("dual", ["placement=mix"], "use placement=post and a norm"),
        ("dual", ["placement=post", "norm=none"], "use placement=post and a norm"),
        ("siamese", ["placement=post", "residual=learned_scalars"], "use residual=standard"),
        ("hyper", ["placement=post"], "use placement=pre"),
        ("hyper_static", ["residual=learned_scalars"], "use residual=standard"),
        ("mhc", ["placement=post"], "use placement=pre"),
        ("attention_residuals", ["placement=post"], "use placement=pre"),
    ],
)
def test_where_a_kind_is_refused(kind: str, others: list[str], said: str):
    names = {"placement": "pre", "residual": "standard", "norm": "rmsnorm", "init": "fan_in"}
    names |= {"stream": kind} | dict(word.split("=") for word in others)
    built = train.choices_of(plain(f"stream={kind}", *others))
    (line,) = [line for line in refusals(built, names, Sizes(4, 16, 2, 8)) if line.startswith("stream=")]
    assert line.startswith(f"stream={kind} with placement={names['placement']}") and line.endswith(said)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_defined_somewhere(kind: str):
    names = {"placement": "post" if WITH.get(f"stream={kind}") else "pre", "residual": "standard", "norm": "rmsnorm"}
    assert not list(refusals(train.choices_of(plain(*words(kind))), names | {"stream": kind}, Sizes(4, 16, 2, 8)))


@pytest.mark.parametrize(
    "given, said",
    [
        (["stream=hyper", "stream.streams=0"], r"stream\.streams must be >= 1, found 0"),
        (["stream=mhc", "stream.streams=1"], r"stream\.streams must be >= 2, found 1"),
        (["stream=mhc", "stream.iterations=0"], r"stream\.iterations must be >= 1, found 0"),
        (["stream=attention_residuals", "stream.blocks=-1"], r"stream\.blocks must be >= 0, found -1"),
        (
            ["stream=attention_residuals", "residual=learned_scalars"],
            r"stream=attention_residuals .* residual=standard",
        ),
    ],
)
def test_knobs_that_do_not_fit(given: list[str], said: str):
    with pytest.raises(Exception, match=said):
        network(*given)


def test_groups_of_layers_are_even():
    for blocks, depth in ((8, 32), (8, 100), (3, 10), (8, 1000)):
        kind = train.choices_of(plain("stream=attention_residuals", f"stream.blocks={blocks}")).stream
        first = [layer for layer in range(1, depth + 1) if kind.starts(Site("attention", layer, depth))]
        sizes = [b - a for a, b in zip(first, [*first[1:], depth + 1], strict=True)]
        assert first[0] == 1 and len(first) == blocks and max(sizes) - min(sizes) <= 1
        assert not any(kind.starts(Site("ffn", layer, depth)) for layer in range(1, depth + 1))


@pytest.mark.parametrize("kind", some(KINDS, fast={"attention_residuals"}))
def test_a_run_with_probes(run, capsys: pytest.CaptureFixture[str], kind: str):
    """From the command's words to the record; post-norm's advice is not given to what is none."""
    records, summary = run(*words(kind), "steps=3", "probe_every=2", "model.checkpointing=groups", "schedule.warmup=0")
    assert summary["steps_done"] == 3 and summary["verdict"] != "diverged"
    assert any("probe" in record for record in records)
    assert "post-norm without warm-up" not in capsys.readouterr().out


def test_a_growing_state_is_not_compiled(run):
    with pytest.raises(ValueError, match=r"^compile=true with a stream that has more tensors"):
        run("stream=attention_residuals", "compile=true", "steps=1")
