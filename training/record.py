"""The file `metrics.jsonl`: whole lines, and never one that a checkpoint counts on and the disk does not have."""

import json
import os
from pathlib import Path
from typing import Any

from stability.records import lines
from stability.whole import naming, replace


class Record:
    """Written without a buffer, a line at a time or nothing of it. Raises OSError, with the file's name, where it cannot be."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)

    def keep(self, done: int) -> list[dict[str, Any]]:
        """The lines up to step `done`, -1 for none; those beyond it are dropped."""
        kept = _until(self._path, done)
        self._file.close()
        replace(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("ab", buffering=0)
        return kept

    def append(self, line: str) -> None:
        """The whole line or, where the disk is full, nothing of it; never a part that is kept and written later."""
        rest, end = (line + "\n").encode(), os.fstat(self._file.fileno()).st_size
        with naming(self._path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise

    def to_disk(self) -> None:
        """What is written so far survives a power cut."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class NoRecord(Record):
    """Of another rank, which reads what was written before and writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, done: int) -> list[dict[str, Any]]:
        return _until(self._path, done)

    def append(self, line: str) -> None: ...

    def to_disk(self) -> None: ...

    def close(self) -> None: ...


def _until(path: Path, done: int) -> list[dict[str, Any]]:
    return [record for record in lines(path, []) if record["step"] <= done]
