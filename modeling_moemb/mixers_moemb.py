"""Token mixers over packed tokens: varlen Gated DeltaNet and varlen attention.

Both run on any device without flash-linear-attention or flash-attn and are differentiable; where a kernel for the
device is found (`kernels_moemb`), it takes their place.

Departures from transformers' Qwen3.5-MoE: sequences stay apart (stock refuses or leaks without extra packages), the
write strength beta is computed in fp32, and the mixer returns it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeVisionAttention,
)

from .delta_rule_moemb import continued_delta_rule, delta_rule
from .elementwise_moemb import MoEMBRMSNorm, MoEMBRMSNormGated, rotate, sigmoid, softplus
from .kernels_moemb import kernel
from .layout_moemb import PackedLayout
from .prefix_layout_moemb import SharedLayout


# below this many keys, plain matrix products are faster than SDPA when gradients are needed on the CPU
DENSE_ATTENTION_LIMIT = 128


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution that never looks across the start of an item; fp32 accumulation.

    A hand-written backward keeps one input instead of a shifted copy per tap. Rows that would cross a start are
    overwritten with 0, not multiplied by it: an item that holds NaN must not reach its neighbours.
    """

    @staticmethod
    def forward(ctx, hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_states, weight, cu_seqlens)
        taps = weight.shape[1]
        columns, (starts, ends) = weight.float(), (cu_seqlens[:-1].long(), cu_seqlens[1:].long())
        rows = hidden_states.to(torch.float32, copy=True)
        output = rows * columns[:, -1]
        for back in range(1, min(taps, rows.shape[0])):
            # the last `back` rows of every item; an empty one has none and names the very last row, cleared anyway
            last = torch.maximum(ends - back, starts)
            rows.index_fill_(0, torch.where(ends > starts, last, rows.shape[0] - 1), 0)
            output[back:].addcmul_(rows[:-back], columns[:, taps - 1 - back])
        return output

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_states, weight, cu_seqlens = ctx.saved_tensors
        taps = weight.shape[1]
        rows, columns = hidden_states.float(), weight.float()
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        grad_hidden = grad_output * columns[:, -1]
        grad_weight = torch.zeros_like(columns)
        grad_weight[:, -1] = (grad_output * rows).sum(0)
        grad = grad_output.clone()
        for back in range(1, min(taps, rows.shape[0])):
            # the first `back` rows of every item; an empty one names row 0, cleared anyway
            first = torch.minimum(starts + back - 1, ends - 1)
            grad.index_fill_(0, torch.where(ends > starts, first, 0), 0)
            grad_hidden[:-back].addcmul_(grad[back:], columns[:, taps - 1 - back])
            grad_weight[:, taps - 1 - back] = (grad[back:] * rows[:-back]).sum(0)
        return grad_hidden.to(hidden_states.dtype), grad_weight.to(weight.dtype), None


def causal_conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Varlen depthwise causal convolution.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, channels)`): packed rows.
        weight (`torch.Tensor` of shape `(channels, taps)`): oldest tap first.
        cu_seqlens (`torch.IntTensor` of shape `(items + 1,)`): cumulative lengths of the items.

    Returns:
        `torch.FloatTensor` of shape `(tokens, channels)`, fp32.
    """
    return _CausalConv.apply(hidden_states, weight, cu_seqlens)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """Attention of `(batch, heads, queries, dim)` on `(batch, key_heads, keys, dim)` without repeating keys."""
    batch, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    if keys > DENSE_ATTENTION_LIMIT or query.is_cuda or not torch.is_grad_enabled():
        mask = None if key_mask is None else key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=heads != key_heads
        )
    grouped = (query * scaling).reshape(batch, key_heads, -1, dim)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, heads, queries, keys)
    if causal:
        future = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights.view(batch, key_heads, -1, keys) @ value).view(batch, heads, queries, -1)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float, causal: bool
) -> Tensor:
    """Attention inside each item of a packing.

    Args:
        query (`torch.Tensor` of shape `(tokens, heads, dim)`): packed rows.
        key, value (`torch.Tensor` of shape `(tokens, key_heads, dim)`): `heads` is a multiple of `key_heads`.
        layout (`PackedLayout`): index tables of the packing.
        scaling (`float`): factor of the scores.
        causal (`bool`): whether a token sees only itself and the tokens before it.

    Returns:
        `torch.Tensor` of shape `(tokens, heads, dim)`.
    """
    if layout.shared is not None:
        return _continued_attention(query, key, value, layout.shared, scaling)
    run = kernel("varlen_attention", query, key, value, layout.cu_seqlens)
    if run is not None:
        return run(query, key, value, layout.cu_seqlens, scaling, causal)
    # right padding is invisible to causal attention; bidirectional items are grouped by exact length instead
    groups, order = (
        (layout.causal_groups, layout.causal_order) if causal else (layout.exact_groups, layout.exact_order)
    )
    outputs = []
    for index, _ in groups:
        states = (_gather_items(tensor, index) for tensor in (query, key, value))
        output = _attend(*states, scaling, causal)
        outputs.append(output.transpose(1, 2).reshape(index.numel(), *query.shape[1:]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, order)


def _continued_attention(query: Tensor, key: Tensor, value: Tensor, shared: SharedLayout, scaling: float) -> Tensor:
    """Causal attention where items also see the prefix that they continue."""
    keys, values = key.index_select(0, shared.key_rows), value.index_select(0, shared.key_rows)
    run = kernel("varlen_attention", query, keys, values, shared.cu_seqlens, shared.key_cu_seqlens)
    if run is not None:
        return run(query, keys, values, shared.cu_seqlens, scaling, True, shared.key_cu_seqlens)
    outputs = []
    for group in shared.attention_groups:
        tables = ((query, group.queries), (key, group.keys), (value, group.keys))
        states = [_gather_items(tensor, index) for tensor, index in tables]
        width = group.queries.shape[1]
        seen = torch.ones(width, group.before + width, dtype=torch.bool, device=query.device).tril(group.before)
        settings = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        output = F.scaled_dot_product_attention(*states, attn_mask=seen, **settings)
        outputs.append(output.transpose(1, 2).reshape(-1, *query.shape[1:]))
    return torch.cat(outputs).index_select(0, shared.attention_order)


def last_query_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float) -> Tensor:
    """Attention of one query per item (`(items, heads, dim)`) on all keys of its item (`(tokens, key_heads, dim)`)."""
    if layout.shared is not None:
        key, value = key.index_select(0, layout.shared.item_rows), value.index_select(0, layout.shared.item_rows)
        layout = layout.shared.items
    if not torch.is_grad_enabled():  # kernels have no backward for queries that are fewer than the keys
        run = kernel("varlen_attention", query, key, value, layout.single_rows, layout.cu_seqlens)
        if run is not None:
            return run(query, key, value, layout.single_rows, scaling, True, layout.cu_seqlens)
    outputs, items = [], torch.argsort(layout.item_order)
    start = 0
    for index, valid in layout.causal_groups:
        rows = items[start : start + index.shape[0]]
        start += index.shape[0]
        keys, values = _gather_items(key, index), _gather_items(value, index)
        outputs.append(_attend(query[rows][:, :, None], keys, values, scaling, False, valid)[:, :, 0])
    return torch.cat(outputs).index_select(0, layout.item_order)


def _gather_items(states: Tensor, index: Tensor) -> Tensor:
    """Rows of `(tokens, heads, dim)` as `(items, heads, width, dim)`."""
    return states.index_select(0, index.reshape(-1)).view(*index.shape, *states.shape[1:]).transpose(1, 2)


class MoEMBGatedDeltaNet(Qwen3_5MoeGatedDeltaNet):
    """Gated DeltaNet mixer over packed tokens; parameters as in transformers' class."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.norm = MoEMBRMSNormGated(self.head_v_dim, eps=self.layer_norm_epsilon)
        # transformers keeps local kernel classes here when `kernels` is installed; they cannot be pickled
        self.__dict__.pop("_kernel_funcs", None)
        self.conv_activation = ACT2FN[self.activation]

    @force_accelerate_hooks("conv1d")  # its weight is read here, its forward never runs
    def forward(self, hidden_states: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Mix `(tokens, hidden)` rows; also returns beta, `(tokens, value_heads)` fp32."""
        mixed = self._convolve(self.in_proj_qkv(hidden_states), layout)
        beta = sigmoid(self.in_proj_b(hidden_states).float())
        decay = -self.A_log.float().exp() * softplus(self.in_proj_a(hidden_states).float() + self.dt_bias.float())
        with torch.autocast(hidden_states.device.type, enabled=False):
            if layout.shared is None:
                mixed = delta_rule(*self._heads(mixed), decay, beta, layout)
            else:
                mixed = continued_delta_rule(*self._heads(mixed), decay, beta, layout.shared)
        gate = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        mixed = self.norm(mixed, gate).flatten(-2)
        return self.out_proj(mixed), beta

    def _heads(self, mixed: Tensor) -> list[Tensor]:
        """Queries, keys and values, `(tokens, heads, dim)`, from what the convolution made of their projections."""
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        dims = ((query, self.head_k_dim), (key, self.head_k_dim), (value, self.head_v_dim))
        return [states.unflatten(-1, (-1, dim)) for states, dim in dims]

    def _convolve(self, hidden_states: Tensor, layout: PackedLayout) -> Tensor:
        mixed = self._activated_conv(hidden_states, layout.cu_seqlens)
        if layout.shared is None:
            return mixed
        seams = layout.shared.seams(self.conv_kernel_size)
        first = self._activated_conv(hidden_states.index_select(0, seams.rows), seams.cu_seqlens)
        return mixed.index_copy_(0, seams.target, first.index_select(0, seams.place))

    def _activated_conv(self, hidden_states: Tensor, cu_seqlens: Tensor) -> Tensor:
        weight = self.conv1d.weight.squeeze(1)
        run = None
        if self.activation == "silu":
            run = kernel("causal_conv", hidden_states, weight, cu_seqlens)
        if run is not None:
            return run(hidden_states, weight, cu_seqlens, "silu")
        return self.conv_activation(causal_conv(hidden_states, weight, cu_seqlens))


class MoEMBAttention(Qwen3_5MoeAttention):
    """Gated grouped-query attention over packed tokens; parameters as in transformers' class."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_norm = MoEMBRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = MoEMBRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        layout: PackedLayout,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """Mix `(tokens, hidden)` rows; with `query_rows` (`(items,)`, the last row of each item) only these."""
        cos, sin = position_embeddings
        key = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        key = rotate(key, cos, sin, value.dtype)
        if query_rows is not None:
            hidden_states, cos, sin = hidden_states[query_rows], cos[query_rows], sin[query_rows]
        query, gate = self.q_proj(hidden_states).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        query = rotate(self.q_norm(query), cos, sin, value.dtype)
        if query_rows is not None:
            mixed = last_query_attention(query, key, value, layout, self.scaling)
        else:
            mixed = varlen_attention(query, key, value, layout, self.scaling, causal=True)
        return self.o_proj((mixed * sigmoid(gate)).flatten(-2))


class MoEMBVisionAttention(Qwen3_5MoeVisionAttention):
    """Bidirectional attention inside each image or video frame, without a Python loop over images."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: PackedLayout
    ) -> Tensor:
        """Mix `(patches, hidden)` rows."""
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(1)
        query, key = (rotate(states, *position_embeddings, value.dtype) for states in (query, key))
        mixed = varlen_attention(query, key, value, layout, self.scaling, causal=False)
        return self.proj(mixed.flatten(-2))
