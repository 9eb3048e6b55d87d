"""The rows of a data set of contrastive training: each a query, a positive and negatives.

Pictures and videos are not decoded here: their bytes or paths go to the model's processor, so that an item gets the
vector in training that it gets at inference. A text from a data set is always a text, never the name of a file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .contrastive_sources import DataError, DatasetSettings, dataset_settings, default_columns, expand_paths, load_rows
from .errors import MoEMBError, nearest


# The official MMEB-train layout: a text with this in the place of its picture, and the picture's path.
MMEB_IMAGE = "<|image_1|>"
MMEB_COLUMNS = {
    "query": {"text": "qry", "image": "qry_image_path"},
    "positive": {"text": "pos_text", "image": "pos_image_path"},
    "negatives": {"text": "neg_text", "image": "neg_image_path"},
}
_KINDS = ("text", "image", "video")


class RowError(MoEMBError, ValueError):
    """A row that cannot be used; the text names the data set, the row, the column and what is wrong."""


@dataclass
class Row:
    """
    One training example.

    Args:
        dataset (`int`): Number of its data set in the recipe.
        source (`str`): Name of it.
        number (`int`): Number of the row in it.
        query, positive: Items as the processor takes them.
        negatives (`list`): Likewise.
        key (`str`, *optional*): What the row is about.
    """

    dataset: int
    source: str
    number: int
    query: Any
    positive: Any
    negatives: list[Any] = field(default_factory=list)
    key: str | None = None


class PairDataset:
    """
    The rows of one data set.

    Args:
        name (`str`): Its name in the recipe.
        number (`int`): Its place there.
        settings (`DatasetSettings`): Its settings.
        hard_negatives (`int`, *optional*, defaults to 0): Most negatives of a row.

    Raises:
        DataError: when it cannot be loaded, or a column is not there.
    """

    def __init__(self, name: str, number: int, settings: DatasetSettings, hard_negatives: int = 0):
        self.name, self.number, self.settings, self.hard_negatives = name, number, settings, hard_negatives
        self.data = load_rows(settings, name)
        present = self.data.column_names
        if settings.layout == "mmeb":
            self.columns = {side: dict(kinds) for side, kinds in MMEB_COLUMNS.items()}
            if not set(MMEB_COLUMNS["negatives"].values()) <= set(present):
                del self.columns["negatives"]
        else:
            self.columns = dict(settings.columns or default_columns(present, name))
        self._check_columns(present)
        if settings.layout == "mmeb":
            self._drop_empty()
        self.media_root = expand_paths(settings.media_root)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Row:
        """The row `number`.

        Raises:
            RowError: when its query or positive is empty, of the wrong type, or names a file that is not there.
        """
        try:
            values = self.data[int(number)]
        except Exception as error:  # whatever a builder raises for a row it cannot decode
            raise RowError(f"data set '{self.name}', row {number}: it cannot be read: {error}") from error
        row = Row(self.number, self.name, int(number), *(self._item(values, number, s) for s in ("query", "positive")))
        if self.hard_negatives and "negatives" in self.columns:
            row.negatives = self._negatives(values, number)[: self.hard_negatives]
        if "key" in self.columns:
            row.key = str(values[self.columns["key"]])
        return row

    def _check_columns(self, present: Sequence[str]) -> None:
        known = ("query", "positive", "negatives", "key")
        for side, spec in self.columns.items():
            if side not in known:
                raise DataError(f"data set '{self.name}': columns name '{side}'{nearest(side, known)}; use {known}")
            for column in _named_columns(spec, side, self.name):
                if column not in present:
                    raise DataError(
                        f"data set '{self.name}' has no column '{column}' for its {side}{nearest(column, present)}; "
                        f"it has {list(present)}"
                    )
        for side in ("query", "positive"):
            if side not in self.columns:
                raise DataError(f"data set '{self.name}': columns name no {side}")

    def _drop_empty(self) -> None:
        """MMEB-train holds a few rows without a query or a positive; the official loader passes over them too."""
        named = [column for side in ("query", "positive") for column in MMEB_COLUMNS[side].values()]

        def whole(query, query_image, positive, positive_image):
            return bool(query or query_image) and bool(positive or positive_image)

        self.data = self.data.filter(whole, input_columns=named)
        if not len(self.data):
            raise DataError(f"data set '{self.name}' has no row with both a query and a positive")

    def _item(self, values: Mapping[str, Any], number: int, side: str) -> Any:
        item = self._build(self.columns[side], values, number, side)
        if item is None:
            shown = {column: values[column] for column in _named_columns(self.columns[side], side, self.name)}
            raise RowError(f"data set '{self.name}', row {number}: the {side} is empty ({_short(shown)})")
        return item

    def _negatives(self, values: Mapping[str, Any], number: int) -> list[Any]:
        specs = self.columns["negatives"]
        items = []
        for spec in specs if isinstance(specs, (list, tuple)) else [specs]:
            kinds = spec if isinstance(spec, Mapping) else {None: spec}
            lengths = [len(values[column]) for column in kinds.values() if isinstance(values[column], list)]
            if not lengths:
                items.append(self._build(spec, values, number, "negatives"))
                continue
            if len(set(lengths)) > 1:
                raise RowError(
                    f"data set '{self.name}', row {number}: the lists of its negatives are of lengths {lengths}"
                )
            for place in range(lengths[0]):
                one = {c: values[c][place] if isinstance(values[c], list) else values[c] for c in set(kinds.values())}
                items.append(self._build(spec, one, number, "negatives"))
        return [item for item in items if item is not None]

    def _build(self, spec: Any, values: Mapping[str, Any], number: int, side: str) -> Any:
        """The item that a column, or several, make of a row; `None` when all of them are empty."""
        if isinstance(spec, str):
            value, kind = values[spec], self._kind_of(spec)
            if value is None or (isinstance(value, (str, list, dict)) and not value):
                return None
            if kind is None:  # parts, chat messages, mappings: as the processor takes them
                return value
            return {kind: self._value(kind, value, number, f"{side}, column '{spec}'")}
        item = {}
        for kind, column in spec.items():
            value = values[column]
            if value is None or (isinstance(value, (str, list)) and not value):
                continue
            item[kind] = self._value(kind, value, number, f"{side}, column '{column}'")
        if self.settings.layout == "mmeb":
            return _in_reading_order(item) or None
        return item or None

    def _kind_of(self, column: str) -> str | None:
        import datasets

        feature = self.data.features[column]
        if isinstance(feature, (datasets.Image, datasets.Video)):
            return "image" if isinstance(feature, datasets.Image) else "video"
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, (datasets.Image, datasets.Video)):
            return "image" if isinstance(inner, datasets.Image) else "video"
        return "text" if getattr(inner, "dtype", None) in ("string", "large_string") else None

    def _value(self, kind: str, value: Any, number: int, place: str) -> Any:
        where = f"data set '{self.name}', row {number} ({place})"
        if isinstance(value, list):
            return [self._value(kind, one, number, place) for one in value]
        if kind == "text":
            if not isinstance(value, str):
                raise RowError(f"{where}: it is {_short(value)} ({type(value).__name__}), not a text")
            return value
        if isinstance(value, dict) and set(value) <= {"bytes", "path"}:
            if value.get("bytes"):
                return value["bytes"]
            value = value.get("path")
        if isinstance(value, str) and not value.startswith("data:"):
            return self._file(kind, value, where)
        if value is None:
            raise RowError(f"{where}: the {kind} has neither bytes nor a path")
        return value

    def _file(self, kind: str, name: str, where: str) -> str:
        path = os.path.join(self.media_root, name) if self.media_root else name
        if not os.path.exists(path):
            remedy = "" if self.media_root else "; set media_root if paths are relative"
            raise RowError(f"{where}: the {kind} '{path}' does not exist{remedy}")
        return os.path.abspath(path)


def _named_columns(spec: Any, side: str, name: str) -> list[str]:
    """The columns that a specification names.

    Raises:
        DataError: when it is no column, mapping of kinds, or (for negatives) list of these.
    """
    if isinstance(spec, str):
        return [spec]
    if isinstance(spec, Mapping) and side != "key":
        for kind, column in spec.items():
            if kind not in _KINDS or not isinstance(column, str):
                raise DataError(
                    f"data set '{name}': the {side} names {kind!r}: {column!r}; map {', '.join(_KINDS)} to columns"
                )
        return list(spec.values())
    if isinstance(spec, (list, tuple)) and side == "negatives":
        return [column for one in spec for column in _named_columns(one, "negative", name)]
    raise DataError(f"data set '{name}': the {side} is {spec!r}; name a column, or map {', '.join(_KINDS)} to columns")


def _in_reading_order(item: dict[str, Any]) -> Any:
    """An MMEB item without its placeholder; the picture stands first unless the placeholder stands elsewhere."""
    before, found, after = item.get("text", "").partition(MMEB_IMAGE)
    texts = [text.strip() for text in (before, after.replace(MMEB_IMAGE, ""))]
    if "image" in item and found and texts[0]:
        after_it = [{"text": texts[1]}] if texts[1] else []
        return [{"text": texts[0]}, {"image": item["image"]}, *after_it]
    text = "\n".join(filter(None, texts))
    return {**({"image": item["image"]} if "image" in item else {}), **({"text": text} if text else {})}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def load_datasets(recipe: Mapping[str, Any], hard_negatives: int = 0) -> list[PairDataset]:
    """The data sets of a recipe, in its order; see [`DatasetSettings`] for the values."""
    return [
        PairDataset(name, number, dataset_settings(name, values), hard_negatives)
        for number, (name, values) in enumerate(recipe.items())
    ]
