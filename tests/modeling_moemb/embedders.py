"""A tiny model with a processor, and items of every kind to embed."""

import numpy as np
import torch
from PIL import Image

from modeling_moemb import MoEMBConfig, MoEMBModel


def picture(height=64, width=64, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def some_items() -> list:
    clip = np.stack([picture(seed=index) for index in range(4)])
    return [
        "hello",
        "",
        {"text": "red", "image": picture()},
        {"video": clip, "text": "walk"},
        [picture(32, 32), "and", picture(40, 90)],
        Image.fromarray(picture(seed=3)),
        clip,
        "a longer text " * 9,
        [{"role": "system", "content": "own"}, {"role": "user", "content": "chat"}],
    ]


def build(tiny_settings, processor) -> MoEMBModel:
    text = tiny_settings["text_config"] | {"vocab_size": len(processor.tokenizer)}
    tokens = {
        "image_token_id": processor.image_token_id,
        "video_token_id": processor.video_token_id,
        "vision_start_token_id": processor.vision_start_token_id,
        "vision_end_token_id": processor.vision_end_token_id,
        "emb_token_id": processor.tokenizer.convert_tokens_to_ids("<emb>"),
    }
    torch.manual_seed(1)
    model = MoEMBModel(MoEMBConfig(**(tiny_settings | {"text_config": text} | tokens))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model
