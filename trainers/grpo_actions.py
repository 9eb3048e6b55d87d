"""The gates' actions as a completion: sampled in a rollout, and replayed for their log-probabilities.

Every gate is a Bernoulli choice between spending and saving; its logit is the log-odds of saving. The completion of a
rollout is the row of 0s (spent) and 1s (saved) of the gates it reached, in the order in which the model asks. A gate
that is not reached, such as those of a token that was dropped before, has no place in it: it contributes no
log-probability.

Randomness is a function of the seed, the generation, the rollout, the gate and the token's place in its item, and of
nothing else: a rollout is the same whatever shares its batch and however many processes there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_moemb.gates_moemb import KINDS
from modeling_moemb.pruning_moemb import hashed, rank_in_groups


SAMPLED, FULL, GREEDY = 0, 1, 2
StoredCall = tuple[str, int, Tensor, Tensor, Tensor, tuple[Tensor, ...]]
_OFFSET = 1 << 20  # a gate number that no gate has: the draws of the shared offsets


@dataclass(frozen=True)
class Exploration:
    """How actions are drawn.

    Args:
        sigma (`float`): standard deviation of the logit offset that all gates of one kind in a group of blocks share
            within a rollout; 0 draws every gate independently.
        groups (`int`): groups of blocks.
        blocks (`int`): decoder blocks.
        temperature (`float`): logits are divided by it.
    """

    sigma: float
    groups: int
    blocks: int
    temperature: float = 1.0

    def log_odds(self, logits: Tensor, kind: str, block: int, keys: Tensor) -> Tensor:
        """The log-odds that actions are drawn with: the offset is part of the state, so it is in the policy, too.

        Args:
            logits (`torch.FloatTensor` of shape `(rows, slots)`): the gate's.
            kind (`str`): kind of the gate.
            block (`int`): its block.
            keys (`torch.LongTensor` of shape `(rows,)`): number of each row's rollout, see [`rollout_keys`].
        """
        if self.sigma:
            group = block * self.groups // self.blocks
            uniform = _uniform(hashed(keys, _OFFSET + KINDS.index(kind), group))
            normal = math.sqrt(2) * torch.erfinv(2 * uniform - 1)
            logits = logits + (self.sigma * normal)[:, None].to(logits)
        return logits / self.temperature


def rollout_keys(seed: int, generation: int, rollouts: Tensor, side: int) -> Tensor:
    """A number for each rollout that its draws follow from.

    Args:
        seed (`int`): seed of the run.
        generation (`int`): number of the generation batch.
        rollouts (`torch.LongTensor` of shape `(items,)`): numbers of the rollouts over all processes.
        side (`int`): 0 for queries, 1 for positives.
    """
    return hashed(torch.tensor(seed), generation, side, rollouts)


def log_probability(log_odds: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of Bernoulli actions, and the entropy of the choice, in nats.

    Args:
        log_odds (`torch.FloatTensor`): log-odds of saving.
        actions (`torch.BoolTensor` of the same shape): whether it saved.
    """
    spend, save = F.logsigmoid(-log_odds), F.logsigmoid(log_odds)
    probability = log_odds.sigmoid()
    return torch.where(actions, save, spend), -(probability * save + (1 - probability) * spend)


@dataclass
class GateCall:
    """One gate that was asked, for the rows that reached it.

    Args:
        kind (`str`), block (`int`): which gate.
        segment (`torch.LongTensor` of shape `(rows,)`): packed item of each row.
        place (`torch.LongTensor` of shape `(rows,)`): place of each row's first slot in its item's completion.
        actions (`torch.BoolTensor` of shape `(rows, slots)`): whether it saved.
        log_probs, entropies (`torch.FloatTensor` of shape `(rows, slots)`): of the actions.
        inputs (`tuple[torch.Tensor, ...]`, *optional*): what the gate's logits are computed from, `(rows, ...)` each.
    """

    kind: str
    block: int
    segment: Tensor
    place: Tensor
    actions: Tensor
    log_probs: Tensor
    entropies: Tensor
    inputs: tuple[Tensor, ...] | None = None

    @property
    def places(self) -> Tensor:
        """`torch.LongTensor` of shape `(rows, slots)`."""
        return self.place[:, None] + torch.arange(self.actions.shape[1], device=self.place.device)


class ActionPolicy:
    """What decides at the gates of a packed batch, and keeps account of it; a `gate_policy` of [`MoEMBModel`].

    Asked twice for one gate, as gradient checkpointing does, it answers and computes the same and keeps the first.

    Args:
        keys (`torch.LongTensor` of shape `(items,)`): of the packed items after replication, see [`rollout_keys`].
        exploration (`Exploration`): how actions are drawn.
        begin (`torch.LongTensor` of shape `(items,)`, *optional*): where each item's actions begin in its row.
    """

    def __init__(self, keys: Tensor, exploration: Exploration, begin: Tensor | None = None):
        self.keys, self.exploration = keys, exploration
        self.begin = torch.zeros_like(keys) if begin is None else begin
        self.next_place = self.begin.clone()
        self.calls: dict[tuple[str, int], GateCall] = {}

    def __call__(self, query) -> Tensor:
        """Actions (`torch.BoolTensor` of the shape of `query.logits`) for a `GateQuery`."""
        gate, segment = (query.kind, query.block), query.segment
        logits = query.logits if query.logits.dim() == 2 else query.logits[:, None]
        seen = self.calls.get(gate)
        place = self._places(segment, logits.shape[1]) if seen is None else seen.place
        log_odds = self.exploration.log_odds(logits.float(), *gate, self.keys[segment])
        actions = self.decide(query, log_odds.detach(), place)
        log_probs, entropies = log_probability(log_odds, actions)
        if seen is None:
            inputs = tuple(tensor.detach() for tensor in query.inputs) if self.stores_inputs else None
            self.calls[gate] = GateCall(*gate, segment, place, actions, log_probs, entropies, inputs)
        return actions.view(query.logits.shape)

    stores_inputs = False

    def decide(self, query, log_odds: Tensor, place: Tensor) -> Tensor:
        """Actions (`torch.BoolTensor` of the shape of `log_odds`) of rows whose first slot stands at `place`."""
        raise NotImplementedError

    @property
    def lengths(self) -> Tensor:
        """Gates that each item reached, `torch.LongTensor` of shape `(items,)`."""
        return self.next_place - self.begin

    def write(self, name: str, matrix: Tensor, row_of: Tensor, begin: Tensor) -> Tensor:
        """Writes `actions`, `log_probs` or `entropies` of all calls into the rows of completions; differentiable.

        Args:
            name (`str`): which.
            matrix (`torch.Tensor` of shape `(rollouts, width)`): the rows.
            row_of (`torch.LongTensor` of shape `(items,)`): row of each packed item, -1: leave it out.
            begin (`torch.LongTensor` of shape `(items,)`): added to the places of its actions.

        Returns:
            `torch.Tensor` of shape `(rollouts, width)`: a new matrix.
        """
        rows, columns, values = [], [], []
        for call in self.calls.values():
            row = row_of[call.segment][:, None].expand_as(call.actions)
            chosen = row >= 0
            rows.append(row[chosen])
            columns.append((call.places + begin[call.segment][:, None])[chosen])
            values.append(getattr(call, name)[chosen].to(matrix.dtype))
        if not rows:
            return matrix.clone()
        return matrix.index_put((torch.cat(rows), torch.cat(columns)), torch.cat(values))

    def _places(self, segment: Tensor, slots: int) -> Tensor:
        """Place of each row's first slot; the rows of an item stand together, in packed order."""
        rows = torch.zeros_like(self.next_place).index_add(0, segment, torch.ones_like(segment))
        first = rows.cumsum(0) - rows
        rank = torch.arange(len(segment), device=segment.device) - first[segment]
        place = self.next_place[segment] + rank * slots
        self.next_place = self.next_place + rows * slots
        return place


class ActionSampler(ActionPolicy):
    """Draws actions.

    Args:
        keys, exploration: see [`ActionPolicy`].
        roles (`torch.LongTensor` of shape `(items,)`): what each packed item is run for: `SAMPLED`, `FULL` (nothing
            is saved) or `GREEDY` (what is more likely than not, without exploration).
        starts (`torch.LongTensor` of shape `(items,)`): first flat index of each item in the batch.
        size (`int`): entries of the batch before replication.
        store_inputs (`bool`): whether to keep what the gates' logits are computed from.
    """

    def __init__(self, keys, exploration, roles: Tensor, starts: Tensor, size: int, store_inputs: bool = False):
        super().__init__(keys, exploration)
        self.roles, self.starts, self.size = roles, starts, size
        self.stores_inputs = store_inputs

    def decide(self, query, log_odds: Tensor, place: Tensor) -> Tensor:
        segment, slots = query.segment, log_odds.shape[1]
        token = query.source % self.size - self.starts[segment]
        gate = KINDS.index(query.kind) * 4096 + query.block
        slot = torch.arange(slots, device=segment.device)
        drawn = _uniform(hashed(self.keys[segment][:, None], gate, token[:, None], slot)) < log_odds.double().sigmoid()
        role = self.roles[segment][:, None]
        greedy = (query.logits > 0).view(log_odds.shape)
        if query.kind == "keep":  # as deployed: of an item's tokens at least the best one stays
            rank, _ = rank_in_groups(-query.logits.detach(), segment)
            greedy &= rank[:, None] > 0
        return torch.where(role == SAMPLED, drawn, (role == GREEDY) & greedy)


class ActionReplay(ActionPolicy):
    """Repeats given actions.

    Args:
        keys, exploration, begin: see [`ActionPolicy`].
        completions (`torch.LongTensor` of shape `(items, width)`): actions of each item, in the row of its rollout.
    """

    def __init__(self, keys, exploration, completions: Tensor, begin: Tensor | None = None):
        super().__init__(keys, exploration, begin)
        self.completions = F.pad(completions, (0, 1))  # a place to read from, should there be more gates than actions

    def decide(self, query, log_odds: Tensor, place: Tensor) -> Tensor:
        places = place[:, None] + torch.arange(log_odds.shape[1], device=place.device)
        last = self.completions.shape[1] - 1
        return self.completions[query.segment[:, None], places.clamp_max(last)] == 1


@dataclass
class StoredGates:
    """What the gates of many rollouts saw: their log-probabilities without the backbone.

    Args:
        calls (`list[tuple]`): kind, block, rollout of each row `(rows,)`, place of its first slot `(rows,)`, key
            `(rows,)` and the gate's inputs, `(rows, ...)` each.
    """

    calls: list[StoredCall] = field(default_factory=list)

    def add(self, policy: ActionPolicy, rollout_of: Tensor, begin: Tensor) -> None:
        """Keep what a policy saw.

        Args:
            policy (`ActionPolicy`): with `stores_inputs`.
            rollout_of (`torch.LongTensor` of shape `(items,)`): number of each packed item's rollout, -1: leave out.
            begin (`torch.LongTensor` of shape `(items,)`): where the policy's actions begin in the rollout's row.
        """
        for call in policy.calls.values():
            rollout = rollout_of[call.segment]
            rows = (rollout >= 0).nonzero().squeeze(1)
            segment = call.segment[rows]
            place = call.place[rows] + begin[segment]
            inputs = tuple(tensor[rows.to(tensor.device)] for tensor in call.inputs)
            self.calls.append((call.kind, call.block, rollout[rows], place, policy.keys[segment], inputs))

    def select(self, rollouts: Tensor, total: int) -> list[StoredCall]:
        """The calls for some rollouts alone, their number replaced by the place in `rollouts`.

        Args:
            rollouts (`torch.LongTensor` of shape `(n,)`): their numbers.
            total (`int`): rollouts there are.
        """
        row_of = torch.full((total,), -1, device=rollouts.device)
        row_of[rollouts] = torch.arange(len(rollouts), device=rollouts.device)
        chosen = []
        for kind, block, rollout, place, keys, inputs in self.calls:
            rows = (row_of[rollout] >= 0).nonzero().squeeze(1)
            if len(rows):
                held = tuple(tensor[rows.to(tensor.device)] for tensor in inputs)
                chosen.append((kind, block, row_of[rollout[rows]], place[rows], keys[rows], held))
        return chosen


def replayed_from_logits(
    calls: Sequence[StoredCall], logits: Sequence[Tensor], completions: Tensor, exploration: Exploration
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of completions from the logits of stored gates.

    Args:
        calls (`Sequence[tuple]`): of [`StoredGates.select`].
        logits (`Sequence[torch.FloatTensor]`): of each call, `(rows,)` or `(rows, slots)`.
        completions (`torch.LongTensor` of shape `(rollouts, width)`): the actions.
        exploration (`Exploration`): how they were drawn.

    Returns:
        Two `torch.FloatTensor` of shape `(rollouts, width)`, 0 where there is no action.
    """
    matrices = [torch.zeros(completions.shape, device=completions.device) for _ in range(2)]
    rows, columns, values = [], [], ([], [])
    for (kind, block, row, place, keys, _), each in zip(calls, logits, strict=True):
        each = (each if each.dim() == 2 else each[:, None]).to(completions.device)
        column = place[:, None] + torch.arange(each.shape[1], device=place.device)
        row = row[:, None].expand_as(column)
        log_odds = exploration.log_odds(each.float(), kind, block, keys)
        for held, value in zip(values, log_probability(log_odds, completions[row, column] == 1), strict=True):
            held.append(value.flatten())
        rows.append(row.flatten())
        columns.append(column.flatten())
    if not rows:
        return matrices[0], matrices[1]
    index = (torch.cat(rows), torch.cat(columns))
    return tuple(matrix.index_put(index, torch.cat(held)) for matrix, held in zip(matrices, values, strict=True))


def _uniform(numbers: Tensor) -> Tensor:
    """Random 64-bit numbers as fp64 in (0, 1)."""
    return ((numbers >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53


__all__ = [
    "FULL",
    "GREEDY",
    "SAMPLED",
    "ActionPolicy",
    "ActionReplay",
    "ActionSampler",
    "Exploration",
    "GateCall",
    "StoredGates",
    "log_probability",
    "replayed_from_logits",
    "rollout_keys",
]
