"""Actions as completions: drawn by the policy, executed hard, replayed, and the same whatever shares the batch."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb.compute_moemb import count_flops
from moemb.trainers.grpo_actions import (
    SAMPLED,
    ActionSampler,
    Exploration,
    log_probability,
    replayed_from_logits,
    rollout_keys,
)
from moemb.trainers.grpo_items import encode_item, join_items
from moemb.trainers.grpo_rollouts import RolloutSettings, replay_rollouts, run_rollouts
from moemb.trainers.grpo_setup import gates_budget

from .grpo_cases import gated_model, pairs


GATES = {
    "keep": {"keep": {"layer": 3, "width": 8}},
    "gradual": {"gradual": {"blocks": [2, 3, 6]}},
    "skip": {"skip": {"blocks": [1, 4, 7]}},
    "null": {"null": {"blocks": [3, 5, 7]}},
    "all": {"keep": {"layer": 3, "width": 8}, "gradual": {"blocks": [4, 6]}, "skip": {}, "null": {"blocks": [5]}},
}


def encoded(processor, count=4):
    rows = pairs(count)[:count]
    return [
        (encode_item(processor, query, "query"), encode_item(processor, target, "document"))
        for query, target in zip(rows["prompt"], rows["positive"], strict=True)
    ]


def settings_of(model, sigma=0.5, **changes):
    exploration = Exploration(sigma, 4, model.config.text_config.num_hidden_layers)
    return RolloutSettings(gates_budget(model, None), exploration, seed=3, **changes)


class Forced:
    """Actions of one item from its row of the completion; keeps what was asked."""

    def __init__(self, actions):
        self.actions, self.place, self.asked = actions, 0, []

    def __call__(self, query):
        count = query.logits.numel()
        actions = self.actions[self.place : self.place + count].view(query.logits.shape) == 1
        self.place += count
        self.asked.append((query, actions))
        return actions


def alone(model, item, actions, settings):
    """The item by itself, without replication, with the actions forced upon it."""
    forced = Forced(actions)
    output = model(
        **item.inputs, adaptive_compute=dict(settings.budget), gate_policy=forced, pooled_only=True,
        output_compute=True, share_prefixes=False,
    )  # fmt: skip
    assert forced.place == len(actions)
    vector = F.normalize(output.pooler_output.float(), dim=-1)[0]
    return vector, count_flops(model.config, output.compute), forced


@pytest.mark.parametrize("kind", GATES)
def test_rollouts_equal_running_the_items_alone(tiny_settings, kind):
    model, processor = gated_model(tiny_settings, GATES[kind], saving=-0.5)
    items, settings = encoded(processor, 3), settings_of(model, sigma=0.0)
    batch = run_rollouts(model, items, [3, 2, 3], torch.arange(8), 0, settings)
    assert len({tuple(row) for row in batch.completions.tolist()}) > 3  # not one rollout several times
    for rollout in range(8):
        start, expected = 0, []
        for side in range(2):
            length = int(batch.lengths[rollout, side])
            actions = batch.completions[rollout, start : start + length]
            start += length
            item = items[int(batch.pair[rollout])][side]
            with torch.no_grad():
                vector, flops, forced = alone(model, item, actions, settings)
            torch.testing.assert_close(batch.vectors[rollout, side], vector, rtol=0, atol=1e-5)
            assert batch.flops[rollout, side] == flops.total
            # exploration is off: the policy is the gates' own
            chance = [
                torch.where(saved, torch.sigmoid(query.logits), 1 - torch.sigmoid(query.logits)).log().flatten()
                for query, saved in forced.asked
            ]
            expected += torch.cat([*chance, torch.zeros(0)]).tolist()
        assert start <= batch.completions.shape[1] and not batch.completions[rollout, start:].any()
        # a gate that was not reached has no place in the completion, and no log-probability
        torch.testing.assert_close(batch.log_probs[rollout, :start], torch.tensor(expected), rtol=0, atol=1e-5)
        assert not batch.log_probs[rollout, start:].any()


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("sigma", [0.0, 0.7])
def test_replayed_log_probabilities_equal_sampled_ones(tiny_settings, kind, sigma):
    model, processor = gated_model(tiny_settings, GATES[kind], saving=-0.5)
    settings = settings_of(model, sigma, store_inputs=True)
    batch = run_rollouts(model, encoded(processor, 3), [4, 4, 4], torch.arange(12), 5, settings)
    rollouts = torch.tensor([7, 0, 11, 5, 6])  # a shuffled part of them, as TRL makes it
    completions = batch.completions[rollouts]
    log_probs, entropies, vectors = replay_rollouts(model, batch, rollouts, completions, settings)
    torch.testing.assert_close(log_probs, batch.log_probs[rollouts], rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors, batch.vectors[rollouts], rtol=0, atol=1e-5)
    calls = batch.stored.select(rollouts, 12)
    logits = model(gate_inputs=[(kind, block, inputs) for kind, block, *_, inputs in calls]).gate_logits
    stored = replayed_from_logits(calls, logits, completions, settings.exploration)
    torch.testing.assert_close(stored[0], batch.log_probs[rollouts], rtol=0, atol=1e-5)
    torch.testing.assert_close(stored[1], entropies, rtol=0, atol=1e-5)
    assert log_probs.requires_grad and stored[0].requires_grad


def test_gates_that_are_not_reached_are_not_asked(tiny_settings):
    model, processor = gated_model(tiny_settings, {"gradual": {"blocks": [2, 3, 6]}}, saving=0.5)
    settings, items = settings_of(model, sigma=0.0), encoded(processor, 1)
    batch = run_rollouts(model, items, [6], torch.arange(6), 0, settings)
    visual = int(sum(t * h * w for t, h, w in items[0][1].grids)) // 4
    for rollout in range(6):
        row, alive, expected = batch.completions[rollout].tolist(), visual, 0
        for _ in range(3):
            asked = row[expected : expected + alive]
            expected += alive
            alive -= sum(asked)
        assert batch.lengths[rollout].tolist() == [0, expected]  # a text has no token to drop
    assert int(batch.lengths.min(dim=0).values[1]) < 3 * visual


@pytest.mark.parametrize("chunk", [1, 256])
def test_a_rollout_does_not_depend_on_its_batch(tiny_settings, chunk):
    model, processor = gated_model(tiny_settings)
    items, settings = encoded(processor, 4), settings_of(model)
    whole = run_rollouts(model, items, [3] * 4, torch.arange(12), 2, settings)
    part = run_rollouts(
        model, items[1:3], [1, 3], torch.tensor([5, 6, 7, 8]), 2, settings_of(model, items_per_batch=chunk)
    )
    width = part.completions.shape[1]
    assert torch.equal(part.completions, whole.completions[5:9, :width])
    torch.testing.assert_close(part.vectors, whole.vectors[5:9], rtol=0, atol=1e-5)
    torch.testing.assert_close(part.full, whole.full[1:3], rtol=0, atol=1e-5)
    assert torch.equal(part.flops, whole.flops[5:9])
    other = run_rollouts(model, items, [3] * 4, torch.arange(12), 3, settings)
    assert not torch.equal(other.lengths, whole.lengths)  # another generation draws anew


def test_the_full_copy_is_full_compute_and_the_greedy_copy_is_deployment(tiny_settings):
    model, processor = gated_model(tiny_settings, GATES["all"], saving=0.3)
    items, settings = encoded(processor, 3), settings_of(model, greedy=True)
    batch = run_rollouts(model, items, [2] * 3, torch.arange(6), 0, settings)
    for side in range(2):
        inputs = join_items([pair[side] for pair in items], torch.device("cpu"))
        for vectors, flops, budget in (
            (batch.full, batch.full_flops, {}),
            (batch.greedy, batch.greedy_flops, dict(settings.budget)),
        ):
            with torch.no_grad():
                output = model(**inputs, adaptive_compute=budget, pooled_only=True, output_compute=True)
            expected = F.normalize(output.pooler_output.float(), dim=-1)
            torch.testing.assert_close(vectors[:, side], expected, rtol=0, atol=1e-5)
            assert int(flops[:, side].sum()) == count_flops(model.config, output.compute).total
    assert not torch.equal(batch.full_flops, batch.greedy_flops)


def test_only_the_sides_that_act_differ(tiny_settings):
    model, processor = gated_model(tiny_settings)
    items = encoded(processor, 2)
    batch = run_rollouts(model, items, [3, 3], torch.arange(6), 0, settings_of(model, acting=(1,)))
    assert not batch.lengths[:, 0].any() and batch.lengths[:, 1].all()
    assert torch.equal(batch.vectors[:, 0], batch.full[batch.pair, 0])
    assert torch.equal(batch.flops[:, 0], batch.full_flops[batch.pair, 0])
    assert (batch.flops[:, 1] < batch.full_flops[batch.pair, 1]).all()
    replayed = replay_rollouts(model, batch, torch.arange(6), batch.completions, settings_of(model, acting=(1,)))
    torch.testing.assert_close(replayed[0], batch.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(replayed[2][:, 0], batch.vectors[:, 1], rtol=0, atol=1e-5)


def test_what_comes_before_the_first_gate_runs_once(tiny_settings, monkeypatch):
    model, processor = gated_model(tiny_settings, {"skip": {"blocks": [5, 6]}})
    seen = {"patches": 0, "rows": []}
    vision = model.visual.forward

    def count_patches(pixels, grid):
        seen["patches"] += len(pixels)
        return vision(pixels, grid)

    monkeypatch.setattr(model.visual, "forward", count_patches)
    for layer in model.language_model.layers:
        layer.register_forward_pre_hook(lambda module, given: seen["rows"].append(len(given[0])))
    items = encoded(processor, 2)
    run_rollouts(model, items, [7, 7], torch.arange(14), 0, settings_of(model))
    tokens = sum(item.tokens for pair in items for item in pair)
    assert seen["rows"] == [tokens] * 5 + [8 * tokens] * 3  # 7 rollouts and the copy with full compute
    assert seen["patches"] == sum(t * h * w for pair in items for item in pair for t, h, w in item.grids)


def query_of(logits, segment, kind="skip", block=0):
    return SimpleNamespace(
        kind=kind, block=block, logits=logits, inputs=(), segment=segment, source=torch.arange(len(segment))
    )


@pytest.mark.parametrize("probability", [0.02, 0.3, 0.9])
def test_actions_are_drawn_with_the_gates_probability(probability):
    rows = 40_000
    logits = torch.full((rows,), math.log(probability / (1 - probability)))
    keys = rollout_keys(0, 0, torch.arange(4), 0)
    sampler = ActionSampler(
        keys, Exploration(0.0, 1, 8), torch.full((4,), SAMPLED), torch.zeros(4, dtype=torch.long), rows
    )
    segment = torch.arange(4).repeat_interleave(rows // 4)
    saved = sampler(query_of(logits, segment)).float()
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(saved.mean() - probability) < 4 * deviation / rows**0.5
    each = saved.view(4, -1)
    assert len({tuple(row) for row in each[:, :200].tolist()}) == 4
    assert not torch.equal(sampler(query_of(logits, segment, block=1)).float(), saved)
    assert torch.equal(sampler(query_of(logits, segment)).float(), saved)  # asked again for the same gate


def test_the_offset_is_shared_within_a_rollout_and_a_group_of_blocks():
    keys = rollout_keys(1, 0, torch.arange(20_000), 0)
    exploration, zero = Exploration(0.5, 2, 8), torch.zeros(20_000, 1)
    offsets = [exploration.log_odds(zero, "skip", block, keys) for block in range(8)]
    assert all(torch.equal(offsets[0], each) for each in offsets[:4])
    assert all(torch.equal(offsets[4], each) for each in offsets[4:])
    assert abs(offsets[0].mean()) < 0.02 and abs(offsets[0].std() - 0.5) < 0.01
    independent = [offsets[4], exploration.log_odds(zero, "gradual", 0, keys)]
    for other in independent:
        assert abs(torch.corrcoef(torch.stack([offsets[0][:, 0], other[:, 0]]))[0, 1]) < 0.03
    half = Exploration(0.5, 2, 8, temperature=2.0)
    torch.testing.assert_close(half.log_odds(zero + 1, "skip", 0, keys), (offsets[0] + 1) / 2)


def test_log_probability_and_entropy_against_torch():
    log_odds = torch.linspace(-8, 8, 33)
    actions = torch.arange(33) % 2 == 0
    log_probs, entropies = log_probability(log_odds, actions)
    bernoulli = torch.distributions.Bernoulli(logits=log_odds)
    torch.testing.assert_close(log_probs, bernoulli.log_prob(actions.float()))
    torch.testing.assert_close(entropies, bernoulli.entropy(), rtol=1e-4, atol=1e-6)


def test_a_replay_of_other_actions_is_refused(tiny_settings):
    model, processor = gated_model(tiny_settings)
    settings = settings_of(model)
    batch = run_rollouts(model, encoded(processor, 1), [2], torch.arange(2), 0, settings)
    with pytest.raises(RuntimeError, match="a replayed rollout reached"):
        replay_rollouts(model, batch, torch.arange(2), torch.zeros_like(batch.completions), settings)
