"""Where the data sets of contrastive training come from: settings of a recipe to what `datasets` loads."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MoEMBError, nearest


QUERY_NAMES = ("query", "anchor", "question", "sentence1")
POSITIVE_NAMES = ("positive", "document", "answer", "sentence2")
NEGATIVE_NAMES = ("negatives", "negative")
LAYOUTS = ("columns", "mmeb")


class DataError(MoEMBError, ValueError):
    """A data set that cannot be used; the text names the data set, the setting and the remedy."""


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

    where = expand_paths({"data_files": settings.data_files, "data_dir": settings.data_dir})
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
        if (encoded := _encoded(feature)) != feature:
            loaded = loaded.cast_column(column, encoded)
    if settings.max_rows is not None:
        loaded = loaded.select(range(min(settings.max_rows, len(loaded))))
    if len(loaded) == 0:
        raise DataError(f"data set '{name}' has no rows in split {settings.split!r}")
    return loaded


def _encoded(feature: Any) -> Any:
    """The same feature with its pictures and videos left encoded, also inside of lists."""
    import datasets

    if isinstance(feature, (datasets.Image, datasets.Video)):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_encoded(feature.feature), length=feature.length)
    return feature


def expand_paths(value: Any) -> Any:
    """`~` and `$NAME` in every path of a nested setting."""
    if isinstance(value, str):
        return os.path.expanduser(os.path.expandvars(value))
    if isinstance(value, Mapping):
        return {key: expand_paths(one) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [expand_paths(one) for one in value]
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
