"""Expert policies against one token at a time in plain Python."""

import pytest
import torch

from modeling_moemb.pruning_moemb import hashed
from modeling_moemb.routing_moemb import (
    Routing,
    expert_budget,
    random_top_k,
    renormalised,
    route,
    skip_below_threshold,
    tiered_experts,
    top_k_per_token,
    uniform_top_k,
)


TOKENS, SLOTS, EXPERTS = 60, 5, 9


@pytest.fixture
def routing() -> Routing:
    """Slots in any order, some of them skipped before, some tokens with none left."""
    chosen = route(torch.randn(TOKENS, EXPERTS) * 2, SLOTS, torch.float32)
    order = torch.rand(TOKENS, SLOTS).argsort(-1)
    shuffled = Routing(chosen.expert_index.gather(1, order), chosen.weight.gather(1, order), EXPERTS)
    skipped = torch.rand(TOKENS, SLOTS) < 0.2
    skipped[:3] = True
    return shuffled.skip(skipped)


def pairs(routing: Routing, token: int) -> dict[int, float]:
    """Expert to weight of the pairs of a token that run."""
    chosen = zip(routing.expert_index[token].tolist(), routing.weight[token].tolist())
    return {expert: weight for expert, weight in chosen if expert != routing.num_experts}


def check(before: Routing, after: Routing, choose, renormalise: bool = True) -> None:
    """`choose(token, pairs)` gives the experts that stay; weights are renormalised where some were lost."""
    dropped = 0
    for token in range(TOKENS):
        old, new = pairs(before, token), pairs(after, token)
        kept = choose(token, old)
        assert set(new) == kept
        lost = len(old) - len(kept)
        dropped += lost
        total = sum(old[expert] for expert in kept) if lost and renormalise else 1
        for expert in kept:
            if total == 1:
                assert new[expert] == old[expert], "a token that loses nothing must keep its weights bit by bit"
            assert new[expert] == pytest.approx(old[expert] / total, rel=1e-6)
    assert dropped > 0
    assert not after.weight[after.skipped].any() and after.weight.isfinite().all()


def heaviest(count: int, old: dict[int, float]) -> set[int]:
    return set(sorted(old, key=lambda expert: -old[expert])[:count])


def test_top_k_per_token(routing):
    top_k = torch.randint(1, SLOTS + 1, (TOKENS,))
    check(routing, top_k_per_token(routing, top_k), lambda token, old: heaviest(int(top_k[token]), old))


@pytest.mark.parametrize("top_k", [1, 3])
def test_one_number_for_all_tokens_equals_uniform_top_k(top_k):
    routing = route(torch.randn(TOKENS, EXPERTS), SLOTS, torch.float32)
    own, uniform = top_k_per_token(routing, torch.full((TOKENS,), top_k)), uniform_top_k(routing, top_k)
    for token in range(TOKENS):
        assert pairs(own, token) == pytest.approx(pairs(uniform, token))


def test_random_top_k(routing):
    key = hashed(torch.arange(TOKENS)[:, None], routing.expert_index)

    def choose(token, old):
        keys = dict(zip(routing.expert_index[token].tolist(), key[token].tolist()))
        return set(sorted(old, key=lambda expert: -keys[expert])[:2])

    check(routing, random_top_k(routing, 2, key), choose)


def test_random_top_k_ignores_the_weights():
    weight = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).expand(4000, 5)
    routing = Routing(torch.arange(5).expand(4000, 5), weight, EXPERTS)
    chosen = random_top_k(routing, 2, hashed(torch.arange(4000)[:, None], routing.expert_index))
    counts = (~chosen.skipped).sum(0)
    assert counts.sum() == 8000 and counts.min() > 1450 and counts.max() < 1750  # 1600 expected, deviation 31


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_skip_below_threshold(routing, renormalise, least):
    scale, tau = torch.rand(TOKENS), torch.rand(TOKENS) * 0.2
    minimum = torch.full((TOKENS,), least)
    minimum[::7] = 3
    after = skip_below_threshold(routing, scale, tau, minimum, renormalise)

    def choose(token, old):
        above = {e for e, weight in old.items() if weight * scale[token].item() >= tau[token].item()}
        return above | heaviest(int(minimum[token]), old)

    check(routing, after, choose, renormalise)


def test_a_threshold_may_leave_a_token_without_experts():
    routing = route(torch.randn(4, EXPERTS), 2, torch.float32)
    ones, none = torch.ones(4), torch.zeros(4, dtype=torch.long)
    for renormalise in (False, True):
        after = skip_below_threshold(routing, ones, 2 * ones, none, renormalise)
        assert bool(after.skipped.all()) and not after.weight.any()


def test_renormalised_without_a_loss_changes_no_bit(routing):
    after = renormalised(routing, torch.zeros(TOKENS, SLOTS, dtype=torch.bool))
    assert torch.equal(after.weight, routing.weight) and torch.equal(after.expert_index, routing.expert_index)


def test_tiers_fall_from_the_first_rank_to_the_last():
    assert [tiered_experts(8, 2, rank, 4) for rank in range(4)] == [8, 6, 4, 2]
    assert [tiered_experts(4, 1, rank, 6) for rank in range(6)] == [4, 3, 3, 2, 2, 1]  # 4, 3.4, 2.8, 2.2, 1.6, 1
    assert [tiered_experts(2, 1, rank, 3) for rank in range(3)] == [2, 2, 1]  # halves up
    assert tiered_experts(5, 1, 0, 1) == 5
    rank, size = torch.tensor([0, 1, 2, 3, 0, 0, 1]), torch.tensor([4, 4, 4, 4, 1, 2, 2])
    base, low = torch.tensor([8, 8, 8, 8, 5, 1, 3]), torch.tensor([2, 2, 2, 2, 1, 1, 2])
    expected = [tiered_experts(*map(int, row)) for row in zip(base, low, rank, size)]
    assert tiered_experts(base, low, rank, size).tolist() == expected


def test_the_number_of_one_modality_stands_over_that_of_all():
    assert expert_budget({}, 8) == [8, 8, 8]
    assert expert_budget({"top_k": 4}, 8) == [4, 4, 4]
    assert expert_budget({"top_k": 4, "per_modality": {"image": 2}}, 8) == [4, 2, 4]
