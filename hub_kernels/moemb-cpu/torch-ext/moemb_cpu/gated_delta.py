"""Varlen gated delta rule (Gated DeltaNet, arXiv 2412.06464), forward and backward; all arithmetic is fp32."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .registration import register_fake


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256


@register_fake("gated_delta_rule")
def _(query, key, value, decay, beta, cu_seqlens, out) -> None:
    return None


@register_fake("gated_delta_rule_backward")
def _(
    query, key, value, decay, beta, cu_seqlens, grad, grad_query, grad_key, grad_value, grad_decay, grad_beta
) -> None:
    return None


def _rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    output = torch.empty(value.shape, dtype=value.dtype)
    ops.gated_delta_rule(query, key, value, decay, beta, cu_seqlens, output)
    return output


class _GatedDeltaRule(torch.autograd.Function):
    """Saves its inputs only; the backward pass finds the states again."""

    @staticmethod
    def forward(ctx, query, key, value, decay, beta, cu_seqlens):
        ctx.save_for_backward(query, key, value, decay, beta, cu_seqlens)
        return _rule(query, key, value, decay, beta, cu_seqlens)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        *inputs, cu_seqlens = ctx.saved_tensors
        grads = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs]
        ops.gated_delta_rule_backward(*inputs, cu_seqlens, grad_output.contiguous(), *grads)
        return *grads, None


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Gated delta rule inside each segment of a packing.

    Per value head, with `alpha = exp(decay)`:
    `S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`, `o_t = S_t q_t` (arXiv 2412.06464, equation 10);
    keys and queries are L2-normalised (`x / sqrt(sum(x^2) + 1e-6)`), queries scaled by `key_dim ** -0.5`, and `S` is 0
    at the start of every segment. A segment's result depends on that segment alone, to the bit, and on no number of
    threads.

    Args:
        query, key (`torch.Tensor` of shape `(tokens, key_heads, key_dim)`): fp32, bf16 or fp16; tokens and heads may
            be strided, so these may be splits of one tensor; features are multiples of 8 up to 256.
        value (`torch.Tensor` of shape `(tokens, value_heads, value_dim)`): the same dtype; `value_heads` is a multiple
            of `key_heads`, and consecutive value heads share a key head.
        decay (`torch.FloatTensor` of shape `(tokens, value_heads)`): log decay, at most 0.
        beta (`torch.FloatTensor` of shape `(tokens, value_heads)`): write strength.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): offsets from 0 to `tokens`; equal neighbours are
            empty segments.

    Returns:
        `torch.Tensor` of shape `(tokens, value_heads, value_dim)`, contiguous, dtype of `value`; differentiable in the
        first five arguments.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take.
        RuntimeError: `cu_seqlens` does not rise from 0 to `tokens`.
    """
    _check(query, key, value, decay, beta, cu_seqlens)
    query, key, value = (_readable(states) for states in (query, key, value))
    inputs = (query, key, value, decay.contiguous(), beta.contiguous(), cu_seqlens.contiguous())
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return _GatedDeltaRule.apply(*inputs)
    return _rule(*inputs)


def supports_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, *scalars: Tensor) -> bool:
    """Whether `gated_delta_rule` runs on these tensors without a copy; feature sizes are multiples of 8 up to 256."""
    if not (query.dtype == key.dtype == value.dtype and value.dtype in DTYPES):
        return False
    for states in (query, key, value):
        if states.dim() != 3 or states.device.type != "cpu" or states.stride(-1) != 1:
            return False
        if states.shape[-1] % 8 or not 0 < states.shape[-1] <= MAX_DIM:
            return False
    if query.shape != key.shape or key.shape[1] < 1 or value.shape[1] < 1 or value.shape[1] % key.shape[1]:
        return False
    return all(tensor.dtype == torch.float32 for tensor in scalars[:2]) and all(
        tensor.dtype == torch.int32 for tensor in scalars[2:]
    )


def _readable(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _check(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor) -> None:
    named = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "cu_seqlens": cu_seqlens}
    for name, tensor in named.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"gated_delta_rule: {name} is on {tensor.device}, not on the CPU")
    for name in ("query", "key", "value"):
        states = named[name]
        if states.dim() != 3:
            raise ValueError(f"gated_delta_rule: {name} has shape {tuple(states.shape)}, not (tokens, heads, dim)")
        if states.dtype not in DTYPES or states.dtype != value.dtype:
            raise ValueError(
                f"gated_delta_rule: {name} is {states.dtype}, value is {value.dtype}; both must be the same of "
                "float32, bfloat16 and float16"
            )
        if states.shape[-1] % 8 or not 0 < states.shape[-1] <= MAX_DIM:
            raise ValueError(
                f"gated_delta_rule: {name} has {states.shape[-1]} features, not a multiple of 8 to {MAX_DIM}"
            )
    if query.shape != key.shape:
        raise ValueError(f"gated_delta_rule: query has shape {tuple(query.shape)}, key {tuple(key.shape)}")
    tokens, key_heads, value_heads = key.shape[0], key.shape[1], value.shape[1]
    if value.shape[0] != tokens:
        raise ValueError(f"gated_delta_rule: value has {value.shape[0]} tokens, key has {tokens}")
    if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
        raise ValueError(f"gated_delta_rule: {value_heads} value heads are no multiple of {key_heads} key heads")
    for name in ("decay", "beta"):
        if named[name].shape != (tokens, value_heads) or named[name].dtype != torch.float32:
            raise ValueError(
                f"gated_delta_rule: {name} is {named[name].dtype} of shape {tuple(named[name].shape)}, not float32 of "
                f"shape ({tokens}, {value_heads})"
            )
    check_cu_seqlens("gated_delta_rule", cu_seqlens)


def check_cu_seqlens(op: str, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless `cu_seqlens` is int32 of shape `(segments + 1,)`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"{op}: cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, not int32 of shape "
            "(segments + 1,)"
        )
