"""Metrics of ranked candidates: hit, recall, reciprocal rank and nDCG with linear gain.

The leaderboards' definitions, with one departure: where candidates score the same, wrong ones stand before right ones
(as everywhere in this room). The official scripts leave ties to the order of the data, in which the right candidate
often comes first, so a model that maps everything to one vector would be always right. Without ties the numbers are
the official ones; how many queries have ties is reported beside them.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .evaluation_metrics import TIE_TOLERANCE, ScoreError
from .ranking_task import RankingRow, RankingTask


CUTOFFS = (1, 5, 10)
RANKING_METRICS = (
    *(f"hit@{k}" for k in CUTOFFS),
    *(f"recall@{k}" for k in CUTOFFS),
    *(f"ndcg_linear@{k}" for k in CUTOFFS),
    "mrr@10",
)
_QUERIES_AT_ONCE = 256


def ordered_gains(scores: np.ndarray, gains: np.ndarray) -> tuple[np.ndarray, bool]:
    """
    Ranks the candidates of one query.

    Args:
        scores (`np.ndarray`): float `[candidates]`, higher is closer.
        gains (`np.ndarray`): float64 `[candidates]`, relevance, 0 for wrong ones.

    Returns:
        `tuple[np.ndarray, bool]`: the relevance in ranked order, float64 `[candidates]`, and whether a right candidate
        shares its score with one of another relevance.

    Raises:
        ScoreError: a score is not a number.
    """
    if np.isnan(scores).any():
        raise ScoreError("a query has scores that are not numbers (NaN); the encoder or an item is broken")
    order = np.argsort(-scores, kind="stable")
    ranked, gained = scores[order], gains[order]
    tie = np.concatenate([[0], np.cumsum(ranked[:-1] - ranked[1:] > TIE_TOLERANCE)])
    pessimistic = gained[np.lexsort((gained, tie))]
    low, high = np.full(tie[-1] + 1, np.inf), np.zeros(tie[-1] + 1)
    np.minimum.at(low, tie, gained)
    np.maximum.at(high, tie, gained)
    return pessimistic, bool((high > low).any())


def row_values(ranked: np.ndarray, relevant: Sequence[float]) -> dict[str, float]:
    """
    The metrics of one query.

    Args:
        ranked (`np.ndarray`): float64 `[candidates]`, relevance in ranked order.
        relevant (`Sequence[float]`): the relevance of all right candidates.

    Returns:
        `dict[str, float]`: a value in 0..1 for each of `RANKING_METRICS`. `ndcg_linear@k` is
        sum_i rel_i / log2(i + 1) over the first k ranks, divided by that of the best order.
    """
    right = ranked > 0
    ideal = np.sort(np.asarray(relevant, dtype=np.float64))[::-1]
    discount = 1.0 / np.log2(np.arange(2, max(CUTOFFS) + 2))
    first = int(np.argmax(right)) + 1 if right.any() else 0
    values = {"mrr@10": 1.0 / first if 0 < first <= 10 else 0.0}
    for k in CUTOFFS:
        top, best = ranked[:k], ideal[:k]
        values[f"hit@{k}"] = float(right[:k].any())
        values[f"recall@{k}"] = float(right[:k].sum() / len(ideal))
        values[f"ndcg_linear@{k}"] = float(top @ discount[: len(top)]) / float(best @ discount[: len(best)])
    return values


def ranking_values(
    task: RankingTask, queries: np.ndarray, candidates: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """
    Ranks every query of a task.

    Args:
        task (`RankingTask`): the task.
        queries (`np.ndarray`): float32 `[queries, dim]`, of unit length.
        candidates (`np.ndarray`): float32 `[pool, dim]`, in the order of `task.pool`.

    Returns:
        `tuple[dict[str, np.ndarray], np.ndarray]`: per metric the value of each query, float64 `[queries]`; and which
        queries have ties, bool `[queries]`.

    Raises:
        ScoreError: a score is not a number.
    """
    place = {name: number for number, name in enumerate(task.pool)}
    values = {name: np.zeros(len(task.rows)) for name in RANKING_METRICS}
    tied = np.zeros(len(task.rows), dtype=bool)
    for number, scores, row in _scored_rows(task, queries, candidates, place):
        gains = _gains(row, place)
        try:
            ranked, tied[number] = ordered_gains(scores, gains)
        except ScoreError as error:
            raise ScoreError(f"{task.name}, query {number}: {error}") from error
        for name, value in row_values(ranked, list(row.relevant.values())).items():
            values[name][number] = value
    return values, tied


def _scored_rows(task: RankingTask, queries: np.ndarray, candidates: np.ndarray, place: Mapping[str, int]) -> Iterator:
    """Yields `(number, scores, row)`: scores of the pool, computed by blocks, or of the row's own candidates."""
    for start in range(0, len(task.rows), _QUERIES_AT_ONCE):
        rows = task.rows[start : start + _QUERIES_AT_ONCE]
        whole = None
        if any(row.candidates is None for row in rows):
            whole = queries[start : start + len(rows)] @ candidates.T
        for offset, row in enumerate(rows):
            if row.candidates is None:
                yield start + offset, whole[offset], row
            else:
                chosen = [place[name] for name in dict.fromkeys(row.candidates)]
                yield start + offset, candidates[chosen] @ queries[start + offset], row


def _gains(row: RankingRow, place: Mapping[str, int]) -> np.ndarray:
    """The relevance of each candidate that is ranked, float64 `[candidates]`, in the order of the scores."""
    if row.candidates is not None:
        return np.array([row.relevant.get(name, 0.0) for name in dict.fromkeys(row.candidates)], dtype=np.float64)
    gains = np.zeros(len(place))
    for name, value in row.relevant.items():
        gains[place[name]] = value
    return gains
