import math

import numpy as np
import pytest
import pytrec_eval

from moemb.trainers.evaluation_metrics import ScoreError
from moemb.trainers.ranking_metrics import ordered_gains, ranking_values, row_values
from moemb.trainers.ranking_task import BenchmarkDataError, RankingRow, RankingTask, TaskItem, check_ranking_task


def item(text="x"):
    return TaskItem((("text", text),))


def make_task(rows, pool, metric="hit@1"):
    return RankingTask("task", "group", metric, [item()] * len(rows), rows, dict.fromkeys(pool, item()))


def test_a_ranking_by_hand():
    ranked, tied = ordered_gains(np.array([0.9, 0.8, 0.7, 0.6]), np.array([0.0, 2.0, 0.0, 1.0]))
    assert ranked.tolist() == [0, 2, 0, 1] and not tied
    values = row_values(ranked, [2.0, 1.0])
    best = 2 / math.log2(2) + 1 / math.log2(3)
    assert values["ndcg_linear@5"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / best)
    assert values["ndcg_linear@1"] == 0.0
    assert (values["hit@1"], values["hit@5"], values["recall@1"], values["recall@5"]) == (0, 1, 0, 1)
    assert values["mrr@10"] == 0.5


@pytest.mark.parametrize("graded", [False, True])
def test_random_rankings_equal_trec_eval(graded):
    rng = np.random.default_rng(0)
    names = [f"d{number}" for number in range(30)]
    rows, scores = [], rng.standard_normal((20, 30)).astype(np.float32)
    for _ in range(20):
        right = rng.choice(30, size=rng.integers(1, 15), replace=False)
        rows.append(RankingRow({names[number]: float(rng.integers(1, 4) if graded else 1) for number in right}))
    values, tied = ranking_values(make_task(rows, names), scores, np.eye(30, dtype=np.float32))
    judged = {str(n): {name: int(gain) for name, gain in row.relevant.items()} for n, row in enumerate(rows)}
    run = {str(n): dict(zip(names, map(float, row), strict=True)) for n, row in enumerate(scores)}
    oracle = pytrec_eval.RelevanceEvaluator(judged, {"ndcg_cut.5,10", "recall.5,10"}).evaluate(run)
    assert not tied.any()
    for number in range(20):
        for ours, theirs in (
            ("ndcg_linear@5", "ndcg_cut_5"), ("ndcg_linear@10", "ndcg_cut_10"), ("recall@5", "recall_5"),
        ):  # fmt: skip
            assert values[ours][number] == pytest.approx(oracle[str(number)][theirs], abs=1e-6), ours


def test_a_row_of_its_own_candidates_ranks_only_those():
    rows = [RankingRow({"b": 1.0}, ("a", "b")), RankingRow({"b": 1.0})]
    candidates = np.array([[0.1], [0.5], [0.9]], dtype=np.float32)
    values, _ = ranking_values(make_task(rows, ["a", "b", "c"]), np.ones((2, 1), np.float32), candidates)
    assert values["hit@1"].tolist() == [1.0, 0.0]


def test_a_candidate_named_twice_counts_once():
    rows = [RankingRow({"b": 1.0}, ("a", "a", "a", "b", "b"))]
    candidates = np.array([[0.9], [0.5]], dtype=np.float32)
    values, _ = ranking_values(make_task(rows, ["a", "b"]), np.ones((1, 1), np.float32), candidates)
    assert values["mrr@10"].tolist() == [0.5]


def test_a_model_that_maps_everything_to_one_vector_is_never_right():
    rows = [RankingRow({"a": 1.0}, ("a", "b", "c"))] * 3
    values, tied = ranking_values(make_task(rows, "abc"), np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
    assert values["hit@1"].tolist() == [0, 0, 0] and tied.all()


def test_right_candidates_of_one_score_are_no_tie():
    ranked, tied = ordered_gains(np.array([0.5, 0.5, 0.1]), np.array([1.0, 1.0, 0.0]))
    assert ranked.tolist() == [1, 1, 0] and not tied


def test_scores_that_are_no_numbers_name_the_query():
    queries = np.array([[1.0], [np.nan]], dtype=np.float32)
    with pytest.raises(ScoreError, match="task, query 1"):
        ranking_values(make_task([RankingRow({"a": 1.0})] * 2, "ab"), queries, np.ones((2, 1), np.float32))


@pytest.mark.parametrize(
    ("rows", "pool", "message"),
    [
        ([RankingRow({"z": 1.0})], "ab", "row 0 names 'z'"),
        ([RankingRow({"a": 1.0}, ("a", "y"))], "ab", "row 0 names 'y'"),
        ([RankingRow({})], "ab", "row 0 has no candidate of positive relevance"),
        ([RankingRow({"a": 1.0}, ("b",))], "ab", "none of the right answers of row 0"),
        ([], "ab", "0 queries"),
        ([RankingRow({"a": 1.0})], "", "0 candidates"),
    ],
)
def test_a_task_that_does_not_fit_together_is_refused(rows, pool, message):
    with pytest.raises(BenchmarkDataError, match=message):
        check_ranking_task(make_task(rows, pool))


def test_missing_media_are_counted_and_named(tmp_path):
    queries = [TaskItem((("image", tmp_path / f"{number}.png"),)) for number in range(5)]
    task = RankingTask("t", "g", "hit@1", queries, [RankingRow({"a": 1.0})] * 5, {"a": item()})
    with pytest.raises(BenchmarkDataError, match=r"t: 5 of 5 pictures or videos are missing: .*0\.png"):
        check_ranking_task(task)
