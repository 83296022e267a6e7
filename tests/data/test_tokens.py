"""Splits, token files, and a cache that is neither stale nor trusted blindly."""

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus, Files
from data.split import TRAIN, VAL, make_split, texts
from data.synthetic import Synthetic
from data.tokenizer import Bpe, Byte
from data.tokens import Tokens, dtype_for, entropy, narrow, prepare

CASES = Path(__file__).parents[3] / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")


class Listed(Corpus):
    """A corpus from lists."""

    def __init__(self, documents: list[str], validation: list[str] | None = None, val_fraction: float = 0.1):
        super().__init__("listed", val_fraction, 8)
        self.listed, self.own = documents, validation

    def read(self) -> Iterator[tuple[str, str]]:
        return (("", text) for text in self.listed)

    def validation(self) -> Iterator[str] | None:
        return None if self.own is None else iter(self.own)


class Counting(Byte):
    """Counts the documents that it encodes."""

    encoded = 0

    def encode(self, text: str) -> np.ndarray:
        self.encoded += 1
        return super().encode(text)


def documents_of(ids: np.ndarray, tokens: Tokens) -> list[str]:
    """The documents between the end tokens; the last one must have ended."""
    assert len(ids) == 0 or ids[-1] == tokens.end
    ends = np.flatnonzero(ids == tokens.end)
    return [tokens.tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]


def sides(corpus: Corpus) -> tuple[list[str], list[str], str]:
    split = make_split(corpus)
    return list(texts(corpus, split, TRAIN)), list(texts(corpus, split, VAL)), split.rule


MANY = [f"document {i}\n" + "text " * (i % 7) for i in range(200)]


# The split


def test_documents_are_split_whole_and_near_the_fraction():
    train, val, rule = sides(Listed(MANY))
    assert sorted(train + val) == sorted(MANY)
    assert not set(train) & set(val)
    assert sum(map(len, val)) / sum(map(len, MANY)) == pytest.approx(0.1, abs=0.005)
    assert rule.startswith("whole documents")
    assert train == [text for text in MANY if text in set(train)], "the order is the corpus's"


def test_a_document_does_not_change_sides_with_its_place():
    _, val, _ = sides(Listed(MANY))
    _, shuffled, _ = sides(Listed(MANY[::-1]))
    assert set(val) == set(shuffled)


def test_identical_documents_stay_together():
    train, val, _ = sides(Listed(MANY + MANY[:150]))
    assert not set(train) & set(val)
    assert len(train) + len(val) == 350


def test_one_long_document_gives_its_last_part():
    text = "".join(chr(0x3B1 + i % 20) for i in range(1000))  # two bytes each, so that a cut may fall between them
    train, val, rule = sides(Listed([text], val_fraction=0.0333))
    assert "".join(train + val) == text
    assert len(val[0]) == pytest.approx(33, abs=1)
    assert rule.startswith("the last 3.33% of the text")


def test_the_last_part_may_be_several_documents_and_never_a_copy():
    long, small = "x" * 10_000, ["aaaa", "bbbb", "aaaa"]
    train, val, rule = sides(Listed([long, long, *small], val_fraction=0.1))
    assert "".join(train + val) == long + "aaaabbbb"
    assert val[1:] == ["aaaa", "bbbb"]
    assert "2 copies" in rule


def test_a_cut_between_documents_leaves_both_whole(tmp_path):
    tokens = prepare(Listed(["a" * 900] + ["b" * 100] * 4), Byte(), context=4, cache=tmp_path)
    assert "3 copies" in tokens.notes[1], "four copies are 31%, so that whole documents are no tenth"
    assert documents_of(tokens.train, tokens) == ["a" * 900]
    assert documents_of(tokens.val, tokens) == ["b" * 100]


def test_a_document_that_is_cut_ends_once(tmp_path):
    tokens = prepare(Listed(["a" * 100, "b" * 900]), Byte(), context=4, cache=tmp_path)
    if tokens.notes[1].startswith("validation: the last"):
        pytest.fail("100 of 1000 bytes are a tenth")
    tokens = prepare(Listed(["a" * 10, "b" * 990]), Byte(), context=4, cache=tmp_path)
    assert (tokens.train == tokens.end).sum() == 1, "the first document's"
    assert tokens.train[-1] == ord("b")
    assert documents_of(tokens.val, tokens) == ["b" * 100]
    assert len(tokens.train) + len(tokens.val) == 1002


def test_no_document_is_cut_inside_its_first_character():
    assert sides(Listed(["a" * 96, "\U0001f600"], val_fraction=0.015))[:2] == (["a" * 96], ["\U0001f600"])


def test_an_own_validation_is_used_and_taken_out_of_training():
    train, val, rule = sides(Listed(["a", "b", "c", "b"], ["b", "d"]))
    assert (train, val) == (["a", "c"], ["b", "d"])
    assert "2 training documents" in rule


@pytest.mark.case("D16")
@pytest.mark.parametrize("corpus", [Listed([]), Listed([" ", "\n"]), Listed([], ["a"])])
def test_a_corpus_without_documents_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="data: listed has 0 documents"):
        prepare(corpus, Byte(), context=1, cache=tmp_path)
    with pytest.raises(ValueError, match=r"data\.val_split.*0 documents"):
        prepare(Listed(["a"], []), Byte(), context=1, cache=tmp_path)


@pytest.mark.case("D16")
@needs_cases
@pytest.mark.parametrize("name", ["empty.txt", "blank_only.txt"])
def test_blank_files_are_refused_with_a_count(name, tmp_path):
    with pytest.raises(ValueError, match=rf"data\.paths.*{name}.*0 documents: 1 blank"):
        prepare(Files([str(CASES / name)]), Byte(), context=1, cache=tmp_path)


@needs_cases
def test_a_text_that_is_too_short_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"model\.context=100000: .*short\.txt has 21 tokens, and 100001 are needed"):
        prepare(Files([str(CASES / "short.txt")]), Byte(), context=100_000, cache=tmp_path)
    with pytest.raises(ValueError, match=r"model\.context=10: the validation part .* 2 tokens, and 11 .*val_fraction"):
        prepare(Files([str(CASES / "short.txt")]), Byte(), context=10, cache=tmp_path)


def test_one_window_is_enough(tmp_path):
    prepare(Listed(["abcdefgh"], ["abc"]), Byte(), context=3, cache=tmp_path)
    with pytest.raises(ValueError, match="has 4 tokens, and 5 are needed"):
        prepare(Listed(["abcdefgh"], ["abc"]), Byte(), context=4, cache=tmp_path)


# The tokens


@pytest.mark.case("D13 stanford-crfm/mistral#90, Lightning-AI/litgpt#706", "D10")
@needs_cases
@pytest.mark.parametrize("make", [Byte, lambda: Bpe(300)])
def test_every_document_ends_once(make, tmp_path):
    path = CASES / "ordered_docs.jsonl"
    written = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    tokens = prepare(Files([str(path)]), make(), context=16, cache=tmp_path)
    train, val = documents_of(tokens.train, tokens), documents_of(tokens.val, tokens)
    assert len(written) == len(train) + len(val) == 60
    assert set(train) | set(val) == set(written)
    assert not set(train) & set(val)
    assert train == [text for text in written if text in set(train)]


@pytest.mark.case("D16", "D11")
@needs_cases
def test_notes_count_what_was_left_out_and_what_was_asked(tmp_path):
    corpus = Files([str(CASES / "mixed_docs.jsonl")], skip_bad=True, val_fraction=0.3)
    notes = "\n".join(prepare(corpus, Bpe(5000), context=2, cache=tmp_path).notes)
    assert "2 documents" in notes
    assert "3 blank" in notes
    assert "3 bad line" in notes
    assert "asked for 5000" in notes


@pytest.mark.case("D01 huggingface/transformers#2825", "L10")
@needs_cases
def test_ids_never_wrap():
    case = json.loads((CASES / "ids_over_uint16.json").read_text())
    stored = narrow(np.array(case["ids"]), case["vocab_size"])
    assert stored.tolist() == case["right"]
    with pytest.raises(ValueError, match="131072"):
        narrow(np.array(case["ids"]), 131_072)
    with pytest.raises(ValueError, match="-1"):
        narrow(np.array([-1]), 10)
    assert (dtype_for(65_536), dtype_for(65_537)) == (np.uint16, np.uint32)


@pytest.mark.case("D01")
def test_a_tokenizer_with_wide_ids_is_stored_wide(tmp_path, monkeypatch):
    class Wide(Byte):
        vocab, end = 65_537, 65_536

        def identity(self) -> str:
            return "wide"

    monkeypatch.setattr("data.tokens.from_json", lambda _: Wide())
    tokens = prepare(Listed(MANY), Wide(), context=4, cache=tmp_path)
    assert tokens.train.dtype == np.uint32
    assert (tokens.train == 65_536).sum() + (tokens.val == 65_536).sum() == 200


def test_the_unigram_entropy_is_that_of_the_training_tokens(tmp_path):
    tokens = prepare(Listed(["ab", "abb"], ["cccc"]), Byte(), context=1, cache=tmp_path)
    p = np.array([2, 3, 2]) / 7  # a, b, end
    assert tokens.unigram_entropy == pytest.approx(-(p * np.log(p)).sum())
    assert entropy(np.array([4, 4, 0])) == pytest.approx(math.log(2))
    assert entropy(np.array([0, 0])) == 0


def test_the_floor_is_known_for_bytes_only(tmp_path):
    corpus = Synthetic(symbols=4, tokens=2000)
    byte = prepare(corpus, Byte(), context=8, cache=tmp_path)
    assert byte.floor == corpus.floor
    assert byte.floor < byte.unigram_entropy
    assert prepare(corpus, Bpe(300), context=8, cache=tmp_path).floor is None


def test_the_hash_is_the_content_s(tmp_path):
    def hash_of(documents, tokenizer=None, own=None):
        return prepare(Listed(documents, own), tokenizer or Byte(), context=1, cache=tmp_path).hash

    known = hash_of(MANY)
    assert len(known) == 16
    assert int(known, 16) >= 0
    assert known == hash_of(MANY) == hash_of(MANY, Bpe(300))
    assert known not in {
        hash_of(MANY[1:]),
        hash_of(MANY[::-1]),
        hash_of([*MANY, "x"]),
        hash_of(MANY[:-1], own=MANY[-1:]),
    }
    assert hash_of(["ab", "ab"], own=["c"]) == "9f2cb8f1f276139a", "the hash in old records would no longer be found"


# The cache


@pytest.mark.case("D03 huggingface/datasets#3178")
def test_the_second_run_tokenises_nothing(tmp_path):
    cold, warm = Counting(), Counting()
    first = prepare(Listed(MANY), cold, context=4, cache=tmp_path)
    second = prepare(Listed(MANY), warm, context=4, cache=tmp_path)
    assert (cold.encoded, warm.encoded) == (200, 0)
    (home,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert [note for note in first.notes if note not in second.notes] == [f"tokens: made now, kept in {home}"]
    assert [note for note in second.notes if note not in first.notes] == [f"tokens: found in {home}"]
    assert (first.train == second.train).all()
    assert not second.train.flags.writeable
    assert isinstance(second.train, np.memmap)
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.case("D04 OptimalScale/LMFlow PR #394")
def test_another_tokenizer_fraction_or_text_is_another_entry(tmp_path):
    def prepared(vocab: int = 300, fraction: float = 0.1, text: str = ""):
        corpus = Files([str(tmp_path / "a.txt")], val_fraction=fraction)
        return prepare(corpus, Bpe(vocab), context=4, cache=tmp_path / "cache")

    (tmp_path / "a.txt").write_text("".join(MANY))
    small, large = prepared(300), prepared(320)
    assert (small.vocab, large.vocab) == (300, 320)
    assert len(small.train) > len(large.train)
    assert len(prepared(fraction=0.3).val) > len(small.val)
    stamp = os.stat(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("".join(MANY).replace("1", "2"))
    os.utime(tmp_path / "a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    edited = prepared(300)
    assert edited.hash != small.hash
    assert "1" not in edited.tokenizer.decode(edited.train)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.json"])
def test_a_damaged_entry_is_made_again_and_remarked(name, tmp_path):
    whole = prepare(Listed(MANY), Byte(), context=4, cache=tmp_path)
    (file,) = tmp_path.glob(f"*/{name}")
    os.truncate(file, file.stat().st_size // 2)
    again = prepare(Listed(MANY), Byte(), context=4, cache=tmp_path)
    assert (np.array(again.train) == np.frombuffer(next(tmp_path.glob("*/train.bin")).read_bytes(), "<u2")).all()
    assert len(again.train) + len(again.val) == sum(map(len, MANY)) + 200
    assert any("was damaged and has been made again" in note for note in again.notes)
    assert not any("was damaged" in note for note in whole.notes)
    assert any(note.startswith("tokens: made now") for note in again.notes)


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, ""), OSError(errno.ENOSYS, "")])
def test_losing_the_race_is_no_harm(tmp_path, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("fcntl.flock", refuse)  # a folder on which locks do not exist

    class Slow(Byte):
        def fit(self, documents):
            prepare(Listed(MANY), Byte(), context=4, cache=tmp_path)  # another process, done first

    tokens = prepare(Listed(MANY), Slow(), context=4, cache=tmp_path)
    assert len(tokens.train) + len(tokens.val) == sum(map(len, MANY)) + 200
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_a_failure_leaves_nothing_behind(tmp_path):
    class Broken(Byte):
        def encode(self, text):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        prepare(Listed(MANY), Broken(), context=4, cache=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="NORMLAB_CACHE"):
        prepare(Listed(MANY), Byte(), context=4, cache=tmp_path / "file")


@pytest.mark.parametrize("edit", [lambda d: d.pop(), lambda d: d.append("more"), lambda d: d.__setitem__(3, "other")])
def test_a_corpus_that_changes_meanwhile_is_refused(edit, tmp_path):
    corpus = Listed(list(MANY))

    class Meddling(Byte):
        def fit(self, documents):
            edit(corpus.listed)

    with pytest.raises(ValueError, match="changed while it was read"):
        prepare(corpus, Meddling(), context=4, cache=tmp_path)


def test_the_environment_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "here"))
    prepare(Listed(MANY), Byte(), context=4)
    assert len(list((tmp_path / "here").glob("*/meta.json"))) == 1
