"""Builds the corpus folder, stage by stage (see `corpus_stages`)."""

import json
import shutil
from pathlib import Path

import numpy as np

from . import corpus_teachers as teachers
from .corpus import Corpus
from .corpus_clips import read_animations
from .corpus_config import FONTS, CorpusConfig
from .corpus_manifest import write_manifest
from .corpus_records import EMOJI_SOURCES, emoji_drawings, icon_drawings, read_concepts
from .corpus_render import IMAGE_SIZE, MOTIONS, render_all, strip_fits
from .corpus_sources import fetch, fetch_all, read_members
from .corpus_split import family_split, held_out_labels
from .corpus_stages import Stages, jsonl_bytes, save_array
from .corpus_wordnet import ARTICLE_WORDS, read_synsets, wordnet_articles, wordnet_pairs
from .files import write_atomically


STRIP_LENGTH = (3, 34)


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
