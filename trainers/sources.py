"""Sources of contrastive training pairs from the corpus: one class per kind of homogeneous sub-batch.

All of them read training rows only. A row's `key` says what it is about; rows of a group with equal keys are right
pairs. Every picture is augmented anew at each draw.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .corpus_render import MOTIONS, motion_clip
from .data import Sample, augment
from .mixture import Contrast, Group


# Languages drawn twice as often as the others in captions: those the held-out tasks ask in.
FAVOURED_LANGUAGES = ("ja", "zh", "fr", "de", "es", "ru", "hi")


def torch_generator(rng: np.random.Generator) -> torch.Generator:
    """A torch generator seeded by the next draw of `rng`."""
    return torch.Generator().manual_seed(int(rng.integers(2**62)))


def draw_language(labels: Mapping[str, str], rng: np.random.Generator) -> str:
    """Draws one of the languages of `labels`, the favoured ones with double weight."""
    languages = sorted(labels)
    weights = np.array([2.0 if language in FAVOURED_LANGUAGES else 1.0 for language in languages])
    return languages[int(rng.choice(len(languages), p=weights / weights.sum()))]


def join_tags(tags: Sequence, rng: np.random.Generator) -> str:
    """Up to three of the tags, in random order, as one text."""
    chosen = rng.permutation(len(tags))[:3]
    return ", ".join(str(tags[i]) for i in chosen)


class CorpusSource:
    """Base of the sources: the corpus, the texts a teacher knows, and drawing of augmented pictures.

    Args:
        corpus (`Corpus`): The corpus on disk.
        chunk (`int`): Things per sub-batch.
        teacher_texts (`Mapping[str, int]`, *optional*): Texts with a teacher vector.
        teacher_images (`Mapping[str, int]`, *optional*): Image keys with a teacher vector.
    """

    name = ""

    def __init__(
        self,
        corpus,
        chunk: int,
        teacher_texts: Mapping[str, int] | None = None,
        teacher_images: Mapping[str, int] | None = None,
    ):
        self.corpus = corpus
        self.chunk = chunk
        self.teacher_texts = teacher_texts if teacher_texts is not None else {}
        self.teacher_images = teacher_images if teacher_images is not None else {}
        self.things = self.find_things()

    def find_things(self) -> list:
        """The things this source draws from, in a fixed order."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        return len(self.things)

    def text_target(self, *texts: str) -> str | None:
        """The first of the texts that the text teacher knows."""
        return next((text for text in texts if text in self.teacher_texts), None)

    def image_target(self, key: str) -> str | None:
        return key if key in self.teacher_images else None

    def pictures(self, rows: Sequence[int], rng: np.random.Generator) -> list[np.ndarray]:
        """Augmented copies (uint8 `[H, W, 3]`) of the corpus' images at `rows`."""
        stacked = torch.from_numpy(np.stack([self.corpus.images[row] for row in rows]))
        return list(augment(stacked, torch_generator(rng)).numpy())


class EmojiSource(CorpusSource):
    """Caption <-> image, image <-> image in another style, and caption <-> caption, of emoji concepts.

    Each concept gives two pictures (two styles, or one drawn twice) and two captions: the English label, the label in
    another language, or some tags. Now and then a concept is replaced by one of its skin-tone variants.
    """

    name = "emoji"
    english_share, tag_share, skin_share = 0.45, 0.16, 0.1

    def find_things(self) -> list[str]:
        self.rows: dict[str, list[int]] = {}
        for index, row in enumerate(self.corpus.image_rows):
            if row["split"] == "train" and row.get("concept"):
                self.rows.setdefault(row["concept"], []).append(index)
        self.variants: dict[str, list[str]] = {}
        for concept in self.rows:
            base = self.corpus.concepts[concept].get("base")
            if base:
                self.variants.setdefault(base, []).append(concept)
        return [concept for concept in self.rows if not self.corpus.concepts[concept].get("base")]

    def caption(self, concept: dict, rng: np.random.Generator) -> str:
        labels, tags = concept.get("labels") or {}, concept.get("tags") or []
        draw = rng.random()
        if draw < self.tag_share and tags:
            return join_tags(tags, rng)
        if draw < 1.0 - self.english_share and labels:
            return labels[draw_language(labels, rng)]
        return concept["en"]

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        texts, text_targets, rows, keys = [], [], [], []
        for index in indices:
            concept_id = self.things[index]
            if concept_id in self.variants and rng.random() < self.skin_share:
                concept_id = self.variants[concept_id][int(rng.integers(len(self.variants[concept_id])))]
            concept, choices = self.corpus.concepts[concept_id], self.rows[concept_id]
            picked = rng.permutation(len(choices))[:2]
            rows += [choices[picked[0]], choices[picked[-1]]]
            for _ in range(2):
                texts.append(self.caption(concept, rng))
                text_targets.append(self.text_target(texts[-1], concept["en"]))
                keys.append(concept_id)
        n = len(texts)
        pictures = self.pictures(rows, rng)
        image_rows = [self.corpus.image_rows[row] for row in rows]
        labels = [self.text_target(self.corpus.concepts[key]["en"]) for key in keys]
        text_range, image_range = list(range(n)), list(range(n, 2 * n))
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in texts] + [Sample((picture,)) for picture in pictures],
            keys=keys + keys,
            contrasts=[
                Contrast(text_range, image_range),
                Contrast(image_range, image_range, symmetric=False, weight=0.5),
                Contrast(text_range, text_range, symmetric=False, weight=0.25),
            ],
            text_targets=text_targets + labels,
            image_targets=[None] * n + [self.image_target(row["key"]) for row in image_rows],
        )


class IconSource(CorpusSource):
    """Name or tags <-> picture of an interface icon."""

    name = "icon"
    tag_share = 0.35

    def find_things(self) -> list[int]:
        return [
            index
            for index, row in enumerate(self.corpus.image_rows)
            if row["split"] == "train" and not row.get("concept")
        ]

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        rows = [self.things[index] for index in indices]
        infos = [self.corpus.image_rows[row] for row in rows]
        texts = [
            join_tags(info["tags"], rng) if info.get("tags") and rng.random() < self.tag_share else info["text"]
            for info in infos
        ]
        n = len(rows)
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in texts] + [Sample((p,)) for p in self.pictures(rows, rng)],
            keys=[info["text"] for info in infos] * 2,
            contrasts=[Contrast(list(range(n)), list(range(n, 2 * n)))],
            text_targets=[self.text_target(text, info["text"]) for text, info in zip(texts, infos, strict=True)]
            + [self.text_target(info["text"]) for info in infos],
            image_targets=[None] * n + [self.image_target(info["key"]) for info in infos],
        )


class TranslationSource(CorpusSource):
    """Label in another language <-> English label of a concept."""

    name = "translation"

    def find_things(self) -> list[str]:
        return [
            key
            for key, concept in self.corpus.concepts.items()
            if concept["split"] == "train" and not concept.get("base") and concept.get("labels")
        ]

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        concepts = [self.corpus.concepts[self.things[index]] for index in indices]
        foreign = [concept["labels"][draw_language(concept["labels"], rng)] for concept in concepts]
        english = [concept["en"] for concept in concepts]
        n = len(concepts)
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in foreign + english],
            keys=english * 2,
            contrasts=[Contrast(list(range(n)), list(range(n, 2 * n)))],
            text_targets=[self.text_target(text) for text in english] * 2,
        )


class TextPairSource(CorpusSource):
    """Query text <-> document text, of one or more sources of the corpus' text pairs.

    Args:
        pair_sources (`Sequence[str]`): Values of a pair's `source` field.
        name (`str`): Name of the mixture entry.
    """

    def __init__(self, corpus, chunk: int, *args, pair_sources: Sequence[str], name: str, **kwargs):
        self.pair_sources, self.name = frozenset(pair_sources), name
        super().__init__(corpus, chunk, *args, **kwargs)

    def find_things(self) -> list[dict]:
        return [
            pair for pair in self.corpus.text_pairs if pair["split"] == "train" and pair["source"] in self.pair_sources
        ]

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        pairs = [self.things[index] for index in indices]
        texts = [pair["query"] for pair in pairs] + [pair["document"] for pair in pairs]
        n = len(pairs)
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in texts],
            keys=[pair["document"] for pair in pairs] * 2,
            contrasts=[Contrast(list(range(n)), list(range(n, 2 * n)))],
            text_targets=[self.text_target(text) for text in texts],
        )


class StripSource(CorpusSource):
    """A short text <-> the text rendered as a heading strip (reading)."""

    name = "strip"

    def find_things(self) -> list[str]:
        return list(self.corpus.strip_texts)

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        texts = [self.things[index] for index in indices]
        strips = [self.corpus.render_strip(text, rng) for text in texts]
        n = len(texts)
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in texts] + [Sample((strip,)) for strip in strips],
            keys=[text.lower() for text in texts] * 2,
            contrasts=[Contrast(list(range(n)), list(range(n, 2 * n)))],
            text_targets=[self.text_target(text) for text in texts] * 2,
        )


class MotionSource(EmojiSource):
    """A clip of a moving emoji <-> "label moving left".

    Most sub-batches hold all motions of `chunk / motions` concepts, so that only the order of the frames tells the
    right clip from its seven neighbours; the others hold `chunk` concepts with one motion each and the bare label as
    the text, so that a clip also means what it shows.
    """

    name = "motion"
    contrast_share = 0.7

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        kinds = MOTIONS
        if rng.random() < self.contrast_share:
            things = [(index, kind) for index in indices[: max(1, len(indices) // len(kinds))] for kind in kinds]
            bare = False
        else:
            things = [(index, kinds[int(rng.integers(len(kinds)))]) for index in indices]
            bare = True
        rows = {}
        for index in indices:
            choices = self.rows[self.things[index]]
            rows[index] = choices[int(rng.integers(len(choices)))]
        pictures = dict(zip(rows, self.pictures(list(rows.values()), rng), strict=True))
        texts, clips, keys, labels = [], [], [], []
        for index, kind in things:
            concept = self.corpus.concepts[self.things[index]]
            texts.append(concept["en"] if bare else f"{concept['en']} {kind}")
            clips.append(motion_clip(pictures[index], kind))
            keys.append((self.things[index], "" if bare else kind))
            labels.append(self.text_target(texts[-1], concept["en"]))
        n = len(texts)
        return Group(
            source=self.name,
            samples=[Sample((text,)) for text in texts] + [Sample((clip,)) for clip in clips],
            keys=keys * 2,
            contrasts=[Contrast(list(range(n)), list(range(n, 2 * n)))],
            text_targets=labels * 2,
        )


class SkinEditSource(CorpusSource):
    """Composed retrieval: picture of a person + "dark skin tone" -> that picture in that tone.

    A thing is one person in one style. The documents hold every tone of each person drawn *and* the unedited picture,
    so neither the picture alone nor the tone alone finds the right one.
    """

    name = "edit"

    def find_things(self) -> list[tuple[int, list[tuple[str, int]]]]:
        people: dict[int, list[tuple[str, int]]] = {}
        sources = {row["source"] for row in self.corpus.image_rows if row["split"] == "train" and row.get("concept")}
        for source in sorted(sources):
            for base, text, target in self.corpus.skin_triples(source):
                people.setdefault(base, []).append((text, target))
        return sorted(people.items())

    def draw(self, indices: np.ndarray, rng: np.random.Generator) -> Group:
        people = [self.things[index] for index in indices]
        rows = [row for base, edits in people for row in (base, *[target for _, target in edits])]
        documents = self.pictures(rows, rng)
        asked = self.pictures([base for base, _ in people], rng)
        samples, keys = [], []
        for picture, (_, edits) in zip(asked, people, strict=True):
            for text, target in edits:
                samples.append(Sample((picture, text)))
                keys.append(self.corpus.image_rows[target]["key"])
        n = len(samples)
        keys += [self.corpus.image_rows[row]["key"] for row in rows]
        samples += [Sample((picture,)) for picture in documents]
        return Group(
            source=self.name,
            samples=samples,
            keys=keys,
            contrasts=[Contrast(list(range(n)), list(range(n, len(samples))), symmetric=False)],
            image_targets=[self.image_target(key) for key in keys],
        )
