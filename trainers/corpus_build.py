"""Builds the corpus folder, stage by stage.

A stage writes its files under temporary names, renames them, and notes their hashes in `stages.json`. It is skipped as
long as those files are whole and its settings are the same, so a run that was killed goes on at the stage it was in,
and a second run does nothing.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import corpus_teachers as teachers
from .corpus import Corpus
from .corpus_clips import read_animations
from .corpus_records import EMOJI_SOURCES, ICON_SOURCES, emoji_drawings, icon_drawings, read_concepts
from .corpus_render import IMAGE_SIZE, MOTIONS, render_all, strip_fits
from .corpus_sources import default_corpus_folder, fetch, fetch_all, file_sha256, read_members
from .corpus_split import family_split, held_out_labels
from .corpus_wordnet import ARTICLE_WORDS, read_synsets, wordnet_articles, wordnet_pairs
from .errors import MoEMBError, nearest
from .files import whole_file, write_atomically


FONTS = {
    "font-dejavu": ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansCondensed.ttf"),
    "font-lora": ("Lora_400Regular.ttf", "Lora_700Bold.ttf"),
    "font-open-sans": ("OpenSans_400Regular.ttf", "OpenSans_600SemiBold.ttf"),
}
STRIP_LENGTH = (3, 34)
EVALUATION_SETS = ("wiki", "refman", "stamps", "metamath", "flags")


class CorpusError(MoEMBError, ValueError):
    """A setting of the corpus that cannot be used; the text names it and the remedy."""


@dataclass
class CorpusConfig:
    """Settings of `moemb data`.

    Args:
        output (`str`, *optional*):
            Folder to build in. Defaults to `<cache>/mini-corpus`.
        image_sources (`list[str]`, *optional*):
            Artists and icon sets. `"openmoji"` (CC-BY-SA-4.0) may be added; it is off by default to keep training data
            permissive.
        clips (`bool`, *optional*, defaults to `True`):
            Fetch the real animations (165 MB) that the clip task is built from.
        teachers (`bool`, *optional*, defaults to `True`):
            Compute the teacher vectors.
        articles (`int`, *optional*, defaults to 20000):
            Longer WordNet texts put together for training on documents.
        test_percent (`int`, *optional*, defaults to 10):
            Share of concept families held out for the tests.
        validation_percent (`int`, *optional*, defaults to 5):
            Share of concept families held out for choosing settings.
        near_duplicate (`float`, *optional*, defaults to 0.97):
            Ink cosine above which a held-out picture counts as one seen in training.
        workers (`int`, *optional*, defaults to 1):
            Processes that render.
        threads (`int`, *optional*, defaults to 1):
            Threads the teachers use.
        evaluation_sets (`list[str]`, *optional*):
            Local-only sets that `moemb data --evaluation` builds.
    """

    output: str | None = None
    image_sources: list[str] = field(default_factory=lambda: ["noto", "fluent", "twemoji", "mdi", "tabler", "lucide"])
    clips: bool = True
    teachers: bool = True
    articles: int = 20000
    test_percent: int = 10
    validation_percent: int = 5
    near_duplicate: float = 0.97
    workers: int = 1
    threads: int = 1
    evaluation_sets: list[str] = field(default_factory=lambda: list(EVALUATION_SETS))

    def __post_init__(self):
        for source in self.image_sources:
            if source not in EMOJI_SOURCES + ICON_SOURCES:
                known = EMOJI_SOURCES + ICON_SOURCES
                raise CorpusError(
                    f"image_sources: unknown source {source!r}{nearest(source, known)}; known: {', '.join(known)}"
                )
        for needed in ("noto", "fluent", "twemoji"):
            if needed not in self.image_sources:
                raise CorpusError(f"image_sources: {needed!r} is missing, and the split and the tests need it")
        for name in self.evaluation_sets:
            if name not in EVALUATION_SETS:
                raise CorpusError(
                    f"evaluation_sets: unknown set {name!r}{nearest(name, EVALUATION_SETS)}; known: "
                    f"{', '.join(EVALUATION_SETS)}"
                )
        for name in ("workers", "threads"):
            if getattr(self, name) < 1:
                raise CorpusError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not (self.test_percent > 0 < self.validation_percent and self.test_percent + self.validation_percent < 100):
            raise CorpusError(
                f"test_percent {self.test_percent} and validation_percent {self.validation_percent} must be above 0 "
                "and leave some families to train on"
            )

    @property
    def folder(self) -> Path:
        """`Path`: the corpus folder."""
        return Path(self.output).expanduser() if self.output else default_corpus_folder()


def jsonl_bytes(rows: list[dict]) -> bytes:
    """Rows as JSON lines in UTF-8."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def save_array(path: Path, array: np.ndarray) -> None:
    """`np.save`, whole or not at all."""
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, array)


class Stages:
    """Which stages of a folder are done; see the module's docstring.

    Args:
        folder (`Path`):
            The folder the stages write in; made if need be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "stages.json"
        self._done = json.loads(self._path.read_text()) if self._path.exists() else {}

    def is_whole(self, name: str, settings: dict) -> bool:
        """Whether a stage was done with these settings and all its files still have the noted hash."""
        entry = self._done.get(name)
        if entry is None or entry["settings"] != settings:
            return False
        return all(
            (self.folder / file).exists() and file_sha256(self.folder / file) == digest
            for file, digest in entry["files"].items()
        )

    def run(self, name: str, settings: dict, work: Callable[[], dict]) -> bool:
        """Does a stage unless it is whole.

        Args:
            name (`str`):
                Name of the stage.
            settings (`dict`):
                JSON values; when they differ from the noted ones the stage is done again.
            work (`Callable[[], dict]`):
                Writes the files and returns `{"files": [names], "counts": {...}}`.

        Returns:
            `bool`: whether the work was done now.
        """
        if self.is_whole(name, settings):
            print(f"{name}: already built")
            return False
        result = work()
        hashes = {file: file_sha256(self.folder / file) for file in result["files"]}
        self._done[name] = {"settings": settings, "files": hashes, "counts": result["counts"]}
        write_atomically(self._path, json.dumps(self._done, indent=1).encode())
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in result['counts'].items())}")
        return True

    @property
    def files(self) -> dict[str, str]:
        """`dict[str, str]`: SHA-256 by file, over all stages."""
        return {file: digest for entry in self._done.values() for file, digest in entry["files"].items()}

    @property
    def counts(self) -> dict[str, dict]:
        """`dict[str, dict]`: counts by stage."""
        return {name: entry["counts"] for name, entry in self._done.items()}


def build_corpus(config: CorpusConfig) -> Corpus:
    """Builds (or completes) the corpus of a config.

    Args:
        config (`CorpusConfig`):
            The settings.

    Returns:
        `Corpus`: the built corpus.

    Raises:
        SourceError: when a package cannot be fetched.
    """
    from .corpus_manifest import write_manifest

    builder = _Builder(config)
    builder.fetch()
    split = {"test": config.test_percent, "validation": config.validation_percent}
    stages = builder.stages
    stages.run("concepts", split, builder.concepts)
    stages.run("images", {**split, "sources": config.image_sources}, builder.images)
    stages.run("fonts", {"fonts": {key: list(names) for key, names in FONTS.items()}}, builder.fonts)
    stages.run("texts", {**split, "articles": config.articles, "article_words": list(ARTICLE_WORDS)}, builder.texts)
    if config.clips:
        stages.run("clips", {}, builder.clips)
    corpus = Corpus(config.folder)
    if config.teachers:
        sources = {**split, "sources": config.image_sources}
        stages.run("teacher-captions", sources, lambda: builder.text_teacher("captions", caption_texts(corpus)))
        stages.run("teacher-vision", sources, lambda: builder.vision_teacher(corpus))
        pairs = {**split, "articles": config.articles, "article_words": list(ARTICLE_WORDS)}
        stages.run("teacher-pairs", pairs, lambda: builder.text_teacher("pairs", pair_texts(corpus)))
    write_manifest(corpus, config, stages)
    return corpus


class _Builder:
    """The stages' work. Each method writes its files into the folder and returns what it wrote."""

    def __init__(self, config: CorpusConfig):
        self.config = config
        self.folder = config.folder
        self.stages = Stages(config.folder)

    def fetch(self) -> None:
        keys = ["emojibase", *self.config.image_sources, "wordnet", *FONTS]
        fetch_all(
            keys
            + ["animations"] * self.config.clips
            + ["minilm", "efficientnet", "efficientnet-code"] * self.config.teachers
        )

    def _read_concepts(self) -> dict[str, dict]:
        return json.loads((self.folder / "concepts.json").read_text(encoding="utf-8"))

    def concepts(self) -> dict:
        concepts = read_concepts(fetch("emojibase"), self.config.test_percent, self.config.validation_percent)
        write_atomically(self.folder / "concepts.json", json.dumps(concepts, ensure_ascii=False).encode())
        bases = [concept for concept in concepts.values() if concept["base"] is None]
        counts = {"concepts": len(bases), "skin variants": len(concepts) - len(bases)}
        counts |= {
            f"{split} concepts": sum(c["split"] == split for c in bases) for split in ("train", "validation", "test")
        }
        return {"files": ["concepts.json"], "counts": counts}

    def images(self) -> dict:
        concepts = self._read_concepts()
        held_out = held_out_labels(concepts)
        counts, rows, pixels = {}, [], []
        for source in self.config.image_sources:
            if source in EMOJI_SOURCES:
                drawings, dropped = emoji_drawings(source, fetch(source), concepts), 0
            else:
                drawings, dropped = icon_drawings(source, fetch(source), held_out)
            before = len(rows)
            images = render_all([drawing.svg for drawing in drawings], f"render {source}", self.config.workers)
            for drawing, image in zip(drawings, images, strict=True):
                if image is not None:
                    rows.append(drawing.row)
                    pixels.append(image)
            counts[source] = len(rows) - before
            if dropped:
                counts[f"{source} left out for a held-out label"] = dropped
        save_array(self.folder / "images.npy", np.stack(pixels).reshape(-1, IMAGE_SIZE, IMAGE_SIZE, 3))
        write_atomically(self.folder / "images.jsonl", jsonl_bytes(rows))
        return {"files": ["images.npy", "images.jsonl"], "counts": counts}

    def fonts(self) -> dict:
        files = []
        for key, names in FONTS.items():
            for path, data in read_members(fetch(key), lambda path: path.endswith(".ttf")).items():
                if (name := Path(path).name) not in names:
                    continue
                write_atomically(self.folder / "fonts" / name, data)
                files.append(f"fonts/{name}")
        return {"files": files, "counts": {"fonts": len(files)}}

    def texts(self) -> dict:
        held_out = held_out_labels(self._read_concepts())
        synsets = read_synsets(fetch("wordnet"))
        pairs, dropped = wordnet_pairs(synsets, held_out)
        articles = wordnet_articles(synsets, held_out, self.config.articles)
        strips = strip_rows(pairs, self.folder / "fonts")
        write_atomically(self.folder / "text_pairs.jsonl", jsonl_bytes(pairs + articles))
        write_atomically(self.folder / "strips.jsonl", jsonl_bytes(strips))
        counts = {"pairs": len(pairs), "pairs left out for a held-out label": dropped, "articles": len(articles)}
        counts["strip texts"] = len(strips)
        return {"files": ["text_pairs.jsonl", "strips.jsonl"], "counts": counts}

    def clips(self) -> dict:
        clips, rows = read_animations(fetch("animations"), self._read_concepts())
        save_array(self.folder / "clips.npy", clips)
        write_atomically(self.folder / "clips.jsonl", jsonl_bytes(rows))
        return {"files": ["clips.npy", "clips.jsonl"], "counts": {"clips": len(rows)}}

    def text_teacher(self, name: str, texts: list[str]) -> dict:
        parts = self.folder / "teachers" / f".{name}-parts"
        vectors = teachers.encode_in_parts(
            teachers.text_encoder(), texts, parts, f"MiniLM over {name}", self.config.threads
        )
        return self._save_teacher(name, texts, vectors, parts)

    def vision_teacher(self, corpus: Corpus) -> dict:
        rows = corpus.rows("train")
        parts = self.folder / "teachers" / ".vision-parts"
        images = np.asarray(corpus.images[rows])
        features = teachers.encode_in_parts(
            teachers.vision_encoder(), images, parts, "EfficientNet", self.config.threads
        )
        keys = [corpus.image_rows[row]["key"] for row in rows]
        return self._save_teacher("vision", keys, teachers.principal_axes(features), parts)

    def _save_teacher(self, name: str, keys: list[str], vectors: np.ndarray, parts: Path) -> dict:
        folder = self.folder / "teachers"
        save_array(folder / f"{name}.npy", vectors)
        write_atomically(folder / f"{name}.txt", "\n".join(keys).encode())
        shutil.rmtree(parts, ignore_errors=True)
        return {"files": [f"teachers/{name}.npy", f"teachers/{name}.txt"], "counts": {f"{name} vectors": len(keys)}}


def strip_rows(pairs: list[dict], font_folder: Path) -> list[dict]:
    """Headings for strips.

    Every lemma that fits, each with its split (2 % are test, 1 % validation) by the hash of its text.
    """
    lemmas = {lemma for pair in pairs for lemma in pair["document"].split(", ")}
    shortest, longest = STRIP_LENGTH
    fitting = [text for text in sorted(lemmas) if shortest <= len(text) <= longest and strip_fits(text, font_folder)]
    return [{"text": text, "split": family_split(f"strip {text.lower()}", 2, 1)} for text in fitting]


def caption_texts(corpus: Corpus) -> list[str]:
    """Every English caption of a training picture, and of the clips that move it; sorted, without repeats."""
    texts: set[str] = set()
    for row in corpus.rows("train"):
        item = corpus.image_rows[row]
        texts |= {item["text"], ", ".join(item["tags"]), *item["tags"]}
    for concept in corpus.concepts.values():
        if concept["split"] == "train":
            texts.add(concept["en"])
            if concept["base"] is None:
                texts |= {f"{concept['en']} {motion}" for motion in MOTIONS}
            else:
                texts.add(concept["tone"])
    return sorted(text for text in texts if text)


def pair_texts(corpus: Corpus) -> list[str]:
    """Every text of a training pair and every training heading; sorted, without repeats and without captions."""
    texts = {
        text for pair in corpus.text_pairs if pair["split"] == "train" for text in (pair["query"], pair["document"])
    }
    return sorted((texts | set(corpus.strip_texts)) - set(caption_texts(corpus)))
