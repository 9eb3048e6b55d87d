"""Experts in plain torch: any device, differentiable by autograd; no Triton.

Rows are sorted by expert, so each expert is one dense product. The layout needs the row counts on the host: on CUDA
this path waits for the device once per call, the Triton path never does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_count(count: int) -> int:
    """The row count rounded up to eight steps per power of two, at least to a multiple of 8; 0 stays 0.

    oneDNN compiles a 16-bit product anew for every row count it has not met, which costs more than the product.
    """
    step = max(8, (1 << (count - 1).bit_length()) // 16) if count else 1
    return -(-count // step) * step


def experts_loop(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """One pair of dense products per expert that has rows; shapes and dtypes as in `experts`."""
    tokens, slots = expert_index.shape
    num_experts = gate_up_proj.shape[0]
    flat = expert_index.reshape(-1)
    flat = torch.where((flat < 0) | (flat > num_experts), num_experts, flat)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    pad = hidden_states.device.type == "cpu" and hidden_states.dtype != torch.float32
    scale = weight.reshape(-1, 1).to(hidden_states.dtype)
    outputs, start = [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        pair = order[start : start + count]
        start += count
        rows = hidden_states.index_select(0, pair // slots)
        if pad:
            rows = F.pad(rows, (0, 0, 0, padded_count(count) - count))
        gate, up = F.linear(rows, gate_up_proj[expert]).chunk(2, dim=-1)
        activation = F.silu(gate) * up
        activation = activation * F.pad(scale.index_select(0, pair), (0, 0, 0, rows.shape[0] - count))
        outputs.append(F.linear(activation, down_proj[expert])[:count])
    if not outputs:
        nothing = hidden_states[:0].sum() + weight[:0].sum().to(hidden_states.dtype)  # 0, with a graph for backward
        return torch.zeros_like(hidden_states) + nothing
    pairs = hidden_states.new_zeros(tokens * slots, hidden_states.shape[1])
    pairs = pairs.index_copy(0, order[:start], torch.cat(outputs))
    return pairs.view(tokens, slots, -1).sum(1)  # a token's slots are added in their own order


def experts_grouped_mm(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """The same through torch's grouped product, without a device sync; shapes and dtypes as in `experts`.

    torch leaves the rows behind the last group uninitialised, forward and backward, so the rows of skipped slots are
    cut off by `where` wherever a gradient leaves: multiplying them by 0 would let a NaN through.
    """
    tokens, slots = expert_index.shape
    num_experts = gate_up_proj.shape[0]
    flat = expert_index.reshape(-1)
    flat = torch.where((flat < 0) | (flat > num_experts), num_experts, flat)
    routed, order = torch.sort(flat, stable=True)
    bounds = torch.arange(1, num_experts + 1, device=flat.device, dtype=flat.dtype)
    offsets = torch.searchsorted(routed, bounds).to(torch.int32)
    rows = torch.where((routed < num_experts)[:, None], hidden_states.index_select(0, order // slots), 0)
    gate, up = F.grouped_mm(rows, gate_up_proj.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    scale = weight.reshape(-1, 1).to(rows.dtype).index_select(0, order)
    activation = F.silu(gate) * up * torch.where((routed < num_experts)[:, None], scale, 0)
    outputs = F.grouped_mm(activation, down_proj.transpose(1, 2), offs=offsets)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    pairs = torch.where((flat < num_experts)[:, None], outputs.index_select(0, place), 0)
    return pairs.view(tokens, slots, -1).sum(1)
