"""What is read, what is refused, and in which words."""

import importlib
import json
import math
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import yaml

from data.corpus import Files, Python
from data.hub import Hub
from data.synthetic import Synthetic

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")


def refusal(call, *words: str) -> str:
    """The message of the ValueError that `call` raises: one line that holds all the words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return message


def read(**knobs) -> list[str]:
    return list(Files(**knobs).documents())


# Every choice in conf/data


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "data").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_choice_says_what_it_is_and_is_built_from_its_knobs(path: Path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines[0]) < 110
    knobs = yaml.safe_load("\n".join(lines))
    module, name = knobs.pop("_target_").rsplit(".", 1)
    build = getattr(importlib.import_module(module), name)
    if path.stem == "files":
        refusal(lambda: build(**knobs), "data.paths=[")
    elif path.stem == "hub":
        refusal(lambda: build(**knobs), "data.path=")
    else:
        corpus = build(**knobs)
        assert corpus.name
        assert (corpus.val_fraction, corpus.val_windows) == (knobs["val_fraction"], knobs["val_windows"])


@pytest.mark.parametrize("fraction", [0, -0.1, 0.51, math.nan])
def test_val_fraction_out_of_range_is_refused(fraction: float):
    refusal(lambda: Python(val_fraction=fraction), "data.val_fraction", str(fraction))
    assert Python(val_fraction=0.5).val_fraction == 0.5
    refusal(lambda: Python(val_windows=0), "data.val_windows=0")


def test_starting_up_imports_no_heavy_library():
    import subprocess

    code = "import sys, data.tokens, data.hub, data.synthetic; print({'torch', 'datasets', 'tokenizers', 'tqdm'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"


# The standard library


def test_python_is_the_library_without_its_tests(tmp_path, monkeypatch):
    for name, text in {
        "b.py": b"x = 1\r\n",
        "a/z.py": b"# -*- coding: latin-1 -*-\n# caf\xe9\n",
        "a/broken.py": b"# caf\xe9\n",
        "a/empty.py": b"",
        "test/t.py": b"t",
        "a/tests/t.py": b"t",
        "a/site-packages/t.py": b"t",
        "a/test_not_a_folder.py": b"kept",
        "notes.txt": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    corpus = Python()
    expected = ["kept", "# -*- coding: latin-1 -*-\n# café\n", "x = 1\r\n"]
    assert list(corpus.documents()) == list(corpus.documents()) == expected
    assert corpus.dropped == {"undecodable": 1, "blank": 1}


def test_python_on_this_machine_is_a_few_megabytes():
    documents = list(Python().documents())
    assert len(documents) > 300
    assert 5e6 < sum(map(len, documents)) < 5e7


# Files


@pytest.mark.case("D08 nshepperd/gpt-2 PR #39")
@needs_cases
@pytest.mark.parametrize("name, byte", [("latin1.txt", "byte 3 "), ("truncated_utf8.txt", "byte 36 ")])
def test_what_is_not_utf8_is_refused_with_file_and_byte(name: str, byte: str):
    refusal(lambda: read(paths=[CASES / name]), "data.paths", name, byte, "data.encoding=latin-1")


@needs_cases
@pytest.mark.parametrize(
    "encoding, read", [("utf-8-sig", True), ("latin-1", True), ("utf-16", False), ("utf-32-le", False)]
)
def test_json_lines_need_an_encoding_whose_lines_are_bytes(tmp_path, encoding: str, read: bool):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n', encoding=encoding)
    corpus = Files([str(path)], encoding=encoding)
    if read:
        assert list(corpus.documents()) == ["one", "two"]
    else:
        with pytest.raises(ValueError, match=f"lines.jsonl: JSON lines in {encoding} are not read: convert"):
            list(corpus.documents())


def test_the_encoding_can_be_given(tmp_path: Path):
    (tmp_path / "latin1.txt").write_bytes("café naïve\n".encode("latin-1"))
    (text,) = read(paths=[str(tmp_path / "latin1.txt")], encoding="latin-1")
    assert text.startswith("café naïve")
    refusal(lambda: Files(paths=["x"], encoding="utf-9"), "data.encoding", "utf-9")


@pytest.mark.case("D07 huggingface/datasets#870")
@needs_cases
@pytest.mark.parametrize("name", ["nul_control.txt", "special_tokens.txt", "tiny_vocab.txt", "wide_alphabet.txt"])
def test_text_is_kept_byte_for_byte(name: str):
    (text,) = read(paths=[str(CASES / name)])
    assert text.encode() == (CASES / name).read_bytes()


@pytest.mark.case("D07")
def test_line_ends_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n\n")
    assert read(paths=[str(tmp_path / "a.txt")]) == ["\ufeffa\r\nb\rc\n\n"]


@pytest.mark.case("D16")
@needs_cases
@pytest.mark.parametrize("name", ["empty.txt", "blank_only.txt"])
def test_blank_documents_are_dropped_and_counted(name: str):
    corpus = Files(paths=[str(CASES / name)])
    assert list(corpus.documents()) == list(corpus.documents()) == []
    assert corpus.dropped == {"blank": 1}
    assert name in corpus.describe_dropped()


@pytest.mark.case("D16 huggingface/datasets, own measurement")
@needs_cases
def test_a_json_line_without_text_is_refused_or_skipped_and_counted():
    path = str(CASES / "mixed_docs.jsonl")
    refusal(lambda: read(paths=[path]), "mixed_docs.jsonl:4:", "null", "data.skip_bad=true")
    corpus = Files(paths=[path], skip_bad=True)
    assert list(corpus.documents()) == [f"{n} real document" for n in ("first", "second", "third")]
    assert corpus.dropped == {"blank": 3, "bad line": 3}
    for line in (2, 3, 4, 5, 7, 8):
        assert f"mixed_docs.jsonl:{line}" in corpus.describe_dropped()


@pytest.mark.case("D08", "D16")
@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"text": "open', ["not JSON"]),
        (b'["text"]', ["list"]),
        (b'{"body": "x"}', ["'text'", "data.text_key", "'body'"]),
        (json.dumps(dict.fromkeys("abcdefghij")).encode(), ["among 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', ...;"]),
        (b'{"text": 42}', ["int"]),
        (b'{"text": "\\ud800"}', ["surrogate"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"text": "caf\xe9"}', ["byte 30 ", "not utf-8"]),
    ],
)
def test_the_reason_and_the_line_are_named(tmp_path, line: bytes, words: list[str]):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    refusal(lambda: read(paths=[str(tmp_path / "a.jsonl")]), "data.paths", "a.jsonl:2:", *words)


def test_globs_are_sorted_and_descend_and_no_file_is_read_twice(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = Files(paths=[f"{tmp_path}/deep/er/c.txt", f"{tmp_path}/**/*.txt"])
    assert list(corpus.documents()) == ["deep/er/c.txt", "a.txt", "b.txt"]
    assert corpus.dropped == {"file named twice": 1}
    refusal(lambda: read(paths=[f"{tmp_path}/*.md"]), "data.paths", "*.md", "no such file")
    refusal(lambda: read(paths=[str(tmp_path)]), "data.paths", str(tmp_path), "directory")
    refusal(lambda: Files(paths="a.txt"), "data.paths=[a.txt]")  # type: ignore[arg-type]
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    refusal(lambda: read(paths=[f"{tmp_path}/*.txt"]), "data.paths", "gone.txt: No such file")


# The Hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """load_dataset answers from these rows; the list holds its calls."""
    calls: list[dict] = []
    splits = {"train": ["one", " ", "two"], "validation": ["three"], "holes": ["one", None]}

    def load_dataset(path, name=None, *, split, streaming, **options):
        calls.append({"path": path, "name": name, "split": split, "streaming": streaming, **options})
        rows = datasets.Dataset.from_dict({"text": splits[split], "other": splits[split]})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr("data.hub._reach_hub", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    return splits, calls


def test_hub_rows_are_documents(hub):
    corpus = Hub("some/set", config="c", val_split="validation", options={"revision": "r"})
    assert list(corpus.documents()) == list(corpus.documents()) == ["one", "two"]
    assert list(corpus.validation() or ()) == ["three"]
    assert corpus.dropped == {"blank": 1}
    assert hub[1][0] == {"path": "some/set", "name": "c", "split": "train", "streaming": False, "revision": "r"}
    assert Hub("some/set").validation() is None


def test_the_first_rows_are_streamed_once_and_kept(hub, tmp_path):
    assert list(Hub("some/set", rows=1).documents()) == ["one"]
    assert list(Hub("some/set", rows=1).documents()) == ["one"]
    assert list(Hub("some/set", rows=3).documents()) == ["one", "two"]
    assert [call["streaming"] for call in hub[1]] == [True, True]
    assert not list(tmp_path.glob("**/.partial-*"))


def test_lines_are_joined_to_articles(hub):
    opens = yaml.safe_load((ROOT / "conf" / "data" / "wikitext103.yaml").read_text())["opens"]
    lines = [
        "",
        " = Robert Boulter = \n",
        "",
        " Actor . \n",
        " = = Career = = \n",
        " 2 = 1 + 1 \n",
        " = Du Fu = \n",
        " Poet \n",
    ]
    hub[0]["train"] = lines
    documents = list(Hub("wiki", opens=opens).documents())
    assert documents == ["".join(lines[1:6]), "".join(lines[6:])]


def test_hub_refusals_name_the_key(hub):
    refusal(lambda: list(Hub("some/set", split="holes").documents()), "holes[1]", "null", "data.skip_bad")
    corpus = Hub("some/set", split="holes", skip_bad=True)
    assert list(corpus.documents()) == ["one"]
    assert corpus.dropped == {"bad row": 1}
    refusal(lambda: list(Hub("some/set", text_key="body").documents()), "data.text_key=body", "text, other")
    refusal(lambda: list(Hub("some/set", split="tset").documents()), "data.path=some/set", "tset", "data=python")
    refusal(lambda: Hub("some/set", options={"trust_remote_code": True}), "trust_remote_code")
    refusal(lambda: Hub("pandas"), "data.path=pandas", "pickles")
    refusal(lambda: Hub("some/set", opens="("), "data.opens")
    refusal(lambda: Hub("some/set", rows=0), "data.rows=0")


@pytest.mark.parametrize("rows", [None, 5])
def test_offline_is_said_within_seconds(monkeypatch, tmp_path, rows):
    def unreachable(*_, **__):
        raise OSError("Name or service not known")

    from huggingface_hub import constants

    # both are set by the code under test; setting them here puts them back afterwards
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path))
    start = time.monotonic()
    refusal(
        lambda: list(Hub("nobody/nothing", rows=rows).documents()),
        "data.path=nobody/nothing",
        "no network",
        "data=python",
    )
    assert time.monotonic() - start < 5


@pytest.mark.case("D07")
def test_a_plain_text_file_of_a_dataset_keeps_its_lines(monkeypatch, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "input.txt").write_text("First Citizen:\n\nSpeak, speak.\n")
    knobs = yaml.safe_load((ROOT / "conf" / "data" / "shakespeare.yaml").read_text())
    monkeypatch.setattr("data.hub._reach_hub", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = Hub(str(tmp_path / "set"), options={**knobs["options"], "cache_dir": str(tmp_path / "cache")})
    assert list(corpus.documents()) == ["First Citizen:\n\nSpeak, speak.\n"]


# The chain


def test_the_floor_is_the_entropy_rate():
    corpus = Synthetic(symbols=3, concentration=0.5, tokens=200_000, seed=4)
    (text,) = corpus.documents()
    (more,) = corpus.validation()
    assert (len(text), len(more)) == (200_000, 10_000)
    ids = np.frombuffer(text.encode(), np.uint8) - 33
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    given = pairs / pairs.sum(1, keepdims=True)
    assert np.abs(given - corpus.transition).max() < 0.02
    # the plug-in estimate is off by about 1/sqrt(200,000) times the spread of -ln p, which is near 1
    assert -(pairs * np.log(given)).sum() / pairs.sum() == pytest.approx(corpus.floor, abs=0.01)


def test_uniform_characters_have_the_logarithm_for_a_floor():
    assert Synthetic(symbols=94, concentration=None, tokens=10).floor == pytest.approx(math.log(94))


def test_the_text_is_a_function_of_the_seed():
    def text(seed: int) -> str:
        return next(Synthetic(tokens=500, seed=seed).documents())

    assert text(1) == text(1) != text(2)
    corpus = Synthetic(tokens=500, seed=1)
    list(corpus.validation())
    assert list(corpus.documents()) == list(corpus.documents()) == [text(1)]
    for knobs in ({"symbols": 1}, {"symbols": 95}, {"concentration": 0}, {"tokens": 0}, {"seed": -1}):
        refusal(lambda knobs=knobs: Synthetic(**knobs), f"data.{next(iter(knobs))}")


def test_kept_rows_are_json_lines(hub, tmp_path):
    list(Hub("some/set", rows=2).documents())
    (kept,) = (tmp_path / "hub").glob("*.jsonl")
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ["one", " "]
    kept.write_text('"one"\n"tw')
    refusal(lambda: list(Hub("some/set", rows=2).documents()), "data.path=some/set", str(kept), "line 2", "delete")
