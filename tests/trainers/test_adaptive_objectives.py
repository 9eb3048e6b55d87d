"""Objectives of training gates, each against its definition written out."""

import math

import pytest
import torch

from moemb.trainers.adaptive_monitor import CollapseLimits, CollapseMonitor, GateCollapse
from moemb.trainers.adaptive_objectives import (
    annealed,
    binarity,
    budget_loss,
    depth_prior_loss,
    distillation_distance,
    gumbel_keep,
    halting_weights,
    mean_by_item,
    null_balance_loss,
    ponder_loss,
    straight_through,
)
from moemb.trainers.adaptive_strategies import phase_at


def test_distillation_is_one_minus_cosine_and_spares_the_teacher():
    student, teacher = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    loss = distillation_distance(student, teacher)
    cosines = [float(s @ t / (s.norm() * t.norm())) for s, t in zip(student.detach(), teacher.detach())]
    assert float(loss.detach()) == pytest.approx(1 - sum(cosines) / 3, abs=1e-6)
    loss.backward()
    assert teacher.grad is None and bool(student.grad.any())


def test_budgets_are_met_item_by_item():
    item, kept = torch.tensor([0, 0, 0, 0, 2, 2]), torch.tensor([1.0, 1, 1, 1, 0, 0])
    shares = mean_by_item(kept, item, 4)
    assert shares.tolist() == [1.0, 0.0]
    assert float(budget_loss(shares, 2 / 3)) == pytest.approx(((1 / 3) ** 2 + (2 / 3) ** 2) / 2)  # not 0, as the mean
    share = torch.tensor(0.7, requires_grad=True)
    budget_loss(share, 0.3).backward()
    assert share.grad > 0  # keeping less lowers the loss
    assert float(budget_loss(torch.zeros(0), 0.3)) == 0.0


def test_binarity_wants_decisions():
    assert float(binarity(torch.tensor([0.0, 1.0]))) == 0.0
    assert float(binarity(torch.full((4,), 0.5))) == 0.25
    weighted = binarity(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 3.0]))
    assert float(weighted) == pytest.approx(0.0625)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    soft = torch.tensor([0.2, 0.9], requires_grad=True)
    value = straight_through(torch.tensor([True, False]), soft)
    assert value.tolist() == pytest.approx([1.0, 0.0])
    value.backward(torch.tensor([2.0, 3.0]))
    assert soft.grad.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_gumbel_decisions_have_the_gates_probability(temperature):
    logits = torch.tensor([-2.0, 0.0, 1.5]).expand(20000, 3)
    soft = gumbel_keep(logits, temperature, torch.rand(logits.shape))
    expected = torch.sigmoid(-logits[0])
    assert ((soft > 0.5).float().mean(0) - expected).abs().max() < 4 * math.sqrt(0.25 / 20000)
    assert bool((soft.minimum(1 - soft).mean(0) < 0.2 * temperature + 0.05).all())


def test_temperatures_fall_exponentially():
    assert [annealed(p, 1.0, 0.1) for p in (0, 0.5, 1, 2)] == pytest.approx([1.0, math.sqrt(0.1), 0.1, 0.1])


def test_halting_weights_sum_to_one():
    scores = torch.rand(50, 6).square()
    weights, depth, remainder = halting_weights(scores, 0.01)
    assert (weights.sum(1) - 1).abs().max() <= 1e-6
    for row, halting in enumerate(scores.tolist()):
        total, expected = 0.0, 6
        for block, score in enumerate(halting, 1):
            total += score
            if total > 0.99:
                expected = block
                break
        assert depth[row] == expected
        assert float(remainder[row]) == pytest.approx(1 - sum(halting[: expected - 1]), abs=1e-5)
    assert float(ponder_loss(depth, remainder)) == pytest.approx(float((depth + remainder).mean()))


def test_the_depth_prior_is_least_at_its_target():
    depth = torch.arange(1, 9).float()
    bell = torch.exp(-0.5 * (depth - 5).square())
    near, far = depth_prior_loss(bell.expand(4, 8), 5.0), depth_prior_loss(bell.expand(4, 8), 2.0)
    assert float(near) == pytest.approx(0.0, abs=1e-3) and float(far) > 1.0


def test_null_experts_balance_as_a_group():
    """Even load over true and null experts together gives 1; nulls that differ among themselves count the same."""
    eye = 20 * torch.eye(6)
    tokens = eye[torch.tensor([[0, 4], [1, 5], [2, 4], [3, 5]]).flatten()].view(4, 2, 6).sum(1)
    even = null_balance_loss(tokens[:, :4], tokens[:, 4:], 2)
    probability = torch.softmax(tokens, -1).mean(0)
    load = torch.tensor([1, 1, 1, 1, 2, 2]) / 8
    assert float(even) == pytest.approx(float(6 * (load * probability).sum()), abs=1e-5)
    skewed = eye[torch.tensor([[0, 4], [1, 4], [2, 4], [3, 4]]).flatten()].view(4, 2, 6).sum(1)
    assert float(null_balance_loss(skewed[:, :4], skewed[:, 4:], 2)) == pytest.approx(float(even), abs=1e-4)
    logits = torch.zeros(8, 4, requires_grad=True)
    null_balance_loss(torch.zeros(8, 4), logits + torch.tensor([1.0, 1, 1, 1]), 2).backward()
    assert bool((logits.grad > 0).all())  # overloaded nulls are pushed down


KINDS = ("null", "keep", "skip")


def test_together():
    for strategy in ("global", "joint"):
        phase = phase_at(strategy, KINDS, 30, 61)
        assert phase.trained == phase.soft == ("keep", "skip", "null") and not phase.hard
        assert phase.progress == pytest.approx(0.5)


def test_alternating_turns_after_so_many_steps():
    trained = [phase_at("alternating", KINDS, step, 300, 50).trained for step in (0, 49, 50, 100, 149, 150)]
    assert trained == [("keep",), ("keep",), ("skip",), ("null",), ("null",), ("keep",)]
    assert phase_at("alternating", KINDS, 0, 300, 50).soft == ("keep", "skip", "null")


def test_one_after_the_other():
    seen = [phase_at("sequential", KINDS, step, 10) for step in range(10)]
    assert [phase.trained[0] for phase in seen] == ["keep"] * 4 + ["skip"] * 3 + ["null"] * 3
    assert [phase.hard for phase in seen[3:5]] == [(), ("keep",)] and seen[9].hard == ("keep", "skip")
    assert [phase.progress for phase in seen[:5]] == pytest.approx([0, 1 / 3, 2 / 3, 1, 0])
    assert seen[6].progress == seen[9].progress == 1.0
    with pytest.raises(ValueError, match="max_steps=2 is too short to train 3 gates"):
        phase_at("sequential", KINDS, 0, 2)
    with pytest.raises(ValueError, match="strategy='all': use one of"):
        phase_at("all", KINDS, 0, 2)


def watch(monitor, steps, progress=0.5, loss=1.0, cosine=0.9, **gates):
    for step in range(steps):
        monitor.check(step, progress, loss, cosine, gates)


LIMITS = CollapseLimits(window=5, after=5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            {"gradual": {"kept": 0.0, "hard": 0.0}},
            r"the gradual gate has collapsed: deployed it keeps 0.0000 .* GRPO|grpo",
        ),
        ({"loss": float("nan")}, "the loss is nan"),
        ({"cosine": 0.05}, "the vectors have lost what they meant"),
        (
            {"progress": 1.0, "skip": {"kept": 0.5, "hard": 1.0}},
            "the skip gate's decisions are not what it was trained",
        ),
        ({"progress": 1.0, "keep": {"kept": 1.0, "hard": 1.0}}, "the keep gate has not learned to save"),
        ({"null": {"kept": 0.01, "hard": 0.0}}, "it has no target of its own"),
    ],
)
def test_what_is_broken_stops_the_run(case, message):
    monitor = CollapseMonitor(LIMITS, {"keep": 0.3, "gradual": 0.5, "skip": 0.5})
    with pytest.raises(GateCollapse, match=message):
        watch(monitor, 12, **case)


def test_a_healthy_run_goes_on():
    monitor = CollapseMonitor(LIMITS, {"keep": 0.3, "skip": 0.5})
    watch(monitor, 40, progress=0.2, keep={"kept": 0.99, "hard": 1.0}, skip={"kept": 0.9, "hard": 1.0})
    watch(monitor, 40, progress=1.0, keep={"kept": 0.31, "hard": 0.3}, skip={"kept": 0.52, "hard": 0.5})
    for step in range(4):  # a bad step or two is no collapse
        monitor.check(100 + step, 1.0, 1.0, 0.1, {"keep": {"kept": 0.0, "hard": 0.0}})
