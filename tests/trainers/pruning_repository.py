"""A small MoEMB repository whose experts differ, and items of every kind, for the tests of expert pruning."""

from pathlib import Path

import numpy as np
import torch

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers.calibration_data import CalibrationItem
from moemb.trainers.repository import assemble_repository
from tests.processors import lean_processor


EXPERTS, TOP_K, BLOCKS = 8, 2, 8


def pruning_config(tiny_settings: dict, processor) -> MoEMBConfig:
    """The tiny configuration with the token ids of a processor."""
    ids = processor.tokenizer.convert_tokens_to_ids
    tokens = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    return MoEMBConfig(**(tiny_settings | tokens), emb_token_id=ids("<emb>"))


def pruning_model(tiny_settings: dict, processor, seed: int = 0) -> MoEMBModel:
    """A model with weights large enough that experts and routers matter."""
    torch.manual_seed(seed)
    model = MoEMBModel(pruning_config(tiny_settings, processor))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    return model.eval()


def write_repository(folder: Path, tiny_settings: dict, seed: int = 0, **settings) -> Path:
    """Writes the repository of [`pruning_model`]; `settings` go into its configuration."""
    processor = lean_processor()
    model = pruning_model(tiny_settings, processor, seed)
    for name, value in settings.items():
        setattr(model.config, name, value)
    card = "---\nlicense: apache-2.0\n---\n# A tiny model\n"
    return assemble_repository(folder, model=model, processor=processor, card_text=card)


def calibration_items(count: int = 10, seed: int = 0) -> list[CalibrationItem]:
    """Texts, images, clips and pictures with a text; queries first."""
    rng = np.random.default_rng(seed)

    def pixels(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)

    items = []
    for number in range(count):
        value = [
            f"text number {number} " * (1 + number % 3),
            {"image": pixels(32, 48)},
            {"video": pixels(3, 32, 32)},
            {"image": pixels(64, 32), "text": "a caption"},
        ][number % 4]
        items.append(CalibrationItem(value, "query" if number < count // 3 else "document", f"{seed}-{number}"))
    return items
