"""`moemb train` with `method: adaptive` on data sets and the corpus, the repositories it writes, and its recipes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBModel, MoEMBProcessor
from modeling_moemb.gates_moemb import attach_gates
from moemb.trainers.adaptive_config import AdaptiveConfig
from moemb.trainers.adaptive_data import AdaptiveDataError, CorpusData, PairData
from moemb.trainers.cli import main
from moemb.trainers.gate_repository import GateRepositoryError, write_with_gates
from moemb.trainers.recipe import load_recipe, read_recipe

from .contrastive_runs import write_data, write_jsonl
from .pruning_repository import write_repository


ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted((ROOT / "moemb-mini" / "adaptive").glob("*.yaml")) + sorted(ROOT.glob("qwen3.5-*/adaptive.yaml"))
SETTINGS = {
    "method": "adaptive", "gates": {"keep": {"layer": 2, "width": 8}, "skip": {}}, "max_steps": 4, "use_cpu": True,
    "weights_dtype": "float32", "learning_rate": 1e-2, "logging_steps": 2, "report_to": "none", "batch_pairs": 6,
    "disable_tqdm": True, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "targets": {"keep": 0.5, "skip": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    text = tiny_settings["text_config"] | {"num_hidden_layers": 4}
    return write_repository(tmp_path_factory.mktemp("model") / "tiny", tiny_settings | {"text_config": text})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def recipe(folder, **changes):
    path = folder / "adaptive.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "output_dir": str(folder / "run"), **changes}))
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, repository, data):
    """A finished run on data sets, and its repository."""
    folder = tmp_path_factory.mktemp("trained")
    given = {"train_datasets": data, "eval_datasets": {"captions": data["captions"]}, "init_from": str(repository)}
    assert main(["train", "--config", recipe(folder, **given)]) == 0
    return folder / "run"


def test_a_run_on_data_sets_writes_a_repository(trained, repository):
    """Loaded as users load it, the gates are at work; the weights of the backbone are those of the source."""
    final = trained / "final"
    encoder = SentenceTransformer(str(final), trust_remote_code=True, device="cpu")
    model = encoder[0].model
    assert set(model.config.adaptive_compute) == {"token_pruning", "expert_skip"}
    assert all(bool(parameter.isfinite().all()) for parameter in model.gates.parameters())
    picture = {"image": np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)}
    plain = SentenceTransformer(str(repository), trust_remote_code=True, device="cpu")
    ours = encoder.encode([picture], adaptive_compute={})
    assert np.array_equal(ours, plain.encode([picture]))
    source = MoEMBModel.from_pretrained(repository).state_dict()
    written = MoEMBModel.from_pretrained(final).state_dict()
    assert {name for name in written if name not in source} == {n for n in written if n.startswith("gates.")}
    assert all(torch.equal(written[name], source[name]) for name in source)
    shard = final / "model-00001-of-00001.safetensors"
    assert shard.stat().st_ino == (repository / "model.safetensors").stat().st_ino  # linked, not copied
    record = json.loads((final / "gates.json").read_text())
    assert record["step"] == 4 and record["targets"] == SETTINGS["targets"]
    entries = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert any("eval_captions_r1" in entry for entry in entries) and (trained / "best" / "gates.json").is_file()


def test_checkpoints_hold_the_gates_alone_and_the_run_goes_on(trained, tmp_path, repository, data):
    names = {path.name for path in (trained / "checkpoint-4").iterdir()}
    assert "gates.safetensors" in names and not names & {"model.safetensors", "pytorch_model.bin"}
    given = {"train_datasets": data, "eval_datasets": {"captions": data["captions"]}, "init_from": str(repository)}
    first = recipe(tmp_path, **given)
    assert main(["train", "--config", first, "--max_steps", "4", "--max_minutes", "1e-9"]) == 0
    assert not (tmp_path / "run" / "checkpoint-4").is_dir() and (tmp_path / "run" / "checkpoint-1").is_dir()
    assert main(["train", "--config", first]) == 0
    gates = [MoEMBModel.from_pretrained(run / "final").gates.state_dict() for run in (trained, tmp_path / "run")]
    assert all(torch.equal(gates[0][name], gates[1][name]) for name in gates[0])


def test_gates_are_added_to_a_repository_that_has_some(trained, tmp_path):
    model = MoEMBModel.from_pretrained(trained / "final")
    attach_gates(model, {"null": {"experts": 4}})
    again = MoEMBModel.from_pretrained(write_with_gates(trained / "final", tmp_path / "two", model, {}))
    assert list(again.config.gates) == ["keep", "skip", "null"]
    with pytest.raises(GateRepositoryError, match="write to another folder"):
        write_with_gates(trained / "final", trained / "final", model, {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(GateRepositoryError, match="is it a model repository"):
        write_with_gates(tmp_path / "empty", tmp_path / "three", model, {})


def test_pairs_know_what_is_right(repository, tmp_path):
    """Equal documents, and rows of one key, are right for each other's queries."""
    rows = [
        {"query": f"which {n}", "positive": f"answer {n % 5}", "about": "x" if n in (0, 6) else n} for n in range(8)
    ]
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "about": str(row["about"])} for row in rows])
    columns = {"query": "query", "positive": "positive", "key": "about"}
    given = {"rows": {"path": "json", "data_files": str(tmp_path / "rows.jsonl"), "columns": columns}}
    source = PairData(MoEMBProcessor.from_pretrained(repository), given, {}, 8)
    batch = source.batch(3)
    (pairs,) = batch.pairs
    assert torch.equal(source.batch(3).inputs["input_ids"], batch.inputs["input_ids"])
    assert not torch.equal(source.batch(4).inputs["input_ids"][:, :20], batch.inputs["input_ids"][:, :20])
    assert pairs.right.shape == (8, 5) and len(batch.inputs["cu_seq_lens_q"]) == 8 + 5 + 1
    # seven rows have one right answer; rows 0 and 6 (answers 0 and 1) have each other's, too
    assert sorted(pairs.right.sum(1).tolist()) == [1] * 6 + [2] * 2
    vectors = torch.zeros(13, 5)
    vectors[pairs.documents] = torch.eye(5)
    vectors[pairs.queries] = pairs.right.float()
    wrong = vectors.clone()
    wrong[pairs.queries] = wrong[pairs.queries].roll(2, 1)
    assert bool(pairs.recall(vectors).all()) and not bool(pairs.recall(wrong).any())
    assert float(pairs.loss(vectors, 50.0)) < 1 < float(pairs.loss(wrong, 50.0))


def test_a_run_on_the_corpus(tmp_path, fake_corpus, fake_tokenizer, monkeypatch, tiny_config):
    monkeypatch.setattr("moemb.trainers.corpus.load_corpus", lambda path: fake_corpus)
    source = CorpusData(fake_corpus, fake_tokenizer, tiny_config, {"emoji": {"chunk": 4}, "motion": {"chunk": 8}})
    batch = source.batch(1)
    assert {"pixel_values", "pixel_values_videos"} <= set(batch.inputs)
    assert all(bool(pairs.right.any()) for pairs in batch.pairs)
    items = len(batch.inputs["cu_seq_lens_q"]) - 1
    assert max(int(pairs.documents.max()) for pairs in batch.pairs) == items - 1
    with pytest.raises(AdaptiveDataError, match="has 'emojis'"):
        CorpusData(fake_corpus, fake_tokenizer, tiny_config, {"emojis": {}})
    with pytest.raises(AdaptiveDataError, match="holds rate, and chunk"):
        CorpusData(fake_corpus, fake_tokenizer, tiny_config, {"emoji": {"size": 3}})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_are_valid(path):
    if path.stem == "study":
        from moemb.trainers.study import StudyConfig

        (study,) = load_recipe(path, StudyConfig)
        for run in study.runs.values():
            if read_recipe(path.parent / run.recipe)["method"] != "adaptive":
                continue
            words = [word for key, value in run.changes.items() for word in (f"--{key}", json.dumps(value))]
            load_recipe(path.parent / run.recipe, AdaptiveConfig, overrides=words, extra_keys=("method",))
        return
    (config,) = load_recipe(path, AdaptiveConfig, extra_keys=("method",))
    assert config.max_steps >= 100 and config.gates


def test_a_batch_without_anything_to_save_on_is_no_error(tmp_path, repository, data):
    given = {"train_datasets": {"texts": data["texts"]}, "init_from": str(repository), "eval_strategy": "no"}
    path = recipe(tmp_path, gates={"keep": {"layer": 2, "width": 8}}, targets={"keep": 0.5}, **given)
    assert main(["train", "--config", path, "--max_steps", "2"]) == 0
    gates = MoEMBModel.from_pretrained(tmp_path / "run" / "final").gates
    assert not gates.keep.head.weight.any()


def test_publishing_is_refused(tmp_path, capsys, data):
    path = recipe(tmp_path, train_datasets=data, init_from="x")
    assert main(["train", "--config", path, "--publish", str(tmp_path / "t")]) == 1
    assert "is a repository already" in capsys.readouterr().err
