"""Random models of real widths for whole-model benchmarks: transformers' own and ours, on the very same weights."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5MoeConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.compute_moemb import ItemShape
from modeling_moemb.pretrained_moemb import decay_bias

from .benchmark_operations import DTYPES


VOCABULARY = 8192  # embedding rows are looked up, not computed: a large table would only cost memory
TEXT_IDS = VOCABULARY - 64
IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID, EMB_ID = range(VOCABULARY - 5, VOCABULARY)
PATCH, TEMPORAL, MERGE = 16, 2, 2
PATCH_DIM = 3 * TEMPORAL * PATCH * PATCH

# blocks are 3 Gated DeltaNet to 1 attention; `true` has the widths of Qwen3.5-35B-A3B's blocks
_SHAPES = {
    "tiny": {
        "hidden": 64, "experts": 8, "slots": 2, "inner": 32, "key_heads": 2, "value_heads": 4, "delta_dim": 64,
        "heads": 4, "kv_heads": 2, "dim": 64, "vision": 32, "vision_depth": 1,
    },
    "text": {
        "hidden": 1024, "experts": 64, "slots": 8, "inner": 512, "key_heads": 8, "value_heads": 16, "delta_dim": 128,
        "heads": 8, "kv_heads": 2, "dim": 256, "vision": 512, "vision_depth": 6,
    },
    "true": {
        "hidden": 2048, "experts": 256, "slots": 8, "inner": 512, "key_heads": 16, "value_heads": 32,
        "delta_dim": 128, "heads": 16, "kv_heads": 2, "dim": 256, "vision": 64, "vision_depth": 1,
    },
}  # fmt: skip
BLOCKS = 4


def model_settings(shape: str) -> dict[str, Any]:
    """Constructor arguments of a Qwen3.5-MoE configuration of 4 blocks; `shape` is `tiny`, `text` or `true`."""
    size = _SHAPES[shape]
    rotary = size["dim"] // 4
    return {
        "text_config": {
            "vocab_size": VOCABULARY,
            "hidden_size": size["hidden"],
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": size["heads"],
            "num_key_value_heads": size["kv_heads"],
            "head_dim": size["dim"],
            "linear_num_key_heads": size["key_heads"],
            "linear_num_value_heads": size["value_heads"],
            "linear_key_head_dim": size["delta_dim"],
            "linear_value_head_dim": size["delta_dim"],
            "num_experts": size["experts"],
            "num_experts_per_tok": size["slots"],
            "moe_intermediate_size": size["inner"],
            "shared_expert_intermediate_size": size["inner"],
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": size["vision_depth"],
            "hidden_size": size["vision"],
            "num_heads": max(2, size["vision"] // 64),
            "intermediate_size": 4 * size["vision"],
            "patch_size": PATCH,
            "temporal_patch_size": TEMPORAL,
            "spatial_merge_size": MERGE,
            "out_hidden_size": size["hidden"],
            "num_position_embeddings": 2304,
        },
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": VISION_START_ID,
        "vision_end_token_id": VISION_END_ID,
    }


@dataclass(frozen=True)
class ModelPair:
    """Transformers' model and ours, sharing every tensor."""

    stock: Qwen3_5MoeModel
    ours: MoEMBModel

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.ours.parameters())


@lru_cache(maxsize=1)
def build_pair(shape: str, dtype: str) -> ModelPair:
    """
    Both models with the same random weights, in evaluation mode; the last pair that was built is kept.

    Args:
        shape (`str`): `tiny`, `text` or `true`.
        dtype (`str`): a key of `DTYPES`.
    """
    settings, default = model_settings(shape), torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with no_init_weights():
            stock = Qwen3_5MoeModel(Qwen3_5MoeConfig(**settings))
            ours = MoEMBModel(MoEMBConfig(**settings, emb_token_id=EMB_ID))
    finally:
        torch.set_default_dtype(default)
    _fill(stock)
    ours.load_state_dict(stock.state_dict(), assign=True)
    return ModelPair(stock.eval().requires_grad_(False), ours.eval().requires_grad_(False))


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Random values of a trained model's scale: matrices keep the norm of what passes through them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.01, 16, generator=generator).log_()
        elif name.endswith("dt_bias"):
            parameter.copy_(decay_bias(parameter.shape[0]))
        elif parameter.dim() > 1:
            fan_in = 1 if "embed" in name else parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
            parameter.normal_(0, fan_in**-0.5, generator=generator)
        elif name.endswith("linear_attn.norm.weight") or (name.startswith("visual") and name.endswith("weight")):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)


@dataclass
class Item:
    """One item: token ids that end with `<emb>`, and the patches and grids of its images."""

    ids: list[int]
    pixels: list[Tensor] = field(default_factory=list)
    grids: list[tuple[int, int]] = field(default_factory=list)

    @property
    def shape(self) -> ItemShape:
        merged = sum(height * width for height, width in self.grids) // MERGE**2
        return ItemShape(len(self.ids) - merged, self.grids)


def text_item(length: int, generator: torch.Generator, prefix: list[int] | None = None) -> Item:
    """`length` tokens in all: an optional prefix, random text, `<emb>`."""
    prefix = prefix or []
    text = torch.randint(0, TEXT_IDS, (length - 1 - len(prefix),), generator=generator).tolist()
    return Item([*prefix, *text, EMB_ID])


def image_item(height: int, width: int, text: int, generator: torch.Generator) -> Item:
    """An image of `height` x `width` patches, then `text` tokens and `<emb>`."""
    pixels = torch.randn(height * width, PATCH_DIM, generator=generator)
    image = [VISION_START_ID, *[IMAGE_ID] * (height * width // MERGE**2), VISION_END_ID]
    return Item([*image, *text_item(text + 1, generator).ids], [pixels], [(height, width)])


def _media(items: list[Item], dtype: torch.dtype) -> dict[str, Tensor]:
    grids = [(1, *grid) for item in items for grid in item.grids]
    if not grids:
        return {}
    pixels = torch.cat([pixels for item in items for pixels in item.pixels]).to(dtype)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def padded_batch(items: list[Item], dtype: torch.dtype) -> dict[str, Tensor]:
    """Model inputs padded on the right, with their attention mask."""
    rows = [torch.tensor(item.ids) for item in items]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(item.ids) for item in items])
    mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return {
        "input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE_ID).int(), **_media(items, dtype)
    }  # fmt: skip


def packed_batch(items: list[Item], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same items as one row without padding, with their boundaries."""
    lengths = torch.tensor([0, *(len(item.ids) for item in items)])
    return {
        "input_ids": torch.tensor([[token for item in items for token in item.ids]]),
        "cu_seq_lens_q": lengths.cumsum(0).to(torch.int32),
        **_media(items, dtype),
    }
