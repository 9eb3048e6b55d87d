"""The plan of a training's memory: against what a process takes, and against sums made by hand."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml

from modeling_moemb import use_kernels
from moemb.trainers import cli
from moemb.trainers.plan import PlanError, make_plan, read_architecture, read_settings
from moemb.trainers.plan_activations import ChunkMemory, LiveBytes
from moemb.trainers.plan_memory import Layout, gibibytes, model_sizes, plan_memory

from .contrastive_runs import SETTINGS, config, small_repository, write_jsonl
from .pruning_repository import write_repository


ROOT = Path(__file__).parents[2]
LARGE = {"qwen3.5-35b-a3b": (34.66e9, 2048), "qwen3.5-122b-a10b": (122.11e9, 3072)}
CHUNK = ChunkMemory(decoder=1000.0, vision=10.0, vision_trained=False, exchange=100.0, adapter_bytes=4)


def flags(recipe: Path, **given) -> Namespace:
    usual = {"devices": None, "device_memory": 80.0, "ep_size": None, "architecture": None, "json": None}
    return Namespace(**{**usual, "config": str(recipe), "overrides": [], **given})


@pytest.fixture(scope="module")
def repository(tmp_path_factory, tiny_settings):
    return small_repository(tmp_path_factory.mktemp("plan") / "tiny", tiny_settings)


@pytest.fixture
def recipe(tmp_path, repository):
    """A recipe of the tiny model; its data need not be there."""
    path = tmp_path / "recipe.yaml"
    data = {"pairs": {"path": "json", "data_files": "absent.jsonl"}}
    settings = {**SETTINGS, "method": "contrastive", "model": str(repository), "train_datasets": data}
    path.write_text(yaml.safe_dump({**settings, "output_dir": str(tmp_path / "run")}))
    return path


def test_live_bytes_counts_what_is_alive():
    given = torch.zeros(1000)
    with LiveBytes() as live:
        first = torch.ones(256)  # 1 KiB
        view = first[:10]
        assert live.live == 1024
        second = given + 1.0
        assert live.live == 1024 + 4000
        del second
        third = torch.ones(128)
        assert live.live == 1024 + 512
    assert live.peak == 1024 + 4000
    assert len(view) + len(third) == 138


class TestParts:
    """Every figure of the tiny model, from its tensors."""

    def plan(self, repository, tmp_path, layout, **changes):
        args = config(tmp_path, repository, {"pairs": {}}, **changes)
        settings = read_architecture(flags(tmp_path / "r.yaml", architecture=repository / "config.json"), args)[1]
        sizes = model_sizes(settings, args)
        return sizes, plan_memory(sizes, CHUNK, args, layout)

    def test_full_tuning_in_one_process(self, repository, tmp_path):
        from safetensors.torch import load_file

        weights = load_file(repository / "model.safetensors")
        total = sum(value.numel() for value in weights.values())
        trained = sum(
            value.numel()
            for name, value in weights.items()
            if not name.startswith("visual.") and ".mlp.gate." not in name and "shared_expert_gate" not in name
        )
        sizes, plan = self.plan(repository, tmp_path, Layout(1, "ddp"), tuning="full")
        largest = max(value.numel() for name, value in weights.items() if not name.startswith("visual."))
        assert (sizes.total, sizes.trained, sizes.largest) == (total, trained, largest)
        assert plan["weights"] == 4 * total and plan["optimizer"] == 12 * trained and plan["gathered"] == 0
        assert plan["gradients"] == 4 * (trained + largest)
        assert plan["activations"] == 1000 * 96
        assert plan["peak"] == plan["weights"] + plan["optimizer"] + plan["gradients"] + plan["activations"]

    def test_bfloat16_weights_keep_float32_masters(self, repository, tmp_path):
        sizes, plan = self.plan(repository, tmp_path, Layout(1, "ddp"), tuning="full", weights_dtype="bfloat16")
        assert plan["weights"] == 2 * sizes.total and plan["optimizer"] == 12 * sizes.trained
        assert plan["gradients"] == 4 * sizes.trained

    def test_weights_are_spread_and_adapters_are_not(self, repository, tmp_path):
        sizes, plan = self.plan(repository, tmp_path, Layout(8, "fsdp2"), batch_size=16)
        assert plan["weights"] == 4 * sizes.total / 8 + 4 * sizes.adapters
        assert plan["optimizer"] == 12 * sizes.adapters == 12 * sizes.trained
        _, full = self.plan(repository, tmp_path, Layout(8, "fsdp2"), batch_size=16, tuning="full")
        assert full["optimizer"] < 12 * sizes.total / 8

    def test_experts_that_stay_are_not_put_together(self, repository, tmp_path):
        sizes, spread = self.plan(repository, tmp_path, Layout(4, "fsdp2"))
        _, shared = self.plan(repository, tmp_path, Layout(4, "fsdp2+ep", 4))
        _, copies = self.plan(repository, tmp_path, Layout(4, "fsdp2+ep", 2))
        assert spread["gathered"] - shared["gathered"] == 3 * 4 * sizes.layer_experts
        assert copies["gathered"] - shared["gathered"] == 3 * 4 * sizes.layer_experts / 2
        assert shared["activations"] - spread["activations"] == 100 * 96

    def test_negatives_are_those_of_all_processes(self, repository, tmp_path):
        pairs = {"batch_size": 512, "hard_negatives": 1}
        _, gathered = self.plan(repository, tmp_path, Layout(8, "ddp"), **pairs)
        _, alone = self.plan(repository, tmp_path, Layout(8, "ddp"), gather_across_devices=False, **pairs)
        assert gathered["negatives"] > 512 * 1024 * 12 > alone["negatives"] > 64 * 128 * 12


@pytest.mark.parametrize("folder", LARGE)
def test_the_large_models_are_counted(folder, tmp_path):
    """34.66 and 122.11 billion with a head of the vocabulary's size that an embedder does not have, and no vision."""
    path = ROOT / "recipes" / folder / "contrastive.yaml"
    settings, on_cpu = read_settings(str(path), ["--output_dir", str(tmp_path)])
    source, architecture = read_architecture(flags(path), settings)
    sizes = model_sizes(architecture, settings)
    published, hidden = LARGE[folder]
    vision = sizes.total - (published - 248320 * hidden)
    assert Path(source).name == "architecture.yaml" and not on_cpu
    assert sizes.width == hidden and sizes.table == 248320 * hidden
    assert 0.4e9 < vision < 0.5e9
    assert 0 < sizes.trained < 0.01 * sizes.total


class TestCommand:
    def test_table_and_file(self, recipe, tmp_path, capsys):
        out = tmp_path / "plans" / "plan.json"
        command = ["plan", "--config", str(recipe), "--devices", "1", "4", "--json", str(out), "--tuning", "full"]
        assert cli.main(command) == 0
        text = capsys.readouterr().out
        report = json.loads(out.read_text())
        kinds = [(row["devices"], row["kind"], row["ep_size"]) for row in report["rows"]]
        assert kinds == [(1, "ddp", 1), (4, "ddp", 1), (4, "fsdp2", 1), (4, "fsdp2+ep", 4)]
        for row in report["rows"]:
            assert row["fits"] and 0 < row["weights"] < row["peak"]
            assert gibibytes(row["peak"]) in text
        assert "fsdp2, ep 4" in text and report["refused"] is None
        assert report["rows"][2]["weights"] == report["rows"][0]["weights"] / 4

    def test_a_device_that_is_too_small(self, recipe):
        report = make_plan(flags(recipe, devices=[1], device_memory=1e-4))
        assert not report["rows"][0]["fits"]

    def test_what_cannot_be_spread_is_planned_for_ddp_alone(self, recipe, capsys):
        assert cli.main(["plan", "--config", str(recipe), "--devices", "2", "--lora_expert_rank", "2"]) == 0
        text = capsys.readouterr().out
        assert "Only DDP: lora_expert_rank=2" in text and "fsdp2" not in text

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"devices": [3]}, "--devices 3: batch_size=8 must be a multiple"),
            ({"device_memory": 0.0}, "--device-memory 0"),
            ({"architecture": "absent.json"}, "not at absent.json"),
            ({"overrides": ["--method", "grpo"]}, "a plan is made for 'method: contrastive'"),
            ({"overrides": ["--model", "some/where"]}, "the architecture of 'some/where' is not at"),
        ],
    )
    def test_mistakes(self, recipe, changes, message):
        with pytest.raises(PlanError, match=message):
            make_plan(flags(recipe, **changes))

    def test_a_file_that_is_no_architecture(self, recipe, tmp_path):
        (tmp_path / "wrong.json").write_text('{"text_config": {"num_hidden_layers": "many"}}')
        with pytest.raises(PlanError, match="wrong.json is not the configuration"):
            make_plan(flags(recipe, architecture=str(tmp_path / "wrong.json")))


WIDE = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
TRAININGS = {
    "full": {"tuning": "full", "mini_batch_tokens": 2048},
    "lora, blocks run again": {"lora_rank": 16, "gradient_checkpointing": True, "mini_batch_tokens": 4096},
}


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_a_plan_agrees_with_what_a_process_takes(tmp_path, tiny_settings, repository, training, monkeypatch):
    """Within 15 %: what a step adds to a process' resident memory, and the plan's peak."""
    wide = {**tiny_settings, "text_config": tiny_settings["text_config"] | WIDE}
    wide["vision_config"] = tiny_settings["vision_config"] | {"out_hidden_size": 256}
    model = write_repository(tmp_path / "wide", wide)
    rows = [{"query": f"which word is {n} " * 6, "positive": f"the word {n} is meant " * 6} for n in range(128)]
    data = {"pairs": {"path": "json", "data_files": str(write_jsonl(tmp_path / "pairs.jsonl", rows))}}
    usual = {**SETTINGS, "save_strategy": "no", "train_datasets": data, "batch_size": 32, "hard_negatives": 0}
    usual |= {"max_steps": 1, "lora_alpha": 32, **TRAININGS[training]}
    warm, given = tmp_path / "warm.yaml", tmp_path / "given.yaml"
    small = {"batch_size": 8, "mini_batch_tokens": 512, "output_dir": str(tmp_path / "w"), "model": str(repository)}
    warm.write_text(yaml.safe_dump({**usual, **small}))
    given.write_text(yaml.safe_dump({**usual, "output_dir": str(tmp_path / "run"), "model": str(model)}))
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MOEMB_KERNELS": "off",
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1",  # freed memory goes back at once
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.trainers.plan_worker", *map(str, (warm, given, tmp_path / "out"))]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=500)
    measured = json.loads((tmp_path / "out").read_text())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(given.read_text() + "method: contrastive\n")
    with monkeypatch.context() as patched:
        patched.setenv("MOEMB_KERNELS", "off")
        planned = make_plan(flags(recipe, devices=[1]))["rows"][0]
    use_kernels(None)  # what the variable said was kept
    assert measured > 100e6
    assert planned["peak"] == pytest.approx(measured, rel=0.15), planned
