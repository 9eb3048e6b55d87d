"""The suite `app`: what `moemb app` takes for a folder of thousands of real files, with moemb-mini.

The files are made of the gallery: drawings and clips in other colours, headings as PDFs, lists of headings as notes;
no two are the same. They are indexed, looked at again, partly changed, looked at after a restart, and searched as the
page does, with every measurement of the dial that the page shows included.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from . import benchmark_report as report
from .app import AppConfig, open_session
from .benchmark_encode import Context
from .benchmark_timing import Load
from .quickstart_model import MINI


COUNTS = (1_000, 10_000)
QUICK_COUNT = 40
QUERIES = 100
CHANGED = 100  # one file of so many is changed
FIRST, AGAIN, PARTLY, RESTARTED = "first run", "nothing changed", "one file of a hundred changed", "after a restart"
SEARCH, SLOWEST = "a search, median", "a search, slowest of twenty"
# Of twenty files: eleven drawings, six notes, two PDFs and a clip, as a folder of someone who draws and notes.
_KINDS = "itiitiptiitiiptiitic"


def make_files(folder: Path, count: int) -> dict[str, int]:
    """
    Fills a folder with files of which no two are the same; the same count gives the same files.

    Args:
        folder (`Path`): the folder, which is made.
        count (`int`): how many.

    Returns:
        `dict[str, int]`: files by kind: `image`, `text`, `pdf`, `clip`.
    """
    from .corpus_gallery import load_gallery

    gallery = load_gallery()
    pictures = [p for name in ("twemoji", "fluent", "noto") for p in gallery.pictures.get(name, [])]
    clips, strips = gallery.pictures["clips"], gallery.pictures["strips"]
    titles = [item["text"] for item in gallery.task("strip").queries]
    made = {"image": 0, "text": 0, "pdf": 0, "clip": 0}
    for number in tqdm(range(count), desc="making files", unit="file", delay=2):
        place = folder / f"{number // 500:03d}"
        place.mkdir(parents=True, exist_ok=True)
        kind = _KINDS[number % len(_KINDS)]
        if kind == "i":
            made["image"] += 1
            pixels = _tinted(pictures[number % len(pictures)].pixels, number)
            Image.fromarray(pixels).resize((128, 128)).save(place / f"{number}.png")
        elif kind == "t":
            made["text"] += 1
            lines = [titles[(number * 31 + step) % len(titles)] for step in range(5 + number % 30)]
            (place / f"{number}.md").write_text(f"# Note {number}\n\n{'. '.join(lines)}.\n", encoding="utf-8")
        elif kind == "p":
            made["pdf"] += 1
            page = Image.fromarray(_tinted(strips[number % len(strips)].pixels, number))
            page.save(place / f"{number}.pdf", "PDF", resolution=36)
        else:
            made["clip"] += 1
            frames = [Image.fromarray(_tinted(frame, number)) for frame in clips[number % len(clips)].pixels]
            frames[0].save(
                place / f"{number}.gif", save_all=True, append_images=frames[1:], duration=160, comment=str(number)
            )
    return made


def _tinted(pixels: np.ndarray, number: int) -> np.ndarray:
    """The picture with its channels scaled by factors that belong to the number: uint8 `[height, width, 3]`."""
    scale = 0.6 + 0.4 * np.random.default_rng(number).random(3)
    return (pixels * scale).round().astype(np.uint8)


def _case(count: int) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="moemb-app-") as name, Load() as load:
            record = _measure(context, Path(name), QUICK_COUNT if context.quick else count)
        record["timing"] = {"others": load.others, "clean_rounds": int(load.clean), "rounds": 1}
        return record

    return run


def _measure(context: Context, base: Path, count: int) -> dict[str, Any]:
    context.progress(f"making {count} files")
    kinds = make_files(base / "files", count)
    config = AppConfig(data=base / "files", model=MINI, index=base / "index")
    session = open_session(config)
    try:
        context.progress("indexing")
        first = session.indexer.update()
        context.progress("looking again")
        again = session.indexer.update()
        texts = sorted((base / "files").rglob("*.md"))
        for path in texts[: max(1, count // CHANGED)]:
            path.write_text(f"{path.read_text(encoding='utf-8')}\nMore was written.\n", encoding="utf-8")
        partly = session.indexer.update()
        searches = _searches(session.searcher, 10 if context.quick else QUERIES, context)
    finally:
        session.close()
    session = open_session(config)
    try:
        restarted = session.indexer.update()
    finally:
        session.close()
    wrong = _mistakes(count, first, again, partly, restarted)
    if wrong:
        return {"failed": wrong}
    size = sum(path.stat().st_size for path in (base / "index").rglob("*") if path.is_file())
    return {
        "files": count, "kinds": kinds, "vectors": first.units, "index_bytes": size, "changed": partly.indexed,
        "seconds": {
            FIRST: first.seconds, AGAIN: again.seconds, PARTLY: partly.seconds, RESTARTED: restarted.seconds,
            SEARCH: statistics.median(searches), SLOWEST: float(np.quantile(searches, 0.95)),
        },
        "searches": len(searches), "goals": [],
    }  # fmt: skip


def _searches(searcher: Any, count: int, context: Context) -> list[float]:
    """Wall seconds of searches by words, as the page makes them, after one that warms up."""
    from .serving import sample_texts

    texts = sample_texts(None, count + 1)
    searcher.search(texts[0])
    seconds = []
    for text in texts[1:]:
        context.progress(f"searching {text!r}")
        started = time.perf_counter()
        searcher.search(text)
        seconds.append(time.perf_counter() - started)
    return seconds


def _mistakes(count: int, first: Any, again: Any, partly: Any, restarted: Any) -> str:
    """What an update did that it should not have; a time of a wrong run is no measurement."""
    if first.indexed != count or first.skipped:
        return f"{first.indexed} of {count} files were indexed; not: {dict(list(first.skipped.items())[:3])}"
    expected = max(1, count // CHANGED)
    for name, update, indexed in ((AGAIN, again, 0), (PARTLY, partly, expected), (RESTARTED, restarted, 0)):
        if (update.indexed, update.unchanged) != (indexed, count - indexed):
            return f"{name}: {update.indexed} files were embedded and {update.unchanged} left, not {indexed}"
    return ""


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {f"files-{count}": _case(count) for count in COUNTS}


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases."""
    return list(CASES)[:1] if quick else list(CASES)


def _cells(record: report.Record, name: str, value: float, number: int) -> dict[str, str]:
    files = {FIRST: record["files"], AGAIN: record["files"], PARTLY: record["changed"], RESTARTED: record["files"]}
    return {
        "what": name,
        "time": report.seconds_text(value),
        "files per second": f"{files[name] / value:.0f}" if name in files else "",
        "vectors": f"{record['vectors']}" if number == 0 else "",
        "index": f"{record['index_bytes'] / 1e6:.1f} MB" if number == 0 else "",
    }


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results: a line per update, and two of the searches."""
    return report.system_rows(records, _cells)


def plot(records: list[report.Record], path: Path) -> Path:
    """Seconds of each update and search, on one scale a case."""
    drawing, axes = report.figure(max(1, len(records)), height=2.2)
    for record, axis in zip(records, axes):
        report.bars(axis, list(record["seconds"]), list(record["seconds"].values()), f"{record['case']}: seconds")
    return report.save_figure(drawing, path)
