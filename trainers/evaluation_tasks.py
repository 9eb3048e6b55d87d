"""Which held-out tasks there are, where each comes from, and what stands beside the model on each.

Tasks 1 to 7 and 9a travel with the repository as a gallery of permissively licensed items; the others are built
locally, since their licences do not allow shipping them here. A task that is not there is reported with the command
that builds it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .baselines import System, cosine_system, image_baselines, text_baselines
from .baselines_pretrained import FEATURES, MINILM, RIDGE, BaselineUnavailable, PretrainedBaselines
from .errors import MoEMBError, nearest


BUILD_COMMAND = "build it with `moemb data --evaluation`"

SHIPPED_TASKS = {
    "emoji-artist": "1",
    "emoji-flags": "1",
    "emoji-concept": "2",
    "emoji-concept-full": "2",
    "emoji-caption": "3",
    "emoji-subgroup": "3",
    "style": "4",
    "xling-image": "5",
    "xling-text": "5",
    "skin-edit": "6",
    "clip": "7a",
    "motion": "7b",
    "strip": "9a",
}
LOCAL_TASKS = {
    "wiki": "8",
    "refman": "9b",
    "stamps": "10",
    "metamath": "11",
    "flag-capital": "11",
}
TASKS = dict(sorted((SHIPPED_TASKS | LOCAL_TASKS).items(), key=lambda task: (int(task[1].rstrip("ab")), task[1])))


class UnknownTaskError(MoEMBError, ValueError):
    """A task name that does not exist. The message names it and the nearest valid one."""


class BrokenTaskError(MoEMBError, ValueError):
    """A task whose queries, documents and answers do not fit together. The message names the task and the place."""


@dataclass(frozen=True)
class NotRun:
    """Something that did not run, and why.

    Args:
        name (`str`):
            Task or system.
        reason (`str`):
            The reason, with the command that mends it.
    """

    name: str
    reason: str


def select_task_names(wanted: Sequence[str] | None) -> list[str]:
    """
    Checks task names.

    Args:
        wanted (`Sequence[str]`, *optional*):
            Names such as `"style"`, or numbers such as `"7a"`; `None` or empty means all.

    Returns:
        `list[str]`: names in the order of the tasks' numbers, without repeats.

    Raises:
        UnknownTaskError: a name or number that no task has.
    """
    if not wanted:
        return list(TASKS)
    chosen: set[str] = set()
    for entry in wanted:
        found = [name for name, number in TASKS.items() if str(entry).lower() in (name, number)]
        if not found:
            choices = [*TASKS, *dict.fromkeys(TASKS.values())]
            raise UnknownTaskError(
                f"there is no task '{entry}'{nearest(str(entry), choices)}; the tasks are {', '.join(TASKS)}"
            )
        chosen.update(found)
    return [name for name in TASKS if name in chosen]


class TaskSource:
    """
    Gives the tasks one at a time, so that only one task's images are in memory.

    Args:
        gallery (`Path`, *optional*):
            Folder of the shipped gallery; `None` means the one beside the recipes.
        corpus (`Path`, *optional*):
            Folder of the locally built corpus; `None` means the one in the cache.
    """

    def __init__(self, gallery: Path | None = None, corpus: Path | None = None):
        self._gallery_path, self._corpus_path = gallery, corpus
        self._gallery: Any = None

    def load(self, name: str) -> "Any | NotRun":
        """
        Loads one task.

        Args:
            name (`str`):
                A name of `TASKS`.

        Returns:
            `EvaluationTask` or `NotRun`: the task, or why it is not there.

        Raises:
            BrokenTaskError: the task's parts do not fit together.
        """
        task = self._shipped(name) if name in SHIPPED_TASKS else self._built(name)
        if not isinstance(task, NotRun):
            check_task(task)
        return task

    def _shipped(self, name: str) -> "Any | NotRun":
        from .corpus_gallery import GalleryError, load_gallery

        if self._gallery is None:
            try:
                self._gallery = load_gallery(self._gallery_path)
            except GalleryError as error:
                return NotRun(name, str(error))
        if name not in self._gallery.task_names:
            return NotRun(name, "the gallery does not hold it: write it again with `moemb data --gallery`")
        return self._gallery.task(name)

    def _built(self, name: str) -> "Any | NotRun":
        from .corpus import default_corpus_folder
        from .corpus_evaluation import load_local_task

        task = load_local_task(self._corpus_path or default_corpus_folder(), name)
        return task if task is not None else NotRun(name, BUILD_COMMAND)


def check_task(task) -> None:
    """Raises `BrokenTaskError` when answers, exclusions, lines or clusters point outside the task."""
    queries, documents = len(task.queries), len(task.documents)
    if not queries or not documents:
        raise BrokenTaskError(f"task {task.name} has {queries} queries and {documents} documents; both must be there")
    for field in ("relevant", "exclude"):
        rows = getattr(task, field)
        if (rows or field == "relevant") and len(rows) != queries:
            raise BrokenTaskError(f"task {task.name}: {field} has {len(rows)} rows for {queries} queries")
        for query, row in enumerate(rows):
            if any(not 0 <= index < documents for index in row) or (field == "relevant" and not row):
                raise BrokenTaskError(f"task {task.name}: {field} of query {query} is {row} for {documents} documents")
    for line, rows in task.groups.items():
        if not rows or any(not 0 <= index < queries for index in rows):
            raise BrokenTaskError(f"task {task.name}: line '{line}' is empty or points outside {queries} queries")
    if task.clusters is not None and len(task.clusters) != queries:
        raise BrokenTaskError(f"task {task.name}: {len(task.clusters)} cluster labels for {queries} queries")


def task_lines(task) -> dict[str, list[int]]:
    """Returns the lines of a task's table: all queries first, then its named groups, as query indexes."""
    return {"all": list(range(len(task.queries)))} | dict(task.groups)


def item_kinds(items: Sequence[dict]) -> frozenset[str]:
    """Returns the keys that occur in the items, out of `"text"`, `"image"`, `"video"`."""
    return frozenset(name for item in items for name in item)


def model_systems(task, encode: Callable[[Sequence[dict], str], np.ndarray], name: str) -> list[System]:
    """
    The model on a task, and the model with a part of each item hidden.

    Args:
        task (`EvaluationTask`):
            The task.
        encode (`Callable`):
            `encode(items, side)` returns float32 `[items, dim]`; side is `"query"` or `"document"`.
        name (`str`):
            Name of the model in the tables.

    Returns:
        `list[System]`: the model itself first. For composed queries also the image alone and the text alone, for
        clips the first frame alone: what these already solve needs no composition and no sense of time.
    """
    documents = encode(task.documents, "document")
    queries = encode(task.queries, "query")
    systems = [cosine_system(name, queries, documents)]
    if item_kinds(task.queries) == {"image", "text"}:
        for part in ("image", "text"):
            vectors = encode([{part: query[part]} for query in task.queries], "query")
            systems.append(cosine_system(f"{name}, {part} alone", vectors, documents, f"{part} of the query alone"))
    if item_kinds(task.documents) == {"video"}:
        frames = encode([{"image": document["video"][0]} for document in task.documents], "document")
        systems.append(cosine_system(f"{name}, first frame alone", queries, frames, "first frame of each clip"))
    return systems


def baseline_systems(task, pretrained: PretrainedBaselines | None) -> tuple[list[System], list[NotRun]]:
    """
    The baselines that apply to a task.

    Args:
        task (`EvaluationTask`):
            The task.
        pretrained (`PretrainedBaselines`, *optional*):
            MiniLM and the ridge pipeline; `None` leaves them out on request.

    Returns:
        `tuple[list[System], list[NotRun]]`: systems, and those that apply but could not run, with the reason.
    """
    asked, given = item_kinds(task.queries), item_kinds(task.documents)
    systems: list[System] = []
    if asked == given == {"text"}:
        systems += text_baselines(_part(task.queries, "text"), _part(task.documents, "text"))
    elif "image" in asked and given == {"image"}:
        note = "" if asked == {"image"} else "image of the query alone"
        systems += image_baselines(_part(task.queries, "image"), _part(task.documents, "image"), note)
    if pretrained is None:
        return systems, []
    not_run: list[NotRun] = []
    for name, build in _pretrained_builders(asked, given).items():
        try:
            systems.append(build(task, pretrained))
        except BaselineUnavailable as error:
            not_run.append(NotRun(name, str(error)))
    return systems, not_run


def _part(items: Sequence[dict], name: str) -> list:
    return [item[name] for item in items]


def _pretrained_builders(asked: frozenset[str], given: frozenset[str]) -> dict[str, Callable[..., System]]:
    """Returns by name the pretrained systems that can read both sides; each is built by `(task, pretrained)`."""
    if asked == given == {"text"}:
        return {MINILM: _minilm_system}
    if asked == given == {"image"}:
        return {FEATURES: _features_system, RIDGE: _ridge_system}
    if {asked, given} == {frozenset({"text"}), frozenset({"image"})}:
        return {RIDGE: _ridge_system}
    if asked == {"text"} and given == {"video"}:
        return {RIDGE: _ridge_system}
    return {}


def _minilm_system(task, pretrained: PretrainedBaselines) -> System:
    queries, documents = _part(task.queries, "text"), _part(task.documents, "text")
    return cosine_system(MINILM, pretrained.texts(queries), pretrained.texts(documents))


def _features_system(task, pretrained: PretrainedBaselines) -> System:
    sides = [pretrained.features(_part(items, "image")) for items in (task.queries, task.documents)]
    return cosine_system(FEATURES, *sides)


def _ridge_system(task, pretrained: PretrainedBaselines) -> System:
    ridge = pretrained.ridge()

    def vectors(items: Sequence[dict]) -> np.ndarray:
        kinds = item_kinds(items)
        if kinds == {"text"}:
            return ridge.texts(pretrained.texts(_part(items, "text")))
        if kinds == {"video"}:
            return ridge.images(pretrained.features([item["video"][0] for item in items]))
        return ridge.images(pretrained.features(_part(items, "image")))

    note = "first frame of each clip" if item_kinds(task.documents) == {"video"} else ""
    return cosine_system(RIDGE, vectors(task.queries), vectors(task.documents), note)
