import math

import pytest
import torch
import torch.nn.functional as F

from moemb.trainers.losses import (
    contrastive_loss,
    distillation_loss,
    expert_load,
    load_balancing_loss,
    next_token_loss,
    router_z_loss,
)


def unit(*size, seed=0):
    return F.normalize(torch.randn(*size, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_contrastive_loss_is_cross_entropy_when_each_query_has_one_document():
    q, d = unit(5, 8), unit(5, 8, seed=1)
    expected = F.cross_entropy(20.0 * q @ d.T, torch.arange(5))
    assert torch.allclose(contrastive_loss(q, d, torch.eye(5, dtype=torch.bool), 20.0), expected)


def test_duplicate_positives_share_the_target():
    q, d = unit(2, 4), unit(3, 4, seed=1)
    positives = torch.tensor([[True, True, False], [False, False, True]])
    log_p = F.log_softmax(10.0 * q @ d.T, dim=1)
    expected = -((log_p[0, 0] + log_p[0, 1]) / 2 + log_p[1, 2]) / 2
    assert torch.allclose(contrastive_loss(q, d, positives, 10.0), expected)


def test_queries_without_document_and_ignored_pairs_take_no_part():
    q = unit(3, 4)
    same = torch.eye(3, dtype=torch.bool)
    positives = same.clone()
    positives[0, 1] = positives[1, 0] = True
    loss = contrastive_loss(q, q, positives, 10.0, ignore=same)
    logits = (10.0 * q @ q.T).masked_fill(same, -torch.inf)
    expected = -(F.log_softmax(logits[0], 0)[1] + F.log_softmax(logits[1], 0)[0]) / 2
    assert torch.allclose(loss, expected)


def test_a_group_of_one_gives_zero_loss_and_finite_gradient():
    q = unit(1, 4).requires_grad_()
    same = torch.ones(1, 1, dtype=torch.bool)
    loss = contrastive_loss(q, q, same, 20.0, ignore=same)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(q.grad, torch.zeros_like(q))


def test_distillation_is_smallest_at_the_teachers_vector():
    targets = unit(3, 6)
    index = torch.tensor([0, 2, 2])
    right = distillation_loss(5.0 * targets[index], targets, index, 20.0)
    wrong = distillation_loss(targets[[1, 0, 1]], targets, index, 20.0)
    assert right < 0.2 < wrong


def test_balance_is_one_when_even_and_experts_over_k_when_collapsed():
    even = torch.eye(8).repeat(4, 1) * 1e-3
    collapsed = torch.zeros(32, 8)
    collapsed[:, :2] = 50.0
    assert load_balancing_loss([even], top_k=1).item() == pytest.approx(1.0, abs=1e-3)
    assert load_balancing_loss([collapsed], top_k=2).item() == pytest.approx(4.0, abs=1e-3)
    assert load_balancing_loss([even, collapsed], top_k=2).item() > 1.5


def test_balance_pushes_the_busy_expert_down():
    logits = torch.zeros(16, 4)
    logits[:, 0] = 1.0
    logits.requires_grad_()
    load_balancing_loss([logits], top_k=1).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_z_loss_of_zero_logits():
    assert router_z_loss([torch.zeros(7, 16)]).item() == pytest.approx(math.log(16) ** 2)


def test_expert_load_sees_a_dead_expert():
    logits = torch.zeros(10, 4)
    logits[:, 1] = 1.0
    logits[:, 2] = 2.0
    assert expert_load([logits], top_k=2) == (2.0, 0.0)


def test_next_token_loss_equals_full_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    hidden, table = torch.randn(6, 8, generator=generator), torch.randn(11, 8, generator=generator)
    labels = torch.tensor([3, -100, 5, -100, 0, 10])
    expected = F.cross_entropy(hidden @ table.T, labels, ignore_index=-100)
    assert torch.allclose(next_token_loss(hidden, table, labels), expected)
    with pytest.raises(ValueError, match="no position has a label"):
        next_token_loss(hidden, table, torch.full((6,), -100))
