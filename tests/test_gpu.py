"""What only a CUDA device can show: `python -m pytest -m gpu`, a minute in all."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from conf.help import choices
from model import execution
from model.loss import next_token_loss
from tests.conftest import network
from training import device as machine
from training.flops import peak_flops
from training.graphs import recorded
from training.optim import adamw, muon, sgd, stable_adamw
from training.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # the compiler's: it looks at what its inputs keep, and advises on the precision of matrix products
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def losses(records) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


def test_gpu_runs_in_bf16_where_it_is_made_for_it(run):
    records, summary = run("steps=60", "optimizer.lr=1e-2")
    assert summary["code"] == 0 and len(losses(records)) == 60
    if torch.cuda.get_device_capability() >= (8, 0):
        assert machine.precision("auto", "cuda") == "bf16-mixed"
    assert summary["peak_memory_bytes"] == torch.cuda.max_memory_allocated()


def test_gpu_in_float32_equals_the_cpu(run, monkeypatch):
    """The same draws and windows: after 5 steps float32 sums in another order differ by some 1e-5."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu, _ = run("steps=5", "precision=fp32")
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    cpu, _ = run("steps=5", "precision=fp32")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-4)


@pytest.mark.case("N07")
@pytest.mark.parametrize("norm", [name for name in choices("norm") if name != "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_norms_equal_the_cpu_and_are_dispatched_to_fused_kernels(norm: str, dtype: torch.dtype):
    module = network(f"norm={norm}", "model.dim=64").head.norm
    x = torch.randn(4, 32, 64).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Cannot dispatch to fused implementation"
        on_gpu = module.cuda()(x.cuda()).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(on_gpu, module.cpu()(x), rtol=tolerance, atol=tolerance)


@pytest.mark.case("G13")
@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9), stable_adamw, muon])
def test_gpu_skips_a_step_that_is_not_finite_on_the_device(make):
    model = network().cuda()
    optimizer = make(model, lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_gpu_probes_leave_the_run_alone_and_see_no_future(run, precision: str):
    """CUDA adds up the embedding's gradient in no fixed order: a few steps differ by some 1e-5, in bfloat16 by 1e-2."""
    words = ["steps=6", "log_every=4", f"precision={precision}", "model.dropout=0.1"]
    plain, _ = run(*words)
    watched, _ = run(*words, "probe_every=2")
    assert losses(watched) == pytest.approx(losses(plain), rel=1e-4 if precision == "fp32" else 2e-2)
    probes = [record for record in watched if "probe" in record]
    assert [record["step"] for record in probes] == [0, 2, 4, 6]
    for record in probes:
        assert record["probe"]["future_leak"] == 0 and "nonfinite" not in record
        assert record["step"] == 0 or 0 < record["probe"]["model_update"] < 1


def test_gpu_the_peak_of_memory_is_that_of_a_run_without_probes(run):
    """To what the allocator rounds: a probe holds the logits of attention in float64, and copies of all matrices."""
    words = ["steps=6", "model.depth=4", "model.dim=128", "model.context=64", "batch=32", "accumulate=2", "val_every=0"]
    plain = run(*words)[1]["peak_memory_bytes"]
    for every in (1, 3, 100):
        assert run(*words, f"probe_every={every}")[1]["peak_memory_bytes"] == pytest.approx(plain, rel=0.02)


@pytest.mark.case("W07")
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["accumulate=2", "workers=1"],
        ["trainer.cuda_graphs=true"],
        ["trainer.cuda_graphs=true", "accumulate=2"],
        ["optimizer=stable_adamw"],
        ["optimizer=muon"],
        ["linear=sigma_reparam"],
        ["recipe=ngpt"],
    ],
    ids=" ".join,
)
def test_gpu_a_step_does_not_synchronise(run, monkeypatch, words: list[str]):
    """From the end of one step to the end of the next, Lightning's loop, the windows' way to the device and every callback
    included: whatever waited for the device would raise. A log step may, once it has its windows."""
    guarded = []

    def begins(task, *_):
        step = task.trainer.global_step + 1
        if task.recorder._is_log_step(step):
            torch.cuda.set_sync_debug_mode("default")
        elif step > 3:
            guarded.append(step)

    def ends(task, *_):
        last = task.trainer.global_step >= task.steps
        torch.cuda.set_sync_debug_mode("error" if task.trainer.global_step >= 3 and not last else "default")

    monkeypatch.setattr(Task, "on_train_batch_start", begins)  # Lightning calls the task's hooks after the callbacks'
    monkeypatch.setattr(Task, "on_train_batch_end", ends)
    try:
        _, summary = run("steps=12", "log_every=5", "val_every=0", "save_every=0", *words)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert summary["code"] == 0
    assert sorted(set(guarded)) == [4, 6, 7, 8, 9, 11]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gpu_recorded_steps_equal_eager_ones(run, precision: str, accumulate: int):
    """The same kernels on the same numbers, dropout's draws included. CUDA adds up the embedding's gradient in no fixed order: a
    few steps in float32 differ by some 1e-5, in bfloat16 by 1e-2."""
    torch.backends.cuda.matmul.allow_tf32 = False
    words = ["steps=8", "log_every=3", "val_every=3", "probe_every=4", f"precision={precision}", "model.dropout=0.1"]
    words += [f"accumulate={accumulate}"]
    eager, _ = run(*words)
    recorded, summary = run(*words, "trainer.cuda_graphs=true")
    assert summary["code"] == 0
    assert losses(recorded) == pytest.approx(losses(eager), rel=1e-4 if precision == "fp32" else 2e-2)
    totals = [[r["grad_norm"]["total"] for r in records if "loss" in r] for records in (eager, recorded)]
    assert totals[1] == pytest.approx(totals[0], rel=1e-3 if precision == "fp32" else 5e-2)


def test_gpu_replays_draw_anew_and_as_eager_steps_do():
    model = network("model.dropout=0.5").cuda().train()
    windows = torch.randint(0, 11, (4, 9), device="cuda")
    state = torch.cuda.get_rng_state()
    loss_of = recorded(model, windows, bf16=False)
    assert torch.equal(state, torch.cuda.get_rng_state())

    def two(loss: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        torch.cuda.manual_seed(3)
        return [loss(windows).item() for _ in range(2)]

    first, second = two(loss_of)
    assert first != second
    assert two(loss_of) == [first, second]
    assert two(partial(next_token_loss, model)) == pytest.approx([first, second], rel=1e-5)


@pytest.mark.parametrize("words", [["compile=true"], ["data.val_windows=4", "norm=batchnorm", "allow_unstable=true"]])
def test_gpu_records_what_is_compiled_and_what_has_statistics(run, words: list[str]):
    words = ["steps=6", "precision=fp32", *words]
    eager, _ = run(*words)
    recorded, _ = run(*words, "trainer.cuda_graphs=true")
    assert losses(recorded) == pytest.approx(losses(eager), rel=1e-3)


def test_gpu_records_a_loss_in_chunks(run, monkeypatch):
    """A vocabulary so large that the logits are made again in the backward pass, which reads no generator."""
    monkeypatch.setattr(execution, "LOGITS", 257 * 16)
    words = ["steps=4", "precision=fp32"]
    assert losses(run(*words, "trainer.cuda_graphs=true")[0]) == pytest.approx(losses(run(*words)[0]), rel=1e-4)


def test_gpu_a_recorded_run_is_resumed(run):
    """Under dropout: the generator of the device goes on where the checkpoint left it."""
    words = [
        "steps=8",
        "save_every=4",
        "model.dropout=0.2",
        "precision=fp32",
        "schedule=constant",
        "schedule.warmup=0",
        "trainer.cuda_graphs=true",
    ]
    unbroken, _ = run(*words)
    _, summary = run(*words[1:], "steps=4")
    resumed, _ = run(*words, f"resume={summary['directory']}", directory=summary["directory"])
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=1e-4)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="flash attention needs Ampere"
)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
@pytest.mark.parametrize(
    "words", [[], ["model.kv_heads=1"], ["model.qk_norm=head"], ["model.dropout=0.1"]], ids=" ".join
)
def test_gpu_attention_takes_the_flash_kernel_in_bf16(head_dim: int, words: list[str]):
    """No other backend is allowed: what it could not do would raise."""
    model = network(f"model.dim={2 * head_dim}", "model.context=64", *words).cuda().train()
    windows = torch.randint(0, 11, (4, 65), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        loss = next_token_loss(model, windows)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.case("N07")
@pytest.mark.parametrize("norm", [name for name in choices("norm") if name != "none"])
def test_gpu_whole_steps_meet_no_mix_of_dtypes(run, norm: str):
    """The stream in float32 under autocast, queries and keys in bfloat16 (`qk_norm`), a branch's output in bfloat16
    (`norm_out`): "Cannot dispatch to fused implementation", which torch says once a process, is said each time and raised."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        for qk_norm in ("head", "full"):
            words = ["placement=sandwich", f"model.qk_norm={qk_norm}", f"norm={norm}", "allow_unstable=true"]
            _, summary = run("steps=2", "precision=bf16-mixed", *words)
            assert summary["code"] == 0
    finally:
        torch.set_warn_always(before)


def test_gpu_a_profile_tells_of_kernels(run):
    _, summary = run("steps=8", "profile=true")
    text = (summary["directory"] / "profile" / "table.txt").read_text()
    assert text.startswith("3 profiled steps on cuda: ") and "kernels in" in text
    first = text.partition("kind of work")[0].splitlines()[4].split()
    assert float(first[-3]) > 0 and not first[0].startswith(("aten::", "cuda"))


@pytest.mark.case("T06")
def test_gpu_says_its_share_of_the_peak_where_that_is_known(run):
    _, summary = run("steps=30", "precision=bf16-mixed")
    peak = peak_flops(torch.cuda.get_device_name(), "bf16-mixed")
    assert summary.get("peak_flops") == peak
    assert peak is None or 0 < summary["mfu"] < 1
