"""Layers for `kernels.kernelize`: stateless, the parameters are those of the module or function they stand in for."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChunkGatedDeltaRule(nn.Module):
    """Stands in for `chunk_gated_delta_rule` of Qwen3.5 and Qwen3-Next; keeps packed sequences apart."""

    has_backward = True
    can_torch_compile = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs,
    ) -> tuple[Tensor, None]:
        from . import gated_delta_rule

        if initial_state is not None or output_final_state or not use_qk_l2norm_in_kernel:
            raise ValueError(
                "this kernel encodes whole sequences with normalised keys: call the model with use_cache=False"
            )
        batch, length = value.shape[:2]
        cu_seqlens = kwargs.get("cu_seqlens")
        if cu_seqlens is None or batch > 1:
            cu_seqlens = torch.arange(batch + 1, device=value.device, dtype=torch.int32) * length
        flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
        output = gated_delta_rule(*flat, g.flatten(0, 1).float(), beta.flatten(0, 1).float(), cu_seqlens)
        return output.unflatten(0, (batch, length)), None


class CausalConv1d(nn.Module):
    """Stands in for `causal_conv1d_fn` of Qwen3.5 and Qwen3-Next; keeps packed sequences apart."""

    has_backward = True
    can_torch_compile = False

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs,
    ) -> Tensor:
        from . import causal_conv

        if bias is not None:
            raise ValueError("this kernel has no bias: use the model's own convolution")
        batch, _, length = hidden_states.shape
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None or batch > 1:
            cu_seqlens = torch.arange(batch + 1, device=hidden_states.device, dtype=torch.int32) * length
        rows = hidden_states.transpose(1, 2).flatten(0, 1)
        return causal_conv(rows, weight, cu_seqlens, activation).unflatten(0, (batch, length)).transpose(1, 2)


class RMSNormZeroCentered(nn.Module):
    """Stands in for Qwen3.5's RMSNorm (`weight`, `eps`)."""

    has_backward = True
    can_torch_compile = False

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        from . import rms_norm

        return rms_norm(x, self.weight, self.eps)


class RMSNormGated(nn.Module):
    """Stands in for Qwen3.5's gated RMSNorm (`weight`, `variance_epsilon`)."""

    has_backward = True
    can_torch_compile = False

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        from . import gated_rms_norm

        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon)


__all__ = ["CausalConv1d", "ChunkGatedDeltaRule", "RMSNormGated", "RMSNormZeroCentered"]
