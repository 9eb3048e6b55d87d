import numpy as np
import pytest

from moemb.trainers.evaluation_metrics import (
    Ranks,
    ScoreError,
    bootstrap_interval,
    chance_levels,
    query_values,
    rank_queries,
    summarise,
    with_seed_spread,
)


def _ranks(matrix, relevant, exclude=None):
    matrix = np.asarray(matrix, dtype=np.float32)
    return rank_queries(lambda start, stop: matrix[start:stop], relevant, exclude)


def test_equal_scores_are_no_hits():
    ranks = _ranks(np.zeros((5, 20)), [[i] for i in range(5)])
    assert ranks.rank.tolist() == [20] * 5
    assert ranks.mean_tie_rank.tolist() == [10.5] * 5
    assert query_values(ranks)["R@10"].sum() == 0
    assert summarise(ranks, samples=50, seed=0)["tied_queries"] == 1.0


def test_a_single_document_is_always_first():
    assert _ranks([[0.0]], [[0]]).rank.tolist() == [1]


def test_scores_that_differ_only_by_rounding_are_ties():
    assert _ranks([[0.5, 0.5 - 1e-8, 0.1]], [[0]]).rank.tolist() == [2]
    assert _ranks([[0.5, 0.4999, 0.1]], [[0]]).rank.tolist() == [1]


def test_the_best_right_document_counts_and_right_ones_do_not_tie_with_each_other():
    ranks = _ranks([[0.9, 0.8, 0.8, 0.1]], [[1, 2]])
    assert ranks.rank.tolist() == [2]
    assert ranks.relevant.tolist() == [2]


def test_excluded_documents_leave_the_pool():
    ranks = _ranks([[0.9, 0.8, 0.1]], [[1]], [[0]])
    assert (ranks.rank.tolist(), ranks.pool.tolist()) == ([1], [2])


@pytest.mark.parametrize("left_out, row", [([[1]], [0.1, 0.2]), ([[]], [float("nan"), 0.2])])
def test_what_cannot_be_ranked_names_the_query(left_out, row):
    with pytest.raises(ScoreError, match="Query 0"):
        _ranks([row], [[1]], left_out)


def test_ranks_agree_with_brute_force_over_blocks():
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(600, 30)).round(1)
    answers = [[int(rng.integers(30))] for _ in range(600)]
    expected = [1 + sum(s >= row[a[0]] for i, s in enumerate(row) if i != a[0]) for row, a in zip(matrix, answers)]
    assert _ranks(matrix, answers).rank.tolist() == expected


@pytest.mark.parametrize("size, right", [(1, 1), (5, 1), (40, 3), (12, 12), (10, 4)])
def test_chance_agrees_with_a_random_order(size, right):
    chance = chance_levels(np.array([size]), np.array([right]))
    rng = np.random.default_rng(0)
    matrix = rng.random((20_000, size))
    drawn = query_values(_ranks(matrix, [list(range(right))] * len(matrix)))
    for name, value in chance.items():
        assert value == pytest.approx(drawn[name].mean(), abs=0.015)


def test_chance_of_one_in_many_is_one_over_the_pool():
    chance = chance_levels(np.full(3, 1914), np.ones(3, dtype=int))
    assert chance["R@1"] == pytest.approx(1 / 1914)
    assert chance["R@10"] == pytest.approx(10 / 1914)


def test_the_interval_is_seeded_and_matches_the_binomial():
    values = np.array([1.0] * 30 + [0.0] * 70)
    first, again = (bootstrap_interval(values, 2000, seed=3) for _ in range(2))
    assert first == again
    assert first != bootstrap_interval(values, 2000, seed=4)
    assert first[0] == pytest.approx(0.21, abs=0.02) and first[1] == pytest.approx(0.39, abs=0.02)


def test_clusters_widen_the_interval():
    values = np.repeat(np.array([1.0, 0.0] * 20), 8)
    alone = bootstrap_interval(values, 1000, seed=0)
    together = bootstrap_interval(values, 1000, seed=0, clusters=np.repeat(np.arange(40), 8))
    assert together[1] - together[0] > 2 * (alone[1] - alone[0])


def test_select_keeps_order():
    ranks = Ranks(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]), np.array([5, 6, 7]), np.array([1, 1, 1]))
    assert ranks.select([2, 0]).pool.tolist() == [7, 5]


def test_intervals_over_three_seeds_cover_what_they_say():
    """Seeds that scatter by 1 around 0, and queries that add a scatter of 0.5: 95 % of the intervals hold 0."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(2000):
        by_seed, shift = rng.normal(size=3), rng.normal(scale=0.5)
        drawn = by_seed.mean() + shift + rng.normal(scale=0.5, size=400)
        low, high = np.percentile(with_seed_spread(drawn, by_seed + shift, rng), [2.5, 97.5])
        held += low <= 0 <= high
    assert 0.935 < held / 2000 < 0.975
    alone = np.arange(3.0)
    assert with_seed_spread(alone, [1.0], rng) is alone
