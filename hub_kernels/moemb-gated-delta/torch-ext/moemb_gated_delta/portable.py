"""The operations in plain torch, the reference of the kernels: any device, differentiable, fp32 arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


MAX_CHUNK = 64


class _Chunks(NamedTuple):
    """All segments cut into chunks; chunk 0 of every segment first, then chunk 1 of those that have one, and so on."""

    rows: Tensor  # (chunks, size): token of each position; the number of tokens marks a position behind the segment
    place: Tensor  # (tokens,): flat position of each token
    active: list[int]  # chunks of each step; the segments of a step are a prefix of those of the step before


def _chunks(cu_seqlens: Tensor, tokens: int) -> _Chunks:
    device = cu_seqlens.device
    lengths, order = torch.sort(cu_seqlens.long().diff(), descending=True, stable=True)
    starts, longest = cu_seqlens.long()[:-1][order], int(lengths[0])
    size = MAX_CHUNK
    while size > 16 and size // 2 >= longest:
        size //= 2
    steps = torch.arange(-(-longest // size), device=device)
    active = (lengths[None] > steps[:, None] * size).sum(1).tolist()
    within = torch.arange(size, device=device)
    rows = []
    for step, count in enumerate(active):
        position = step * size + within
        rows.append(torch.where(position < lengths[:count, None], starts[:count, None] + position, tokens))
    rows = torch.cat(rows)
    place = torch.zeros(tokens + 1, dtype=torch.long, device=device)
    place[rows.reshape(-1)] = torch.arange(rows.numel(), device=device)
    return _Chunks(rows, place[:tokens], active)


def _unit(states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule_torch(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Varlen gated delta rule by chunks; shapes and dtypes as in `gated_delta_rule`.

    Inside a chunk the rule is a unit lower triangular system (WY representation, arXiv 2412.06464); chunks of all
    segments are solved at once, the state then goes from chunk to chunk. Reads `cu_seqlens` on the host.
    """
    (tokens, value_heads, value_dim), dtype = value.shape, value.dtype
    key_heads, key_dim = key.shape[1:]
    if tokens == 0 or cu_seqlens.shape[0] < 2:
        return torch.zeros_like(value)
    chunks, repeat = _chunks(cu_seqlens, tokens), value_heads // key_heads
    count, size = chunks.rows.shape
    flat = chunks.rows.reshape(-1)

    def chunked(states: Tensor) -> Tensor:  # (tokens, heads, dim) -> (heads, chunks, size, dim)
        # a position behind the segment is a row of zeros: it writes nothing and does not age the memory
        padded = torch.cat([states.float(), states.new_zeros(1, *states.shape[1:], dtype=torch.float32)])
        return padded.index_select(0, flat).view(count, size, states.shape[1], -1)

    key, query = (_unit(chunked(states)).permute(2, 0, 1, 3) for states in (key, query))
    query = query * key_dim**-0.5
    value = chunked(value).permute(2, 0, 1, 3)
    beta = chunked(beta).permute(2, 0, 1, 3)
    decay = chunked(decay)[..., 0].permute(2, 0, 1).cumsum(-1)  # (value_heads, chunks, size)

    # pairs with the future become exp(0) and are cut off afterwards: exp of their difference may overflow
    pairwise = (decay[..., :, None] - decay[..., None, :]).tril().exp().unflatten(0, (key_heads, repeat))
    key_t = key.transpose(-1, -2)
    system = ((key @ key_t)[:, None] * pairwise).flatten(0, 1) * beta
    attention = ((query @ key_t)[:, None] * pairwise).flatten(0, 1).tril()
    key, query = (states.repeat_interleave(repeat, dim=0) for states in (key, query))
    aged = decay.exp()[..., None]
    both = torch.cat([value * beta, key * beta * aged], dim=-1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    written, read = solved.split([value_dim, key_dim], dim=-1)
    total = decay[..., -1:, None]
    carried = (key * (total - decay[..., None]).exp()).transpose(-1, -2)
    output = _scan(query * aged, carried, written, read, attention, total.exp(), chunks.active)
    output = output.permute(1, 2, 0, 3).reshape(count * size, value_heads, value_dim)
    return output.index_select(0, chunks.place).to(dtype)


def _scan(
    query: Tensor, carried: Tensor, written: Tensor, read: Tensor, attention: Tensor, total: Tensor, active: list[int]
) -> Tensor:
    """Carry the state of each segment through its chunks; returns `(heads, chunks, size, value_dim)`."""
    outputs, state, start = [], None, 0
    for step, count in enumerate(active):
        rows = slice(start, start + count)
        start += count
        new, seen = written[:, rows], 0
        if state is not None:
            state = state[:, :count]
            new = new - read[:, rows] @ state
            seen = query[:, rows] @ state
        outputs.append(seen + attention[:, rows] @ new)
        if step + 1 < len(active):
            update = carried[:, rows] @ new
            state = update if state is None else state * total[:, rows] + update
    return torch.cat(outputs, dim=1)


def causal_conv_torch(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None) -> Tensor:
    """Varlen depthwise causal convolution; shapes and dtypes as in `causal_conv`."""
    tokens, taps = hidden_states.shape[0], weight.shape[1]
    if tokens == 0:
        return torch.zeros_like(hidden_states)
    token = torch.arange(tokens, device=hidden_states.device)
    segment = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    into = token - cu_seqlens.long()[segment]  # how far each token stands into its segment
    rows, columns = hidden_states.float(), weight.float()
    output = rows * columns[:, -1]
    for back in range(1, min(taps, tokens)):
        # selected, not multiplied by 0: a NaN must not reach the next segment
        shifted = torch.where((into[back:] >= back)[:, None], rows[:-back], 0)
        output = output + F.pad(shifted * columns[:, taps - 1 - back], (0, 0, back, 0))
    if activation == "silu":
        output = F.silu(output)
    return output.to(hidden_states.dtype)


def rms_norm_torch(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Zero-centred RMSNorm; shapes and dtypes as in `rms_norm`."""
    rows = states.float()
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(dtype)


def gated_rms_norm_torch(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm times SiLU gate; shapes and dtypes as in `gated_rms_norm`."""
    rows = states.float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * F.silu(gate.float())).to(gate.dtype)
