"""The manifest of a published tree: the size and SHA-256 of every file, written last and checked after a move."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tqdm.auto import tqdm


MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def tree_files(folder: Path) -> Iterator[Path]:
    """Files of a tree, in the order of their paths."""
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink())


def file_hash(path: Path, on_bytes=lambda count: None) -> str:
    """SHA-256 of a file; `on_bytes` is told of each block."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def write_manifest(folder: Path) -> dict:
    """
    Writes `manifest.json` over all other files of a tree.

    Args:
        folder (`Path`): the tree, complete.

    Returns:
        `dict`: `total_size` in bytes, and `files`: `size` in bytes and `sha256` by path.
    """
    files = [path for path in tree_files(folder) if path.name != MANIFEST]
    total = sum(path.stat().st_size for path in files)
    entries = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Hashing {folder.name}", delay=2) as bar:
        for path in files:
            entries[path.relative_to(folder).as_posix()] = {
                "size": path.stat().st_size,
                "sha256": file_hash(path, bar.update),
            }
    manifest = {"total_size": total, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def manifest_findings(folder: Path) -> Iterator[tuple[str, str]]:
    """
    Files that differ from the manifest.

    Yields:
        `tuple[str, str]`: the path, and what is wrong with it.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield MANIFEST, f"cannot be read ({error})"
        return
    present = {path.relative_to(folder).as_posix(): path for path in tree_files(folder)}
    present.pop(MANIFEST, None)
    for name in sorted(set(listed) - set(present)):
        yield name, "is listed in the manifest and missing"
    for name in sorted(set(present) - set(listed)):
        yield name, "is not listed in the manifest"
    for name in sorted(set(present) & set(listed)):
        size = present[name].stat().st_size
        if size != listed[name]["size"]:
            yield name, f"has {size} bytes, the manifest says {listed[name]['size']}"
        elif file_hash(present[name]) != listed[name]["sha256"]:
            yield name, "has another SHA-256 than the manifest says"
