"""Where the text comes from: a corpus is a name and an ordered, repeatable stream of documents.

A new corpus is a subclass of `Corpus` with one method, `read()`, and a file `conf/data/x.yaml` with its arguments. Text
is handed on exactly as it is stored (newlines, NULs and all); what is left out is counted in `dropped`.
"""

import glob
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path


class Corpus:
    """An ordered stream of documents that can be read again and again with the same result.

    Args:
        name: what reports call it.
        val_fraction: validation's share of the bytes, in (0, 0.5]; not used where the corpus has its own validation.
        val_windows: how many windows a validation looks at.

    Attributes:
        key: the config key that a refusal names.
        floor: the true entropy in nats per byte token where it is known, else None.
        dropped: what the last reading left out, as reason -> count.

    Raises ValueError for a fraction or a count out of range; reading raises ValueError for what cannot be read.
    """

    key = "data"

    def __init__(self, name: str, val_fraction: float, val_windows: int):
        if not 0 < val_fraction <= 0.5:
            raise ValueError(f"data.val_fraction={val_fraction}: needs a share over 0 and up to 0.5, e.g. 0.05")
        if val_windows < 1:
            raise ValueError(f"data.val_windows={val_windows}: needs at least 1")
        self.name, self.val_fraction, self.val_windows = name, val_fraction, val_windows
        self.floor: float | None = None
        self.dropped: dict[str, int] = {}
        self._places: dict[str, list[str]] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """(place, text) of each document in a fixed order; the place is what a message calls it."""
        raise NotImplementedError

    def documents(self) -> Iterator[str]:
        """The documents that are not blank, in order. Starts the count of `dropped` anew."""
        self.dropped, self._places = {}, {}
        return self._filled(self.read())

    def validation(self) -> Iterator[str] | None:
        """The corpus's own validation documents, or None: validation is then split off the documents."""
        return None

    def describe_dropped(self) -> str:
        """What the last reading left out, in words with the first places; empty if nothing."""
        said = []
        for reason, count in self.dropped.items():
            places = self._places[reason] + ["..."] * (count > len(self._places[reason]))
            said.append(f"{count} {reason} ({', '.join(places)})")
        return ", ".join(said)

    def _filled(self, read: Iterator[tuple[str, str]]) -> Iterator[str]:
        try:
            for place, text in read:
                if text.strip():
                    yield text
                else:
                    self._drop("blank", place)
        except OSError as error:  # as it is, it would be taken for one of writing the cache
            raise ValueError(f"{self.key}: {self.name} cannot be read: {' '.join(str(error).split())}") from error

    def _drop(self, reason: str, place: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if self.dropped[reason] <= 8:
            self._places.setdefault(reason, []).append(place)


class Python(Corpus):
    """The source files of the running Python's standard library, without its tests: one document a file."""

    # Tests hold files that are broken on purpose; site-packages differ from one installation to the next.
    left_out = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

    def __init__(self, val_fraction: float = 0.05, val_windows: int = 64):
        super().__init__(f"python {platform.python_version()}", val_fraction, val_windows)

    def read(self) -> Iterator[tuple[str, str]]:
        root = Path(sysconfig.get_path("stdlib"))
        files = (p.relative_to(root) for p in root.rglob("*.py"))
        for path in sorted((p for p in files if not self.left_out & set(p.parts)), key=Path.as_posix):
            try:
                with open(root / path, "rb") as file:
                    encoding, _ = tokenize.detect_encoding(file.readline)
                # decoded by hand: tokenize.open would turn every line end into \n
                yield str(path), (root / path).read_bytes().decode(encoding)
            except (SyntaxError, UnicodeDecodeError):
                self._drop("undecodable", str(path))
            except OSError:
                self._drop("unreadable", str(path))


class Files(Corpus):
    """Text files (a document each) and `.jsonl` files (a document each line), from paths and globs.

    Args:
        paths: files or globs (`**` descends), relative to the working directory; a glob's files come sorted.
        text_key: the key of a JSON line that holds the text.
        encoding: of all the files; nothing is ever replaced or ignored in decoding.
        skip_bad: leave out and count JSON lines without text, rather than refuse them.

    Raises ValueError for no path, no match, an unreadable file, bytes that are not in the encoding, and (unless
    skip_bad) the first JSON line without text.
    """

    key = "data.paths"

    def __init__(
        self,
        paths: list[str],
        text_key: str = "text",
        encoding: str = "utf-8",
        skip_bad: bool = False,
        val_fraction: float = 0.05,
        val_windows: int = 64,
    ):
        if isinstance(paths, str):
            raise ValueError(f"data.paths={paths}: needs a list, as in data.paths=[{paths}]")
        self.paths = [str(p) for p in paths]
        if not self.paths:
            raise ValueError(
                "data.paths is empty: say which files to read, as in data.paths=[book.txt,'more/**/*.jsonl']"
            )
        try:
            "".encode(encoding)
        except LookupError:
            raise ValueError(f"data.encoding={encoding}: Python knows no such encoding; try utf-8 or latin-1") from None
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        super().__init__(self.paths[0] + more, val_fraction, val_windows)
        self.text_key, self.encoding, self.skip_bad = text_key, encoding, skip_bad

    def read(self) -> Iterator[tuple[str, str]]:
        for path in self._matches():
            try:
                if path.endswith(".jsonl"):
                    yield from self._lines(path)
                else:
                    yield path, self._decode(Path(path).read_bytes(), path)
            except OSError as error:
                raise ValueError(
                    f"data.paths: {path}: {error.strerror or error}; give files or globs that can be read"
                ) from error

    def _matches(self) -> Iterator[str]:
        seen: set[str] = set()
        for asked in self.paths:
            path = os.path.expanduser(asked)
            matches = glob.glob(path, recursive=True)
            # a link to nothing stays in and is refused when it is read, like any file that cannot be
            matches = sorted(match for match in matches if os.path.isfile(match) or not os.path.exists(match))
            found = [path] if os.path.exists(path) else matches
            if not found:
                raise ValueError(f"data.paths: {asked}: no such file; relative paths start at {os.getcwd()}")
            for match in found:
                if os.path.realpath(match) in seen:
                    self._drop("file named twice", match)
                else:
                    seen.add(os.path.realpath(match))
                    yield match

    def _decode(self, data: bytes, path: str, offset: int = 0, line: str = "") -> str:
        try:
            return data.decode(self.encoding)
        except UnicodeDecodeError as error:
            other = "convert the file"
            if self.encoding.lower() == "utf-8":
                other = "give data.encoding=latin-1, or convert the file"
            if error.reason == "unexpected end of data":
                other = f"if the file was cut off there, fetch the whole of it, else {other}"
            raise ValueError(
                f"data.paths: {path}{line}: byte {offset + error.start} (0x{data[error.start]:02x}) is not "
                f"{self.encoding}: {error.reason}; {other}"
            ) from None

    def _lines(self, path: str) -> Iterator[tuple[str, str]]:
        if b"\n".decode(self.encoding, "replace") != "\n":  # its lines cannot be told by their bytes
            raise ValueError(
                f"data.paths: {path}: JSON lines in {self.encoding} are not read: convert the file to utf-8"
            )
        offset = 0
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):
                line = self._decode(data, path, offset, f":{number}")
                offset += len(data)
                if not line.strip():
                    self._drop("blank", f"{path}:{number}")
                    continue
                try:
                    yield f"{path}:{number}", self._text(line)
                except ValueError as error:
                    if not self.skip_bad:
                        raise ValueError(
                            f"data.paths: {path}:{number}: {error}; mend the line, or give data.skip_bad=true "
                            "to leave such lines out and count them"
                        ) from None
                    self._drop("bad line", f"{path}:{number}")

    def _text(self, line: str) -> str:
        try:
            row = json.loads(line)
        except RecursionError:
            raise ValueError("not JSON: nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__}, not an object with the key {self.text_key!r}")
        if self.text_key not in row:
            keys = [*map(repr, row)][:8] + ["..."] * (len(row) > 8)
            raise ValueError(f"no key {self.text_key!r} (data.text_key) among {', '.join(keys) or 'none'}")
        return text_of(row[self.text_key], self.text_key)


def text_of(value: object, key: str) -> str:
    """The value if it is text that UTF-8 can hold; raises ValueError with the reason otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {'null' if value is None else type(value).__name__}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} has half a surrogate pair at character {error.start}, which is no text") from None
    return value
