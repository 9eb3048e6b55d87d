"""FLOPs that are true: counted from what was executed, or from shapes alone, with the same result.

Three scopes, all without embedding tables and `lm_head`: total (vision tower, merger and decoder), decoder, and MoE
(routers, routed and shared experts). A multiply-accumulate is two FLOPs. The core of Gated DeltaNet is counted as the
recurrent form, a lower bound of the chunked one; norms, activations and the ranking of tokens are not counted, nor is
the attention that the `"attention"` control computes for its score, so that all scores of one budget count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .gates_moemb import keep_gate_macs
from .packing_moemb import IMAGE, TEXT, VIDEO, PackedTokens
from .pruning_moemb import TokenPruning, prunable
from .routing_moemb import expert_budget, tiered_experts
from .settings_moemb import active_gates, validate_adaptive_compute


@dataclass
class ComputeRecord:
    """What a forward pass executed.

    Args:
        lengths (`list[list[int]]`): tokens of each item that each block's mixer saw; where items share prefixes, of
            each prefix and then what each item has of its own.
        tokens (`torch.LongTensor` of shape `(blocks, 3)`): the same by modality (text, image, video).
        expert_pairs (`torch.LongTensor` of shape `(blocks, 3)`): (token, expert) pairs that were run.
        grids (`list[tuple[int, int, int]]`): temporal, height and width patch counts of each image and video.
        pooled_only (`bool`): whether the last block computed queries and experts for the pooled tokens alone.
        expert_load (`torch.LongTensor` of shape `(blocks, 3, experts)`, *optional*): the pairs by expert.
        prefix_of (`tuple[int, ...]`, *optional*): the prefix that each item continues, see [`PackedTokens`].
        item_pairs (`list[torch.LongTensor]`): of each block, the pairs by segment, in the order of `lengths`.
        gate_macs (`int`): multiply-accumulates of the gates.
    """

    lengths: list[list[int]]
    tokens: Tensor
    expert_pairs: Tensor
    grids: list[tuple[int, int, int]]
    pooled_only: bool = False
    expert_load: Tensor | None = None
    prefix_of: tuple[int, ...] | None = None
    item_pairs: list[Tensor] = field(default_factory=list)
    gate_macs: int = 0

    @classmethod
    def empty(cls, num_experts: int, device: torch.device) -> "ComputeRecord":
        """A record to [`add`] blocks to."""
        counts = torch.zeros(0, 3, dtype=torch.long, device=device)
        return cls([], counts, counts, [], False, counts.new_zeros(0, 3, num_experts))

    def add(self, packed: PackedTokens, rows: Tensor | slice, expert_index: Tensor, pooled_only: bool) -> None:
        """Take in one block, without a synchronisation with the device.

        Args:
            packed (`PackedTokens`): the tokens that its mixer saw.
            rows (`torch.LongTensor` of shape `(rows,)`, or a slice): those that its experts saw.
            expert_index (`torch.LongTensor` of shape `(rows, slots)`): the experts they ran; others are skipped.
            pooled_only (`bool`): whether these rows are the pooled tokens alone.
        """
        experts, modality, segment = self.expert_load.shape[-1], packed.modality[rows], packed.segment[rows]
        pairs = (expert_index < experts).sum(-1)
        self.item_pairs.append(pairs.new_zeros(len(packed.lengths)).index_add(0, segment, pairs))
        load = self.expert_load.new_zeros(3 * (experts + 1))
        flat = (modality[:, None] * (experts + 1) + expert_index).flatten()
        load = load.scatter_add(0, flat, torch.ones_like(flat)).view(3, experts + 1)[:, :experts]
        tokens = self.tokens.new_zeros(3).scatter_add(0, packed.modality, torch.ones_like(packed.modality))
        self.lengths.append(list(packed.lengths))
        self.tokens = torch.cat([self.tokens, tokens[None]])
        self.expert_load = torch.cat([self.expert_load, load[None]])
        self.expert_pairs = torch.cat([self.expert_pairs, load.sum(-1)[None]])
        self.pooled_only |= pooled_only
        self.prefix_of = packed.prefix_of

    def tokens_before(self, block: int) -> list[int]:
        """Tokens of shared prefixes that stand before each segment in `lengths[block]`."""
        lengths, prefix_of = self.lengths[block], self.prefix_of or [-1] * len(self.lengths[block])
        prefixes = len(lengths) - len(prefix_of)
        return [0] * prefixes + [lengths[prefix] if prefix >= 0 else 0 for prefix in prefix_of]

    @property
    def num_items(self) -> int:
        return len(self.lengths[-1]) if self.prefix_of is None else len(self.prefix_of)

    def skip_rate(self, slots: int) -> float:
        """Fraction of the pairs of full compute (`slots` for each row that reaches the experts) that were not run."""
        rows = self.tokens.sum(1)
        if self.pooled_only:
            rows[-1] = self.num_items
        return 1 - int(self.expert_pairs.sum()) / (slots * int(rows.sum()))


@dataclass(frozen=True)
class ItemShape:
    """The shape of one item.

    Args:
        text_tokens (`int`): text tokens with delimiters, timestamps and `<emb>`.
        images (`Sequence[tuple[int, int]]`): height and width of each image, in patches.
        videos (`Sequence[tuple[int, int, int]]`): temporal patches, height and width of each video, in patches.
    """

    text_tokens: int
    images: Sequence[tuple[int, int]] = ()
    videos: Sequence[tuple[int, int, int]] = ()

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        return [(1, *image) for image in self.images] + [tuple(video) for video in self.videos]

    def visual_tokens(self, merge: int) -> tuple[list[int], list[int]]:
        """Tokens of each image, and of each video frame, when `merge` patches are merged per side."""
        frames = [(height, width) for time, height, width in self.videos for _ in range(time)]
        images, frames = ([h * w // merge**2 for h, w in shapes] for shapes in (self.images, frames))
        return images, frames


@dataclass(frozen=True)
class Flops:
    """FLOPs by part; scopes are sums of parts. Add counts of several batches before a ratio is formed."""

    vision: int = 0
    merger: int = 0
    mixers: int = 0
    attention: int = 0
    router: int = 0
    experts: int = 0
    shared: int = 0
    gates: int = 0

    @property
    def moe(self) -> int:
        return self.router + self.experts + self.shared

    @property
    def decoder(self) -> int:
        return self.mixers + self.attention + self.moe + self.gates

    @property
    def total(self) -> int:
        return self.vision + self.merger + self.decoder

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def removed_from(self, full: "Flops") -> dict[str, float]:
        """FLOPs removed, `1 - self / full`, in the scopes `"total"`, `"decoder"` and `"moe"`."""
        return {scope: 1 - getattr(self, scope) / getattr(full, scope) for scope in ("total", "decoder", "moe")}


@dataclass(frozen=True)
class UnitMacs:
    """Multiply-accumulates of each part: per token and block, per pair of tokens, per (token, expert), per patch."""

    delta_net: int
    attention_queries: int  # what only tokens that ask need: query, gate and output
    attention_keys: int
    attention_pair: int
    router: int
    expert: int
    shared: int
    patch: int
    patch_pair: int
    merged: int

    @classmethod
    def of(cls, config: Any) -> "UnitMacs":
        """Of a [`MoEMBConfig`], or a stock Qwen3.5-MoE configuration."""
        text, vision = config.text_config, config.vision_config
        width, head = text.hidden_size, text.head_dim
        key_dim = text.linear_num_key_heads * text.linear_key_head_dim
        value_dim = text.linear_num_value_heads * text.linear_value_head_dim
        delta_net = width * (2 * key_dim + 2 * value_dim + 2 * text.linear_num_value_heads) + value_dim * width
        delta_net += text.linear_conv_kernel_dim * (2 * key_dim + value_dim)
        delta_net += 4 * value_dim * text.linear_key_head_dim
        heads = text.num_attention_heads * head
        shared = text.shared_expert_intermediate_size
        inner, merged = vision.hidden_size, vision.hidden_size * vision.spatial_merge_size**2
        patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(
            delta_net=delta_net,
            attention_queries=3 * width * heads,
            attention_keys=2 * width * text.num_key_value_heads * head,
            attention_pair=2 * heads,
            router=width * text.num_experts if getattr(config, "feed_forward", "moe") == "moe" else 0,
            expert=3 * width * text.moe_intermediate_size,
            shared=3 * width * shared + width if shared else 0,  # with its gate
            patch=patch_dim * inner + vision.depth * (4 * inner**2 + 2 * inner * vision.intermediate_size),
            patch_pair=2 * inner * vision.depth,
            merged=merged**2 + merged * vision.out_hidden_size,
        )


def count_flops(config: Any, record: ComputeRecord) -> Flops:
    """FLOPs of what a record says was executed.

    Args:
        config (`MoEMBConfig`): the model's configuration.
        record (`ComputeRecord`): of a run (`output_compute=True`) or of shapes ([`record_of_shapes`]).
    """
    unit, layer_types = UnitMacs.of(config), config.text_config.layer_types
    mixers = attention = rows = 0
    for block, lengths in enumerate(record.lengths):
        tokens, pooled = sum(lengths), record.pooled_only and block == len(record.lengths) - 1
        asking = record.num_items if pooled else tokens
        rows += asking
        if layer_types[block] == "linear_attention":
            mixers += unit.delta_net * tokens
        else:
            mixers += unit.attention_keys * tokens + unit.attention_queries * asking
            seen = list(zip(lengths, record.tokens_before(block)))
            if pooled:
                pairs = sum(length + before for length, before in seen[len(seen) - asking :])
            else:
                pairs = sum(length * (length + 1) // 2 + length * before for length, before in seen)
            attention += unit.attention_pair * pairs
    patches = sum(time * height * width for time, height, width in record.grids)
    pairs = sum(time * (height * width) ** 2 for time, height, width in record.grids)
    return Flops(
        vision=2 * (unit.patch * patches + unit.patch_pair * pairs),
        merger=2 * unit.merged * (patches // config.vision_config.spatial_merge_size**2),
        mixers=2 * mixers,
        attention=2 * attention,
        router=2 * unit.router * rows,
        experts=2 * unit.expert * int(record.expert_pairs.sum()),
        shared=2 * unit.shared * rows,
        gates=2 * record.gate_macs,
    )


def record_of_shapes(
    config: Any,
    items: Sequence[ItemShape],
    adaptive_compute: dict[str, Any] | None = None,
    pooled_only: bool = False,
    expert_pairs: Tensor | None = None,
) -> ComputeRecord:
    """What a forward pass over a batch would execute, from shapes alone.

    Args:
        config (`MoEMBConfig`): the model's configuration.
        items (`Sequence[ItemShape]`): the batch.
        adaptive_compute (`dict`, *optional*): the compute budget; the configuration's when `None`, as in `forward`.
        pooled_only (`bool`, defaults to `False`): as in `forward`.
        expert_pairs (`torch.LongTensor` of shape `(blocks, 3)`, *optional*): pairs that were measured; needed with
            `modes`, which decides by the weights.

    Raises:
        ValueError: for a wrong budget, for `modes` with a threshold and no `expert_pairs`, and for gates that decide
            how much is left by what they see.
    """
    text, merge = config.text_config, config.vision_config.spatial_merge_size
    given = config.adaptive_compute if adaptive_compute is None else adaptive_compute
    gates = getattr(config, "gates", None)
    budget = validate_adaptive_compute(given, text, gates) or {}
    gated = active_gates(budget)
    if "threshold" in (budget.get("token_pruning") or {}) or set(gated) - {"keep"}:
        raise ValueError(
            f"the gates {gated} decide by content: shapes do not tell how much is left, count a run instead"
        )
    tau = (budget.get("modes") or {}).get("tau", 0)
    if expert_pairs is None and any(tau.values() if isinstance(tau, dict) else [tau]):
        raise ValueError("`modes` skips experts by their weights: shapes do not tell how many, pass `expert_pairs`")
    pruning = TokenPruning.from_settings(budget.get("token_pruning"))
    lengths, tokens, pairs = [], [], []
    for block in range(text.num_hidden_layers):
        drop = pruning if pruning is not None and block >= pruning.layer else None
        counts = [_alive(item, merge, drop) for item in items]
        lengths.append([sum(alive) for alive in counts])
        tokens.append([sum(column) for column in zip(*counts)])
        pooled = pooled_only and block == text.num_hidden_layers - 1
        each = [_pairs(alive, budget, block, text.num_experts_per_tok, pooled) for alive in counts]
        pairs.append([sum(column) for column in zip(*each)])
    gate_macs = 0
    if gated:
        asked = sum(count for item in items for kind, count in _visual(item, merge) if kind in prunable(budget))
        gate_macs = keep_gate_macs(text.hidden_size, gates["keep"]["width"]) * asked
    return ComputeRecord(
        lengths=lengths,
        tokens=torch.tensor(tokens),
        expert_pairs=torch.tensor(pairs) if expert_pairs is None else expert_pairs,
        grids=[grid for item in items for grid in item.grids],
        pooled_only=pooled_only,
        gate_macs=gate_macs,
    )


def _visual(item: ItemShape, merge: int) -> list[tuple[int, int]]:
    images, frames = item.visual_tokens(merge)
    return [(IMAGE, sum(images)), (VIDEO, sum(frames))]


def _alive(item: ItemShape, merge: int, pruning: TokenPruning | None) -> list[int]:
    """Text, image and video tokens of an item."""
    images, frames = item.visual_tokens(merge)
    if pruning is None:
        return [item.text_tokens, sum(images), sum(frames)]
    return [item.text_tokens, pruning.kept(images, IMAGE), pruning.kept(frames, VIDEO)]


def _pairs(alive: list[int], budget: dict[str, Any], block: int, slots: int, pooled: bool) -> list[int]:
    """Pairs of an item by modality; the pooled token is one of its text tokens."""
    experts, tier = expert_budget(budget, slots), budget.get("tiered_top_k")
    most = budget.get("random_k", slots)
    own = min(experts[TEXT], most)
    if pooled:
        return [own, 0, 0]
    pairs = []
    for base, size in zip(experts, [alive[TEXT] - 1, *alive[1:]], strict=True):
        if tier is None or block < tier["layer"]:
            pairs.append(size * min(base, most))
        else:
            low = min(base, tier["min"])
            pairs.append(sum(min(tiered_experts(base, low, rank, size), most) for rank in range(size)))
    return [pairs[TEXT] + own, *pairs[1:]]


__all__ = ["ComputeRecord", "Flops", "ItemShape", "UnitMacs", "count_flops", "record_of_shapes"]
