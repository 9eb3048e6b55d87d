"""Layers for `kernels.kernelize`: stateless, the parameters are those of the module they stand in for."""

from __future__ import annotations

from torch import Tensor, nn


class MoEMBExperts(nn.Module):
    """Stands in for the experts of Qwen3.5-MoE (`gate_up_proj`, `down_proj`; activation SiLU)."""

    has_backward = True
    can_torch_compile = False

    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        from . import experts

        return experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


__all__ = ["MoEMBExperts"]
