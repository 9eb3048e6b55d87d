"""The index on disk: one LanceDB table of vectors with what a result shows, one of the files they come from.

Why LanceDB: it runs inside the process, keeps vectors on disk instead of in memory, filters before it ranks, and each
write is one atomic commit of a new version. So a search reads a whole version while files are being indexed, and a
process that is killed leaves the last commit. (Qdrant's local mode, the other candidate, holds all vectors in memory
and is documented as meant for tests; FAISS stores vectors without their metadata.)

A file's row in `files` is written after its vectors. What a killed run left behind it are vectors without that row:
they carry the hash of their file, so the next run keeps them and embeds only the rest.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .errors import MoEMBError
from .files import write_atomically
from .rag_readers import MODALITIES, Unit


try:
    import fcntl
except ImportError:  # Windows: two processes that write one index are then the user's to avoid
    fcntl = None

FORMAT = 1
_META = "index.json"
_UNITS, _FILES = "units", "files"
_PATHS_AT_ONCE = 200
_SHOWN = ["id", "path", "modality", "part", "page", "start", "place", "text"]
_FILE_COLUMNS = ("path", "size", "modified", "digest", "kind", "status", "reason", "units")


class IndexFolderError(MoEMBError, ValueError):
    """An index that cannot be used. The message names its folder, what is wrong and the remedy."""


@dataclass(frozen=True)
class FileRecord:
    """
    What the index knows about a file.

    Args:
        path (`str`): relative to the indexed folder.
        size (`int`): bytes, when it was read.
        modified (`int`): time of its last change then, nanoseconds.
        digest (`str`): hash of its content, empty if it was not read.
        kind (`str`): see `rag_files.KINDS`, empty for other files.
        status (`str`): `"indexed"` or `"skipped"`.
        reason (`str`): why it was skipped, or which of its parts were; empty when all is well.
        units (`int`): vectors of it.
    """

    path: str
    size: int = 0
    modified: int = 0
    digest: str = ""
    kind: str = ""
    status: str = "indexed"
    reason: str = ""
    units: int = 0


@dataclass(frozen=True)
class Hit:
    """
    A result.

    Args:
        id (`str`): of the unit, 32 hexadecimal digits.
        path (`str`): of its file, relative to the indexed folder.
        modality (`str`): `"image"`, `"page"`, `"text"` or `"clip"`.
        part, page (`int`): see [`Unit`].
        start (`float`): seconds into a video.
        place, text (`str`): see [`Unit`].
        score (`float`): cosine similarity with the query, from -1 to 1.
    """

    id: str
    path: str
    modality: str
    part: int
    page: int
    start: float
    place: str
    text: str
    score: float


def unit_id(path: str, modality: str, part: int) -> str:
    """Returns the name of a unit in the index, 32 hexadecimal digits that follow from its place."""
    return hashlib.blake2b(f"{path}\0{modality}\0{part}".encode(), digest_size=16).hexdigest()


def _schema(dimension: int) -> pa.Schema:
    text = [(name, pa.string()) for name in ("id", "path", "modality", "place", "text", "digest")]
    return pa.schema(
        [
            *text,
            ("part", pa.int32()),
            ("page", pa.int32()),
            ("start", pa.float32()),
            ("thumbnail", pa.binary()),
            ("vector", pa.list_(pa.float32(), dimension)),
        ]
    )


_FILES_SCHEMA = pa.schema(
    [(name, pa.int64() if name in ("size", "modified", "units") else pa.string()) for name in _FILE_COLUMNS]
)


class Store:
    """
    An index on disk, for one process that writes and any number of threads that read.

    Args:
        folder (`Path`): its folder, made when absent.
        facts (`Mapping`): what the vectors depend on (model, dimension, settings), JSON-serialisable; see
            [`check_facts`].

    Raises:
        IndexFolderError: another process writes to it, it was made by other facts or by another version.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]):
        import lancedb

        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise IndexFolderError(f"the index folder {folder} cannot be made ({error}); give another") from error
        self._lock = _lock(folder)
        known = read_facts(folder)
        if known is None:
            write_atomically(folder / _META, json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")
        else:
            check_facts(folder, known, facts)
        connection = lancedb.connect(str(folder / "lance"))
        self.units = connection.create_table(_UNITS, schema=_schema(facts["dimension"]), exist_ok=True)
        self.files = connection.create_table(_FILES, schema=_FILES_SCHEMA, exist_ok=True)

    def close(self) -> None:
        """Lets another process write to the index."""
        if self._lock is not None:
            self._lock.close()

    def records(self) -> dict[str, FileRecord]:
        """Returns what is known of every file, by path."""
        rows = self.files.search().limit(None).to_arrow().select(list(_FILE_COLUMNS)).to_pylist()
        return {row["path"]: FileRecord(**row) for row in rows}

    def present(self) -> dict[str, dict[str, set[tuple[str, int]]]]:
        """Returns the units that have vectors: by path and content hash, their modality and part."""
        table = self.units.search().select(["path", "digest", "modality", "part"]).limit(None).to_arrow()
        found: dict[str, dict[str, set[tuple[str, int]]]] = {}
        columns = (table[name].to_pylist() for name in ("path", "digest", "modality", "part"))
        for path, digest, modality, part in zip(*columns, strict=True):
            found.setdefault(path, {}).setdefault(digest, set()).add((modality, part))
        return found

    def add(self, entries: Sequence[tuple[str, str, Unit]], vectors: np.ndarray) -> None:
        """Adds units as `(path, digest, unit)` with vectors float32 `[units, dim]`, in one commit."""
        columns = {
            "id": [unit_id(path, unit.modality, unit.part) for path, _, unit in entries],
            "path": [path for path, _, _ in entries],
            "digest": [digest for _, digest, _ in entries],
            **{
                name: [getattr(unit, name) for _, _, unit in entries]
                for name in ("modality", "place", "text", "part", "page", "start", "thumbnail")
            },
        }
        schema = self.units.schema
        flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).reshape(-1))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        self.units.add(pa.table([pa.array(columns[f.name], type=f.type) for f in schema], schema=schema))

    def copy(self, source: str, target: str, digest: str) -> int:
        """Gives a file the vectors of another one with the same content; returns how many there are."""
        rows = self.units.search().where(f"path = {_quoted(source)} AND digest = '{digest}'").limit(None).to_arrow()
        rows = rows.select(self.units.schema.names)
        pairs = zip(rows["modality"].to_pylist(), rows["part"].to_pylist(), strict=True)
        ids = pa.array([unit_id(target, modality, part) for modality, part in pairs], type=pa.string())
        rows = rows.set_column(rows.schema.get_field_index("id"), "id", ids)
        paths = pa.array([target] * len(rows), type=pa.string())
        self.units.add(rows.set_column(rows.schema.get_field_index("path"), "path", paths))
        return len(rows)

    def record(self, records: Iterable[FileRecord], outdated: Iterable[str] = ()) -> None:
        """
        Notes files as done.

        Args:
            records (`Iterable[FileRecord]`): the files.
            outdated (`Iterable[str]`): paths among them that may have vectors of an earlier content; these go.
        """
        records = list(records)
        if not records:
            return
        old = set(outdated)
        wrong = [f"(path = {_quoted(r.path)} AND digest <> '{r.digest}')" for r in records if r.path in old]
        for start in range(0, len(wrong), _PATHS_AT_ONCE):
            self.units.delete(" OR ".join(wrong[start : start + _PATHS_AT_ONCE]))
        rows = pa.Table.from_pylist([asdict(record) for record in records], schema=_FILES_SCHEMA)
        self.files.merge_insert("path").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def forget(self, paths: Sequence[str]) -> None:
        """Removes files that are gone, vectors first."""
        for start in range(0, len(paths), _PATHS_AT_ONCE):
            names = ", ".join(map(_quoted, paths[start : start + _PATHS_AT_ONCE]))
            self.units.delete(f"path IN ({names})")
            self.files.delete(f"path IN ({names})")

    def compact(self) -> None:
        """Joins the small pieces that many commits leave; versions that a search may be reading stay for a minute."""
        for table in (self.units, self.files):
            table.optimize(cleanup_older_than=timedelta(minutes=1))

    def search(
        self, vector: np.ndarray, results: int, modalities: Sequence[str] = MODALITIES, folder: str = ""
    ) -> list[Hit]:
        """
        Ranks all units by their similarity; exact, nothing is approximated.

        Args:
            vector (`np.ndarray`): float32 `[dim]`, of unit length.
            results (`int`): how many to return.
            modalities (`Sequence[str]`, *optional*): those that may be found.
            folder (`str`, *optional*): only files below it, relative to the indexed folder.

        Returns:
            `list[Hit]`: best first; equal scores in the order of their paths.
        """
        conditions = []
        if set(modalities) != set(MODALITIES):
            names = [name for name in MODALITIES if name in modalities]
            if not names:
                return []
            conditions.append(f"modality IN ({', '.join(map(_quoted, names))})")
        if folder.strip("/"):
            conditions.append(f"starts_with(path, {_quoted(folder.strip('/') + '/')})")
        query = self.units.search(np.asarray(vector, dtype=np.float32)).distance_type("cosine")
        if conditions:
            query = query.where(" AND ".join(conditions), prefilter=True)
        rows = query.select([*_SHOWN, "_distance"]).limit(results).to_list()
        hits = [Hit(**{name: row[name] for name in _SHOWN}, score=1 - row["_distance"]) for row in rows]
        return sorted(hits, key=lambda hit: (-round(hit.score, 6), hit.path, hit.modality, hit.part))

    def sample(self, results: int) -> list[Hit]:
        """Returns some units spread over the index, things to see before texts; always the same of the same index."""
        for condition in ("modality <> 'text'", "modality = 'text'"):
            total = self.units.count_rows(condition)
            if total:
                break
        else:
            return []
        places = {index * total // results for index in range(results)} if total > results else range(total)
        table = self.units.search().where(condition).select(["id"]).limit(None).to_arrow()
        ids = ", ".join(f"'{table['id'][place].as_py()}'" for place in places)
        rows = self.units.search().where(f"id IN ({ids})").select(_SHOWN).limit(results).to_list()
        hits = [Hit(**{name: row[name] for name in _SHOWN}, score=0.0) for row in rows]
        return sorted(hits, key=lambda hit: (hit.path, hit.modality, hit.part))

    def get(self, identity: str, columns: Sequence[str]) -> dict[str, Any] | None:
        """Returns some columns of a unit, `None` when there is none of that id."""
        if len(identity) != 32 or not identity.isalnum():
            return None
        rows = self.units.search().where(f"id = '{identity}'").select(list(columns)).limit(1).to_list()
        return {name: rows[0][name] for name in columns} if rows else None

    def counts(self) -> dict[str, int]:
        """Returns how many units there are of each modality."""
        column = self.units.search().select(["modality"]).limit(None).to_arrow()["modality"]
        pairs = {row["values"]: row["counts"] for row in column.value_counts().to_pylist()}
        return {name: pairs.get(name, 0) for name in MODALITIES}


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Returns what an index was made by, `None` when there is no index in the folder."""
    try:
        known = json.loads((folder / _META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise IndexFolderError(f"{folder / _META} cannot be read ({error}); remove the folder") from error
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        raise IndexFolderError(f"the index in {folder} was made by another moemb; index again with --rebuild")
    return known


def check_facts(folder: Path, known: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raises [`IndexFolderError`] when an index holds vectors that those of today cannot be compared with."""
    for name, value in facts.items():
        if name == "probe":
            old, new = np.asarray(known.get(name), dtype=np.float32), np.asarray(value, dtype=np.float32)
            # Another device or kernel rounds differently; another model sees the probes quite differently.
            if old.shape == new.shape and float((old * new).sum(axis=-1).min()) > 0.99:
                continue
            shown = f"the model '{known.get('model')}' that made it sees things otherwise than '{facts['model']}'"
        elif name == "model" or known.get(name) == value:
            continue
        else:
            shown = f"it was made with {name} {known.get(name)!r}, not {value!r}"
        raise IndexFolderError(
            f"the index in {folder} does not fit: {shown}. Index again with --rebuild, or give another --index"
        )


def _lock(folder: Path) -> Any:
    lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held until `close`
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise IndexFolderError(
                f"the index in {folder} is in use by another moemb app; stop it, or give another --index"
            ) from None
    return lock


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
