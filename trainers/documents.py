"""Interleaved documents for language-model pretraining: pictures and the texts that belong to them.

What a document looks like (`[..]` is a picture):

* `[image] grinning face` + lines in other languages + tags
* `[image] [image in another style] ...`
* `en: red apple` / `ja: ...` / ... (translations alone)
* `lemma, lemma: gloss`
* `[heading strip] the heading`
* `[clip] red apple moving left`
"""

from collections.abc import Callable

import numpy as np
import torch

from .corpus_render import MOTIONS, motion_clip
from .data import BatchEncoder, Part, Sample
from .sources import CorpusSource, join_tags


def language_batch(encoder: BatchEncoder, samples: list[Sample], final_token: str) -> dict:
    """Model inputs of documents, and the next token of each position.

    Args:
        encoder ([`BatchEncoder`]): Encodes the documents.
        samples (`list[Sample]`): The documents.
        final_token (`str`): Token that closes a document; `<emb>` itself is never a label.

    Returns:
        `dict`: `inputs` of the model, and `labels` int64 `[N]` over the packed positions, -100 where the next token is
        of a picture, of another document or of the filler.
    """
    inputs = encoder(samples, final_token=final_token)
    ids, bounds = inputs["input_ids"][0], inputs["cu_seq_lens_q"].long()
    labels = torch.full_like(ids, -100)
    labels[:-1] = ids[1:]
    silent = [encoder.vision_start_id, encoder.vision_end_id, encoder.image_id, encoder.video_id, encoder.emb_id]
    labels[torch.isin(labels, torch.tensor(silent))] = -100
    labels[bounds[1:] - 1] = -100
    labels[bounds[len(samples)] :] = -100  # the filler rows
    return {"inputs": inputs, "labels": labels}


class DocumentSource(CorpusSource):
    """Draws pretraining documents; all of training rows only.

    Args:
        corpus (`Corpus`): The corpus on disk.
        max_languages (`int`, *optional*, defaults to 4): Languages beside English in one document.
    """

    name = "documents"

    def __init__(self, corpus, max_languages: int = 4):
        self.max_languages = max_languages
        super().__init__(corpus, chunk=1)

    def find_things(self) -> list:
        self.concept_images: dict[str, list[int]] = {}
        self.icons: list[int] = []
        for index, row in enumerate(self.corpus.image_rows):
            if row["split"] != "train":
                continue
            if row.get("concept"):
                self.concept_images.setdefault(row["concept"], []).append(index)
            else:
                self.icons.append(index)
        self.concept_ids = list(self.concept_images)
        self.pairs = [pair for pair in self.corpus.text_pairs if pair["split"] == "train"]
        return self.concept_ids

    def documents(self, kind: str, count: int, rng: np.random.Generator) -> list[Sample]:
        """Draws `count` documents of a kind: `emoji`, `icon`, `translation`, `gloss`, `strip` or `clip`.

        Raises:
            KeyError: For another kind.
        """
        draw: Callable = {
            "emoji": self._emoji,
            "icon": self._icon,
            "translation": self._translation,
            "gloss": self._gloss,
            "strip": self._strip,
            "clip": self._clip,
        }[kind]
        return [Sample(parts) for parts in draw(count, rng)]

    def _concepts(self, count: int, rng: np.random.Generator) -> list[str]:
        return [self.concept_ids[i] for i in rng.integers(len(self.concept_ids), size=count)]

    def lines(self, concept_id: str, rng: np.random.Generator) -> str:
        """The English label, then labels in some other languages and tags, one a line, in random order."""
        concept = self.corpus.concepts[concept_id]
        labels = concept.get("labels") or {}
        languages = sorted(labels)
        picked = rng.permutation(len(languages))[: int(rng.integers(1, self.max_languages + 1))]
        lines = [f"{languages[i]}: {labels[languages[i]]}" for i in picked]
        if concept.get("tags"):
            lines.append(join_tags(concept["tags"], rng))
        lines = [lines[i] for i in rng.permutation(len(lines))]
        return "\n".join([concept["en"], *lines])

    def _emoji(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        ids = self._concepts(count, rng)
        rows, sizes = [], []
        for concept_id in ids:
            choices = self.concept_images[concept_id]
            # Now and then the same thing in two styles, before its names.
            picked = rng.permutation(len(choices))[: 2 if rng.random() < 0.2 else 1]
            rows += [choices[i] for i in picked]
            sizes.append(len(picked))
        pictures = iter(self.pictures(rows, rng))
        return [
            (*[next(pictures) for _ in range(size)], self.lines(concept_id, rng))
            for concept_id, size in zip(ids, sizes, strict=True)
        ]

    def _icon(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        rows = [self.icons[i] for i in rng.integers(len(self.icons), size=count)]
        texts = []
        for row in rows:
            info = self.corpus.image_rows[row]
            texts.append("\n".join([info["text"], join_tags(info["tags"], rng)]) if info.get("tags") else info["text"])
        return list(zip(self.pictures(rows, rng), texts, strict=True))

    def _translation(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        return [(f"en: {self.lines(concept_id, rng)}",) for concept_id in self._concepts(count, rng)]

    def _gloss(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        pairs = [self.pairs[i] for i in rng.integers(len(self.pairs), size=count)]
        return [(f"{pair['document']}: {pair['query']}",) for pair in pairs]

    def _strip(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        texts = [self.corpus.strip_texts[i] for i in rng.integers(len(self.corpus.strip_texts), size=count)]
        return [(self.corpus.render_strip(text, rng), text) for text in texts]

    def _clip(self, count: int, rng: np.random.Generator) -> list[tuple[Part, ...]]:
        ids = self._concepts(count, rng)
        rows = [self.concept_images[c][int(rng.integers(len(self.concept_images[c])))] for c in ids]
        kinds = [MOTIONS[i] for i in rng.integers(len(MOTIONS), size=count)]
        pictures = self.pictures(rows, rng) if rows else []
        return [
            (motion_clip(picture, kind), f"{self.corpus.concepts[concept_id]['en']} {kind}")
            for picture, kind, concept_id in zip(pictures, kinds, ids, strict=True)
        ]
