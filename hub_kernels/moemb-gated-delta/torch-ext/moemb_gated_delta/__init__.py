"""Gated DeltaNet over packed tokens: delta rule, causal convolution, norms; Triton on CUDA, torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layers
from .backends import gated_delta_rule_fla, triton_path, use_fla, use_triton
from .checks import (
    check_conv,
    check_delta_rule,
    check_norm,
    supports_conv,
    supports_delta_rule,
    supports_norm,
)
from .portable import causal_conv_torch, gated_delta_rule_torch, gated_rms_norm_torch, rms_norm_torch


# Version of the operations' signatures that this build offers; raised together with `CONTRACT` of the model's code.
CONTRACT = 1

__all__ = ["causal_conv", "gated_delta_rule", "gated_rms_norm", "layers", "rms_norm", "supports"]

_SUPPORTS = {
    "gated_delta_rule": supports_delta_rule,
    "causal_conv": supports_conv,
    "rms_norm": supports_norm,
    "gated_rms_norm": supports_norm,
}


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Varlen gated delta rule (Gated DeltaNet, arXiv 2412.06464).

    Per value head, with `alpha = exp(decay)`: `S_t = alpha_t S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T` and
    `out_t = S_t q_t`. Keys and queries are L2-normalised here (`x * rsqrt(sum x^2 + 1e-6)`), queries multiplied by
    `key_dim ** -0.5`; `S` starts at 0 in every segment. Arithmetic is fp32; on CUDA the products of 16-bit inputs take
    TF32 operands. Differentiable in the first five arguments.

    Args:
        query, key (`torch.Tensor` of shape `(tokens, key_heads, key_dim)`): fp32, bf16, fp16; may be strided views.
        value (`torch.Tensor` of shape `(tokens, value_heads, value_dim)`): `value_heads` is a multiple of `key_heads`;
            consecutive value heads share a key head. Dtype of `query`.
        decay (`torch.FloatTensor` of shape `(tokens, value_heads)`): log decay, at most 0.
        beta (`torch.FloatTensor` of shape `(tokens, value_heads)`): write strength.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): from 0 to `tokens`; empty segments are fine.

    Returns:
        `torch.Tensor` of shape `(tokens, value_heads, value_dim)`, dtype of `value`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, naming the argument.
    """
    check_delta_rule(query, key, value, decay, beta, cu_seqlens)
    inputs = (query, key, value, decay, beta)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if use_fla(value, cu_seqlens.shape[0] - 1, needs_grad):
        return gated_delta_rule_fla(*inputs, cu_seqlens)
    run = triton_path().gated_delta_rule_fused if use_triton(value) else gated_delta_rule_torch
    return run(*inputs, cu_seqlens)


def causal_conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None = "silu") -> Tensor:
    """Varlen depthwise causal convolution with fp32 accumulation; never looks across the start of a segment.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, channels)`): fp32, bf16 or fp16.
        weight (`torch.Tensor` of shape `(channels, taps)`): oldest tap first.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): from 0 to `tokens`.
        activation (`str`, *optional*): "silu" or None.

    Returns:
        `torch.Tensor` of shape `(tokens, channels)`, dtype of `hidden_states`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, naming the argument.
    """
    check_conv(hidden_states, weight, cu_seqlens, activation)
    run = triton_path().causal_conv_fused if use_triton(hidden_states) else causal_conv_torch
    return run(hidden_states, weight, cu_seqlens, activation)


def rms_norm(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Zero-centred RMSNorm over the last axis: `x * rsqrt(mean x^2 + eps) * (1 + weight)`, computed in fp32.

    Args:
        states (`torch.Tensor` of shape `(..., dim)`): fp32, bf16 or fp16; dim up to 16384.
        weight (`torch.Tensor` of shape `(dim,)`).
        eps (`float`): added to the mean square.
        dtype (`torch.dtype`, *optional*): dtype of the result, that of `states` by default.

    Returns:
        `torch.Tensor` of shape `(..., dim)`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, naming the argument.
    """
    check_norm(states, weight)
    run = triton_path().rms_norm_fused if use_triton(states) else rms_norm_torch
    return run(states, weight, eps, dtype or states.dtype)


def gated_rms_norm(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean x^2 + eps) * weight * silu(gate)` over the last axis, computed in fp32.

    Args:
        states (`torch.Tensor` of shape `(..., dim)`): fp32, bf16 or fp16; dim up to 16384.
        gate (`torch.Tensor` of shape `(..., dim)`).
        weight (`torch.Tensor` of shape `(dim,)`).
        eps (`float`): added to the mean square.

    Returns:
        `torch.Tensor` of shape `(..., dim)`, dtype of `gate`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, naming the argument.
    """
    check_norm(states, weight, gate)
    run = triton_path().gated_rms_norm_fused if use_triton(states) else gated_rms_norm_torch
    return run(states, gate, weight, eps)


def supports(op: str, *tensors: Tensor) -> bool:
    """Whether this module runs `op` on these tensors, given in the order of the op's arguments; never raises."""
    return op in _SUPPORTS and _SUPPORTS[op](*tensors)
