"""What may be trained on and what is held out, and the checks that keep the two apart.

The rule, recorded in every manifest:

1. Concepts are grouped in *families*: a skin variant goes with its base, and forms that differ only in gender or age
   of a person ("man mage", "woman mage", "mage") or in the way they face go together, as their pictures are near
   twins.
2. `md5(family) % 100` below `test_percent` is test, below `test_percent + validation_percent` validation, else train.
3. One artist (Twemoji) is held out altogether, whatever the concept.
4. An icon whose name, alias or tag holds a held-out label as whole words (plural or not) is dropped, and so is a
   WordNet pair with a held-out label among its lemmas.

Vectors of the text teacher may still know the words: "unseen concept" means that no picture of it was seen in
training.
"""

import hashlib
import re
from collections.abc import Iterable

import numpy as np

from .errors import MoEMBError


class LeakageError(MoEMBError, ValueError):
    """Something held out stands among the training items. The text names the first such item."""


EVALUATION_SOURCES = ("twemoji",)
_PERSON = {
    "man",
    "woman",
    "person",
    "men",
    "women",
    "people",
    "boy",
    "girl",
    "boys",
    "girls",
    "adult",
    "child",
    "mx",
    "mrs",
    "santa",
    "beard",
}
_TWINS = {
    "old": "older",
    "mermaid": "merperson",
    "merman": "merperson",
    "prince": "crown",
    "princess": "crown",
    "with": "",
    "in": "",
}


def concept_family(label: str) -> str:
    """Name of the family a concept belongs to.

    Args:
        label (`str`):
            English label of the *base* concept, such as `"woman mage"`.

    Returns:
        `str`: the label in lower case without the words that tell gender, age or the side faced; `"person"` when
        nothing is left.
    """
    words = re.findall(r"\w+", label.lower().replace("facing right", ""))
    words = [_TWINS.get(word, word) for word in words if word not in _PERSON and word != "and"]
    return " ".join(word for word in words if word) or "person"


def family_split(family: str, test_percent: int = 10, validation_percent: int = 5) -> str:
    """`"train"`, `"validation"` or `"test"` for a family, by its MD5.

    The same on every machine, whatever else is in the corpus.
    """
    bucket = int(hashlib.md5(family.encode()).hexdigest(), 16) % 100
    if bucket < test_percent:
        return "test"
    return "validation" if bucket < test_percent + validation_percent else "train"


def _words(text: str) -> list[str]:
    """Words of a text in lower case, plural `s` cut from longer words so that "books" meets "book"."""
    words = re.findall(r"[^\W_]+", text.lower())
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words]


class PhraseSet:
    """Phrases to look for as whole words in short texts.

    Args:
        phrases (`Iterable[str]`):
            The phrases, such as the labels of held-out concepts.
    """

    def __init__(self, phrases: Iterable[str]):
        self._phrases = {tuple(_words(phrase)) for phrase in phrases} - {()}
        self._longest = max(map(len, self._phrases), default=0)

    def __len__(self) -> int:
        return len(self._phrases)

    def found_in(self, text: str) -> str | None:
        """The first phrase that stands in `text` as whole words, or `None`."""
        words = _words(text)
        for start in range(len(words)):
            for stop in range(start + 1, min(len(words), start + self._longest) + 1):
                if tuple(words[start:stop]) in self._phrases:
                    return " ".join(words[start:stop])
        return None

    def equals(self, text: str) -> bool:
        """Whether `text` as a whole is one of the phrases."""
        return tuple(_words(text)) in self._phrases


def held_out_labels(concepts: dict[str, dict]) -> PhraseSet:
    """Labels of all base concepts outside the training split (flags too)."""
    return PhraseSet(c["en"] for c in concepts.values() if c["base"] is None and c["split"] != "train")


def near_duplicates(queries: np.ndarray, pool: np.ndarray, threshold: float = 0.97) -> np.ndarray:
    """Which pictures are nearly one of a pool.

    Args:
        queries (`np.ndarray` of shape `(n, h, w, 3)`, uint8):
            Pictures on white.
        pool (`np.ndarray` of shape `(m, h, w, 3)`, uint8):
            Pictures to compare with.
        threshold (`float`, *optional*, defaults to 0.97):
            Cosine of the ink (255 - pixel) above which two pictures count as one.

    Returns:
        `np.ndarray` of shape `(n,)`, bool.
    """
    unit = _unit_ink(queries)
    highest = np.zeros(len(unit), np.float32)
    for start in range(0, len(pool), 1024):
        highest = np.maximum(highest, (unit @ _unit_ink(pool[start : start + 1024]).T).max(axis=1))
    return highest > threshold


def _unit_ink(images: np.ndarray) -> np.ndarray:
    ink = 255 - images.reshape(len(images), -1).astype(np.float32)
    return ink / np.maximum(np.linalg.norm(ink, axis=1, keepdims=True), 1e-6)


def check_no_leakage(concepts: dict[str, dict], image_rows: list[dict], text_pairs: Iterable[dict]) -> dict[str, int]:
    """Raise if anything held out stands among the training items.

    Args:
        concepts (`dict[str, dict]`):
            The concepts, each with `en`, `base`, `family` and `split`.
        image_rows (`list[dict]`):
            Rows of `images.jsonl`.
        text_pairs (`Iterable[dict]`):
            Rows of `text_pairs.jsonl`.

    Returns:
        `dict[str, int]`: how many items of each kind were checked, for the manifest.

    Raises:
        LeakageError: naming the first item that leaks.
    """
    families: dict[str, str] = {}
    for name, concept in concepts.items():
        if families.setdefault(concept["family"], concept["split"]) != concept["split"]:
            raise LeakageError(f"leak: family {concept['family']!r} of concept {name} is in two splits")
        if concept["base"] is not None and concepts[concept["base"]]["split"] != concept["split"]:
            raise LeakageError(f"leak: skin variant {name} is in another split than its base {concept['base']}")
    phrases = held_out_labels(concepts)
    for row in image_rows:
        _check_image_row(row, concepts, phrases)
    checked_pairs = 0
    for pair in text_pairs:
        checked_pairs += 1
        # The lemmas are the whole document, or what stands before the colon of an article.
        lemmas = pair["document"].split(":")[0] if pair["source"] == "wordnet-article" else pair["document"]
        if any(phrases.equals(lemma) for lemma in lemmas.split(", ")):
            raise LeakageError(f"leak: text pair {pair['document']!r} holds the label of a held-out concept")
    return {"families": len(families), "images": len(image_rows), "text_pairs": checked_pairs}


def _check_image_row(row: dict, concepts: dict[str, dict], phrases: PhraseSet) -> None:
    if row["split"] != "train":
        return
    if row["source"] in EVALUATION_SOURCES:
        raise LeakageError(f"leak: {row['key']} is of a held-out artist")
    if row["concept"] is not None:
        if concepts[row["concept"]]["split"] != "train":
            raise LeakageError(f"leak: {row['key']} shows a {concepts[row['concept']]['split']} concept")
        return
    for text in (row["text"], *row["tags"]):
        phrase = phrases.found_in(text)
        if phrase is not None:
            raise LeakageError(
                f"leak: icon {row['key']} has the caption {text!r}, which holds the held-out label {phrase!r}"
            )
