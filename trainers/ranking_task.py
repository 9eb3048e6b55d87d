"""A retrieval task as the public benchmarks state it: items of ordered parts, instructions, a global or local ranking.

Nothing here decodes a picture: an item holds references, and what it refers to is read when its batch is encoded, so a
benchmark of a million pictures needs no memory for them.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modeling_moemb.media_moemb import IMAGE_EXTENSIONS

from .errors import MoEMBError


_IDENTIFYING_FOLDERS = 4


class BenchmarkDataError(MoEMBError, ValueError):
    """Data of a benchmark that is missing or not as its official layout says. The message names file and row."""


@dataclass(frozen=True)
class TablePicture:
    """
    A picture stored inside a table.

    Args:
        table (`datasets.Dataset`): the table; its pictures are not decoded (`{"bytes", "path"}`).
        row (`int`): its row.
        column (`str`): its column.
    """

    table: Any = field(repr=False, compare=False)
    row: int
    column: str

    def read(self) -> bytes:
        """Returns the encoded picture."""
        cell = self.table[self.row][self.column]
        if isinstance(cell, Mapping) and cell.get("bytes"):
            return cell["bytes"]
        if isinstance(cell, Mapping) and cell.get("path") and Path(cell["path"]).is_file():
            return Path(cell["path"]).read_bytes()
        raise BenchmarkDataError(f"row {self.row} of the table has no picture under '{self.column}'")


@dataclass(frozen=True)
class FrameFolder:
    """
    A video as the benchmarks ship it: a folder of frames saved beforehand, or the video they were saved from.

    Args:
        folder (`Path`): the frames, in the natural order of their names.
        video (`Path`, *optional*): read when the folder is absent or empty.
        saved (`int`, *optional*, defaults to 64): frames that are saved of a video at most.
    """

    folder: Path
    video: Path | None = None
    saved: int = 64

    def paths(self) -> list[Path]:
        """Returns the saved frames in order; empty when there are none."""
        if not self.folder.is_dir():
            return []
        frames = [path for path in self.folder.iterdir() if path.suffix.lower() in IMAGE_EXTENSIONS]
        return sorted(frames, key=lambda path: natural_order(path.name))

    def exists(self) -> bool:
        """Returns whether there are frames or a video."""
        return bool(self.paths()) or (self.video is not None and self.video.is_file())


def natural_order(name: str) -> list:
    """A sort key under which `frame_2` comes before `frame_10`."""
    return [(0, int(piece), "") if piece.isdigit() else (1, 0, piece.lower()) for piece in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class TaskItem:
    """
    One query or candidate.

    Args:
        parts (`tuple[tuple[str, Any], ...]`):
            Pairs `(kind, value)` in reading order: `("text", str)`, `("image", Path or TablePicture)` or
            `("video", FrameFolder)`.
        instruction (`str`, *optional*):
            What the benchmark asks of this item; whether and where it is used is a convention of the model.
    """

    parts: tuple[tuple[str, Any], ...]
    instruction: str = ""


@dataclass(frozen=True)
class RankingRow:
    """
    What is right for one query.

    Args:
        relevant (`Mapping[str, float]`): names of the right candidates and their relevance, above 0.
        candidates (`tuple[str, ...]`, *optional*): names that are ranked ("local"); `None` ranks the pool ("global").
        group (`str`, *optional*): the part of the benchmark it is reported under, such as a discipline.
    """

    relevant: Mapping[str, float]
    candidates: tuple[str, ...] | None = None
    group: str = ""


@dataclass(frozen=True)
class RankingTask:
    """
    A task, ready to be encoded and ranked.

    Args:
        name (`str`): as the benchmark calls it.
        group (`str`): group whose mean the benchmark reports, such as `"image-cls"`.
        metric (`str`): its main metric, a key of [`ranking_values`].
        queries (`Sequence[TaskItem]`): the queries.
        rows (`Sequence[RankingRow]`): one for each query.
        pool (`Mapping[str, TaskItem]`): the candidates by name.
        source (`str`): the dataset and split it was read from.
        expected_rows (`int`, *optional*): rows the leaderboard's version has, where that is known.
    """

    name: str
    group: str
    metric: str
    queries: Sequence[TaskItem]
    rows: Sequence[RankingRow]
    pool: Mapping[str, TaskItem]
    source: str = ""
    expected_rows: int | None = None

    @property
    def ranking(self) -> str:
        """`"global"`, `"local"` or `"mixed"`."""
        kinds = {"local" if row.candidates is not None else "global" for row in self.rows}
        return kinds.pop() if len(kinds) == 1 else "mixed"


def check_ranking_task(task: RankingTask) -> None:
    """
    Checks that queries, answers and candidates fit together and that their media are there.

    Raises:
        BenchmarkDataError: the message names the task, the row and what is wrong.
    """
    if not task.queries or not task.pool:
        raise BenchmarkDataError(f"{task.name}: {len(task.queries)} queries and {len(task.pool)} candidates")
    if len(task.queries) != len(task.rows):
        raise BenchmarkDataError(f"{task.name}: {len(task.queries)} queries but {len(task.rows)} rows of answers")
    for number, row in enumerate(task.rows):
        named = [*row.relevant, *(row.candidates or ())]
        if unknown := [name for name in named if name not in task.pool]:
            raise BenchmarkDataError(f"{task.name}: row {number} names {unknown[0]!r}, which is no candidate")
        if not row.relevant or min(row.relevant.values()) <= 0:
            raise BenchmarkDataError(f"{task.name}: row {number} has no candidate of positive relevance")
        if row.candidates is not None and not set(row.relevant) & set(row.candidates):
            raise BenchmarkDataError(f"{task.name}: none of the right answers of row {number} is among its candidates")
    _check_media(task)


def _check_media(task: RankingTask) -> None:
    seen, missing = set(), []
    for item in [*task.queries, *task.pool.values()]:
        for _, value in item.parts:
            if not isinstance(value, (Path, FrameFolder)) or value in seen:
                continue
            seen.add(value)
            if not (value.is_file() if isinstance(value, Path) else value.exists()):
                missing.append(value if isinstance(value, Path) else value.folder)
    if missing:
        shown = ", ".join(map(str, missing[:3]))
        raise BenchmarkDataError(f"{task.name}: {len(missing)} of {len(seen)} pictures or videos are missing: {shown}")


def media_identity(value: Any) -> bytes:
    """
    What identifies a part's content for the vector cache.

    A file is identified by the end of its path, its size and its time of change: hashing the content of every frame
    would read the whole benchmark again each time an evaluation is continued.

    Args:
        value (`str`, `Path`, `TablePicture` or `FrameFolder`): a part's value.

    Returns:
        `bytes`: equal for equal content.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, TablePicture):
        return hashlib.blake2b(value.read(), digest_size=16).digest()
    if isinstance(value, FrameFolder):
        frames = value.paths() or [value.video]
        return b"\0".join([str(value.saved).encode(), *map(media_identity, frames)])
    status = value.stat()
    tail = "/".join(value.parts[-_IDENTIFYING_FOLDERS:])
    return f"{tail}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape")
