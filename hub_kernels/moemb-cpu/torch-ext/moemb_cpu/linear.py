"""Linear layers whose rows do not depend on their batch, and that compile nothing for a new row count."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .experts import padded
from .gradients import tracks
from .registration import register_fake


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@register_fake("linear")
def _(input, weight, bias, output) -> None:
    return None


@register_fake("linear_backward")
def _(grad, weight, grad_input) -> None:
    return None


def _matrix(states: Tensor) -> Tensor:
    """The rows of `states` as a matrix, each contiguous."""
    rows = states.reshape(-1, states.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else rows.contiguous()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = torch.empty((rows.shape[0], weight.shape[0]), dtype=rows.dtype)
    ops.linear(rows, weight, bias, output)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        return _linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        rows, weight = ctx.saved_tensors
        grad = _matrix(grad)
        grad_rows = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty((grad.shape[0], weight.shape[1]), dtype=grad.dtype)
            ops.linear_backward(grad, weight, grad_rows)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mm(padded(grad).t(), padded(rows))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_rows, grad_weight, grad_bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input @ weight^T + bias`, by the products of `experts`.

    The bits of a row depend on that row alone, not on its batch or the number of threads; sums are fp32. The gradient
    of the input has the same property, that of the weight is torch's.

    Args:
        input (`torch.Tensor` of shape `(..., in_features)`): fp32, bf16 or fp16; rows may be strided.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): the dtype of `input`.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): the dtype of `input`.

    Returns:
        `torch.Tensor` of shape `(..., out_features)` in the dtype of `input`; differentiable in all arguments.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: `weight` must have shape (out_features, in_features) for `input` of shape {tuple(input.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: `bias` must have shape {(weight.shape[0],)}, got {tuple(bias.shape)}")
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device.type != "cpu" or tensor.dtype not in _DTYPES or tensor.dtype != input.dtype:
            raise ValueError(
                f"linear: `{name}` must be a CPU tensor of fp32, bf16 or fp16 with the dtype of `input`, "
                f"got {tensor.dtype} on {tensor.device}"
            )
    rows, weight = _matrix(input), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    run = _Linear.apply if tracks(rows, weight, bias) else _linear
    return run(rows, weight, bias).view(*input.shape[:-1], weight.shape[0])


def supports_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` runs on these tensors without copying the weight."""
    return (
        input.device.type == "cpu"
        and input.dtype in _DTYPES
        and input.dtype == weight.dtype
        and weight.dim() == 2
        and input.dim() >= 1
        and weight.is_contiguous()
        and (bias is None or bias.dtype == input.dtype)
    )
