"""A small corpus in memory, of the shape that `moemb data` builds."""

import numpy as np
import pytest


class FakeCorpus:
    """Twelve concepts in two styles (one of them with skin variants), icons, text pairs and teachers."""

    LANGUAGES = ("fr", "de", "es", "ja", "zh", "hi", "ru")

    def __init__(self, concepts: int = 24):
        rng = np.random.default_rng(0)
        self.concepts, self.image_rows, pictures = {}, [], []
        for number in range(concepts):
            split = "train" if number < concepts * 2 // 3 else "validation"
            people = number % 8 == 0
            self._concept(f"c{number}", f"thing number {number}", split, None, None)
            for tone in ("light skin tone", "dark skin tone") if people else ():
                self._concept(f"c{number}-{tone[0]}", f"thing number {number}: {tone}", split, f"c{number}", tone)
        for source in ("fluent", "noto"):
            for key, concept in self.concepts.items():
                self._image(f"{source}/{key}", source, key, concept["en"], concept["tags"], concept["split"])
                pictures.append(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        for number in range(6):
            self._image(f"mdi/i{number}", "mdi", None, f"icon {number}", ["flat", f"tag {number}"], "train")
            pictures.append(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        self._image("twemoji/c0", "twemoji", "c0", "thing number 0", [], "evaluation")
        pictures.append(np.zeros((64, 64, 3), dtype=np.uint8))
        self.images = np.stack(pictures)
        self.image_index = {row["key"]: number for number, row in enumerate(self.image_rows)}
        self.text_pairs = [
            {"query": f"meaning of word {n}", "document": f"word {n}, term {n}", "source": source, "split": split}
            for source in ("wordnet", "wordnet-article")
            for n, split in enumerate(["train"] * 10 + ["validation"] * 4)
        ]
        self.strip_texts = [f"heading {n}" for n in range(10)]

    def _concept(self, key, english, split, base, tone):
        self.concepts[key] = {
            "en": english, "tags": [] if base else ["alpha", "beta", "gamma", "delta"], "group": "objects",
            "subgroup": "tool", "labels": {lang: f"{lang} {english}" for lang in self.LANGUAGES},
            "base": base, "tone": tone, "family": english, "split": split,
        }  # fmt: skip

    def _image(self, key, source, concept, text, tags, split):
        self.image_rows.append(
            {"key": key, "source": source, "concept": concept, "text": text, "tags": tags, "split": split}
        )

    def render_strip(self, text, rng=None):
        shade = int(rng.integers(50)) if rng is not None else 0
        strip = np.full((32, 128, 3), 255, dtype=np.uint8)
        strip[8:24, 2 : 2 + 4 * len(text)] = shade
        return strip

    def skin_triples(self, source, split="train"):
        return [
            (self.image_index[f"{source}/{self.concepts[row['concept']]['base']}"],
             self.concepts[row["concept"]]["tone"], number)
            for number, row in enumerate(self.image_rows)
            if row["source"] == source and row["split"] == split and self.concepts[row["concept"]]["base"]
        ]  # fmt: skip

    def text_teacher(self):
        texts = [concept["en"] for concept in self.concepts.values()] + [f"icon {n}" for n in range(6)]
        return self._teacher(texts, 12)

    def vision_teacher(self):
        return self._teacher([row["key"] for row in self.image_rows if row["split"] == "train"], 10)

    @staticmethod
    def _teacher(names, size):
        vectors = np.random.default_rng(1).standard_normal((len(names), size)).astype(np.float16)
        return {name: number for number, name in enumerate(names)}, vectors


@pytest.fixture(scope="session")
def fake_corpus():
    return FakeCorpus()


@pytest.fixture(scope="session")
def fake_tokenizer(fake_corpus):
    from moemb.trainers.tokenizer import train_tokenizer, training_texts

    return train_tokenizer(training_texts(fake_corpus), vocab_size=320)
