"""Kernels of sparse mixture-of-experts embedders for x86 CPUs with AVX-512 or AMX."""

from . import layers
from .attention import supports_varlen_attention, varlen_attention
from .conv import causal_conv, supports_causal_conv
from .cpu import isa, isa_level, limit_isa
from .experts import experts, supports_experts
from .gated_delta import gated_delta_rule, supports_gated_delta_rule
from .linear import linear, supports_linear
from .norms import gated_rms_norm, rms_norm, supports_gated_rms_norm, supports_rms_norm
from .router import supports_top_k_router, top_k_router
from .rows import rotary, supports_rotary, supports_swiglu, swiglu


_SUPPORTS = {
    "causal_conv": supports_causal_conv,
    "experts": supports_experts,
    "gated_delta_rule": supports_gated_delta_rule,
    "gated_rms_norm": supports_gated_rms_norm,
    "linear": supports_linear,
    "rms_norm": supports_rms_norm,
    "rotary": supports_rotary,
    "swiglu": supports_swiglu,
    "top_k_router": supports_top_k_router,
    "varlen_attention": supports_varlen_attention,
}


def supports(op: str, *tensors) -> bool:
    """Whether `op` runs on these tensors here: device, dtype, sizes and strides, and this CPU's instructions.

    Args:
        op (`str`): name of a function of this module.
        tensors (`torch.Tensor`): the op's tensor arguments in order.
    """
    check = _SUPPORTS.get(op)
    return check is not None and isa_level() > 0 and check(*tensors)


# Version of the operations' signatures that this build offers; raised together with `CONTRACT` of the model's code.
CONTRACT = 1

__all__ = [
    "causal_conv",
    "experts",
    "gated_delta_rule",
    "gated_rms_norm",
    "isa",
    "layers",
    "limit_isa",
    "linear",
    "rms_norm",
    "rotary",
    "supports",
    "swiglu",
    "top_k_router",
    "varlen_attention",
]
