"""Routed experts of a mixture-of-experts block, forward and backward, on CUDA (Triton) and everywhere else (torch)."""

from __future__ import annotations

from torch import Tensor

from . import layers
from .backends import NAMES, choose, implementation, why_not
from .checks import check_experts, supports_experts


# Version of the operations' signatures that this build offers; raised together with `CONTRACT` of the model's code.
CONTRACT = 1

__all__ = ["backend", "backends", "experts", "layers", "supports"]


def experts(
    hidden_states: Tensor, expert_index: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts: `sum_k weight_k * down_e(silu(gate_e x) * up_e x)`.

    Differentiable in all floating-point arguments. Products accumulate in fp32; the weighted activation and each
    expert's output are rounded to the dtype of `hidden_states`, a token's slots are added in fp32 in slot order.

    Args:
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): fp32, bf16 or fp16.
        expert_index (`torch.LongTensor` of shape `(tokens, slots)`): expert of each slot; the number of experts (or
            anything else out of range) marks a skipped slot, which costs nothing. int32 is taken as well.
        weight (`torch.Tensor` of shape `(tokens, slots)`): routing weights, any floating-point dtype.
        gate_up_proj (`torch.Tensor` of shape `(experts, 2 * intermediate, hidden)`): gate rows first, then up rows;
            the layout of the checkpoint.
        down_proj (`torch.Tensor` of shape `(experts, hidden, intermediate)`).

    Returns:
        `torch.Tensor` of shape `(tokens, hidden)`, dtype of `hidden_states`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit together, naming the argument.
    """
    check_experts(hidden_states, expert_index, weight, gate_up_proj, down_proj)
    run = implementation(choose(hidden_states, gate_up_proj))
    return run(hidden_states, expert_index, weight, gate_up_proj, down_proj)


def backend(hidden_states: Tensor, gate_up_proj: Tensor) -> str:
    """Name of the implementation that `experts` takes for these tensors."""
    return choose(hidden_states, gate_up_proj)


def backends(hidden_states: Tensor, gate_up_proj: Tensor) -> dict[str, str | None]:
    """Every implementation, and why it cannot run on these tensors (None: it can)."""
    return {name: why_not(name, hidden_states, gate_up_proj) for name in NAMES}


def supports(op: str, *tensors: Tensor) -> bool:
    """Whether this module runs `op` on these tensors, given in the order of the op's arguments; never raises."""
    return op == "experts" and supports_experts(*tensors)
