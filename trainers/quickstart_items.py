"""What the quickstart embeds and asks: held-out pictures, clips, headings and labels, and questions with known
answers.

Which questions are asked was fixed before any answer was seen: everyday things by name, and unseen concepts drawn
with a seed. The pictures are by an artist, and the unseen concepts of families, that moemb-mini was not trained on.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
ARTIST = "twemoji"
QUERY_ARTIST = "noto"
_SEED = 7
_MOVING_CONCEPTS = 10
_PAGES = 60
_PAGE_SIZE = (128, 32)
# Everyday things by code point: language of the question and what is asked for.
_NAMED = (
    ("en", "1f3bb"),
    ("fr", "1f34b"),
    ("de", "26f5"),
    ("es", "1f682"),
    ("ja", "1f431"),
    ("zh", "1f344"),
)
_CLIPS = (("en", "1f680"), ("fr", "1f382"), ("ja", "1f47b"))
_EDITS = (("1f44b", "dark skin tone"), ("1f44d", "light skin tone"), ("1f478", "medium skin tone"))


@dataclass(frozen=True)
class Entry:
    """
    Something that can be found.

    Args:
        key (`str`):
            Unique name.
        modality (`str`):
            `"image"`, `"clip"`, `"page"` or `"text"`.
        item (`dict`):
            What is embedded: `text`, `image` (uint8 `[H, W, 3]`) or `video` (uint8 `[F, H, W, 3]`).
        label (`str`):
            What it shows, in English; the model never sees it with a picture.
        concept (`str`):
            Id of the concept it belongs to.
        language (`str`, *optional*, defaults to `""`):
            Language code of a text.
    """

    key: str
    modality: str
    item: dict[str, Any]
    label: str
    concept: str
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
            Whether no picture of this concept was in the training data.
        exclude (`frozenset[str]`, *optional*):
            Keys that are left out, such as the query picture itself.
        within (`frozenset[str]`, *optional*):
            Languages of the texts that are searched; all when empty.
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
class Collection:
    """The entries and the questions of the quickstart."""

    entries: list[Entry] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def build_collection(gallery) -> Collection:
    """
    Builds what the quickstart embeds and asks, from the shipped gallery alone.

    Args:
        gallery (`Gallery`):
            The shipped gallery.

    Returns:
        `Collection`: about 1,900 pictures with some skin-tone variants, 190 real and 80 moving clips, headings, and
        labels.
    """
    concepts = gallery.concepts
    unseen = unseen_concepts(gallery)
    entries = _pictures(gallery) + _clips(gallery, unseen) + _pages(concepts, unseen) + _texts(gallery, unseen)
    present = {entry.key: entry for entry in entries}
    questions = [
        *_named_questions(concepts, present),
        *_unseen_questions(concepts, present, unseen),
        *_clip_questions(concepts, present, unseen),
        *_page_questions(concepts, present, unseen),
        *_picture_questions(gallery, present, unseen),
        *_edit_questions(gallery, present),
        *_text_questions(gallery, present, unseen),
    ]
    return Collection(entries, questions)


def unseen_concepts(gallery) -> list[str]:
    """Returns ids of test concepts (no flags, no variants) that the artist drew, in a seeded random order."""
    drawn = {row["concept"] for row in gallery.image_rows if row["source"] == ARTIST}
    chosen = sorted(
        name
        for name, concept in gallery.concepts.items()
        if concept["split"] == "test" and not concept["base"] and concept["group"] != "flags" and name in drawn
    )
    random.Random(_SEED).shuffle(chosen)
    return chosen


def draw_heading(text: str) -> np.ndarray:
    """A heading set in Pillow's own font, black on white, uint8 `[32, 128, 3]`; too long ones are cut by the edge."""
    page = Image.new("RGB", _PAGE_SIZE, "white")
    font = ImageFont.load_default(size=11)
    ImageDraw.Draw(page).text((4, _PAGE_SIZE[1] // 2), text, fill="black", font=font, anchor="lm")
    return np.asarray(page)


def _pictures(gallery) -> list[Entry]:
    edited = {base for base, _ in _EDITS}
    entries = []
    for row in gallery.image_rows:
        if row["source"] != ARTIST or row.get("near_duplicate"):
            continue
        base = gallery.concepts[row["concept"]]["base"]
        if base and base not in edited:
            continue
        image = np.asarray(gallery.image(row["key"]))
        entries.append(Entry(row["key"], "image", {"image": image}, row["text"], row["concept"]))
    return entries


def _clips(gallery, unseen: Sequence[str]) -> list[Entry]:
    entries = [
        Entry(
            f"clip/{row['concept']}",
            "clip",
            {"video": np.asarray(gallery.clip(row["key"]))},
            row["text"],
            row["concept"],
        )
        for row in gallery.clip_rows
    ]
    keys = {row["concept"]: row["key"] for row in gallery.image_rows if row["source"] == ARTIST}
    for name in unseen[:_MOVING_CONCEPTS]:
        image, label = np.asarray(gallery.image(keys[name])), gallery.concepts[name]["en"]
        for motion in MOTIONS:
            clip = {"video": motion_clip(image, motion)}
            entries.append(Entry(f"motion/{name}/{motion}", "clip", clip, f"{label} {motion}", name))
    return entries


def _pages(concepts: Mapping[str, dict], unseen: Sequence[str]) -> list[Entry]:
    chosen = [name for name in unseen if len(concepts[name]["en"]) <= 20][:_PAGES]
    return [
        Entry(
            f"page/{name}",
            "page",
            {"image": draw_heading(concepts[name]["en"].capitalize())},
            concepts[name]["en"],
            name,
        )
        for name in chosen
    ]


def _texts(gallery, unseen: Sequence[str]) -> list[Entry]:
    concepts = gallery.concepts
    drawn = dict.fromkeys(row["concept"] for row in gallery.image_rows if row["source"] == ARTIST)
    base = [name for name in drawn if not concepts[name]["base"]]
    entries = [_text_entry(concepts, name, "en") for name in base]
    for name in unseen:
        for language in LANGUAGES:
            if language in concepts[name]["labels"] and language != "en":
                entries.append(_text_entry(concepts, name, language))
    return entries


def _text_entry(concepts: Mapping[str, dict], name: str, language: str) -> Entry:
    text = label_in(concepts[name], language)
    return Entry(f"text/{language}/{name}", "text", {"text": text}, concepts[name]["en"], name, language)


def label_in(concept: Mapping[str, Any], language: str) -> str:
    """Returns the label of a concept in a language, `"en"` or one of its `labels`."""
    return concept["en"] if language == "en" else concept["labels"][language]


def _named_questions(concepts, present) -> list[Question]:
    return [
        Question(
            "text → image",
            {"text": label_in(concepts[name], language)},
            concepts[name]["en"],
            "image",
            frozenset({f"{ARTIST}/{name}"}),
            language,
            concepts[name]["split"] == "test",
        )
        for language, name in _NAMED
        if f"{ARTIST}/{name}" in present and (language == "en" or language in concepts[name]["labels"])
    ]


def _unseen_questions(concepts, present, unseen) -> list[Question]:
    return [
        Question(
            "text → image",
            {"text": concepts[name]["en"]},
            concepts[name]["en"],
            "image",
            frozenset({f"{ARTIST}/{name}"}),
            "en",
            True,
        )
        for name in [name for name in unseen if f"{ARTIST}/{name}" in present][:3]
    ]


def _clip_questions(concepts, present, unseen) -> list[Question]:
    questions = [
        Question(
            "text → clip",
            {"text": label_in(concepts[name], language)},
            concepts[name]["en"],
            "clip",
            frozenset({f"clip/{name}"}),
            language,
            concepts[name]["split"] == "test",
        )
        for language, name in _CLIPS
        if f"clip/{name}" in present and (language == "en" or language in concepts[name]["labels"])
    ]
    for name, motion in zip(unseen[:2], ("moving left", "growing"), strict=False):
        text = f"{concepts[name]['en']} {motion}"
        answer = frozenset({f"motion/{name}/{motion}"})
        questions.append(Question("text → clip", {"text": text}, text, "clip", answer, "en", True))
    return questions


def _page_questions(concepts, present, unseen) -> list[Question]:
    pages = [name for name in unseen if f"page/{name}" in present][:2]
    return [
        Question(
            "text → heading",
            {"text": concepts[name]["en"]},
            concepts[name]["en"],
            "page",
            frozenset({f"page/{name}"}),
            "en",
            True,
        )
        for name in pages
    ]


def _picture_questions(gallery, present, unseen) -> list[Question]:
    keys = {row["concept"]: row["key"] for row in gallery.image_rows if row["source"] == QUERY_ARTIST}
    chosen = [name for name in unseen if name in keys and f"{ARTIST}/{name}" in present][:3]
    return [
        Question(
            "image → image",
            {"image": np.asarray(gallery.image(keys[name]))},
            gallery.concepts[name]["en"],
            "image",
            frozenset({f"{ARTIST}/{name}"}),
            unseen=True,
        )
        for name in chosen
    ]


def _edit_questions(gallery, present) -> list[Question]:
    questions = []
    for base, tone in _EDITS:
        answers = [
            key
            for key, entry in present.items()
            if entry.modality == "image"
            and gallery.concepts[entry.concept]["base"] == base
            and gallery.concepts[entry.concept].get("tone") == tone
        ]
        query = f"{ARTIST}/{base}"
        if not answers or query not in present:
            continue
        item = {"image": present[query].item["image"], "text": tone}
        label = f"{present[query].label}, {tone}"
        questions.append(
            Question(
                "image + text → image", item, label, "image", frozenset(answers), "en", exclude=frozenset({query})
            )
        )
    return questions


def _text_questions(gallery, present, unseen) -> list[Question]:
    questions = []
    with_text = [name for name in unseen if f"text/ja/{name}" in present and f"{ARTIST}/{name}" in present]
    for name in with_text[:1]:
        answers = frozenset(
            key for key, entry in present.items() if entry.modality == "text" and entry.concept == name
        )
        item = {"image": present[f"{ARTIST}/{name}"].item["image"]}
        questions.append(
            Question("image → text", item, present[f"{ARTIST}/{name}"].label, "text", answers, unseen=True)
        )
    for name in with_text[1:2]:
        text = label_in(gallery.concepts[name], "ja")
        questions.append(
            Question(
                "text → text",
                {"text": text},
                gallery.concepts[name]["en"],
                "text",
                frozenset({f"text/en/{name}"}),
                "ja",
                True,
                within=frozenset({"en"}),
            )
        )
    return questions
