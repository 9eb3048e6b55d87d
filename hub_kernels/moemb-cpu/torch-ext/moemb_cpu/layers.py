"""Layers for `kernels.kernelize`: transformers' Qwen3.5-MoE modules and functions on the kernels of this repository.

Each has the forward of what it replaces and no state of its own. The gated delta rule and the convolution take packed
sequences (`cu_seq_lens_q`), which transformers' own PyTorch functions refuse. A layer raises a `ValueError` where the
kernel does not support its tensors (`supports`); there is no second implementation here.
"""

import torch
from torch import Tensor, nn

from .conv import causal_conv
from .experts import experts
from .gated_delta import gated_delta_rule
from .norms import gated_rms_norm, rms_norm
from .router import top_k_router


def _lengths(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Cumulative lengths of a batch of equal sequences, or of one packed row."""
    if cu_seqlens is None:
        return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    if batch != 1:
        raise ValueError(f"packed sequences come in one row, the batch has {batch}")
    return cu_seqlens.to(torch.int32)


class MoEMBExperts(nn.Module):
    """`Qwen3_5MoeExperts`; the activation is SiLU."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


class RMSNormZeroCentered(nn.Module):
    """`Qwen3_5MoeRMSNorm`: the weight is an offset from 1."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, x.dtype)


class RMSNormGated(nn.Module):
    """`Qwen3_5MoeRMSNormGated`."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon).to(hidden_states.dtype)


class SoftmaxTopKRouter(nn.Module):
    """`Qwen3_5MoeTopKRouter`."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        index, weight = top_k_router(logits.float(), self.top_k)
        return logits, weight.to(logits.dtype), index


class CausalConv1d(nn.Module):
    """The function `causal_conv1d_fn`, on `(batch, channels, tokens)`."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs,
    ) -> Tensor:
        batch, channels, tokens = hidden_states.shape
        cu_seqlens = _lengths(batch, tokens, kwargs.get("cu_seq_lens_q"), hidden_states.device)
        rows = hidden_states.transpose(1, 2).reshape(batch * tokens, channels)
        silu = "silu" if activation in ("silu", "swish") else None
        if activation is not None and silu is None:
            raise ValueError(f"activation '{activation}' is not 'silu'")
        output = causal_conv(rows, weight, cu_seqlens, silu if bias is None else None)
        if bias is not None:
            output = output + bias
            output = nn.functional.silu(output) if silu else output
        return output.view(batch, tokens, channels).transpose(1, 2)


class ChunkGatedDeltaRule(nn.Module):
    """The function `torch_chunk_gated_delta_rule`, on `(batch, tokens, heads, dim)`.

    The kernel keeps its state to itself, so states go in and out as tokens: one per key feature that writes a row of
    the initial state before a sequence, one that reads a row of the final state after it.
    """

    can_torch_compile = True

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
    ) -> tuple[Tensor, Tensor | None]:
        if not use_qk_l2norm_in_kernel:
            raise ValueError("the kernel normalises queries and keys: use_qk_l2norm_in_kernel must be True")
        batch, tokens, _, key_dim = key.shape
        lengths = _lengths(batch, tokens, kwargs.get("cu_seqlens"), key.device)
        inputs = [states.flatten(0, 1) for states in (query, key, value, g.float(), beta.float())]
        if initial_state is None and not output_final_state:
            output = gated_delta_rule(*inputs, lengths)
            return output.view(batch, tokens, *output.shape[1:]).to(query.dtype), None
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError("packed sequences carry no state: call with use_cache=False")
        before = 0 if initial_state is None else key_dim
        after = key_dim if output_final_state else 0
        inputs = _with_state_tokens([states.unflatten(0, (batch, tokens)) for states in inputs], initial_state, after)
        total = before + tokens + after
        lengths = _lengths(batch, total, None, key.device)
        output = gated_delta_rule(*(states.flatten(0, 1) for states in inputs), lengths)
        output = output.view(batch, total, *output.shape[1:])
        state = None
        if output_final_state:  # (batch, key_dim, value_heads, value_dim) -> (batch, value_heads, key_dim, value_dim)
            state = output[:, before + tokens :].transpose(1, 2) * (1 + 1e-6) ** 0.5 * key_dim**0.5
        return output[:, before : before + tokens].to(query.dtype), state


def _with_state_tokens(inputs: list[Tensor], initial_state: Tensor | None, after: int) -> list[Tensor]:
    """Put the tokens that write the initial state before the inputs, and those that read the final one after them."""
    query, key, value, decay, beta = (states.float() for states in inputs)
    batch, _, key_heads, key_dim = key.shape
    basis = torch.eye(key_dim, device=key.device)[None, :, None].expand(batch, -1, key_heads, -1)
    quiet = decay.new_zeros(batch, key_dim, decay.shape[-1])  # decay 0 keeps the state, beta 0 leaves it unwritten
    parts = [[query], [key], [value], [decay], [beta]]
    if initial_state is not None:
        # the L2 norm inside the kernel shrinks a unit vector a little
        rows = initial_state.float().transpose(1, 2) * (1 + 1e-6) ** 0.5
        for part, states in zip(parts, (basis, basis, rows, quiet, torch.ones_like(quiet))):
            part.insert(0, states)
    if after:
        silent = value.new_zeros(batch, key_dim, *value.shape[2:])
        for part, states in zip(parts, (basis, basis, silent, quiet, quiet)):
            part.append(states)
    return [torch.cat(part, dim=1) for part in parts]
