"""One routing object for every expert policy.

A router makes a [`Routing`]; each policy is a function `Routing -> Routing`; the expert back-ends run exactly the
pairs that survive. A skipped slot carries the sentinel expert `num_experts` and weight 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to.

    Args:
        expert_index (`torch.LongTensor` of shape `(tokens, slots)`):
            Expert of each slot; `num_experts` marks a skipped slot.
        weight (`torch.Tensor` of shape `(tokens, slots)`):
            Weight of each slot's expert output; 0 in skipped slots.
        num_experts (`int`):
            Number of routed experts, hence also the sentinel.
    """

    expert_index: Tensor
    weight: Tensor
    num_experts: int

    def skip(self, slots: Tensor) -> "Routing":
        """Skip the slots where `slots` (`torch.BoolTensor` of shape `(tokens, slots)`) is true; no renormalisation."""
        return Routing(
            self.expert_index.masked_fill(slots, self.num_experts), self.weight.masked_fill(slots, 0), self.num_experts
        )


def route(router_logits: Tensor, top_k: int, dtype: torch.dtype) -> Routing:
    """Top-k routing of Qwen3.5-MoE: softmax over all experts in fp32, top-k, renormalised over the chosen ones.

    Args:
        router_logits (`torch.FloatTensor` of shape `(tokens, num_experts)`): fp32 logits.
        top_k (`int`): experts per token.
        dtype (`torch.dtype`): dtype of the returned weights.
    """
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weight, expert_index = torch.topk(probabilities, top_k, dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    return Routing(expert_index, weight.to(dtype), router_logits.shape[-1])


def uniform_top_k(routing: Routing, top_k: int) -> Routing:
    """Keep each token's `top_k` heaviest slots and renormalise them, as if the router had chosen only those.

    Raises:
        ValueError: if `top_k` is not between 1 and the number of slots.
    """
    slots = routing.expert_index.shape[1]
    if not 1 <= top_k <= slots:
        raise ValueError(f"`top_k` must be from 1 to {slots}, got {top_k}")
    if top_k == slots:
        return routing
    weight, order = torch.topk(routing.weight, top_k, dim=-1)
    expert_index = routing.expert_index.gather(1, order)
    total = weight.sum(dim=-1, keepdim=True)
    return Routing(expert_index, weight / total.clamp_min(torch.finfo(weight.dtype).tiny), routing.num_experts)
