"""What decides at the gates while they are trained by gradients, and what it keeps account of.

Each kind of gate has a differentiable form: a hard decision whose gradient is that of its probability
(straight-through) for tokens and slots, a fade of the routed output for skipping that turns into straight-through at
the end. Gates that are finished decide as they are deployed. The account is what budgets are made of: how much of each
token is there in each block, and which share of its expert slots it runs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modeling_moemb.gating_moemb import GateDecision, GateQuery
from modeling_moemb.pruning_moemb import kept_count, rank_in_groups

from .adaptive_objectives import annealed, gumbel_keep, halting_weights, straight_through
from .adaptive_strategies import Phase


TOKEN_KINDS = ("keep", "gradual")


@dataclass
class GateEvent:
    """
    What was decided at one gate.

    Args:
        kind (`str`), block (`int`): which gate.
        source (`torch.LongTensor` of shape `[rows]`): the tokens.
        saving (`torch.Tensor`): probability of saving, `[rows]` or `[rows, slots]`, with gradient.
        kept (`torch.Tensor`): the factor that was applied, likewise; 0 for what was removed.
        hard (`torch.BoolTensor`): what the deployed gate would keep, likewise.
        trained (`bool`): whether the gate is being trained.
        query (`GateQuery`): what was asked.
    """

    kind: str
    block: int
    source: Tensor
    saving: Tensor
    kept: Tensor
    hard: Tensor
    trained: bool
    query: GateQuery


@dataclass
class Account:
    """
    What a pass kept.

    Args:
        mass (`list[torch.Tensor]`): of each block, how much of each token is there, `[tokens]`.
        kept (`list[torch.Tensor]`): of each block, the share of its expert slots that each token runs, `[tokens]`.
        gate_macs (`float`): multiply-accumulates of the gates.
    """

    mass: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    gate_macs: float = 0.0


@dataclass(frozen=True)
class Estimators:
    """
    How decisions are made differentiable; see [`AdaptiveConfig`] for the settings.

    Args:
        keep (`str`): `"gumbel"` or `"straight_through"`.
        compact (`bool`): whether a one-shot gate's dropped tokens are removed, so that they get no gradient.
        gradual (`str`): `"straight_through"` or `"halting"`.
        epsilon (`float`): of halting.
        null (`str`): `"straight_through"`, or `"balance"`: a load balance over all experts is the only objective.
        temperature (`tuple[float, float]`): at the start and the end.
        straight_through_share (`float`): part of the schedule, at its end, in which skipping is hard.
        keep_fraction (`Fraction`, *optional*): the one-shot gate keeps this share of each item's tokens when deployed;
            `None`: those above one half.
    """

    keep: str = "gumbel"
    compact: bool = False
    gradual: str = "straight_through"
    epsilon: float = 0.01
    null: str = "straight_through"
    temperature: tuple[float, float] = (1.0, 0.1)
    straight_through_share: float = 0.2
    keep_fraction: Any = None


class TrainingPolicy:
    """A `gate_policy` of [`MoEMBModel`] for one step.

    Args:
        phase ([`Phase`]): what each gate does.
        estimators ([`Estimators`]): how.
        tokens (`int`): tokens of the flattened batch.
        generator (`torch.Generator`): of the Gumbel noise, on the CPU.
    """

    def __init__(self, phase: Phase, estimators: Estimators, tokens: int, generator: torch.Generator):
        self.phase, self.estimators, self.tokens, self.generator = phase, estimators, tokens, generator
        self.temperature = annealed(phase.progress, *estimators.temperature)
        self.events: dict[tuple[str, int], GateEvent] = {}
        self._halting: dict[str, Tensor] = {}

    def __call__(self, query: GateQuery) -> GateDecision:
        again = self.events.get((query.kind, query.block))
        hard = self._deployed(query)
        if query.kind not in self.phase.active:  # its turn has not come
            return GateDecision(torch.zeros_like(hard))
        if query.kind not in self.phase.soft:
            decision, saving, kept = GateDecision(~hard), torch.sigmoid(query.logits), hard.float()
        else:
            decision, saving, kept = getattr(self, f"_{query.kind}")(query, hard, again)
        if again is None:  # gradient checkpointing asks twice
            event = (query.source, saving, kept, hard, query.kind in self.phase.trained, query)
            self.events[query.kind, query.block] = GateEvent(query.kind, query.block, *event)
        return decision

    def _deployed(self, query: GateQuery) -> Tensor:
        """What is kept, `torch.BoolTensor`, when the gate decides by itself."""
        if query.kind == "gradual" and self.estimators.gradual == "halting":
            return self._halting_sum(query).detach() <= 1 - self.estimators.epsilon
        kept = query.logits <= 0
        if query.kind != "keep":
            return kept
        if self.estimators.keep_fraction is not None:
            rank, size = rank_in_groups(-query.logits.detach(), 3 * query.segment + query.modality)
            return rank < kept_count(size, self.estimators.keep_fraction)
        return _with_best(kept, query)

    # The differentiable forms: decision, probability of saving, factor

    def _keep(self, query: GateQuery, hard: Tensor, again: GateEvent | None) -> tuple[GateDecision, Tensor, Tensor]:
        if again is not None:
            soft = again.kept
        elif self.estimators.keep == "gumbel":
            uniform = torch.rand(query.logits.shape, generator=self.generator).clamp(1e-6, 1 - 1e-6)
            soft = gumbel_keep(query.logits, self.temperature, uniform.to(query.logits.device))
        else:
            soft = torch.sigmoid(-query.logits / self.temperature)
        sampled = _with_best(soft.detach() > 0.5, query)
        factor = straight_through(sampled, soft)
        saving = torch.sigmoid(query.logits)
        if not self.estimators.compact:
            return GateDecision(factor=factor), saving, factor
        # the dropped leave the batch: only the budget, and the exploration of the noise, reach them
        return GateDecision(~sampled, straight_through(torch.ones_like(sampled), soft)), saving, factor

    def _gradual(self, query: GateQuery, hard: Tensor, again: GateEvent | None) -> tuple[GateDecision, Tensor, Tensor]:
        saving = torch.sigmoid(query.logits)
        if self.estimators.gradual == "halting":
            total = self._halting_sum(query)
            if again is None:
                self._halting["sum"] = self._halting["sum"].index_copy(0, query.source, total)
            soft = 1 - total.clamp(0, 1)
        else:
            soft = 1 - saving
        factor = straight_through(hard, soft)
        return GateDecision(factor=factor), saving, factor

    def _halting_sum(self, query: GateQuery) -> Tensor:
        """Sum of a token's halting scores up to this gate."""
        if "sum" not in self._halting:
            self._halting["sum"] = torch.zeros(self.tokens, device=query.logits.device)
        again = self.events.get((query.kind, query.block))
        score = torch.sigmoid(query.logits)
        before = self._halting["sum"][query.source]
        return before if again is not None else before + score

    def _skip(self, query: GateQuery, hard: Tensor, again: GateEvent | None) -> tuple[GateDecision, Tensor, Tensor]:
        saving = torch.sigmoid(query.logits / self.temperature)
        fading = self.phase.progress < 1 - self.estimators.straight_through_share
        factor = 1 - saving if fading else straight_through(hard, 1 - saving)
        return GateDecision(factor=factor), saving, factor

    def _null(self, query: GateQuery, hard: Tensor, again: GateEvent | None) -> tuple[GateDecision, Tensor, Tensor]:
        saving = torch.sigmoid(query.logits / self.temperature)
        if self.estimators.null == "balance":
            return GateDecision(~hard), saving, hard.float()
        factor = straight_through(hard, 1 - saving)
        return GateDecision(factor=factor), saving, factor

    # The account

    def account(self, blocks: int, device: torch.device, macs: dict[str, int]) -> Account:
        """
        What the pass kept.

        Args:
            blocks (`int`): decoder blocks.
            device (`torch.device`): of the tensors.
            macs (`dict[str, int]`): multiply-accumulates of each kind of gate per row.
        """
        account = Account()
        mass = torch.ones(self.tokens, device=device)
        for block in range(blocks):
            for kind in TOKEN_KINDS:
                mass = self._applied(mass, kind, block)
            kept = torch.ones(self.tokens, device=device)
            for kind in ("skip", "null"):
                kept = self._applied(kept, kind, block)
            account.mass.append(mass)
            account.kept.append(kept)
        account.gate_macs = float(sum(macs[event.kind] * len(event.source) for event in self.events.values()))
        return account

    def _applied(self, values: Tensor, kind: str, block: int) -> Tensor:
        event = self.events.get((kind, block))
        if event is None:
            return values
        kept = event.kept if event.kept.dim() == 1 else event.kept.mean(-1)
        return values.index_copy(0, event.source, values[event.source] * kept)

    def halting(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Halting scores `[tokens, blocks]` of the tokens that a gradual gate saw, their depth and remainder.

        A token that had halted before a gate has no score there and gets 0.
        """
        events = [event for event in self.events.values() if event.kind == "gradual"]
        if not events:
            return None
        events = sorted(events, key=lambda event: event.block)
        scores = []
        for event in events:
            column = torch.zeros(self.tokens, device=event.saving.device)
            scores.append(column.index_copy(0, event.source, event.saving))
        matrix = torch.stack(scores, 1)[events[0].source]
        _, depth, remainder = halting_weights(matrix, self.estimators.epsilon)
        return matrix, depth, remainder


def _with_best(kept: Tensor, query: GateQuery) -> Tensor:
    """Of each item at least the token that the gate likes best stays."""
    rank, _ = rank_in_groups(-query.logits.detach(), query.segment)
    return kept | (rank == 0)
