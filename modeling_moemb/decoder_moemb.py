"""The packed decoder: blocks of mixer and experts, and the compute dial between them."""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeTextRotaryEmbedding,
)

from .adaptive_moemb import BlockDial, ComputeDial
from .elementwise_moemb import MoEMBRMSNorm
from .feed_forward_moemb import feed_forward_block
from .layout_moemb import PackedLayout
from .linear_moemb import use_packed_linear
from .masked_moemb import masked_attention, masked_delta_net
from .mixers_moemb import MoEMBAttention, MoEMBGatedDeltaNet
from .packing_moemb import PackedTokens
from .prefix_layout_moemb import SharedLayout
from .pretrained_moemb import MoEMBPreTrainedModel
from .pruning_moemb import received_attention
from .task_conditioning_moemb import RouterCondition


@dataclass
class DecoderOutput:
    """
    Args:
        final (`torch.FloatTensor` of shape `(tokens, hidden)`): final-normed states of the tokens still alive, or of
            `output_rows`.
        packed (`PackedTokens`): the packing of the tokens still alive.
        router_logits (`list[torch.FloatTensor]`): fp32 `(tokens, num_experts)` of every block that has a router.
        states (`list[tuple[torch.FloatTensor, PackedTokens]]`): with `keep_all`, the states before each block.
    """

    final: Tensor
    packed: PackedTokens
    router_logits: list[Tensor]
    states: list[tuple[Tensor, PackedTokens]]


def _layout(packed: PackedTokens) -> PackedLayout:
    if packed.prefix_of is None:
        return PackedLayout(packed.lengths, packed.segment.device)
    return SharedLayout(packed.lengths, packed.segment.device, packed.prefix_of)


class MoEMBDecoderLayer(GradientCheckpointingLayer):
    """One decoder block over packed tokens: mixer, then experts."""

    def __init__(self, config, layer_idx: int, experts_backend: str, feed_forward: str = "moe"):
        super().__init__()
        self.block_type = config.layer_types[layer_idx]
        if self.block_type == "linear_attention":
            self.linear_attn = MoEMBGatedDeltaNet(config, layer_idx)
        else:
            self.self_attn = MoEMBAttention(config, layer_idx)
        self.mlp = feed_forward_block(config, feed_forward, experts_backend)
        self.input_layernorm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        packed: PackedTokens,
        layout: PackedLayout,
        position_embeddings: tuple[Tensor, Tensor],
        dial: BlockDial | None = None,
        output_rows: Tensor | None = None,
        condition: RouterCondition | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the block on `(tokens, hidden)` rows.

        With `output_rows` (`(items,)`, the last row of each item) only those rows are returned, and everything after
        the token mixing is computed for them alone. `dial` chooses the experts that run, and takes what it asked for.
        `condition` is what the routing of the tokens depends on beside their states. Returns the new states and the
        router logits (`None` without a router).
        """
        normed = self.input_layernorm(hidden_states)
        mask = None if dial is None or dial.mask is None else dial.mask.to(normed.device)
        if self.block_type == "linear_attention":
            if mask is None:
                mixed, beta = self.linear_attn(normed, layout)
            else:
                mixed, beta = masked_delta_net(self.linear_attn, normed, packed, layout, mask)
            if dial is not None:
                dial.beta = beta
            if output_rows is not None:
                mixed = mixed[output_rows]
        else:
            if dial is not None and dial.wants_attention:
                dial.received = received_attention(self.self_attn, normed, position_embeddings, packed.lengths)
            if mask is None:
                mixed = self.self_attn(normed, position_embeddings, layout, output_rows)
            else:
                mixed = masked_attention(self.self_attn, normed, position_embeddings, layout, mask, output_rows)
        modality = packed.modality
        if output_rows is not None:
            hidden_states, modality = hidden_states[output_rows], modality[output_rows]
            condition = None if condition is None else condition.take(output_rows)
        hidden_states = hidden_states + mixed
        normed, policy = self.post_attention_layernorm(hidden_states), None
        if dial is not None:
            dial.states, policy = normed, dial.route
        routed, router_logits = self.mlp(normed, policy, modality, condition)
        return hidden_states + routed, router_logits


class MoEMBTextModel(MoEMBPreTrainedModel):
    """The packed decoder."""

    input_modalities = ("text",)

    def __init__(self, config, experts_backend: str = "grouped", feed_forward: str = "moe"):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [
                MoEMBDecoderLayer(config, index, experts_backend, feed_forward)
                for index in range(config.num_hidden_layers)
            ]
        )
        self.norm = MoEMBRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3_5MoeTextRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        use_packed_linear(self)
        self.post_init()

    def forward(
        self,
        hidden_states: Tensor,
        packed: PackedTokens,
        dial: ComputeDial | None = None,
        pooled_only: bool = False,
        keep_all: bool = False,
        condition: RouterCondition | None = None,
    ) -> DecoderOutput:
        """Decode `(tokens, hidden)` packed embeddings.

        Args:
            hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): embeddings of the packed tokens.
            packed (`PackedTokens`): their packing.
            dial (`ComputeDial`, *optional*): the compute budget at work; full compute when `None`.
            pooled_only (`bool`): return the last row of each item alone, and compute no more than that needs.
            keep_all (`bool`): also return the states before each block.
            condition (`RouterCondition`, *optional*): what the routing of the packed tokens is conditioned on.
        """
        # a model spread over devices ends on another one than it started on
        home = packed.segment.device
        cos, sin = self.rotary_emb(hidden_states, packed.position_ids[:, None])
        cos, sin = cos[0], sin[0]
        layout = _layout(packed)
        router_logits, states, rows, step = [], [], None, None

        def gather(index: Tensor) -> None:
            nonlocal hidden_states, cos, sin, layout, condition
            hidden_states = hidden_states[index.to(hidden_states.device)]
            cos, sin = cos[index.to(cos.device)], sin[index.to(sin.device)]
            condition = None if condition is None else condition.take(index)
            layout = _layout(packed)

        for index, layer in enumerate(self.layers):
            selected = None if dial is None else dial.select(index, packed, hidden_states)
            if selected is not None:
                packed, survivors = selected
                gather(survivors)
            if keep_all:
                states.append((hidden_states, packed))
            if pooled_only and index == len(self.layers) - 1:
                rows = packed.last_rows
            if dial is not None:
                step = dial.begin(index, packed, rows)
            hidden_states, logits = layer(hidden_states, packed, layout, (cos, sin), step, rows, condition)
            if logits is not None:
                router_logits.append(logits)
            keep = None if dial is None else dial.end(index, packed, step, rows)
            if keep is not None:
                packed, survivors = packed.compact(keep)
                dial.compact(survivors)
                gather(survivors)
        final = self.norm(hidden_states).to(home)
        return DecoderOutput(final, packed, [logits.to(home) for logits in router_logits], states)


__all__ = ["DecoderOutput", "MoEMBDecoderLayer", "MoEMBTextModel"]
