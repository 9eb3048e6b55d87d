"""Learning is real: on a task where what may be saved is known, GRPO finds it, and shuffled rewards do not."""

import pytest
import torch
from datasets import Dataset

from modeling_moemb.gates_moemb import attach_gates
from modeling_moemb.processing_moemb import MoEMBProcessor
from moemb.trainers.planted import PlantedTask
from moemb.trainers.rewards import efficiency_reward, margin_reward

from ..processors import lean_processor
from .grpo_cases import grpo_trainer


PAIRS, STEPS = 16, 30


class IdsProcessor(MoEMBProcessor):
    """Items of the planted task are token ids, all visual but the first and the last."""

    def __call__(self, items, prompt_name=None, indices=None):
        ids = torch.tensor(items)
        visual = torch.zeros_like(ids)
        visual[:, 1:-1] = 1
        places = torch.arange(ids.shape[1])[None]
        inputs = {"input_ids": ids, "mm_token_type_ids": visual, "position_ids": places}
        return {**inputs, "attention_mask": torch.ones_like(ids)}


def ids_processor() -> IdsProcessor:
    processor = lean_processor(max_length=128)
    processor.__class__ = IdsProcessor
    return processor


def planted_run(seed, folder, gates, reward_funcs=None):
    """Train, and the reward on held-out batches as a share of the oracle's."""
    task = PlantedTask(seed)
    attach_gates(task.model, gates)
    rows = {"prompt": [], "positive": []}
    for step in range(STEPS):
        ids = task.batch(step, PAIRS)["input_ids"].tolist()
        rows["prompt"] += ids[:PAIRS]
        rows["positive"] += ids[PAIRS:]
    trainer = grpo_trainer(
        task.model, ids_processor(), folder, Dataset.from_dict(rows), reward_funcs, num_generations=8,
        per_device_train_batch_size=8 * PAIRS, max_steps=STEPS, learning_rate=0.05, lr_scheduler_type="constant",
        efficiency_scope="decoder", seed=seed, shuffle_dataset=False, logging_steps=10, distillation="none",
        entropy_coef=0.0,  # which alone would make every gate save half of the time
    )  # fmt: skip
    trainer.train()
    held_out = range(10_000, 10_004)
    reached, oracle = (task.reward(task.model, trainer.budget, held_out, policy) for policy in ("gates", "oracle"))
    return reached / oracle


def shuffled(reward):
    """The rewards of the rollouts, dealt out anew within every group."""

    def dealt(prompts, completion_ids, **columns):
        rewards = reward(prompts=prompts, completion_ids=completion_ids, **columns)
        generator = torch.Generator().manual_seed(len(completion_ids[0]))
        groups = torch.tensor(rewards).view(-1, 8)
        order = torch.rand(groups.shape, generator=generator).argsort(1)
        return groups.gather(1, order).flatten().tolist()

    return dealt


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_reaches_the_oracle(seed, tmp_path):
    assert planted_run(seed, tmp_path, {"gradual": {}}) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffled_rewards_do_not(seed, tmp_path):
    rewards = [shuffled(efficiency_reward), shuffled(margin_reward)]
    assert planted_run(seed, tmp_path, {"gradual": {}}, rewards) < 0.8


@pytest.mark.slow
def test_gates_are_learned_together(tmp_path):
    """Dropping and skipping at once reach what dropping alone reaches: one action does not spoil the other."""
    assert planted_run(0, tmp_path, {"gradual": {}, "skip": {}}) >= 0.9
