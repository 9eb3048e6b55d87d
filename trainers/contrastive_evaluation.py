"""Evaluation during contrastive training: each query of a data set is to find its positive among all documents."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from sentence_transformers.base.evaluation import SequentialEvaluator
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from .contrastive_batches import content_hash
from .contrastive_data import PairDataset
from .contrastive_sources import DataError, dataset_settings


def retrieval_evaluator(dataset: PairDataset, batch_size: int = 32, truncate_dim: int | None = None) -> Any:
    """
    A retrieval task of a data set: all distinct positives and negatives are the documents.

    Right for a query are its positive, and those of rows with an equal query or an equal `key`.

    Args:
        dataset (`PairDataset`): The rows; all of them are read, pictures stay encoded.
        batch_size (`int`, *optional*, defaults to 32): Items per forward.
        truncate_dim (`int`, *optional*): Length of the vectors compared.

    Returns:
        `InformationRetrievalEvaluator`: of Sentence Transformers, with accuracy, recall, MRR, nDCG and MAP.
    """
    queries: dict[str, Any] = {}
    documents: dict[str, Any] = {}
    by_subject: dict[str, set[str]] = {}
    subjects: dict[str, set[str]] = {}
    for number in range(len(dataset)):
        row = dataset[number]
        query, positive = content_hash(row.query), content_hash(row.positive)
        queries.setdefault(query, row.query)
        documents.setdefault(positive, row.positive)
        for negative in row.negatives:
            documents.setdefault(content_hash(negative), negative)
        for subject in (f"query {query}", *([] if row.key is None else [f"key {row.key}"])):
            by_subject.setdefault(subject, set()).add(positive)
            subjects.setdefault(query, set()).add(subject)
    relevant = {query: set().union(*(by_subject[subject] for subject in subjects[query])) for query in queries}
    return InformationRetrievalEvaluator(
        queries,
        documents,
        relevant,
        show_progress_bar=False,
        batch_size=batch_size,
        name=dataset.name if truncate_dim is None else f"{dataset.name}_{truncate_dim}",
        truncate_dim=truncate_dim,
        query_prompt=dataset.settings.query_instruction,
        corpus_prompt=dataset.settings.document_instruction,
    )


def build_evaluator(recipe: Mapping[str, Any], batch_size: int, dims: list[int] | None = None) -> Any:
    """
    The evaluator of a recipe's `eval_datasets`; `None` without any.

    Args:
        recipe (`dict`): Settings by name.
        batch_size (`int`): Items per forward.
        dims (`list[int]`, *optional*): Lengths that are evaluated besides the whole vector.

    Returns:
        `SequentialEvaluator`: its `sequential_score` is the mean nDCG@10 of the whole vectors.
    """
    if not recipe:
        return None
    datasets = [
        PairDataset(name, number, dataset_settings(name, values), hard_negatives=1 << 30)
        for number, (name, values) in enumerate(recipe.items())
    ]
    for dataset in datasets:
        if len(dataset) < 2:
            raise DataError(f"data set '{dataset.name}' has {len(dataset)} rows: to find one of them says nothing")
    whole = [retrieval_evaluator(dataset, batch_size) for dataset in datasets]
    cut = [retrieval_evaluator(dataset, batch_size, dim) for dim in dims or () for dataset in datasets]
    count = len(whole)
    return SequentialEvaluator([*whole, *cut], lambda scores: float(np.mean(scores[:count])))
