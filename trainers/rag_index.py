"""Brings an index up to date with its folder: what is new or changed is embedded, what is gone is forgotten."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from .errors import MoEMBError
from .rag_encoder import Encoder
from .rag_files import FileState, Scan, look_again, scan_folder
from .rag_readers import OpenedFile, ReadSettings, Unit, UnreadableError, open_file
from .rag_store import FileRecord, Store


# What is decoded and not yet embedded stays below this many bytes (and one item more).
_PENDING_BYTES = 256 * 2**20
_RECORDS_AT_ONCE = 64
_SECONDS_BETWEEN_COMMITS = 5.0


class IndexingError(MoEMBError, OSError):
    """Indexing cannot go on, such as on a full disk. The message names the cause; what was committed stays."""


@dataclass
class Progress:
    """
    Where an update stands; another thread may read it.

    Args:
        state (`str`): `"idle"`, `"scanning"`, `"indexing"` or `"stopped"`.
        done (`int`): files that were gone through.
        total (`int`): files that have to be.
        embedded (`int`): units embedded so far.
        current (`str`): the file that is being read.
        started (`float`): when the update began, by `time.monotonic`.
    """

    state: str = "idle"
    done: int = 0
    total: int = 0
    embedded: int = 0
    current: str = ""
    started: float = 0.0

    def seconds_left(self) -> float | None:
        """Seconds until the update is done at the speed so far, `None` when that cannot be said."""
        if self.state != "indexing" or self.done < 5:
            return None
        return (time.monotonic() - self.started) / self.done * (self.total - self.done)


@dataclass
class Report:
    """
    What an update did.

    Args:
        indexed (`int`): files that were embedded, wholly or, after a kill, the rest of them.
        renamed (`int`): files that took over the vectors of a file with the same content.
        unchanged (`int`): files that stood as the index knew them.
        removed (`int`): files that are gone.
        units (`int`): vectors that were made.
        postponed (`list[str]`): files that changed or went away while they were read; the next update takes them.
        skipped (`dict[str, str]`): why files, or parts of them, are not in the index, by path. All of them, not
            only those of this update.
        seconds (`float`): time it took.
        complete (`bool`): whether it came to its end instead of being stopped.
    """

    indexed: int = 0
    renamed: int = 0
    unchanged: int = 0
    removed: int = 0
    units: int = 0
    postponed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = True

    @property
    def changed(self) -> bool:
        """`bool`: whether the index is another one than before."""
        return bool(self.indexed or self.renamed or self.removed)


@dataclass
class _Open:
    """A file whose units are on their way."""

    state: FileState
    opened: OpenedFile
    units: int = 0
    waiting: int = 0
    read: bool = False
    failed: str = ""


class Indexer:
    """
    Keeps one index in step with one folder.

    Args:
        store (`Store`): the index.
        encoder (`Encoder`): embeds.
        root (`Path`): the folder.
        settings (`ReadSettings`, *optional*): how files are read.
        budget (`dict`, *optional*): `adaptive_compute` of documents; full compute by default.
    """

    def __init__(
        self,
        store: Store,
        encoder: Encoder,
        root: Path,
        settings: ReadSettings | None = None,
        budget: dict[str, Any] | None = None,
    ):
        self.store, self.encoder, self.root = store, encoder, root
        self.settings, self.budget = settings or ReadSettings(), budget
        self.progress = Progress()
        self.last: Report | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """Makes a running update end after its current batch. The next update goes on there."""
        self._stop.set()

    def update(self, watch: Callable[[Progress], None] = lambda progress: None) -> Report:
        """
        Goes through the folder once.

        Args:
            watch (`Callable`, *optional*): called with the progress after each file.

        Returns:
            [`Report`]

        Raises:
            DataFolderError: the folder is gone.
            IndexingError: the disk is full or fails.
        """
        started = time.monotonic()
        self.progress = Progress("scanning", started=started)
        try:
            report = _Update(self, watch).run()
        except OSError as error:
            if isinstance(error, MoEMBError):
                raise
            raise IndexingError(f"the index in {self.store.folder} cannot be written: {error}") from error
        except RuntimeError as error:  # what Lance raises for failing disks
            if "No space left" not in str(error) and "IO" not in str(error):
                raise
            raise IndexingError(f"the index in {self.store.folder} cannot be written: {error}") from error
        finally:
            self.progress.state = "stopped" if self._stop.is_set() else "idle"
        report.seconds = time.monotonic() - started
        self.last = report
        return report


class _Update:
    """One pass over the folder."""

    def __init__(self, indexer: Indexer, watch: Callable[[Progress], None]):
        self.indexer, self.store, self.watch = indexer, indexer.store, watch
        self.progress = indexer.progress
        self.report = Report()
        self.known = self.store.records()
        self.present = self.store.present()
        self.batch: list[tuple[_Open, Unit]] = []
        self.batch_bytes = 0
        self.records: list[FileRecord] = []
        self.outdated: set[str] = set()
        self.committed = time.monotonic()

    def run(self) -> Report:
        scan = scan_folder(self.indexer.root)
        todo = [state for path, state in scan.files.items() if not self._settled(state)]
        self.report.unchanged = len(scan.files) - len(todo)
        self._note_unread(scan.skipped)
        gone = [path for path in {**self.known, **self.present} if _is_gone(path, scan)]
        renamed = self._renamed_from(gone)
        self.progress.state, self.progress.total = "indexing", len(todo)
        # Alike items in one batch waste nothing on each other, and pictures are what people look at first.
        for state in sorted(todo, key=lambda state: (("image", "clip", "text", "pdf").index(state.kind), state.path)):
            if self.indexer._stop.is_set():
                self.report.complete = False
                break
            self.progress.current = state.path
            self._index(state, renamed)
            self.progress.done += 1
            self.watch(self.progress)
        self._embed()
        self._commit()
        if self.report.complete:
            self.store.forget(gone)
            self.report.removed = len(gone)
        if self.report.changed:
            self.store.compact()
        self.report.skipped = {path: r.reason for path, r in sorted(self.store.records().items()) if r.reason}
        return self.report

    def _settled(self, state: FileState) -> bool:
        record = self.known.get(state.path)
        return record is not None and record.kind == state.kind and state.same_as(record.size, record.modified)

    def _note_unread(self, skipped: dict[str, str]) -> None:
        """Files of no readable kind, empty ones and the like: noted when that is news."""
        for path, reason in skipped.items():
            record = FileRecord(path, status="skipped", reason=reason)
            if self.known.get(path) != record:
                self.records.append(record)
                if path in self.present:
                    self.outdated.add(path)

    def _renamed_from(self, gone: Sequence[str]) -> dict[str, str]:
        """Paths that are gone by the hash of what they held."""
        records = (self.known[path] for path in gone if path in self.known)
        return {r.digest: r.path for r in records if r.digest and r.status == "indexed" and not r.reason}

    def _index(self, state: FileState, renamed: dict[str, str]) -> None:
        here = self.present.get(state.path, {})

        def wanted(digest: str, name: tuple[str, int]) -> bool:
            return name not in here.get(digest, ())

        try:
            sampling = self.indexer.encoder.sampling
            opened = open_file(self.indexer.root, state, self.indexer.settings, sampling, wanted)
        except UnreadableError as error:
            self._skip(state, "", str(error))
            return
        digest = opened.digest
        if any(other != digest for other in here):
            self.outdated.add(state.path)
        source = renamed.get(digest)
        if source is not None and digest not in here and self.known[source].kind == state.kind:
            count = self.store.copy(source, state.path, digest)
            self._done(replace(self.known[source], path=state.path, modified=state.modified, units=count))
            self.report.renamed += 1
            return
        file = _Open(state, opened, units=len(here.get(digest, ())))
        try:
            for unit in opened.units:
                file.waiting += 1
                self.batch.append((file, unit))
                self.batch_bytes += unit.cost
                if len(self.batch) >= self.indexer.encoder.batch_size or self.batch_bytes > _PENDING_BYTES:
                    self._embed()
                if self.indexer._stop.is_set():
                    return
        except UnreadableError as error:
            file.failed = str(error)
        file.read = True
        if not file.waiting:
            self._finish(file)

    def _embed(self) -> None:
        """Embeds what waits and adds it to the index in one commit."""
        batch, self.batch, self.batch_bytes = self.batch, [], 0
        if not batch:
            return
        vectors, reasons = embed_each(self.indexer.encoder, [unit.item for _, unit in batch], self.indexer.budget)
        kept = [row for row, reason in enumerate(reasons) if not reason]
        if kept:
            entries = [(batch[row][0].state.path, batch[row][0].opened.digest, batch[row][1]) for row in kept]
            self.store.add(entries, np.stack([vectors[row] for row in kept]))
        self.report.units += len(kept)
        self.progress.embedded += len(kept)
        for (file, unit), reason in zip(batch, reasons, strict=True):
            file.waiting -= 1
            file.units += not reason
            if reason:
                file.opened.problems.append(f"{unit.place}: {reason}" if unit.place else reason)
        for file in {id(file): file for file, _ in batch}.values():
            if file.read and not file.waiting:
                self._finish(file)

    def _finish(self, file: _Open) -> None:
        state = file.state
        now = look_again(self.indexer.root, state.path)
        if now is None or not state.same_as(*now):
            # It changed under our hands: what was read may be half of it. The next update sees it as it is then.
            self.report.postponed.append(state.path)
            self.known.pop(state.path, None)
            return
        problems = [*file.opened.problems, *([file.failed] if file.failed else [])]
        if not file.units:
            self._skip(state, file.opened.digest, "; ".join(problems[:3]) or "nothing of it can be embedded")
            return
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        self._done(FileRecord(state.path, state.size, state.modified, file.opened.digest, state.kind, "indexed",
                              f"only in part: {shown}" if shown else "", file.units))  # fmt: skip
        self.report.indexed += 1

    def _skip(self, state: FileState, digest: str, reason: str) -> None:
        if look_again(self.indexer.root, state.path) is None:
            self.report.postponed.append(state.path)
            return
        if state.path in self.present:
            self.outdated.add(state.path)
        self._done(FileRecord(state.path, state.size, state.modified, digest, state.kind, "skipped", reason))

    def _done(self, record: FileRecord) -> None:
        self.records.append(record)
        due = time.monotonic() - self.committed > _SECONDS_BETWEEN_COMMITS
        if len(self.records) >= _RECORDS_AT_ONCE or due:
            self._commit()

    def _commit(self) -> None:
        self.store.record(self.records, self.outdated)
        self.records, self.outdated = [], set()
        self.committed = time.monotonic()


def _is_gone(path: str, scan: Scan) -> bool:
    """Files below a folder that cannot be listed at the moment may still be there."""
    hidden = any(str(parent) in scan.skipped for parent in PurePosixPath(path).parents)
    return path not in scan.files and path not in scan.skipped and not hidden


def embed_each(
    encoder: Encoder, items: Sequence[Any], budget: dict[str, Any] | None = None
) -> tuple[list[np.ndarray | None], list[str]]:
    """
    Embeds items such that one that fails does not take its batch along.

    Args:
        encoder (`Encoder`): embeds.
        items (`Sequence`): the items.
        budget (`dict`, *optional*): `adaptive_compute`.

    Returns:
        `tuple[list, list[str]]`: vectors float32 `[dim]` and reasons, one of each per item; `None` where there is a
        reason, an empty reason where there is a vector.
    """
    try:
        vectors = list(encoder.documents(items, budget))
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if len(items) > 1:
            parts = [embed_each(encoder, [item], budget) for item in items]
            return [part[0][0] for part in parts], [part[1][0] for part in parts]
        return [None], [str(error).removeprefix("item 0: ") or type(error).__name__]
    reasons = ["" if np.isfinite(vector).all() else "the model gave no finite vector" for vector in vectors]
    return [None if reason else vector for vector, reason in zip(vectors, reasons, strict=True)], reasons
