"""The corpus of moemb-mini as training and evaluation read it.

`moemb data` builds it from packages (see `corpus_build`). A corpus folder holds

* `concepts.json`: emoji concepts with labels in 26 languages, family and split;
* `images.npy` (n, 64, 64, 3) uint8 and `images.jsonl`, one row per image: `key`, `source`, `concept`, `text`, `tags`,
  `split`;
* `clips.npy` (m, 8, 64, 64, 3) uint8 and `clips.jsonl`: real animations, held out;
* `text_pairs.jsonl`, `strips.jsonl`, `fonts/`, `teachers/`, `eval/`, `manifest.json`, `ATTRIBUTION.md`.

Splits: `train`, `validation` (choose settings on these), `test`, and `evaluation` for the held-out artist.
"""

import json
from functools import cached_property
from pathlib import Path

import numpy as np

from .corpus_render import MOTIONS, motion_clip, render_strip
from .corpus_sources import default_corpus_folder
from .corpus_teachers import Teacher, load_teacher
from .errors import MoEMBError


__all__ = ["MOTIONS", "Corpus", "default_corpus_folder", "load_corpus", "motion_clip", "render_strip"]


class CorpusFileError(MoEMBError, OSError):
    """A corpus that is not built, or a file of it that cannot be read. The text names it and the remedy."""


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSON-lines file.

    Raises:
        CorpusFileError: naming file and line of a row that is not JSON.
    """
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise CorpusFileError(
                    f"{path}:{number} is not JSON ({error}); delete the file and run `moemb data` again"
                ) from error
    return rows


class Corpus:
    """A built corpus. Everything is read on first use; images and clips are memory-mapped.

    Args:
        folder (`Path`):
            The corpus folder.

    Raises:
        CorpusFileError: if the folder holds no images: the message says how to build it.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if not (self.folder / "images.npy").exists():
            raise CorpusFileError(f"no corpus in {self.folder}: build it with `moemb data`")

    @cached_property
    def images(self) -> np.ndarray:
        """`np.ndarray` of shape `(n, 64, 64, 3)`, uint8, memory-mapped read-only."""
        return np.load(self.folder / "images.npy", mmap_mode="r")

    @cached_property
    def image_rows(self) -> list[dict]:
        """`list[dict]`: row `i` describes `images[i]`."""
        return read_jsonl(self.folder / "images.jsonl")

    @cached_property
    def image_index(self) -> dict[str, int]:
        """`dict[str, int]`: row of an image by its key, such as `"noto/1f600"`."""
        return {row["key"]: number for number, row in enumerate(self.image_rows)}

    @cached_property
    def concepts(self) -> dict[str, dict]:
        """`dict[str, dict]`: concepts by id; see `corpus_records.read_concepts`."""
        return json.loads((self.folder / "concepts.json").read_text(encoding="utf-8"))

    @cached_property
    def clips(self) -> np.ndarray:
        """`np.ndarray` of shape `(m, 8, 64, 64, 3)`, uint8: real animations, for evaluation only."""
        return np.load(self.folder / "clips.npy", mmap_mode="r")

    @cached_property
    def clip_rows(self) -> list[dict]:
        """`list[dict]`: row `i` describes `clips[i]`."""
        return read_jsonl(self.folder / "clips.jsonl")

    @cached_property
    def text_pairs(self) -> list[dict]:
        """`list[dict]`: `query`, `document`, `source`, `split`."""
        return read_jsonl(self.folder / "text_pairs.jsonl")

    @cached_property
    def strip_texts(self) -> list[str]:
        """`list[str]`: headings to set in type for training; none of the held-out ones is among them."""
        return [row["text"] for row in read_jsonl(self.folder / "strips.jsonl") if row["split"] == "train"]

    @cached_property
    def manifest(self) -> dict:
        """`dict`: counts, licences, versions and hashes."""
        return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))

    @cached_property
    def font_folder(self) -> Path:
        """`Path`: the fonts strips are set in."""
        return self.folder / "fonts"

    def text_teacher(self) -> Teacher:
        """MiniLM vectors (384) of every English training text.

        Labels, tags, icon names, motions, glosses, lemmas, headings.
        """
        stems = [self.folder / "teachers" / name for name in ("captions", "pairs")]
        return load_teacher([stem for stem in stems if stem.with_suffix(".npy").exists()])

    def vision_teacher(self) -> Teacher:
        """EfficientNet vectors (192) of every training image, by image key."""
        return load_teacher([self.folder / "teachers" / "vision"])

    def rows(self, split: str, sources: tuple[str, ...] | None = None) -> list[int]:
        """Numbers of the images of a split, of some sources or of all."""
        return [
            number
            for number, row in enumerate(self.image_rows)
            if row["split"] == split and (sources is None or row["source"] in sources)
        ]

    def render_strip(self, text: str, rng: np.random.Generator | None = None) -> np.ndarray:
        """`corpus_render.render_strip` with this corpus's fonts: `(32, 128, 3)` uint8."""
        return render_strip(text, rng, self.font_folder)

    def skin_triples(self, source: str, split: str = "train") -> list[tuple[int, str, int]]:
        """Composed edits an artist really drew: base picture + the name of a skin tone -> picture with that tone.

        Args:
            source (`str`):
                `"noto"`, `"fluent"` or another emoji source.
            split (`str`, *optional*, defaults to `"train"`):
                Split of the pictures.

        Returns:
            `list[tuple[int, str, int]]`: image number of the base, tone text such as `"dark skin tone"`, image number
            of the target.
        """
        triples = []
        for number in self.rows(split, (source,)):
            concept = self.concepts[self.image_rows[number]["concept"]]
            base = self.image_index.get(f"{source}/{concept['base']}")
            if concept["base"] is not None and base is not None:
                triples.append((base, concept["tone"], number))
        return triples


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Opens a built corpus.

    Args:
        path (`str` or `Path`, *optional*):
            The corpus folder. Defaults to `default_corpus_folder()`.

    Returns:
        `Corpus`

    Raises:
        CorpusFileError: if it is not built.
    """
    return Corpus(Path(path).expanduser() if path else default_corpus_folder())
