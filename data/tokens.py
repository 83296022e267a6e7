"""Documents to token files: split by document, tokenised once, kept in a cache that is keyed by content.

The cache is `<cache>/<key>/{train.bin, val.bin, tokenizer.json, meta.json}`: raw little-endian ids and JSON, no pickle.
Whatever number of runs want an entry at once, one makes it (`data/cache.py`).
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.cache import cache_directory, making, publish
from data.corpus import Corpus
from data.split import TRAIN, VAL, Split, digest, make_split, texts
from data.tokenizer import Tokenizer, from_json

FORMAT = 1  # raise it when the files' meaning changes: old ones are then not found


@dataclass(frozen=True)
class Tokens:
    """A corpus as token ids.

    train, val: read-only arrays of ids; every document is followed by one `end`.
    vocab: the tokenizer's real size. end: id of the end token.
    unigram_entropy: of the training ids' frequencies, in nats per token: what a model without context can reach.
    floor: the true entropy in nats per token where it is known. hash: 16 hex digits over the corpus's documents.
    notes: lines for the user: sizes, how the split was made, what was left out, whether the tokens were made now.
    """

    train: np.ndarray
    val: np.ndarray
    vocab: int
    end: int
    unigram_entropy: float
    floor: float | None
    hash: str
    name: str
    notes: list[str]
    tokenizer: Tokenizer


def prepare(corpus: Corpus, tokenizer: Tokenizer, *, context: int, cache: Path | None = None) -> Tokens:
    """Reads, splits and tokenises the corpus, or finds that done in the cache (default: `cache_directory()`).

    Raises ValueError for an empty corpus, for a side with fewer than context + 1 tokens, and for a cache that cannot be
    written.
    """
    split = make_split(corpus)
    notes = [f"left out: {dropped}" for dropped in [corpus.describe_dropped()] if dropped]
    wanted = [FORMAT, split.hash, tokenizer.identity(), corpus.val_fraction, split.rule]
    home = Path(cache or cache_directory()) / digest(json.dumps(wanted).encode(), 8).hex()
    origin = "found"
    try:
        stored = _load(home)  # without the lock: a finished cache may be read-only
        if stored is None:
            with making(home) as scratch:
                stored = _load(home)  # another process may have made it while this one waited
                if stored is None:
                    if home.exists():
                        notes.append(f"cache: {home} was damaged and has been made again")
                        shutil.rmtree(home)
                    _build(corpus, tokenizer, split, scratch)
                    publish(scratch, home)
                    stored, origin = _load(home), "made now, kept"
    except OSError as error:
        raise ValueError(
            f"cache {home.parent}: {error.strerror or error}; set the environment's NORMLAB_CACHE to a folder that "
            "can be written and has space"
        ) from error
    assert stored is not None, "what was just written can be read"
    notes.append(f"tokens: {origin} in {home}")
    meta, train, val, tokenizer = stored
    for side, ids in (("training", train), ("validation", val)):
        if len(ids) < context + 1:
            raise ValueError(
                f"model.context={context}: the {side} part of {corpus.name} has {len(ids)} tokens, and "
                f"{context + 1} are needed; lower model.context, or give more text"
                + (", or raise data.val_fraction" if side == "validation" and not split.own else "")
            )
    notes.insert(
        0,
        f"{corpus.name}: {meta['documents'][TRAIN]} documents, {len(train)} tokens to train on; "
        f"{meta['documents'][VAL]} documents, {len(val)} tokens to validate on",
    )
    notes.insert(1, f"validation: {split.rule}")
    notes += [note for note in [tokenizer.note()] if note]
    byte = tokenizer.name == "byte"
    if corpus.floor is not None and not byte:
        notes.append(f"the true entropy is known for tokenizer=byte only, not for tokenizer={tokenizer.name}")
    return Tokens(
        train,
        val,
        tokenizer.vocab,
        tokenizer.end,
        meta["unigram_entropy"],
        corpus.floor if byte else None,
        split.hash,
        corpus.name,
        notes,
        tokenizer,
    )


def _build(corpus: Corpus, tokenizer: Tokenizer, split: Split, folder: Path) -> None:
    """Fits the tokenizer and writes an entry's four files into the folder."""
    tokenizer.fit(texts(corpus, split, TRAIN))
    meta: dict[str, Any] = {"format": FORMAT, "dtype": dtype_for(tokenizer.vocab).str, "documents": [], "tokens": []}
    with _progress(sum(split.sizes)) as bar:
        for side, name in ((TRAIN, "train.bin"), (VAL, "val.bin")):
            # the document that is cut does not end on the training side
            unfinished = side == TRAIN and split.cut is not None
            with open(folder / name, "wb") as file:
                documents, counts = _write(corpus, tokenizer, split, side, unfinished, file, bar)
            meta["documents"].append(documents)
            meta["tokens"].append(int(counts.sum()))
            if side == TRAIN:
                meta["unigram_entropy"] = entropy(counts)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _write(
    corpus: Corpus, tokenizer: Tokenizer, split: Split, side: int, unfinished: bool, file: BinaryIO, bar: Any
) -> tuple[int, np.ndarray]:
    counts, documents = np.zeros(tokenizer.vocab, dtype=np.int64), 0
    end = narrow(np.array([tokenizer.end]), tokenizer.vocab).tobytes()
    for ids in tokenizer.encode_all(_counted(texts(corpus, split, side), bar)):
        if documents:
            file.write(end)
        ids = narrow(ids, tokenizer.vocab)
        file.write(ids.tobytes())
        counts += np.bincount(ids, minlength=tokenizer.vocab)
        documents += 1
    if documents and not unfinished:
        file.write(end)
    counts[tokenizer.end] += max(0, documents - unfinished)
    return documents, counts


def _load(home: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray, Tokenizer] | None:
    """The entry that `_build` wrote, or None if it is missing or not whole."""
    try:
        meta = json.loads((home / "meta.json").read_text(encoding="utf-8"))
        dtype, arrays = np.dtype(meta["dtype"]), []
        for name, tokens in zip(("train.bin", "val.bin"), meta["tokens"], strict=True):
            if (home / name).stat().st_size != tokens * dtype.itemsize:
                return None
            arrays.append(np.memmap(home / name, dtype=dtype, mode="r") if tokens else np.empty(0, dtype))
        tokenizer = from_json((home / "tokenizer.json").read_text(encoding="utf-8"))
        return meta, arrays[0], arrays[1], tokenizer
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def dtype_for(vocab: int) -> np.dtype:
    """uint16 where every id below `vocab` fits, else uint32."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")


def narrow(ids: np.ndarray, vocab: int) -> np.ndarray:
    """The ids in `dtype_for(vocab)`. Raises ValueError for an id outside 0..vocab-1, which would wrap."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()} do not fit the tokenizer's vocabulary of {vocab}")
    return ids.astype(dtype_for(vocab))


def entropy(counts: np.ndarray) -> float:
    """H = -sum p ln p in nats, p = counts / their sum; 0 for no counts."""
    p = counts[counts > 0] / max(1, counts.sum())
    return float(abs((p * np.log(p)).sum()))


def _progress(size: int) -> Any:
    """A bar on stderr for what takes longer than a few seconds, where somebody looks at it."""
    from tqdm import tqdm

    hidden = size < 20_000_000 or not sys.stderr.isatty()
    return tqdm(total=size, desc="tokenising", unit="B", unit_scale=True, disable=hidden, leave=False)


def _counted(documents: Iterator[str], bar: Any) -> Iterator[str]:
    for text in documents:
        yield text
        bar.update(len(text))
