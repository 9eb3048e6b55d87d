"""Tables of a benchmark: from a folder that lies here, else from the Hub through `datasets`.

A folder may be a clone of a Hub dataset (Parquet or JSON Lines, with or without sub-folders for its configurations) or
what `save_to_disk` wrote. Pictures stay encoded until they are needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ranking_task import BenchmarkDataError


_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def open_table(
    folders: Sequence[Path], repository: str, subset: str | None, split: str, revision: str | None = None
) -> tuple[Any, str]:
    """
    Opens a table.

    Args:
        folders (`Sequence[Path]`): places to look at, in this order.
        repository (`str`): id of the Hub dataset, when none of them is there.
        subset (`str`, *optional*): the configuration.
        split (`str`): the split.
        revision (`str`, *optional*): revision on the Hub.

    Returns:
        `tuple[Dataset, str]`: the table, pictures undecoded, and where it came from, without folders of this machine.

    Raises:
        BenchmarkDataError: it is in none of these places, or cannot be read.
    """
    import datasets

    name = f"{repository}{f', {subset}' if subset else ''}, {split}"
    for folder in folders:
        if not folder.is_dir():
            continue
        files = table_files(folder, subset, split)
        try:
            if files:
                kind = _FORMATS[files[0].suffix]
                table = datasets.load_dataset(kind, data_files=[str(path) for path in files], split="train")
                return undecoded(table), f"{folder.name}: {name}"
            if saved := _saved_to_disk(folder, subset, split):
                return undecoded(datasets.load_from_disk(str(saved))), f"{folder.name}: {name}"
        except Exception as error:
            raise BenchmarkDataError(f"the table {name} in {folder} cannot be read: {error}") from error
    try:
        return undecoded(datasets.load_dataset(repository, subset, split=split, revision=revision)), name
    except Exception as error:
        looked, reason = ", ".join(map(str, folders)), " ".join(str(error).split())[:200]
        raise BenchmarkDataError(
            f"the table {name} is neither here (looked at {looked}) nor to be had from the Hub ({reason}); "
            f"download it with: hf download --repo-type dataset {repository} --local-dir {folders[0]}"
        ) from error


def table_files(folder: Path, subset: str | None, split: str) -> list[Path]:
    """
    Finds the files of one split of one configuration in a clone of a Hub dataset.

    Args:
        folder (`Path`): the clone.
        subset (`str`, *optional*): the configuration.
        split (`str`): the split.

    Returns:
        `list[Path]`: files of one format, sorted; empty when there are none.
    """
    stems = (
        [f"{subset}/{split}-*", f"{subset}/{split}", f"{subset}/{split}/*", f"{subset}-{split}*", f"{subset}_{split}*",
         f"data/{subset}/{split}*", f"{subset}"]
        if subset
        else [f"data/{split}-*", f"data/{split}", f"{split}-*", f"{split}", f"{split}/*", f"{folder.name}"]
    )  # fmt: skip
    for stem in stems:
        for suffix in _FORMATS:
            if found := sorted(folder.glob(f"{stem}{suffix}")):
                return found
    return []


def _saved_to_disk(folder: Path, subset: str | None, split: str) -> Path | None:
    base = folder / subset if subset else folder
    return next((place for place in (base / split, base) if (place / "state.json").is_file()), None)


def undecoded(table: Any) -> Any:
    """Returns a table whose pictures, lone or in lists, are `{"bytes", "path"}`."""
    import datasets

    for name, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    return table


def require_columns(table: Any, columns: Sequence[str], name: str) -> None:
    """Raises `BenchmarkDataError` when a table lacks one of the columns of its official layout."""
    if missing := [column for column in columns if column not in table.column_names]:
        raise BenchmarkDataError(f"{name}: the table lacks the columns {missing}; it has {table.column_names}")


def relevance_by_query(table: Any, name: str) -> dict[str, dict[str, float]]:
    """
    Reads a table of relevance judgements (BEIR's qrels).

    Args:
        table (`datasets.Dataset`): columns `query-id`, `corpus-id` (or with `_`), `score`.
        name (`str`): the task, for errors.

    Returns:
        `dict[str, dict[str, float]]`: by query the relevant documents with their highest score above 0.

    Raises:
        BenchmarkDataError: a column is missing.
    """
    names = {column.replace("_", "-"): column for column in table.column_names}
    if missing := [column for column in ("query-id", "corpus-id", "score") if column not in names]:
        raise BenchmarkDataError(f"{name}: the relevance table lacks {missing}; it has {table.column_names}")
    found: dict[str, dict[str, float]] = {}
    columns = [table[names[column]] for column in ("query-id", "corpus-id", "score")]
    for query, document, score in zip(*columns, strict=True):
        if float(score) > 0:
            documents = found.setdefault(str(query), {})
            documents[str(document)] = max(documents.get(str(document), 0.0), float(score))
    return found
