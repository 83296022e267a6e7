"""Which documents train and which validate, decided by their content before anything is tokenised."""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from data.corpus import Corpus

TRAIN, VAL, LEFT_OUT = 0, 1, 2


@dataclass
class Split:
    """Which side each document is on, after one reading.

    digests, sizes (bytes), sides: by document; the last `own` documents are the corpus's own validation.
    cut: (index, bytes) of the one document that is parted after so many bytes, if any. rule: in words.
    """

    digests: list[bytes]
    sizes: list[int]
    own: int
    sides: bytearray
    cut: tuple[int, int] | None
    rule: str

    @property
    def hash(self) -> str:
        return digest(b"%d " % self.own + b"".join(self.digests), 8).hex()


def make_split(corpus: Corpus) -> Split:
    """Reads the corpus once and says which documents validate. Identical documents never stand on both sides.

    The corpus's own validation where it has one. Else whole groups of identical documents, in the order of their
    digests, each taken if it brings validation nearer to val_fraction of the bytes. Where that misses by more than a
    factor of 2 (few, long documents), the last part of the text.

    Raises ValueError for a corpus, or a validation, without a document.
    """
    split = Split([], [], 0, bytearray(), None, "")
    own = corpus.validation()  # read second: reading the documents starts the count of what was dropped
    first = _survey(corpus.documents(), split)
    split.own = _survey(own, split) if own is not None else 0
    dropped = corpus.describe_dropped() or "none left out"
    if not first:
        raise ValueError(f"{corpus.key}: {corpus.name} has 0 documents: {dropped}; give text that is not blank")
    if own is not None and not split.own:
        raise ValueError(f"data.val_split: the validation of {corpus.name} has 0 documents: {dropped}; give another")
    split.sides = bytearray(len(split.digests))
    if own is not None:
        _use_own(split)
    else:
        _divide(split, corpus.val_fraction)
    return split


def _survey(documents: Iterator[str], split: Split) -> int:
    before = len(split.digests)
    for text in documents:
        data = _encoded(text)
        split.digests.append(digest(data))
        split.sizes.append(len(data))
    return len(split.digests) - before


def _divide(split: Split, fraction: float) -> None:
    groups: dict[bytes, list[int]] = {}
    for i, key in enumerate(split.digests):
        groups.setdefault(key, []).append(i)
    total, taken = sum(split.sizes), 0
    target = fraction * total
    for _, group in sorted(groups.items()):
        size = sum(split.sizes[i] for i in group)
        if abs(taken + size - target) < abs(taken - target):
            taken += size
            for i in group:
                split.sides[i] = VAL
    split.rule = f"whole documents, {taken / total:.2%} of the bytes"
    if not target / 2 <= taken <= 2 * target:
        _cut_tail(split, groups, fraction)
        split.rule += f" (whole documents would be {taken / total:.2%} of the bytes)"


def _use_own(split: Split) -> None:
    first = len(split.digests) - split.own
    split.rule = "the corpus's own split"
    validating = set(split.digests[first:])
    shared = [i for i in range(first) if split.digests[i] in validating]
    split.sides[first:] = bytes([VAL]) * split.own
    for i in shared:
        split.sides[i] = LEFT_OUT
    if shared:
        split.rule += f"; {len(shared)} training documents that are validation documents too were left out"


def _cut_tail(split: Split, groups: dict[bytes, list[int]], fraction: float) -> None:
    copies = [i for group in groups.values() for i in group[1:]]
    for i in range(len(split.sides)):
        split.sides[i] = TRAIN
    for i in copies:  # a copy behind the cut would be validated on although its twin was trained on
        split.sides[i] = LEFT_OUT
    kept = sum(size for side, size in zip(split.sides, split.sizes, strict=True) if side == TRAIN)
    left = max(1, round(fraction * kept))
    for i in reversed(range(len(split.sides))):
        if left <= 0:
            break
        if split.sides[i] == LEFT_OUT:
            continue
        if split.sizes[i] - left >= 4:  # a character has up to 4 bytes: there is text on either side of the cut
            split.cut = (i, split.sizes[i] - left)
            break
        split.sides[i] = VAL
        left -= split.sizes[i]
    split.rule = f"the last {fraction:.2%} of the text"
    if copies:
        split.rule += f"; {len(copies)} copies of other documents were left out"


def texts(corpus: Corpus, split: Split, side: int) -> Iterator[str]:
    """The documents of one side in order. Raises ValueError if the corpus is no longer what was split."""
    again = itertools.chain(corpus.documents(), corpus.validation() or ())
    for i, (text, known) in enumerate(itertools.zip_longest(again, split.digests)):
        data = _encoded(text or "")
        if text is None or digest(data) != known:
            raise ValueError(f"{corpus.key}: document {i + 1} of {corpus.name} changed while it was read; start again")
        if split.cut and split.cut[0] == i:
            head = data[: split.cut[1]].decode(errors="ignore")  # a character that straddles the cut goes behind it
            part = head if side == TRAIN else text[len(head) :]
            yield part
        elif split.sides[i] == side:
            yield text


def digest(data: bytes, size: int = 16) -> bytes:
    """BLAKE2b of the data, in `size` bytes."""
    return hashlib.blake2b(data, digest_size=size).digest()


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"data: a document has half a surrogate pair at character {error.start}, which is no text"
        ) from None
