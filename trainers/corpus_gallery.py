"""The gallery: held-out items that travel with the repository, so that evaluation and quickstart need no corpus.

`recipes/moemb-mini/gallery/` holds one WebP sheet per kind of picture, cut into equal tiles (reading is one decode and
a reshape, and a person can look at them), `items.jsonl` that says what each tile shows, `concepts.json`,
`gallery.json` with counts, versions and hashes, and `ATTRIBUTION.md`. `moemb data --gallery` writes it from a built
corpus.
"""

import io
import json
import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from .corpus import Corpus, read_jsonl
from .corpus_manifest import attribution
from .corpus_sources import PACKAGES, fetch, file_sha256
from .corpus_split import near_duplicates
from .corpus_stages import jsonl_bytes
from .corpus_tasks import TASK_LANGUAGES, EvaluationTask, Picture, TaskMaker
from .corpus_wordnet import read_synsets
from .errors import MoEMBError, nearest
from .files import put_in_place


GALLERY_LANGUAGES = (*TASK_LANGUAGES, "it", "pt", "ko", "uk", "pl")
SOURCES = ("emojibase", "twemoji", "fluent", "noto", "animations", "wordnet", "font-dejavu")
_QUALITY = 80
_SIDE = 4096  # of a sheet, in pixels; WebP allows 16383
_MARGIN = 8  # around each tile, in pixels
_STRIPS = 499
# WordNet's files on animals, artifacts, food, places, objects, phenomena, plants and substances: titles fit for any
# reader.
_STRIP_TOPICS = {5, 6, 13, 15, 17, 19, 20, 27}


class GalleryError(MoEMBError, ValueError):
    """A gallery that is missing or broken; the text names the folder and the remedy."""


def default_gallery_folder() -> Path:
    """The gallery of the checkout this file is in, or of the current directory: `recipes/moemb-mini/gallery`."""
    beside = Path(__file__).resolve().parent.parent / "recipes" / "moemb-mini" / "gallery"
    return beside if beside.is_dir() else Path("recipes/moemb-mini/gallery")


def save_sheet(path: Path, tiles: np.ndarray, quality: int = _QUALITY) -> None:
    """Tiles side by side in one WebP picture, each with its edge pixels repeated around it.

    WebP stores colour at half the resolution and smooths over blocks; without the margin colours would bleed into the
    neighbouring tiles.

    Args:
        path (`Path`):
            The file.
        tiles (`np.ndarray` of shape `(n, h, w, 3)`, uint8):
            All of one size. The last row is filled up with white.
        quality (`int`, *optional*, defaults to 80):
            Of WebP.
    """
    tiles = np.pad(tiles, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0)), mode="edge")
    count, height, width, _ = tiles.shape
    columns = min(count, _SIDE // width)
    rows = -(-count // columns)
    padded = np.full((rows * columns, height, width, 3), 255, np.uint8)
    padded[:count] = tiles
    grid = padded.reshape(rows, columns, height, width, 3).transpose(0, 2, 1, 3, 4)
    buffer = io.BytesIO()
    Image.fromarray(grid.reshape(rows * height, columns * width, 3)).save(buffer, "WEBP", quality=quality, method=6)
    path.write_bytes(buffer.getvalue())


def load_sheet(path: Path, count: int, height: int, width: int) -> np.ndarray:
    """The tiles of `save_sheet`, `(count, height, width, 3)` uint8; fewer when the sheet does not hold so many."""
    with Image.open(path) as image:
        sheet = np.asarray(image.convert("RGB"))
    cell_height, cell_width = height + 2 * _MARGIN, width + 2 * _MARGIN
    rows, columns = sheet.shape[0] // cell_height, sheet.shape[1] // cell_width
    cells = sheet[: rows * cell_height, : columns * cell_width].reshape(rows, cell_height, columns, cell_width, 3)
    tiles = cells.transpose(0, 2, 1, 3, 4).reshape(rows * columns, cell_height, cell_width, 3)
    return np.ascontiguousarray(tiles[:count, _MARGIN : _MARGIN + height, _MARGIN : _MARGIN + width])


class Gallery:
    """Reads a gallery; every part on first use.

    Args:
        folder (`Path`):
            The gallery's folder.

    Raises:
        GalleryError: if there is no gallery.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / "gallery.json").exists():
            raise GalleryError(f"no gallery in {self.folder}: write it with `moemb data --gallery {self.folder}`")

    @cached_property
    def about(self) -> dict:
        """`dict`: split rule, sources with licences, sheets with tile sizes, counts and hashes."""
        return json.loads((self.folder / "gallery.json").read_text(encoding="utf-8"))

    @cached_property
    def concepts(self) -> dict[str, dict]:
        """`dict[str, dict]`.

        By id: `en`, `labels`, `tags`, `group`, `subgroup`, `base`, `tone`, `split`, `trained`.
        """
        return json.loads((self.folder / "concepts.json").read_text(encoding="utf-8"))

    @cached_property
    def pictures(self) -> dict[str, list[Picture]]:
        """`dict[str, list[Picture]]`: by sheet: `twemoji`, `fluent`, `noto`, `clips` (8 frames each) and `strips`."""
        rows: dict[str, list[dict]] = {name: [] for name in self.about["sheets"]}
        for row in read_jsonl(self.folder / "items.jsonl"):
            rows[row["sheet"]].append(row)
        return {name: self._read_sheet(name, rows[name]) for name in rows}

    def _read_sheet(self, name: str, rows: list[dict]) -> list[Picture]:
        sheet = self.about["sheets"][name]
        height, width = sheet["tile"]
        tiles = load_sheet(self.folder / f"{name}.webp", len(rows) * sheet["frames"], height, width)
        if len(tiles) != len(rows) * sheet["frames"]:
            raise GalleryError(
                f"{self.folder / name}.webp holds {len(tiles)} tiles, items.jsonl names {len(rows)} items of "
                f"{sheet['frames']}: restore both, or write the gallery again with `moemb data --gallery`"
            )
        if sheet["frames"] > 1:
            tiles = tiles.reshape(len(rows), sheet["frames"], height, width, 3)
        return [
            Picture(row["key"], row["concept"], tile, row["near_duplicate"], row["twin"])
            for row, tile in zip(rows, tiles, strict=True)
        ]

    @cached_property
    def _makers(self) -> dict:
        return TaskMaker(self.concepts, self.pictures).makers

    @property
    def task_names(self) -> list[str]:
        """`list[str]`: the tasks, in the order they are reported."""
        return list(self._makers)

    def task(self, name: str) -> EvaluationTask:
        """A task by name.

        Raises:
            GalleryError: for an unknown name; the message names the nearest.
        """
        if name not in self._makers:
            raise GalleryError(
                f"the gallery has no task {name!r}{nearest(name, self._makers)}; it has {', '.join(self._makers)}"
            )
        return self._makers[name]()


def load_gallery(path: str | Path | None = None) -> Gallery:
    """Opens a gallery; without a path, the one of this repository.

    Raises:
        GalleryError: if there is none.
    """
    return Gallery(Path(path) if path else default_gallery_folder())


def write_gallery(corpus: Corpus, target: Path, threshold: float = 0.97) -> dict:
    """Writes the gallery of a built corpus, whole or not at all.

    Args:
        corpus (`Corpus`):
            With clips and fonts.
        target (`Path`):
            The gallery's folder; what is in it is replaced.
        threshold (`float`, *optional*, defaults to 0.97):
            Ink cosine above which a picture counts as one seen in training.

    Returns:
        `dict`: what stands in `gallery.json`.
    """
    sheets, items = _collect(corpus, threshold)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        folder = Path(scratch) / "gallery"
        folder.mkdir()
        about = _write_files(corpus, folder, sheets, items)
        put_in_place(folder, target)
    return about


def _collect(corpus: Corpus, threshold: float) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Pixels by sheet, and the items' rows in the sheets' order."""
    concepts, rows = corpus.concepts, corpus.image_rows
    trained = corpus.images[corpus.rows("train")]
    chosen = {
        "twemoji": corpus.rows("evaluation", ("twemoji",)),
        "fluent": [
            i for i, row in enumerate(rows) if row["source"] == "fluent" and concepts[row["concept"]]["base"] is None
        ],
        "noto": [i for i in corpus.rows("test", ("noto",)) if concepts[rows[i]["concept"]]["base"] is None],
    }
    sheets: dict[str, np.ndarray] = {name: np.asarray(corpus.images[numbers]) for name, numbers in chosen.items()}
    seen = near_duplicates(sheets["twemoji"], trained, threshold)
    items = []
    for name, numbers in chosen.items():
        first: dict[bytes, str] = {}
        for place, number in enumerate(numbers):
            row = rows[number]
            twin = first.setdefault(corpus.images[number].tobytes(), row["concept"])
            near = bool(seen[place]) if name == "twemoji" else False
            items.append(
                {"key": row["key"], "sheet": name, "concept": row["concept"], "near_duplicate": near, "twin": twin}
            )
    sheets["clips"] = corpus.clips.reshape(-1, *corpus.clips.shape[2:])
    for row in corpus.clip_rows:
        concept = row["concept"]
        items.append(
            {"key": row["key"], "sheet": "clips", "concept": concept, "near_duplicate": False, "twin": concept}
        )
    titles = _strip_titles(corpus)
    sheets["strips"] = np.stack([corpus.render_strip(title) for title in titles])
    for title in titles:
        items.append(
            {"key": f"strip/{title}", "sheet": "strips", "concept": title, "near_duplicate": False, "twin": title}
        )
    return sheets, items


def _strip_titles(corpus: Corpus) -> list[str]:
    """Held-out lemmas of concrete things, spread evenly over the alphabet."""
    held_out = {row["text"] for row in read_jsonl(corpus.folder / "strips.jsonl") if row["split"] == "test"}
    synsets = read_synsets(fetch("wordnet")).values()
    concrete = {lemma for synset in synsets if synset.topic in _STRIP_TOPICS for lemma in synset.lemmas}
    titles = sorted(title for title in held_out & concrete if len(title) >= 6)
    step = len(titles) / min(_STRIPS, len(titles))
    return [titles[int(number * step)] for number in range(min(_STRIPS, len(titles)))]


def _gallery_concepts(corpus: Corpus, items: list[dict]) -> dict[str, dict]:
    trained = {corpus.image_rows[i]["concept"] for i in corpus.rows("train")}
    concepts = {}
    for key in dict.fromkeys(item["concept"] for item in items if item["sheet"] != "strips"):
        concept = dict(corpus.concepts[key])
        is_base = concept["base"] is None
        concept["labels"] = {
            lang: concept["labels"][lang] for lang in GALLERY_LANGUAGES if is_base and lang in concept["labels"]
        }
        concepts[key] = concept | {"trained": key in trained}
    return concepts


def _write_files(corpus: Corpus, folder: Path, sheets: dict[str, np.ndarray], items: list[dict]) -> dict:
    about_sheets = {}
    for name, tiles in sheets.items():
        count = sum(item["sheet"] == name for item in items)
        save_sheet(folder / f"{name}.webp", tiles)
        about_sheets[name] = {"count": count, "frames": len(tiles) // count, "tile": list(tiles.shape[1:3])}
    (folder / "items.jsonl").write_bytes(jsonl_bytes(items))
    concepts = _gallery_concepts(corpus, items)
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(concept, ensure_ascii=False)}" for key, concept in concepts.items()
    )
    (folder / "concepts.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    (folder / "ATTRIBUTION.md").write_text(attribution(list(SOURCES)), encoding="utf-8")
    about = {
        "version": 1,
        "split_rule": corpus.manifest["split_rule"],
        "near_duplicates_left_out": sum(item["near_duplicate"] for item in items),
        "sources": {key: {"package": PACKAGES[key].label, "licence": PACKAGES[key].licence} for key in SOURCES},
        "sheets": about_sheets,
        "files": {path.name: file_sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / "gallery.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return about
