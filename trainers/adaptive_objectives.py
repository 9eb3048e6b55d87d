"""Objectives of training gates, as plain functions of tensors (all in float32).

A *kept share* is a mean over what may be saved of how much of it is kept: of visual tokens (one-shot), of visual
tokens and blocks (gradual), of tokens and blocks (experts). Budgets are squared distances to a target. Formulas are
those of MoEMB's section 4 where it prints them; A-ViT's are of arXiv 2112.07658, AdaMoE's of arXiv 2406.13233.
"""

import math

import torch
from torch import Tensor


def distillation_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean of 1 - cosine between vectors `[items, d]` and those of full compute, which get no gradient."""
    return (1 - torch.cosine_similarity(student.float(), teacher.detach().float(), dim=-1)).mean()


def budget_loss(share: Tensor, target: float) -> Tensor:
    """Mean squared distance of shares (`[items]` or a scalar) to a target.

    Per item where there are items: with the mean of a batch alone some items may lose everything.
    """
    return (share.float() - target).square().mean() if share.numel() else share.sum()


def mean_by_item(values: Tensor, item: Tensor, items: int) -> Tensor:
    """Means of `values` `[rows]` by `item` (int64 `[rows]`), of the items that have rows, `[at most items]`."""
    total = values.new_zeros(items).index_add(0, item, values)
    count = values.new_zeros(items).index_add(0, item, torch.ones_like(values))
    return total[count > 0] / count[count > 0]


def binarity(probability: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean of `p (1 - p)`: 0 when every decision is certain, 1/4 when all are coin flips.

    A mean budget alone is met by `p` equal to the target everywhere, of which a threshold makes all or nothing.
    """
    spread = probability * (1 - probability)
    if weight is None:
        return spread.mean()
    return (spread * weight).sum() / weight.sum().clamp_min(1e-6)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of `hard` (bool or float) with the gradient of `soft`."""
    return hard.to(soft.dtype) + soft - soft.detach()


def gumbel_keep(logits: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Relaxed decision to keep, in (0, 1): a two-way Gumbel-softmax.

    The difference of two Gumbel variables is logistic, so one uniform number per decision is enough.

    Args:
        logits (`torch.Tensor`): log-odds of *saving*.
        temperature (`float`): of the relaxation.
        uniform (`torch.Tensor` of the same shape): numbers in (0, 1).
    """
    noise = torch.log(uniform) - torch.log1p(-uniform)
    return torch.sigmoid((noise - logits) / temperature)


def annealed(progress: float, start: float, end: float) -> float:
    """Exponential schedule from `start` at progress 0 to `end` at progress 1."""
    return start * (end / start) ** min(max(progress, 0.0), 1.0)


def halting_weights(halting: Tensor, epsilon: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    """A-ViT's distribution over depth of each token.

    Args:
        halting (`torch.Tensor` of shape `[tokens, blocks]`): halting scores in (0, 1).
        epsilon (`float`, *optional*, defaults to 0.01): a token halts at the first block where the sum of its scores
            exceeds `1 - epsilon`, at the last block in any case.

    Returns:
        The weight of each block (`[tokens, blocks]`: the score before the halting block, the remainder at it, 0 after;
        they sum to 1), the number of the halting block counted from 1 (int64 `[tokens]`), and the remainder
        (`[tokens]`).
    """
    last = torch.zeros_like(halting, dtype=torch.bool)
    last[:, -1] = True
    halted = (halting.cumsum(1) > 1 - epsilon) | last
    depth = halted.int().argmax(1)
    block = torch.arange(halting.shape[1], device=halting.device)
    before = block < depth[:, None]
    remainder = 1 - (halting * before).sum(1)
    weights = torch.where(before, halting, torch.where(block == depth[:, None], remainder[:, None], 0.0))
    return weights, depth + 1, remainder


def ponder_loss(depth: Tensor, remainder: Tensor) -> Tensor:
    """A-ViT's ponder cost, the mean of halting block plus remainder; its gradient is that of the remainder."""
    return (depth + remainder).mean()


def depth_prior_loss(halting: Tensor, centre: float, width: float = 1.0) -> Tensor:
    """A-ViT's prior: KL from a Gaussian over depth to the normalised mean halting scores, clamped to [0.01, 0.99].

    Args:
        halting (`torch.Tensor` of shape `[tokens, blocks]`): halting scores.
        centre (`float`): target depth in blocks, counted from 1.
        width (`float`, *optional*, defaults to 1.0): standard deviation.
    """
    depth = torch.arange(1, halting.shape[1] + 1, device=halting.device, dtype=halting.dtype)
    target = torch.exp(-0.5 * ((depth - centre) / width).square()) / (width * math.sqrt(2 * math.pi))
    target = (target / target.sum()).clamp(0.01, 0.99)
    mean = halting.mean(0)
    mean = (mean / mean.sum()).clamp(0.01, 0.99)
    return (target * (target.log() - mean.log())).sum()


def null_balance_loss(true_logits: Tensor, null_logits: Tensor, top_k: int) -> Tensor:
    """AdaMoE's load balance over true and null experts, in Switch normalisation: `(E + m) sum_i f_i P_i`.

    Nulls need not balance among themselves: each gets the mean load of all nulls. At balance about `k E / (E + m)`
    true experts run.

    Args:
        true_logits (`torch.Tensor` of shape `[tokens, E]`): router logits.
        null_logits (`torch.Tensor` of shape `[tokens, m]`): logits of the null experts.
        top_k (`int`): slots of a token.
    """
    logits = torch.cat([true_logits.float(), null_logits.float()], -1)
    experts, true = logits.shape[1], true_logits.shape[1]
    probability = logits.softmax(-1)
    chosen = logits.detach().topk(top_k, dim=-1).indices.flatten()
    load = torch.bincount(chosen, minlength=experts).to(logits.dtype) / chosen.numel()
    load[true:] = load[true:].mean()
    return experts * (load * probability.mean(0)).sum()
