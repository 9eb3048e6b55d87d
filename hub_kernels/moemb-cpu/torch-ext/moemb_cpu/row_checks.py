"""What the row-wise operators ask of their tensors, as a question and as an error."""

import torch
from torch import Tensor


FLOATS = (torch.float32, torch.bfloat16)
NOTHING = torch.empty(0)  # stands for a gradient that nobody wants


def is_rows(states: Tensor) -> bool:
    """Whether a kernel can read the rows of `states` where they lie."""
    if states.device.type != "cpu" or states.dtype not in FLOATS or not states.dim() >= 1:
        return False
    return states.is_contiguous() or (states.dim() <= 3 and states.stride(-1) == 1)


def are_rows(*tensors: Tensor) -> bool:
    """Whether a kernel can read the rows of all tensors, which have one shape."""
    return all(is_rows(states) and states.shape == tensors[0].shape for states in tensors)


def is_row_weight(weight: Tensor, states: Tensor) -> bool:
    """Whether `weight` has one feature per feature of `states`."""
    return weight.dtype in FLOATS and weight.dim() == 1 and weight.shape[0] == states.shape[-1]


def readable(states: Tensor) -> Tensor:
    """`states`, or a contiguous copy when its rows cannot be read where they lie."""
    return states if is_rows(states) else states.contiguous()


def check_rows(op: str, **tensors: Tensor) -> None:
    """Raise unless all tensors are on the CPU, of fp32 or bf16, and of one shape.

    Raises:
        ValueError: names the operator, the argument and its value.
    """
    shape = None
    for name, states in tensors.items():
        if states.device.type != "cpu":
            raise ValueError(f"{op}: `{name}` must be on the cpu, got {states.device}")
        if states.dtype not in FLOATS:
            raise ValueError(f"{op}: `{name}` must be float32 or bfloat16, got {states.dtype}")
        if states.dim() < 1:
            raise ValueError(f"{op}: `{name}` must have at least one axis, got a scalar")
        shape = states.shape if shape is None else shape
        if states.shape != shape:
            raise ValueError(f"{op}: `{name}` must have shape {tuple(shape)}, got {tuple(states.shape)}")


def check_weight(op: str, weight: Tensor, dim: int) -> None:
    """Raise unless `weight` is a vector of `dim` features of fp32 or bf16 on the CPU.

    Raises:
        ValueError: names the operator and the value.
    """
    check_rows(op, weight=weight)
    if tuple(weight.shape) != (dim,):
        raise ValueError(f"{op}: `weight` must have shape ({dim},), got {tuple(weight.shape)}")


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise unless `dtype` is one the kernels write.

    Raises:
        ValueError: names the operator and the value.
    """
    if dtype not in FLOATS:
        raise ValueError(f"{op}: `dtype` must be torch.float32 or torch.bfloat16, got {dtype}")
