"""RMS norms, forward and backward: fp32 inside, one rounding to the wanted dtype."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake
from .row_checks import NOTHING, are_rows, check_dtype, check_rows, check_weight, is_row_weight, readable


@register_fake("rms_norm")
def _(states, weight, offset, eps, out) -> None:
    return None


@register_fake("rms_norm_backward")
def _(states, weight, offset, eps, grad, grad_states, grad_weight) -> None:
    return None


@register_fake("gated_rms_norm")
def _(states, gate, weight, eps, out) -> None:
    return None


@register_fake("gated_rms_norm_backward")
def _(states, gate, weight, eps, grad, grad_states, grad_gate, grad_weight) -> None:
    return None


def _norm(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    output = torch.empty(states.shape, dtype=dtype)
    ops.rms_norm(states, weight, 1.0, eps, output)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.eps = eps
        return _norm(states, weight, eps, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, weight = ctx.saved_tensors
        grad_states = torch.empty(states.shape, dtype=states.dtype)
        wanted = ctx.needs_input_grad[1]
        grad_weight = torch.empty(weight.shape, dtype=torch.float32) if wanted else NOTHING
        ops.rms_norm_backward(states, weight, 1.0, ctx.eps, readable(grad_output), grad_states, grad_weight)
        return grad_states, grad_weight.to(weight.dtype) if wanted else None, None, None


def rms_norm(states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Zero-centred RMS norm, `x / sqrt(mean(x^2) + eps) * (1 + weight)` (arXiv 1910.07467, as in Qwen3.5).

    Args:
        states (`torch.Tensor` of shape `(..., dim)`): fp32 or bf16; rows may be strided when there are at most two
            leading axes, else they are copied.
        weight (`torch.Tensor` of shape `(dim,)`): fp32 or bf16.
        eps (`float`): added to the mean square.
        dtype (`torch.dtype`): dtype of the result, fp32 or bf16.

    Returns:
        `torch.Tensor` of shape `(..., dim)`, contiguous; differentiable in `states` and `weight`.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take.
    """
    check_rows("rms_norm", states=states)
    check_weight("rms_norm", weight, states.shape[-1])
    check_dtype("rms_norm", dtype)
    states, weight = readable(states), weight.contiguous()
    if tracks(states, weight):
        return _RMSNorm.apply(states, weight, eps, dtype)
    return _norm(states, weight, eps, dtype)


def supports_rms_norm(states: Tensor, weight: Tensor) -> bool:
    """Whether `rms_norm` runs on these tensors without a copy."""
    return are_rows(states) and is_row_weight(weight, states)


def _gated_norm(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    output = torch.empty(gate.shape, dtype=gate.dtype)
    ops.gated_rms_norm(states, gate, weight, eps, output)
    return output


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(states, gate, weight)
        ctx.eps = eps
        return _gated_norm(states, gate, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        states, gate, weight = ctx.saved_tensors
        grad_states = torch.empty(states.shape, dtype=states.dtype)
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype)
        wanted = ctx.needs_input_grad[2]
        grad_weight = torch.empty(weight.shape, dtype=torch.float32) if wanted else NOTHING
        ops.gated_rms_norm_backward(
            states, gate, weight, ctx.eps, readable(grad_output), grad_states, grad_gate, grad_weight
        )
        return grad_states, grad_gate, grad_weight.to(weight.dtype) if wanted else None, None


def gated_rms_norm(states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm and SiLU gate, `x / sqrt(mean(x^2) + eps) * weight * silu(gate)` (Gated DeltaNet, arXiv 2412.06464).

    Args:
        states (`torch.Tensor` of shape `(..., dim)`): fp32 or bf16; rows may be strided when there are at most two
            leading axes, else they are copied.
        gate (`torch.Tensor` of shape `(..., dim)`): fp32 or bf16, the same shape; strides as for `states`.
        weight (`torch.Tensor` of shape `(dim,)`): fp32 or bf16, not zero-centred.
        eps (`float`): added to the mean square.

    Returns:
        `torch.Tensor` of shape `(..., dim)` in the dtype of `gate`, contiguous; differentiable in all tensors.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take.
    """
    check_rows("gated_rms_norm", states=states, gate=gate)
    check_weight("gated_rms_norm", weight, states.shape[-1])
    states, gate, weight = readable(states), readable(gate), weight.contiguous()
    if tracks(states, gate, weight):
        return _GatedRMSNorm.apply(states, gate, weight, eps)
    return _gated_norm(states, gate, weight, eps)


def supports_gated_rms_norm(states: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether `gated_rms_norm` runs on these tensors without a copy."""
    return are_rows(states, gate) and is_row_weight(weight, states)
