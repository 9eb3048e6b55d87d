"""Pairs of items for GRPO: from moemb-mini's corpus, or from data sets as contrastive training takes them.

The in-batch candidates decide whether retrieval succeeds, so a generation batch holds pairs of one source: a picture
is told from pictures, not from headings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from .calibration_data import CORPUS_SOURCES, item_of_parts
from .errors import MoEMBError, nearest
from .evaluation_encoding import encoder_input


_CHUNK = 16


class GRPODataError(MoEMBError, ValueError):
    """Data that rollouts cannot be made of. The message names the setting and the remedy."""


class RowReader:
    """
    Turns numbers into rows; a transform of [`~datasets.Dataset`].

    Args:
        sources (`Sequence[Sequence[Mapping]]`): rows of each source, read when they are asked for.
        table (`np.ndarray` of shape `(rows, 2)`): source and number of each row.
    """

    def __init__(self, sources: Sequence[Sequence[Mapping]], table: np.ndarray):
        self.sources, self.table = sources, table

    def __call__(self, columns: dict[str, list]) -> dict[str, list]:
        rows = [self.sources[source][int(number)] for source, number in self.table[columns["row"]]]
        return {name: [row[name] for row in rows] for name in rows[0]}


def as_dataset(sources: Sequence[Sequence[Mapping]], weights: Sequence[float], batch: int, seed: int) -> Dataset:
    """A data set of rows from several sources, in batches of one source each.

    Args:
        sources (`Sequence[Sequence[Mapping]]`): rows of each source.
        weights (`Sequence[float]`): share of the batches of each.
        batch (`int`): rows that stand together.
        seed (`int`): of the order.

    Raises:
        GRPODataError: a source has fewer rows than a batch.
    """
    rng, tables = np.random.default_rng(seed), []
    shares = np.array(weights, dtype=float) / sum(weights)
    batches = max(1, sum(len(source) for source in sources) // batch)
    for number, source in enumerate(sources):
        if len(source) < batch:
            raise GRPODataError(
                f"source {number} has {len(source)} pairs, but a generation batch holds {batch} of one source: add "
                "pairs, or lower per_device_train_batch_size or steps_per_generation"
            )
        wanted = max(1, round(batches * shares[number])) * batch
        order = np.concatenate([rng.permutation(len(source)) for _ in range(-(-wanted // len(source)))])[:wanted]
        tables.append(np.stack([np.full(wanted, number), order], axis=1).reshape(-1, batch, 2))
    table = rng.permutation(np.concatenate(tables)).reshape(-1, 2)
    return Dataset.from_dict({"row": np.arange(len(table))}).with_transform(RowReader(sources, table))


def corpus_sources(corpus: Any, wanted: Mapping[str, int], seed: int) -> list[list[dict[str, Any]]]:
    """
    Training pairs of moemb-mini's corpus.

    Args:
        corpus (`Corpus`): the corpus on disk.
        wanted (`Mapping[str, int]`): pairs of each source, see `CORPUS_SOURCES`.
        seed (`int`): of what is drawn.

    Raises:
        GRPODataError: for an unknown source, or no pairs.
    """
    return [_corpus_pairs(corpus, name, count, seed + place) for place, (name, count) in enumerate(wanted.items())]


def _corpus_pairs(corpus: Any, name: str, count: int, seed: int) -> list[dict[str, Any]]:
    from .adaptive_data import mixture_settings
    from .mini_contrastive_trainer import build_mixture

    if name not in CORPUS_SOURCES:
        raise GRPODataError(f"corpus_pairs has '{name}'{nearest(name, CORPUS_SOURCES)}; use {list(CORPUS_SOURCES)}")
    if count < 1:
        raise GRPODataError(f"corpus_pairs['{name}'] is {count}: the least is 1 pair")
    mixture = build_mixture(mixture_settings({name: {"chunk": _CHUNK}}, seed), corpus, {}, {})
    rng, pairs, step = np.random.default_rng(seed), [], 0
    while len(pairs) < count:
        for group in mixture.groups(step):
            pairs += [_pair(group, query, document, name) for query, document in _right_pairs(group, rng)]
        step += 1
    return pairs[:count]


def _right_pairs(group: Any, rng: np.random.Generator) -> list[tuple[int, int]]:
    """One right document for each query of a sub-batch; each document once."""
    pairs, taken, first = [], set(), group.contrasts[0]  # later ones contrast a side with itself
    for query in first.queries:
        right = [
            row
            for row in first.documents
            if row not in taken and row != query and group.keys[row] == group.keys[query]
        ]
        if right and query not in taken:
            document = int(rng.choice(right))
            taken |= {query, document}
            pairs.append((query, document))
    return pairs


def _pair(group: Any, query: int, document: int, name: str) -> dict[str, Any]:
    sides = {"prompt": group.samples[query], "positive": group.samples[document]}
    row = {side: encoder_input(item_of_parts(sample.parts)) for side, sample in sides.items()}
    return {**row, **{f"{side}_instruction": sample.instruction for side, sample in sides.items()}, "source": name}


class PairRows:
    """
    Rows of a [`PairDataset`] as GRPO takes them.

    Args:
        dataset (`PairDataset`): the data set.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row, settings = self.dataset[number], self.dataset.settings
        return {
            "prompt": row.query,
            "positive": row.positive,
            "prompt_instruction": settings.query_instruction,
            "positive_instruction": settings.document_instruction,
            "source": self.dataset.name,
        }


def dataset_sources(entries: Mapping[str, Mapping]) -> tuple[list[PairRows], list[float]]:
    """Data sets by name, see [`DatasetSettings`], and their weights."""
    from .contrastive_data import PairDataset, dataset_settings

    found = [
        PairDataset(name, place, dataset_settings(name, entry)) for place, (name, entry) in enumerate(entries.items())
    ]
    weights = [float(len(one) if one.settings.weight is None else one.settings.weight) for one in found]
    return [PairRows(one) for one in found], weights
