"""Argument checks: every error names the argument and its value. `supports` asks the same without raising."""

from __future__ import annotations

import torch
from torch import Tensor


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OFFSET_DTYPES = (torch.int32, torch.int64)
MAX_KEY_DIM = 256
MAX_NORM_DIM = 16384


def _expect(condition: bool, name: str, wanted: str, tensor: Tensor) -> None:
    if not condition:
        raise ValueError(f"`{name}` must be {wanted}, got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}")


def check_offsets(cu_seqlens: Tensor, like: Tensor) -> None:
    """Raise `ValueError` unless `cu_seqlens` is a vector of integers on the device of `like`."""
    wanted = f"(segments + 1,) int32 or int64 on {like.device}"
    good = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 0 and cu_seqlens.dtype in OFFSET_DTYPES
    _expect(good and cu_seqlens.device == like.device, "cu_seqlens", wanted, cu_seqlens)


def check_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> None:
    """Raise `ValueError` unless the arguments of `gated_delta_rule` fit together."""
    dtype = value.dtype
    _expect(value.dim() == 3 and dtype in FLOAT_DTYPES, "value", "(tokens, value_heads, value_dim), floating", value)
    tokens, value_heads, _ = value.shape
    good = key.dim() == 3 and key.shape[0] == tokens and key.dtype == dtype and key.device == value.device
    _expect(good and 0 < key.shape[2] <= MAX_KEY_DIM, "key", f"({tokens}, key_heads, <= {MAX_KEY_DIM}) {dtype}", key)
    good = query.shape == key.shape and query.dtype == dtype and query.device == value.device
    _expect(good, "query", f"{tuple(key.shape)} {dtype} as `key`", query)
    if key.shape[1] == 0 or value_heads % key.shape[1]:
        raise ValueError(f"`value` has {value_heads} heads, which is no multiple of the {key.shape[1]} of `key`")
    for name, tensor in (("decay", decay), ("beta", beta)):
        good = tuple(tensor.shape) == (tokens, value_heads) and tensor.dtype == torch.float32
        _expect(good and tensor.device == value.device, name, f"({tokens}, {value_heads}) float32", tensor)
    check_offsets(cu_seqlens, value)


def check_conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None) -> None:
    """Raise `ValueError` unless the arguments of `causal_conv` fit together."""
    good = hidden_states.dim() == 2 and hidden_states.dtype in FLOAT_DTYPES
    _expect(good, "hidden_states", "(tokens, channels), floating", hidden_states)
    channels = hidden_states.shape[1]
    good = weight.dim() == 2 and weight.shape[0] == channels and weight.shape[1] > 0 and weight.dtype in FLOAT_DTYPES
    _expect(good and weight.device == hidden_states.device, "weight", f"({channels}, taps), floating", weight)
    if activation not in (None, "silu"):
        raise ValueError(f"`activation` must be 'silu' or None, got {activation!r}")
    check_offsets(cu_seqlens, hidden_states)


def check_norm(states: Tensor, weight: Tensor, gate: Tensor | None = None) -> None:
    """Raise `ValueError` unless the arguments of `rms_norm` or `gated_rms_norm` fit together."""
    _expect(states.dim() > 0 and states.dtype in FLOAT_DTYPES, "states", "(..., dim), floating", states)
    dim = states.shape[-1]
    _expect(0 < dim <= MAX_NORM_DIM, "states", f"(..., dim) with dim from 1 to {MAX_NORM_DIM}", states)
    good = tuple(weight.shape) == (dim,) and weight.dtype in FLOAT_DTYPES and weight.device == states.device
    _expect(good, "weight", f"({dim},), floating, on {states.device}", weight)
    if gate is not None:
        good = gate.shape == states.shape and gate.dtype in FLOAT_DTYPES and gate.device == states.device
        _expect(good, "gate", f"{tuple(states.shape)}, floating, on {states.device}", gate)


def supports_delta_rule(*tensors: Tensor) -> bool:
    """Whether `gated_delta_rule` runs on these tensors, `cu_seqlens` given or not."""
    if len(tensors) not in (5, 6):
        return False
    query, key, value, decay, beta = tensors[:5]
    return (
        value.dtype in FLOAT_DTYPES
        and query.dtype == key.dtype == value.dtype
        and decay.dtype == beta.dtype == torch.float32
        and value.device.type in ("cpu", "cuda")
        and query.device == key.device == value.device == decay.device == beta.device
        and query.dim() == value.dim() == 3
        and query.shape == key.shape
        and key.shape[0] == value.shape[0]
        and decay.shape == beta.shape == value.shape[:2]
        and 0 < key.shape[2] <= MAX_KEY_DIM
        and key.shape[1] > 0
        and value.shape[1] % key.shape[1] == 0
        and (len(tensors) == 5 or _offsets(tensors[5], value))
    )


def _offsets(cu_seqlens: Tensor, like: Tensor) -> bool:
    return cu_seqlens.dim() == 1 and cu_seqlens.dtype in OFFSET_DTYPES and cu_seqlens.device == like.device


def supports_conv(*tensors: Tensor) -> bool:
    """Whether `causal_conv` runs on these tensors, `cu_seqlens` given or not."""
    if len(tensors) not in (2, 3):
        return False
    states, weight = tensors[:2]
    return (
        states.dim() == weight.dim() == 2
        and states.dtype in FLOAT_DTYPES
        and weight.dtype in FLOAT_DTYPES
        and states.device.type in ("cpu", "cuda")
        and states.device == weight.device
        and states.shape[1] == weight.shape[0]
        and weight.shape[1] > 0
        and (len(tensors) == 2 or _offsets(tensors[2], states))
    )


def supports_norm(*tensors: Tensor) -> bool:
    """Whether `rms_norm` (states, weight) or `gated_rms_norm` (states, gate, weight) runs on these tensors."""
    if len(tensors) not in (2, 3):
        return False
    states, weight = tensors[0], tensors[-1]
    return (
        states.dim() > 0
        and 0 < states.shape[-1] <= MAX_NORM_DIM
        and weight.shape == states.shape[-1:]
        and all(tensor.dtype in FLOAT_DTYPES and tensor.device == states.device for tensor in tensors)
        and states.device.type in ("cpu", "cuda")
        and (len(tensors) == 2 or tensors[1].shape == states.shape)
    )
