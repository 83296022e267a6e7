"""Corpora of the Hugging Face Hub: any dataset that is stored as data files (loading scripts are never run)."""

import hashlib
import itertools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.cache import cache_directory, making, publish
from data.corpus import Corpus, text_of

INSTEAD = "use what needs no network: data=python, or data=files data.paths=[...]"


class Hub(Corpus):
    """A dataset of the Hub, one document a row.

    Args:
        path: the dataset, e.g. `roneneldan/TinyStories`, or a local folder of data files.
        config: its configuration, where it has several.
        split, val_split: its training split; its validation split, or None to split by document.
        text_key: the column that holds the text.
        opens: a regular expression for the row that opens a new document, where rows are lines; they are then joined.
        rows: read this many rows of each split, without fetching the rest, and keep what the Hub sent in the cache;
            None = all.
        skip_bad: leave out and count rows without text, rather than refuse them.
        options: further arguments of `datasets.load_dataset` (revision, data_files, ...).

    Raises ValueError where the dataset cannot be reached or a row holds no text.
    """

    key = "data.path"

    def __init__(
        self,
        path: str,
        config: str | None = None,
        split: str = "train",
        val_split: str | None = None,
        text_key: str = "text",
        opens: str | None = None,
        rows: int | None = None,
        skip_bad: bool = False,
        options: dict[str, Any] | None = None,
        val_fraction: float = 0.05,
        val_windows: int = 64,
    ):
        super().__init__(path, val_fraction, val_windows)
        if not path:
            raise ValueError("data.path is empty: name a dataset of the Hub, as in data.path=roneneldan/TinyStories")
        if rows is not None and rows < 1:
            raise ValueError(f"data.rows={rows}: needs at least 1, or null for all")
        if _asks_for_trust(options):
            raise ValueError(
                "data.options.trust_remote_code: loading scripts are not run; choose a dataset stored as data files"
            )
        if path == "pandas":  # older versions of the library read them
            raise ValueError(
                "data.path=pandas: its files are pickles, which run code; store the text as JSON or parquet"
            )
        try:
            self.opens = re.compile(opens) if opens else None
        except re.error as error:
            raise ValueError(f"data.opens={opens}: not a regular expression: {error}") from None
        self.path, self.config, self.split, self.val_split, self.text_key = path, config, split, val_split, text_key
        self.rows, self.skip_bad, self.options = rows, skip_bad, dict(options or {})
        self._loaded: dict[str, Any] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        return self._joined(self.split)

    def validation(self) -> Iterator[str] | None:
        return self._filled(self._joined(self.val_split)) if self.val_split else None

    def _joined(self, split: str) -> Iterator[tuple[str, str]]:
        if self.opens is None:
            yield from self._texts(split)
            return
        place, lines = "", []  # type: str, list[str]
        for row, text in self._texts(split):
            if lines and self.opens.search(text):
                yield place, "".join(lines)
                lines = []
            place = place if lines else row
            lines.append(text)
        if lines:
            yield place, "".join(lines)

    def _texts(self, split: str) -> Iterator[tuple[str, str]]:
        for number, value in enumerate(self._values(split)):
            place = f"{split}[{number}]"
            try:
                yield place, text_of(value, self.text_key)
            except ValueError as error:
                if not self.skip_bad:
                    raise ValueError(
                        f"data.path={self.path}: {place}: {error}; give data.skip_bad=true to leave such rows out "
                        "and count them"
                    ) from None
                self._drop("bad row", place)

    def _values(self, split: str) -> Iterator[Any]:
        # a file of this machine may be edited, and a relative path mean another: what is kept would be stale
        local = os.path.exists(self.path) or "/" not in self.path
        if self.rows is None or local:
            return self._stream(split, streaming=self.rows is not None)
        # A stream is read once, into a file of our own: later readings are the same rows, without a network.
        wanted = [self.path, self.config, split, self.text_key, self.rows, sorted(self.options.items())]
        name = hashlib.blake2b(repr(wanted).encode(), digest_size=8).hexdigest()
        kept = cache_directory() / "hub" / f"{name}.jsonl"
        if not kept.exists():
            self._keep(split, kept)
        return self._kept(kept)

    def _kept(self, kept: Path) -> Iterator[Any]:
        with open(kept, encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(
                        f"data.path={self.path}: the rows kept in {kept} are damaged at line {number}: {error}; "
                        "delete that file, and they are fetched again"
                    ) from None

    def _keep(self, split: str, kept: Path) -> None:
        try:
            with making(kept) as scratch:
                if kept.exists():  # fetched by another process while this one waited
                    return
                part = scratch / kept.name
                with open(part, "w", encoding="utf-8", newline="\n") as file:
                    file.writelines(json.dumps(value) + "\n" for value in self._stream(split, streaming=True))
                publish(part, kept)
        except OSError as error:
            raise ValueError(
                f"data.path={self.path}: cannot keep its rows in {kept.parent}: {_first_line(error)}; "
                "set the environment's NORMLAB_CACHE to a folder that can be written and has space"
            ) from error

    def _stream(self, split: str, streaming: bool) -> Iterator[Any]:
        """The rows as the library gives them, up to `rows`; what goes wrong in there is a ValueError."""
        if split not in self._loaded:
            self._loaded[split] = self._load(split, streaming)
        try:
            for row in itertools.islice(self._loaded[split], self.rows):
                yield row[self.text_key]
        except Exception as error:  # a stream can break in as many ways as there are file formats
            raise ValueError(
                f"data.path={self.path}: the stream broke off: {_first_line(error)}; try again, or {INSTEAD}"
            ) from error

    def _load(self, split: str, streaming: bool) -> Any:
        reached = _reach_hub() or os.path.exists(self.path)
        import datasets

        try:
            loaded = datasets.load_dataset(self.path, self.config, split=split, streaming=streaming, **self.options)
        except (
            Exception
        ) as error:  # the library lets through errors of its own, of the network's, and of the file formats'
            why = (
                _first_line(error)
                if reached
                else "no network, and no copy in the cache of Hugging Face on this machine"
            )
            raise ValueError(f"data.path={self.path} split={split}: {why}; {INSTEAD}") from error
        columns = loaded.column_names
        if columns and self.text_key not in columns:
            raise ValueError(f"data.text_key={self.text_key}: {self.path} has the columns {', '.join(columns)}")
        return loaded.select_columns([self.text_key]) if columns else loaded


def _asks_for_trust(options: Any) -> bool:
    """Whether the key that lets a dataset run code stands anywhere in the options."""
    if isinstance(options, dict):
        return "trust_remote_code" in options or _asks_for_trust(list(options.values()))
    return isinstance(options, list | tuple) and any(map(_asks_for_trust, options))


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _reach_hub(timeout: float = 5.0) -> bool:
    """Whether the Hub answers. If not, its clients are put offline: they would retry for half a minute before they say
    so, while offline they turn to their own cache at once."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=timeout).close()
            return True
        except urllib.error.HTTPError:
            return True  # an answer all the same
        except OSError:
            pass
    import datasets

    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False
