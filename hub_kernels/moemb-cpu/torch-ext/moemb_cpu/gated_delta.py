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


@register_fake("gated_delta_rule_states")
def _(query, key, value, decay, beta, cu_seqlens, initial_state, state_of, out, final_state) -> None:
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    state_of: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gated delta rule inside each segment of a packing.

    Per value head, with `alpha = exp(decay)`:
    `S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`, `o_t = S_t q_t` (arXiv 2412.06464, equation 10);
    keys and queries are L2-normalised (`x / sqrt(sum(x^2) + 1e-6)`), queries scaled by `key_dim ** -0.5`, and `S` is 0
    at the start of every segment that is not given a state. A segment's result depends on that segment and its state
    alone, to the bit, and on no number of threads; one that starts from the state behind the first 64 n tokens of
    another gives the bits of the two in one.

    Args:
        query, key (`torch.Tensor` of shape `(tokens, key_heads, key_dim)`): fp32, bf16 or fp16; tokens and heads may
            be strided, so these may be splits of one tensor; features are multiples of 8 up to 256.
        value (`torch.Tensor` of shape `(tokens, value_heads, value_dim)`): the same dtype; `value_heads` is a multiple
            of `key_heads`, and consecutive value heads share a key head.
        decay (`torch.FloatTensor` of shape `(tokens, value_heads)`): log decay, at most 0.
        beta (`torch.FloatTensor` of shape `(tokens, value_heads)`): write strength.
        cu_seqlens (`torch.IntTensor` of shape `(segments + 1,)`): offsets from 0 to `tokens`; equal neighbours are
            empty segments.
        initial_state (`torch.FloatTensor` of shape `(states, value_heads, key_dim, value_dim)`, *optional*): states
            that segments start from, in this precision only; comes with `state_of`.
        state_of (`torch.IntTensor` of shape `(segments,)`, *optional*): the state that each segment starts from, -1
            for 0.
        return_final_state (`bool`, defaults to `False`): also return the state behind each segment.

    Returns:
        `torch.Tensor` of shape `(tokens, value_heads, value_dim)`, contiguous, dtype of `value`; differentiable in the
        first five arguments, but not where states are given or returned. With `return_final_state` also the states,
        fp32 of shape `(segments, value_heads, key_dim, value_dim)`.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take, or a gradient together with states.
        RuntimeError: `cu_seqlens` does not rise from 0 to `tokens`, or `state_of` names a state that does not exist.
    """
    _check(query, key, value, decay, beta, cu_seqlens)
    query, key, value = (_readable(states) for states in (query, key, value))
    inputs = (query, key, value, decay.contiguous(), beta.contiguous(), cu_seqlens.contiguous())
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if initial_state is not None or state_of is not None or return_final_state:
        if tracked:
            raise ValueError("gated_delta_rule: there are no gradients where states are given or returned")
        return _rule_with_states(*inputs, initial_state, state_of, return_final_state)
    if tracked:
        return _GatedDeltaRule.apply(*inputs)
    return _rule(*inputs)


def _rule_with_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    state_of: Tensor | None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    segments, shape = cu_seqlens.shape[0] - 1, (value.shape[1], key.shape[2], value.shape[2])
    if (initial_state is None) != (state_of is None):
        raise ValueError("gated_delta_rule: initial_state and state_of come together")
    if initial_state is None:
        initial_state = torch.empty((0, *shape), dtype=torch.float32)
        state_of = torch.full((segments,), -1, dtype=torch.int32)
    for name, tensor, dtype, wanted in (
        ("initial_state", initial_state, torch.float32, (len(initial_state), *shape)),
        ("state_of", state_of, torch.int32, (segments,)),
    ):
        if tensor.dtype != dtype or tensor.shape != wanted or tensor.device.type != "cpu":
            raise ValueError(
                f"gated_delta_rule: {name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, not "
                f"{str(dtype).removeprefix('torch.')} of shape {wanted} on the CPU"
            )
    output = torch.empty(value.shape, dtype=value.dtype)
    final = torch.empty((segments if return_final_state else 0, *shape), dtype=torch.float32)
    states = (initial_state.contiguous(), state_of.contiguous())
    ops.gated_delta_rule_states(query, key, value, decay, beta, cu_seqlens, *states, output, final)
    return (output, final) if return_final_state else output


def supports_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> bool:
    """Whether `gated_delta_rule` runs on these tensors without a copy; feature sizes are multiples of 8 up to 256.

    `others` are `decay`, `beta`, `cu_seqlens` and, where there are states, `initial_state` and `state_of`.
    """
    if not (query.dtype == key.dtype == value.dtype and value.dtype in DTYPES):
        return False
    for states in (query, key, value):
        if states.dim() != 3 or states.device.type != "cpu" or states.stride(-1) != 1:
            return False
        if states.shape[-1] % 8 or not 0 < states.shape[-1] <= MAX_DIM:
            return False
    if query.shape != key.shape or key.shape[1] < 1 or value.shape[1] < 1 or value.shape[1] % key.shape[1]:
        return False
    dtypes = (torch.float32, torch.float32, torch.int32, torch.float32, torch.int32)
    return len(others) <= len(dtypes) and all(tensor.dtype == dtype for tensor, dtype in zip(others, dtypes))


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
