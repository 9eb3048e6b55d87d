"""Which implementation runs: chosen by the tensor's device and by what is installed, or by the user.

`MOEMB_EXPERTS_BACKEND` may name one of `NAMES`; unset or `auto` takes Triton on CUDA and the loop elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .portable import experts_grouped_mm, experts_loop


NAMES = ("triton", "grouped_mm", "sonicmoe", "loop")


@lru_cache(maxsize=1)
def _fused() -> Callable | None:
    """The Triton path, or None where Triton is not installed (CPU and macOS builds of torch)."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".fused", __package__).experts_fused


@lru_cache(maxsize=1)
def _sonicmoe() -> Callable | None:
    """SonicMoE's entry point with its own layout of arguments, or None where it does not import."""
    if importlib.util.find_spec("sonicmoe") is None:
        return None
    module = importlib.import_module("sonicmoe")
    general, kinds = module.moe_general_routing_inputs, importlib.import_module("sonicmoe.enums").ActivationType

    def experts_sonicmoe(states: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, slots = index.shape
        token = torch.arange(tokens, device=index.device, dtype=torch.int32).repeat_interleave(slots)
        return general(
            states,
            weight.reshape(-1).to(states.dtype),
            token,
            index.reshape(-1).int(),
            gate_up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            E=gate_up.shape[0],
            activation_type=kinds.SWIGLU,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True,
            stream_id=None,
        )[0]

    return experts_sonicmoe


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not(name: str, hidden_states: Tensor, gate_up_proj: Tensor) -> str | None:
    """Why a back-end cannot take these tensors, or None when it can."""
    dtype, on_cuda = hidden_states.dtype, hidden_states.is_cuda
    hidden, width = gate_up_proj.shape[2], gate_up_proj.shape[1] // 2
    if name == "loop":
        return None
    if name == "triton":
        if _fused() is None:
            return "triton is not installed"
        return None if on_cuda or _interpreted() else "Triton kernels need a CUDA device"
    if name == "grouped_mm":
        if not hasattr(F, "grouped_mm"):
            return "this torch has no torch.nn.functional.grouped_mm"
        if dtype == torch.float16 and on_cuda:
            return "grouped_mm takes bfloat16 on CUDA"
        if any(size * dtype.itemsize % 16 for size in (hidden, width)):
            return "grouped_mm wants row strides of 16 bytes"
        return None
    if name == "sonicmoe":
        if not on_cuda or torch.cuda.get_device_capability(hidden_states.device)[0] < 9:
            return "SonicMoE needs CUDA compute capability 9.0"
        if dtype == torch.float32:
            return "SonicMoE takes 16-bit floats"
        if hidden % 64 or width % 64 or hidden < 512:
            return "SonicMoE wants a hidden size of at least 512 and sizes that are multiples of 64"
        return "sonicmoe is not installed" if _sonicmoe() is None else None
    return f"there is no such back-end; there are {', '.join(NAMES)}"


def implementation(name: str) -> Callable:
    """The function of a back-end; all have the signature of `experts`."""
    if name == "triton":
        return _fused()
    if name == "sonicmoe":
        return _sonicmoe()
    return {"grouped_mm": experts_grouped_mm, "loop": experts_loop}[name]


def choose(hidden_states: Tensor, gate_up_proj: Tensor) -> str:
    """Name of the back-end for these tensors.

    Raises:
        ValueError: when `MOEMB_EXPERTS_BACKEND` names one that cannot run them.
    """
    name = os.environ.get("MOEMB_EXPERTS_BACKEND", "auto")
    if name != "auto":
        reason = why_not(name, hidden_states, gate_up_proj)
        if reason is not None:
            raise ValueError(f"MOEMB_EXPERTS_BACKEND={name!r} cannot run: {reason}")
        return name
    return "triton" if hidden_states.is_cuda and why_not("triton", hidden_states, gate_up_proj) is None else "loop"
