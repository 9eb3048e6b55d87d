"""Rewards, and the retrieval scores that they are made of, against plain loops."""

import pytest
import torch
import torch.nn.functional as F

from moemb.trainers.rewards import (
    RewardError,
    distillation_reward,
    efficiency_reward,
    find_reward,
    margin_reward,
    retrieval_scores,
)


@pytest.mark.parametrize("recall_k", [1, 3])
def test_retrieval_scores_against_a_loop(recall_k):
    vectors = F.normalize(torch.randn(20, 8), dim=-1)
    candidates = F.normalize(torch.randn(9, 8), dim=-1)
    candidates[4] = candidates[2]
    keys = torch.tensor([1, 2, 3, 4, 3, 6, 7, 8, 9])
    positive = torch.randint(0, 9, (20,))
    hits, near, far = retrieval_scores(vectors, positive, candidates, keys, recall_k)
    assert 0 < hits.sum() < 20
    for row in range(20):
        right = int(positive[row])
        wrong = [float(vectors[row] @ candidates[c]) for c in range(9) if keys[c] != keys[right]]
        own = float(vectors[row] @ candidates[right])
        assert hits[row] == float(sorted([*wrong, own], reverse=True).index(own) < recall_k)
        assert near[row] == pytest.approx(own, abs=1e-6) and far[row] == pytest.approx(
            sum(wrong) / len(wrong), abs=1e-6
        )


def test_without_negatives_retrieval_succeeds():
    vectors = F.normalize(torch.randn(2, 4), dim=-1)
    hits, _, far = retrieval_scores(vectors, torch.tensor([0, 1]), vectors, torch.tensor([5, 5]), 1)
    assert hits.tolist() == [1, 1] and far.tolist() == [0, 0]


def test_rewards():
    columns = {"recall": [0.0, 0.5, 1.0], "efficiency": [0.9, 0.4, -0.1], "prompts": ["a"] * 3}
    assert efficiency_reward(**columns) == [0.0, 0.2, -0.1]
    margin = margin_reward(positive_similarity=[0.5, 0.1], negative_similarity=[0.25, 0.3], completions=[])
    assert margin == pytest.approx([0.25, -0.2])
    assert distillation_reward(teacher_cosine=[1.0, 0.75]) == [0.0, -0.25]


def test_rewards_are_found_by_name(tmp_path, monkeypatch):
    assert find_reward("margin") is margin_reward
    (tmp_path / "own_rewards.py").write_text("def cheap(flops_removed, **kwargs):\n    return flops_removed\nx = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_reward("own_rewards:cheap")(flops_removed=[0.5]) == [0.5]
    with pytest.raises(RewardError, match="no reward is called 'margn'; did you mean 'margin'"):
        find_reward("margn")
    with pytest.raises(RewardError, match="'own_rewards:dear' cannot be imported"):
        find_reward("own_rewards:dear")
    with pytest.raises(RewardError, match="cannot be imported: No module named 'nowhere'"):
        find_reward("nowhere:cheap")
    with pytest.raises(RewardError, match="'own_rewards:x' is a int, not a function"):
        find_reward("own_rewards:x")
