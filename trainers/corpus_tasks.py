"""What a held-out task is, and the tasks built from the shipped gallery.

Number, name and expected level of each task stand in its description. Pictures that are nearly a training picture are
in no task, concepts of the validation families ask no questions (settings were chosen on them), and pictures that are
equal pixel for pixel (the flags of Norway and Svalbard) count as one right answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .corpus_render import MOTIONS, motion_clip


TASK_LANGUAGES = ("ja", "ru", "hi", "zh", "fr", "de", "es")


@dataclass
class EvaluationTask:
    """A retrieval task: for each query, which documents are right.

    Args:
        name (`str`):
            Such as `"emoji-artist"`.
        number (`str`):
            Number in the list of tasks, such as `"7a"`.
        kind (`str`):
            Such as `"text->image"`.
        tag (`str`):
            `"IND"` when concepts of the kind were trained on, `"OOD"` when they were not.
        description (`str`):
            One sentence for people.
        queries, documents (`list[dict]`):
            Items with one or more of the keys `text` (`str`), `image` (uint8 `(h, w, 3)`) and `video` (uint8 `(f, h,
            w, 3)`).
        relevant (`list[list[int]]`):
            Numbers of the right documents, per query.
        licence (`str`):
            Of the items.
        exclude (`list[list[int]]`, *optional*):
            Documents left out of a query's ranking. Empty when there are none.
        groups (`dict[str, list[int]]`, *optional*):
            Queries that are reported as a line of their own.
        clusters (`list[int]`, *optional*):
            Number of the cluster of each query; a bootstrap draws clusters. Without it each query stands alone.
    """

    name: str
    number: str
    kind: str
    tag: str
    description: str
    queries: list[dict]
    documents: list[dict]
    relevant: list[list[int]]
    licence: str
    exclude: list[list[int]] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)
    clusters: list[int] | None = None

    def __post_init__(self):
        if len(self.relevant) != len(self.queries):
            raise ValueError(
                f"task {self.name}: {len(self.queries)} queries but {len(self.relevant)} lists of right answers"
            )
        for number, answers in enumerate(self.relevant):
            if not answers or max(answers) >= len(self.documents) or min(answers) < 0:
                raise ValueError(
                    f"task {self.name}: query {number} has the answers {answers} of {len(self.documents)} documents"
                )


@dataclass(frozen=True)
class Picture:
    """One picture (or clip) of the gallery. `twin` numbers pictures of equal pixels alike."""

    key: str
    concept: str
    pixels: np.ndarray
    near_duplicate: bool
    twin: str


class TaskMaker:
    """Builds tasks from concepts and pictures.

    Args:
        concepts (`dict[str, dict]`):
            By id: `en`, `labels`, `group`, `subgroup`, `base`, `tone`, `split`, `trained` (whether a training picture
            shows it).
        pictures (`dict[str, list[Picture]]`):
            By sheet: `twemoji`, `fluent`, `noto`, `clips`, `strips` (for strips `concept` is the text).
    """

    def __init__(self, concepts: dict[str, dict], pictures: dict[str, list[Picture]]):
        self.concepts = concepts
        self.pictures = pictures
        usable = [picture for picture in pictures["twemoji"] if not picture.near_duplicate]
        self.bases = [picture for picture in usable if concepts[picture.concept]["base"] is None]
        self.variants = [picture for picture in usable if concepts[picture.concept]["base"] is not None]

    def _is_trained(self, concept: str) -> bool:
        return self.concepts[concept]["trained"]

    def _is_unseen(self, concept: str) -> bool:
        return self.concepts[concept]["split"] == "test" and not self._is_flag(concept)

    def _is_flag(self, concept: str) -> bool:
        return self.concepts[concept]["subgroup"] in ("country-flag", "subdivision-flag")

    def _is_validation(self, concept: str) -> bool:
        return self.concepts[concept]["split"] == "validation"

    def _groups(self, concepts: list[str]) -> dict[str, list[int]]:
        """Lines by what training saw of the concept; empty lines are left out."""
        lines = {"trained concepts": self._is_trained, "unseen concepts": self._is_unseen, "flags": self._is_flag}
        groups = {name: [i for i, concept in enumerate(concepts) if test(concept)] for name, test in lines.items()}
        return {name: members for name, members in groups.items() if members}

    def _to_pictures(self, texts: list[tuple[str, str]], pool: list[Picture], **about) -> EvaluationTask:
        """A task from `(concept, text)` to the picture of the concept."""
        twin = {picture.concept: picture.twin for picture in pool}
        rows = _rows_by_twin(pool)
        return EvaluationTask(
            queries=[{"text": text} for _, text in texts],
            documents=[{"image": picture.pixels} for picture in pool],
            relevant=[rows[twin[concept]] for concept, _ in texts],
            licence="CC-BY-4.0",
            **about,
        )

    def _labels(self, chosen: Callable[[str], bool]) -> list[tuple[str, str]]:
        return [(p.concept, self.concepts[p.concept]["en"]) for p in self.bases if chosen(p.concept)]

    def emoji_artist(self) -> EvaluationTask:
        """1: label of a trained concept -> its picture by an artist never trained on."""
        return self._to_pictures(
            self._labels(self._is_trained), self.bases, name="emoji-artist", number="1", kind="text->image", tag="IND",
            description="English label of a trained concept to its Twemoji picture; this artist was never trained on",
        )  # fmt: skip

    def emoji_flags(self) -> EvaluationTask:
        """1, flags: no picture of a country's flag is trained on."""
        return self._to_pictures(
            self._labels(lambda key: self._is_flag(key) and not self._is_validation(key)), self.bases,
            name="emoji-flags", number="1", kind="text->image", tag="OOD",
            description="name of a flag to its Twemoji picture; no picture of any country's flag was trained on",
        )  # fmt: skip

    def emoji_concept(self) -> EvaluationTask:
        """2: label of a concept no picture of which was seen, among pictures of such concepts."""
        pool = [picture for picture in self.bases if self._is_unseen(picture.concept)]
        return self._to_pictures(
            self._labels(self._is_unseen), pool, name="emoji-concept", number="2", kind="text->image", tag="OOD",
            description="English label of an unseen concept to its picture, among the unseen concepts",
        )  # fmt: skip

    def emoji_concept_full(self) -> EvaluationTask:
        """2, the same queries among all pictures."""
        return self._to_pictures(
            self._labels(self._is_unseen), self.bases, name="emoji-concept-full", number="2", kind="text->image",
            tag="OOD",
            description="English label of an unseen concept to its picture, among all concepts",
        )  # fmt: skip

    def _asking(self) -> list[Picture]:
        return [picture for picture in self.bases if not self._is_validation(picture.concept)]

    def emoji_caption(self) -> EvaluationTask:
        """3: picture -> label among all labels."""
        asking = self._asking()
        pool = [picture.concept for picture in self.bases]
        rows = _rows_by_twin(self.bases)
        return EvaluationTask(
            "emoji-caption", "3", "image->text", "IND", "Twemoji picture to its English label",
            [{"image": picture.pixels} for picture in asking], [{"text": self.concepts[key]["en"]} for key in pool],
            [rows[picture.twin] for picture in asking], "CC-BY-4.0", groups=self._groups([p.concept for p in asking]),
        )  # fmt: skip

    def emoji_subgroup(self) -> EvaluationTask:
        """3, zero-shot classes: picture of an unseen concept -> name of its subgroup."""
        asking = [picture for picture in self.bases if self._is_unseen(picture.concept)]
        names = sorted({c["subgroup"] for c in self.concepts.values()})
        return EvaluationTask(
            "emoji-subgroup", "3", "image->text", "OOD",
            "Twemoji picture of an unseen concept to the name of its subgroup",
            [{"image": picture.pixels} for picture in asking], [{"text": name.replace("-", " ")} for name in names],
            [[names.index(self.concepts[p.concept]["subgroup"])] for p in asking], "CC-BY-4.0",
        )  # fmt: skip

    def style(self) -> EvaluationTask:
        """4: Noto picture of an unseen concept -> Fluent picture of the same."""
        pool = self.pictures["fluent"]
        row = {picture.concept: number for number, picture in enumerate(pool)}
        asking = [p for p in self.pictures["noto"] if self._is_unseen(p.concept) and p.concept in row]
        return EvaluationTask(
            "style", "4", "image->image", "OOD",
            "Noto picture of an unseen concept to the Fluent picture of the same concept",
            [{"image": p.pixels} for p in asking], [{"image": p.pixels} for p in pool],
            [[row[p.concept]] for p in asking],
            "Apache-2.0, MIT",
        )  # fmt: skip

    def _foreign(self, chosen: Callable[[str], bool]) -> tuple[list[tuple[str, str]], list[str]]:
        """Labels in other languages that are not spelt as in English, as `(concept, label)`, and their languages."""
        texts, languages = [], []
        for language in TASK_LANGUAGES:
            for concept, english in self._labels(chosen):
                label = self.concepts[concept]["labels"].get(language)
                if label and label.casefold() != english.casefold():
                    texts.append((concept, label))
                    languages.append(language)
        return texts, languages

    @staticmethod
    def _by_language(languages: list[str]) -> dict[str, list[int]]:
        return {
            name: [i for i, language in enumerate(languages) if language == name] for name in dict.fromkeys(languages)
        }

    def xling_image(self) -> EvaluationTask:
        """5: label in another language -> picture."""
        texts, languages = self._foreign(self._is_trained)
        task = self._to_pictures(
            texts, self.bases, name="xling-image", number="5", kind="text->image", tag="IND",
            description="label of a trained concept in another language to its Twemoji picture",
        )  # fmt: skip
        task.groups, task.clusters = self._by_language(languages), _clusters([concept for concept, _ in texts])
        return task

    def xling_text(self) -> EvaluationTask:
        """5: label of an unseen concept in another language -> English label."""
        texts, languages = self._foreign(self._is_unseen)
        pool = [picture.concept for picture in self.bases]
        row = {concept: number for number, concept in enumerate(pool)}
        return EvaluationTask(
            "xling-text", "5", "text->text", "OOD",
            "label of an unseen concept in another language to its English label",
            [{"text": text} for _, text in texts], [{"text": self.concepts[key]["en"]} for key in pool],
            [[row[concept]] for concept, _ in texts], "Unicode-3.0", groups=self._by_language(languages),
            clusters=_clusters([concept for concept, _ in texts]),
        )  # fmt: skip

    def skin_edit(self) -> EvaluationTask:
        """6: picture + name of a skin tone -> that picture with that tone."""
        base = {picture.concept: picture for picture in self.bases}
        pool = self.variants
        rows = _rows_by_twin(pool)
        asking = [
            picture
            for picture in pool
            if self.concepts[picture.concept]["base"] in base and not self._is_validation(picture.concept)
        ]
        parents = [self.concepts[picture.concept]["base"] for picture in asking]
        tones = [self.concepts[picture.concept]["tone"] for picture in asking]
        return EvaluationTask(
            "skin-edit", "6", "image+text->image", "IND",
            "Twemoji picture and the name of a skin tone to the edited picture",
            [{"image": base[parent].pixels, "text": tone} for parent, tone in zip(parents, tones, strict=True)],
            [{"image": picture.pixels} for picture in pool], [rows[picture.twin] for picture in asking], "CC-BY-4.0",
            groups=self._groups(parents), clusters=_clusters(parents),
        )  # fmt: skip

    def clip(self) -> EvaluationTask:
        """7a: label -> real animation."""
        pool = self.pictures["clips"]
        asking = [(row, p.concept) for row, p in enumerate(pool) if not self._is_validation(p.concept)]
        return EvaluationTask(
            "clip", "7a", "text->video", "IND",
            "English label to the animated emoji, the twin in 3-D of a training artist's",
            [{"text": self.concepts[concept]["en"]} for _, concept in asking], [{"video": p.pixels} for p in pool],
            [[row] for row, _ in asking], "MIT", groups=self._groups([concept for _, concept in asking]),
        )  # fmt: skip

    def motion(self) -> EvaluationTask:
        """7b: label and motion -> clip in which an unseen concept moves so."""
        moving = [picture for picture in self.bases if self._is_unseen(picture.concept)]
        pairs = [(picture, kind) for picture in moving for kind in MOTIONS]
        return EvaluationTask(
            "motion", "7b", "text->video", "OOD",
            "label of an unseen concept and how it moves to the clip: needs the order of frames",
            [{"text": f"{self.concepts[picture.concept]['en']} {kind}"} for picture, kind in pairs],
            [{"video": motion_clip(picture.pixels, kind)} for picture, kind in pairs],
            [[row] for row in range(len(pairs))],
            "CC-BY-4.0", groups=self._by_language([kind for _, kind in pairs]),
            clusters=_clusters([picture.concept for picture, _ in pairs]),
        )  # fmt: skip

    def strip(self) -> EvaluationTask:
        """9a: title -> the strip it is set on; no strip of these titles was trained on."""
        pool = self.pictures["strips"]
        return EvaluationTask(
            "strip", "9a", "text->image", "OOD", "title to a picture of it set in type: needs reading",
            [{"text": p.concept} for p in pool], [{"image": p.pixels} for p in pool],
            [[row] for row in range(len(pool))],
            "WordNet-3.0",
        )  # fmt: skip

    @property
    def makers(self) -> dict[str, Callable[[], EvaluationTask]]:
        """`dict[str, Callable]`: the maker of each task by name, in the order they are reported."""
        makers = (
            self.emoji_artist, self.emoji_flags, self.emoji_concept, self.emoji_concept_full, self.emoji_caption,
            self.emoji_subgroup, self.style, self.xling_image, self.xling_text, self.skin_edit, self.clip, self.motion,
            self.strip,
        )  # fmt: skip
        return {maker.__name__.replace("_", "-"): maker for maker in makers}


def _rows_by_twin(pool: list[Picture]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for row, picture in enumerate(pool):
        rows.setdefault(picture.twin, []).append(row)
    return rows


def _clusters(names: list[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
