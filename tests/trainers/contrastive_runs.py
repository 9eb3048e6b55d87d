"""Small data sets, a small model repository and settings for the tests of contrastive training."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
from PIL import Image

from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_trainer import ContrastiveTrainer, build_trainer
from moemb.trainers.router_settings import RouterSettings

from .pruning_repository import write_repository


COLOURS = ("red", "green", "blue", "white", "black", "yellow", "orange", "purple")
SETTINGS = {
    "batch_size": 8, "sub_batch_size": 4, "mini_batch_tokens": 96, "scale": 20.0, "weights_dtype": "float32",
    "lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2, "warmup_steps": 1, "max_steps": 4, "logging_steps": 1,
    "save_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "hard_negatives": 2,
}  # fmt: skip


def small_repository(folder: Path, tiny_settings: dict, **settings) -> Path:
    """The tests' tiny model with two blocks, one of each kind."""
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    text = tiny_settings["text_config"] | kinds
    return write_repository(folder, tiny_settings | {"text_config": text}, **settings)


def write_pictures(folder: Path, count: int = 8) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (32 + 8 * number, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names.append(f"{number}.png")
    return names


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(folder: Path) -> dict[str, dict]:
    """Text pairs with hard negatives of varying number, and captions of pictures, as a recipe names them."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        {"query": f"what is {word} {n}", "positive": f"{word} is colour number {n} " + "of them " * (n % 5),
         "negatives": [f"not {word}", f"{word} never {n}"][: 1 + n % 2]}
        for n, word in enumerate(COLOURS)
    ]  # fmt: skip
    pictures = write_pictures(folder / "pictures")
    captions = [{"caption": f"picture {n % 8}", "file": pictures[n % 8], "about": n % 8} for n in range(10)]
    write_jsonl(folder / "texts.jsonl", texts)
    write_jsonl(folder / "captions.jsonl", captions)
    return {
        "texts": {"path": "json", "data_files": str(folder / "texts.jsonl")},
        "captions": {
            "path": "json",
            "data_files": str(folder / "captions.jsonl"),
            "columns": {"query": "caption", "positive": {"image": "file"}, "key": "about"},
            "media_root": str(folder / "pictures"),
            "query_instruction": "Find the picture.",
        },
    }


def config(output: Path, repository: Path, data: dict, **changes) -> ContrastiveConfig:
    return ContrastiveConfig(
        output_dir=str(output), model=str(repository), train_datasets=data, **{**SETTINGS, **changes}
    )


def trainer(output: Path, repository: Path, data: dict, **changes) -> ContrastiveTrainer:
    """A trainer; settings of the routers may be among the changes."""
    router = {field.name: changes.pop(field.name) for field in fields(RouterSettings) if field.name in changes}
    return build_trainer(config(output, repository, data, **changes), RouterSettings(**router))


def state_of(model) -> dict:
    """A copy of a model's weights by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
