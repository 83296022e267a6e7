"""Round trips, the end token, real sizes."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from data.tokenizer import Bpe, Byte, Tokenizer, _pieces, from_json

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
AWKWARD = "a\r\nb\n\n\n  c\t<|endoftext|> \x00\x1b[31m \ufeff \U0001f600 é e\u0301 don't\n'll\n"


def fitted(name: str) -> Tokenizer:
    tokenizer: Tokenizer = Byte() if name == "byte" else Bpe(vocab=300)
    tokenizer.fit(iter(["low lower lowest\nnew newer newest <|endoftext|>\n"] * 4))
    return tokenizer


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request) -> Tokenizer:
    return fitted(request.param)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "tokenizer").glob("*.yaml")), ids=lambda p: p.stem)
def test_each_choice_says_what_it_is(path: Path):
    lines = path.read_text().splitlines()
    knobs = yaml.safe_load("\n".join(lines))
    assert lines[0].startswith("# ")
    built = {"data.tokenizer.Byte": Byte, "data.tokenizer.Bpe": Bpe}[knobs.pop("_target_")](**knobs)
    assert built.name == path.stem


@pytest.mark.case("D07", "D10")
@pytest.mark.parametrize("text", ["", "plain", AWKWARD, "".join(map(chr, range(0x300)))])
def test_decode_undoes_encode_and_no_text_makes_an_end(tokenizer: Tokenizer, text: str):
    for again in (tokenizer, from_json(tokenizer.to_json())):
        ids = again.encode(text)
        assert again.decode(ids) == text
        assert again.end not in ids
        assert ids.size == 0 or ids.max() < again.vocab
        assert (ids == tokenizer.encode(text)).all()
        assert (again.vocab, again.end, again.name) == (tokenizer.vocab, tokenizer.end, tokenizer.name)


@pytest.mark.case("D07", "D10 huggingface/transformers PR #25081")
@needs_cases
@pytest.mark.parametrize(
    "name",
    ["nul_control.txt", "special_tokens.txt", "tiny_vocab.txt", "wide_alphabet.txt", "short.txt", "ordered_docs.jsonl"],
)
def test_the_shared_texts_survive(tokenizer: Tokenizer, name: str):
    text = (CASES / name).read_bytes().decode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end not in ids


def test_an_end_is_nothing_and_half_a_character_a_replacement(tokenizer: Tokenizer):
    ids = tokenizer.encode("é")
    assert tokenizer.decode([*ids, tokenizer.end, *ids]) == "éé"
    byte = Byte()
    assert byte.decode(byte.encode("é")[:1]) == "\ufffd"
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer.decode([tokenizer.vocab])
    with pytest.raises(ValueError, match="surrogate"):
        Byte().encode("\ud800")


@pytest.mark.case("D11 google/sentencepiece#730")
@needs_cases
@pytest.mark.parametrize("asked, got", [(5000, 277), (100, 257)])
def test_the_real_size_is_known_and_said(asked: int, got: int):
    bpe = Bpe(vocab=asked)
    bpe.fit([(CASES / "tiny_vocab.txt").read_text()])
    assert bpe.vocab == got
    assert str(asked) in bpe.note()
    assert str(got) in bpe.note()


def test_a_size_that_was_met_is_not_remarked():
    assert fitted("bpe").vocab < 300
    bpe = Bpe(vocab=260)
    bpe.fit(["low lower lowest"])
    assert (bpe.vocab, bpe.note()) == (260, "")
    with pytest.raises(ValueError, match=r"tokenizer\.vocab=0"):
        Bpe(vocab=0)


def test_long_documents_in_pieces_have_the_same_tokens(monkeypatch):
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("abc19 \n\t'\r.é"), 20_000))
    pieces = list(_pieces(text, size=50))
    assert len(pieces) > 20
    assert "".join(pieces) == text
    bpe = Bpe(vocab=400)
    bpe.fit([text])
    whole = bpe.encode(text)
    monkeypatch.setattr("data.tokenizer._pieces", lambda _: iter(pieces))
    monkeypatch.setattr("data.tokenizer.BATCH", 100)
    assert [ids.tolist() for ids in bpe.encode_all([text, text])] == [whole.tolist()] * 2


def test_documents_keep_their_order_across_batches(monkeypatch, tokenizer: Tokenizer):
    monkeypatch.setattr("data.tokenizer.BATCH", 30)
    documents = [f"document {i}\n" * (i % 3) for i in range(20)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_all(iter(documents))] == documents


def test_an_error_in_the_documents_comes_through_training():
    def broken():
        yield "text"
        raise ValueError("data.paths: gone")

    with pytest.raises(ValueError, match="gone"):
        Bpe().fit(broken())


def test_something_else_is_not_a_tokenizer():
    for text in ("", "{}", '{"kind": "bpe", "asked": 300, "model": "x"}'):
        with pytest.raises(ValueError, match="not a stored tokenizer"):
            from_json(text)
