"""The recipes of the large models hold the paper's protocol and parse; accelerate takes its configuration."""

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_sources import dataset_settings
from moemb.trainers.recipe import load_recipe
from moemb.trainers.router_settings import RouterSettings


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(("folder", "rate"), [("qwen3.5-35b-a3b", 1e-4), ("qwen3.5-122b-a10b", 5e-5)])
def test_the_papers_protocol(folder, rate, tmp_path):
    overrides = ["--output_dir", str(tmp_path), "--use_cpu", "true"]
    path = RECIPES / folder / "contrastive.yaml"
    config, router = load_recipe(path, ContrastiveConfig, RouterSettings, overrides=overrides, extra_keys=("method",))
    assert (config.num_train_epochs, config.max_length, config.batch_size) == (2, 8192, 512)
    assert (config.learning_rate, config.warmup_steps, str(config.lr_scheduler_type.value)) == (rate, 10, "cosine")
    assert (config.scale, config.weights_dtype, config.tuning) == (50.0, "bfloat16", "lora")
    assert (config.lora_rank, config.lora_alpha, config.train_router, config.train_vision) == (64, 128, False, False)
    assert router == RouterSettings()
    settings = [dataset_settings(name, values) for name, values in config.train_datasets.items()]
    assert len({entry.name for entry in settings}) == 20
    assert {entry.layout for entry in settings} == {"mmeb"}


@pytest.mark.parametrize(
    ("name", "machines", "processes"),
    [("ddp", 1, 8), ("fsdp2", 1, 8), ("fsdp2-ep", 2, 16)],
    ids=lambda value: str(value),
)
def test_accelerate_takes_its_configuration(name, machines, processes):
    config = load_config_from_file(str(RECIPES / f"accelerate/{name}.yaml"))
    assert (str(config.distributed_type.value), config.num_processes) == ("MULTI_GPU", processes)
    assert config.num_machines == machines
    assert config.mixed_precision == "no"  # the recipe's weights_dtype decides


@pytest.mark.parametrize(("name", "processes"), [("fsdp2", 8), ("fsdp2-ep", 16)])
def test_the_sizes_named_beside_them_are_possible(name, processes, tmp_path, monkeypatch):
    """The command in the file's head, as one of its processes reads it."""
    text = (RECIPES / f"accelerate/{name}.yaml").read_text()
    sizes = re.search(r"--distributed '(.*)'", text).group(1)
    monkeypatch.setattr(ContrastiveConfig, "world_size", processes)
    overrides = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--distributed", sizes]
    path = RECIPES / "qwen3.5-35b-a3b/contrastive.yaml"
    config, _ = load_recipe(path, ContrastiveConfig, RouterSettings, overrides=overrides, extra_keys=("method",))
    assert config.distributed == {"fsdp_size": processes, "ep_size": 8 if "ep" in name else 1}
