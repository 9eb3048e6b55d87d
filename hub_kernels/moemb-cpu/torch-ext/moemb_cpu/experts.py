"""Routed experts, forward and backward, over the pairs that survive."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@register_fake("experts")
def _(states, index, weight, gate_up, down, output, saved) -> None:
    return None


@register_fake("experts_backward")
def _(grad, index, weight, saved, gate_up, down, grad_states, grad_weight, grad_saved, activation) -> None:
    return None


def _rows(states: Tensor) -> Tensor:
    """Rows of any distance, each contiguous."""
    return states if states.stride(-1) == 1 and states.stride(0) >= states.shape[1] else states.contiguous()


def padded_count(count: int) -> int:
    """`count` rounded up to eight steps per power of two, at least to a multiple of 8; 0 stays 0.

    torch's bf16 product is compiled anew for each row count it has not met.
    """
    step = max(8, (1 << max(count - 1, 0).bit_length()) // 16)
    return -(-count // step) * step


def padded(rows: Tensor) -> Tensor:
    """bf16 rows with zero rows behind them, see `padded_count`; other rows as they are."""
    missing = padded_count(rows.shape[0]) - rows.shape[0]
    if missing == 0 or rows.dtype != torch.bfloat16:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])


def _weight_gradients(
    grad: Tensor, states: Tensor, index: Tensor, grad_saved: Tensor, activation: Tensor, experts: int
):
    """Gradients of `gate_up_proj` and `down_proj`: one product each per expert, over its rows in order."""
    slots = index.shape[1]
    order = torch.argsort(index.reshape(-1), stable=True)
    counts = torch.bincount(index.reshape(-1), minlength=experts + 1)[:experts].tolist()
    grad_gate_up = grad.new_zeros(experts, grad_saved.shape[1], states.shape[1])
    grad_down = grad.new_zeros(experts, states.shape[1], activation.shape[1])
    first = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        pairs = order[first : first + count]
        first += count
        tokens = pairs // slots
        blocks = [states[tokens], grad[tokens], grad_saved[pairs], activation[pairs]]
        if grad.dtype == torch.bfloat16:
            blocks = [
                torch.cat([block, block.new_zeros(padded_count(count) - count, block.shape[1])]) for block in blocks
            ]
        rows, row_grads, inner_grads, inner = blocks
        torch.mm(inner_grads.t(), rows, out=grad_gate_up[expert])
        torch.mm(row_grads.t(), inner, out=grad_down[expert])
    return grad_gate_up, grad_down


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        output = torch.empty(states.shape, dtype=states.dtype)
        saved = torch.empty((index.numel(), gate_up.shape[1]), dtype=states.dtype)
        ops.experts(states, index, weight, gate_up, down, output, saved)
        ctx.save_for_backward(states, index, weight, gate_up, down, saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        states, index, weight, gate_up, down, saved = ctx.saved_tensors
        grad = _rows(grad)
        grad_states, grad_weight = torch.empty(states.shape, dtype=states.dtype), torch.empty_like(weight)
        grad_saved = activation = grad_gate_up = grad_down = None
        trained = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        if trained:
            grad_saved, activation = torch.empty_like(saved), saved.new_empty(saved.shape[0], down.shape[2])
        ops.experts_backward(
            grad, index, weight, saved, gate_up, down, grad_states, grad_weight, grad_saved, activation
        )
        if trained:
            grad_gate_up, grad_down = _weight_gradients(grad, states, index, grad_saved, activation, down.shape[0])
        return grad_states, None, grad_weight, grad_gate_up, grad_down


def _check(states: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> None:
    tensors = {
        "hidden_states": states,
        "expert_index": index,
        "weight": weight,
        "gate_up_proj": gate_up,
        "down_proj": down,
    }
    for name, tensor in tensors.items():
        dims = 3 if name.endswith("proj") else 2
        if tensor.dim() != dims or tensor.device.type != "cpu":
            raise ValueError(
                f"experts: `{name}` must be a CPU tensor of {dims} axes, got {tuple(tensor.shape)} on {tensor.device}"
            )
    if states.dtype not in _DTYPES:
        raise ValueError(f"experts: `hidden_states` must be fp32, bf16 or fp16, got {states.dtype}")
    for name in ("gate_up_proj", "down_proj"):
        if tensors[name].dtype != states.dtype:
            raise ValueError(
                f"experts: `{name}` must have the dtype of `hidden_states`, {states.dtype}, got {tensors[name].dtype}"
            )
    if index.dtype != torch.int64:
        raise ValueError(f"experts: `expert_index` must be int64, got {index.dtype}")
    if not weight.is_floating_point():
        raise ValueError(f"experts: `weight` must be a float tensor, got {weight.dtype}")
    experts, hidden, inner = down.shape
    expected = {
        "hidden_states": (index.shape[0], hidden),
        "weight": tuple(index.shape),
        "gate_up_proj": (experts, 2 * inner, hidden),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"experts: `{name}` must have shape {shape}, got {tuple(tensors[name].shape)}")
    if index.shape[0] * index.shape[1] >= 1 << 31:
        raise ValueError(f"experts: `expert_index` holds {index.numel()} pairs, more than 2^31")


def experts(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """`sum over slots of weight * down_e(silu(gate_e x) * up_e x)`: the routed experts of Qwen3.5-MoE.

    Skipped slots cost nothing. The bits of a token depend on that token alone, not on its batch or the number of
    threads. bf16 runs on AMX where the CPU has it; sums are fp32.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): fp32, bf16 or fp16; rows may be strided.
        expert_index (`torch.LongTensor` of shape `(tokens, slots)`): `num_experts` marks a skipped slot.
        weight (`torch.Tensor` of shape `(tokens, slots)`): weights of the slots, any float dtype; used in fp32.
        gate_up_proj (`torch.Tensor` of shape `(num_experts, 2 * intermediate, hidden)`): gate rows, then up rows.
        down_proj (`torch.Tensor` of shape `(num_experts, hidden, intermediate)`).

    Returns:
        `torch.Tensor` of shape `(tokens, hidden)` in the dtype of `hidden_states`; differentiable in all but
        the index.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        RuntimeError: an entry of `expert_index` is outside `0 .. num_experts`.
    """
    _check(hidden_states, expert_index, weight, gate_up_proj, down_proj)
    arguments = (
        _rows(hidden_states),
        expert_index.contiguous(),
        weight.float().contiguous(),
        gate_up_proj.contiguous(),
        down_proj.contiguous(),
    )
    if tracks(*arguments):
        return _Experts.apply(*arguments)
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
    ops.experts(*arguments, output, None)
    return output


def supports_experts(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> bool:
    """Whether `experts` runs on these tensors without copying a weight."""
    return (
        hidden_states.device.type == "cpu"
        and hidden_states.dtype in _DTYPES
        and hidden_states.dtype == gate_up_proj.dtype == down_proj.dtype
        and hidden_states.dim() == expert_index.dim() == weight.dim() == 2
        and gate_up_proj.dim() == down_proj.dim() == 3
        and expert_index.dtype == torch.int64
        and gate_up_proj.is_contiguous()
        and down_proj.is_contiguous()
    )
