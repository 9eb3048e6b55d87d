"""What the tests of the row-wise CPU kernels share: poisoned memory, gradients, and errors against fp64."""

from contextlib import contextmanager

import torch
from torch import Tensor


# relative to the largest value of the result: fp32 sums of a few thousand terms, and one rounding to bf16
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3}


@contextmanager
def poisoned():
    """`torch.empty` returns NaN (the largest integer for integers): what a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def offsets(lengths: list[int]) -> Tensor:
    """Cumulative lengths, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


@contextmanager
def threads(count: int):
    """Run with `count` OpenMP threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_gradients(function, tensors: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Result of `function(*tensors)` and the gradients of all tensors, for an output gradient drawn from `seed`."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*tensors)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(output.shape, generator=generator).to(output.dtype)
    if not output.numel():
        return [output.detach(), *(torch.zeros_like(tensor) for tensor in tensors)]
    return [output.detach(), *torch.autograd.grad(output, tensors, grad)]


def in_fp64(function, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As `with_gradients`, on fp64 copies; the output gradient is the one of a result of `dtype`."""

    def rounded_gradient(*inputs):
        return _RoundGradient.apply(function(*inputs), dtype)

    return with_gradients(rounded_gradient, [tensor.double() for tensor in tensors])


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return output.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype).to(grad.dtype), None


def assert_close(results: list[Tensor], expected: list[Tensor], factor: float = 1.0, floor: float = 1e-30) -> None:
    """Every result has its dtype's accuracy, relative to the largest expected value (at least `floor`)."""
    assert len(results) == len(expected)
    for place, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.shape == wanted.shape
        if not wanted.numel():
            continue
        error = (result.double() - wanted).abs().max() / wanted.abs().max().clamp_min(floor)
        assert error <= factor * TOLERANCE[result.dtype], f"result {place}: relative error {error:.1e}"


def assert_same_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    """Equality bit by bit; NaN equals NaN."""
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
