"""SwiGLU and rotary embedding, forward and backward: fp32 inside, one rounding."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake
from .row_checks import FLOATS, are_rows, check_dtype, check_rows, is_rows, readable


@register_fake("swiglu")
def _(gate, up, out) -> None:
    return None


@register_fake("swiglu_backward")
def _(gate, up, grad, grad_gate, grad_up) -> None:
    return None


@register_fake("rotary")
def _(states, cos, sin, backward, out) -> None:
    return None


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    output = torch.empty(gate.shape, dtype=gate.dtype)
    ops.swiglu(gate, up, output)
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype) for _ in range(2))
        ops.swiglu_backward(gate, up, readable(grad_output), grad_gate, grad_up)
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (arXiv 2002.05202).

    Args:
        gate (`torch.Tensor` of shape `(..., dim)`): fp32 or bf16; rows may be strided when there are at most two
            leading axes (the halves of one projection), else they are copied.
        up (`torch.Tensor` of shape `(..., dim)`): shape and dtype of `gate`; strides of its own.

    Returns:
        `torch.Tensor` of shape `(..., dim)` in the dtype of `gate`, contiguous; differentiable in both.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take.
    """
    check_rows("swiglu", gate=gate, up=up)
    if up.dtype != gate.dtype:
        raise ValueError(f"swiglu: `up` must have the dtype of `gate`, {gate.dtype}, got {up.dtype}")
    gate, up = readable(gate), readable(up)
    return _SwiGLU.apply(gate, up) if tracks(gate, up) else _swiglu(gate, up)


def supports_swiglu(gate: Tensor, up: Tensor) -> bool:
    """Whether `swiglu` runs on these tensors without a copy."""
    return are_rows(gate, up) and gate.dtype == up.dtype


def _rotary(states: Tensor, cos: Tensor, sin: Tensor, backward: bool, dtype: torch.dtype) -> Tensor:
    output = torch.empty(states.shape, dtype=dtype)
    ops.rotary(states, cos, sin, backward, output)
    return output


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = states.dtype
        return _rotary(states, cos, sin, False, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        return _rotary(readable(grad_output), *ctx.saved_tensors, True, ctx.dtype), None, None, None


def rotary(states: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary position embedding of the leading features (arXiv 2104.09864); the rest passes through.

    Args:
        states (`torch.Tensor` of shape `(tokens, heads, dim)`): fp32 or bf16; the last axis contiguous, else copied.
        cos, sin (`torch.Tensor` of shape `(tokens, rotary_dim)`): tables; `rotary_dim` even and at most `dim`.
        dtype (`torch.dtype`): dtype of the result, fp32 or bf16.

    Returns:
        `torch.Tensor` of shape `(tokens, heads, dim)`, contiguous; differentiable in `states` alone.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take.
    """
    check_rows("rotary", states=states)
    check_dtype("rotary", dtype)
    if states.dim() != 3:
        raise ValueError(f"rotary: `states` must be (tokens, heads, dim), got shape {tuple(states.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        rotary_dim = table.shape[-1] if table.dim() == 2 else -1
        if rotary_dim % 2 or not 0 <= rotary_dim <= states.shape[2] or table.shape != (states.shape[0], rotary_dim):
            raise ValueError(
                f"rotary: `{name}` must be (tokens, even rotary_dim up to dim) for states of shape "
                f"{tuple(states.shape)}, got {tuple(table.shape)}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"rotary: `sin` must have the shape of `cos`, {tuple(cos.shape)}, got {tuple(sin.shape)}")
    states, cos, sin = readable(states), cos.float().contiguous(), sin.float().contiguous()
    if tracks(states):
        return _Rotary.apply(states, cos.detach(), sin.detach(), dtype)
    return _rotary(states, cos, sin, False, dtype)


def supports_rotary(states: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether `rotary` runs on these tensors without a copy of the states."""
    if not (is_rows(states) and states.dim() == 3 and cos.dim() == 2 and cos.shape == sin.shape):
        return False
    rotary_dim = cos.shape[1]
    return (
        cos.shape[0] == states.shape[0]
        and rotary_dim % 2 == 0
        and rotary_dim <= states.shape[2]
        and (cos.dtype in FLOATS and sin.dtype in FLOATS)
    )
