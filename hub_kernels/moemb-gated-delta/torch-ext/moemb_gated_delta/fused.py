"""The operations through the Triton kernels, forward and backward."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from .convolution import conv_kernel, conv_state_gradient_kernel, conv_weight_gradient_kernel
from .delta_rule import chunk_kernel, scan_kernel
from .norms import norm_gradient_kernel, norm_kernel
from .portable import gated_delta_rule_torch


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
PRECISIONS = ("ieee", "tf32x3", "tf32")
# programs of the norms' backward: each leaves one row of partial sums, so more would cost memory and fewer idle cores
NORM_PROGRAMS = 512


def product_precision(dtype: torch.dtype) -> str:
    """How the delta rule's fp32 products use the tensor cores.

    fp32 inputs: three TF32 products, about fp32's accuracy. 16-bit inputs: one TF32 product, whose operands carry more
    bits than the inputs do. `MOEMB_GATED_DELTA_PRECISION` overrides it.
    """
    if INTERPRETED:
        return "ieee"
    value = os.environ.get("MOEMB_GATED_DELTA_PRECISION", "")
    if value and value not in PRECISIONS:
        raise ValueError(f"MOEMB_GATED_DELTA_PRECISION must be one of {', '.join(PRECISIONS)}, got {value!r}")
    return value or ("tf32x3" if dtype == torch.float32 else "tf32")


def chunk_size(tokens: int, segments: int) -> int:
    """Tokens of a chunk, from the mean length: the only one the host knows without waiting for the device."""
    return max(16, min(64, triton.next_power_of_2(max(1, tokens // segments))))


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu: Tensor) -> Tensor:
    (tokens, value_heads, value_dim), (key_heads, key_dim) = value.shape, key.shape[1:]
    segments, size = cu.shape[0] - 1, chunk_size(tokens, cu.shape[0] - 1)
    query, key, value, decay, beta = (_last_contiguous(tensor) for tensor in (query, key, value, decay, beta))
    first_chunk = F.pad(((cu.diff() + (size - 1)) // size).cumsum(0), (1, 0)).to(torch.int32)
    max_chunks = tokens // size + min(segments, tokens)  # every segment adds at most one chunk that is not full
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    solved = torch.empty(max_chunks, value_heads, size, size, dtype=torch.float32, device=value.device)
    sizes = (value_heads, value_heads // key_heads, key_dim, value_dim)
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], decay.stride(0))
    options = {"CHUNK": size, "KEYS": max(16, triton.next_power_of_2(key_dim)), "num_stages": 1}
    options["PRECISION"] = product_precision(value.dtype)
    columns = max(16, min(64, triton.next_power_of_2(value_dim)))
    chunk_kernel[(max_chunks * value_heads,)](
        *(query, key, value, decay, beta, out, solved, cu, first_chunk, segments, segments.bit_length()),
        *sizes,
        key_dim**-0.5,
        *strides,
        beta.stride(0),
        VALUES=columns,
        num_warps=4,
        **options,
    )
    if tokens > size:  # otherwise no segment has a second chunk
        blocks = triton.cdiv(value_dim, columns)
        scan_kernel[(segments * value_heads * blocks,)](
            *(query, key, value, decay, out, solved, cu, first_chunk),
            *sizes,
            blocks,
            key_dim**-0.5,
            *strides,
            VALUES=columns,
            num_warps=8 if size == 64 else 4,
            **options,
        )
    return out


class _DeltaRule(torch.autograd.Function):
    """Backward runs the torch path again: it saves the inputs alone."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, decay, beta, cu)
        return _delta_rule(query, key, value, decay, beta, cu)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        *inputs, cu = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed)]
            output = gated_delta_rule_torch(*inputs, cu)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, grad_output))
        return (*(next(found) if need else None for need in needed), None)


def gated_delta_rule_fused(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Varlen gated delta rule in Triton, backward in torch; shapes and dtypes as in `gated_delta_rule`."""
    if value.numel() == 0 or cu_seqlens.shape[0] < 2:
        return gated_delta_rule_torch(query, key, value, decay, beta, cu_seqlens)
    return _DeltaRule.apply(query, key, value, decay, beta, cu_seqlens.contiguous())


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, cu: Tensor, silu: bool) -> Tensor:
        (tokens, channels), taps = states.shape, weight.shape[1]
        ctx.save_for_backward(states, weight, cu)
        ctx.options = {"TAPS": taps, "ROWS": 32, "COLUMNS": 128}
        ctx.silu, ctx.grid = silu, (triton.cdiv(tokens, 32), triton.cdiv(channels, 128))
        out = torch.empty(tokens, channels, dtype=states.dtype, device=states.device)
        segments = cu.shape[0] - 1
        sizes = (tokens, channels, segments, segments.bit_length())
        conv_kernel[ctx.grid](states, weight, cu, out, *sizes, states.stride(0), SILU=silu, **ctx.options)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, weight, cu = ctx.saved_tensors
        (tokens, channels), segments = states.shape, cu.shape[0] - 1
        grad_output = grad_output.contiguous()
        grad_sum = torch.empty(tokens, channels, dtype=torch.float32, device=states.device)
        partial = torch.empty(ctx.grid[0], *weight.shape, dtype=torch.float32, device=states.device)
        sizes = (tokens, channels, segments, segments.bit_length())
        conv_weight_gradient_kernel[ctx.grid](
            states, weight, cu, grad_output, grad_sum, partial, *sizes, states.stride(0), SILU=ctx.silu, **ctx.options
        )
        grad_states = torch.empty(tokens, channels, dtype=states.dtype, device=states.device)
        conv_state_gradient_kernel[ctx.grid](grad_sum, weight, cu, grad_states, *sizes, **ctx.options)
        return grad_states, partial.sum(0).to(weight.dtype), None, None


def causal_conv_fused(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None) -> Tensor:
    """Varlen depthwise causal convolution in Triton; shapes and dtypes as in `causal_conv`."""
    if hidden_states.numel() == 0:
        return torch.zeros_like(hidden_states) + hidden_states.sum()
    states = _last_contiguous(hidden_states)
    return _Conv.apply(states, weight.contiguous(), cu_seqlens.contiguous(), activation == "silu")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, gate: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows, dim = states.shape
        ctx.save_for_backward(states, gate, weight)
        columns = triton.next_power_of_2(dim)
        ctx.eps, ctx.options = eps, {"GATED": gate is not None, "ROWS": max(1, 2048 // columns), "COLUMNS": columns}
        ctx.options["num_warps"] = 4 if columns <= 2048 else 8
        out = torch.empty(rows, dim, dtype=dtype, device=states.device)
        gates = states if gate is None else gate
        grid = (triton.cdiv(rows, ctx.options["ROWS"]),)
        norm_kernel[grid](states, gates, weight, out, rows, dim, eps, **ctx.options)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, gate, weight = ctx.saved_tensors
        rows, dim = states.shape
        programs = min(NORM_PROGRAMS, triton.cdiv(rows, ctx.options["ROWS"]))
        grad_states = torch.empty(rows, dim, dtype=states.dtype, device=states.device)
        grad_gate = None if gate is None else torch.empty_like(gate)
        partial = torch.empty(programs, dim, dtype=torch.float32, device=states.device)
        norm_gradient_kernel[(programs,)](
            *(states, states if gate is None else gate, weight, grad_output.contiguous(), grad_states),
            *(grad_states if gate is None else grad_gate, partial, rows, dim, ctx.eps, programs),
            **ctx.options,
        )
        return grad_states, grad_gate, partial.sum(0).to(weight.dtype), None, None


def rms_norm_fused(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Zero-centred RMSNorm in Triton; shapes and dtypes as in `rms_norm`."""
    rows = states.reshape(-1, states.shape[-1]).contiguous()
    if rows.shape[0] == 0:
        return rows.to(dtype).view(states.shape)
    return _Norm.apply(rows, None, weight.contiguous(), eps, dtype).view(states.shape)


def gated_rms_norm_fused(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm times SiLU gate in Triton; shapes and dtypes as in `gated_rms_norm`."""
    rows, gates = (tensor.reshape(-1, states.shape[-1]).contiguous() for tensor in (states, gate))
    if rows.shape[0] == 0:
        return gates.view(gate.shape)
    return _Norm.apply(rows, gates, weight.contiguous(), eps, gate.dtype).view(states.shape)
