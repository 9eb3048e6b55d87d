"""Where a converted repository grows: a hidden sibling of the target that becomes the target by one rename.

What a killed run leaves is a folder named `.NAME.converting`, never a half repository under its own name. Shards
appear there only when complete, so a rerun with the same source and options keeps those it finds and writes the rest.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from .convert_safetensors import ConversionError, PlannedTensor, StoredTensor


try:
    import fcntl
except ImportError:  # Windows: two conversions to one target at the same time are then the user's to avoid
    fcntl = None


def recipe_of(stored: Mapping[str, StoredTensor], shards: Mapping[str, Sequence[PlannedTensor]], **options) -> dict:
    """What determines a checkpoint written from `stored` as `shards` under the caller's `options`."""
    return {
        "files": sorted({(str(t.file), t.file.stat().st_size, t.file.stat().st_mtime_ns) for t in stored.values()}),
        "shards": {name: [[t.key, t.num_bytes] for t in group] for name, group in shards.items()},
        **options,
    }


class WorkFolder:
    """A resumable, locked, atomic work folder for one target.

    Args:
        target (`Path`): the folder that will appear when everything is written.
        recipe (`dict`): what determines the result, JSON-serialisable. A leftover of another recipe is thrown away.
        option (`str`, *optional*, defaults to `"--to"`): how the user names the target, for messages.
        doing (`str`, *optional*, defaults to `"converting"`): what is done to it, for messages and the progress bar.

    Raises:
        ConversionError: on entering, when the target exists, is a link or lies under a file, or another process
            converts to it.
    """

    def __init__(self, target: Path, recipe: dict, option: str = "--to", doing: str = "converting"):
        self.target = target
        self.option = option
        self.doing = doing
        self.folder = target.parent / f".{target.name}.converting"
        self._journal_path = target.parent / f".{target.name}.converting.json"
        self._fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        self._recipe = recipe
        self._journal = None

    @property
    def finished(self) -> bool:
        """Whether an earlier run with the same recipe got as far as the rename."""
        renamed = not self.folder.exists() and (self.target / "config.json").is_file()
        return renamed and self._journal_matches()

    def __enter__(self) -> "WorkFolder":
        if self.target.is_symlink():  # a dangling one does not "exist", and no folder can be renamed onto a link
            raise ConversionError(
                f"target {self.target} is a symbolic link; remove it or choose another {self.option}"
            )
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConversionError(f"target {self.target} lies under a file; choose another {self.option}") from None
        if self.target.exists() and not self.finished and not _is_empty_folder(self.target):
            raise ConversionError(f"target {self.target} exists already; remove it or choose another {self.option}")
        self._journal = open(self._journal_path, "a+", encoding="utf-8")
        if fcntl is not None:
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._journal.close()
                raise ConversionError(
                    f"another process is {self.doing} to {self.target}; wait for it to end"
                ) from None
        if not self._journal_matches():
            shutil.rmtree(self.folder, ignore_errors=True)
            content = json.dumps({"fingerprint": self._fingerprint, "recipe": self._recipe}, indent=1)
            self._journal.truncate(0)
            self._journal.write(content)
            self._journal.flush()
            os.fsync(self._journal.fileno())
        if not self.finished:
            self.folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_):
        self._journal.close()

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file with at least `num_bytes` of data was completed by an earlier run."""
        path = self.folder / name
        return path.is_file() and path.stat().st_size > num_bytes

    def publish(self) -> None:
        """Give the finished folder its name and forget the journal."""
        for leftover in self.folder.glob("*.part"):
            leftover.unlink()
        for path in self.folder.rglob("*"):
            if path.is_file():
                _sync(path)
        if self.target.exists():
            self.target.rmdir()
        os.rename(self.folder, self.target)
        _sync(self.target.parent)
        self._journal_path.unlink()

    def forget(self) -> None:
        """Remove the journal of a run that was killed right after its rename."""
        self._journal_path.unlink()

    def _journal_matches(self) -> bool:
        try:
            return json.loads(self._journal_path.read_text(encoding="utf-8"))["fingerprint"] == self._fingerprint
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def _sync(path: Path) -> None:
    """Ask the system to put a file, or the entries of a folder, on the disk."""
    if fcntl is None and path.is_dir():
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
