"""Naive references of the kernels' operations, in the precision of their inputs: pass float64.

They are written to be read, and say nothing about how a fast implementation should work. All are differentiable.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def segments(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """First row and end of each item."""
    bounds = cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))


def experts(hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor):
    """Sum over a token's slots of `weight * down_e(silu(gate_e x) * up_e x)`; slots of expert `num_experts` give 0."""
    num_experts = gate_up_proj.shape[0]
    output = torch.zeros_like(hidden_states)
    for expert in range(num_experts):
        token, slot = (expert_index == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[token] @ gate_up_proj[expert].T).chunk(2, dim=-1)
        result = (F.silu(gate) * up) @ down_proj[expert].T
        output = output.index_add(0, token, result * weight[token, slot, None])
    return output


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ weight^T + bias`."""
    output = input @ weight.T
    return output if bias is None else output + bias


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor):
    """The recurrence token by token: `S = e^decay S (1 - beta k k^T) + beta v k^T`, `o = S q`."""
    repeat = value.shape[1] // key.shape[1]
    query, key = (
        (states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeat, 1)
        for states in (query, key)
    )
    query = query * query.shape[-1] ** -0.5
    rows: list[Tensor] = []
    for start, end in segments(cu_seqlens):
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        for token in range(start, end):
            state = state * decay[token].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[token])
            written = (value[token] - read) * beta[token][:, None]
            state = state + key[token][:, :, None] * written[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(rows) if rows else value.new_zeros(value.shape)


def causal_conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None) -> Tensor:
    """Each channel's own filter over the present and the last `taps - 1` tokens of its item, oldest tap first."""
    taps = weight.shape[1]
    parts = []
    for start, end in segments(cu_seqlens):
        rows = torch.cat([hidden_states.new_zeros(taps - 1, hidden_states.shape[1]), hidden_states[start:end]])
        parts.append(sum(rows[tap : tap + end - start] * weight[:, tap] for tap in range(taps)))
    output = torch.cat(parts)
    return F.silu(output) if activation == "silu" else output


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred: `x / sqrt(mean x^2 + eps) * (1 + weight)`."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * (1 + weight)


def gated_rms_norm(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean x^2 + eps) * weight * silu(gate)`."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight * F.silu(gate)


def top_k_router(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the `k` largest in descending order, renormalised to sum 1."""
    probabilities = torch.softmax(logits, dim=-1)
    weight, expert_index = torch.topk(probabilities, k, dim=-1)
    return expert_index, weight / weight.sum(-1, keepdim=True)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float, causal: bool
) -> Tensor:
    """Softmax attention inside each item; consecutive query heads share a key head."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    parts = []
    for start, end in segments(cu_seqlens):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scaling
        if causal:
            future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), value[start:end]))
    return torch.cat(parts)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return F.silu(gate) * up


def rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `cos.shape[-1]` features of each head (first half against second half)."""
    rotated, rest = states.split([cos.shape[-1], states.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([rotated * cos[:, None] + turned * sin[:, None], rest], dim=-1)
