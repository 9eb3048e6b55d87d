"""Validation of an embedder during training: small retrieval tasks on the validation families alone.

No test item, no picture of the held-out artist and no real animation is read here, so that checkpoints and settings
are chosen without a look at what is reported.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .corpus_render import MOTIONS, motion_clip
from .data import BatchEncoder, Sample


FOREIGN = ("ja", "zh", "fr", "de", "es")


@dataclass
class RetrievalTask:
    """Queries, documents, and which documents are right for each query.

    Args:
        name (`str`): Prefix of its metrics.
        queries (`list[Sample]`): The queries.
        documents (`list[Sample]`): The pool.
        right (`np.ndarray`): bool `[queries, documents]`.
    """

    name: str
    queries: list[Sample]
    documents: list[Sample]
    right: np.ndarray


class ValidationSet:
    """The validation tasks of a corpus.

    Args:
        corpus (`Corpus`): The corpus on disk.
        encoder ([`BatchEncoder`]): Encodes the items.
        seed (`int`, *optional*, defaults to 0): Seed of the samples drawn.
        batch_size (`int`, *optional*, defaults to 256): Items per forward.
        items (`int`, *optional*, defaults to 200): Most queries of the text and heading tasks.
        distractors (`int`, *optional*, defaults to 400): Training pictures in the pool of the style task.
    """

    def __init__(
        self,
        corpus,
        encoder: BatchEncoder,
        seed: int = 0,
        batch_size: int = 256,
        items: int = 200,
        distractors: int = 400,
    ):
        self.corpus, self.encoder = corpus, encoder
        self.batch_size, self.items, self.distractors = batch_size, items, distractors
        self.rng = np.random.default_rng([seed, 0xC0FFEE])
        self._tasks: list[RetrievalTask] | None = None

    @property
    def tasks(self) -> list[RetrievalTask]:
        if self._tasks is None:
            built = (self._images(), self._foreign(), self._styles(), self._translations(), self._glosses(),
                     self._strips(), self._motions(), self._edits())  # fmt: skip
            self._tasks = [task for task in built if task.queries]
        return self._tasks

    def evaluate(self, model) -> dict[str, float]:
        """Recall at 1 and 10 and the mean reciprocal rank of each task, and `score`, the mean of the latter.

        A tie between a right and a wrong document counts against the model.
        """
        metrics, reciprocal = {}, []
        for task in self.tasks:
            similarity = self._embed(model, task.queries) @ self._embed(model, task.documents).T
            right = torch.from_numpy(task.right)
            best = similarity.masked_fill(~right, -2.0).max(dim=1).values
            rank = ((similarity >= best[:, None]) & ~right).sum(dim=1)
            metrics[f"{task.name}_r1"] = (rank < 1).float().mean().item()
            metrics[f"{task.name}_r10"] = (rank < 10).float().mean().item()
            reciprocal.append((1.0 / (rank + 1.0)).mean().item())
            metrics[f"{task.name}_mrr"] = reciprocal[-1]
        metrics["score"] = float(np.mean(reciprocal))
        return metrics

    def _embed(self, model, samples: list[Sample]) -> torch.Tensor:
        vectors = [
            model(**self.encoder(samples[i : i + self.batch_size]), pooled_only=True).pooler_output.float()
            for i in range(0, len(samples), self.batch_size)
        ]
        return F.normalize(torch.cat(vectors), dim=-1)

    # The tasks

    def _picture_rows(self, source: str, split: str) -> list[int]:
        """Base emoji pictures of a source, without skin variants and flags."""
        concepts = self.corpus.concepts
        return [
            index
            for index, row in enumerate(self.corpus.image_rows)
            if row["source"] == source
            and row["split"] == split
            and row.get("concept")
            and not concepts[row["concept"]].get("base")
            and concepts[row["concept"]].get("group") != "flags"
        ]

    def _styles_of_corpus(self) -> list[str]:
        return sorted({r["source"] for r in self.corpus.image_rows if r.get("concept") and r["split"] == "train"})

    def _caption_task(self, name: str, languages: tuple[str, ...] | None) -> RetrievalTask:
        """Labels of validation concepts -> their picture in the first style, among the validation concepts."""
        rows = self._picture_rows(self._styles_of_corpus()[0], "validation")
        queries, right = [], []
        for position, row in enumerate(rows):
            concept = self.corpus.concepts[self.corpus.image_rows[row]["concept"]]
            labels = concept.get("labels") or {}
            texts = [concept["en"]] if languages is None else [labels[lang] for lang in languages if lang in labels]
            for text in texts:
                queries.append(Sample((text,)))
                right.append([other == position for other in range(len(rows))])
        documents = [Sample((self.corpus.images[row],)) for row in rows]
        return RetrievalTask(name, queries, documents, np.array(right, dtype=bool))

    def _images(self) -> RetrievalTask:
        return self._caption_task("image", None)

    def _foreign(self) -> RetrievalTask:
        return self._caption_task("foreign", FOREIGN)

    def _styles(self) -> RetrievalTask:
        """Validation picture -> the same thing in another style, among validation and some training pictures."""
        styles = self._styles_of_corpus()
        if len(styles) < 2:
            return RetrievalTask("style", [], [], np.zeros((0, 0), dtype=bool))
        pool_style, query_style = styles[0], styles[1]
        others = self._picture_rows(pool_style, "train")
        others = [others[i] for i in self.rng.permutation(len(others))[: self.distractors]]
        pool = self._picture_rows(pool_style, "validation") + others
        concept = [self.corpus.image_rows[row]["concept"] for row in pool]
        asked = [
            row
            for row in self._picture_rows(query_style, "validation")
            if self.corpus.image_rows[row]["concept"] in set(concept)
        ]
        right = [[c == self.corpus.image_rows[row]["concept"] for c in concept] for row in asked]
        queries = [Sample((self.corpus.images[row],)) for row in asked]
        documents = [Sample((self.corpus.images[row],)) for row in pool]
        return RetrievalTask("style", queries, documents, np.array(right, dtype=bool))

    def _translations(self) -> RetrievalTask:
        """Japanese, Chinese, Hindi and Russian labels of validation concepts -> English labels of all concepts.

        Scripts of their own, so shared spelling does not help.
        """
        concepts = [c for c in self.corpus.concepts.values() if not c.get("base") and c["split"] != "test"]
        english = sorted({concept["en"] for concept in concepts})
        position = {text: i for i, text in enumerate(english)}
        queries, right = [], []
        for concept in concepts:
            for language in ("ja", "zh", "hi", "ru"):
                label = (concept.get("labels") or {}).get(language)
                if concept["split"] == "validation" and label:
                    queries.append(Sample((label,)))
                    right.append(np.arange(len(english)) == position[concept["en"]])
        return RetrievalTask("translation", queries, [Sample((t,)) for t in english], np.array(right, dtype=bool))

    def _glosses(self) -> RetrievalTask:
        pairs = [pair for pair in self.corpus.text_pairs if pair["split"] == "validation"]
        pairs = [pairs[i] for i in self.rng.permutation(len(pairs))[: self.items]]
        documents = sorted({pair["document"] for pair in pairs})
        right = [[text == pair["document"] for text in documents] for pair in pairs]
        queries = [Sample((pair["query"],)) for pair in pairs]
        return RetrievalTask("gloss", queries, [Sample((t,)) for t in documents], np.array(right, dtype=bool))

    def _strips(self) -> RetrievalTask:
        """English lemmas of validation text pairs, set in type."""
        texts = sorted({p["document"].split(",")[0].split(":")[0] for p in self.corpus.text_pairs
                        if p["split"] == "validation"})  # fmt: skip
        trained = {text.lower() for text in self.corpus.strip_texts}
        texts = [text for text in texts if 3 <= len(text) <= 30 and text.lower() not in trained]
        texts = [texts[i] for i in self.rng.permutation(len(texts))[: self.items]]
        strips = [Sample((self.corpus.render_strip(text, None),)) for text in texts]
        return RetrievalTask("strip", [Sample((t,)) for t in texts], strips, np.eye(len(texts), dtype=bool))

    def _motions(self) -> RetrievalTask:
        rows = self._picture_rows(self._styles_of_corpus()[0], "validation")
        rows = [rows[i] for i in self.rng.permutation(len(rows))[:8]]
        queries, documents = [], []
        for row in rows:
            label = self.corpus.concepts[self.corpus.image_rows[row]["concept"]]["en"]
            for kind in MOTIONS:
                queries.append(Sample((f"{label} {kind}",)))
                documents.append(Sample((motion_clip(np.asarray(self.corpus.images[row]), kind),)))
        return RetrievalTask("motion", queries, documents, np.eye(len(queries), dtype=bool))

    def _edits(self) -> RetrievalTask:
        triples = self.corpus.skin_triples(self._styles_of_corpus()[0], "validation")
        triples = [triples[i] for i in self.rng.permutation(len(triples))[: self.items]]
        targets = sorted({target for _, _, target in triples} | {base for base, _, _ in triples})
        queries = [Sample((self.corpus.images[base], text)) for base, text, _ in triples]
        right = [[target == row for row in targets] for _, _, target in triples]
        documents = [Sample((self.corpus.images[row],)) for row in targets]
        return RetrievalTask("edit", queries, documents, np.array(right, dtype=bool))
