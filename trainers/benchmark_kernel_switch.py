"""The model's kernels as a benchmark sees them: found by operation, switched off to time the torch path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


try:
    from modeling_moemb import kernels_moemb as _seam
except ImportError:  # a model room without kernels: everything runs on its torch path
    _seam = None


def find_kernel(operation: str, *tensors: Tensor) -> Callable | None:
    """The kernel that the model would run for these tensors; `None` when that is the torch path."""
    return None if _seam is None else _seam.kernel(operation, *tensors)


@contextmanager
def kernels_off() -> Iterator[None]:
    """Runs a block on the model's own torch code."""
    if _seam is None:
        yield
        return
    before = _seam.use_kernels("off")
    try:
        yield
    finally:
        _seam.use_kernels(before)


def kernels_report() -> list[Any]:
    """What is active for each operation, and why; empty without kernels."""
    return [] if _seam is None else [dict(row) if hasattr(row, "keys") else row for row in _seam.kernels_report()]
