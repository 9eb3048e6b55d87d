"""The compute dial in one forward pass: applies a budget block by block, and records what was executed.

The decoder asks the dial for a [`BlockDial`] before each block and for the survivors after it. What the dial decides
for an item depends on the item alone, never on what shares its batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .compute_moemb import ComputeRecord
from .gates_moemb import MoEMBGates
from .gating_moemb import GateDial, GatePolicy, first_gate_block
from .packing_moemb import PackedTokens
from .pruning_moemb import TokenPruning, hashed, rank_in_groups
from .routing_moemb import (
    Routing,
    expert_budget,
    random_top_k,
    skip_below_threshold,
    tiered_experts,
    top_k_per_token,
    uniform_top_k,
)
from .settings_moemb import MODALITY_NAMES, active_gates


class BlockDial:
    """What the dial asks of one decoder block, and what the block reports back.

    Args:
        policies (`list[Callable[[Routing], Routing]]`): applied to the block's routing, in order.
        wants_attention (`bool`): whether the block shall report the attention its tokens receive.
        gated (`Callable`, *optional*): applied before the policies, to the routing and the router's input.
        mask (`torch.FloatTensor` of shape `(tokens,)`, *optional*): how much each token counts for the others' mixing.

    Attributes:
        states (`torch.Tensor` of shape `(rows, hidden)`): the router's input.
        routing (`Routing`): the pairs that were run.
        beta (`torch.FloatTensor` of shape `(tokens, value_heads)`): write strengths, if the block has any.
        received (`torch.FloatTensor` of shape `(tokens,)`): attention received, if it was wanted.
    """

    def __init__(
        self,
        policies: list[Callable[[Routing], Routing]],
        wants_attention: bool,
        gated: Callable[[Routing, Tensor], Routing] | None = None,
        mask: Tensor | None = None,
    ):
        self.policies = policies
        self.wants_attention = wants_attention
        self.gated = gated
        self.mask = mask
        self.states: Tensor | None = None
        self.routing: Routing | None = None
        self.beta: Tensor | None = None
        self.received: Tensor | None = None

    def route(self, routing: Routing) -> Routing:
        if self.gated is not None:
            routing = self.gated(routing, self.states)
        for policy in self.policies:
            routing = policy(routing)
        self.routing = routing
        return routing


class ComputeDial:
    """A compute budget at work on one batch.

    Args:
        budget (`dict`): validated settings, see `validate_adaptive_compute`; `{}` only records.
        text_config (`Qwen3_5MoeTextConfig`): the decoder's configuration.
        packed (`PackedTokens`): the tokens at the first block.
        words (`torch.LongTensor` of shape `(tokens,)`, *optional*): a number for the content of each token; needed
            when [`draws_random`], so that different items meet different draws.
        record (`bool`): whether to fill `self.record`.
        keep_beta (`bool`): whether to keep `(beta, packing)` of every Gated DeltaNet block in `self.betas`.
        gates (`MoEMBGates`, *optional*): the model's gates.
        gate_policy (`GatePolicy`, *optional*): decides for the gates in place of the budget's thresholds.
        rollouts (`int` or `list[int]`): copies of each item from the first block on that a gate decides for.
        size (`int`): entries of the padded batch, which tell the copies apart.
    """

    def __init__(
        self,
        budget: dict[str, Any],
        text_config: Any,
        packed: PackedTokens,
        words: Tensor | None = None,
        record: bool = False,
        keep_beta: bool = False,
        gates: MoEMBGates | None = None,
        gate_policy: GatePolicy | None = None,
        rollouts: int | Sequence[int] = 1,
        size: int = 0,
    ):
        self.pruning = TokenPruning.from_settings(budget.get("token_pruning"))
        self.tier = budget.get("tiered_top_k")
        self.experts = expert_budget(budget, text_config.num_experts_per_tok)
        self.random_k = budget.get("random_k", text_config.num_experts_per_tok)
        self.seed = budget.get("seed", 0)
        self.layer_types, self.slots = text_config.layer_types, text_config.num_experts_per_tok
        device = packed.segment.device
        self.modes = _modes_tables(budget.get("modes"), text_config.num_hidden_layers, device)
        self.betas: list[tuple[Tensor, PackedTokens]] | None = [] if keep_beta else None
        self.gates: GateDial | None = None
        if gates is not None and active_gates(budget):
            self.gates = GateDial(budget, gates, packed, gate_policy, text_config.num_hidden_layers - 1)
        self.rollouts, self.size, self.replicate_at = rollouts, size, None
        if rollouts != 1:
            first = None if gates is None else first_gate_block(budget, gates.settings)
            self.replicate_at = text_config.num_hidden_layers - 1 if first is None else first
        self.record: ComputeRecord | None = ComputeRecord.empty(text_config.num_experts, device) if record else None

        # of each token that is alive
        self.modality = packed.modality
        self.is_pooled = torch.zeros_like(packed.segment, dtype=torch.bool)
        self.is_pooled[packed.last_rows] = True
        self.key = None if words is None else _token_keys(words, packed, self.seed)
        self.beta_sum: Tensor | None = None
        self.received: Tensor | None = None
        self.tier_score: Tensor | None = None  # the sum of beta when the tiers begin
        self.tiered: PackedTokens | None = None  # the packing that the tiers are made for
        self.token_experts: Tensor | None = None
        if len(set(self.experts)) > 1:
            self.token_experts = torch.tensor(self.experts, device=device)[self.modality]

    def select(self, block: int, packed: PackedTokens, states: Tensor) -> tuple[PackedTokens, Tensor] | None:
        """Which rows block number `block` sees, where that changes: rollouts begin here, or gates drop tokens.

        Args:
            block (`int`): the block.
            packed (`PackedTokens`): the tokens alive so far.
            states (`torch.Tensor` of shape `(tokens, hidden)`): their states.

        Returns:
            The new packing and its rows (`torch.LongTensor`) in the old one.
        """
        index = None
        if block == self.replicate_at:
            packed, index = packed.replicate(self.rollouts, self.size)
            self.compact(index)
            states = states[index.to(states.device)]
        keep = None if self.gates is None else self.gates.survivors(block, packed, states)
        if keep is not None:
            packed, survivors = packed.compact(keep)
            self.compact(survivors)
            index = survivors if index is None else index[survivors]
        return None if index is None else (packed, index)

    def begin(self, block: int, packed: PackedTokens, output_rows: Tensor | None) -> BlockDial:
        """What block number `block` shall do; with `output_rows` its experts see these rows alone."""
        if self.tier is not None and block >= self.tier["layer"]:
            self._set_tiers(packed)
        rows = slice(None) if output_rows is None else output_rows
        policies: list[Callable[[Routing], Routing]] = []
        if self.token_experts is not None:
            experts = self.token_experts[rows]
            policies.append(lambda routing: top_k_per_token(routing, experts.to(routing.weight.device)))
        elif self.experts[0] < self.slots:
            policies.append(lambda routing: uniform_top_k(routing, self.experts[0]))
        if self.random_k < self.slots:
            key = self.key[rows, None]

            def draw(routing: Routing) -> Routing:
                place = routing.expert_index.device
                return random_top_k(routing, self.random_k, hashed(key.to(place), block, routing.expert_index))

            policies.append(draw)
        if self.modes is not None:
            policies.append(self._modes_policy(block, rows))
        attention = self.pruning is not None and self.pruning.score == "attention"
        seen = [index for index, kind in enumerate(self.layer_types) if kind == "full_attention"]
        last_seen = max((index for index in seen if attention and index < self.pruning.layer), default=None)
        if self.gates is None:
            return BlockDial(policies, block == last_seen)

        mask = self.gates.mask  # of this block, also when it is recomputed for the backward pass

        def gated(routing: Routing, states: Tensor) -> Routing:
            return self.gates.route(block, packed, output_rows, routing, states, mask)

        return BlockDial(policies, block == last_seen, gated, mask)

    def end(self, block: int, packed: PackedTokens, done: BlockDial, output_rows: Tensor | None) -> Tensor | None:
        """Take in what the block reports; the survivors (`torch.BoolTensor` `(tokens,)`) if tokens are dropped now."""
        home = packed.segment.device
        if self.record is not None:
            rows = slice(None) if output_rows is None else output_rows
            self.record.add(packed, rows, done.routing.expert_index.to(home), output_rows is not None)
            self.record.gate_macs = 0 if self.gates is None else self.gates.macs
        if done.beta is not None:
            if self.betas is not None:
                self.betas.append((done.beta.to(home), packed))
            mean = done.beta.detach().mean(-1).to(home)
            self.beta_sum = mean if self.beta_sum is None else self.beta_sum + mean
        if done.received is not None:
            self.received = done.received.to(home)
        if self.pruning is None or self.pruning.score == "gate" or block + 1 != self.pruning.layer:
            return None
        score = {"beta": self.beta_sum, "attention": self.received, "random": self.key}.get(self.pruning.score)
        return self.pruning.keep(packed, score)

    def compact(self, index: Tensor) -> None:
        """Keep the tokens at `index` (`torch.LongTensor`) alone; it may name one several times."""
        if self.gates is not None:
            self.gates.gather(index)
        for name in ("modality", "is_pooled", "key", "beta_sum", "received", "tier_score", "token_experts"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[index])

    def _set_tiers(self, packed: PackedTokens) -> None:
        """Experts per token by rank of beta among the item's tokens of a modality; the pooled token is by itself.

        Survivors of a pruning are ranked anew among themselves, so that the number of pairs follows from the shapes.
        """
        if packed is self.tiered:
            return
        self.tiered = packed
        if self.tier_score is None:
            self.tier_score = self.beta_sum
        kind = torch.where(self.is_pooled, 3, self.modality)
        rank, size = rank_in_groups(self.tier_score, 4 * packed.segment + kind)
        base = torch.tensor(self.experts, device=kind.device)[self.modality]
        self.token_experts = tiered_experts(base, base.clamp_max(self.tier["min"]), rank, size)

    def _modes_policy(self, block: int, rows: Any) -> Callable[[Routing], Routing]:
        scales, tau, min_experts, min_pooled, renormalise = self.modes
        modality, pooled = self.modality[rows], self.is_pooled[rows]
        tokens = scales[block][modality], tau[modality], torch.where(pooled, min_pooled, min_experts)

        def policy(routing: Routing) -> Routing:
            return skip_below_threshold(routing, *(t.to(routing.weight.device) for t in tokens), renormalise)

        return policy


def draws_random(budget: dict[str, Any]) -> bool:
    """Whether a budget needs random numbers."""
    return "random_k" in budget or (budget.get("token_pruning") or {}).get("score") == "random"


def _modes_tables(modes: dict[str, Any] | None, blocks: int, device: torch.device) -> tuple | None:
    """`(scales [blocks, 3], tau [3], min_experts, min_experts_emb, renormalise)`, or `None` if nothing is skipped."""
    if modes is None:
        return None
    tau = modes["tau"]
    tau = [tau.get(name, 0.0) for name in MODALITY_NAMES] if isinstance(tau, dict) else [tau] * 3
    if not any(tau):
        return None
    scales = modes.get("layer_scales") or [1 / blocks] * blocks
    columns = [scales[name] for name in MODALITY_NAMES] if isinstance(scales, dict) else [scales] * 3
    scales = torch.tensor(columns, dtype=torch.float32, device=device).T
    tau = torch.tensor(tau, dtype=torch.float32, device=device)
    minimum = modes.get("min_experts", 0)
    return scales, tau, minimum, max(minimum, modes.get("min_experts_emb", 1)), modes.get("renormalise", False)


def _token_keys(words: Tensor, packed: PackedTokens, seed: int) -> Tensor:
    """A random number for each token from the content of its whole item and its place in it."""
    within = torch.arange(packed.num_tokens, device=words.device) - packed.cu_seqlens.long()[packed.segment]
    item = torch.zeros(packed.num_items, dtype=torch.long, device=words.device)
    item = item.index_add(0, packed.segment, hashed(words, within))
    return hashed(item[packed.segment], within, seed)


__all__ = ["BlockDial", "ComputeDial", "draws_random"]
