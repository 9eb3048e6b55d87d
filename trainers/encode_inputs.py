"""Corpora to encode: files, Parquet and `datasets` sources, as numbered rows that are read range by range.

A source knows how many rows it has and reads any range of them without reading what comes before (but for the rows of
the same Parquet row group). It pickles, so that every worker opens it for itself. A row is `(id, item)`; media are
passed on undecoded.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modeling_moemb.media_moemb import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS

from .encode_columns import READ_ROWS, Columns, InputError, Row, table_rows


FORMATS = ("auto", "files", "parquet", "datasets")
TEXT_EXTENSIONS = (".txt", ".text", ".md", ".markdown", ".rst")
LISTING = "listing.parquet"
_LISTING_ROWS = 50_000


@dataclass
class FileSource:
    """
    Files, one item each: texts, images and videos by their extension.

    Args:
        roots (`list[str]`): absolute files and folders.
        listing (`str`): the Parquet file that the walk is written to, so that it is never whole in memory.
        skipped (`dict[str, int]`): number of files of other extensions.
    """

    roots: list[str]
    listing: str
    skipped: dict[str, int] = field(default_factory=dict)

    def prepare(self) -> None:
        """Walks the folders in the order of names and writes the listing."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("id", pa.string()), ("path", pa.string()), ("kind", pa.string())])
        partial = f"{self.listing}.{os.getpid()}.partial"
        rows: list[dict[str, str]] = []
        with pq.ParquetWriter(partial, schema) as writer:
            for row in self._walk():
                rows.append(row)
                if len(rows) == _LISTING_ROWS:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema))
        os.replace(partial, self.listing)

    def _walk(self) -> Iterator[dict[str, str]]:
        many = len(self.roots) > 1
        for root in self.roots:
            base = Path(root)
            for path in [base] if base.is_file() else _files_below(base):
                kind = _kind_of(path)
                if kind is None:
                    self.skipped[path.suffix.lower()] = self.skipped.get(path.suffix.lower(), 0) + 1
                    continue
                name = path.name if base.is_file() else path.relative_to(base).as_posix()
                yield {
                    "id": f"{base.name}/{name}" if many and base.is_dir() else name,
                    "path": str(path),
                    "kind": kind,
                }

    def count(self) -> int:
        import pyarrow.parquet as pq

        return pq.read_metadata(self.listing).num_rows

    def identity(self) -> dict[str, Any]:
        """What the corpus is: its roots. The listing of the first run counts for all that follow."""
        return {"format": "files", "roots": self.roots}

    def read(self, start: int, stop: int) -> Iterator[Row]:
        for values in table_rows(self.listing, start, stop, ["id", "path", "kind"]):
            path = Path(values["path"])
            if values["kind"] == "text":
                yield values["id"], _TextFile(path)
            else:
                yield values["id"], {values["kind"]: path}


@dataclass(frozen=True)
class _TextFile:
    """A text that is read when it is needed, so that one that cannot be read fails alone."""

    path: Path

    def load(self) -> dict[str, str]:
        return {"text": self.path.read_text(encoding="utf-8")}


def loaded(item: Any) -> Any:
    """An item as the model takes it; texts of files are read here."""
    return item.load() if isinstance(item, _TextFile) else item


def _files_below(folder: Path) -> Iterator[Path]:
    """Files in the order of their names, folder by folder; hidden ones are left out, links to folders not followed."""
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _kind_of(path: Path) -> str | None:
    suffix = path.suffix.lower()
    for kind, extensions in (("text", TEXT_EXTENSIONS), ("image", IMAGE_EXTENSIONS), ("video", VIDEO_EXTENSIONS)):
        if suffix in extensions:
            return kind
    return None


@dataclass
class ParquetSource:
    """
    Parquet files, read in the order of their names.

    Args:
        files (`list[str]`): absolute paths.
        columns (`Columns`): resolved.
        rows (`list[int]`): of each file.
    """

    files: list[str]
    columns: Columns
    rows: list[int] = field(default_factory=list)

    def prepare(self) -> None:
        """Reads the footers."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.rows = []
        for name in self.files:
            try:
                metadata = pq.ParquetFile(name)
            except (OSError, pa.ArrowInvalid) as error:
                raise InputError(f"{name} is no Parquet file that can be read: {error}") from error
            self.columns = self.columns.resolve(metadata.schema_arrow.names, name)
            self.rows.append(metadata.metadata.num_rows)

    def count(self) -> int:
        return sum(self.rows)

    def identity(self) -> dict[str, Any]:
        """Names, sizes and times of the files, and the columns."""
        stats = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in self.files]
        return {"format": "parquet", "files": stats, "columns": vars(self.columns)}

    def read(self, start: int, stop: int) -> Iterator[Row]:
        first = 0
        for name, count in zip(self.files, self.rows, strict=True):
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                for number, values in enumerate(
                    table_rows(name, low - first, high - first, self.columns.wanted()), start=low
                ):
                    yield self.columns.row(values, number)
            first += count


@dataclass
class DatasetSource:
    """
    A source that `datasets` loads: a Hub id, a builder such as `json` with its files, or a folder of `save_to_disk`.

    Args:
        path (`str`): id, builder or folder.
        columns (`Columns`): resolved.
        name, split, revision (`str`, *optional*): as in `load_dataset`.
        data_files (`list[str]`, *optional*): as in `load_dataset`.
    """

    path: str
    columns: Columns
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: list[str] | None = None

    def prepare(self) -> None:
        """Loads (and where need be downloads) the dataset, and checks its columns."""
        self.columns = self.columns.resolve(self._open().column_names, f"the dataset {self.path}")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_dataset"}

    def _open(self) -> Any:
        if "_dataset" in vars(self):
            return self._dataset
        try:
            from datasets import Dataset, DatasetDict, Image, Video, load_dataset, load_from_disk
        except ImportError as error:
            raise InputError('a datasets source needs the library: pip install "moemb[encode]"') from error
        folder = Path(self.path)
        try:
            if folder.is_dir() and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()):
                found = load_from_disk(self.path)
            else:
                found = load_dataset(
                    self.path, self.name, split=self.split, revision=self.revision, data_files=self.data_files
                )
        except (OSError, ValueError, ConnectionError) as error:
            raise InputError(f"datasets cannot load {self.path!r}: {error}") from error
        if isinstance(found, DatasetDict):
            found = self._choose(found)
        if not isinstance(found, Dataset):
            raise InputError(f"{self.path!r} gives a {type(found).__name__}; a dataset of numbered rows is needed")
        for name, feature in found.features.items():
            if isinstance(feature, (Image, Video)):
                found = found.cast_column(name, type(feature)(decode=False))
        self._dataset = found
        return found

    def _choose(self, splits: Any) -> Any:
        if self.split is None and len(splits) == 1:
            return next(iter(splits.values()))
        if self.split not in splits:
            raise InputError(f"the dataset {self.path} has the splits {list(splits)}; choose one with --split")
        return splits[self.split]

    def count(self) -> int:
        return len(self._open())

    def identity(self) -> dict[str, Any]:
        """What was asked for, and the fingerprint that `datasets` gives the rows where it is steady."""
        files = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in self.data_files or []]
        return {
            "format": "datasets", "path": self.path, "name": self.name, "split": self.split, "revision": self.revision,
            "files": files, "rows": self.count(), "columns": vars(self.columns),
        }  # fmt: skip

    def read(self, start: int, stop: int) -> Iterator[Row]:
        dataset = self._open().select_columns(self.columns.wanted())
        for low in range(start, stop, READ_ROWS):
            high = min(low + READ_ROWS, stop)
            batch = dataset[low:high]
            for offset in range(high - low):
                yield self.columns.row({name: column[offset] for name, column in batch.items()}, low + offset)


Source = FileSource | ParquetSource | DatasetSource


def open_source(
    inputs: Sequence[str],
    output: Path,
    *,
    format: str = "auto",
    columns: Columns | None = None,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    data_files: Sequence[str] = (),
) -> Source:
    """
    The source that a command line means; nothing is read yet.

    Args:
        inputs (`Sequence[str]`): files and folders, or one `datasets` source.
        output (`Path`): the output folder; a listing of files is kept there.
        format (`str`, *optional*, defaults to `"auto"`): one of `FORMATS`.
        columns (`Columns`, *optional*): which columns make an item.
        name, split, revision, data_files: for `datasets`.

    Raises:
        InputError: there is no such file, or the format cannot be told.
    """
    columns = columns or Columns()
    paths = [Path(text).expanduser() for text in inputs]
    if format == "auto":
        format = _guess(inputs, paths)
    if format == "datasets":
        if len(inputs) != 1:
            raise InputError(f"--input names {len(inputs)} datasets; encode one at a time")
        path = str(paths[0].absolute()) if paths[0].exists() else inputs[0]
        files = [
            str(Path(text).expanduser().absolute()) if Path(text).expanduser().exists() else text
            for text in data_files
        ]
        return DatasetSource(path, columns, name, split, revision, files or None)
    for path in paths:
        if not path.exists():
            raise InputError(f"--input {path}: there is no such file or folder")
    if format == "parquet":
        files = sorted(
            str(file.absolute())
            for path in paths
            for file in ([path] if path.is_file() else path.rglob("*.parquet"))
            if not file.name.startswith((".", "_"))
        )
        if not files:
            raise InputError(f"--input {', '.join(inputs)}: there is no *.parquet")
        return ParquetSource(files, columns)
    return FileSource([str(path.absolute()) for path in paths], str(output.absolute() / LISTING))


def _guess(inputs: Sequence[str], paths: Sequence[Path]) -> str:
    if all(path.suffix == ".parquet" and path.is_file() for path in paths):
        return "parquet"
    if len(paths) == 1 and paths[0].is_dir():
        folder = paths[0]
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return "datasets"
        if next(folder.rglob("*.parquet"), None) is not None:
            return "parquet"
    if all(path.exists() for path in paths):
        return "files"
    if len(inputs) == 1 and inputs[0].count("/") <= 1 and not inputs[0].startswith((".", "/", "~")):
        return "datasets"
    missing = next(path for path in paths if not path.exists())
    raise InputError(f"--input {missing}: there is no such file or folder")


def fingerprint(source: Source, more: dict[str, Any]) -> str:
    """SHA-256 of what a source is and of whatever else decides the vectors."""
    text = json.dumps([source.identity(), more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
