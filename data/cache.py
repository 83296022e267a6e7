"""The folder of prepared data, and how an entry of it comes to be: made by one process, whole or not at all."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

PATIENCE = 1.0  # seconds: a shorter wait is not worth a word


def cache_directory() -> Path:
    """Where prepared data is kept: the environment's NORMLAB_CACHE, or `~/.cache/normlab`."""
    try:
        return Path(os.environ.get("NORMLAB_CACHE") or Path.home() / ".cache" / "normlab").expanduser()
    except RuntimeError:
        raise ValueError("this user has no home: set the environment's NORMLAB_CACHE to a folder for data") from None


@contextmanager
def making(entry: Path) -> Iterator[Path]:
    """The sole right to make `entry`: yields an empty scratch folder beside it, which is gone afterwards.

    Waits while another process has that right, and says so: look inside whether the entry is there by now. The right is
    the kernel's lock on the empty file `<entry>.lock`, which ends with its process, however that ends; the file stays.
    The scratch folder has one name an entry, so that the next process removes what a killed one left. Where no lock can
    be had (a network folder without them, another user's lock file), each process has a scratch folder of its own: the
    same work is then done twice, and the first to publish it stays.

    Raises OSError where the folder cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    # not the library's own way out, a file that marks the lock: it would outlive a killed process
    lock = FileLock(entry.with_suffix(".lock"), fallback_to_soft=False)
    scratch = entry.parent / f".partial-{entry.name}"
    try:
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            print(
                f"normlab: another run is preparing this text; waiting ({lock.lock_file})", file=sys.stderr, flush=True
            )
            lock.acquire()
    except (OSError, NotImplementedError):
        scratch = scratch.with_name(f"{scratch.name}-{secrets.token_hex(4)}")
    try:
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def publish(part: Path, entry: Path) -> None:
    """Moves a finished file or folder of files to its place in one step. Where another process was first, its stays."""
    for path in part.iterdir() if part.is_dir() else [part]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # a power cut may otherwise keep the name and lose the content
    try:
        os.rename(part, entry)
    except OSError:
        if not entry.exists():
            raise
