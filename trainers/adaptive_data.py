"""What gates are trained on: batches of items and which of them belong together, as functions of the step.

The corpus of moemb-mini, data sets of queries and positives, or a planted task give the same thing, a flattened batch
of items and pairs among them, so that one trainer serves all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .calibration_data import CORPUS_SOURCES
from .data import BatchEncoder, PictureShape
from .errors import MoEMBError, nearest
from .losses import contrastive_loss


class AdaptiveDataError(MoEMBError, ValueError):
    """Data that gates cannot be trained on; the text names the setting and the remedy."""


@dataclass
class Pairs:
    """
    Which items of a batch are contrasted.

    Args:
        queries, documents (`torch.LongTensor`): rows of the batch; a row in both is not its own document.
        right (`torch.BoolTensor` of shape `[queries, documents]`): the documents that are right for a query.
        symmetric (`bool`): whether documents also ask for queries.
        weight (`float`): of this loss.
    """

    queries: Tensor
    documents: Tensor
    right: Tensor
    symmetric: bool = True
    weight: float = 1.0

    def loss(self, vectors: Tensor, scale: float) -> Tensor:
        """InfoNCE of unit vectors `[items, d]`."""
        same = self.queries[:, None] == self.documents[None]
        queries, documents = vectors[self.queries], vectors[self.documents]
        ignore = same if bool(same.any()) else None
        loss = contrastive_loss(queries, documents, self.right, scale, ignore)
        if self.symmetric:
            loss = (loss + contrastive_loss(documents, queries, self.right.T, scale)) / 2
        return self.weight * loss

    def recall(self, vectors: Tensor) -> Tensor:
        """Whether the best document of each query with a right one is right, `torch.BoolTensor` `[queries]`."""
        same = self.queries[:, None] == self.documents[None]
        scores = (vectors[self.queries] @ vectors[self.documents].T).masked_fill(same, -2.0)
        asking = (self.right & ~same).any(1)
        return self.right.gather(1, scores.argmax(1)[:, None])[asking, 0]


@dataclass
class AdaptiveBatch:
    """
    One step.

    Args:
        inputs (`dict[str, torch.Tensor]`): of the model, flattened: `input_ids` `[1, tokens]`, `cu_seq_lens_q`, media.
        pairs (`list[Pairs]`): what is contrasted.
    """

    inputs: dict[str, Tensor]
    pairs: list[Pairs]

    def to(self, device: torch.device) -> "AdaptiveBatch":
        """The same batch on a device."""
        pairs = [
            Pairs(*(tensor.to(device) for tensor in (p.queries, p.documents, p.right)), p.symmetric, p.weight)
            for p in self.pairs
        ]
        return AdaptiveBatch({name: tensor.to(device) for name, tensor in self.inputs.items()}, pairs)


class AdaptiveData(Protocol):
    """Where batches come from."""

    def batch(self, step: int) -> AdaptiveBatch:
        """The batch of a step; depends on the step and the settings only."""
        ...

    def validate(self, model: Any) -> dict[str, float]:
        """Scores on validation items with the model's own compute budget; `score` chooses the best weights."""
        ...


class CorpusData:
    """
    The corpus of moemb-mini.

    Args:
        corpus (`Corpus`): the corpus on disk.
        tokenizer (`PreTrainedTokenizerFast`): moemb-mini's.
        config (`MoEMBConfig`): the model's.
        sources (`Mapping[str, Mapping]`): `rate` and `chunk` of each source.
        seed (`int`): of all draws.

    Raises:
        AdaptiveDataError: for an unknown source or setting.
    """

    def __init__(self, corpus: Any, tokenizer: Any, config: Any, sources: Mapping[str, Mapping], seed: int = 0):
        from .mini_contrastive_trainer import build_mixture
        from .mini_contrastive_validation import ValidationSet

        vision = config.vision_config
        shape = PictureShape(vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        self.encoder = BatchEncoder(tokenizer, shape)
        self.mixture = build_mixture(mixture_settings(sources, seed), corpus, {}, {})
        self.validation = ValidationSet(corpus, BatchEncoder(tokenizer, shape), seed=seed)

    def batch(self, step: int) -> AdaptiveBatch:
        groups, pairs, start = self.mixture.groups(step), [], 0
        for group in groups:
            numbers: dict = {}
            keys = torch.tensor([numbers.setdefault(key, len(numbers)) for key in group.keys])
            for contrast in group.contrasts:
                queries, documents = torch.tensor(contrast.queries), torch.tensor(contrast.documents)
                right = keys[queries][:, None] == keys[documents][None]
                rows = (start + queries, start + documents)
                pairs.append(Pairs(*rows, right, contrast.symmetric, contrast.weight))
            start += len(group.samples)
        return AdaptiveBatch(self.encoder([sample for group in groups for sample in group.samples]), pairs)

    def validate(self, model: Any) -> dict[str, float]:
        return self.validation.evaluate(model)


def mixture_settings(sources: Mapping[str, Mapping], seed: int) -> SimpleNamespace:
    """What `build_mixture` asks for, of sources with `rate` and `chunk`; the others are off."""
    settings = {"seed": seed}
    for name in CORPUS_SOURCES:
        settings |= {f"{name}_rate": 0.0, f"{name}_chunk": 16}
    for name, given in sources.items():
        if name not in CORPUS_SOURCES:
            raise AdaptiveDataError(
                f"corpus_sources has '{name}'{nearest(name, CORPUS_SOURCES)}; use {CORPUS_SOURCES}"
            )
        given = {"rate": 1.0, "chunk": 16, **(given or {})}
        if set(given) != {"rate", "chunk"} or given["chunk"] < 1:
            raise AdaptiveDataError(f"corpus_sources['{name}'] is {given}: it holds rate, and chunk of at least 1")
        settings |= {f"{name}_rate": float(given["rate"]), f"{name}_chunk": int(given["chunk"])}
    return SimpleNamespace(**settings)


class PairData:
    """
    Data sets of queries and positives, as `method: contrastive` reads them.

    Args:
        processor (`MoEMBProcessor`): the model's.
        train, evaluation (`Mapping[str, Mapping]`): settings of each data set by name, see [`DatasetSettings`].
        pairs (`int`): pairs of a step.
        seed (`int`): of all draws.
        batch_size (`int`, *optional*, defaults to 32): items in one forward of the evaluation.
    """

    def __init__(
        self,
        processor: Any,
        train: Mapping[str, Mapping],
        evaluation: Mapping[str, Mapping],
        pairs: int,
        seed: int = 0,
        batch_size: int = 32,
    ):
        from .contrastive_batches import RowEncoder
        from .contrastive_data import PairDataset, dataset_settings

        def load(entries: Mapping[str, Mapping]) -> list[PairDataset]:
            return [PairDataset(n, place, dataset_settings(n, e)) for place, (n, e) in enumerate(entries.items())]

        self.train, self.evaluation = load(train), load(evaluation)
        self.encoder, self.eval_encoder = RowEncoder(processor, self.train), RowEncoder(processor, self.evaluation)
        weights = [float(len(one) if one.settings.weight is None else one.settings.weight) for one in self.train]
        self.shares = np.array(weights) / sum(weights)
        self.pairs, self.seed, self.batch_size = pairs, seed, batch_size

    def batch(self, step: int) -> AdaptiveBatch:
        rng = np.random.default_rng([self.seed, step])
        source = self.train[rng.choice(len(self.train), p=self.shares)]
        chosen = rng.choice(len(source), self.pairs, replace=len(source) < self.pairs)
        return self._encoded(self.encoder, [source[int(number)] for number in chosen])

    @staticmethod
    def _encoded(encoder: Any, rows: list[Any]) -> AdaptiveBatch:
        from .contrastive_batches import model_inputs

        batch = encoder(rows)["batch"]
        inputs = model_inputs(batch.items, encoder.normalisations, torch.device("cpu"))
        documents, place = batch.positive.unique(return_inverse=True)
        right = F.one_hot(place, len(documents)).bool()
        # rows of one key, and of equal queries, are right for each other
        same = (batch.group[:, None] == batch.group[None]) & (batch.group != 0)
        same = same | (batch.query[:, None] == batch.query[None])
        right = (same.float() @ right.float()) > 0
        return AdaptiveBatch(inputs, [Pairs(batch.query, documents, right)])

    def validate(self, model: Any) -> dict[str, float]:
        """Recall at 1 of each evaluation set among its own documents, and their mean as `score`."""
        from .contrastive_batches import model_inputs

        device, metrics = next(model.parameters()).device, {}
        for dataset in self.evaluation:
            batch = self.eval_encoder([dataset[number] for number in range(len(dataset))])["batch"]
            vectors = []
            for start in range(0, len(batch.items), self.batch_size):
                items = batch.items[start : start + self.batch_size]
                inputs = model_inputs(items, self.eval_encoder.normalisations, device)
                vectors.append(model(**inputs, pooled_only=True).pooler_output.float())
            vectors = F.normalize(torch.cat(vectors), dim=-1).cpu()
            documents, place = batch.positive.unique(return_inverse=True)
            pairs = Pairs(batch.query, documents, F.one_hot(place, len(documents)).bool())
            metrics[f"{dataset.name}_r1"] = pairs.recall(vectors).float().mean().item()
        metrics["score"] = float(np.mean(list(metrics.values()))) if metrics else 0.0
        return metrics
