"""Varlen depthwise causal convolution with an optional SiLU, forward and backward; fp32 sums."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gated_delta import DTYPES, check_cu_seqlens
from .gradients import tracks
from .registration import register_fake


MAX_TAPS = 8


@register_fake("causal_conv")
def _(hidden_states, weight, cu_seqlens, silu, out) -> None:
    return None


@register_fake("causal_conv_backward")
def _(hidden_states, weight, cu_seqlens, silu, grad, grad_hidden, grad_weight) -> None:
    return None


def _conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, silu: bool) -> Tensor:
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
    ops.causal_conv(hidden_states, weight, cu_seqlens, silu, output)
    return output


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(hidden_states, weight, cu_seqlens)
        ctx.silu = silu
        return _conv(hidden_states, weight, cu_seqlens, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        hidden_states, weight, cu_seqlens = ctx.saved_tensors
        grad_hidden = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32)
        ops.causal_conv_backward(
            hidden_states, weight, cu_seqlens, ctx.silu, grad_output.contiguous(), grad_hidden, grad_weight
        )
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def causal_conv(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None = None) -> Tensor:
    """Depthwise causal convolution inside each segment of a packing (the short convolution of Gated DeltaNet,
    arXiv 2412.06464, section 3.4).

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, channels)`): fp32, bf16 or fp16; rows may be strided.
        weight (`torch.Tensor` of shape `(channels, taps)`): oldest tap first, 1 to 8 taps, fp32, bf16 or fp16.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): offsets from 0 to `tokens`.
        activation (`str`, *optional*): `"silu"` applies `x * sigmoid(x)` to the fp32 sums.

    Returns:
        `torch.Tensor` of shape `(tokens, channels)`, contiguous, dtype of `hidden_states`; differentiable in
        `hidden_states` and `weight`.

    Raises:
        ValueError: a shape, dtype, device or activation that the kernel does not take.
        RuntimeError: `cu_seqlens` does not rise from 0 to `tokens`.
    """
    _check(hidden_states, weight, cu_seqlens, activation)
    if hidden_states.stride(-1) != 1:
        hidden_states = hidden_states.contiguous()
    weight, cu_seqlens, silu = weight.contiguous(), cu_seqlens.contiguous(), activation == "silu"
    if tracks(hidden_states, weight):
        return _CausalConv.apply(hidden_states, weight, cu_seqlens, silu)
    return _conv(hidden_states, weight, cu_seqlens, silu)


def supports_causal_conv(hidden_states: Tensor, weight: Tensor, *cu_seqlens: Tensor) -> bool:
    """Whether `causal_conv` runs on these tensors without a copy."""
    if hidden_states.device.type != "cpu" or weight.device.type != "cpu":
        return False
    if hidden_states.dim() != 2 or hidden_states.stride(-1) != 1 or hidden_states.dtype not in DTYPES:
        return False
    if weight.dim() != 2 or weight.shape[0] != hidden_states.shape[1] or weight.dtype not in DTYPES:
        return False
    return 1 <= weight.shape[1] <= MAX_TAPS and all(tensor.dtype == torch.int32 for tensor in cu_seqlens)


def _check(hidden_states: Tensor, weight: Tensor, cu_seqlens: Tensor, activation: str | None) -> None:
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("cu_seqlens", cu_seqlens)):
        if tensor.device.type != "cpu":
            raise ValueError(f"causal_conv: {name} is on {tensor.device}, not on the CPU")
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight)):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"causal_conv: {name} is {tensor.dtype}, not float32, bfloat16 or float16")
    if hidden_states.dim() != 2 or hidden_states.shape[1] < 1:
        raise ValueError(f"causal_conv: hidden_states has shape {tuple(hidden_states.shape)}, not (tokens, channels)")
    channels = hidden_states.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or not 1 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(
            f"causal_conv: weight has shape {tuple(weight.shape)}, not ({channels}, taps) with 1 to {MAX_TAPS} taps"
        )
    check_cu_seqlens("causal_conv", cu_seqlens)
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv: activation is {activation!r}, not None or 'silu'")
