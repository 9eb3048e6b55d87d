import json
import os
import resource
import signal

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBModel
from moemb.trainers import contrastive_checkpoint
from moemb.trainers.cli import main
from moemb.trainers.contrastive_batches import model_inputs
from moemb.trainers.contrastive_checkpoint import CheckpointWriteError
from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_data import RowError
from moemb.trainers.contrastive_trainer import ContrastiveError, build_trainer
from moemb.trainers.packed_trainer import newest_checkpoint

from .contrastive_runs import SETTINGS, config, small_repository, state_of, trainer, write_data, write_jsonl
from .test_cached_gradients import BalanceObjective


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    return small_repository(tmp_path_factory.mktemp("model") / "tiny", tiny_settings)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def changed(before, after):
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_expert_rank": 2, "train_router": True},
        {"tuning": "full"},
        {"tuning": "full", "train_router": True, "train_vision": True, "gradient_checkpointing": True},
    ],
    ids=["lora", "full", "everything"],
)
def test_what_is_trained_moves_and_the_rest_keeps_every_bit(tmp_path, repository, data, settings):
    # the first step of the warm-up moves nothing, and adapters begin with one factor at zero
    run = trainer(tmp_path, repository, data, max_steps=3, save_strategy="no", **settings)
    before = state_of(run.backbone)
    wanted = {name for name, parameter in run.backbone.named_parameters() if parameter.requires_grad}
    run.train()
    moved = changed(before, state_of(run.backbone))
    assert moved == wanted


def killed(run, step):
    """Lets the run die when it asks for the batch of `step`."""
    encode = run.data_collator

    def fail(rows, calls=[0]):  # noqa: B006
        if calls[0] == step:
            raise RuntimeError("power cut")
        calls[0] += 1
        return encode(rows)

    run.data_collator = fail
    with pytest.raises(RuntimeError, match="power cut"):
        run.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_expert_rank": 2},
        pytest.param({"tuning": "full", "weights_dtype": "bfloat16", "router_z_weight": 0.1}, marks=pytest.mark.slow),
    ],
    ids=["lora", "full-bf16"],
)
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, repository, data, settings):
    # 18 rows are 2 batches an epoch: the run is killed in its second epoch and goes on in the middle of it
    settings = {"max_steps": 4, "save_steps": 3, **settings}
    whole = trainer(tmp_path / "whole", repository, data, **settings)
    whole.train()
    killed(trainer(tmp_path / "cut", repository, data, **settings), 3)
    again = trainer(tmp_path / "cut", repository, data, **settings)
    assert newest_checkpoint(tmp_path / "cut").name == "checkpoint-3"
    again.train(resume_from_checkpoint=str(newest_checkpoint(tmp_path / "cut")))
    assert again.state.global_step == 4
    assert changed(state_of(whole.backbone), state_of(again.backbone)) == set()


def test_training_lowers_the_loss_and_logs_what_it_did(tmp_path, repository, data):
    run = trainer(
        tmp_path, repository, data, max_steps=10, save_strategy="no", symmetric=True, matryoshka_dims=[16, 64]
    )
    run.train()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 10 and np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    names = set().union(*log)
    assert {"loss_texts", "loss_captions", "hits", "masked", "tokens", "chunks", "step_seconds", "grad_norm"} <= names
    assert max(entry["chunks"] for entry in log if "chunks" in entry) >= 2


def test_evaluation_and_the_best_checkpoint(tmp_path, repository, data):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 6}
    run = trainer(tmp_path, repository, data, eval_datasets={"held": data["captions"]}, **settings)
    run.train()
    scores = {e["step"]: e["eval_sequential_score"] for e in run.state.log_history if "eval_sequential_score" in e}
    assert set(scores) == {2, 4, 6}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert run.evaluate()["eval_sequential_score"] == pytest.approx(scores[best])
    held = run.state.log_history
    assert any("eval_held_cosine_ndcg@10" in entry for entry in held)
    task = run.evaluator.evaluators[0]
    assert len(task.corpus) == 8 and len(task.queries) == 8


def test_a_run_by_the_command_line(tmp_path, repository, data, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({"method": "contrastive", "model": str(repository), "train_datasets": data,
                                      "output_dir": str(tmp_path / "run"), **SETTINGS}))  # fmt: skip
    assert main(["train", "--config", str(recipe), "--max_steps", "2"]) == 0
    assert "gated delta" in capsys.readouterr().err
    assert main(["train", "--config", str(recipe), "--max_steps", "4"]) == 0
    assert "going on from" in capsys.readouterr().err
    final = tmp_path / "run" / "final"
    record = json.loads((final / "training.json").read_text())
    assert record["step"] == 4 and record["datasets"] == {"texts": 8, "captions": 10}
    assert str(tmp_path) not in (final / "training.json").read_text() + (final / "README.md").read_text()
    embedder = SentenceTransformer(str(final), trust_remote_code=True, device="cpu")
    untrained = SentenceTransformer(str(repository), trust_remote_code=True, device="cpu")
    texts = ["red is colour number 0", "a picture"]
    assert not np.allclose(embedder.encode(texts), untrained.encode(texts), atol=1e-3)
    untrained.load_adapter(str(tmp_path / "run" / "adapter"))
    assert np.allclose(embedder.encode(texts), untrained.encode(texts), atol=1e-4)
    assert main(["train", "--config", str(recipe), "--publish", str(tmp_path / "p")]) == 1


def test_a_full_run_exports_what_it_trained(tmp_path, repository, data):
    run = trainer(tmp_path, repository, data, tuning="full", max_steps=1, save_strategy="no")
    run.train()
    final = run.export_final()
    embedder = SentenceTransformer(str(final), trust_remote_code=True, device="cpu")
    assert changed(state_of(run.backbone), embedder[0].model.state_dict()) == set()
    assert not (tmp_path / "adapter").exists()


def test_objectives_are_called_logged_and_saved(tmp_path, repository, data):
    args = config(tmp_path, repository, data, tuning="full", train_router=True, max_steps=2)
    run = build_trainer(args)
    objective, idle = BalanceObjective(), BalanceObjective()
    idle.active = False
    run.objectives = [objective, idle]
    run.train()
    assert objective.calls[0] == "begin" and idle.calls == []
    assert all(entry["balance"] == 1.0 for entry in run.state.log_history if "loss" in entry)
    states = torch.load(tmp_path / "checkpoint-2" / "objectives.pt")
    assert states[0] == {"seen": objective.tokens}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_stops_the_run_and_names_it(tmp_path, repository, workers):
    rows = [{"query": f"q{n}", "positive": f"p{n}"} for n in range(16)]
    rows[11]["positive"] = None
    given = {"d": {"path": "json", "data_files": str(write_jsonl(tmp_path / "x.jsonl", rows))}}
    run = trainer(tmp_path / "run", repository, given, dataloader_num_workers=workers)
    with pytest.raises(RowError, match=r"^data set 'd', row 11: the positive is empty"):
        run.train()


def test_a_loss_that_is_no_number_stops_the_run_before_the_weights_change(tmp_path, repository, data):
    run = trainer(tmp_path, repository, data, max_steps=6)
    embed, after = run.embed, {}

    def spoiled(*args):
        embedded = embed(*args)
        if run.state.global_step == 3:
            after.setdefault("weights", state_of(run.backbone))
            embedded.vectors = embedded.vectors * torch.nan
        return embedded

    run.embed = spoiled
    with pytest.raises(ContrastiveError, match=r"step 4: the loss is nan on rows of .*checkpoint-2.*learning_rate"):
        run.train()
    assert changed(after["weights"], state_of(run.backbone)) == set()
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_full_disk_leaves_the_checkpoints_that_are_there(tmp_path, repository, data):
    run = trainer(tmp_path, repository, data, save_total_limit=1)
    write = contrastive_checkpoint.write_checkpoint_folder
    written, soft = [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def second_is_too_much(trainer, super_save):
        if trainer.state.global_step == 4:
            written.append({f.name: f.read_bytes() for f in (tmp_path / "checkpoint-2").iterdir()})
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, soft[1]))
        try:
            write(trainer, super_save)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, soft)

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moemb.trainers.contrastive_trainer.write_checkpoint_folder", second_is_too_much)
            with pytest.raises(CheckpointWriteError, match=r"step 4: the checkpoint .*checkpoint-4.*MiB are free"):
                run.train()
    finally:
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "checkpoint-4").exists()
    assert {f.name: f.read_bytes() for f in (tmp_path / "checkpoint-2").iterdir()} == written[0]
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "batch_size=1"),
        ({"sub_batch_size": 3}, "sub_batch_size=3"),
        ({"per_device_train_batch_size": 4}, "contradicts batch_size=8"),
        ({"gradient_accumulation_steps": 2}, "adds no negatives"),
        ({"bf16": True}, "weights_dtype"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"hard_negatives": -1}, "hard_negatives=-1"),
        ({"matryoshka_dims": [8, 8]}, "matryoshka_dims"),
        ({"matryoshka_dims": [8], "matryoshka_weights": [1.0, 2.0]}, "matryoshka_weights"),
        ({"lora_targets": ["experts"]}, "experts"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"train_vision": True}, "train_vision"),
        ({"eval_strategy": "steps"}, "eval_datasets"),
        ({"model": ""}, "model is missing"),
        ({"train_datasets": {}}, "train_datasets is empty"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, changes, message):
    given = {"output_dir": str(tmp_path), "model": "x", "train_datasets": {"d": {}}, **SETTINGS, **changes}
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**given)


def test_lengths_beyond_the_vector_are_named(tmp_path, repository, data):
    with pytest.raises(ContrastiveError, match=r"matryoshka_dims=\[128\].*64 numbers"):
        trainer(tmp_path, repository, data, matryoshka_dims=[128])


def test_bf16_training_moves_small_steps(tmp_path, repository, data):
    """Updates that bfloat16 would round away add up in the masters."""
    run = trainer(tmp_path, repository, data, weights_dtype="bfloat16", learning_rate=1e-5, save_strategy="no")
    assert {p.dtype for p in run.backbone.parameters()} == {torch.bfloat16}
    run.train()
    assert all(master.dtype == torch.float32 for master in run.optimizer.optimizer.masters)
    assert os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "no"


@pytest.mark.parametrize("kind", ["id", "instruction"])
def test_routers_conditioned_on_the_task_are_trained_and_merged(tmp_path, repository, data, kind):
    settings = {"task_conditioning": kind, "task_conditioning_dim": 4, "task_id_dropout": 0.5, "max_steps": 3}
    run = trainer(tmp_path, repository, data, save_strategy="no", **settings)
    run.train()
    weights = {name: p for name, p in run.backbone.named_parameters() if "task_router" in name and p.requires_grad}
    assert len(weights) == 2 and all(weight.abs().max() > 0 for weight in weights.values())
    merged = MoEMBModel.from_pretrained(run.export_final()).eval()
    assert merged.config.task_conditioning["kind"] == kind
    batch = next(iter(run.get_train_dataloader()))["batch"]
    if kind == "id":
        batch.router_task = run.router_tasks(torch.tensor([item.task for item in batch.items]))
    else:
        assert any(item.instructed.any() for item in batch.items)
    run.model.eval()
    with torch.no_grad():
        vectors = run.embed(run.model, batch, range(len(batch.items))).vectors
        inputs = model_inputs(batch.items, run.encoder.normalisations, torch.device("cpu"))
        if kind == "id":
            inputs["router_task"] = batch.router_task
        expected = merged(**inputs, pooled_only=True).pooler_output
    assert torch.allclose(vectors, torch.nn.functional.normalize(expected, dim=-1), atol=1e-4)
    processor = json.loads((tmp_path / "final" / "processor_config.json").read_text())
    assert processor["embedding"].get("instruction_mask", False) == (kind == "instruction")
