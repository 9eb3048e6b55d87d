"""GRPO for gates on TRL: the gradient against REINFORCE, what must not contribute, and what TRL offers."""

import pytest
import torch
import torch.nn.functional as F

from moemb.trainers.grpo_items import encode_item
from moemb.trainers.rewards import distillation_reward, efficiency_reward, margin_reward

from .grpo_cases import gated_model, generation, grpo_trainer, pairs


QUIET = {"entropy_coef": 0.0, "distillation": "none", "exploration_sigma": 0.0}


def gradients(trainer, inputs=None):
    """Gradients of the gates after one pass over a generation batch, and the loss."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(generation(trainer)) if inputs is None else inputs
    loss = trainer.compute_loss(trainer.model, inputs)
    trainer.model.zero_grad()
    loss.backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in trainer.moemb.gates.named_parameters()
    }
    return found, loss.detach(), inputs


class Forced:
    """The actions of one item, forced upon it; sums up their log-probability by the formula."""

    def __init__(self, actions):
        self.actions, self.place, self.log_prob = actions, 0, 0.0

    def __call__(self, query):
        count = query.logits.numel()
        saved = self.actions[self.place : self.place + count].view(query.logits.shape) == 1
        self.place += count
        chance = torch.sigmoid(query.logits)
        self.log_prob = self.log_prob + torch.where(saved, chance, 1 - chance).log().sum()
        return saved


def reinforce(trainer, processor, rows, inputs, rewards, group, of_longest=False):
    """Gradient of -mean_i A_i (mean over the gates of i of log pi): each rollout by itself, plain formulas."""
    rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages[rewards.std(1) < 1e-6] = 0
    advantages, total = advantages.flatten(), 0.0
    batch = trainer._batches["train"]
    longest = int(batch.lengths.sum(1).max())
    for rollout, advantage in enumerate(advantages.tolist()):
        row, start, log_prob = rows[rollout], 0, 0.0
        for side, name in enumerate(("prompt", "positive")):
            length = int(batch.lengths[rollout, side])
            item = encode_item(processor, row[name], ("query", "document")[side])
            forced = Forced(batch.completions[rollout, start : start + length])
            trainer.moemb(
                **item.inputs, adaptive_compute=trainer.budget, gate_policy=forced, pooled_only=True,
                share_prefixes=False,
            )  # fmt: skip
            start, log_prob = start + length, log_prob + forced.log_prob
        total = total - advantage * log_prob / (longest if of_longest else start) / len(advantages)
    trainer.model.zero_grad()
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in trainer.moemb.gates.named_parameters()}


@pytest.fixture
def gated(tiny_settings):
    return gated_model(tiny_settings)


def by_number(prompts, completions, completion_ids, number, **kwargs):
    """Rewards of no meaning that differ within a group."""
    return [float(n % 3) + len(ids) % 7 + sum(ids) % 5 for n, ids in zip(number, completion_ids, strict=True)]


@pytest.mark.parametrize("replay", ["stored", "forward"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_one_iteration_is_reinforce(gated, tmp_path, replay, loss_type):
    model, processor = gated
    given = []

    def reward(prompts, completions, completion_ids, **kwargs):
        given.extend(by_number(prompts, completions, completion_ids, **kwargs))
        return given[-len(prompts) :]

    trainer = grpo_trainer(
        model, processor, tmp_path, reward_funcs=reward, replay=replay, loss_type=loss_type, **QUIET
    )
    rows = generation(trainer)
    found, _, inputs = gradients(trainer)
    expected = reinforce(trainer, processor, rows, inputs, given, 4, of_longest=loss_type == "dr_grpo")
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


def test_groups_without_variance_contribute_nothing(gated, tmp_path):
    model, processor = gated
    settings = {"distillation": "both", "entropy_coef": 0.5, "freeze_backbone": False, "replay": "forward"}
    trainer = grpo_trainer(model, processor, tmp_path, reward_funcs=lambda prompts, **kwargs: [0.25] * len(prompts),
                           **{**settings, "distillation": "loss"})  # fmt: skip
    found, loss, inputs = gradients(trainer)
    assert loss == 0 and not inputs["completion_mask"].any() and not inputs["advantages"].any()
    assert all(not gradient.any() for gradient in found.values())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_only_groups_with_variance_are_learned_from(gated, tmp_path):
    model, processor = gated
    flat = []

    def reward(prompts, completions, completion_ids, number, **kwargs):
        flat[:] = sorted(set(number))[:2]
        scores = by_number(prompts, completions, completion_ids, number)
        return [1 / 3 if n in flat else score for n, score in zip(number, scores, strict=True)]

    trainer = grpo_trainer(
        model, processor, tmp_path, reward_funcs=reward, loss_type="dapo", entropy_coef=0.1, distillation="none"
    )
    _, _, inputs = gradients(trainer)
    rows = generation(trainer)
    learns = [rows[int(rollout)]["number"] not in flat for rollout in inputs["prompt_ids"][:, 0]]
    assert inputs["learns"].tolist() == [float(value) for value in learns] and sum(learns) == 4
    assert torch.equal(inputs["completion_mask"].any(1), torch.tensor(learns))
    assert int(inputs["num_items_in_batch"]) == int(inputs["completion_mask"].sum())
    assert inputs["advantages"][torch.tensor(learns)].any() and not inputs["advantages"][~torch.tensor(learns)].any()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
def test_every_loss_type_of_trl(gated, tmp_path, loss_type):
    model, processor = gated
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    trainer = grpo_trainer(
        model, processor, tmp_path, loss_type=loss_type, num_iterations=2, steps_per_generation=2,
        per_device_train_batch_size=6, num_generations=4, max_steps=3, **level,
    )  # fmt: skip
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer.train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("gates."), name
    log = trainer.state.log_history
    assert all(torch.isfinite(torch.tensor(float(entry["loss"]))) for entry in log if "loss" in entry)
    assert [("recall" in entry) for entry in log[:3]] == [True, False, False]  # one generation, several passes


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_scale_rewards(gated, tmp_path, scale):
    model, processor = gated
    given = []

    def reward(prompts, completions, completion_ids, **kwargs):
        given[:] = by_number(prompts, completions, completion_ids, **kwargs)
        return given

    trainer = grpo_trainer(model, processor, tmp_path, reward_funcs=reward, scale_rewards=scale, **QUIET)
    _, _, inputs = gradients(trainer)
    rewards = torch.tensor(given).view(-1, 4)
    spread = {"group": rewards.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    expected = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()
    torch.testing.assert_close(inputs["advantages"], expected[inputs["prompt_ids"][:, 0]])


def test_the_router_loss_of_the_backbone_never_leaks_in(tiny_settings, tmp_path):
    found = []
    for coefficient in (0.0, 10.0):
        text = {**tiny_settings["text_config"], "router_aux_loss_coef": coefficient, "output_router_logits": True}
        model, processor = gated_model({**tiny_settings, "text_config": text})
        trainer = grpo_trainer(model, processor, tmp_path, freeze_backbone=False, distillation="loss")
        found.append(gradients(trainer)[1])
        assert not trainer.aux_loss_enabled and "aux_loss" not in trainer._metrics["train"]
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.001 must be 0"):
        grpo_trainer(model, processor, tmp_path, router_aux_loss_coef=0.001)


def test_distillation_is_a_loss_where_the_backbone_trains(gated, tmp_path):
    model, processor = gated
    settings = {"reward_funcs": by_number, "freeze_backbone": False, "entropy_coef": 0.0}
    with_loss = grpo_trainer(model, processor, tmp_path, distillation_weight=3.0, **settings)
    assert with_loss.reward_func_names == ["by_number"]
    loss, inputs = gradients(with_loss)[1:]
    without = grpo_trainer(model, processor, tmp_path, distillation="none", **settings)
    plain = gradients(without)[1]
    batch, rows = with_loss._batches["train"], generation(with_loss)
    learns = inputs["learns"][inputs["prompt_ids"][:, 0].argsort()].bool()
    distance = (1 - (batch.vectors * batch.full[batch.pair]).sum(-1)).mean(1)
    assert learns.sum() and distance.mean() > 1e-2 and len(rows) == 12
    torch.testing.assert_close(loss - plain, 3.0 * (distance * learns).mean(), rtol=0, atol=1e-5)
    embedded = model.get_input_embeddings().weight.grad
    assert embedded is not None and embedded.any()


def test_distillation_is_a_reward_where_the_backbone_is_frozen(gated, tmp_path):
    model, processor = gated
    trainer = grpo_trainer(model, processor, tmp_path, distillation_weight=0.5, reward_weights=[1.0, 2.0])
    assert trainer.reward_funcs == [efficiency_reward, margin_reward, distillation_reward]
    assert trainer.reward_weights.tolist() == [1.0, 2.0, 0.5] and not trainer.distils_by_loss
    gradients(trainer)
    cosine = (trainer._batches["train"].vectors * trainer._batches["train"].full[trainer._batches["train"].pair]).sum(
        -1
    )
    logged = trainer._logs["rewards"]["distillation_reward"]
    torch.testing.assert_close(torch.tensor(list(logged)), cosine.mean(1) - 1)


def test_reward_functions_of_ones_own(gated, tmp_path):
    model, processor = gated
    seen = {}

    def own(prompts, completions, completion_ids, number, recall, trainer_state, log_extra, log_metric, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        log_extra("number", number)
        log_metric("mean_recall", sum(recall) / len(recall))
        return [None if n == number[0] else float(sum(ids)) for n, ids in zip(number, completion_ids, strict=True)]

    async def slow(prompts, flops_removed, **kwargs):
        return flops_removed

    trainer = grpo_trainer(model, processor, tmp_path, reward_funcs=[own, slow, margin_reward], log_completions=True)
    rows = generation(trainer)
    trainer.train()
    assert len(seen["prompts"]) == 12 and seen["prompts"][0].startswith("picture number")
    assert set(seen["completion_ids"][0]) == {0, 1} and "FLOPs removed" in seen["completions"][0]
    assert seen["positive"][0]["image"].shape == (48, 64, 3)
    for name in ("positive_similarity", "negative_similarity", "teacher_cosine", "efficiency", "query_embedding"):
        assert len(seen[name]) == 12
    batch = trainer._batches["train"]
    expected = 1 - batch.flops.sum(1) / batch.full_flops.sum(1)[batch.pair]
    torch.testing.assert_close(torch.tensor(seen["flops_removed"]), expected.float())
    log = trainer.state.log_history[0]
    assert {"mean_recall", "rewards/own/mean", "rewards/slow/mean", "rewards/margin_reward/mean"} <= set(log)
    import pandas

    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert {"prompt", "completion", "number", "own", "advantage"} <= set(table.columns) and len(table) == 12
    assert len(rows) == 12


def test_retrieval_is_scored_among_all_pairs_of_the_generation_batch(gated, tmp_path):
    model, processor = gated
    data = pairs(8).select([0, 1, 2, 2])  # two pairs are the same: neither counts against the other
    trainer = grpo_trainer(
        model, processor, tmp_path, data, per_device_train_batch_size=16, shuffle_dataset=False, recall_k=1
    )
    gradients(trainer)
    batch, seen = trainer._batches["train"], {}
    trainer.reward_funcs = [lambda **kwargs: seen.update(kwargs) or [0.0] * 16]
    trainer._scoring = generation(trainer)
    trainer.reward_func_names, trainer.reward_processing_classes = ["look"], [None]
    trainer.reward_weights = torch.ones(1)
    trainer._calculate_rewards(None, [""] * 16, [""] * 16, [batch.completions[0].numpy()] * 16)
    for rollout in range(16):
        pair, hits, near, far = rollout // 4, [], [], []
        for side in (0, 1):
            scores = [float(batch.vectors[rollout, side] @ batch.full[other, 1 - side]) for other in range(4)]
            wrong = [score for other, score in enumerate(scores) if {other, pair} != {2, 3} and other != pair]
            hits.append(float(not any(score > scores[pair] for score in wrong)))
            near.append(scores[pair])
            far.append(sum(wrong) / len(wrong))
        assert seen["recall"][rollout] == pytest.approx(sum(hits) / 2)
        assert seen["positive_similarity"][rollout] == pytest.approx(sum(near) / 2, abs=1e-5)
        assert seen["negative_similarity"][rollout] == pytest.approx(sum(far) / 2, abs=1e-5)


def test_target_reduction_caps_the_efficiency(gated, tmp_path):
    model, processor = gated
    seen = {}

    def look(prompts, efficiency, flops_removed, **kwargs):
        seen.update(efficiency=efficiency, removed=flops_removed)
        return efficiency

    trainer = grpo_trainer(model, processor, tmp_path, reward_funcs=look, target_reduction=0.2, acting="positive")
    gradients(trainer)
    assert seen["efficiency"] == pytest.approx([min(removed / 0.2, 1.0) for removed in seen["removed"]])
    assert not trainer._batches["train"].lengths[:, 0].any()


def test_vectors_of_full_compute_are_those_of_the_model(gated, tmp_path):
    model, processor = gated
    trainer = grpo_trainer(model, processor, tmp_path)
    rows = generation(trainer)
    gradients(trainer)
    item = encode_item(processor, rows[4]["positive"], "document")
    with torch.no_grad():
        output = model(**item.inputs, adaptive_compute={}, pooled_only=True)
    expected = F.normalize(output.pooler_output, dim=-1)[0]
    torch.testing.assert_close(trainer._batches["train"].full[1, 1], expected, rtol=0, atol=1e-5)
