"""The feed-forward part of a decoder block: routed experts, experts by modality, or one dense network.

All three take a policy `Routing -> Routing` and run the pairs that it leaves. The last two have a fixed router:
nothing to learn, one expert per token, weight 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .experts_moemb import MoEMBExperts, MoEMBSparseMoeBlock
from .linear_moemb import MoEMBMLP
from .routing_moemb import Routing, fixed_routing
from .task_conditioning_moemb import RouterCondition


Policy = Callable[[Routing], Routing]


class MoEMBModalityBlock(nn.Module):
    """One expert each for text, image and video tokens; every token goes to the one of its modality.

    Args:
        config (`Qwen3_5MoeTextConfig`): with 3 experts, 1 per token.
        experts_backend (`str`): as in [`MoEMBExperts`].
    """

    def __init__(self, config, experts_backend: str):
        super().__init__()
        self.experts = MoEMBExperts(config, experts_backend)

    def forward(
        self,
        hidden_states: Tensor,
        policy: Policy | None = None,
        modality: Tensor | None = None,
        condition: RouterCondition | None = None,
    ) -> tuple[Tensor, None]:
        """Run the block; arguments as in [`MoEMBSparseMoeBlock`], `modality` is needed, `condition` is not."""
        routing = fixed_routing(modality.to(hidden_states.device), self.experts.num_experts)
        if policy is not None:
            routing = policy(routing)
        return self.experts(hidden_states, routing.expert_index, routing.weight), None


class MoEMBDenseBlock(MoEMBMLP):
    """The dense network of Qwen3.5, under its parameter names.

    Args:
        config (`Qwen3_5MoeTextConfig`): `moe_intermediate_size` is the width.
    """

    def __init__(self, config):
        super().__init__(config, config.moe_intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        policy: Policy | None = None,
        modality: Tensor | None = None,
        condition: RouterCondition | None = None,
    ) -> tuple[Tensor, None]:
        """Run the network, with `policy` for the tokens whose only slot it keeps; the rest get zero."""
        if policy is None:
            return super().forward(hidden_states), None
        tokens = hidden_states.shape[0]
        routing = policy(fixed_routing(torch.zeros(tokens, dtype=torch.long, device=hidden_states.device), 1))
        kept = (~routing.skipped[:, 0]).nonzero().squeeze(1)
        if len(kept) == tokens:
            return super().forward(hidden_states), None
        output = super().forward(hidden_states[kept])
        return torch.zeros_like(hidden_states).index_copy(0, kept, output.to(hidden_states.dtype)), None


def feed_forward_block(config, kind: str, experts_backend: str) -> nn.Module:
    """The block of a kind (`config.feed_forward` of [`MoEMBConfig`])."""
    if kind == "dense":
        return MoEMBDenseBlock(config)
    if kind == "modality":
        return MoEMBModalityBlock(config, experts_backend)
    return MoEMBSparseMoeBlock(config, experts_backend)


__all__ = ["MoEMBDenseBlock", "MoEMBModalityBlock", "feed_forward_block"]
