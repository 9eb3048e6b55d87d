"""Varlen gated delta rule (Gated DeltaNet, arXiv 2412.06464), forward and backward; all arithmetic is fp32."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIM = 256


@register_fake("gated_delta_rule")
def _(query, key, value, decay, beta, cu_seqlens, out) -> None:
    return None


@register_fake("gated_delta_rule_continued")
def _(query, key, value, decay, beta, cu_seqlens, initial_state, state_of, rows, silent, out, final_state) -> None:
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
    rows: Tensor | None = None,
    silent: Tensor | None = None,
    out: Tensor | None = None,
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
        rows (`torch.LongTensor` of shape `(places,)`, *optional*): where the tokens of the segments are among those
            of the inputs, and of the output; `cu_seqlens` then counts these places. Segments may have rows in common.
        silent (`torch.IntTensor` of shape `(segments,)`, *optional*): leading tokens of each segment whose output is
            not written; comes with `rows`. No row may be written by two segments.
        out (`torch.Tensor` of shape `(tokens, value_heads, value_dim)`, *optional*): is written and returned; rows
            that no segment writes keep what they hold.

    Returns:
        `torch.Tensor` of shape `(tokens, value_heads, value_dim)`, contiguous, dtype of `value`; differentiable in the
        first five arguments where none of the others but `cu_seqlens` is given. With `return_final_state` also the
        states, fp32 of shape `(segments, value_heads, key_dim, value_dim)`.

    Raises:
        ValueError: a shape, dtype or device that the kernel does not take, or a gradient that it does not give.
        RuntimeError: `cu_seqlens` does not rise from 0 to `tokens`, `state_of` names a state or `rows` a row that does
            not exist.
    """
    _check(query, key, value, decay, beta, cu_seqlens)
    query, key, value = (_readable(states) for states in (query, key, value))
    inputs = (query, key, value, decay.contiguous(), beta.contiguous(), cu_seqlens.contiguous())
    tracked = tracks(*inputs)
    extras = (initial_state, state_of, rows, silent, out)
    if return_final_state or any(tensor is not None for tensor in extras):
        if tracked:
            raise ValueError("gated_delta_rule: there are no gradients with states, rows or a given output")
        return _continued(*inputs, *extras, return_final_state)
    if tracked:
        return _GatedDeltaRule.apply(*inputs)
    return _rule(*inputs)


def _continued(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    initial_state: Tensor | None,
    state_of: Tensor | None,
    rows: Tensor | None,
    silent: Tensor | None,
    out: Tensor | None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    segments, shape = cu_seqlens.shape[0] - 1, (value.shape[1], key.shape[2], value.shape[2])
    for one, two, names in (
        (initial_state, state_of, "initial_state and state_of"),
        (rows, silent, "rows and silent"),
    ):
        if (one is None) != (two is None):
            raise ValueError(f"gated_delta_rule: {names} come together")
    if initial_state is None:
        initial_state = torch.empty((0, *shape), dtype=torch.float32)
        state_of = torch.full((segments,), -1, dtype=torch.int32)
    if out is None:
        out = torch.empty(value.shape, dtype=value.dtype)
    _check_given("initial_state", initial_state, torch.float32, (len(initial_state), *shape))
    _check_given("state_of", state_of, torch.int32, (segments,))
    _check_given("out", out, value.dtype, value.shape)
    if rows is not None:
        _check_given("rows", rows, torch.int64, (rows.numel(),))
        _check_given("silent", silent, torch.int32, (segments,))
    final = torch.empty((segments, *shape), dtype=torch.float32) if return_final_state else None
    ops.gated_delta_rule_continued(
        query, key, value, decay, beta, cu_seqlens, initial_state, state_of, rows, silent, out, final
    )
    return (out, final) if return_final_state else out


def _check_given(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    fits = tensor.dtype == dtype and tensor.shape == shape and tensor.device.type == "cpu"
    if not (fits and tensor.is_contiguous()):
        raise ValueError(
            f"gated_delta_rule: {name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, not "
            f"contiguous {str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on the CPU"
        )


def supports_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> bool:
    """Whether `gated_delta_rule` runs on these tensors without a copy; feature sizes are multiples of 8 up to 256.

    `others` are `decay`, `beta`, `cu_seqlens` and, where segments continue others, `initial_state`, `state_of`, `rows`
    and `silent`.
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
    dtypes = (torch.float32, torch.float32, torch.int32, torch.float32, torch.int32, torch.int64, torch.int32)
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
