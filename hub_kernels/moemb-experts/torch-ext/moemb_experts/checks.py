"""Argument checks: every error names the argument and its value."""

from __future__ import annotations

import torch
from torch import Tensor


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int64, torch.int32)


def check_experts(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Raise `ValueError` unless the five arguments of `experts` fit together."""
    if hidden_states.dim() != 2:
        raise ValueError(f"`hidden_states` must be (tokens, hidden), got {tuple(hidden_states.shape)}")
    if hidden_states.dtype not in FLOAT_DTYPES:
        raise ValueError(f"`hidden_states` must be float32, bfloat16 or float16, got {hidden_states.dtype}")
    tokens, hidden = hidden_states.shape
    if expert_index.dim() != 2 or expert_index.shape[0] != tokens:
        raise ValueError(f"`expert_index` must be ({tokens}, slots), got {tuple(expert_index.shape)}")
    if expert_index.dtype not in INDEX_DTYPES:
        raise ValueError(f"`expert_index` must be int64 or int32, got {expert_index.dtype}")
    if weight.shape != expert_index.shape:
        raise ValueError(f"`weight` must be {tuple(expert_index.shape)}, got {tuple(weight.shape)}")
    if not weight.dtype.is_floating_point:
        raise ValueError(f"`weight` must be floating point, got {weight.dtype}")
    if gate_up_proj.dim() != 3 or gate_up_proj.shape[2] != hidden or gate_up_proj.shape[1] % 2:
        raise ValueError(
            f"`gate_up_proj` must be (experts, 2 * intermediate, {hidden}), got {tuple(gate_up_proj.shape)}"
        )
    expected = (gate_up_proj.shape[0], hidden, gate_up_proj.shape[1] // 2)
    if tuple(down_proj.shape) != expected:
        raise ValueError(f"`down_proj` must be {expected}, got {tuple(down_proj.shape)}")
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if tensor.dtype != hidden_states.dtype:
            raise ValueError(f"`{name}` must be {hidden_states.dtype} as `hidden_states`, got {tensor.dtype}")
    for name, tensor in (
        ("expert_index", expert_index),
        ("weight", weight),
        ("gate_up_proj", gate_up_proj),
        ("down_proj", down_proj),
    ):
        if tensor.device != hidden_states.device:
            raise ValueError(f"`{name}` must be on {hidden_states.device} as `hidden_states`, got {tensor.device}")


def supports_experts(*tensors: Tensor) -> bool:
    """Whether `experts` runs on these tensors; never raises, reads no data."""
    if len(tensors) != 5:
        return False
    hidden_states, expert_index, weight, gate_up_proj, down_proj = tensors
    dtype, device = hidden_states.dtype, hidden_states.device
    return (
        dtype in FLOAT_DTYPES
        and device.type in ("cpu", "cuda")
        and gate_up_proj.dtype == down_proj.dtype == dtype
        and device == gate_up_proj.device == down_proj.device == weight.device == expert_index.device
        and expert_index.dtype in INDEX_DTYPES
        and weight.dtype.is_floating_point
        and hidden_states.dim() == expert_index.dim() == weight.dim() == 2
        and gate_up_proj.dim() == down_proj.dim() == 3
        and expert_index.shape == weight.shape
        and expert_index.shape[0] == hidden_states.shape[0]
        and gate_up_proj.shape[0] == down_proj.shape[0]
        and gate_up_proj.shape[2] == down_proj.shape[1] == hidden_states.shape[1]
        and gate_up_proj.shape[1] == 2 * down_proj.shape[2]
    )
