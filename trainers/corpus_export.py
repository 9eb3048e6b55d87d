"""The corpus as data sets of `datasets`: parquet files with pictures in them, for contrastive training.

Each set is a folder with `train.parquet` and `validation.parquet`. Test items and the held-out artist are left out.

| set | query | positive | negatives |
| --- | --- | --- | --- |
| captions | English label of an emoji | its picture, in one style | |
| foreign | label in another language | the English label | |
| icons | name of an icon | its picture | |
| styles | picture in one style | the same thing in another | |
| glosses | dictionary gloss | the word and its synonyms | |
| headings | a text | the text, set in type | |
| edits | picture of a person and a skin tone | the person with it | the same in other tones |
| motions | a thing and how it moves | the clip | the same thing, moving otherwise |

A column `key`, where there is one, says what a row is about: other rows of the same are no negatives.
"""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from .corpus_render import MOTIONS, motion_clip


SPLITS = ("train", "validation")
LANGUAGES = ("ja", "zh", "fr", "de", "es", "ru", "hi")
MOVING = 400  # pictures that are moved, of each split at most
_TEXT_PAIRS = 20_000
_HEADINGS = 20_000


def encoded(pixels: np.ndarray) -> dict[str, Any]:
    """A picture, uint8 `[H, W, 3]`, as `datasets` keeps it: lossless, the size of WebP."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(buffer, "WEBP", lossless=True, quality=0, method=0)
    return {"bytes": buffer.getvalue(), "path": None}


class CorpusExport:
    """
    The rows of each set.

    Args:
        corpus (`Corpus`): The corpus.
        split (`str`): `"train"` or `"validation"`.
    """

    def __init__(self, corpus: Any, split: str):
        self.corpus, self.split = corpus, split
        self.rows = [
            (number, row) for number, row in enumerate(corpus.image_rows)
            if row["split"] == split and row["source"] != "twemoji"
        ]  # fmt: skip
        self.emoji = [(number, row) for number, row in self.rows if row.get("concept")]
        self.styles = sorted({row["source"] for _, row in self.emoji})

    def sets(self) -> dict[str, Iterator[dict[str, Any]]]:
        """Name -> rows."""
        return {
            "captions": self.captions(),
            "foreign": self.foreign(),
            "icons": self.icons(),
            "styles": self.pairs_of_styles(),
            "glosses": self.glosses(),
            "headings": self.headings(),
            "edits": self.edits(),
            "motions": self.motions(),
        }

    def picture(self, number: int) -> dict[str, Any]:
        return encoded(self.corpus.images[number])

    def captions(self) -> Iterator[dict[str, Any]]:
        for number, row in self.emoji:
            label = self.corpus.concepts[row["concept"]]["en"]
            yield {"query": label, "positive": self.picture(number), "key": row["concept"]}

    def foreign(self) -> Iterator[dict[str, Any]]:
        for key, concept in self.corpus.concepts.items():
            if concept["split"] == self.split and not concept.get("base"):
                for language in LANGUAGES:
                    if label := (concept.get("labels") or {}).get(language):
                        yield {"query": label, "positive": concept["en"], "key": key}

    def icons(self) -> Iterator[dict[str, Any]]:
        for number, row in self.rows:
            if not row.get("concept"):
                yield {"query": row["text"], "positive": self.picture(number), "key": row["text"]}

    def pairs_of_styles(self) -> Iterator[dict[str, Any]]:
        first = {row["concept"]: number for number, row in self.emoji if row["source"] == self.styles[0]}
        for number, row in self.emoji:
            if row["source"] != self.styles[0] and row["concept"] in first:
                concept = row["concept"]
                yield {"query": self.picture(number), "positive": self.picture(first[concept]), "key": concept}

    def glosses(self) -> Iterator[dict[str, Any]]:
        pairs = [p for p in self.corpus.text_pairs if p["split"] == self.split and p["source"] == "wordnet"]
        for pair in _sample(pairs, _TEXT_PAIRS):
            yield {"query": pair["query"], "positive": pair["document"]}

    def headings(self) -> Iterator[dict[str, Any]]:
        texts = self.corpus.strip_texts if self.split == "train" else self._unseen_words()
        rng = np.random.default_rng(0)
        for text in _sample(texts, _HEADINGS):
            yield {"query": text, "positive": encoded(self.corpus.render_strip(text, rng))}

    def _unseen_words(self) -> list[str]:
        """Words of validation pairs that no training heading shows."""
        trained = {text.lower() for text in self.corpus.strip_texts}
        pairs = (pair for pair in self.corpus.text_pairs if pair["split"] == self.split)
        words = {pair["document"].split(",")[0].split(":")[0] for pair in pairs}
        return sorted(word for word in words if 3 <= len(word) <= 30 and word.lower() not in trained)

    def edits(self) -> Iterator[dict[str, Any]]:
        for source in self.styles:
            triples = self.corpus.skin_triples(source, self.split)
            tones: dict[int, list[int]] = {}
            for base, _, target in triples:
                tones.setdefault(base, []).append(target)
            for base, tone, target in triples:
                others = [other for other in tones[base] if other != target]
                yield {
                    "picture": self.picture(base),
                    "text": tone,
                    "positive": self.picture(target),
                    "negatives": [self.picture(other) for other in [base, *others]],
                }

    def motions(self) -> Iterator[dict[str, Any]]:
        numbers = [(n, row) for n, row in self.emoji if row["source"] == self.styles[0]]
        for place, (number, row) in enumerate(_sample(numbers, MOVING)):
            label = self.corpus.concepts[row["concept"]]["en"]
            pixels = np.asarray(self.corpus.images[number])
            clips = [[encoded(frame) for frame in motion_clip(pixels, kind)] for kind in MOTIONS]
            right = place % len(MOTIONS)
            wrong = (right + 1) % len(MOTIONS)
            yield {
                "query": f"{label} {MOTIONS[right]}",
                "positive": clips[right],
                "negatives": [clips[wrong]],
            }


def _sample(things: list, most: int) -> list:
    """The same `most` of the things at every call, in random order."""
    order = np.random.default_rng(len(things)).permutation(len(things))[:most]
    return [things[place] for place in order]


def export_corpus(corpus: Any, folder: Path, progress: bool = True) -> dict[str, dict[str, int]]:
    """
    Writes the data sets, all or nothing.

    Args:
        corpus (`Corpus`): The corpus.
        folder (`Path`): Where to; a folder of an earlier export is replaced.
        progress (`bool`, *optional*, defaults to `True`): Whether to show progress bars.

    Returns:
        `dict[str, dict[str, int]]`: rows of each set and split.
    """
    folder = Path(folder).expanduser()
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        for name, rows in CorpusExport(corpus, split).sets().items():
            kept = list(tqdm(rows, desc=f"{name} ({split})", disable=not progress))
            if kept:
                (draft / name).mkdir(parents=True, exist_ok=True)
                _dataset(kept).to_parquet(str(draft / name / f"{split}.parquet"))
                counts.setdefault(name, {})[split] = len(kept)
    shutil.copy(corpus.folder / "ATTRIBUTION.md", draft / "ATTRIBUTION.md")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return counts


def _dataset(rows: list[dict[str, Any]]) -> Any:
    """A `datasets.Dataset` whose pictures are marked as such."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    def feature(value: Any) -> Any:
        if isinstance(value, list):
            return List(feature(value[0]))
        return ImageFeature() if isinstance(value, dict) else Value("string")

    features = Features({column: feature(value) for column, value in rows[0].items()})
    return Dataset.from_dict({column: [row[column] for row in rows] for column in rows[0]}, features=features)
