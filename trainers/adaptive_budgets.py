"""Budgets of gates that are trained by gradients: their losses, how the gates are deployed, and the shift to a budget.

What a later action may save is counted over what the earlier ones left: skipping over the tokens that are alive, null
experts over tokens that are not skipped. Otherwise two actions would claim the same savings.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from modeling_moemb.compute_moemb import count_flops

from .adaptive_config import AdaptiveConfig
from .adaptive_data import AdaptiveBatch
from .adaptive_flops import FlopsEstimate, estimate_of
from .adaptive_objectives import (
    binarity,
    budget_loss,
    depth_prior_loss,
    mean_by_item,
    null_balance_loss,
    ponder_loss,
)
from .adaptive_policy import Account, Estimators, GateEvent, TrainingPolicy


def deployed_budget(args: AdaptiveConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """The `adaptive_compute` in which the trained gates decide by themselves."""
    budget: dict[str, Any] = {}
    if "keep" in kinds:
        pruning = {"layer": args.gates["keep"]["layer"], "score": "gate"}
        if args.keep_deployment == "fraction":
            budget["token_pruning"] = {**pruning, "keep": args.targets["keep"]}
        else:
            budget["token_pruning"] = {**pruning, "threshold": 0.5}
    if "gradual" in kinds:
        halting = args.gradual_estimator == "halting"
        budget["gradual_pruning"] = {"halting": args.halting_epsilon} if halting else {"threshold": 0.5}
    if "skip" in kinds:
        budget["expert_skip"] = {"threshold": 0.5}
        if not args.straight_through_share:  # never decided hard: what is kept goes on being faded
            budget["expert_skip"] |= {"scale_kept": True, "temperature": args.temperature_end}
    if "null" in kinds:
        budget["null_experts"] = {}
    return budget


def estimators_of(args: AdaptiveConfig) -> Estimators:
    """How decisions become differentiable, as a recipe says."""
    fraction = None
    if args.keep_deployment == "fraction" and "keep" in args.targets:
        fraction = Fraction(args.targets["keep"]).limit_denominator(10**6)
    return Estimators(
        keep=args.keep_estimator,
        compact=args.compact,
        gradual=args.gradual_estimator,
        epsilon=args.halting_epsilon,
        null=args.null_estimator,
        temperature=(args.temperature_start, args.temperature_end),
        straight_through_share=args.straight_through_share,
        keep_fraction=fraction,
    )


def budget_terms(
    args: AdaptiveConfig, model: Any, policy: TrainingPolicy, account: Account, estimate: FlopsEstimate, output: Any
) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """
    The losses that stand for budgets, and what every gate kept.

    Args:
        args ([`AdaptiveConfig`]): settings.
        model (`MoEMBModel`): the model.
        policy ([`TrainingPolicy`]): after the pass.
        account ([`Account`]): of the pass.
        estimate ([`FlopsEstimate`]): of the batch.
        output (`MoEMBOutput`): of the pass; holds router logits where AdaMoE's balance needs them.

    Returns:
        Weighted losses by name, and of each gate that was asked its `kept` share in training's form and `hard`, the
        one of its own decisions.
    """
    shares = {kind: _shares(kind, policy, account, estimate) for kind in dict.fromkeys(k for k, _ in policy.events)}
    kept = {kind: {name: float(v.detach().mean()) for name, v in both.items()} for kind, both in shares.items()}
    losses: dict[str, Tensor] = {}
    trained = policy.phase.trained
    if args.strategy == "global":
        removed = estimate.removed(account.mass, account.kept, account.gate_macs, args.flops_scope)
        losses["flops"] = args.budget_weight * (removed - args.flops_removed).square().float()
    for kind in trained:
        if kind in args.targets and kind in shares:
            losses[f"{kind}_budget"] = args.budget_weight * budget_loss(shares[kind]["kept"], args.targets[kind])
    if "skip" in trained and "skip" in shares and args.binarity_weight:
        ramp = min(max(2 * policy.phase.progress - 1, 0.0), 1.0)
        events = _events(policy, "skip")
        weight = torch.cat([account.mass[event.block][event.source] for event in events]).detach()
        spread = binarity(torch.cat([event.saving for event in events]), weight)
        losses["binarity"] = args.binarity_weight * ramp * spread
    if "gradual" in trained and args.gradual_estimator == "halting" and (seen := policy.halting()) is not None:
        scores, depth, remainder = seen
        centre = args.depth_prior or scores.shape[1] * 2 / 3
        losses["ponder"] = args.ponder_weight * ponder_loss(depth, remainder)
        losses["depth_prior"] = args.depth_prior_weight * depth_prior_loss(scores, centre)
    if "null" in trained and args.null_estimator == "balance":
        losses["null_balance"] = args.null_balance_weight * _null_balance(model, policy, output)
    return losses, kept


def _events(policy: TrainingPolicy, kind: str) -> list[GateEvent]:
    return [event for event in policy.events.values() if event.kind == kind]


def _shares(kind: str, policy: TrainingPolicy, account: Account, estimate: FlopsEstimate) -> dict[str, Tensor]:
    """What a gate kept: by item for the one-shot gate, over the batch for the others."""
    events, items = _events(policy, kind), len(estimate.last)
    if kind == "keep":
        (event,) = events
        item = estimate.item[event.source]
        return {"kept": mean_by_item(event.kept, item, items), "hard": mean_by_item(event.hard.float(), item, items)}
    if kind == "gradual":
        visual = min(events, key=lambda event: event.block).source
        blocks = range(min(event.block for event in events), len(account.mass))
        soft = torch.stack([account.mass[block][visual] for block in blocks])
        return {"kept": mean_by_item(soft.mean(0), estimate.item[visual], items), "hard": _hard_mass(events, soft)}
    total, hard, count = 0.0, 0.0, 0.0
    for event in events:
        weight = account.mass[event.block][event.source].detach()
        if kind == "null" and (skip := policy.events.get(("skip", event.block))) is not None:
            left = torch.ones(policy.tokens, device=weight.device).index_copy(0, skip.source, skip.kept.detach())
            weight = weight * left[event.source]
        kept = 1 - event.saving if kind == "skip" and event.trained else event.kept
        kept, decided = (t if t.dim() == 1 else t.mean(-1) for t in (kept, event.hard.float()))
        total, hard, count = total + (weight * kept).sum(), hard + (weight * decided).sum(), count + weight.sum()
    return {"kept": total / count.clamp_min(1e-6), "hard": hard / count.clamp_min(1e-6)}


def _hard_mass(events: list[GateEvent], soft: Tensor) -> Tensor:
    """The same share as the gates decide by themselves; what they dropped is counted in no later block."""
    size = int(max(event.source.max() for event in events)) + 1
    alive, total = torch.zeros(size, device=soft.device), []
    first = min(events, key=lambda event: event.block)
    alive[first.source] = 1
    by_block = {event.block: event for event in events}
    for block in range(first.block, first.block + len(soft)):
        if block in by_block:
            event = by_block[block]
            alive = alive.index_copy(0, event.source, alive[event.source] * event.hard.float())
        total.append(alive[first.source].mean())
    return torch.stack(total).mean()


def _null_balance(model: Any, policy: TrainingPolicy, output: Any) -> Tensor:
    losses, top_k = [], model.config.text_config.num_experts_per_tok
    for event in _events(policy, "null"):
        logits = output.router_logits[event.block]
        if len(logits) <= int(event.query.rows.max()):  # the last block has logits of the pooled tokens alone
            continue
        nulls = model.gates.null.null_logits(event.block, event.query.inputs[0])
        losses.append(null_balance_loss(logits[event.query.rows], nulls, top_k))
    return torch.stack(losses).mean()


@torch.no_grad()
def shift_to_flops(
    model: Any,
    args: AdaptiveConfig,
    budget: dict[str, Any],
    kinds: Sequence[str],
    batches: Sequence[AdaptiveBatch],
    tolerance: float = 0.002,
    steps: int = 20,
) -> dict[str, Any]:
    """
    Shifts the log-odds of all gates by one number, so that `args.flops_removed` is met on some batches; bisection.

    What the gates have learned, which tokens to save on first, stays; runs of different strategies become comparable.

    Returns:
        `dict`: `shift`, and the `measured_flops_removed` with it.
    """
    want, scope = args.flops_removed, args.flops_scope
    training, applied = model.training, 0.0
    model.eval()

    def removed() -> float:
        done = full = 0.0
        for batch in batches:
            run = model(**batch.inputs, adaptive_compute=budget, pooled_only=True, output_compute=True)
            done += getattr(count_flops(model.config, run.compute), scope)
            full += estimate_of(model.config, batch.inputs).full(scope)
        return 1 - done / full

    found, low, high = removed(), -20.0, 20.0
    for _ in range(steps):
        if abs(found - want) <= tolerance:
            break
        low, high = (applied, high) if found < want else (low, applied)
        step = (low + high) / 2 - applied
        _shift(model, kinds, step)
        applied += step
        found = removed()
    model.train(training)
    return {"shift": round(applied, 4), "measured_flops_removed": round(found, 4)}


def _shift(model: Any, kinds: Sequence[str], by: float) -> None:
    for kind in kinds:
        gate = getattr(model.gates, kind)
        if kind == "keep":
            gate.head.bias[1] += by
        else:
            gate.bias += by
