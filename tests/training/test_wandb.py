"""The keys that W&B is given, and a run that stays offline."""

import json
import struct
from collections.abc import Iterator

import pytest
import wandb

from training.wandb import WandbLog, _logged_in, flat


def record(depth: int) -> dict:
    layers = {part: [float(i) for i in range(1, depth + 1)] for part in ("attention", "ffn", "norm", "residual")}
    norms = {"total": 2.0, "embed": 0.5, "head": 0.25, **layers}
    return {"step": 3, "tokens": 30, "loss": 1.5, "lr": 0.1, "grad_norm": norms, "clip_coefficient": 0.5}


def test_it_never_asks_for_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for mode, environment in (("online", "offline"), ("auto", "online")):
        monkeypatch.setenv("WANDB_MODE", environment)
        with pytest.raises(ValueError, match=r"logger\.mode=online needs a key: `wandb login`"):
            WandbLog(tmp_path, "a name", {}, mode=mode)


@pytest.mark.parametrize("depth, layers, parted", [(2, 2, True), (32, 32, True), (33, 33, False), (128, 128, False), (1000, 128, False)])  # fmt: skip
def test_layers_are_numbered_and_few_enough_for_a_browser(depth: int, layers: int, parted: bool):
    keys = flat(record(depth))
    charts = sorted(key for key in keys if key.startswith("grad_norm/layer_") and key.count("/") == 1)
    assert len(charts) == layers
    assert charts[0] == "grad_norm/layer_0001" and charts[-1] == f"grad_norm/layer_{depth:04d}"
    assert keys["grad_norm/layer_0001"] == 2.0  # sqrt(4 * 1^2)
    assert ("grad_norm/layer_0001/attention" in keys) == parted
    assert (keys["loss/train"], keys["grad_norm/total"], keys["lr"], keys["tokens"]) == (1.5, 2.0, 0.1, 30)


def test_a_step_without_arrays_and_a_validation():
    assert flat({"step": 2, "tokens": 20, "loss": 1.0, "lr": 0.1, "grad_norm": {"total": 1.0}}) == {
        "loss/train": 1.0, "lr": 0.1, "tokens": 20, "grad_norm/total": 1.0,
    }  # fmt: skip
    assert flat({"step": 2, "tokens": 20, "val_loss": 1.0}) == {"loss/val": 1.0, "tokens": 20}


def test_online_only_where_a_key_is_at_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = "https://api.example.org"
    assert not _logged_in(server)
    (tmp_path / "netrc").write_text("machine api.example.org login user password key\n")
    (tmp_path / "netrc").chmod(0o600)
    assert _logged_in(server)
    assert not _logged_in("https://other.example.org")
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert _logged_in(server)


def chunks(file: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format (blocks of 32 KiB; checksum, length and type before each part) after
    a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", file[at : at + 7])
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_a_resumed_run_is_the_same_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for name in ("run", "run", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        log = WandbLog(tmp_path / name, "a name", {})
        ids.append(log.run.id)
        log.finish({}, 0)
    assert ids[0] == ids[1] != ids[2]


def test_an_offline_run_holds_every_value(tmp_path, monkeypatch):
    """Read back from the run's own file with W&B's own messages."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = WandbLog(tmp_path, "a name", {"seed": 3, "norm": {"eps": 1e-6}})
    log.record(record(2))
    log.record({"step": 4, "tokens": 40, "val_loss": 1.25})
    log.finish({"verdict": "stable"}, 0)
    wandb.teardown()  # as at the end of the process: W&B's own process then has written everything
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    history, settings = {}, {}
    for data in chunks(path.read_bytes()):
        message = messages.Record()
        message.ParseFromString(data)
        for item in message.history.item:
            history["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        for item in message.run.config.update:
            settings[item.key] = json.loads(item.value_json)
    assert history["loss/train"] == 1.5 and history["loss/val"] == 1.25
    assert history["grad_norm/layer_0002/ffn"] == 2.0
    assert history["_step"] == 4
    assert settings["seed"] == 3
