"""Top-k router, forward and backward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._ops import ops
from .gradients import tracks
from .registration import register_fake


MAX_EXPERTS = 4096


@register_fake("top_k_router")
def _(logits, k, expert_index, weight) -> None:
    return None


@register_fake("top_k_router_backward")
def _(expert_index, weight, grad_weight, grad_logits) -> None:
    return None


def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    expert_index = torch.empty((logits.shape[0], k), dtype=torch.int64)
    weight = torch.empty((logits.shape[0], k), dtype=torch.float32)
    ops.top_k_router(logits, k, expert_index, weight)
    return expert_index, weight


class _TopKRouter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        expert_index, weight = _route(logits, k)
        ctx.mark_non_differentiable(expert_index)
        ctx.save_for_backward(expert_index, weight)
        ctx.num_experts = logits.shape[1]
        return expert_index, weight

    @staticmethod
    @once_differentiable
    def backward(ctx, _, grad_weight: Tensor):
        expert_index, weight = ctx.saved_tensors
        grad_logits = torch.empty((weight.shape[0], ctx.num_experts), dtype=torch.float32)
        ops.top_k_router_backward(expert_index, weight, grad_weight.float().contiguous(), grad_logits)
        return grad_logits, None


def top_k_router(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` experts with the largest logits and their softmax weights, renormalised over the chosen ones.

    Softmax over all experts, top-k, division by the sum of the chosen (Qwen3.5-MoE's router) is the softmax of the
    chosen logits; that is what is computed, in fp32.

    Args:
        logits (`torch.FloatTensor` of shape `(tokens, num_experts)`): fp32; at most 4,096 experts.
        k (`int`): experts per token, 1 to `num_experts`.

    Returns:
        `torch.LongTensor` of shape `(tokens, k)`, in descending order of the logits, the lower index first among
        equals; and `torch.FloatTensor` of shape `(tokens, k)`, differentiable in `logits`. A row with a NaN or +inf
        has NaN weights and valid indices.

    Raises:
        ValueError: a shape, dtype, device or `k` that the kernel does not take.
    """
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"top_k_router: `logits` must be (tokens, 1 to {MAX_EXPERTS} experts), got shape {tuple(logits.shape)}"
        )
    if logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ValueError(f"top_k_router: `logits` must be float32 on the cpu, got {logits.dtype} on {logits.device}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"top_k_router: `k` must be from 1 to {logits.shape[1]}, got {k}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return _TopKRouter.apply(logits, k) if tracks(logits) else _route(logits, k)


def supports_top_k_router(logits: Tensor) -> bool:
    """Whether `top_k_router` runs on these logits without a copy."""
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.dim() == 2
        and 1 <= logits.shape[1] <= MAX_EXPERTS
        and logits.stride(1) == 1
    )
