"""Files and folders that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """
    A file beside `path` to write to, which takes its place at the end of the block.

    Args:
        path (`Path`): the file; its folder is made.

    Yields:
        `Path`: a hidden name in the same folder, which ends in `.partial`. After an error the file is removed and
        `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes bytes, or text as UTF-8, so that a reader sees the old file or the new one, never a part."""
    with whole_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def put_in_place(draft: Path, target: Path) -> None:
    """Puts a finished folder in the target's place by renaming, so that the target is never half there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed in between
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def held(folder: Path, busy: Exception) -> Iterator[None]:
    """
    Holds an output folder, so that one run at a time writes into it, as far as its file system knows locks.

    Args:
        folder (`Path`): the folder; made if need be.
        busy (`Exception`): raised when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise busy from None
    try:
        yield
    finally:
        lock.release()
