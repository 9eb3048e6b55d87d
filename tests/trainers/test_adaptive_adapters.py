"""Adapters beside gates: what is trained, who teaches, what is saved, and the weights they are merged into."""

import json

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb import MoEMBModel
from moemb.trainers.adaptive_adapters import merged_adapters, without_adapters
from moemb.trainers.adaptive_trainer import AdaptiveTrainer, build_trainer
from moemb.trainers.lora import is_adapter, merged_model
from moemb.trainers.planted import PlantedData, PlantedTask
from moemb.trainers.repository import assemble_repository

from ..modeling_moemb.embedders import build
from ..processors import lean_processor
from .test_adaptive_trainer import plain_checkpoints, settings  # noqa: F401
from .test_grpo_run import pictures  # noqa: F401


LORA = {"lora_rank": 4, "lora_learning_rate": 1e-2}


def trainer(folder, task=None, **changes):
    task = task or PlantedTask(0)
    args = settings(folder, **LORA | changes)
    return AdaptiveTrainer(task.model, args, None, PlantedData(task, 8))


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(before, model):
    return {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}


def test_gates_and_adapters_move_and_nothing_else(tmp_path):
    run = trainer(tmp_path)
    before = weights(run.model)
    run.train()
    trained = moved(before, run.model)
    assert all(name.startswith("gates.") or is_adapter(name) for name in trained)
    # B begins at zero, so that A has a gradient from the second step on; the gates are in their own test
    adapters = {name for name in before if is_adapter(name)}
    assert adapters and adapters <= trained
    for part in ("self_attn.q_proj", "linear_attn.in_proj_qkv", "shared_expert.down_proj"):
        assert any(part in name for name in adapters), part
    assert not any(".experts." in name or "gates." in name or "visual" in name for name in adapters)


def test_targets_and_alpha_are_choices(tmp_path):
    run = trainer(tmp_path, lora_targets=["attention"], lora_alpha=2)
    adapters = [name for name, _ in run.model.named_parameters() if is_adapter(name)]
    assert adapters and all(".self_attn." in name for name in adapters)
    layer = run.model.get_submodule(adapters[0].split(".lora_")[0])
    assert layer.scaling["default"] == 2 / 4


@pytest.mark.parametrize("teacher", [None, "start", "current"])
def test_the_teacher_is_the_start_or_the_model_as_it_is(tmp_path, teacher):
    task = PlantedTask(0)
    batch = PlantedData(task, 8).batch(0)

    def vectors(model):
        with torch.no_grad():
            output = model(**batch.inputs, adaptive_compute={}, pooled_only=True)
        return F.normalize(output.pooler_output, dim=-1)

    start = vectors(task.model)
    run = trainer(tmp_path, task, teacher=teacher, max_steps=2)
    run.train()
    now = vectors(run.model)
    assert (now - start).abs().max() > 1e-3
    assert torch.equal(run._teacher(run.model, batch), now if teacher == "current" else start)
    assert all(p.requires_grad for name, p in run.model.named_parameters() if is_adapter(name))


def test_merged_inside_the_block_and_as_before_behind_it(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.train()
    model, batch = run.model.eval(), run.data.batch(0)

    def vectors():
        with torch.no_grad():
            return model(**batch.inputs, adaptive_compute={}, pooled_only=True).pooler_output

    with_them, names, before = vectors(), [name for name, _ in model.named_modules()], weights(model)
    with without_adapters(model):
        bare = vectors()
    assert (with_them - bare).abs().max() > 1e-3
    with merged_adapters(model):
        assert not any(is_adapter(name) or "base_layer" in name for name, _ in model.named_parameters())
        assert (vectors() - with_them).abs().max() < 1e-5
        model.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert [name for name, _ in model.named_modules()] == names and moved(before, model) == set()
    assert torch.equal(vectors(), with_them) and list(model.peft_config) == ["default"]


def test_a_killed_run_goes_on_bit_by_bit(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    halves = {"save_strategy": "steps", "save_steps": 2}
    first = trainer(tmp_path / "halves", max_minutes=1e-9, **halves)
    first.train()
    saved = tmp_path / "halves" / "checkpoint-1"
    assert {"gates.safetensors", "adapter_model.safetensors"} <= {path.name for path in saved.iterdir()}
    assert not (saved / "model.safetensors").exists()
    second = trainer(tmp_path / "halves", **halves)
    second.train(resume_from_checkpoint=str(saved))
    assert second.state.global_step == 4 and moved(weights(whole.model), second.model) == set()


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    processor = lean_processor(max_length=128)
    folder = tmp_path_factory.mktemp("adapters") / "model"
    return assemble_repository(
        folder, model=build(tiny_settings, processor), processor=processor, card_text="# Tiny\n"
    )


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_what_is_saved_computes_the_same(tmp_path, repository, pictures, with_tokenizer):  # noqa: F811
    """`final/` without PEFT, and `adapter/` on the repository it was trained on."""
    args = settings(
        tmp_path, gates={"keep": {"layer": 1, "width": 16}, "skip": {}}, targets={"keep": 0.4, "skip": 0.5},
        init_from=str(repository), max_steps=2, corpus_sources={}, train_datasets={"pictures": pictures},
        batch_pairs=4, **LORA,
    )  # fmt: skip
    run = build_trainer(args)
    processor = run.processing_class
    if with_tokenizer:
        run.processing_class = processor.tokenizer
    run.train()
    folder = run.export_final()
    assert (folder / "modules.json").is_file() and not list(folder.glob("adapter_*"))
    record = json.loads((folder / "gates.json").read_text())
    assert record["lora_rank"] == 4 and record["teacher"] == "start"
    inputs = run.data.batch(0).inputs
    final = MoEMBModel.from_pretrained(folder).eval()
    assert final.config.adaptive_compute == run.budget
    with torch.no_grad():
        for budget in ({}, run.budget):
            expected = run.model.eval()(**inputs, adaptive_compute=budget).pooler_output
            assert (final(**inputs, adaptive_compute=budget).pooler_output - expected).abs().max() < 1e-5
        full = run.model(**inputs, adaptive_compute={}).pooler_output
        alone = merged_model(repository, tmp_path / "adapter")
        assert (alone(**inputs, adaptive_compute={}).pooler_output - full).abs().max() < 1e-5
        plain = MoEMBModel.from_pretrained(repository).eval()(**inputs, adaptive_compute={}).pooler_output
        assert (plain - full).abs().max() > 1e-4
    settings_file = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert str(repository) not in settings_file


WRONG = [
    ({"lora_rank": -1}, "lora_rank=-1: the least is 0"),
    ({"lora_targets": ["experts"]}, r"lora_targets has \['experts'\]: use some of"),
    ({"lora_targets": []}, "lora_targets is empty, but lora_rank=4"),
    ({"backbone_learning_rate": 1e-4}, "set one of them to 0"),
    ({"teacher": "best"}, "teacher='best': use one of"),
    ({"lora_rank": 0, "backbone_learning_rate": 1e-4, "teacher": "start"}, "teacher 'start' needs the weights"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **LORA | changes)
