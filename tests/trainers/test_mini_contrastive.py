import json
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerState

from modeling_moemb import MoEMBModel
from moemb.trainers.mini_contrastive_config import MiniContrastiveConfig
from moemb.trainers.mini_contrastive_trainer import MiniContrastiveError, build_trainer
from moemb.trainers.mixture import Contrast, Group
from moemb.trainers.packed_trainer import JsonLines, newest_checkpoint
from moemb.trainers.pretrain_config import PretrainConfig
from moemb.trainers.pretrain_trainer import build_trainer as build_pretrainer

from .test_pretrain import TINY, unchanged_parameters


SETTINGS = {
    "emoji_chunk": 4, "icon_chunk": 3, "translation_chunk": 4, "gloss_chunk": 4, "article_rate": 0.5,
    "article_chunk": 2, "strip_chunk": 3, "motion_rate": 0.5, "motion_chunk": 8, "edit_rate": 0.5, "edit_chunk": 1,
    "max_steps": 4, "warmup_steps": 1, "logging_steps": 1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "use_cpu": True, "report_to": "none", "learning_rate": 1e-2, "disable_tqdm": True, "ema_decay": 0.5,
}  # fmt: skip


def config(folder, init_from, **changes):
    return MiniContrastiveConfig(output_dir=str(folder), init_from=str(init_from), **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, fake_corpus):
    folder = tmp_path_factory.mktemp("pretrained")
    trainer = build_pretrainer(PretrainConfig(output_dir=str(folder), **TINY), fake_corpus)
    trainer.create_optimizer()
    return trainer.export_final()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, fake_corpus, pretrained):
    folder = tmp_path_factory.mktemp("contrastive")
    trainer = build_trainer(config(folder, pretrained), fake_corpus)
    optimizer = trainer.create_optimizer()
    start = [master.clone() for master in optimizer.masters]
    table = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    trainer.export_final()
    return folder, unchanged_parameters(trainer, start), table


def weights(folder):
    return MoEMBModel.from_pretrained(folder).state_dict()


def test_every_parameter_changes_and_the_heads_are_not_saved(finished, pretrained):
    folder, unchanged, _ = finished
    assert unchanged == []
    assert weights(folder / "final").keys() == weights(pretrained).keys()
    assert json.loads((folder / "final" / "config.json").read_text())["pooling"] == "emb"


def test_emb_starts_at_the_mean_row(pretrained, finished):
    mean = weights(pretrained)["language_model.embed_tokens.weight"].float().mean(0)
    assert torch.allclose(finished[2][319].float(), mean, atol=6e-3)


def test_a_killed_run_goes_on_to_the_same_weights(finished, tmp_path, fake_corpus, pretrained):
    first = build_trainer(config(tmp_path, pretrained), fake_corpus)

    def fail(step, build=first.build_batch):
        if step == 3:
            raise RuntimeError("power cut")
        return build(step)

    first.train_dataset.build = fail
    with pytest.raises(RuntimeError, match="power cut"):
        first.train()
    second = build_trainer(config(tmp_path, pretrained), fake_corpus)
    second.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path)))
    second.export_final()
    expected, actual = weights(finished[0] / "final"), weights(tmp_path / "final")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_log_names_every_source_and_teacher(finished):
    log = [json.loads(line) for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    names = set().union(*log)
    sources = ("emoji", "icon", "translation", "gloss", "article", "strip", "motion", "edit")
    assert {f"{name}_loss" for name in (*sources, "text_teacher", "vision_teacher")} <= names
    assert {"eval_score", "eval_image_r1", "eval_style_r10", "eval_edit_mrr", "expert_load_max"} <= names


def test_cpu_hours_add_up_over_continuations(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "cpu_hours": 2.5}\n{"step": 2, "loss": 1.0}\n{"step": 3, "cpu_h')
    writer = JsonLines(str(tmp_path))
    before = time.process_time()
    sum(range(2_000_000))
    writer.on_log(None, TrainerState(global_step=3), None, {"loss": 0.5})
    hours = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["cpu_hours"]
    assert 2.5 <= hours <= 2.5 + (time.process_time() - before + 1) / 3600


def test_training_lowers_the_loss(tmp_path, fake_corpus, pretrained):
    trainer = build_trainer(
        config(tmp_path, pretrained, max_steps=20, learning_rate=1e-2, eval_strategy="no", save_strategy="no"),
        fake_corpus,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_language_modelling_beside_the_contrast(tmp_path, fake_corpus, pretrained):
    settings = {"language_rate": 0.5, "language_documents": 2, "max_steps": 2, "eval_strategy": "no"}
    trainer = build_trainer(config(tmp_path, pretrained, **settings), fake_corpus)
    assert ["language" in trainer.build_batch(step) for step in range(4)] == [False, True, False, True]
    batch = trainer.build_batch(1)["language"]
    ids, bounds = batch["inputs"]["input_ids"][0], batch["inputs"]["cu_seq_lens_q"].long()
    assert (ids[bounds[1:] - 1] == trainer.encoder.emb_id).all()
    kept = batch["labels"] != -100
    assert torch.equal(batch["labels"][kept], ids[kept.nonzero().squeeze(1) + 1])
    assert not (batch["labels"] == trainer.encoder.emb_id).any()
    trainer.train()
    assert trainer.state.log_history[1]["language_loss"] == pytest.approx(5.8, abs=0.5)  # ln 320


def test_teacher_targets_point_at_the_right_vectors(tmp_path, fake_corpus, pretrained):
    trainer = build_trainer(config(tmp_path, pretrained), fake_corpus)
    groups = trainer.mixture.groups(0)
    names = [target for group in groups for target in group.text_targets]
    target = trainer.build_batch(0)["targets"]["text"]
    index, vectors = fake_corpus.text_teacher()
    for row, number in list(zip(target["rows"].tolist(), target["index"].tolist(), strict=True))[:20]:
        expected = F.normalize(torch.from_numpy(vectors[index[names[row]]]).float(), dim=0)
        assert torch.allclose(target["vectors"][number], expected, atol=1e-3)
    assert len(target["vectors"]) == len(set(names) - {None})


def test_group_loss_shares_positives_and_leaves_out_a_row_with_itself(tmp_path, fake_corpus, pretrained):
    trainer = build_trainer(config(tmp_path, pretrained, scale=10.0), fake_corpus)
    vectors = F.normalize(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    group = Group("x", [None] * 4, ["a", "a", "b", "b"], [Contrast([0, 1, 2, 3], [0, 1, 2, 3], symmetric=False)])
    logits = (10.0 * vectors @ vectors.T).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.tensor([1, 0, 3, 2]))
    assert torch.allclose(trainer.group_loss(vectors, group), expected)


def test_instructions_stand_on_queries_alone(tmp_path, fake_corpus, pretrained):
    trainer = build_trainer(config(tmp_path, pretrained, instruction_share=1.0), fake_corpus)
    group = trainer.mixture.groups(0)[1]  # icons
    samples = trainer._instruct(group, np.random.default_rng(0))
    asking = set(group.contrasts[0].queries)
    assert all(bool(sample.instruction) == (row in asking) for row, sample in enumerate(samples))


def test_validation_reads_no_test_item(tmp_path, fake_corpus, pretrained):
    trainer = build_trainer(config(tmp_path, pretrained), fake_corpus)
    tasks = {task.name: task for task in trainer.validation.tasks}
    assert set(tasks) == {"image", "foreign", "style", "translation", "gloss", "strip", "motion", "edit"}
    for task in tasks.values():
        assert task.right.shape == (len(task.queries), len(task.documents)) and task.right.any(axis=1).all()
    labels = [sample.parts[0] for sample in tasks["image"].queries]
    assert labels == [f"thing number {n}" for n in range(16, 24)]


def test_init_from_is_needed(tmp_path, fake_corpus):
    with pytest.raises(MiniContrastiveError, match="init_from"):
        build_trainer(MiniContrastiveConfig(output_dir=str(tmp_path), **SETTINGS), fake_corpus)


@pytest.mark.parametrize(("key", "value"), [("emoji_chunk", 0), ("instruction_share", 1.5), ("language_rate", 2.0)])
def test_settings_that_cannot_work_are_named(tmp_path, key, value):
    with pytest.raises(ValueError, match=key):
        config(tmp_path, "x", **{key: value})
