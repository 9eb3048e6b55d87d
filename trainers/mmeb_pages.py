"""The 24 visual document tasks of MMEB-V2: a question is ranked against all pages of a corpus.

ViDoRe, ViDoSeek, MMLongBench and VisRAG share BEIR's layout: `queries`, `corpus` (with the page as a picture) and
`qrels` (with graded relevance). A page that was unpacked beside the tables is read from its file.
"""

import hashlib
from pathlib import Path
from typing import Any

from .mmeb_sources import MMEBSources, gather, text_item
from .mmeb_tasks import MMEBTask
from .ranking_tables import relevance_by_query, require_columns
from .ranking_task import BenchmarkDataError, RankingRow, RankingTask, TablePicture, TaskItem


_SHORT_NAME = 50


def read_pages(task: MMEBTask, sources: MMEBSources) -> RankingTask:
    """Reads a visual document task; a `subset` of the task is a language of its queries."""
    queries, source = sources.table(task, config="queries")
    corpus, _ = sources.table(task, config="corpus")
    judged, _ = sources.table(task, config="qrels")
    require_columns(queries, ("query-id", "query"), task.name)
    require_columns(corpus, ("corpus-id", "image"), task.name)
    relevant = relevance_by_query(judged, task.name)
    if task.subset is not None:
        require_columns(queries, ("language",), task.name)
        queries = queries.filter(lambda language: language == task.subset, input_columns=["language"])
    pages = _pages(task, sources, corpus)
    items, answers = [], []
    for number, row in enumerate(sources.rows(task, queries)):
        identity = str(row["query-id"])
        if identity not in relevant:
            raise BenchmarkDataError(f"{task.name}: query {identity} (row {number}) has no relevant page")
        items.append(text_item(row["query"], task.query_instruction))
        answers.append(RankingRow(relevant[identity]))
    return gather(task, source, items, answers, pages)


def _pages(task: MMEBTask, sources: MMEBSources, corpus: Any) -> list[tuple[str, TaskItem]]:
    folder = sources.folder / task.media
    unpacked = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    pages = []
    for number, identity in enumerate(map(str, corpus["corpus-id"])):
        name = page_file(identity, task)
        picture: Any = folder / name if name in unpacked else TablePicture(corpus, number, "image")
        pages.append((identity, TaskItem((("image", picture),), task.candidate_instruction)))
    return pages


def page_file(identity: str, task: MMEBTask) -> str:
    """
    The name that an unpacked page has.

    Args:
        identity (`str`): its id in the corpus.
        task (`MMEBTask`): the task. VisRAG's ids are file names, shortened to 50 characters and a checksum.

    Returns:
        `str`: the file name.
    """
    if not task.name.startswith("VisRAG"):
        return f"{identity}.png"
    path = Path(identity)
    checksum = hashlib.md5(identity.encode("utf-8"), usedforsecurity=False).hexdigest()[:8]
    return f"{identity.removesuffix(path.suffix)[:_SHORT_NAME]}_{checksum}{path.suffix}"
