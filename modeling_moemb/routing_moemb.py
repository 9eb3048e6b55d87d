"""One routing object for every expert policy.

A router makes a [`Routing`]; each policy is a function `Routing -> Routing`; the expert back-ends run exactly the
pairs that survive. A skipped slot carries the sentinel expert `num_experts` and weight 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels_moemb import kernel
from .settings_moemb import MODALITY_NAMES


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
        logits (`torch.FloatTensor` of shape `(tokens, num_experts)`, *optional*):
            The router's logits, before any policy.
    """

    expert_index: Tensor
    weight: Tensor
    num_experts: int
    logits: Tensor | None = None

    @property
    def skipped(self) -> Tensor:
        """`torch.BoolTensor` of shape `(tokens, slots)`: the slots that run no expert."""
        return self.expert_index == self.num_experts

    def take(self, rows: Tensor) -> "Routing":
        """The routing of some tokens, `torch.LongTensor` of shape `(rows,)`."""
        return Routing(self.expert_index.index_select(0, rows), self.weight.index_select(0, rows), self.num_experts)

    def put(self, rows: Tensor, other: "Routing") -> "Routing":
        """With another routing for some tokens, `torch.LongTensor` of shape `(rows,)`."""
        index = self.expert_index.index_copy(0, rows, other.expert_index)
        return Routing(index, self.weight.index_copy(0, rows, other.weight.to(self.weight)), self.num_experts)

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
    run = kernel("top_k_router", router_logits)
    if run is not None:
        expert_index, weight = run(router_logits, top_k)
        return Routing(expert_index, weight.to(dtype), router_logits.shape[-1], router_logits)
    probabilities = torch.softmax(router_logits.float(), dim=-1)
    weight, expert_index = torch.topk(probabilities, top_k, dim=-1)
    weight = weight / weight.sum(dim=-1, keepdim=True)
    return Routing(expert_index, weight.to(dtype), router_logits.shape[-1], router_logits)


def fixed_routing(expert: Tensor, num_experts: int) -> Routing:
    """Each token to one given expert with weight 1 (fp32).

    Args:
        expert (`torch.LongTensor` of shape `(tokens,)`): the expert of each token.
        num_experts (`int`): number of experts.
    """
    weight = torch.ones(len(expert), 1, dtype=torch.float32, device=expert.device)
    return Routing(expert[:, None], weight, num_experts)


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


def top_k_per_token(routing: Routing, top_k: Tensor) -> Routing:
    """Keep each token's own number of heaviest slots and renormalise them.

    Args:
        routing (`Routing`): the routing.
        top_k (`torch.LongTensor` of shape `(tokens,)`): slots to keep; a token with no more than that is untouched.
    """
    return renormalised(routing, _rank(routing.weight, routing.skipped) >= top_k[:, None])


def random_top_k(routing: Routing, top_k: int, key: Tensor) -> Routing:
    """Keep `top_k` of each token's slots, drawn at random, and renormalise them: the control of [`uniform_top_k`].

    Args:
        routing (`Routing`): the routing.
        top_k (`int`): slots to keep; a token with no more than that is untouched.
        key (`torch.Tensor` of shape `(tokens, slots)`): random numbers; the largest win.
    """
    return renormalised(routing, _rank(key, routing.skipped) >= top_k)


def skip_below_threshold(
    routing: Routing, scale: Tensor, tau: Tensor, min_experts: Tensor, renormalise: bool = False
) -> Routing:
    """Skip the slots whose weight times the layer's scale is below a threshold (MoDES, arXiv 2511.15690).

    Args:
        routing (`Routing`): the routing.
        scale, tau (`torch.FloatTensor` of shape `(tokens,)`): the layer's scale and the threshold of each token.
        min_experts (`torch.LongTensor` of shape `(tokens,)`): how many of a token's heaviest slots are never skipped.
        renormalise (`bool`, defaults to `False`): scale the kept weights of a token to sum to 1.
    """
    below = routing.weight.float() * scale[:, None] < tau[:, None]
    below = below & (_rank(routing.weight, routing.skipped) >= min_experts[:, None])
    return renormalised(routing, below) if renormalise else routing.skip(below)


def renormalised(routing: Routing, slots: Tensor) -> Routing:
    """Skip slots and scale what a token keeps to sum to 1; tokens that lose nothing keep their weights bit by bit."""
    lost = (slots & ~routing.skipped).any(dim=-1, keepdim=True)
    left = routing.skip(slots)
    total = left.weight.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(left.weight.dtype).tiny)
    return Routing(left.expert_index, torch.where(lost, left.weight / total, left.weight), routing.num_experts)


def expert_budget(budget: dict[str, Any], slots: int) -> list[int]:
    """Experts per text, image and video token before the policies that look at the token."""
    given = budget.get("per_modality") or {}
    return [given.get(name, budget.get("top_k", slots)) for name in MODALITY_NAMES]


def tiered_experts(base: Any, low: Any, rank: Any, size: Any) -> Any:
    """From `base` experts at rank 0 down to `low` at the last rank, rounded to the nearest, halves up.

    Takes integers or `torch.LongTensor`s; a token that has no other to be compared with gets `base`.
    """
    steps = size - 1
    last = steps.clamp_min(1) if isinstance(steps, Tensor) else max(steps, 1)
    quantile = 2 * (base - low) * (steps - rank) + steps
    if isinstance(size, Tensor):
        return torch.where(steps == 0, base, low + quantile // (2 * last))
    return base if steps == 0 else low + quantile // (2 * last)


def _rank(key: Tensor, skipped: Tensor) -> Tensor:
    """Rank of each slot in its token, 0 for the largest key; ties by slot, skipped slots last."""
    order = key.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(1, skipped.gather(1, order).long().argsort(dim=-1, stable=True))
    return order.argsort(dim=-1)


__all__ = [
    "Routing",
    "expert_budget",
    "fixed_routing",
    "random_top_k",
    "route",
    "skip_below_threshold",
    "tiered_experts",
    "top_k_per_token",
    "uniform_top_k",
]
