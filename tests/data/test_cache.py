"""The cache under what runs do to it together, when they are killed, and when the disk is full."""

import ast
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pytest

from data.corpus import Corpus
from data.hub import Hub
from data.tokenizer import Bpe, Byte
from data.tokens import Tokens, prepare

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"line {i} of a text that several runs want at once\n" for i in range(2000))

# One process: `python -c RACER corpus vocab slow`, with vocab 0 for bytes; it starts when a line comes in.
RACER = """
import json, signal, sys, time
import data.cache
from data.corpus import Files
from data.tokenizer import Bpe, Byte
from data.tokens import prepare

data.cache.PATIENCE = 0.1
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
path, vocab, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
tokenizer = Bpe(vocab) if vocab else Byte()
encode_all = tokenizer.encode_all

def slowly(documents):
    for ids in encode_all(documents):
        yield ids
        time.sleep(slow)

tokenizer.encode_all = slowly
print("ready", flush=True)
sys.stdin.readline()
tokens = prepare(Files([path]), tokenizer, context=8)
print(json.dumps([tokens.notes, tokens.train.tolist(), tokens.val.tolist()]))
"""


class Given(Corpus):
    """A corpus from documents and a validation of its own; `broken` comes after as many readings as it says."""

    def __init__(self, documents: list[str], own: list[str], broken: int = 1 << 30):
        super().__init__("given", 0.1, 8)
        self.given, self.own, self.left = documents, own, broken

    def read(self) -> Iterator[tuple[str, str]]:
        self.left -= 1
        yield from (("", text) for text in self.given)
        if self.left < 0:
            raise OSError(5, "Input/output error", "/far/away")

    def validation(self) -> Iterator[str] | None:
        return iter(self.own)


@pytest.fixture
def racer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that is ready to prepare a corpus; none outlives the test."""
    processes = []

    def ready(cache: Path, corpus: Path, vocab: int = 0, slow: float = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", RACER, str(corpus), str(vocab), str(slow)],
            env=os.environ | {"NORMLAB_CACHE": str(cache), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        return process

    yield ready
    for process in processes:
        process.kill()
        process.communicate(timeout=20)


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> tuple[list[str], list[int], list[int], str]:
    """(The notes, the training ids, the validation ids, what stood on stderr) of a racer that succeeded."""
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 0, complained
    return *json.loads(said), complained


def made(notes: list[str]) -> bool:
    (line,) = (note for note in notes if note.startswith("tokens: "))
    assert ("made now" in line) != ("found" in line)
    return "made now" in line


def wait_for(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def entries(cache: Path) -> dict[str, bytes]:
    """The files of all entries; nothing else may stand in the cache but the empty files that are locked."""
    files = {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert not list(cache.rglob(".partial*"))
    assert not any(content for name, content in files.items() if name.endswith(".lock"))
    return {name: content for name, content in files.items() if not name.endswith(".lock")}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "a.txt"


# Together


def test_of_four_at_once_one_makes_the_tokens_and_all_have_them(tmp_path: Path, text: Path, racer):
    processes = [racer(tmp_path / "cache", text, slow=0.7) for _ in range(4)]  # twice: once a side
    go(*processes)
    answers = [answer(process) for process in processes]
    assert sum(made(notes) for notes, *_ in answers) == 1
    assert all(one[1:3] == answers[0][1:3] for one in answers)
    assert bytes(i for side in answers[0][1:3] for i in side if i < 256).decode() == TEXT
    for notes, _, _, complained in answers:
        assert complained.count("another run is preparing this text; waiting") == (not made(notes))
        assert complained.count("\n") == (not made(notes))
    assert {Path(name).name for name in entries(tmp_path / "cache")} == {
        "train.bin",
        "val.bin",
        "tokenizer.json",
        "meta.json",
    }


def test_other_texts_and_tokenizers_do_not_wait_for_each_other(tmp_path: Path, text: Path, racer):
    (tmp_path / "b.txt").write_text(TEXT.replace("a", "b"))
    wanted = [(text, 0), (text, 300), (text, 320), (tmp_path / "b.txt", 0)]
    processes = [racer(tmp_path / "cache", path, vocab, slow=0.7) for path, vocab in wanted]
    go(*processes)
    answers = [answer(process) for process in processes]
    assert [made(notes) for notes, *_ in answers] == [True] * 4
    assert [complained for *_, complained in answers] == [""] * 4
    assert len({tuple(train) for _, train, *_ in answers}) == 4
    assert len(entries(tmp_path / "cache")) == 16


def test_who_waits_takes_over_from_a_killed_process_and_may_be_interrupted(tmp_path: Path, text: Path, racer):
    cache = tmp_path / "cache"
    builder, waiter, impatient = racer(cache, text, slow=100), racer(cache, text), racer(cache, text)
    go(builder)
    wait_for(lambda: list(cache.glob(".partial-*/train.bin")))
    go(waiter, impatient)
    assert "waiting" in impatient.stderr.readline()
    impatient.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in impatient.communicate(timeout=20)[1]
    assert impatient.returncode
    assert "waiting" in waiter.stderr.readline()
    assert builder.poll() is None and waiter.poll() is None
    builder.kill()
    builder.communicate(timeout=20)
    notes, train, val, complained = answer(waiter)
    assert made(notes)
    assert not complained
    assert not any("damaged" in note for note in notes)
    assert bytes(i for i in train + val if i < 256).decode() == TEXT
    assert len(entries(cache)) == 4


def test_the_rows_of_the_hub_are_fetched_once(tmp_path: Path, monkeypatch):
    """Two threads, each with a descriptor of its own, are to the kernel's lock what two processes are."""
    import threading

    calls = []

    def load_dataset(*_, **__):
        calls.append(time.sleep(0.3))
        return datasets.Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr("data.hub._reach_hub", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    rows: list[list[str]] = []
    threads = [threading.Thread(target=lambda: rows.append([*Hub("a/b", rows=2).documents()])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == [["one", "two"]] * 3
    assert len(calls) == 1
    assert len(entries(tmp_path)) == 1


def test_a_finished_entry_is_used_without_a_lock(tmp_path: Path, monkeypatch):
    prepare(Given(["abcd"], ["abc"]), Byte(), context=2, cache=tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    monkeypatch.setattr("data.tokens.making", None)  # a folder that may only be read
    assert not made(prepare(Given(["abcd"], ["abc"]), Byte(), context=2, cache=tmp_path).notes)
    assert not list(tmp_path.glob("*.lock"))


def test_all_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch):
    events: list[str] = []
    rename = os.rename
    monkeypatch.setattr("os.fsync", lambda fd: events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr("os.rename", lambda a, b: (events.append("rename"), rename(a, b)))
    prepare(Given(["abcd"], ["abc"]), Byte(), context=2, cache=tmp_path)
    assert events[-1] == "rename"
    assert set(events[:-1]) == {"train.bin", "val.bin", "tokenizer.json", "meta.json"}


# A full disk


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name, documents, own, make",
    [
        ("train.bin", ["a" * 500_000], ["bc"], Byte),
        ("val.bin", ["a" * 3000], ["b" * 500_000], Byte),
        ("tokenizer.json", ["ab"], ["bc"], Bpe),
        ("meta.json", ["ab"], ["bc"], Byte),
    ],
)
def test_a_full_disk_is_said_in_one_line_and_harms_nothing(tmp_path: Path, name: str, documents, own, make):
    def prepared(cache: Path) -> Tokens:
        return prepare(Given(documents, own), make(), context=1, cache=cache)

    prepared(tmp_path / "roomy")
    sizes = {Path(path).name: len(content) for path, content in entries(tmp_path / "roomy").items()}
    order = ["train.bin", "val.bin", "tokenizer.json", "meta.json"]
    assert all(sizes[before] < sizes[name] for before in order[: order.index(name)]), "it is not the first that fails"
    cache = tmp_path / "cache"
    prepare(Given(["earlier"], ["later"]), Byte(), context=1, cache=cache)
    earlier = entries(cache)
    with room_for(sizes[name] - 1):
        message = refused(lambda: prepared(cache))
    assert message == (
        f"cache {cache}: File too large; set the environment's NORMLAB_CACHE to a folder that can be written and has "
        "space"
    )
    assert entries(cache) == earlier
    assert made(prepared(cache).notes)
    assert len(entries(cache)) == 8


def test_a_small_disk_fills_up_and_has_room_again(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk in memory")
    try:
        prepare(Given(["earlier"], ["later"]), Byte(), context=1, cache=disk)
        earlier = entries(disk)
        large = Given(["a" * 100_000], ["b" * 1000])
        assert f"cache {disk}: No space left on device; set" in refused(
            lambda: prepare(large, Byte(), context=1, cache=disk)
        )
        assert entries(disk) == earlier
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        assert made(prepare(large, Byte(), context=1, cache=disk).notes)
        assert entries(disk).items() > earlier.items()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_no_room_for_the_rows_of_the_hub(tmp_path: Path, monkeypatch):
    rows = datasets.Dataset.from_dict({"text": ["one" * 10_000, "two"]})
    monkeypatch.setattr("data.hub._reach_hub", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows.to_iterable_dataset())
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    with room_for(20_000):
        message = refused(lambda: list(Hub("a/b", rows=2).documents()))
    for words in ("data.path=a/b", str(tmp_path / "hub"), "File too large", "NORMLAB_CACHE"):
        assert words in message
    assert not entries(tmp_path)
    assert list(Hub("a/b", rows=2).documents()) == ["one" * 10_000, "two"]


@pytest.mark.parametrize("readings", range(3), ids=["split", "fit", "encode"])
def test_an_error_in_reading_is_not_laid_at_the_cache_s_door(tmp_path: Path, readings: int):
    corpus = Given(["some text"], ["more"], broken=readings)
    message = refused(lambda: prepare(corpus, Bpe(300), context=1, cache=tmp_path))
    assert message == "data: given cannot be read: [Errno 5] Input/output error: '/far/away'"
    assert not entries(tmp_path)


def test_a_stream_that_breaks_off_is_not_laid_at_the_cache_s_door(tmp_path: Path, monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("reset by peer")  # an OSError, like a full disk

    monkeypatch.setattr("data.hub._reach_hub", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    message = refused(lambda: list(Hub("a/b", rows=2).documents()))
    assert "the stream broke off: ConnectionError: reset by peer" in message
    assert "NORMLAB_CACHE" not in message
    assert not entries(tmp_path)


# What names and files can do


@pytest.mark.parametrize("name", ["../../up/and/away", "{}/absolute", "a\x00b/../c"])
def test_nothing_is_written_outside_the_cache(tmp_path: Path, monkeypatch, name: str):
    cache, name = tmp_path / "deep" / "er" / "cache", name.format(tmp_path)

    def load_dataset(*_, split, **__):
        return datasets.Dataset.from_dict({"text": [f"one of {split}", "two"]}).to_iterable_dataset()

    monkeypatch.setattr("data.hub._reach_hub", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setenv("NORMLAB_CACHE", str(cache))
    hub = Hub(name, config=name, split=name, val_split=f"{name}/other", rows=2, options={"revision": name})

    class Named(Byte):
        def identity(self) -> str:
            return name

    prepare(hub, Named(), context=1)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 4 + 1 + 2 * 2
    assert all(path.is_relative_to(cache) for path in written)
    parts = {part for path in written for part in path.relative_to(cache).parts}
    hashes = {Path(part).stem for part in parts} - {"hub", "train", "val", "tokenizer", "meta"}
    assert len(hashes) == 3
    assert all(len(part) == 16 and int(part, 16) >= 0 for part in hashes)


def test_rows_of_this_machine_are_not_kept(tmp_path: Path, monkeypatch):
    """They may be edited, and `./set` is another folder elsewhere."""
    monkeypatch.setattr("data.hub._reach_hub", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    for content in ("one", "another"):
        (tmp_path / "set" / "input.txt").write_text(content)
        assert list(Hub("./set", rows=1).documents()) == [content]
        asked = Hub("text", rows=1, options={"data_files": str(tmp_path / "set" / "input.txt")})
        assert list(asked.documents()) == list(asked.documents()) == [content]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True},
        {"trust_remote_code": False},
        {"download_config": {"trust_remote_code": True}},
        {"data_files": [{"deep": {"trust_remote_code": True}}]},
    ],
)
def test_code_of_a_dataset_is_trusted_nowhere(options):
    assert "data.options.trust_remote_code" in refused(lambda: Hub("a/b", options=options))


def test_a_folder_with_a_script_runs_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("data.hub._reach_hub", lambda: False)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "data.path=" in refused(lambda: list(Hub(str(tmp_path / "set")).documents()))
    assert not (tmp_path / "ran").exists()


def test_data_holds_nothing_that_runs_what_it_reads():
    banned = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "importlib.util"}
    calls = {"eval", "exec", "compile", "__import__", "read_pickle", "loads_pickle", "unsafe_load"}
    for path in sorted((ROOT / "data").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & banned, where
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in banned, where
            elif isinstance(node, ast.Call):
                owner = (
                    node.func.value.id
                    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
                    else ""
                )
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert called not in calls or owner == "re", where
                assert called != "load" or owner not in ("np", "numpy", "torch", "yaml"), (
                    f"{where}: np.load reads pickles"
                )
            elif isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", where


def test_a_pickle_in_the_cache_is_a_damaged_entry(tmp_path: Path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    whole = np.array(prepare(Given(["abcd"], ["abc"]), Byte(), context=2, cache=tmp_path).train)
    for name in ("meta.json", "tokenizer.json"):
        next(tmp_path.glob(f"*/{name}")).write_bytes(pickle.dumps(Bomb()))
        again = prepare(Given(["abcd"], ["abc"]), Byte(), context=2, cache=tmp_path)
        assert made(again.notes)
        assert (again.train == whole).all()
    assert not (tmp_path / "ran").exists()
