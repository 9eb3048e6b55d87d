"""The recipes of the large models hold the paper's protocol and parse; accelerate takes its configuration."""

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


def test_accelerate_takes_its_configuration():
    config = load_config_from_file(str(RECIPES / "accelerate/ddp.yaml"))
    assert (str(config.distributed_type.value), config.num_processes) == ("MULTI_GPU", 8)
    assert config.mixed_precision == "no"  # the recipe's weights_dtype decides
