"""What the quickstart embeds and asks: held-out pictures, clips, headings and names, and questions with known answers.

Which questions are asked was fixed before any answer was seen: everyday things by name, and unseen concepts and
headings drawn with a seed. The pictures are by an artist, and the unseen concepts of families, that moemb-mini was
not trained on.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .corpus_render import MOTIONS, motion_clip


LANGUAGES = {
    "en": "English",
    "fr": "French",
    "de": "German",
    "es": "Spanish",
    "ja": "Japanese",
    "zh": "Chinese",
    "ru": "Russian",
    "hi": "Hindi",
}
_SEED = 7
_FLAGS = ("country-flag", "subdivision-flag")
_MOVING_CONCEPTS = 10
# Everyday things by code point: language of the question and what is asked for.
_NAMED = (
    ("en", "1f3bb"),
    ("fr", "1f34b"),
    ("de", "26f5"),
    ("es", "1f682"),
    ("ja", "1f431"),
    ("zh", "1f344"),
)
_CLIPS = (("en", "1f418"), ("fr", "1f382"), ("ja", "1f427"))
_EDITS = (("1f44b", "dark skin tone"), ("1f44d", "light skin tone"), ("1f478", "medium skin tone"))


@dataclass(frozen=True)
class Entry:
    """
    Something that is embedded and can be found.

    Args:
        key (`str`):
            Unique name.
        modality (`str`):
            `"image"`, `"clip"`, `"page"` or `"text"`.
        item (`dict`):
            What is embedded: `text`, `image` (uint8 `[H, W, 3]`) or `video` (uint8 `[F, H, W, 3]`).
        label (`str`):
            What it shows, in English; the model never sees it with a picture.
        twin (`str`):
            Entries of a modality with the same twin are the same answer, such as two flags with equal pixels.
        language (`str`, *optional*, defaults to `""`):
            Language code of a name; empty for texts that are only asked, never found.
    """

    key: str
    modality: str
    item: dict[str, Any]
    label: str
    twin: str
    language: str = ""


@dataclass(frozen=True)
class Question:
    """
    A search with a known answer.

    Args:
        kind (`str`):
            Kind of search, such as `"text → image"`.
        item (`dict`):
            The query as embedded.
        label (`str`):
            What the query means, in English.
        target (`str`):
            Modality that is searched.
        relevant (`frozenset[str]`):
            Keys of the right answers.
        language (`str`, *optional*, defaults to `""`):
            Language code of the query's text.
        unseen (`bool`, *optional*, defaults to `False`):
            Whether no picture of this concept (or no heading with this text) was in the training data.
        exclude (`frozenset[str]`, *optional*):
            Keys that are left out, such as the query picture itself.
        within (`frozenset[str]`, *optional*):
            Languages of the texts that are searched; all entries of the modality when empty.
    """

    kind: str
    item: dict[str, Any]
    label: str
    target: str
    relevant: frozenset[str]
    language: str = ""
    unseen: bool = False
    exclude: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Sweep:
    """
    A search that is made for all its queries, to be measured.

    Args:
        title (`str`):
            What is searched.
        queries (`list[str]`):
            Keys of entries that ask.
        pool (`list[str]`):
            Keys of entries that can be found.
        relevant (`list[list[int]]`):
            Per query the places of its right answers in the pool.
    """

    title: str
    queries: list[str]
    pool: list[str]
    relevant: list[list[int]]


@dataclass(frozen=True)
class Collection:
    """The entries, the questions that are shown, and the sweeps that are measured."""

    entries: list[Entry] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)


def build_collection(gallery) -> Collection:
    """
    Builds what the quickstart embeds and asks, from the shipped gallery alone.

    Args:
        gallery (`Gallery`):
            The shipped gallery.

    Returns:
        `Collection`: about 1,900 pictures with some skin-tone variants, 190 real clips and 80 made to move, 500
        headings, and the names in the languages of `LANGUAGES`.
    """
    return _Builder(gallery).build()


class _Builder:
    """Holds what the parts of a collection share."""

    def __init__(self, gallery):
        self.concepts = gallery.concepts
        self.pictures = gallery.pictures
        self.twemoji = {
            picture.concept: picture for picture in gallery.pictures["twemoji"] if not picture.near_duplicate
        }
        self.unseen = self._unseen()
        self.entries: dict[str, Entry] = {}

    def build(self) -> Collection:
        for entry in (*self._images(), *self._clips(), *self._pages(), *self._texts()):
            self.entries[entry.key] = entry
        questions = [
            *self._named_questions(),
            *self._clip_questions(),
            *self._page_questions(),
            *self._image_questions(),
            *self._edit_questions(),
            *self._text_questions(),
        ]
        return Collection(list(self.entries.values()), questions, self._sweeps())

    def _unseen(self) -> list[str]:
        """Concepts of which no picture was in the training data (no flags, no variants), in a seeded random order."""
        chosen = sorted(
            name
            for name in self.twemoji
            if self.concepts[name]["split"] == "test"
            and not self.concepts[name]["trained"]
            and self.concepts[name]["base"] is None
            and self.concepts[name]["subgroup"] not in _FLAGS
        )
        random.Random(_SEED).shuffle(chosen)
        return chosen

    def _images(self) -> Iterable[Entry]:
        edited = {base for base, _ in _EDITS}
        for name, picture in self.twemoji.items():
            if self.concepts[name]["base"] in {None, *edited}:
                label = self.concepts[name]["en"]
                yield Entry(f"image/{name}", "image", {"image": picture.pixels}, label, picture.twin)

    def _clips(self) -> Iterable[Entry]:
        for picture in self.pictures["clips"]:
            name = picture.concept
            yield Entry(f"clip/{name}", "clip", {"video": picture.pixels}, self.concepts[name]["en"], name)
        for name in self.unseen[:_MOVING_CONCEPTS]:
            for motion in MOTIONS:
                label = f"{self.concepts[name]['en']} {motion}"
                clip = {"video": motion_clip(self.twemoji[name].pixels, motion)}
                yield Entry(f"motion/{name}/{motion}", "clip", clip, label, label)
                yield Entry(f"asked/{label}", "text", {"text": label}, label, label)

    def _pages(self) -> Iterable[Entry]:
        for picture in self.pictures["strips"]:
            title = picture.concept
            yield Entry(f"page/{title}", "page", {"image": picture.pixels}, title, title)
            yield Entry(f"asked/{title}", "text", {"text": title}, title, title)

    def _texts(self) -> Iterable[Entry]:
        for name in self.twemoji:
            if self.concepts[name]["base"] is None:
                yield self._name(name, "en")
        for name in self.unseen:
            for language in LANGUAGES:
                if self._has(name, language) and language != "en":
                    yield self._name(name, language)

    def _name(self, name: str, language: str) -> Entry:
        text = self._label(name, language)
        return Entry(f"text/{language}/{name}", "text", {"text": text}, self.concepts[name]["en"], name, language)

    def _has(self, name: str, language: str) -> bool:
        return name in self.concepts and (language == "en" or language in self.concepts[name]["labels"])

    def _label(self, name: str, language: str) -> str:
        concept = self.concepts[name]
        return concept["en"] if language == "en" else concept["labels"][language]

    def _same(self, key: str) -> frozenset[str]:
        """Keys of all entries that are the same answer as `key`."""
        right = self.entries[key]
        return frozenset(
            other.key
            for other in self.entries.values()
            if other.modality == right.modality and other.twin == right.twin
        )

    def _named(self, kind: str, key: str, name: str, language: str) -> Question:
        item = {"text": self._label(name, language)}
        target = self.entries[key].modality
        unseen = name in self.unseen
        return Question(kind, item, self.concepts[name]["en"], target, self._same(key), language, unseen)

    def _named_questions(self) -> Iterable[Question]:
        wanted = [*_NAMED, *(("en", name) for name in self.unseen[:3])]
        for language, name in wanted:
            if f"image/{name}" in self.entries and self._has(name, language):
                yield self._named("text → image", f"image/{name}", name, language)

    def _clip_questions(self) -> Iterable[Question]:
        for language, name in _CLIPS:
            if f"clip/{name}" in self.entries and self._has(name, language):
                yield self._named("text → clip", f"clip/{name}", name, language)
        for name, motion in zip(self.unseen, ("moving left", "growing"), strict=False):
            key = f"motion/{name}/{motion}"
            label = self.entries[key].label
            yield Question("text → clip", {"text": label}, label, "clip", frozenset({key}), "en", True)

    def _page_questions(self) -> Iterable[Question]:
        titles = sorted(picture.concept for picture in self.pictures["strips"])
        for title in random.Random(_SEED).sample(titles, min(3, len(titles))):
            answer = frozenset({f"page/{title}"})
            yield Question("text → heading", {"text": title}, title, "page", answer, "en", True)

    def _image_questions(self) -> Iterable[Question]:
        drawn = {picture.concept: picture for picture in self.pictures["noto"]}
        for name in [name for name in self.unseen if name in drawn][:3]:
            item = {"image": drawn[name].pixels}
            answers = self._same(f"image/{name}")
            yield Question("image → image", item, self.concepts[name]["en"], "image", answers, unseen=True)

    def _edit_questions(self) -> Iterable[Question]:
        for base, tone in _EDITS:
            answers = frozenset(
                f"image/{name}"
                for name in self.twemoji
                if self.concepts[name]["base"] == base and self.concepts[name]["tone"] == tone
            )
            if not answers or base not in self.twemoji:
                continue
            item = {"image": self.twemoji[base].pixels, "text": tone}
            label = f"{self.concepts[base]['en']}, {tone}"
            own = frozenset({f"image/{base}"})
            yield Question("image + text → image", item, label, "image", answers, "en", exclude=own)

    def _text_questions(self) -> Iterable[Question]:
        named = [name for name in self.unseen if self._has(name, "ja")]
        for name in named[:2]:
            answers = frozenset(
                f"text/{language}/{name}" for language in LANGUAGES if f"text/{language}/{name}" in self.entries
            )
            item, label = {"image": self.twemoji[name].pixels}, self.concepts[name]["en"]
            every = frozenset(LANGUAGES)
            yield Question("image → text", item, label, "text", answers, unseen=True, within=every)
        for name in named[2:4]:
            item, label = {"text": self._label(name, "ja")}, self.concepts[name]["en"]
            answers, english = frozenset({f"text/en/{name}"}), frozenset({"en"})
            yield Question("text → text", item, label, "text", answers, "ja", True, within=english)

    def _sweeps(self) -> list[Sweep]:
        base = [name for name in self.twemoji if self.concepts[name]["base"] is None]
        trained = [name for name in base if self.concepts[name]["trained"]]
        images = [f"image/{name}" for name in base]
        clips = [f"clip/{picture.concept}" for picture in self.pictures["clips"]]
        animated = [name for name in trained if f"clip/{name}" in self.entries]
        moving = [entry for entry in self.entries.values() if entry.key.startswith("motion/")]
        titles = [picture.concept for picture in self.pictures["strips"]]
        pages = [f"page/{title}" for title in titles]
        japanese = [name for name in self.unseen if self._has(name, "ja")]
        sweeps = [
            self._sweep("English name → picture, trained concepts", [f"text/en/{name}" for name in trained], images),
            self._sweep(
                "English name → picture, unseen concepts", [f"text/en/{name}" for name in self.unseen], images
            ),
            self._sweep("Japanese name → picture, unseen concepts", [f"text/ja/{name}" for name in japanese], images),
            self._sweep("English name → clip, trained concepts", [f"text/en/{name}" for name in animated], clips),
            self._sweep(
                "name and motion → clip, unseen concepts",
                [f"asked/{entry.label}" for entry in moving],
                [entry.key for entry in moving],
            ),
            self._sweep("title → heading, unseen titles", [f"asked/{title}" for title in titles], pages),
        ]
        return [sweep for sweep in sweeps if sweep.queries]

    def _sweep(self, title: str, queries: Sequence[str], pool: Sequence[str]) -> Sweep:
        places: dict[str, list[int]] = {}
        for place, key in enumerate(pool):
            places.setdefault(self.entries[key].twin, []).append(place)
        relevant = []
        for key in queries:
            asked = self.entries[key].twin
            # A picture's twin is named after the first concept that has the same pixels.
            twin = self.twemoji[asked].twin if pool and pool[0].startswith("image/") else asked
            relevant.append(places[twin])
        return Sweep(title, list(queries), list(pool), relevant)
