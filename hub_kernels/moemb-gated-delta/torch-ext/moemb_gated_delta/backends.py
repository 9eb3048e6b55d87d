"""Which implementation runs: chosen by the tensor's device and by what is installed, or by the user.

`MOEMB_GATED_DELTA_BACKEND` may be `triton` or `torch` (every operation) or `fla` (the delta rule through
flash-linear-attention, the rest as in `auto`). Unset or `auto`: torch off CUDA; on CUDA Triton, but fla, when it is
installed, for 16-bit delta rules that need gradients (ours recomputes in torch) or run over few long segments (its
chunks are parallel along a segment, ours are not).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


NAMES = ("auto", "triton", "torch", "fla")
# mean tokens per segment from which fla's chunk-parallel kernels are taken
LONG_SEGMENT = 1024


@lru_cache(maxsize=1)
def triton_path():
    """The module of the Triton path, or None where Triton is not installed (CPU and macOS builds of torch)."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".fused", __package__)


@lru_cache(maxsize=1)
def _fla_rule() -> Callable | None:
    if importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def setting() -> str:
    """What `MOEMB_GATED_DELTA_BACKEND` says.

    Raises:
        ValueError: when it names no implementation.
    """
    name = os.environ.get("MOEMB_GATED_DELTA_BACKEND", "auto")
    if name not in NAMES:
        raise ValueError(f"MOEMB_GATED_DELTA_BACKEND must be one of {', '.join(NAMES)}, got {name!r}")
    return name


def use_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels take this tensor.

    Raises:
        ValueError: when the user asked for Triton and it cannot run here.
    """
    name = setting()
    if name == "torch":
        return False
    possible = tensor.is_cuda or os.environ.get("TRITON_INTERPRET", "0") == "1"
    if name == "triton":
        if triton_path() is None or not possible:
            raise ValueError("MOEMB_GATED_DELTA_BACKEND='triton' needs Triton and tensors on a CUDA device")
        return True
    return tensor.is_cuda and triton_path() is not None


def use_fla(value: Tensor, segments: int, needs_grad: bool) -> bool:
    """Whether flash-linear-attention takes the delta rule.

    Raises:
        ValueError: when the user asked for it and it cannot run here.
    """
    name = setting()
    if name not in ("auto", "fla"):
        return False
    possible = value.is_cuda and value.dtype != torch.float32 and value.shape[0] > 0 and _fla_rule() is not None
    if name == "fla":
        if not possible:
            raise ValueError("MOEMB_GATED_DELTA_BACKEND='fla' needs flash-linear-attention, CUDA and 16-bit tensors")
        return True
    return possible and (needs_grad or value.shape[0] >= LONG_SEGMENT * segments)


def gated_delta_rule_fla(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The delta rule through flash-linear-attention (16-bit products); shapes as in `gated_delta_rule`."""
    output, _ = _fla_rule()(
        query[None],
        key[None],
        value[None],
        decay[None],
        beta[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    return output[0].to(value.dtype)
