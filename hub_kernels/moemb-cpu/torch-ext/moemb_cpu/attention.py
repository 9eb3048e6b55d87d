"""Attention inside the segments of a packing, forward and backward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake
from .row_checks import FLOATS, NOTHING


MAX_DIM = 256
SAME = torch.empty(0, dtype=torch.int32)  # no `cu_seqlens_k`


@register_fake("varlen_attention")
def _(query, key, value, cu_seqlens, cu_seqlens_k, scaling, causal, out, log_sum) -> None:
    return None


@register_fake("varlen_attention_backward")
def _(query, key, value, cu_seqlens, scaling, causal, output, log_sum, grad, grad_query, grad_key, grad_value) -> None:
    return None


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float, causal: bool
    ) -> Tensor:
        output = torch.empty(query.shape, dtype=query.dtype)
        log_sum = torch.empty(query.shape[:2], dtype=torch.float32)
        ops.varlen_attention(query, key, value, cu_seqlens, SAME, scaling, causal, output, log_sum)
        ctx.save_for_backward(query, key, value, cu_seqlens, output, log_sum)
        ctx.scaling, ctx.causal = scaling, causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        query, key, value, cu_seqlens, output, log_sum = ctx.saved_tensors
        grads = [torch.empty(states.shape, dtype=states.dtype) for states in (query, key, value)]
        ops.varlen_attention_backward(
            query, key, value, cu_seqlens, ctx.scaling, ctx.causal, output, log_sum, grad_output.contiguous(), *grads
        )
        return *grads, None, None, None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float,
    causal: bool,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each segment on itself, with an online softmax (FlashAttention, arXiv 2307.08691).

    fp32 inside. On AMX the forward of bf16 inputs rounds the probabilities to bf16 before they meet the values.
    A query's bits depend on its segment alone: on no other segments, on no number of threads, and not on which other
    queries of its segment are asked.

    Args:
        query (`torch.Tensor` of shape `(tokens, heads, dim)`): fp32 or bf16, `dim` at most 256; rows may be strided,
            else than along the last axis.
        key, value (`torch.Tensor` of shape `(tokens or keys, key_heads, dim)`): dtype of `query`; consecutive
            `heads / key_heads` query heads share a key head.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): cumulative lengths, from 0 to `tokens`.
        scaling (`float`): factor of the scores.
        causal (`bool`): whether a token sees only itself and the tokens before it.
        cu_seqlens_k (`torch.IntTensor` of shape `(segments + 1,)`, *optional*): cumulative lengths of the keys, from 0
            to `keys`, where segments have more keys than queries: their queries are then their last tokens.

    Returns:
        `torch.Tensor` of shape `(tokens, heads, dim)` in the dtype of `query`, contiguous; differentiable in
        `query`, `key` and `value`, but not with `cu_seqlens_k`.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take, or a gradient with `cu_seqlens_k`.
        RuntimeError: `cu_seqlens` does not rise from 0 to `tokens`, `cu_seqlens_k` not to `keys`, or a segment has
            fewer keys than queries.
    """
    _check(query, key, value, cu_seqlens, cu_seqlens_k)
    query, key, value = (states if states.stride(2) == 1 else states.contiguous() for states in (query, key, value))
    cu_seqlens = cu_seqlens.contiguous()
    if tracks(query, key, value):
        if cu_seqlens_k is not None:
            raise ValueError("varlen_attention: there are no gradients with `cu_seqlens_k`")
        return _VarlenAttention.apply(query, key, value, cu_seqlens, scaling, causal)
    output = torch.empty(query.shape, dtype=query.dtype)
    ends = SAME if cu_seqlens_k is None else cu_seqlens_k.contiguous()
    ops.varlen_attention(query, key, value, cu_seqlens, ends, scaling, causal, output, NOTHING)
    return output


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None) -> None:
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.device.type != "cpu" or states.dtype not in FLOATS:
            raise ValueError(
                f"varlen_attention: `{name}` must be float32 or bfloat16 on the cpu, got {states.dtype} on "
                f"{states.device}"
            )
        if states.dim() != 3 or not 1 <= states.shape[2] <= MAX_DIM:
            raise ValueError(
                f"varlen_attention: `{name}` must be (tokens, heads, 1 to {MAX_DIM}), got shape {tuple(states.shape)}"
            )
        if states.dtype != query.dtype or states.shape[2] != query.shape[2]:
            raise ValueError(
                f"varlen_attention: `{name}` must have the dim and dtype of `query` ({tuple(query.shape)}, "
                f"{query.dtype}), got {tuple(states.shape)}, {states.dtype}"
            )
        if cu_seqlens_k is None and len(states) != len(query):
            raise ValueError(
                f"varlen_attention: `{name}` must have the {len(query)} tokens of `query` where there is no "
                f"`cu_seqlens_k`, got {len(states)}"
            )
    if key.shape != value.shape or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"varlen_attention: `key` and `value` must have one shape whose heads divide those of `query` "
            f"({query.shape[1]}), got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    for name, ends in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if ends is not None and (ends.dtype != torch.int32 or ends.dim() != 1 or not len(ends)):
            raise ValueError(
                f"varlen_attention: `{name}` must be int32 of shape (segments + 1,), got {ends.dtype} of shape "
                f"{tuple(ends.shape)}"
            )
    if cu_seqlens_k is not None and len(cu_seqlens_k) != len(cu_seqlens):
        raise ValueError(
            f"varlen_attention: `cu_seqlens_k` must be as long as `cu_seqlens` ({len(cu_seqlens)}), got "
            f"{len(cu_seqlens_k)}"
        )


def supports_varlen_attention(query: Tensor, key: Tensor, value: Tensor, *cu_seqlens: Tensor) -> bool:
    """Whether `varlen_attention` runs on these tensors without a copy; `cu_seqlens_k` may follow `cu_seqlens`.

    There is no threshold on lengths: on AMX it was faster than bucketed `scaled_dot_product_attention` at every length
    tried from 16 to 4,096, causal and not, forward and backward, in fp32 and bf16.
    """
    return (
        query.dtype in FLOATS
        and all(
            states.device.type == "cpu" and states.dtype == query.dtype and states.dim() == 3 and states.stride(2) == 1
            for states in (query, key, value)
        )
        and 1 <= query.shape[2] <= MAX_DIM
        and key.shape == value.shape
        and query.shape[2] == key.shape[2]
        and (len(query) == len(key) or len(cu_seqlens) > 1)
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and len(cu_seqlens) <= 2
        and all(ends.dtype == torch.int32 and ends.dim() == 1 for ends in cu_seqlens)
    )
