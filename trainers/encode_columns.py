"""Tables to items: which columns make one, and rows of Parquet files by range."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import MoEMBError, nearest


MODALITIES = ("text", "image", "video")
READ_ROWS = 64

Row = tuple[str, Any]


class InputError(MoEMBError, ValueError):
    """A corpus that cannot be read. The message names the file or column and the remedy."""


@dataclass(frozen=True)
class Columns:
    """
    Which columns of a table make an item.

    Args:
        id (`str`, *optional*): of the row's name; the row's number when there is none.
        text, image, video (`str`, *optional*): of the parts.
    """

    id: str | None = None
    text: str | None = None
    image: str | None = None
    video: str | None = None

    def resolve(self, present: Sequence[str], where: str) -> "Columns":
        """
        Checks the named columns, and takes those that bear the names `id`, `text`, `image` and `video` otherwise.

        Raises:
            InputError: a named column is missing, or none is left to embed.
        """
        chosen: dict[str, str | None] = {}
        for part in ("id", *MODALITIES):
            name = getattr(self, part)
            if name is not None and name not in present:
                raise InputError(f"{where} has no column {name!r}{nearest(name, present)}; it has {list(present)}")
            chosen[part] = name or (part if part in present else None)
        named = any(getattr(self, part) for part in MODALITIES)
        if named:  # what is named is all that is embedded
            chosen |= {part: getattr(self, part) for part in MODALITIES}
        if not any(chosen[part] for part in MODALITIES):
            raise InputError(
                f"{where} has no column text, image or video; name one with --text-column, --image-column or "
                f"--video-column. It has {list(present)}"
            )
        return Columns(**chosen)

    def wanted(self) -> list[str]:
        """The columns to read."""
        return list(dict.fromkeys(name for name in (self.id, self.text, self.image, self.video) if name))

    def row(self, values: dict[str, Any], number: int) -> Row:
        """The id and the item of a row. Texts are texts: one that names a file is not opened."""
        parts = {part: values[name] for part in MODALITIES if (name := getattr(self, part))}
        parts = {part: _undecoded(value) for part, value in parts.items() if value is not None}
        return str(number if self.id is None else values[self.id]), parts


def _undecoded(value: Any) -> Any:
    """The storage form of a `datasets` image or video: its bytes, else its path."""
    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return value["bytes"] if value["bytes"] is not None else value["path"]
    return value


def table_rows(name: str, start: int, stop: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Rows `start` to `stop` of a Parquet file, a few at a time; row groups outside of the range are not read."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(name) as file:
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                position = first
                for batch in file.iter_batches(READ_ROWS, row_groups=[group], columns=columns):
                    end = position + batch.num_rows
                    if end > low and position < high:
                        yield from batch.slice(max(0, low - position), min(high, end) - max(low, position)).to_pylist()
                    position = end
                    if position >= high:
                        break
            first += count
