"""MoEMB: a sparse mixture-of-experts universal multimodal embedder on a Qwen3.5-MoE backbone.

Any mix of text, images, video frames and document pages goes in, one vector comes out: vision tower -> packed decoder
(3 Gated DeltaNet blocks to 1 attention block, each with routed and shared experts) -> state of the `<emb>` token.

Departures from transformers' `Qwen3_5MoeModel`, whose parameter names are kept: the decoder runs packed, without
padding; an item's vector does not depend on its batch; there is no cache, because nothing is generated.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeTextRotaryEmbedding,
)
from transformers.utils import ModelOutput

from .configuration_moemb import MoEMBConfig, validate_adaptive_compute
from .elementwise_moemb import MoEMBRMSNorm
from .experts_moemb import MoEMBSparseMoeBlock
from .layout_moemb import PackedLayout
from .mixers_moemb import MoEMBAttention, MoEMBGatedDeltaNet
from .packing_moemb import IMAGE, TEXT, VIDEO, PackedTokens, pack_batch
from .pretrained_moemb import MoEMBPreTrainedModel
from .routing_moemb import uniform_top_k
from .vision_moemb import MoEMBVisionModel


@dataclass
class MoEMBOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`torch.FloatTensor` of shape `(batch, sequence, hidden)`, *optional*):
            Final-normed token states, zero at padding. Absent with `pooled_only=True`; with `packed_hidden=True` it
            has shape `(tokens, hidden)` instead.
        pooler_output (`torch.FloatTensor` of shape `(items, hidden)`):
            Final-normed state of each item's pooled token, not L2-normalised.
        router_logits (`tuple(torch.FloatTensor)` of `(tokens, num_experts)`, *optional*):
            fp32 logits of every decoder block over the packed tokens (the last block only over the pooled tokens
            when `pooled_only=True`).
        hidden_states (`tuple(torch.FloatTensor)` of `(batch, sequence, hidden)`, *optional*):
            Token states before each block and after the last one.
        packed (`PackedTokens`, *optional*): the packing of the rows, with `packed_hidden=True`.
    """

    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    packed: PackedTokens | None = None


class MoEMBDecoderLayer(GradientCheckpointingLayer):
    """One decoder block over packed tokens: mixer, then experts."""

    def __init__(self, config, layer_idx: int, experts_backend: str):
        super().__init__()
        self.block_type = config.layer_types[layer_idx]
        if self.block_type == "linear_attention":
            self.linear_attn = MoEMBGatedDeltaNet(config, layer_idx)
        else:
            self.self_attn = MoEMBAttention(config, layer_idx)
        self.mlp = MoEMBSparseMoeBlock(config, experts_backend)
        self.input_layernorm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        packed: PackedTokens,
        layout: PackedLayout,
        position_embeddings: tuple[Tensor, Tensor],
        top_k: int | None = None,
        output_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block on `(tokens, hidden)` rows.

        With `output_rows` (`(items,)`, the last row of each item) only those rows are returned, and everything after
        the token mixing is computed for them alone. Returns the new states and the router logits.
        """
        normed = self.input_layernorm(hidden_states)
        if self.block_type == "linear_attention":
            mixed, _ = self.linear_attn(normed, packed, layout)
            if output_rows is not None:
                mixed = mixed[output_rows]
        else:
            mixed = self.self_attn(normed, position_embeddings, layout, output_rows)
        if output_rows is not None:
            hidden_states = hidden_states[output_rows]
        hidden_states = hidden_states + mixed
        policy = None if top_k is None else partial(uniform_top_k, top_k=top_k)
        routed, router_logits = self.mlp(self.post_attention_layernorm(hidden_states), policy)
        return hidden_states + routed, router_logits


class MoEMBTextModel(MoEMBPreTrainedModel):
    """The packed decoder."""

    input_modalities = ("text",)

    def __init__(self, config, experts_backend: str = "grouped"):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [MoEMBDecoderLayer(config, index, experts_backend) for index in range(config.num_hidden_layers)]
        )
        self.norm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3_5MoeTextRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        hidden_states: Tensor,
        packed: PackedTokens,
        top_k: int | None = None,
        output_rows: Tensor | None = None,
        keep_all: bool = False,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Decode `(tokens, hidden)` packed embeddings.

        Returns:
            The final-normed states, the router logits of every block, and (with `keep_all`) the states before each
            block.
        """
        cos, sin = self.rotary_emb(hidden_states, packed.position_ids[:, None])
        position_embeddings = (cos[0], sin[0])
        layout = PackedLayout(packed.lengths, hidden_states.device)
        router_logits, states = [], []
        for index, layer in enumerate(self.layers):
            if keep_all:
                states.append(hidden_states)
            rows = output_rows if index == len(self.layers) - 1 else None
            hidden_states, logits = layer(hidden_states, packed, layout, position_embeddings, top_k, rows)
            router_logits.append(logits)
        # a model spread over devices ends on another one than it started on
        home = packed.segment.device
        return self.norm(hidden_states).to(home), [logits.to(home) for logits in router_logits], states


class MoEMBModel(MoEMBPreTrainedModel):
    """Universal multimodal embedder. Parameter names are those of transformers' `Qwen3_5MoeModel`.

    Args:
        config ([`MoEMBConfig`]): the configuration.
    """

    input_modalities = ("image", "video", "text")
    accepts_loss_kwargs = False

    def __init__(self, config: MoEMBConfig):
        super().__init__(config)
        self.visual = MoEMBVisionModel(config.vision_config)
        self.language_model = MoEMBTextModel(config.text_config, config.experts_backend)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """Load a model, see `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: if the checkpoint does not hold the routed experts in this model's layout, such as a stock
                checkpoint with one tensor per expert: they would be left random.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(key for key in info["missing_keys"] if ".mlp.experts." in key)
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} tensors of routed experts ({missing[0]}, ...): if it is a stock "
                "Qwen3.5-MoE checkpoint, turn it into a MoEMB repository with `moemb convert --from DIR --to DIR`"
            )
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.language_model.embed_tokens = value

    def set_adaptive_compute(self, settings: dict | None) -> None:
        """Set the default compute budget of this model (`None`: full compute); saved with the configuration."""
        self.config.adaptive_compute = validate_adaptive_compute(settings, self.config.text_config.num_experts_per_tok)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.LongTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        adaptive_compute: dict | None = None,
        output_router_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        pooled_only: bool = False,
        packed_hidden: bool = False,
        return_dict: bool | None = None,
        output_attentions: bool | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_k: torch.IntTensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: torch.IntTensor | None = None,
    ) -> MoEMBOutput | tuple:
        r"""
        Embed a batch of items.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, sequence)`): token ids; media placeholders as the
                processor writes them. Exactly one of `input_ids` and `inputs_embeds`.
            attention_mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*): 1 for tokens, 0 for pads, on
                either side.
            position_ids (`torch.LongTensor`, *optional*): overrides the multimodal positions; must not restart.
            inputs_embeds (`torch.FloatTensor` of shape `(batch, sequence, hidden)`, *optional*): embeddings instead
                of ids; media placeholders are then found by `mm_token_type_ids`, and pooling is at the last token.
            pixel_values, pixel_values_videos (`torch.Tensor` of shape `(patches, patch_dim)`, *optional*): patches.
            image_grid_thw, video_grid_thw (`torch.LongTensor` of shape `(count, 3)`, *optional*): patch grids.
            mm_token_type_ids (`torch.LongTensor` of shape `(batch, sequence)`, *optional*): 0 text, 1 image, 2 video;
                derived from the placeholder ids when absent.
            cu_seq_lens_q (`torch.IntTensor` of shape `(items + 1,)`, *optional*): item boundaries of a flattened
                batch of shape `(1, tokens)`.
            adaptive_compute (`dict`, *optional*): compute budget of this call, see [`validate_adaptive_compute`];
                `{}` means full compute; the configuration's when `None`.
            pooled_only (`bool`, defaults to `False`): return only `pooler_output`; the last block then computes
                queries, experts and norm for the pooled tokens alone (same vectors).
            packed_hidden (`bool`, defaults to `False`): return `last_hidden_state` packed, `(tokens, hidden)`.
            output_attentions (`bool`, *optional*): attention weights are never formed; `True` is refused.
            use_cache (`bool`, *optional*): nothing is generated; without effect.
            cu_seq_lens_k, max_length_q, max_length_k, seq_idx (*optional*): come with `cu_seq_lens_q` from
                transformers' flattening collator and say the same; refused without it.

        Raises:
            ValueError: for inputs that would silently embed something else; names the item and the remedy.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
        if output_attentions:
            raise ValueError("`output_attentions=True` is not possible: attention weights are never formed")
        if cu_seq_lens_q is None and any(
            argument is not None for argument in (cu_seq_lens_k, max_length_q, max_length_k, seq_idx)
        ):
            raise ValueError("a flattened batch needs `cu_seq_lens_q`: it says where each item starts")
        text_config = self.config.text_config
        if adaptive_compute is None:
            adaptive_compute = self.config.adaptive_compute
        budget = validate_adaptive_compute(adaptive_compute, text_config.num_experts_per_tok) or {}
        modality = self._modality(input_ids, inputs_embeds, mm_token_type_ids)
        packed = pack_batch(
            modality,
            attention_mask,
            cu_seq_lens_q,
            {IMAGE: image_grid_thw, VIDEO: video_grid_thw},
            self.config.vision_config.spatial_merge_size,
            position_ids,
        )
        if input_ids is not None:
            hidden_states = self.get_input_embeddings()(self._checked_ids(input_ids, packed))
        else:
            hidden_states = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])[packed.source]
        hidden_states = self._insert_media(hidden_states, packed.modality, IMAGE, pixel_values, image_grid_thw)
        hidden_states = self._insert_media(hidden_states, packed.modality, VIDEO, pixel_values_videos, video_grid_thw)
        pooled_rows = self._pooled_rows(input_ids, packed)

        pooled_last = pooled_only and not output_hidden_states
        final, router_logits, states = self.language_model(
            hidden_states,
            packed,
            budget.get("top_k"),
            pooled_rows if pooled_last else None,
            bool(output_hidden_states),
        )
        batch_size, sequence_length = modality.shape
        if packed_hidden:
            last_hidden_state = None if pooled_only else final
        else:
            last_hidden_state = None if pooled_only else packed.unpack(final, batch_size, sequence_length)
        if output_router_logits is None:
            output_router_logits = text_config.output_router_logits
        output = MoEMBOutput(
            last_hidden_state=last_hidden_state,
            pooler_output=final if pooled_last else final[pooled_rows],
            router_logits=tuple(router_logits) if output_router_logits else None,
            hidden_states=tuple(packed.unpack(state, batch_size, sequence_length) for state in [*states, final])
            if output_hidden_states
            else None,
            packed=packed if packed_hidden else None,
        )
        return output.to_tuple() if return_dict is False else output

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: torch.LongTensor) -> Tensor:
        """Merged vision tokens of images, `(tokens, hidden)`."""
        return self.visual(pixel_values, image_grid_thw)

    def get_video_features(self, pixel_values_videos: Tensor, video_grid_thw: torch.LongTensor) -> Tensor:
        """Merged vision tokens of videos, `(tokens, hidden)`."""
        return self.visual(pixel_values_videos, video_grid_thw)

    def _modality(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, given: Tensor | None) -> Tensor:
        if given is not None:
            shape = tuple((inputs_embeds if input_ids is None else input_ids).shape[:2])
            if tuple(given.shape) != shape:
                raise ValueError(f"`mm_token_type_ids` has shape {tuple(given.shape)} but the inputs {shape}")
            if bool(((given < TEXT) | (given > VIDEO)).any()):
                raise ValueError("`mm_token_type_ids` must be 0 (text), 1 (image) or 2 (video) everywhere")
            return given.long()
        if input_ids is None:
            return torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
        image, video = input_ids == self.config.image_token_id, input_ids == self.config.video_token_id
        return image * IMAGE + video * VIDEO

    def _checked_ids(self, input_ids: Tensor, packed: PackedTokens) -> Tensor:
        """The packed ids; on an accelerator an id outside the vocabulary would end the process."""
        ids, size = input_ids.reshape(-1)[packed.source], self.config.text_config.vocab_size
        outside = ((ids < 0) | (ids >= size)).nonzero()
        if outside.numel():
            item, token = int(packed.segment[outside[0]]), int(ids[outside[0]])
            raise ValueError(f"item {item} holds the token id {token}, outside the vocabulary of {size} tokens")
        return ids

    def _insert_media(
        self, hidden_states: Tensor, modality: Tensor, kind: int, pixels: Tensor | None, grid: Tensor | None
    ) -> Tensor:
        if pixels is None:
            if grid is not None:
                raise ValueError("a media grid was passed without its pixel values")
            return hidden_states
        name = "image" if kind == IMAGE else "video"
        patches = 0 if grid is None else int(grid.prod(dim=-1).sum())
        if patches != pixels.shape[0]:
            raise ValueError(f"`{name}_grid_thw` describes {patches} patches but {pixels.shape[0]} were passed")
        features = self.visual(pixels, grid).to(hidden_states)
        rows = (modality == kind).nonzero().squeeze(1)
        if rows.shape[0] != features.shape[0]:
            raise ValueError(
                f"the inputs hold {rows.shape[0]} media tokens of type {kind} but the pixel values make "
                f"{features.shape[0]}"
            )
        return hidden_states.index_copy(0, rows, features)

    def _pooled_rows(self, input_ids: Tensor | None, packed: PackedTokens) -> Tensor:
        last = packed.cu_seqlens[1:].long() - 1
        if self.config.pooling == "last" or input_ids is None:
            return last
        if self.config.emb_token_id is None:
            raise ValueError("`pooling='emb'` needs `config.emb_token_id`; set it, or use `pooling='last'`")
        is_emb = input_ids.reshape(-1)[packed.source] == self.config.emb_token_id
        misplaced = (~is_emb[last]).nonzero()
        count = torch.bincount(packed.segment[is_emb], minlength=packed.num_items)
        if misplaced.numel() or bool((count != 1).any()):
            item = int(misplaced[0]) if misplaced.numel() else int((count != 1).nonzero()[0])
            raise ValueError(
                f"item {item} must hold the `<emb>` token (id {self.config.emb_token_id}) exactly once, as its last "
                "token: build inputs with the model's processor, or use `pooling='last'`"
            )
        return last


__all__ = ["MoEMBModel", "MoEMBOutput", "MoEMBPreTrainedModel", "MoEMBTextModel"]
