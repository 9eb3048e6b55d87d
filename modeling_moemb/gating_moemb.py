"""Gates at work on one batch: who is asked, what is decided, and how it is carried out.

At every gate that rows reach, a *policy* may decide in place of the gate's own threshold: it gets a [`GateQuery`] and
answers with actions, which are executed (dropped tokens removed by re-packing, skipped experts left out), or with
factors, which training needs: differentiable weights of what is kept, with nothing removed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gates_moemb import MoEMBGates, item_means
from .packing_moemb import PackedTokens
from .pruning_moemb import VISUAL, TokenPruning, prunable, rank_in_groups
from .routing_moemb import Routing, renormalised
from .settings_moemb import active_gates


@dataclass(frozen=True)
class GateQuery:
    """What a gate asks of the rows that may act there: dropped tokens, text (for dropping) and `<emb>` are not in it.

    Args:
        kind (`str`): `"keep"`, `"gradual"`, `"skip"` or `"null"`.
        block (`int`): the block that the decision takes effect in.
        logits (`torch.FloatTensor` of shape `(rows,)`, or `(rows, slots)` for `"null"`): fp32 log-odds of the saving
            action: drop the token, skip its experts, leave the slot out.
        inputs (`tuple[torch.Tensor, ...]`): what the gate saw, see [`MoEMBGates.logits`].
        rows (`torch.LongTensor` of shape `(rows,)`): among the tokens alive in this block.
        segment (`torch.LongTensor` of shape `(rows,)`): the item of each row.
        source (`torch.LongTensor` of shape `(rows,)`): flat index in the padded batch: the name of the token.
        modality (`torch.LongTensor` of shape `(rows,)`): 0 text, 1 image, 2 video.
    """

    kind: str
    block: int
    logits: Tensor
    inputs: tuple[Tensor, ...]
    rows: Tensor
    segment: Tensor
    source: Tensor
    modality: Tensor


@dataclass(frozen=True)
class GateDecision:
    """What a policy decides at a gate.

    Args:
        remove (`torch.BoolTensor`, *optional*): of the shape of the query's logits; what is true is removed.
        factor (`torch.FloatTensor`, *optional*): of the same shape; how much of what is not removed counts. For tokens
            a mask: 0 is as if the token were not there. For experts it multiplies their weights.
    """

    remove: Tensor | None = None
    factor: Tensor | None = None


GatePolicy = Callable[[GateQuery], GateDecision | Tensor | None]


def first_gate_block(budget: dict[str, Any], gates: dict[str, Any] | None) -> int | None:
    """The first block that a gate decides for; what comes before is the same whatever the gates do.

    Args:
        budget (`dict`): validated settings, see `validate_adaptive_compute`.
        gates (`dict`, *optional*): the gates of the model, see `validate_gates`.
    """
    kinds = [kind for kind in active_gates(budget) if kind in (gates or {})]
    return min((gates[kind]["layer"] if kind == "keep" else gates[kind]["blocks"][0] for kind in kinds), default=None)


class GateDial:
    """The gates of a compute budget at work on one batch.

    Args:
        budget (`dict`): validated settings.
        gates (`MoEMBGates`): the model's gates.
        packed (`PackedTokens`): the tokens at the first block.
        policy (`GatePolicy`, *optional*): decides in place of the budget's thresholds.
        last_block (`int`): number of the last block.
    """

    def __init__(
        self,
        budget: dict[str, Any],
        gates: MoEMBGates,
        packed: PackedTokens,
        policy: GatePolicy | None,
        last_block: int,
    ):
        self.gates, self.policy, self.last_block = gates, policy, last_block
        self.kinds = active_gates(budget)
        self.pruning = budget.get("token_pruning") if "keep" in self.kinds else None
        self.prunable = [] if self.pruning is None else prunable(budget)
        self.gradual = budget.get("gradual_pruning") or {}
        self.skip = budget.get("expert_skip") or {}
        self.null = budget.get("null_experts") or {}
        self.macs = 0
        # of each token that is alive
        self.mask: Tensor | None = None  # its factor, where a policy masks tokens instead of dropping them
        self.halted: Tensor | None = None  # the sum of its halting probabilities
        if "halting" in self.gradual:
            self.halted = torch.zeros(packed.num_tokens, device=packed.segment.device)

    def gather(self, index: Tensor) -> None:
        """Follow the tokens: keep those at `index` (`torch.LongTensor`), which may name one several times."""
        self.mask = None if self.mask is None else self.mask[index]
        self.halted = None if self.halted is None else self.halted[index]

    # Tokens

    def survivors(self, block: int, packed: PackedTokens, states: Tensor) -> Tensor | None:
        """Which tokens block number `block` sees (`torch.BoolTensor` `(tokens,)`); `None`: all."""
        keep = None
        for kind in ("keep", "gradual"):
            if kind not in self.kinds or not self.gates.has(kind, block):
                continue
            asked = (packed.modality == number for number in (self.prunable if kind == "keep" else VISUAL.values()))
            rows = self._alive(packed, torch.stack(list(asked)).any(0), keep)
            if not len(rows):
                continue
            decision = self._decide_tokens(kind, block, packed, states, rows)
            if decision.remove is not None:
                gone = torch.zeros_like(packed.segment, dtype=torch.bool).index_copy(0, rows, decision.remove)
                keep = ~gone if keep is None else keep & ~gone
            if decision.factor is not None:
                whole = torch.ones_like(packed.segment, dtype=torch.float32)
                factor = whole.index_copy(0, rows, decision.factor.float())
                self.mask = factor if self.mask is None else self.mask * factor
        return None if keep is None or bool(keep.all()) else keep

    def _alive(self, packed: PackedTokens, eligible: Tensor, keep: Tensor | None) -> Tensor:
        if keep is not None:
            eligible = eligible & keep
        if self.mask is not None:
            eligible = eligible & (self.mask.detach() > 0.5)
        return eligible.nonzero().squeeze(1)

    def _decide_tokens(
        self, kind: str, block: int, packed: PackedTokens, states: Tensor, rows: Tensor
    ) -> GateDecision:
        home = packed.segment.device
        seen = states.index_select(0, rows.to(states.device))
        inputs = (seen,)
        if kind == "keep":
            inputs = (seen, item_means(seen, packed.segment[rows], len(packed.lengths)))
        query = self._query(kind, block, inputs, packed, rows)
        decision = self._ask(query)
        if decision is not None:
            return decision
        if kind == "keep":
            return GateDecision(self._one_shot(query, packed))
        probability = torch.sigmoid(query.logits)
        if self.halted is None:
            return GateDecision(probability > self.gradual.get("threshold", 0.5))
        self.halted = self.halted.index_add(0, rows, probability.to(home))
        return GateDecision(self.halted[rows] > 1 - self.gradual["halting"])

    def _one_shot(self, query: GateQuery, packed: PackedTokens) -> Tensor:
        if "threshold" not in self.pruning:
            pruning = TokenPruning.from_settings(self.pruning)
            if pruning is None:
                return torch.zeros_like(query.rows, dtype=torch.bool)
            score = query.logits.new_zeros(packed.num_tokens).index_copy(0, query.rows, -query.logits)
            return ~pruning.keep(packed, score)[query.rows]
        given = self.pruning["threshold"]
        given = given if isinstance(given, dict) else dict.fromkeys(VISUAL, given)
        limit = torch.tensor([0.5, *(given.get(name, 0.5) for name in VISUAL)], device=query.rows.device)
        rank, _ = rank_in_groups(-query.logits, query.segment)
        return (torch.sigmoid(-query.logits) <= limit[query.modality]) & (rank > 0)

    # Experts

    def route(
        self,
        block: int,
        packed: PackedTokens,
        rows: Tensor | None,
        routing: Routing,
        states: Tensor,
        mask: Tensor | None = None,
    ) -> Routing:
        """The pairs that the skip gate and the null experts leave.

        Args:
            block (`int`): the block.
            packed (`PackedTokens`): its tokens.
            rows (`torch.LongTensor` of shape `(rows,)`, *optional*): those that its experts see; all when `None`.
            routing (`Routing`): the router's choice for these.
            states (`torch.Tensor` of shape `(rows, hidden)`): the router's input.
            mask (`torch.FloatTensor` of shape `(tokens,)`, *optional*): the factor of each token in this block.
        """
        logits = routing.logits
        for kind in ("skip", "null"):
            if kind not in self.kinds or not self.gates.has(kind, block):
                continue
            places = self._acting(kind, block, packed, rows, routing, mask)
            if not len(places):
                continue
            there, tokens = places.to(states.device), places if rows is None else rows[places]
            acting = routing.take(there)
            seen = states[there], None if logits is None else logits[there]
            decision = self._decide_slots(kind, block, packed, tokens, acting, seen)
            routing = routing.put(there, _carried_out(acting, decision, kind == "null"))
        return routing

    def _acting(
        self,
        kind: str,
        block: int,
        packed: PackedTokens,
        rows: Tensor | None,
        routing: Routing,
        mask: Tensor | None,
    ) -> Tensor:
        """Places among the rows that may act: they are alive, still run experts, and are not `<emb>` at the end."""
        eligible = torch.ones_like(packed.segment, dtype=torch.bool)
        if mask is not None:
            eligible = mask.detach() > 0.5
        if block == self.last_block:
            eligible = eligible.index_fill(0, packed.last_rows, False)
        eligible = eligible if rows is None else eligible[rows]
        if kind == "null":
            eligible = eligible & ~routing.skipped.all(-1).to(eligible.device)
        return eligible.nonzero().squeeze(1)

    def _decide_slots(
        self, kind: str, block: int, packed: PackedTokens, tokens: Tensor, acting: Routing, seen: tuple[Tensor, Tensor]
    ) -> GateDecision:
        """For the slots of the acting tokens; `seen` is the router's input and its logits for them."""
        if kind == "skip":
            inputs = (seen[0], acting.weight.float().amax(-1))
        else:
            inputs = (seen[0], seen[1].gather(1, acting.expert_index.clamp_max(acting.num_experts - 1)))
        query = self._query(kind, block, inputs, packed, tokens)
        decision = self._ask(query)
        if decision is None:
            decision = GateDecision(query.logits > 0) if kind == "null" else self._skipped(query)
        place = acting.weight.device
        both = [None if part is None else part.to(place) for part in (decision.remove, decision.factor)]
        if kind == "skip":
            both = [None if part is None else part[:, None].expand(acting.weight.shape) for part in both]
        return GateDecision(*both)

    def _skipped(self, query: GateQuery) -> GateDecision:
        skipped = torch.sigmoid(query.logits) > self.skip.get("threshold", 0.5)
        if not self.skip.get("scale_kept", False):
            return GateDecision(skipped)
        return GateDecision(skipped, torch.sigmoid(-query.logits / self.skip.get("temperature", 1.0)))

    # Queries

    def _query(
        self, kind: str, block: int, inputs: tuple[Tensor, ...], packed: PackedTokens, rows: Tensor
    ) -> GateQuery:
        logits = self.gates.logits(kind, block, inputs)
        self.macs += getattr(self.gates, kind).macs * len(rows)
        place = packed.segment.device
        named = (packed.segment[rows], packed.source[rows], packed.modality[rows])
        return GateQuery(kind, block, logits.to(place), inputs, rows, *named)

    def _ask(self, query: GateQuery) -> GateDecision | None:
        """The policy's decision, checked; `None` without one."""
        answer = None if self.policy is None else self.policy(query)
        if answer is None:
            return None
        if isinstance(answer, Tensor):
            answer = GateDecision(answer) if answer.dtype == torch.bool else GateDecision(None, answer)
        for name, tensor in (("remove", answer.remove), ("factor", answer.factor)):
            if tensor is not None and (
                tensor.shape != query.logits.shape or (name == "remove") != (tensor.dtype == torch.bool)
            ):
                wanted = "bool" if name == "remove" else "floats"
                raise ValueError(
                    f"the gate policy answered the {query.kind!r} gate of block {query.block} with `{name}` "
                    f"{tensor.dtype} {tuple(tensor.shape)}: it must be {wanted} of shape {tuple(query.logits.shape)}"
                )
        parts = (None if part is None else part.to(query.rows.device) for part in (answer.remove, answer.factor))
        return GateDecision(*parts)


def _carried_out(routing: Routing, decision: GateDecision, renormalise: bool) -> Routing:
    if decision.remove is not None:
        routing = renormalised(routing, decision.remove) if renormalise else routing.skip(decision.remove)
    if decision.factor is None:
        return routing
    weight = routing.weight * decision.factor.to(routing.weight)
    if renormalise:
        total = weight.sum(-1, keepdim=True)
        share = weight / torch.where(total > 0, total, 1)
        # what keeps all its slots keeps their weights bit by bit, unless a gradient has to know of the division
        untouched = (decision.factor == 1).all(-1, keepdim=True)
        weight = share if decision.factor.requires_grad else torch.where(untouched, weight, share)
    return Routing(routing.expert_index, weight, routing.num_experts)


__all__ = ["GateDecision", "GateDial", "GatePolicy", "GateQuery", "first_gate_block"]
