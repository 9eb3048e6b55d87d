"""The files of a folder: which there are, of which kind, and which changed since they were indexed."""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from modeling_moemb.media_moemb import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

from .errors import MoEMBError


PDF_EXTENSIONS = (".pdf",)
TEXT_EXTENSIONS = (".txt", ".text", ".md", ".markdown", ".rst", ".org", ".csv", ".tsv", ".log", ".tex", ".srt", ".vtt")
HTML_EXTENSIONS = (".html", ".htm", ".xhtml")
KINDS = {
    "image": IMAGE_EXTENSIONS,
    "clip": VIDEO_EXTENSIONS,
    "pdf": PDF_EXTENSIONS,
    "text": TEXT_EXTENSIONS + HTML_EXTENSIONS,
}
_KIND_OF = {extension: kind for kind, extensions in KINDS.items() for extension in extensions}
_DIGEST_BYTES = 16
# Nobody looks for these, and there may be many: whole folders of them are passed over without a word.
_IGNORED_FOLDERS = ("__pycache__", "node_modules")


class DataFolderError(MoEMBError, NotADirectoryError):
    """The folder that is to be indexed is not one. The message names it."""


@dataclass(frozen=True)
class FileState:
    """
    A file as it stood when it was looked at.

    Args:
        path (`str`): relative to the indexed folder, with `/`.
        size (`int`): bytes.
        modified (`int`): time of the last change, nanoseconds.
        kind (`str`): `"image"`, `"clip"`, `"pdf"` or `"text"`.
    """

    path: str
    size: int
    modified: int
    kind: str

    def same_as(self, size: int, modified: int) -> bool:
        """Whether a size and a time of change seen earlier are still those of the file."""
        return self.size == size and self.modified == modified


@dataclass
class Scan:
    """
    What a folder holds.

    Args:
        files (`dict[str, FileState]`): the readable kinds, by path.
        skipped (`dict[str, str]`): why the others cannot be indexed, by path.
    """

    files: dict[str, FileState] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def kind_of_name(name: str) -> str | None:
    """Returns the kind of a file by its extension, `None` for one that is not read."""
    return _KIND_OF.get(os.path.splitext(name)[1].lower())


def scan_folder(root: Path) -> Scan:
    """
    Looks at every file below a folder. Nothing is opened.

    Hidden files and folders, `__pycache__` and `node_modules` are passed over. Links are followed; a folder that is
    reached twice is read once.

    Args:
        root (`Path`): the folder.

    Returns:
        `Scan`: sorted by path.

    Raises:
        DataFolderError: there is no such folder, or it cannot be listed.
    """
    if not root.is_dir():
        raise DataFolderError(f"there is no folder '{root}' to index; give the folder that holds your files")
    scan = Scan()
    for path, entry in sorted(_walk(root, scan), key=lambda found: found[0]):
        _look_at(path, entry, scan)
    return scan


def _walk(root: Path, scan: Scan) -> Iterator[tuple[str, os.DirEntry]]:
    seen, pending = set(), [("", str(root))]
    while pending:
        prefix, folder = pending.pop()
        try:
            about = os.stat(folder)
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            entries = list(os.scandir(folder))
        except OSError as error:
            if not prefix:
                raise DataFolderError(f"the folder '{root}' cannot be listed: {error.strerror}") from error
            scan.skipped[prefix.rstrip("/")] = f"the folder cannot be listed: {error.strerror}"
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _IGNORED_FOLDERS:
                continue
            if entry.is_dir():
                pending.append((f"{prefix}{entry.name}/", entry.path))
            else:
                yield prefix + entry.name, entry


def _look_at(path: str, entry: os.DirEntry, scan: Scan) -> None:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        scan.skipped[shown] = "its name is not valid UTF-8: rename it"
        return
    kind = kind_of_name(path)
    try:
        about = entry.stat()
    except OSError as error:
        gone = "is a link to nothing" if entry.is_symlink() else f"cannot be looked at: {error.strerror}"
        scan.skipped[path] = f"it {gone}"
        return
    if not stat.S_ISREG(about.st_mode):
        scan.skipped[path] = "it is a pipe, a socket or a device, not a file"
    elif kind is None:
        extension = os.path.splitext(path)[1].lower() or "no extension"
        scan.skipped[path] = f"a file with {extension} is not read; pictures, videos, PDFs and texts are"
    elif about.st_size == 0:
        scan.skipped[path] = "it is empty (0 bytes)"
    else:
        scan.files[path] = FileState(path, about.st_size, about.st_mtime_ns, kind)


def look_again(root: Path, path: str) -> tuple[int, int] | None:
    """Returns size and time of change of a file as it stands now, `None` when it is gone."""
    try:
        about = os.stat(root / path)
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns


def digest_of(source: bytes | Path) -> str:
    """Returns the content hash (BLAKE2b, 32 hexadecimal digits) of bytes, or of a file, which is read in blocks."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    if isinstance(source, bytes):
        digest.update(source)
        return digest.hexdigest()
    with open(source, "rb") as stream:
        return hashlib.file_digest(stream, lambda: digest).hexdigest()
