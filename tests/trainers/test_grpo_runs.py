"""Whole runs: evaluation, checkpoints, going on, model card, adapters, and what is refused before it starts."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file

from modeling_moemb import MoEMBModel
from moemb.trainers.errors import MoEMBError
from moemb.trainers.grpo_config import MoEMBGRPOConfig
from moemb.trainers.grpo_trainer import MoEMBGRPOTrainer

from .grpo_cases import gated_model, grpo_trainer, pairs


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "in_proj_qkv"]}


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.moemb.gates.named_parameters()}


def assert_same(one, other):
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_going_on_from_a_checkpoint_is_as_if_it_had_never_stopped(tiny_settings, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "entropy_coef": 1e-2, "num_generations": 3}
    straight = grpo_trainer(*gated_model(tiny_settings), tmp_path / "a", **settings)
    straight.train()
    resumed = grpo_trainer(*gated_model(tiny_settings), tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_same(weights(straight), weights(resumed))
    assert resumed.max_completion_length == straight.max_completion_length
    last = [next(log for log in run.state.log_history if log["step"] == 4) for run in (straight, resumed)]
    assert last[0]["loss"] == last[1]["loss"] and last[0]["reward"] == last[1]["reward"]


def test_a_checkpoint_is_a_model_with_its_gates_at_work(tiny_settings, tmp_path):
    model, processor = gated_model(tiny_settings)
    trainer = grpo_trainer(model, processor, tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    loaded = MoEMBModel.from_pretrained(folder)
    assert_same(weights(trainer), dict(loaded.gates.named_parameters()))
    assert loaded.config.adaptive_compute == {"gradual_pruning": {}, "expert_skip": {}}
    assert not (folder / "generation_config.json").exists()
    inputs = processor(["hello", {"image": pairs(1)[0]["positive"]["image"]}])
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).pooler_output, model.eval()(**inputs).pooler_output)
    card = (tmp_path / "README.md").read_text()
    header = card.split("---")[1]
    assert all(tag in header for tag in ("trl", "grpo", "moemb", "generated_from_trainer"))
    assert "Policy optimisation (GRPO)" in card and "recall@1" in card and "encode_document" in card
    assert "2 steps" in card and "as a reward" in card and "text-generation" not in card
    assert json.loads((folder / "grpo_state.json").read_text())["max_completion_length"] > 1


def test_evaluation_is_repeatable_and_shows_what_is_deployed(tiny_settings, tmp_path):
    model, processor = gated_model(tiny_settings, saving=0.2)
    trainer = grpo_trainer(
        model, processor, tmp_path, trainer={"eval_dataset": pairs(6)}, num_generations_eval=2, steps_per_generation=2
    )
    first = trainer.evaluate()
    again = trainer.evaluate()
    for name in ("eval_reward", "eval_recall", "eval_flops_removed", "eval_greedy/flops_removed", "eval_loss"):
        assert first[name] == again[name], name
    assert first["eval_greedy/flops_removed"] > first["eval_flops_removed"] > 0
    assert -1 <= first["eval_greedy/teacher_cosine"] < 1
    assert "eval_gates/gradual_rate" in first and "eval_gates/skip_rate" in first
    trainer.train()  # evaluating in the middle of a buffered generation does not disturb it
    quiet = grpo_trainer(*gated_model(tiny_settings, saving=0.2), tmp_path / "quiet", steps_per_generation=2)
    quiet.train()
    between = grpo_trainer(
        *gated_model(tiny_settings, saving=0.2), tmp_path / "between", steps_per_generation=2,
        trainer={"eval_dataset": pairs(6)}, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    between.train()
    assert_same(weights(quiet), weights(between))


def test_adapters_train_beside_the_gates(tiny_settings, tmp_path):
    model, processor = gated_model(tiny_settings)
    settings = {
        "freeze_backbone": False, "save_strategy": "steps", "save_steps": 1, "gate_learning_rate": 0.05,
        "gradient_checkpointing": True, "trainer": {"peft_config": LoraConfig(**LORA)},
    }  # fmt: skip
    trainer = grpo_trainer(model, processor, tmp_path, **settings)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    adapters = {name for name in before if "lora_" in name and "language_model.layers.7" not in name}
    gates = {name for name in before if ".gates." in name}
    assert gates <= moved and adapters <= moved
    assert all("lora_" in name or ".gates." in name for name in moved)
    assert "distillation_loss" in trainer.state.log_history[0] and trainer.reward_func_names[-1] == "margin_reward"
    rates = {group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert rates == {0.05, 0.01}
    saved = load_file(tmp_path / "checkpoint-2" / "gates.safetensors")
    assert_same(weights(trainer), saved)
    model, processor = gated_model(tiny_settings)
    again = grpo_trainer(model, processor, tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same(weights(trainer), weights(again))


def test_a_run_with_nothing_to_learn_from_stops_with_a_message(tiny_settings, tmp_path):
    silent = gated_model(tiny_settings, {"skip": {}}, saving=-30.0)  # no gate ever saves: all rollouts are the same
    trainer = grpo_trainer(*silent, tmp_path, max_steps=20, flat_patience=3, num_generations=2, recall_k=1)
    with pytest.raises(MoEMBError, match="in 3 generation batches in a row.*FLOPs removed: -?0.*saving_at_start"):
        trainer.train()
    assert trainer.state.global_step == 2
    silent = gated_model(tiny_settings, {"skip": {}}, saving=-30.0)
    patient = grpo_trainer(*silent, tmp_path, max_steps=4, flat_patience=0)
    patient.train()
    assert patient.state.global_step == 4


def refused(tiny_settings, tmp_path, match, gates=None, prepare=None, error=MoEMBError, **settings):
    model, processor = gated_model(tiny_settings) if gates is None else gated_model(tiny_settings, gates)
    if prepare is not None:
        prepare(model)
    with pytest.raises(error, match=match):
        grpo_trainer(model, processor, tmp_path, **settings)


def test_trainings_that_cannot_start(tiny_settings, tmp_path):
    def without_gates(model):
        model.gates = None

    refused(tiny_settings, tmp_path, "no gates to train: add some with `attach_gates", prepare=without_gates)
    other = {"expert_skip": {}, "top_k": 1}
    refused(tiny_settings, tmp_path, r"holds \['top_k'\] beside the gates", adaptive_compute=other)
    refused(tiny_settings, tmp_path, "switches none of the model's gates", adaptive_compute={"top_k": 1})
    refused(tiny_settings, tmp_path, r"lacks \['positive'\]", data=Dataset.from_dict({"prompt": ["a"] * 3}))
    refused(tiny_settings, tmp_path, "replay='stored' has no gradient", replay="stored", freeze_backbone=False)
    refused(tiny_settings, tmp_path, "set it False", trainer={"peft_config": LoraConfig(**LORA)})
    everything = LoraConfig(r=2, target_modules="all-linear")
    gates = {"keep": {"layer": 3, "width": 8}}
    refused(
        tiny_settings, tmp_path, "adapts the gates", gates, freeze_backbone=False, trainer={"peft_config": everything}
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"beta": 0.04}, "beta=0.04 has no meaning for gates: there is no reference policy; set distillation"),
        ({"use_vllm": True}, "use_vllm=True has no meaning"),
        ({"top_p": 0.9}, "top_p=0.9 has no meaning"),
        ({"recall_k": None}, "recall@4 among the 3 pairs of a generation batch always succeeds"),
        ({"acting": "image"}, r"acting='image': use one of \['both', 'query', 'positive'\]"),
        ({"distillation": "kl"}, "distillation='kl': use one of"),
        ({"replay": "no"}, "replay='no': use one of"),
        ({"efficiency_scope": "all"}, "efficiency_scope='all': use one of"),
        ({"exploration_sigma": -1.0}, "exploration_sigma=-1.0: use a number of at least 0"),
        ({"target_reduction": 1.5}, "target_reduction=1.5: use a share between 0 and 1"),
        ({"rollout_batch_size": 0}, "rollout_batch_size=0: the least is 1"),
        ({"temperature": 0.0}, "temperature=0.0: use a number above 0"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, match):
    known = {"per_device_train_batch_size": 12, "num_generations": 4, "recall_k": 1, "use_cpu": True, "report_to": []}
    with pytest.raises(ValueError, match=match):
        MoEMBGRPOConfig(str(tmp_path), **{**known, **settings})


def test_defaults_are_those_of_the_paper(tmp_path):
    args = MoEMBGRPOConfig(str(tmp_path), per_device_train_batch_size=128, use_cpu=True, report_to=[])
    assert args.num_generations == args.num_recalled == 8 and args.num_iterations == 1 and args.epsilon == 0.2
    assert args.rewards == ["efficiency", "margin"] and args.distillation == "auto" and args.beta == 0
    assert issubclass(MoEMBGRPOTrainer, __import__("trl").GRPOTrainer)
