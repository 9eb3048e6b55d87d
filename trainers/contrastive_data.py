"""Data sets of contrastive training: what `datasets` loads, row by row as a query, a positive and negatives.

Pictures and videos are not decoded here: their bytes or paths go to the model's processor, so that an item gets the
vector in training that it gets at inference. A text from a data set is always a text, never the name of a file.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import MoEMBError, nearest


QUERY_NAMES = ("query", "anchor", "question", "sentence1")
POSITIVE_NAMES = ("positive", "document", "answer", "sentence2")
NEGATIVE_NAMES = ("negatives", "negative")
LAYOUTS = ("columns", "mmeb")
# The official MMEB-train layout: a text with this in the place of its picture, and the picture's path.
MMEB_IMAGE = "<|image_1|>"
MMEB_COLUMNS = {
    "query": {"text": "qry", "image": "qry_image_path"},
    "positive": {"text": "pos_text", "image": "pos_image_path"},
    "negatives": {"text": "neg_text", "image": "neg_image_path"},
}
_KINDS = ("text", "image", "video")


class DataError(MoEMBError, ValueError):
    """A data set that cannot be used; the text names the data set, the setting and the remedy."""


class RowError(MoEMBError, ValueError):
    """A row that cannot be used; the text names the data set, the row, the column and what is wrong."""


@dataclass(frozen=True)
class DatasetSettings:
    """
    Where a data set comes from and what its columns mean.

    Args:
        path (`str`): What `datasets.load_dataset` takes (`json`, `parquet`, `csv`, `imagefolder`, a Hub id, ...), or a
            folder that `save_to_disk` wrote.
        name (`str`, *optional*): Name of the configuration.
        data_files (*optional*): File, files or pattern, for the generic builders.
        data_dir (`str`, *optional*): Folder, for the builders that take one.
        split (`str`, *optional*, defaults to `"train"`): Split, slices such as `train[:1%]` included.
        revision (`str`, *optional*): Version on the Hub.
        layout (`str`, *optional*, defaults to `"columns"`): `"columns"`, or `"mmeb"` for the one of MMEB-train.
        columns (`dict`, *optional*):
            What makes the `query`, the `positive` and the `negatives` of a row: a column, or a mapping of `text`,
            `image` and `video` to columns. A column of images or videos is one, of strings is text; under `image` and
            `video` strings are paths. `negatives` may also be a column of lists, or a list of columns. A column named
            under `key` says what a row is about: rows with equal keys are not each other's negatives. Without
            `columns` the usual names are looked for (query or anchor; positive; negative, negative_1, ...).
        media_root (`str`, *optional*): Folder that relative paths start from.
        weight (`float`, *optional*):
            Share of the batches, relative to the other data sets' weights; by default the number of rows.
        max_rows (`int`, *optional*): Use the first rows alone.
        query_instruction, document_instruction (`str`, *optional*):
            Instruction of each side; by default the model's recorded prompts `query` and `document`.
    """

    path: str
    name: str | None = None
    data_files: Any = None
    data_dir: str | None = None
    split: str = "train"
    revision: str | None = None
    layout: str = "columns"
    columns: dict[str, Any] | None = None
    media_root: str | None = None
    weight: float | None = None
    max_rows: int | None = None
    query_instruction: str | None = None
    document_instruction: str | None = None

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is not known{nearest(self.layout, LAYOUTS)}; use {LAYOUTS}")
        if self.layout == "mmeb" and self.columns:
            raise ValueError("layout 'mmeb' brings its own columns: leave columns out")
        if self.weight is not None and not self.weight > 0:
            raise ValueError(f"weight {self.weight!r} must be positive; leave the data set out instead of 0")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows {self.max_rows!r} must be at least 1")


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


def dataset_settings(name: str, values: Any) -> DatasetSettings:
    """Reads the settings of one data set.

    Raises:
        DataError: for an unknown key, or a value that cannot be.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"data set '{name}' is {values!r}; give it a mapping such as {{path: json, data_files: ...}}")
    known = [entry.name for entry in dataclasses.fields(DatasetSettings)]
    for key in values:
        if key not in known:
            raise DataError(f"data set '{name}': unknown key '{key}'{nearest(str(key), known)}")
    if not isinstance(values.get("path"), str):
        raise DataError(f"data set '{name}' has no path: name a builder (json, parquet, imagefolder) or a Hub id")
    try:
        return DatasetSettings(**values)
    except (ValueError, TypeError) as error:
        raise DataError(f"data set '{name}': {error}") from error


def load_rows(settings: DatasetSettings, name: str) -> Any:
    """The `datasets.Dataset` of the settings, pictures and videos left encoded.

    Raises:
        DataError: when it cannot be loaded, streams, or is empty.
    """
    import datasets

    where = _expand({"data_files": settings.data_files, "data_dir": settings.data_dir})
    path = os.path.expanduser(os.path.expandvars(settings.path))
    try:
        if Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            loaded = loaded[settings.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(
                path, settings.name, split=settings.split, revision=settings.revision, **where
            )
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"data set '{name}' cannot be loaded: {' '.join(str(error).split())}") from error
    for column, feature in loaded.features.items():
        if isinstance(feature, (datasets.Image, datasets.Video)):
            loaded = loaded.cast_column(column, type(feature)(decode=False))
    if settings.max_rows is not None:
        loaded = loaded.select(range(min(settings.max_rows, len(loaded))))
    if len(loaded) == 0:
        raise DataError(f"data set '{name}' has no rows in split {settings.split!r}")
    return loaded


def _expand(value: Any) -> Any:
    """`~` and `$NAME` in every path of a nested setting."""
    if isinstance(value, str):
        return os.path.expanduser(os.path.expandvars(value))
    if isinstance(value, Mapping):
        return {key: _expand(one) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_expand(one) for one in value]
    return value


def _negative_columns(columns: Sequence[str]) -> Any:
    numbered = [column for column in columns if column.startswith("negative_")]
    named = [column for column in columns if column in NEGATIVE_NAMES]
    return (named + numbered) or None


def default_columns(columns: Sequence[str], name: str) -> dict[str, Any]:
    """What the usual column names mean.

    Raises:
        DataError: when there is no query or no positive among them.
    """
    found = {
        "query": next((column for column in QUERY_NAMES if column in columns), None),
        "positive": next((column for column in POSITIVE_NAMES if column in columns), None),
        "negatives": _negative_columns(columns),
    }
    missing = [side for side in ("query", "positive") if found[side] is None]
    if missing:
        raise DataError(
            f"data set '{name}' has the columns {list(columns)}, and none of them says that it is the {missing[0]}: "
            f"set its columns, such as {{query: {columns[0]}, positive: {columns[-1]}}}"
        )
    return {side: column for side, column in found.items() if column is not None}


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
        self.media_root = _expand(settings.media_root)

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
