"""MRMR: five expert-level retrieval tasks over interleaved texts and pictures, read from their official layout.

Each set has the tables `query`, `corpus` and `qrels`. Where a text says `<image>` or `<image 2>`, that picture of the
row stands there. Source: Zhang et al. 2025 (arXiv:2510.09510) and rebeccaz4/MRMR.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MoEMBError, nearest
from .ranking_tables import open_table, relevance_by_query, require_columns
from .ranking_task import (
    BenchmarkDataError,
    RankingRow,
    RankingTask,
    TablePicture,
    TaskItem,
    check_ranking_task,
)


IMAGE_COLUMNS = ("image", "image 1", "image 2", "image 3", "image 4")
IMAGE_MODES = ("interleaved", "merged")
_PLACEHOLDER = re.compile(r"<(image(?: [1-4])?)>")


class UnknownMRMRTaskError(MoEMBError, ValueError):
    """A task that MRMR does not have. The message names it and the nearest one it has."""


@dataclass(frozen=True)
class MRMRTask:
    """
    Args:
        name (`str`): the set.
        instruction (`str`): what a query asks.
        revision (`str`): revision of its Hub dataset, `MRMRbenchmark/<name>`.
        metric (`str`, *optional*): main metric.
        disciplines (`Mapping[str, str]`, *optional*): from a query's `category` to its discipline in the report.
        documents (`int`, *optional*): documents of the published corpus, where known.
        own_candidates (`bool`, *optional*): whether a query is ranked against its own four documents (`<query>_1` to
            `<query>_4`) alone.
    """

    name: str
    instruction: str
    revision: str
    metric: str = "ndcg_linear@10"
    disciplines: Mapping[str, str] | None = None
    documents: int | None = None
    own_candidates: bool = False

    @property
    def repository(self) -> str:
        """Id of the Hub dataset."""
        return f"MRMRbenchmark/{self.name}"


def _by_discipline(groups: Mapping[str, str]) -> dict[str, str]:
    return {category: discipline for discipline, categories in groups.items() for category in categories.split()}


TASKS = {
    task.name: task
    for task in (
        MRMRTask(
            "knowledge", "Retrieve relevant documents that help answer the question.",
            "c4e9395dfd01e875e5b4d204d2f9fd285c2a9d2e", documents=26_223,
            disciplines=_by_discipline({
                "Art": "Art Art_Theory Design Music",
                "Humanities": "Sociology Literature History Psychology",
                "Medicine": "Clinical_Medicine Diagnostics_and_Laboratory_Medicine Basic_Medical_Science Pharmacy",
                "Science": "Biology Chemistry Geography Agriculture",
            }),
        ),
        MRMRTask(
            "theorem", "Retrieve relevant theorems that are involved in solving the problem.",
            "2a4b0d370ed0e2d322cf092ab1d35348997b3fed", documents=14_257,
            disciplines=_by_discipline({
                "Business": "Accounting Finance Manage Marketing Economics",
                "Engineering":
                    "Electronics Computer_Science Mechanical_Engineering Materials Architecture_and_Engineering",
                "Math": "Math",
                "Physics": "Physics Energy_and_Power",
            }),
        ),
        MRMRTask(
            "traffic", "Given a traffic case, retrieve the driving rule documents that it violates.",
            "5de2aa10c61753c2c23cbf8c42b2743859c709a5", documents=796,
        ),
        MRMRTask(
            "design", "Given a vehicle design, retrieve the design requirements that it violates.",
            "fc6325cdffd332e69da9144d55a0fdb4cfb98848",
        ),
        MRMRTask(
            "negation",
            "Given an image, retrieve descriptions that have contradictory information with the image.",
            "ee5e669c8b257790a9c66c4d9464f6d77f33636b", metric="hit@1", documents=800, own_candidates=True,
        ),
    )
}  # fmt: skip


def select_mrmr_tasks(wanted: Sequence[str]) -> list[MRMRTask]:
    """
    Chooses tasks.

    Args:
        wanted (`Sequence[str]`): names; empty means all five.

    Returns:
        `list[MRMRTask]`: in the benchmark's order.

    Raises:
        UnknownMRMRTaskError: a name that is no task.
    """
    for name in wanted:
        if name not in TASKS:
            raise UnknownMRMRTaskError(f"MRMR has no task '{name}'{nearest(name, TASKS)}; it has {', '.join(TASKS)}")
    return [task for name, task in TASKS.items() if not wanted or name in wanted]


def read_mrmr_task(task: MRMRTask, folder: Path, images: str = "interleaved", limit: int | None = None) -> RankingTask:
    """
    Reads a set.

    Args:
        task (`MRMRTask`): which one.
        folder (`Path`): folder with a folder for each set; a set that is not there comes from the Hub.
        images (`str`, *optional*, defaults to `"interleaved"`): `"interleaved"` puts each picture where the text names
            it; `"merged"` takes the one picture of the column `image`, as the official harness does for models that
            read one picture.
        limit (`int`, *optional*): queries that are read; all when left out.

    Returns:
        [`RankingTask`]: queries without a relevant document are left out, as officially.

    Raises:
        BenchmarkDataError: data are missing or not as the layout says.
    """
    tables = {config: _table(task, folder, config) for config in ("query", "corpus", "qrels")}
    queries, source = tables["query"]
    corpus = [tables["corpus"][0], *_distractors(task, folder)]
    relevant = relevance_by_query(tables["qrels"][0], task.name)
    pool: dict[str, TaskItem] = {}
    for number, table in enumerate(corpus):
        require_columns(table, ("id",), task.name)
        for row, identity in enumerate(table["id"]):
            # Distractors have ids of their own numbering.
            pool[f"extra-{row}" if number else str(identity)] = row_item(table, row, images)
    require_columns(queries, ("id", "text"), task.name)
    items, rows = [], []
    for row, identity in enumerate(map(str, queries["id"])):
        if identity not in relevant or (limit is not None and len(items) >= limit):
            continue
        items.append(row_item(queries, row, images, task.instruction))
        category = queries[row].get("category") or ""
        group = (task.disciplines or {}).get(category, category)
        rows.append(RankingRow(relevant[identity], _own(task, identity, pool), group))
    read = RankingTask(task.name, "mrmr", task.metric, items, rows, pool, source)
    check_ranking_task(read)
    return read


def _table(task: MRMRTask, folder: Path, config: str) -> tuple[Any, str]:
    return open_table([folder / task.name], task.repository, config, "test", task.revision)


def _distractors(task: MRMRTask, folder: Path) -> list[Any]:
    """Further documents of a set (`pin_p`); early versions keep them in a table of their own."""
    if not any((folder / task.name).glob("pin_p*")):
        return []
    return [_table(task, folder, "pin_p")[0]]


def _own(task: MRMRTask, query: str, pool: Mapping[str, Any]) -> tuple[str, ...] | None:
    if not task.own_candidates:
        return None
    found = tuple(name for name in (f"{query}_{number}" for number in range(1, 5)) if name in pool)
    if len(found) < 2:
        raise BenchmarkDataError(f"{task.name}: query {query} has {len(found)} candidates of the form {query}_1")
    return found


def row_item(table: Any, row: int, images: str, instruction: str = "") -> TaskItem:
    """
    Makes an item of a row.

    Args:
        table (`datasets.Dataset`): with `text` and any of `IMAGE_COLUMNS`.
        row (`int`): the row.
        images (`str`): see [`read_mrmr_task`].
        instruction (`str`, *optional*): the item's instruction.

    Returns:
        [`TaskItem`]: pictures that the text does not name stand before it. A row with numbered pictures does not use
        `image`, which then is a montage of them.

    Raises:
        BenchmarkDataError: the row has neither text nor picture.
    """
    content = table[row]
    filled = [column for column in IMAGE_COLUMNS if _has_picture(content.get(column))]
    if images == "merged":
        filled = [column for column in filled if column == "image"]
    elif len(filled) > 1:
        filled = [column for column in filled if column != "image"]
    left = {column: TablePicture(table, row, column) for column in filled}
    text = content.get("text") or ""
    parts: list[tuple[str, Any]] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text) if images == "interleaved" else ():
        name = match.group(1)
        if name not in left and len(left) == 1 and len(filled) == 1:
            name = filled[0]  # one picture is `image` in one place and `image 1` in the other
        if name in left:
            parts += [("text", text[position : match.start()]), ("image", left.pop(name))]
            position = match.end()
    parts.append(("text", text[position:]))
    parts = [*(("image", picture) for picture in left.values()), *parts]
    parts = [(kind, value) for kind, value in parts if kind != "text" or value.strip()]
    if not parts:
        raise BenchmarkDataError(f"row {row} of the table has neither a text nor a picture")
    return TaskItem(tuple(parts), instruction)


def _has_picture(cell: Any) -> bool:
    return isinstance(cell, Mapping) and bool(cell.get("bytes") or cell.get("path"))
