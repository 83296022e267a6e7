"""Files that are whole or not there: whoever is killed or out of space while one is written leaves the old one or the new."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` once it is written and on the disk: whoever is killed or out of space
    meanwhile leaves the old one or the new one.

    Raises OSError, with the file's name, where it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with naming(path):
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the new name on an empty file
            os.replace(unfinished, path)
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # and the new name
            os.close(folder)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def replace(path: Path, content: str | bytes) -> None:
    """The `whole` file in one go."""
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError in the block says which file it was about, which one that comes from a write does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def document(content: dict[str, Any]) -> str:
    """The text of a JSON file that people read too."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
