"""Items that something is calibrated on: no labels, no pairs, only what a model will be asked to embed.

`calibration_data` in a recipe maps where items come from to how many:

    corpus:emoji: 256            training items of a source of moemb-mini's corpus, see `CORPUS_SOURCES`
    task:strip: 100              queries and documents of a task of `moemb evaluate`; not to be evaluated on afterwards
    data/items.jsonl: 400        one item a line: an object with `text`, `image` (a path) and `video` (a path), and
                                 `side`, `query` or `document` (the default), which chooses the prompt

Items are drawn without replacement (corpus sources come round again with new augmentation), in an order that depends
on the seed alone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEMBError, nearest
from .evaluation_encoding import SIDES, encoder_input, item_key


CORPUS_SOURCES = ("emoji", "icon", "translation", "gloss", "article", "strip", "motion", "edit")
PARTS = ("text", "image", "video")
_CHUNK = 16
_HASH_BLOCK = 1 << 20


class CalibrationDataError(MoEMBError, ValueError):
    """Calibration data that cannot be read. The message names the entry or line and the remedy."""


@dataclass(frozen=True)
class CalibrationItem:
    """One item.

    Args:
        value (`Any`): as the processor takes it.
        side (`str`): `"query"` or `"document"`.
        digest (`str`): hash of its content.
    """

    value: Any
    side: str
    digest: str


def read_calibration_data(
    entries: Mapping[str, int], seed: int = 0, corpus: Path | None = None, gallery: Path | None = None
) -> list[CalibrationItem]:
    """
    Reads calibration items.

    Args:
        entries (`Mapping[str, int]`): where from, and how many, see the module.
        seed (`int`, *optional*, defaults to 0): seed of what is drawn.
        corpus (`Path`, *optional*): folder of the corpus; the one in the cache when left out.
        gallery (`Path`, *optional*): folder of the shipped items; the one beside the recipes when left out.

    Returns:
        `list[CalibrationItem]`: queries before documents, so that batches can hold one side.

    Raises:
        CalibrationDataError: no entries, an unknown one, a count below 1 or above what there is, or a bad line.
    """
    if not entries:
        raise CalibrationDataError(
            "calibration_data is empty: name items, such as {corpus:emoji: 256} or {items.jsonl: 400}"
        )
    for entry, count in entries.items():
        if count < 1:
            raise CalibrationDataError(f"calibration_data asks for {count} items of '{entry}': the least is 1")
    opened: dict[str, Any] = {}
    items: list[CalibrationItem] = []
    for place, (entry, count) in enumerate(sorted(entries.items())):
        rng = np.random.default_rng([seed, place])
        kind, _, name = entry.partition(":")
        if kind == "corpus":
            found = _corpus_items(name, count, rng, opened, corpus)
        elif kind == "task":
            found = _task_items(name, opened, corpus, gallery)
        elif entry.endswith(".jsonl"):
            found = _jsonl_items(Path(entry).expanduser())
        else:
            raise CalibrationDataError(
                f"calibration_data has '{entry}': write corpus:SOURCE, task:NAME, or the path of a .jsonl file"
            )
        if len(found) < count:
            raise CalibrationDataError(f"calibration_data asks for {count} items of '{entry}', which has {len(found)}")
        items += [_finished(*found[index], entry) for index in rng.permutation(len(found))[:count]]
    return sorted(items, key=lambda item: SIDES.index(item.side))


def data_fingerprint(items: Sequence[CalibrationItem]) -> str:
    """The identity of calibration items in their order: SHA-256, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item.side} {item.digest}\n".encode())
    return digest.hexdigest()


def batches_of_one_side(
    items: Sequence[CalibrationItem], batch_size: int, done: int = 0
) -> Iterator[list[CalibrationItem]]:
    """Batches in the order of the items, each of one side (a call of the processor has one prompt).

    Args:
        items (`Sequence[CalibrationItem]`): the items.
        batch_size (`int`): items in a batch at most.
        done (`int`, *optional*, defaults to 0): items to leave out, as an interrupted run had finished them.
    """
    start = done
    while start < len(items):
        stop = start + 1
        while stop < min(len(items), start + batch_size) and items[stop].side == items[start].side:
            stop += 1
        yield list(items[start:stop])
        start = stop


def item_of_parts(parts: Sequence[Any]) -> dict[str, Any]:
    """The parts of a training sample (texts, uint8 images and clips) as an item with the keys text, image, video."""
    item = {}
    for part in parts:
        name = "text" if isinstance(part, str) else {3: "image", 4: "video"}[part.ndim]
        item[name] = part if name == "text" else np.asarray(part)
    if len(item) != len(parts):
        raise CalibrationDataError("an item has several parts of one kind, which a mapping cannot hold")
    return item


def _finished(item: dict[str, Any], side: str, entry: str) -> CalibrationItem:
    """An item with its content address; media on disk are read for it, so that a changed file is noticed."""
    addressed = dict(item)
    for name, value in item.items():
        if isinstance(value, Path):
            digest = hashlib.sha256()
            with value.open("rb") as file:
                while block := file.read(_HASH_BLOCK):
                    digest.update(block)
            addressed[name] = digest.hexdigest()
    value = {name: str(part) if isinstance(part, Path) else part for name, part in item.items()}
    return CalibrationItem(encoder_input(value), side, item_key(addressed))


def _corpus_items(
    name: str, count: int, rng: np.random.Generator, opened: dict, folder: Path | None
) -> list[tuple[dict, str]]:
    """At least `count` training items of a source; what is contrasted as a query has the query's side."""
    from . import sources
    from .corpus import load_corpus
    from .mixture import Mixture

    classes = {
        "emoji": (sources.EmojiSource, {}),
        "icon": (sources.IconSource, {}),
        "translation": (sources.TranslationSource, {}),
        "gloss": (sources.TextPairSource, {"pair_sources": ("wordnet",), "name": "gloss"}),
        "article": (sources.TextPairSource, {"pair_sources": ("wordnet-article",), "name": "article"}),
        "strip": (sources.StripSource, {}),
        "motion": (sources.MotionSource, {}),
        "edit": (sources.SkinEditSource, {}),
    }
    if name not in classes:
        raise CalibrationDataError(
            f"calibration_data has 'corpus:{name}', but there is no such source{nearest(name, CORPUS_SOURCES)}; "
            f"the sources are {', '.join(CORPUS_SOURCES)}"
        )
    if "corpus" not in opened:
        opened["corpus"] = load_corpus(folder)
    source_class, extra = classes[name]
    mixture = Mixture([source_class(opened["corpus"], _CHUNK, **extra)], [1.0], int(rng.integers(2**31)))
    items, step = [], 0
    while len(items) < count:
        for group in mixture.groups(step):
            queries = set(group.contrasts[0].queries)  # later ones contrast a side with itself
            for row, sample in enumerate(group.samples):
                items.append((item_of_parts(sample.parts), "query" if row in queries else "document"))
        step += 1
    return items


def _task_items(name: str, opened: dict, corpus: Path | None, gallery: Path | None) -> list[tuple[dict, str]]:
    from .evaluation_tasks import NotRun, TaskSource, select_task_names

    if "tasks" not in opened:
        opened["tasks"] = TaskSource(gallery, corpus)
    items = []
    for task_name in select_task_names([name]):
        task = opened["tasks"].load(task_name)
        if isinstance(task, NotRun):
            raise CalibrationDataError(f"calibration_data has 'task:{name}', which is not there: {task.reason}")
        items += [(dict(item), "query") for item in task.queries]
        items += [(dict(item), "document") for item in task.documents]
    return items


def _jsonl_items(path: Path) -> list[tuple[dict, str]]:
    if not path.is_file():
        raise CalibrationDataError(f"calibration_data has '{path}', which is no file")
    items = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                items.append(_jsonl_item(line, f"{path}:{number}", path.parent))
    return items


def _jsonl_item(line: str, where: str, folder: Path) -> tuple[dict, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CalibrationDataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CalibrationDataError(f"{where} is a {type(row).__name__}, not an object with {', '.join(PARTS)}")
    side = row.pop("side", "document")
    if side not in SIDES:
        raise CalibrationDataError(f"{where} has the side {side!r}; write one of {list(SIDES)}")
    for key, value in row.items():
        if key not in PARTS:
            raise CalibrationDataError(f"{where} has the key '{key}'{nearest(key, PARTS)}; known are {PARTS} and side")
        if not isinstance(value, str):
            raise CalibrationDataError(f"{where}: '{key}' is {value!r}, but must be a text or a path")
        if key != "text":
            media = folder / Path(value).expanduser()
            if not media.is_file():
                raise CalibrationDataError(f"{where}: '{key}' is {value}, but {media} is no file")
            row[key] = media
    if not row:
        raise CalibrationDataError(f"{where} holds no part of an item; write one of {PARTS}")
    return row, side
