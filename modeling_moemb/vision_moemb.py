"""The vision tower, packed over images and frames of different sizes."""

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeVisionMLP,
    Qwen3_5MoeVisionPatchEmbed,
    Qwen3_5MoeVisionPatchMerger,
    Qwen3_5MoeVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from .layout_moemb import PackedLayout
from .linear_moemb import linear, use_packed_linear
from .mixers_moemb import MoEMBVisionAttention
from .pretrained_moemb import MoEMBPreTrainedModel


class MoEMBVisionPatchEmbed(Qwen3_5MoeVisionPatchEmbed):
    """Patch projection; parameters as in transformers' class."""

    @force_accelerate_hooks("proj")  # its weight is read here, its forward never runs
    def forward(self, pixel_values: Tensor) -> Tensor:
        """Project `(patches, patch_dim)` flattened patches."""
        if type(self.proj) is not nn.Conv3d:  # an adapter or a quantised layer has a forward of its own
            return super().forward(pixel_values)
        # the convolution's stride is its kernel: one matrix product does it, and far faster on the CPU
        weight = self.proj.weight.flatten(1)
        return linear(pixel_values.to(weight.dtype), weight, self.proj.bias)


class MoEMBVisionBlock(GradientCheckpointingLayer):
    """One block of the vision tower over packed patches."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = MoEMBVisionAttention(config=config)
        self.mlp = Qwen3_5MoeVisionMLP(config=config)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: PackedLayout
    ) -> Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), position_embeddings, layout)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class MoEMBVisionModel(MoEMBPreTrainedModel):
    """The vision tower over all images and frames of a batch, packed."""

    input_modalities = ("image", "video")

    def __init__(self, config):
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.num_grid_per_side = int(config.num_position_embeddings**0.5)
        self.patch_embed = MoEMBVisionPatchEmbed(config=config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.rotary_pos_emb = Qwen3_5MoeVisionRotaryEmbedding(config)
        self.blocks = nn.ModuleList([MoEMBVisionBlock(config) for _ in range(config.depth)])
        self.merger = Qwen3_5MoeVisionPatchMerger(config=config, use_postshuffle_norm=False)
        self.gradient_checkpointing = False
        use_packed_linear(self)
        self.post_init()

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode patches.

        Args:
            pixel_values (`torch.Tensor` of shape `(patches, channels * temporal * patch * patch)`): flattened patches
                in merge-block order, all images one after the other.
            grid_thw (`torch.LongTensor` of shape `(images, 3)`): temporal, height and width patch counts.

        Returns:
            `torch.Tensor` of shape `(patches / merge^2, out_hidden)`: merged tokens.
        """
        # one embedding table for all images of one size: the tables depend on the grid alone
        grids = torch.unique(grid_thw, dim=0)
        hidden_states = self.patch_embed(pixel_values)
        if grids.shape[0] == 1:
            positions, rotary = self._tables(grids, hidden_states)
            repeat = grid_thw.shape[0]
            positions = positions.repeat(repeat, 1)
            rotary = tuple(table.repeat(repeat, 1) for table in rotary)
        else:
            positions, rotary = self._tables(grid_thw, hidden_states)
        hidden_states = hidden_states + positions
        frames = grid_thw.tolist()
        lengths = [height * width for time, height, width in frames for _ in range(time)]
        layout = PackedLayout(lengths, hidden_states.device)
        for block in self.blocks:
            hidden_states = block(hidden_states, rotary, layout)
        return self.merger(hidden_states)

    def _tables(self, grid_thw: Tensor, hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=self.num_grid_per_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=self.spatial_merge_size,
        )
        positions = (self.pos_embed(indices) * weights[:, :, None]).sum(1).to(hidden_states.dtype)
        return positions, self.rotary_pos_emb(
            hidden_states, get_vision_position_ids(grid_thw, self.spatial_merge_size)
        )
