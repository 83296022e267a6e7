"""Text to token ids and back: bytes, or byte-level BPE trained on the corpus at hand.

Each has one id more than the text needs, `end`, which follows every document and which no text can produce.
"""

import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

BATCH = 1 << 22  # characters encoded at a time: enough for all cores, little beside the corpus


class Byte:
    """Token = byte of the UTF-8 text: ids 0..255, and 256 for the end of a document."""

    name = "byte"
    vocab = 257
    end = 256

    def fit(self, documents: Iterable[str]) -> None:
        """Nothing to learn; the documents are not read."""

    def identity(self) -> str:
        """What the ids depend on beside the text: part of the cache's key."""
        return "byte"

    def note(self) -> str:
        """A line for the user about what was asked and what came out; empty if they agree."""
        return ""

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, without an end token. Raises ValueError for half a surrogate pair, which is no text."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_all(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """`encode` of each document in turn."""
        return map(self.encode, documents)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; end tokens vanish, an incomplete UTF-8 sequence becomes U+FFFD. Raises ValueError for other ids."""
        ids = _checked(ids, self.vocab)
        return ids[ids != self.end].astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        """All that `from_json` needs to make it again."""
        return json.dumps({"kind": self.name})


class Bpe:
    """Byte-level byte-pair encoding, trained by `fit`; 256 bytes, the merges that were found, and the end token.

    Args:
        vocab: how many ids to aim for. After `fit`, `vocab` is how many there are: fewer where the text runs out of
            pairs, and never under 257.
    """

    name = "bpe"
    marker = "<|endoftext|>"

    def __init__(self, vocab: int = 4096):
        if vocab < 1:
            raise ValueError(f"tokenizer.vocab={vocab}: needs a number of tokens over 0, e.g. 4096")
        self.asked = self.vocab = vocab
        self.end = 0
        self._model: Any = None

    def fit(self, documents: Iterable[str]) -> None:
        """Learns the merges from the documents (reads them once)."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.asked,
            special_tokens=[self.marker],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with _Threads():
            # in pieces: the trainer takes each text in whole
            model.train_from_iterator((piece for text in documents for piece in _pieces(text)), trainer)
        self._use(model)

    def identity(self) -> str:
        """What the ids depend on beside the text: part of the cache's key."""
        return f"bpe {self.asked} {importlib.metadata.version('tokenizers')}"

    def note(self) -> str:
        """A line for the user about what was asked and what came out; empty if they agree."""
        return (
            ""
            if self.vocab == self.asked
            else f"tokenizer.vocab: asked for {self.asked}, got {self.vocab}; the model takes {self.vocab}"
        )

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, without an end token: a control token's name in it is text like any other."""
        return next(self.encode_all([text]))

    def encode_all(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """`encode` of each document in turn, `BATCH` characters at a time on all cores."""
        document: list[np.ndarray] = []
        for batch in _batches(documents):
            for ids, (_, last) in zip(self._encode_batch([piece for piece, _ in batch]), batch, strict=True):
                document.append(ids)
                if last:
                    yield np.concatenate(document)
                    document = []

    def _encode_batch(self, pieces: list[str]) -> Iterator[np.ndarray]:
        assert self._model is not None, "fit() comes first"
        with _Threads():
            encoded = self._model.encode_batch_fast(pieces, add_special_tokens=False)
        return (np.asarray(one.ids, dtype=np.uint32) for one in encoded)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; end tokens vanish, an incomplete UTF-8 sequence becomes U+FFFD. Raises ValueError for other ids."""
        assert self._model is not None, "fit() comes first"
        ids = _checked(ids, self.vocab)
        return self._model.decode(ids[ids != self.end].tolist(), skip_special_tokens=False)

    def to_json(self) -> str:
        """All that `from_json` needs to make it again."""
        assert self._model is not None, "fit() comes first"
        return json.dumps({"kind": self.name, "asked": self.asked, "model": self._model.to_str()})

    def _use(self, model: Any) -> None:
        model.encode_special_tokens = (
            True  # else text that quotes the marker would end the document; not stored in its JSON
        )
        self._model, self.vocab, self.end = model, model.get_vocab_size(), model.token_to_id(self.marker)


Tokenizer = Byte | Bpe


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote. Raises ValueError if the text is something else."""
    try:
        stored = json.loads(text)
        if stored["kind"] == "byte":
            return Byte()
        import tokenizers

        bpe = Bpe(stored["asked"])
        bpe._use(tokenizers.Tokenizer.from_str(stored["model"]))
        return bpe
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"not a stored tokenizer: {type(error).__name__}: {error}") from error


def _checked(ids: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < vocab:
        raise ValueError(f"token ids from {array.min()} to {array.max()} do not fit a vocabulary of {vocab}")
    return array


# A line break between two letters or digits is a token of its own wherever it stands, so that cutting behind it changes
# no token; more white space beside it could be drawn into one token with it.
_CUT = re.compile(r"(?<=[A-Za-z0-9])\n(?=[A-Za-z0-9])")


def _pieces(text: str, size: int = 1 << 18) -> Iterator[str]:
    """The text in pieces of about `size` characters whose tokens are the text's: while it is encoded a token takes far
    more memory than its id, so that a book of a gigabyte is not to be encoded in one go."""
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """The documents' pieces, each with whether it is its document's last, in lists of about `BATCH` characters."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for text in documents:
        left = len(text)
        for piece in _pieces(text):
            left -= len(piece)
            size += len(piece)
            batch.append((piece, left == 0))
            if size > BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Threads:
    """Lets `tokenizers` use all cores inside the block, and tells it afterwards that it may not: it would otherwise
    warn in each forked worker of a loader, and could hang there."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def __exit__(self, *_: object) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = self.before or "false"
