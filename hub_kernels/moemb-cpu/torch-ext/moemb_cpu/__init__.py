"""Kernels of sparse mixture-of-experts embedders for x86 CPUs with AVX-512 or AMX."""

import importlib
from pathlib import Path

from . import layers
from .cpu import isa, isa_level, limit_isa


# family -> operators; each family module offers `<op>` and `supports_<op>(*tensors) -> bool`
_FAMILIES = {
    "experts": ["experts"],
    "linear": ["linear"],
    "gated_delta": ["gated_delta_rule"],
    "conv": ["causal_conv"],
    "norms": ["rms_norm", "gated_rms_norm"],
    "router": ["top_k_router"],
    "attention": ["varlen_attention"],
    "rows": ["swiglu", "rotary"],
}
_SUPPORTS = {}
for _family, _ops in _FAMILIES.items():
    if (Path(__file__).parent / f"{_family}.py").is_file():
        _module = importlib.import_module(f".{_family}", __name__)
        for _op in _ops:
            globals()[_op] = getattr(_module, _op)
            _SUPPORTS[_op] = getattr(_module, f"supports_{_op}")


def supports(op: str, *tensors) -> bool:
    """Whether `op` runs on these tensors here: device, dtype, sizes and strides, and this CPU's instructions.

    Args:
        op (`str`): name of a function of this module.
        tensors (`torch.Tensor`): the op's tensor arguments in order.
    """
    check = _SUPPORTS.get(op)
    return check is not None and isa_level() > 0 and check(*tensors)


__all__ = ["isa", "layers", "limit_isa", "supports", *_SUPPORTS]
