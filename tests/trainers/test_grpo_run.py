"""`method: grpo` from recipe to repository, and the pairs it is trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBModel
from moemb.trainers import cli
from moemb.trainers.grpo_data import GRPODataError, as_dataset, corpus_sources, dataset_sources
from moemb.trainers.grpo_run import GRPORunConfig
from moemb.trainers.recipe import RecipeError, load_recipe
from moemb.trainers.repository import assemble_repository

from ..modeling_moemb.embedders import build, picture
from ..processors import lean_processor


RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("grpo.yaml"))
SETTINGS = {
    "method": "grpo", "gates": {"gradual": {}, "skip": {"blocks": [2, 5]}, "null": {"experts": 4, "blocks": [3]}},
    "saving_at_start": 0.2, "per_device_train_batch_size": 8, "num_generations": 2, "recall_k": 1, "max_steps": 2,
    "learning_rate": 1e-2, "save_steps": 1, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    processor = lean_processor(max_length=128)
    folder = tmp_path_factory.mktemp("grpo") / "model"
    prompts = {"prompts": {"query": "find: ", "document": ""}}
    return assemble_repository(
        folder, model=build(tiny_settings, processor), processor=processor, conventions=prompts, card_text="# Tiny\n"
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A data set of names and pictures on disk, as users have them."""
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for number in range(8):
        Image.fromarray(picture(48, 48, seed=number)).save(folder / f"{number}.png")
        rows.append({"name": f"picture {number}", "file": f"{number}.png"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "path": "json", "data_files": str(folder / "rows.jsonl"), "media_root": str(folder),
        "columns": {"query": "name", "positive": {"image": "file"}}, "query_instruction": "Find the picture.",
    }  # fmt: skip


def recipe(folder, repository, pictures, **changes):
    path = folder / "grpo.yaml"
    settings = {**SETTINGS, "init_from": str(repository), "output_dir": str(folder / "run"), **changes}
    settings.setdefault("train_datasets", {"pictures": pictures})
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_recipe_becomes_a_repository(tmp_path, repository, pictures):
    path = recipe(tmp_path, repository, pictures)
    assert cli.main(["train", "--config", str(path)]) == 0
    run = tmp_path / "run"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "flops_removed" in entry] == [1, 2]
    assert {"gates/gradual_rate", "gates/skip_rate", "gates/null_rate", "recall"} <= set(log[0])
    assert log[0]["gates/null_rate"] > 0 and log[0]["gates/gradual_rate"] == pytest.approx(0.2, abs=0.12)
    record = json.loads((run / "final" / "gates.json").read_text())
    assert record["method"] == "grpo" and record["step"] == 2
    final = MoEMBModel.from_pretrained(run / "final")
    assert set(final.config.adaptive_compute) == {"gradual_pruning", "expert_skip", "null_experts"}
    source = MoEMBModel.from_pretrained(repository)
    for name, parameter in source.named_parameters():
        assert torch.equal(parameter, final.get_parameter(name)), name
    embedder = SentenceTransformer(str(run / "final"), trust_remote_code=True, device="cpu")
    assert embedder.encode(["hello", picture()]).shape == (2, 64)
    # the same command goes on: with more steps from the last checkpoint
    assert cli.main(["train", "--config", str(path), "--max_steps", "3"]) == 0
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "flops_removed" in entry] == [1, 2, 3]


def test_adapters_are_merged_into_the_repository(tmp_path, repository, pictures):
    path = recipe(tmp_path, repository, pictures, lora_rank=2, lora_targets=["attention"], gates={"skip": {}})
    assert cli.main(["train", "--config", str(path), "--eval_datasets", json.dumps({"p": pictures}),
                     "--eval_strategy", "steps", "--eval_steps", "2"]) == 0  # fmt: skip
    source, final = (MoEMBModel.from_pretrained(folder) for folder in (repository, tmp_path / "run" / "final"))
    changed = {name for name, p in source.named_parameters() if not torch.equal(p, final.get_parameter(name))}
    assert changed and all(".self_attn." in name for name in changed)
    assert final.gates.skip is not None and final.config.adaptive_compute == {"expert_skip": {}}
    assert "Policy optimisation (GRPO)" in (tmp_path / "run" / "final" / "README.md").read_text()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert any("eval_greedy/recall" in entry for entry in log)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_every_recipe_can_be_read(path):
    (config,) = load_recipe(path, GRPORunConfig, extra_keys=("method",), overrides=["--use_cpu", "true"])
    assert config.gates and config.num_recalled < config.generation_batch_size // config.num_generations


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"train_datasets": {}}, "exactly one of corpus_pairs and train_datasets"),
        ({"corpus_pairs": {"emoji": 8}}, "exactly one of corpus_pairs and train_datasets"),
        ({"lora_rank": -1}, "lora_rank=-1: the least is 0"),
        ({"lora_targets": ["experts"]}, r"lora_targets has \['experts'\]"),
        ({"saving_at_start": 1.0}, "saving_at_start=1.0: use a probability"),
        ({"weights_dtype": "float16"}, "weights_dtype='float16'"),
        ({"reward": "margin"}, "unknown key 'reward'.*did you mean 'rewards'"),
    ],
)
def test_recipes_that_are_refused(tmp_path, repository, pictures, changes, match):
    path = recipe(tmp_path, repository, pictures, **changes)
    with pytest.raises(RecipeError, match=match):
        load_recipe(path, GRPORunConfig, extra_keys=("method",))


def test_pairs_of_the_corpus_are_right_and_each_item_stands_once(fake_corpus):
    (emoji, strip) = corpus_sources(fake_corpus, {"emoji": 20, "strip": 8}, seed=0)
    assert len(emoji) == 20 and len(strip) == 8
    again = corpus_sources(fake_corpus, {"emoji": 20}, seed=0)[0]
    assert [row["prompt"] for row in again if isinstance(row["prompt"], str)] == [
        row["prompt"] for row in emoji if isinstance(row["prompt"], str)
    ]
    assert all(row["source"] == "strip" and isinstance(row["prompt"], (str, dict)) for row in strip)
    with pytest.raises(GRPODataError, match="corpus_pairs has 'emojis'; did you mean 'emoji'"):
        corpus_sources(fake_corpus, {"emojis": 3}, seed=0)
    with pytest.raises(GRPODataError, match=r"corpus_pairs\['emoji'\] is 0"):
        corpus_sources(fake_corpus, {"emoji": 0}, seed=0)


def test_batches_hold_one_source_in_the_share_of_its_weight():
    sources = [[{"prompt": f"{name}{number}", "positive": "x"} for number in range(24)] for name in "ab"]
    data = as_dataset(sources, [3.0, 1.0], batch=4, seed=1)
    kinds = [{row["prompt"][0] for row in data.select(range(start, start + 4))} for start in range(0, len(data), 4)]
    assert all(len(kind) == 1 for kind in kinds)
    assert sorted(map(min, kinds)) == ["a"] * 9 + ["b"] * 3
    first = [row["prompt"] for row in data if row["prompt"].startswith("b")]
    assert len(set(first)) == 12  # nothing twice before everything was there once
    assert [row["prompt"] for row in as_dataset(sources, [3.0, 1.0], 4, 1)] == [row["prompt"] for row in data]
    with pytest.raises(GRPODataError, match="source 1 has 24 pairs, but a generation batch holds 30"):
        as_dataset([sources[0] * 2, sources[1]], [1.0, 1.0], batch=30, seed=0)


def test_rows_of_data_sets_carry_their_instruction(pictures):
    (rows,), weights = dataset_sources({"pictures": {**pictures, "weight": 2.0}})
    assert weights == [2.0] and len(rows) == 8
    row = rows[3]
    assert row["prompt_instruction"] == "Find the picture." and row["positive_instruction"] is None
    inputs = lean_processor(max_length=128)([row["positive"], row["prompt"]])
    assert inputs["image_grid_thw"].shape == (1, 3) and np.prod(inputs["image_grid_thw"].tolist()) > 0
