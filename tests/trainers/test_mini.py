"""The shipped moemb-mini: its learned weights in transformers' own model give the same vectors."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from modeling_moemb import MoEMBModel, MoEMBProcessor
from moemb.trainers.corpus_gallery import load_gallery


CHECKPOINT = Path(__file__).parents[2] / "recipes" / "moemb-mini" / "checkpoint"


def items() -> list:
    gallery = load_gallery()
    pictures = [document["image"] for document in gallery.task("emoji-artist").documents[:12]]
    clip = gallery.task("clip").documents[0]
    texts = ["red apple", "犬", "a small green animal that lives in trees and sings at night"]
    return [
        *pictures,
        *texts,
        {"image": pictures[0], "text": "dark skin tone"},
        [pictures[1], "and", pictures[2]],
        clip,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_weights_embed_as_in_transformers(dtype):
    processor = MoEMBProcessor.from_pretrained(CHECKPOINT)
    ours = MoEMBModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    config = ours.config
    stock = Qwen3_5MoeModel(
        Qwen3_5MoeConfig(
            text_config=config.text_config.to_dict(),
            vision_config=config.vision_config.to_dict(),
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            vision_end_token_id=config.vision_end_token_id,
        )
    ).eval()
    stock.load_state_dict(ours.state_dict())
    ours, stock = ours.to(dtype), stock.to(dtype)
    cosines = []
    for item in items():
        inputs = processor([item])
        with torch.no_grad():
            theirs = F.normalize(stock(**inputs).last_hidden_state[:, -1].float(), dim=-1)
            mine = F.normalize(ours(**inputs).pooler_output.float(), dim=-1)
        if dtype == torch.float32:
            assert (mine - theirs).abs().max() <= 1e-5
        cosines.append(float((mine * theirs).sum()))
    # in bfloat16 two experts that weigh the same to within rounding may change places in a token of some item
    far = [cosine for cosine in cosines if cosine < 0.9999]
    assert len(far) <= (0 if dtype == torch.float32 else len(cosines) // 10) and min(cosines) >= 0.999, far


def test_the_checkpoint_is_small_and_learned_to_use_its_experts():
    weights = CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size < 25_000_000
    model = MoEMBModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    processor = MoEMBProcessor.from_pretrained(CHECKPOINT)
    with torch.no_grad():
        logits = model(**processor(items()), output_router_logits=True).router_logits
    top_k, experts = model.config.text_config.num_experts_per_tok, model.config.text_config.num_experts
    for layer in logits[:-1]:
        used = layer.topk(top_k, dim=-1).indices.unique().numel()
        assert used >= experts // 2
