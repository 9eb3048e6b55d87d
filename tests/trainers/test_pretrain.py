import json

import numpy as np
import pytest
import torch

from modeling_moemb import MoEMBModel
from moemb.trainers.packed_trainer import learning_rate_factor, newest_checkpoint
from moemb.trainers.pretrain_config import PretrainConfig
from moemb.trainers.pretrain_trainer import build_trainer


TINY = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "vision_depth": 1, "vision_hidden_size": 16,
    "vision_heads": 2, "vision_intermediate_size": 32, "emoji_documents": 3, "icon_documents": 2,
    "translation_documents": 2, "gloss_documents": 3, "strip_documents": 2, "clip_documents": 1,
    "validation_documents": 4, "max_steps": 4, "warmup_steps": 1, "logging_steps": 1, "save_steps": 2,
    "eval_strategy": "steps", "eval_steps": 2, "use_cpu": True, "report_to": "none", "learning_rate": 1e-2,
    "disable_tqdm": True,
}  # fmt: skip


def config(folder, **changes):
    return PretrainConfig(output_dir=str(folder), **{**TINY, **changes})


def weights(folder):
    model = MoEMBModel.from_pretrained(folder)
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged_parameters(trainer, start):
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer._master_optimizer()
    return [
        names.get(id(parameter), "head")
        for parameter, master, before in zip(optimizer.model_parameters, optimizer.masters, start, strict=True)
        if torch.equal(master, before)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, fake_corpus):
    """A whole run of four steps, and the parameters whose float32 master did not change."""
    folder = tmp_path_factory.mktemp("pretrain")
    trainer = build_trainer(config(folder), fake_corpus)
    start = [master.clone() for master in trainer.create_optimizer().masters]
    trainer.train()
    trainer.export_final()
    return folder, unchanged_parameters(trainer, start)


def test_every_parameter_changes_and_the_model_reloads(finished):
    folder, unchanged = finished
    assert unchanged == []
    assert {value.dtype for value in weights(folder / "final").values()} == {torch.bfloat16}


def test_nothing_beside_the_backbone_is_saved(finished):
    names = set(weights(finished[0] / "final"))
    assert {name.split(".")[0] for name in names} == {"language_model", "visual"}
    settings = json.loads((finished[0] / "final" / "config.json").read_text())
    assert settings["pooling"] == "last" and settings["emb_token_id"] == 319


def test_log_and_best_checkpoint(finished):
    folder, _ = finished
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "language_loss" in entry] == [1, 2, 3, 4]
    evaluations = [entry for entry in log if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [2, 4]
    best = json.loads((folder / "best" / "training.json").read_text())
    assert best["eval_negative_loss"] == max(entry["eval_negative_loss"] for entry in evaluations)


def test_a_killed_run_goes_on_to_the_same_weights(finished, tmp_path, fake_corpus):
    first = build_trainer(config(tmp_path), fake_corpus)
    stop = RuntimeError("power cut")

    def fail(step, build=first.build_batch):
        if step == 3:
            raise stop
        return build(step)

    first.train_dataset.build = fail
    with pytest.raises(RuntimeError, match="power cut"):
        first.train()
    half = tmp_path / "checkpoint-3"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"cut short")
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint.name == "checkpoint-2" and not half.exists()

    second = build_trainer(config(tmp_path), fake_corpus)
    second.train(resume_from_checkpoint=str(checkpoint))
    second.export_final()
    expected, actual = weights(finished[0] / "final"), weights(tmp_path / "final")
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_finished_run_is_made_longer(tmp_path, fake_corpus):
    build_trainer(config(tmp_path, max_steps=2), fake_corpus).train()
    longer = build_trainer(config(tmp_path, max_steps=3), fake_corpus)
    longer.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path)))
    assert longer.state.global_step == 3
    assert longer.best_value is not None


def test_time_limit_saves_and_stops(tmp_path, fake_corpus):
    trainer = build_trainer(config(tmp_path, max_steps=50, max_minutes=1e-6, save_steps=100), fake_corpus)
    trainer.train()
    assert trainer.state.global_step == 1 and newest_checkpoint(tmp_path).name == "checkpoint-1"


def test_labels_are_the_next_text_tokens(tmp_path, fake_corpus):
    trainer = build_trainer(config(tmp_path), fake_corpus)
    batch = trainer.build_batch(0)
    ids, labels = batch["inputs"]["input_ids"][0], batch["labels"]
    bounds = batch["inputs"]["cu_seq_lens_q"].long()
    kept = labels != -100
    positions = kept.nonzero().squeeze(1)
    assert torch.equal(labels[kept], ids[positions + 1])
    encoder = trainer.encoder
    silent = [encoder.image_id, encoder.video_id, encoder.vision_start_id, encoder.vision_end_id, encoder.emb_id]
    assert not torch.isin(labels[kept], torch.tensor(silent)).any()
    assert (labels[bounds[1:] - 1] == -100).all()
    assert len(ids) % 256 == 0
    first = slice(int(bounds[0]), int(bounds[1]))
    assert (ids[first] == trainer.encoder.image_id).sum() in (16, 32)  # an emoji document has one or two pictures


def test_init_from_takes_weights_and_tokenizer(finished, tmp_path, fake_corpus):
    folder = finished[0] / "final"
    trainer = build_trainer(config(tmp_path, init_from=str(folder)), fake_corpus)
    expected = weights(folder)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mrope_section": [4, 4, 4]}, "mrope_section"),
        ({"weights_dtype": "float16"}, "weights_dtype"),
        ({"max_steps": -1}, "max_steps"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_schedule_warms_up_stays_and_falls():
    def at(step):
        return learning_rate_factor(step, warmup=10, total=100, decay_steps=30, floor=0.1)

    assert at(0) == pytest.approx(0.1) and at(9) == at(10) == at(70) == 1.0
    assert at(85) == pytest.approx(0.55) and at(100) == pytest.approx(0.1) and at(200) == pytest.approx(0.1)
    cosine = [learning_rate_factor(s, 10, 100, -1, 0.0) for s in (10, 55, 100)]
    assert np.allclose(cosine, [1.0, 0.5, 0.0])
    assert learning_rate_factor(99, 10, 100, 0, 0.0) == 1.0
