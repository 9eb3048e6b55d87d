"""Retrieval metrics that cannot flatter: ties count against the query, chance is exact, intervals are seeded.

A rank computed as "number of scores strictly above the right one" turns a system that scores everything alike, such as
TF-IDF on a query without a known word, into one that is always right. Here a wrong document that scores the same as
the right one stands before it, and scores closer than `TIE_TOLERANCE` are the same score (two equal vectors may
differ in the last bit after a matrix product).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import MoEMBError


TIE_TOLERANCE = 1e-6
CUTOFFS = (1, 10)
METRICS = (*(f"R@{cutoff}" for cutoff in CUTOFFS), "MRR")
_ROWS_AT_ONCE = 256


class ScoreError(MoEMBError, ValueError):
    """A system gave scores that cannot be ranked. The message names the query."""


@dataclass(frozen=True)
class Ranks:
    """Where the best relevant document of each query stands.

    Args:
        rank (`np.ndarray`):
            Float64 `[queries]`, 1 is best, every tied wrong document before the right one.
        mean_tie_rank (`np.ndarray`):
            Float64 `[queries]`, the expected rank when ties are broken by a fair coin.
        pool (`np.ndarray`):
            Int64 `[queries]`, documents that were ranked (excluded ones are not).
        relevant (`np.ndarray`):
            Int64 `[queries]`, relevant documents among them.
    """

    rank: np.ndarray
    mean_tie_rank: np.ndarray
    pool: np.ndarray
    relevant: np.ndarray

    def select(self, rows: Sequence[int]) -> "Ranks":
        """Returns the ranks of some queries, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        return Ranks(self.rank[index], self.mean_tie_rank[index], self.pool[index], self.relevant[index])


def rank_queries(
    scores: Callable[[int, int], np.ndarray],
    relevant: Sequence[Sequence[int]],
    exclude: Sequence[Sequence[int]] | None = None,
) -> Ranks:
    """
    Ranks the relevant documents of every query.

    Args:
        scores (`Callable[[int, int], np.ndarray]`):
            Called as `scores(start, stop)`, returns float `[stop - start, documents]`; higher is closer.
        relevant (`Sequence[Sequence[int]]`):
            Per query the indexes of its right documents, at least one.
        exclude (`Sequence[Sequence[int]]`, *optional*):
            Per query the indexes of documents left out of its ranking, such as the query's own image.

    Returns:
        `Ranks`: one entry per query.

    Raises:
        ScoreError: a score is not a number, or a query has no right document left.
    """
    count = len(relevant)
    columns = {name: np.zeros(count, dtype=np.float64) for name in ("rank", "tied", "pool", "relevant")}
    for start in range(0, count, _ROWS_AT_ONCE):
        stop = min(count, start + _ROWS_AT_ONCE)
        block = np.asarray(scores(start, stop), dtype=np.float64)
        for offset, row in enumerate(block):
            query = start + offset
            left_out = exclude[query] if exclude is not None else ()
            ahead, tied, pool, right = _rank_row(row, relevant[query], left_out, query)
            columns["rank"][query] = 1 + ahead + tied
            columns["tied"][query] = tied
            columns["pool"][query], columns["relevant"][query] = pool, right
    return Ranks(
        rank=columns["rank"],
        mean_tie_rank=columns["rank"] - columns["tied"] / 2,
        pool=columns["pool"].astype(np.int64),
        relevant=columns["relevant"].astype(np.int64),
    )


def _rank_row(
    row: np.ndarray, relevant: Sequence[int], left_out: Sequence[int], query: int
) -> tuple[int, int, int, int]:
    """Returns how many wrong documents score higher, how many score the same, the pool and the right ones in it."""
    if np.isnan(row).any():
        raise ScoreError(f"Query {query} has scores that are not numbers (NaN); the encoder or the item is broken.")
    kept = np.ones(len(row), dtype=bool)
    kept[list(left_out)] = False
    right = np.zeros(len(row), dtype=bool)
    right[list(relevant)] = True
    right &= kept
    if not right.any():
        raise ScoreError(f"Query {query} has no right document in its pool; the task file is broken.")
    best = row[right].max()
    wrong = row[kept & ~right]
    ahead = int((wrong > best + TIE_TOLERANCE).sum())
    return ahead, int((wrong >= best - TIE_TOLERANCE).sum()) - ahead, int(kept.sum()), int(right.sum())


def query_values(ranks: Ranks) -> dict[str, np.ndarray]:
    """Returns the per-query value of each metric, float64 `[queries]` in 0..1."""
    values = {f"R@{cutoff}": (ranks.rank <= cutoff).astype(np.float64) for cutoff in CUTOFFS}
    return values | {"MRR": 1.0 / ranks.rank}


def chance_levels(pool: np.ndarray, relevant: np.ndarray) -> dict[str, float]:
    """
    The exact expectation of each metric for a random order.

    Args:
        pool (`np.ndarray`):
            Int `[queries]`, documents ranked.
        relevant (`np.ndarray`):
            Int `[queries]`, right documents among them.

    Returns:
        `dict[str, float]`: metric name to its value in 0..1, the mean over the queries.
    """
    totals = dict.fromkeys(METRICS, 0.0)
    pairs, counts = np.unique(np.stack([pool, relevant], axis=1), axis=0, return_counts=True)
    for (size, right), repeat in zip(pairs.tolist(), counts.tolist(), strict=True):
        first = _first_hit_distribution(size, right)
        for cutoff in CUTOFFS:
            totals[f"R@{cutoff}"] += repeat * float(first[:cutoff].sum())
        totals["MRR"] += repeat * float((first / np.arange(1, size + 1)).sum())
    return {name: total / len(pool) for name, total in totals.items()}


def _first_hit_distribution(size: int, right: int) -> np.ndarray:
    """Returns P(first right document stands at rank 1..size) for a random order, float64 `[size]`."""
    position = np.arange(size, dtype=np.float64)
    left = size - position
    hit = np.minimum(1.0, right / left)
    missed_before = np.concatenate([[1.0], np.cumprod(1.0 - hit)[:-1]])
    return missed_before * hit


def bootstrap_interval(
    values: np.ndarray, samples: int, seed: int, clusters: Sequence[int] | None = None
) -> tuple[float, float]:
    """
    The 95 % percentile bootstrap interval of a mean.

    Args:
        values (`np.ndarray`):
            Float `[queries]`.
        samples (`int`):
            Number of resamples.
        seed (`int`):
            Seed of the resampling.
        clusters (`Sequence[int]`, *optional*):
            Label per query. Queries with one label share an item (eight motions of one image), are not independent,
            and are drawn together.

    Returns:
        `tuple[float, float]`: lower and upper end.
    """
    labels = np.arange(len(values)) if clusters is None else np.asarray(clusters)
    _, member = np.unique(labels, return_inverse=True)
    sums = np.bincount(member, weights=values)
    sizes = np.bincount(member).astype(np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(samples, dtype=np.float64)
    step = max(1, 2_000_000 // len(sums))
    for start in range(0, samples, step):
        drawn = generator.integers(0, len(sums), size=(min(step, samples - start), len(sums)))
        means[start : start + len(drawn)] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarise(
    ranks: Ranks, samples: int, seed: int, clusters: Sequence[int] | None = None
) -> dict[str, dict[str, float | list[float]] | float]:
    """
    The report of one system on one line of a task.

    Returns:
        `dict`: per metric `{"value", "interval"}` in 0..1, and `tied_queries`, the share of queries whose right
        document shares its score with a wrong one.
    """
    report: dict = {}
    for name, values in query_values(ranks).items():
        interval = bootstrap_interval(values, samples, seed, clusters)
        report[name] = {"value": float(values.mean()), "interval": list(interval)}
    report["tied_queries"] = float((ranks.mean_tie_rank < ranks.rank).mean())
    return report


def entry_over_seeds(by_seed: np.ndarray, drawn: np.ndarray, generator: np.random.Generator) -> dict[str, Any]:
    """
    The mean over seeds and its 95 % interval over queries and seeds.

    Args:
        by_seed, drawn, generator: see [`with_seed_spread`].

    Returns:
        `dict`: `value` and `interval`, its two ends.
    """
    low, high = np.percentile(with_seed_spread(drawn, by_seed, generator), [2.5, 97.5])
    return {"value": float(np.mean(by_seed)), "interval": [float(low), float(high)]}


def with_seed_spread(drawn: np.ndarray, by_seed: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """
    Resamples of a mean over seeds that know queries, made to know the seeds as well.

    A few seeds resampled among themselves give intervals that are too narrow (of three, one in 27 draws takes the
    largest each time). Their mean is drawn from Student's t with their own standard deviation instead.

    Args:
        drawn (`np.ndarray` of shape `(samples,)`): means over the seeds, by resamples of the queries.
        by_seed (`Sequence[float]`): the value of each seed on the queries as they are; one alone has no spread.
        generator (`np.random.Generator`): of the draws.

    Returns:
        `np.ndarray` of shape `(samples,)`: the resamples, whose percentiles cover both.
    """
    count = len(by_seed)
    if count < 2:
        return drawn
    error = float(np.std(by_seed, ddof=1)) / count**0.5
    return drawn + error * generator.standard_t(count - 1, size=len(drawn))
