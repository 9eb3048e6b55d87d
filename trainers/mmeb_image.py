"""The 36 image tasks of MMEB-V2: classification, question answering, retrieval and visual grounding.

A row holds its own instructions (`qry_inst`, `tgt_inst`), a query (`qry_text`, `qry_img_path`) and its candidates
(`tgt_text`, `tgt_img_path`), the right one first. Only these are ranked for it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .mmeb_sources import MMEBSources, gather, text_item
from .mmeb_tasks import MMEBTask
from .ranking_tables import require_columns
from .ranking_task import BenchmarkDataError, RankingRow, RankingTask, TaskItem


_MARK = "<|image_1|>"


def read_image_text(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a task that asks with a picture and answers with texts: `image-cls`, `image-qa` and image to caption."""
    rows, source = _rows(task, sources, ("qry_inst", "qry_text", "qry_img_path", "tgt_text"))
    root = sources.image_root(task, rows[0]["qry_img_path"])
    queries, answers, candidates = [], [], []
    for number, row in enumerate(rows):
        names = _texts(row, "tgt_text", task, number)
        queries.append(_pictured(root, row["qry_img_path"], row["qry_text"], row["qry_inst"]))
        answers.append(RankingRow({names[0]: 1.0}, tuple(names)))
        candidates += [(name, text_item(name)) for name in names]
    return gather(task, source, queries, answers, candidates)


def read_text_image(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a task that asks with a text and answers with pictures, some of them with captions."""
    rows, source = _rows(task, sources, ("qry_inst", "qry_text", "tgt_inst", "tgt_text", "tgt_img_path"))
    root = sources.image_root(task, _texts(rows[0], "tgt_img_path", task, 0)[0])
    queries, answers, candidates = [], [], []
    for number, row in enumerate(rows):
        paths = _texts(row, "tgt_img_path", task, number)
        queries.append(text_item(row["qry_text"], _instruction(row["qry_inst"])))
        answers.append(RankingRow({paths[0]: 1.0}, tuple(paths)))
        candidates += _captioned(root, row, paths, paths, task, number)
    return gather(task, source, queries, answers, candidates)


def read_image_image(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """
    Reads a task that asks with a picture and a text and answers with pictures: composed retrieval, visual grounding.

    In RefCOCO-Matching several objects of one picture are candidates, so a candidate's name is its path and caption.
    """
    columns = ("qry_inst", "qry_text", "qry_img_path", "tgt_inst", "tgt_text", "tgt_img_path")
    rows, source = _rows(task, sources, columns)
    root = sources.image_root(task, rows[0]["qry_img_path"])
    queries, answers, candidates = [], [], []
    for number, row in enumerate(rows):
        paths = _texts(row, "tgt_img_path", task, number)
        captions = _captions(row, paths)
        names = [f"{path}:{caption.strip(chr(34))}" for path, caption in zip(paths, captions, strict=True)]
        queries.append(_pictured(root, row["qry_img_path"], row["qry_text"], row["qry_inst"]))
        answers.append(RankingRow({names[0]: 1.0}, tuple(names)))
        candidates += _captioned(root, row, paths, names, task, number)
    return gather(task, source, queries, answers, candidates)


def _rows(task: MMEBTask, sources: MMEBSources, columns: tuple[str, ...]) -> tuple[Any, str]:
    table, source = sources.table(task)
    require_columns(table, columns, task.name)
    if not len(table):
        raise BenchmarkDataError(f"{task.name}: the table {source} is empty")
    return sources.rows(task, table), source


def _texts(row: Mapping[str, Any], column: str, task: MMEBTask, number: int) -> list[str]:
    values = row[column]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise BenchmarkDataError(f"{task.name}: '{column}' of row {number} is {values!r}, not a list of texts")
    return values


def _captions(row: Mapping[str, Any], paths: list[str]) -> list[str]:
    captions = list(row["tgt_text"] or [])
    return captions if len(captions) == len(paths) else [captions[0] if captions else ""] * len(paths)


def _instruction(text: str | None) -> str:
    return (text or "").replace(_MARK, "").strip()


def _pictured(root: Path, path: str, text: str | None, instruction: str | None) -> TaskItem:
    return TaskItem((("image", root / path), ("text", text or "")), _instruction(instruction))


def _captioned(
    root: Path, row: Mapping[str, Any], paths: list[str], names: list[str], task: MMEBTask, number: int
) -> list[tuple[str, TaskItem]]:
    """Pictures with their captions; whether a task's candidates have any is told by the first, as officially."""
    captions = _captions(row, paths)
    if not captions[0].strip():
        captions = [""] * len(paths)
    if len(names) != len(paths):
        raise BenchmarkDataError(f"{task.name}: row {number} has {len(paths)} pictures and {len(names)} names")
    items = (_pictured(root, path, caption, row["tgt_inst"]) for path, caption in zip(paths, captions, strict=True))
    return list(zip(names, items, strict=True))
