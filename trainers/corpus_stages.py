"""Stages of building a folder.

A stage writes its files under temporary names, renames them, and notes their hashes in `stages.json`. It is skipped as
long as those files are whole and its settings are the same, so a run that was killed goes on at the stage it was in,
and a second run does nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .corpus_sources import file_sha256
from .files import whole_file, write_atomically


def jsonl_bytes(rows: list[dict]) -> bytes:
    """Rows as JSON lines in UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save`, whole or not at all."""
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, array)


class Stages:
    """Which stages of a folder are done; see the module's docstring.

    Args:
        folder (`Path`):
            The folder the stages write in; made if need be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "stages.json"
        self._done = json.loads(self._path.read_text()) if self._path.exists() else {}

    def is_whole(self, name: str, settings: dict) -> bool:
        """Whether a stage was done with these settings and all its files still have the noted hash."""
        entry = self._done.get(name)
        if entry is None or entry["settings"] != settings:
            return False
        return all(
            (self.folder / file).exists() and file_sha256(self.folder / file) == digest
            for file, digest in entry["files"].items()
        )

    def run(self, name: str, settings: dict, work: Callable[[], dict]) -> bool:
        """Does a stage unless it is whole.

        Args:
            name (`str`):
                Name of the stage.
            settings (`dict`):
                JSON values; when they differ from the noted ones the stage is done again.
            work (`Callable[[], dict]`):
                Writes the files and returns `{"files": [names], "counts": {...}}`.

        Returns:
            `bool`: whether the work was done now.
        """
        if self.is_whole(name, settings):
            print(f"{name}: already built")
            return False
        result = work()
        hashes = {file: file_sha256(self.folder / file) for file in result["files"]}
        self._done[name] = {"settings": settings, "files": hashes, "counts": result["counts"]}
        write_atomically(self._path, json.dumps(self._done, indent=1).encode())
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in result['counts'].items())}")
        return True

    @property
    def files(self) -> dict[str, str]:
        """`dict[str, str]`: SHA-256 by file, over all stages."""
        return {file: digest for entry in self._done.values() for file, digest in entry["files"].items()}

    @property
    def counts(self) -> dict[str, dict]:
        """`dict[str, dict]`: counts by stage."""
        return {name: entry["counts"] for name, entry in self._done.items()}
