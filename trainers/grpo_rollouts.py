"""Rollouts of the gates: hard, by re-packing, and all those of a pair in one packed batch.

The vision tower and every decoder block before the first gate run once for each item; from there on its rollouts go
their own ways, and one more copy on which nothing is saved gives the vector of full compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling_moemb.compute_moemb import ComputeRecord, count_flops

from .grpo_actions import (
    FULL,
    GREEDY,
    SAMPLED,
    ActionPolicy,
    ActionReplay,
    ActionSampler,
    Exploration,
    StoredGates,
    rollout_keys,
)
from .grpo_items import SIDES, EncodedItem, join_items


@dataclass
class RolloutBatch:
    """The rollouts of some pairs of items, in the order in which the sampler delivered them.

    Args:
        pairs (`list[tuple[EncodedItem, EncodedItem]]`): query and target of each pair.
        pair (`torch.LongTensor` of shape `(rollouts,)`): pair of each rollout.
        numbers (`torch.LongTensor` of shape `(rollouts,)`): their numbers over all processes.
        generation (`int`): number of the generation batch, which the draws follow from.
        lengths (`torch.LongTensor` of shape `(rollouts, sides)`): gates that were reached.
        completions (`torch.LongTensor` of shape `(rollouts, width)`): the actions.
        log_probs (`torch.FloatTensor` of shape `(rollouts, width)`): of the actions when they were drawn.
        vectors (`torch.FloatTensor` of shape `(rollouts, sides, hidden)`): gated, of unit length.
        full, greedy (`torch.FloatTensor` of shape `(pairs, sides, hidden)`): of full compute, and of greedy actions
            (if asked for).
        flops (`torch.DoubleTensor` of shape `(rollouts, sides)`): in the scope that was asked for.
        full_flops, greedy_flops (`torch.DoubleTensor` of shape `(pairs, sides)`): the same.
        asked, saved (`dict[str, torch.LongTensor]`): by kind of gate, how many gates each rollout reached, and where
            it saved, `(rollouts,)`.
        stored (`list[StoredGates]`): what the gates saw, if that was asked for.
    """

    pairs: list[tuple[EncodedItem, EncodedItem]]
    pair: Tensor
    numbers: Tensor
    generation: int
    lengths: Tensor
    vectors: Tensor
    full: Tensor
    greedy: Tensor | None
    flops: Tensor
    full_flops: Tensor
    greedy_flops: Tensor | None
    completions: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    log_probs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    asked: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    stored: StoredGates | None = None

    def describe(self, rollout: int) -> str:
        """What a rollout did, in a line."""
        parts = [
            f"{kind} {int(self.saved[kind][rollout])}/{int(count[rollout])}"
            for kind, count in self.asked.items()
            if int(count[rollout])
        ]
        return f"{', '.join(parts) or 'no gate reached'}; FLOPs removed {100 * float(self.removed[rollout]):.1f} %"

    @property
    def removed(self) -> Tensor:
        """FLOPs removed from the pair by each rollout, `torch.FloatTensor` of shape `(rollouts,)`."""
        return (1 - self.flops.sum(1) / self.full_flops.sum(1)[self.pair]).float()


@dataclass(frozen=True)
class RolloutSettings:
    """How rollouts are run.

    Args:
        budget (`dict`): the compute budget that switches the gates on.
        exploration (`Exploration`): how actions are drawn.
        seed (`int`): seed of the run.
        scope (`str`): FLOPs that count: `"total"`, `"decoder"` or `"moe"`.
        items_per_batch (`int`): copies of items in one packed batch at most; never less than those of one pair.
        acting (`tuple[int, ...]`): sides whose gates act, 0 for queries and 1 for targets; the others are embedded
            with full compute.
        store_inputs (`bool`): whether to keep what the gates see, so that the replay needs no backbone.
        greedy (`bool`): whether to run a greedy copy of each item, too.
    """

    budget: Mapping[str, Any]
    exploration: Exploration
    seed: int
    scope: str = "total"
    items_per_batch: int = 256
    acting: tuple[int, ...] = (0, 1)
    store_inputs: bool = False
    greedy: bool = False


@torch.no_grad()
def run_rollouts(
    model,
    pairs: Sequence[tuple[EncodedItem, EncodedItem]],
    counts: Sequence[int],
    numbers: Tensor,
    generation: int,
    settings: RolloutSettings,
) -> RolloutBatch:
    """Sample and run rollouts.

    Args:
        model (`MoEMBModel`): with gates.
        pairs (`Sequence[tuple[EncodedItem, EncodedItem]]`): query and target of each pair.
        counts (`Sequence[int]`): rollouts of each pair.
        numbers (`torch.LongTensor` of shape `(rollouts,)`): numbers of the rollouts over all processes, pair by pair.
        generation (`int`): number of the generation batch.
        settings (`RolloutSettings`): how.
    """
    device, sides = numbers.device, len(pairs[0])
    pair = torch.arange(len(pairs), device=device).repeat_interleave(torch.tensor(counts, device=device))
    hidden = model.config.text_config.hidden_size

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    each = (len(pairs), sides, hidden)
    batch = RolloutBatch(
        list(pairs),
        pair,
        numbers,
        generation,
        lengths=zeros(len(pair), sides, dtype=torch.long),
        vectors=zeros(len(pair), sides, hidden),
        full=zeros(*each),
        greedy=zeros(*each) if settings.greedy else None,
        flops=zeros(len(pair), sides, dtype=torch.float64),
        full_flops=zeros(len(pairs), sides, dtype=torch.float64),
        greedy_flops=zeros(len(pairs), sides, dtype=torch.float64) if settings.greedy else None,
        stored=StoredGates() if settings.store_inputs else None,
    )
    policies = [_run_chunk(model, batch, chunk, settings) for chunk in _chunks(counts, settings)]
    for side in set(range(sides)) - set(settings.acting):
        batch.vectors[:, side], batch.flops[:, side] = batch.full[pair, side], batch.full_flops[pair, side]
        if settings.greedy:
            batch.greedy[:, side], batch.greedy_flops[:, side] = batch.full[:, side], batch.full_flops[:, side]
    _finish(batch, policies)
    return batch


def _chunks(counts: Sequence[int], settings: RolloutSettings) -> list[range]:
    """Whole pairs per packed batch."""
    chunks, first, held = [], 0, 0
    for number, count in enumerate(counts):
        more = len(SIDES) + len(settings.acting) * (count + settings.greedy)
        if number > first and held + more > settings.items_per_batch:
            chunks.append(range(first, number))
            first, held = number, 0
        held += more
    return [*chunks, range(first, len(counts))]


@dataclass(frozen=True)
class _Segments:
    """What each packed item after replication is: items side by side (queries, then targets), copies item by item."""

    counts: list[int]
    side: Tensor
    pair: Tensor
    row: Tensor
    roles: Tensor


def _segments(batch: RolloutBatch, chunk: range, settings: RolloutSettings) -> _Segments:
    device = batch.pair.device
    side, pair, row, roles, counts = [], [], [], [], []
    for number in range(len(batch.pairs[0])):
        for each in chunk:
            acts = number in settings.acting
            rows = (batch.pair == each).nonzero().squeeze(1).tolist() if acts else []
            own = [SAMPLED] * len(rows) + [FULL] + [GREEDY] * (acts and settings.greedy)
            counts.append(len(own))
            side += [number] * len(own)
            pair += [each] * len(own)
            row += rows + [-1] * (len(own) - len(rows))
            roles += own
    return _Segments(counts, *(torch.tensor(values, device=device) for values in (side, pair, row, roles)))


def _run_chunk(model, batch: RolloutBatch, chunk: range, settings: RolloutSettings) -> tuple[ActionSampler, _Segments]:
    device = batch.pair.device
    segments = _segments(batch, chunk, settings)
    items = [batch.pairs[each][side] for side in range(len(batch.pairs[0])) for each in chunk]
    inputs = join_items(items, device)
    counts = torch.tensor(segments.counts, device=device)
    starts = inputs["cu_seq_lens_q"][:-1].long().repeat_interleave(counts)
    numbers = torch.where(segments.row >= 0, batch.numbers[segments.row.clamp_min(0)], -1)
    keys = rollout_keys(settings.seed, batch.generation, numbers, segments.side)
    size = inputs["input_ids"].numel()
    policy = ActionSampler(keys, settings.exploration, segments.roles, starts, size, settings.store_inputs)
    output = model(
        **inputs,
        adaptive_compute=dict(settings.budget),
        gate_policy=policy,
        rollouts=copies(segments.counts),
        pooled_only=True,
        output_compute=True,
    )
    vectors = F.normalize(output.pooler_output.float(), dim=-1)
    flops = item_flops(model, output.compute, segments.counts, items, policy, settings.scope).to(device)
    full_flops = item_flops(model, output.compute, segments.counts, items, None, settings.scope).to(device)
    for role, vector, amount, place in (
        (SAMPLED, batch.vectors, batch.flops, segments.row),
        (FULL, batch.full, batch.full_flops, segments.pair),
        (GREEDY, batch.greedy, batch.greedy_flops, segments.pair),
    ):
        chosen = (segments.roles == role).nonzero().squeeze(1)
        if len(chosen):
            vector[place[chosen], segments.side[chosen]] = vectors[chosen]
            counted = full_flops if role == FULL else flops
            amount[place[chosen], segments.side[chosen]] = counted[chosen]
    sampled = (segments.row >= 0).nonzero().squeeze(1)
    batch.lengths[segments.row[sampled], segments.side[sampled]] = policy.lengths[sampled]
    return policy, segments


def _finish(batch: RolloutBatch, policies: Sequence[tuple[ActionSampler, _Segments]]) -> None:
    """Completions, their log-probabilities and counts, now that all lengths are known."""
    rollouts, width = len(batch.pair), int(batch.lengths.sum(1).max())
    device = batch.pair.device
    batch.completions = torch.zeros(rollouts, width, dtype=torch.long, device=device)
    batch.log_probs = torch.zeros(rollouts, width, device=device)
    before = batch.lengths.cumsum(1) - batch.lengths
    for policy, segments in policies:
        begin = before[segments.row.clamp_min(0), segments.side]
        batch.completions = policy.write("actions", batch.completions, segments.row, begin)
        batch.log_probs = policy.write("log_probs", batch.log_probs, segments.row, begin)
        if batch.stored is not None:
            batch.stored.add(policy, segments.row, begin)
        for (kind, _), call in policy.calls.items():
            row = segments.row[call.segment]
            sampled = row >= 0
            for counts, values in (
                (batch.asked, torch.ones_like(call.actions)),
                (batch.saved, call.actions),
            ):
                held = counts.setdefault(kind, torch.zeros(rollouts, dtype=torch.long, device=device))
                held.index_add_(0, row[sampled], values[sampled].sum(1))


def replay_rollouts(
    model, batch: RolloutBatch, rollouts: Tensor, completions: Tensor, settings: RolloutSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Run rollouts again with the actions they took; differentiable, in one forward pass.

    Args:
        model (`MoEMBModel`, possibly wrapped): the policy.
        batch (`RolloutBatch`): where they come from.
        rollouts (`torch.LongTensor` of shape `(n,)`): which.
        completions (`torch.LongTensor` of shape `(n, width)`): their actions.
        settings (`RolloutSettings`): how they were run.

    Returns:
        Log-probabilities and entropies, `torch.FloatTensor` of shape `(n, width)`, 0 where there is no action, and
        the vectors of the sides that act, `torch.FloatTensor` of shape `(n, acting, hidden)`, of unit length.
    """
    device, acting = rollouts.device, settings.acting
    order = batch.pair[rollouts].argsort(stable=True)
    numbers, counts = batch.pair[rollouts[order]].unique_consecutive(return_counts=True)
    items = [batch.pairs[each][side] for side in acting for each in numbers.tolist()]
    row = order.repeat(len(acting))
    side = torch.tensor(acting, device=device).repeat_interleave(len(order))
    begin = (batch.lengths.cumsum(1) - batch.lengths)[rollouts[row], side]
    keys = rollout_keys(settings.seed, batch.generation, batch.numbers[rollouts[row]], side)
    policy = ActionReplay(keys, settings.exploration, completions[row], begin)

    def with_log_probs(module, given, output):
        # DDP looks for the parameters of a pass in its outputs; hard actions leave no trace of the gates in vectors
        output.gate_logits = [call.log_probs for call in policy.calls.values()]
        return output

    inner = getattr(model, "module", model)
    hook = inner.register_forward_hook(with_log_probs)
    try:
        output = model(
            **join_items(items, device),
            adaptive_compute=dict(settings.budget),
            gate_policy=policy,
            rollouts=copies(counts.tolist() * len(acting)),
            pooled_only=True,
        )
    finally:
        hook.remove()
    _check_replayed(policy, batch.lengths[rollouts[row], side])
    vectors = F.normalize(output.pooler_output.float(), dim=-1)
    unordered = torch.empty_like(order)
    unordered[order] = torch.arange(len(order), device=device)
    vectors = vectors.unflatten(0, (len(acting), len(order)))[:, unordered].transpose(0, 1)
    empty = torch.zeros(completions.shape, device=device)
    nowhere = torch.zeros_like(begin)
    log_probs, entropies = (policy.write(name, empty, row, nowhere) for name in ("log_probs", "entropies"))
    return log_probs, entropies, vectors


def _check_replayed(policy: ActionPolicy, lengths: Tensor) -> None:
    """A rollout that is repeated reaches the same gates; another number means other actions or another input."""
    if not torch.equal(policy.lengths, lengths):
        item = int((policy.lengths != lengths).nonzero()[0])
        raise RuntimeError(
            f"a replayed rollout reached {int(policy.lengths[item])} gates, but {int(lengths[item])} when it was "
            "sampled: the gates' budget or the actions changed in between"
        )


def copies(counts: Sequence[int]) -> int | list[int]:
    """`rollouts` of the model: one number, where it is the same for all items."""
    return counts[0] if len(set(counts)) == 1 else list(counts)


def item_flops(
    model,
    record: ComputeRecord,
    counts: Sequence[int],
    items: Sequence[EncodedItem],
    policy: ActionPolicy | None,
    scope: str,
) -> Tensor:
    """FLOPs of each copy of each item as if it had run alone, blocks that were shared included.

    Args:
        model (`MoEMBModel`): the model.
        record (`ComputeRecord`): what was executed.
        counts (`Sequence[int]`): copies of each item.
        items (`Sequence[EncodedItem]`): the items.
        policy (`ActionPolicy`, *optional*): to count the gates by, too.
        scope (`str`): `"total"`, `"decoder"` or `"moe"`.

    Returns:
        `torch.DoubleTensor` of shape `(copies,)`.
    """
    item_of = [item for item, count in enumerate(counts) for _ in range(count)]
    pairs = torch.cat(record.item_pairs).split([len(lengths) for lengths in record.lengths])
    pairs = [each.tolist() for each in pairs]
    macs = [0] * len(item_of)
    for (kind, _), call in ({} if policy is None else policy.calls).items():
        rows = torch.bincount(call.segment, minlength=len(item_of)).tolist()
        each = getattr(model.gates, kind).macs
        macs = [held + each * count for held, count in zip(macs, rows, strict=True)]
    flops = []
    for copy, item in enumerate(item_of):
        # blocks before the first gate ran once for all copies of an item
        seen = [copy if len(lengths) == len(item_of) else item for lengths in record.lengths]
        alone = ComputeRecord(
            lengths=[[lengths[place]] for lengths, place in zip(record.lengths, seen, strict=True)],
            tokens=torch.zeros(0, 3, dtype=torch.long),
            expert_pairs=torch.tensor([[each[place], 0, 0] for each, place in zip(pairs, seen, strict=True)]),
            grids=items[item].grids,
            pooled_only=record.pooled_only,
            gate_macs=macs[copy],
        )
        flops.append(getattr(count_flops(model.config, alone), scope))
    return torch.tensor(flops, dtype=torch.float64)
