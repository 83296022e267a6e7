"""The profile of a run: which steps, what it leaves, what it leaves alone, and its sums over hand-made events."""

import gzip
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from torch.profiler import ProfilerAction

from training import profiling
from training import run as run_module
from training.profiling import BETWEEN, OTHER, Span, costs, plan, self_times, tables
from training.task import Task

NONE, WARM, RECORD, SAVE = (
    ProfilerAction.NONE,
    ProfilerAction.WARMUP,
    ProfilerAction.RECORD,
    ProfilerAction.RECORD_AND_SAVE,
)


@dataclass
class Event:
    """What is read of one of the profiler's events."""

    called: str
    start: int
    end: int
    thread: int = 1
    device: str = "CPU"
    annotation: bool = False

    def __post_init__(self):
        for name, value in {
            "name": self.called,
            "start_ns": self.start,
            "end_ns": self.end,
            "start_thread_id": self.thread,
            "end_thread_id": self.thread,
            "is_async": False,
            "is_user_annotation": self.annotation,
            "device_type": SimpleNamespace(name=self.device),
        }.items():
            setattr(self, name, lambda value=value: value)


def test_which_steps_are_traced():
    assert plan(1000, 4) == [NONE, NONE, WARM, WARM, RECORD, RECORD, SAVE]
    assert plan(1000, 1000) == [NONE, NONE, WARM, WARM, SAVE]
    assert plan(6, 4) == [NONE, WARM, WARM, RECORD, RECORD, SAVE]
    assert plan(4, 4) == [WARM, RECORD, RECORD, SAVE]
    assert plan(2, 4) == [RECORD, SAVE]
    assert plan(1, 4) == [SAVE]
    assert plan(0, 4) == []


def test_time_is_shared_out_among_operations_within_one_another():
    """0 ..... 100 the step; in it 10..40 rms_norm with mul 15..25, 50..90 mm; on another thread mul 0..7. What is called by a
    norm is a norm's, what has a kind of its own keeps it."""
    spans = [
        Span("aten::mul", 15, 25, 1),
        Span("ProfilerStep#4", 0, 100, 1),
        Span("aten::mm", 50, 90, 1),
        Span("aten::rms_norm", 10, 40, 1),
        Span("aten::mm", 30, 35, 1),
        Span("aten::mul", 0, 7, 2),
        Span("aten::mul", 90, 92, 1),
    ]
    assert sorted(self_times(spans)) == sorted(
        [
            ("ProfilerStep#4", BETWEEN, 28),
            ("aten::rms_norm", "norms", 15),
            ("aten::mul", "norms", 10),
            ("aten::mm", "matrix products", 5),
            ("aten::mm", "matrix products", 40),
            ("aten::mul", OTHER, 2),
            ("aten::mul", OTHER, 7),
        ]
    )


def test_a_device_is_judged_by_its_kernels():
    events = [
        Event("ProfilerStep#4", 0, 100),
        Event("aten::mm", 0, 90),
        Event("ampere_bf16_s16816gemm_bf16", 10, 40, device="CUDA"),
        Event("ampere_bf16_s16816gemm_bf16", 50, 60, device="CUDA"),
        Event("void at::native::vectorized_layer_norm_kernel", 60, 70, device="CUDA"),
        Event("ProfilerStep#4", 0, 100, device="CUDA", annotation=True),
    ]
    steps, wall, found, kernels = costs(events)
    assert (steps, wall, kernels) == (1, 100, True)
    assert [(cost.kind, cost.calls, cost.self_time) for cost in found] == [("matrix products", 2, 40), ("norms", 1, 10)]
    assert "kernels in 50 % of it" in tables(steps, wall, found, kernels, "cuda")
    said = tables(*costs(events[:2]), device="mps").splitlines()[0]
    assert said.endswith("ms a step, operations of the host, since no kernel was traced")


@pytest.mark.parametrize(
    "name, kind",
    {
        "aten::addmm": "matrix products",
        "aten::mm": "matrix products",
        "aten::mm_like": None,
        "aten::_fused_adamw_": "optimizer, gradient norms, clipping",
        "aten::_foreach_norm": "optimizer, gradient norms, clipping",
        "aten::native_layer_norm_backward": "norms",
        "autograd::engine::evaluate_function: NativeLayerNormBackward0": "norms",
        "autograd::engine::evaluate_function: MmBackward0": BETWEEN,
        "MmBackward0": BETWEEN,
        "torch::autograd::AccumulateGrad": BETWEEN,
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "windows",
        "aten::nll_loss_forward": "loss",
        "aten::_log_softmax": "loss",
        "aten::_safe_softmax": None,
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, true, false>": "loss",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u>": "norms",
        "aten::mul": None,
    }.items(),
)
def test_the_kind_of_an_operation(name: str, kind: str | None):
    assert profiling._kind(name) == kind


def test_a_profiled_run_has_the_record_of_one_that_is_not(run, capsys):
    words = ["steps=40", "val_every=20", "picture=false", "log_every=10", "accumulate=2", "model.dropout=0.1"]
    _, plain = run(*words)
    said = capsys.readouterr().out
    _, summary = run(*words, "profile=true")
    metrics = [(one["directory"] / "metrics.jsonl").read_bytes() for one in (plain, summary)]
    assert metrics[0] == metrics[1]
    assert "profiled step" not in said and not (plain["directory"] / "profile").exists()

    where = summary["directory"] / "profile"
    assert sorted(path.name for path in where.iterdir()) == ["table.txt", "trace.json"]
    events = json.loads((where / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"}
    # four matrices and two of the feed-forward, each once forward and twice back, in 2 layers, and the head's, twice a step
    assert sum(event["name"] == "aten::mm" for event in events) == 3 * 2 * (3 * (6 * 2 + 1))
    text = (where / "table.txt").read_text()
    assert text + f"profile: {where / 'trace.json'}\n" in capsys.readouterr().out
    assert "3 profiled steps on cpu" in text
    (mm,) = (line.split() for line in text.splitlines() if line.strip().startswith("aten::mm "))
    assert mm[-1] == "78"
    by_kind = text.partition("kind of work")[2].splitlines()[2:]
    assert sum(float(line.split()[-2]) for line in by_kind) == pytest.approx(100, abs=0.5)


def test_profiled_steps_do_not_count_into_the_speed(run, monkeypatch):
    timed, close = [], run_module.Recorder.close
    monkeypatch.setattr(
        run_module.Recorder, "close", lambda self: (timed.append((self._timed_steps, self._trained)), close(self))[1]
    )
    words = ["steps=40", "val_every=0", "save_every=0", "log_every=10", "picture=false"]
    run(*words)
    run(*words, "profile=true")
    assert [steps for steps, _ in timed] == [39, 30]  # steps 2 to 10 are left out, with the clock's start


def test_a_large_trace_is_compressed(run, monkeypatch):
    monkeypatch.setattr(profiling, "LARGE", 0)
    _, summary = run("steps=2", "picture=false", "profile=true")
    assert sorted(path.name for path in (summary["directory"] / "profile").iterdir()) == ["table.txt", "trace.json.gz"]
    trace = json.loads(gzip.decompress((summary["directory"] / "profile" / "trace.json.gz").read_bytes()))
    assert {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")} == {
        "ProfilerStep#0",
        "ProfilerStep#1",
    }


def test_a_run_that_ends_too_soon_says_so(run, capsys):
    _, summary = run(
        "steps=40", "picture=false", "patience=1", "optimizer.lr=1e38", "clip=0", "schedule=constant", "profile=true"
    )
    assert summary["verdict"] == "diverged" and summary["steps_done"] < 5
    assert "profile=true: the run ended before the steps to trace were taken" in capsys.readouterr().out


def test_a_trace_that_is_cut_short_is_none(run, monkeypatch, capsys):
    """After step 6 of the steps 5 to 7: the second step would be what is done at the end of a run."""
    original = Task.training_step

    def ending(task, *args):
        task.trainer.should_stop = task.trainer.global_step == 5
        return original(task, *args)

    monkeypatch.setattr(Task, "training_step", ending)
    _, summary = run("steps=9", "picture=false", "profile=true")
    assert summary["steps_done"] == 6 and not (summary["directory"] / "profile").exists()
    assert "profile=true: the run ended before the steps to trace were taken" in capsys.readouterr().out


def test_the_first_step_is_traced_without_the_validation_before_it(run):
    """In which the head's product is made once a validation batch, and never twice back."""
    _, summary = run("steps=1", "picture=false", "profile=true")
    text = (summary["directory"] / "profile" / "table.txt").read_text()
    (mm,) = (line.split() for line in text.splitlines() if line.strip().startswith("aten::mm "))
    assert mm[-1] == str(3 * (6 * 2 + 1))


def test_a_run_that_fails_leaves_no_profiler_running(run, monkeypatch):
    original = Task.training_step

    def broken(task, *args):
        if task.trainer.global_step == 5:
            raise ArithmeticError("as planned")
        return original(task, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "training_step", broken)
        with pytest.raises(RuntimeError, match="as planned"):
            run("steps=9", "picture=false", "profile=true")
    _, summary = run("steps=3", "picture=false", "profile=true")
    assert (summary["directory"] / "profile" / "table.txt").read_text().startswith("3 profiled steps")
