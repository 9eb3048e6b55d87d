"""Losses of the trainers, as plain functions of tensors (all computed in float32).

- [`contrastive_loss`]: InfoNCE over a group, with duplicate positives sharing the target.
- [`distillation_loss`]: pulls embeddings, through a throw-away linear head, towards a teacher's vectors.
- [`load_balancing_loss`], [`router_z_loss`]: keep the router of a mixture of experts healthy (Megatron normalisation).
- [`next_token_loss`]: language modelling with the embedding table as output layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def contrastive_loss(
    queries: torch.Tensor,
    documents: torch.Tensor,
    positives: torch.Tensor,
    scale: float,
    ignore: torch.Tensor | None = None,
) -> torch.Tensor:
    """InfoNCE from queries to documents; a query with several right documents shares its target among them.

    With `P(i)` the right documents of query `i` and `s` the scale, the loss of `i` is
    `- mean over j in P(i) of log( exp(s q_i.d_j) / sum over all d of exp(s q_i.d) )`. Queries without a right
    document take no part.

    Args:
        queries (`torch.Tensor`): Unit vectors `[n, d]`.
        documents (`torch.Tensor`): Unit vectors `[m, d]`.
        positives (`torch.Tensor`): bool `[n, m]`.
        scale (`float`): Inverse temperature.
        ignore (`torch.Tensor`, *optional*): bool `[n, m]`; pairs left out of the sums (an item and itself).

    Returns:
        `torch.Tensor`: Scalar; 0 (with a gradient of 0) when no query has a right document.
    """
    logits = scale * queries.float() @ documents.float().T
    if ignore is not None:
        # A finite fill: a row in which every pair is left out must give zero, and -inf would give NaN gradients.
        logits = logits.masked_fill(ignore, -1e4)
        positives = positives & ~ignore
    target = positives.float()
    count = target.sum(dim=1)
    per_query = -(target * F.log_softmax(logits, dim=1)).sum(dim=1) / count.clamp(min=1)
    return per_query.sum() / (count > 0).sum().clamp(min=1)


def distillation_loss(
    predictions: torch.Tensor, targets: torch.Tensor, target_index: torch.Tensor, scale: float
) -> torch.Tensor:
    """Contrast against the teacher's vectors of the batch plus twice the mean cosine distance to the right one.

    Args:
        predictions (`torch.Tensor`): `[n, t]`, outputs of the linear head (any length).
        targets (`torch.Tensor`): `[u, t]`, the *distinct* teacher vectors of the batch, unit length.
        target_index (`torch.Tensor`): int64 `[n]`, the row of `targets` that belongs to each prediction.
        scale (`float`): Inverse temperature of the contrast.

    Returns:
        `torch.Tensor`: Scalar.
    """
    predictions = F.normalize(predictions.float(), dim=-1)
    similarity = predictions @ targets.float().T
    cosine = similarity.gather(1, target_index[:, None]).mean()
    return F.cross_entropy(scale * similarity, target_index) + 2.0 * (1.0 - cosine)


def load_balancing_loss(router_logits: Sequence[torch.Tensor], top_k: int) -> torch.Tensor:
    """The Switch loss `E * sum_i f_i P_i`, mean over layers: 1 when experts are used evenly, E / k when collapsed.

    `f_i` is the share of the k * T routed slots that expert `i` received, `P_i` the mean of its probability. HF's
    `load_balancing_loss_func` leaves out the 1 / k and pools the layers; the same coefficient is k times stronger
    there.

    Args:
        router_logits (`Sequence[torch.Tensor]`): Per layer `[tokens, experts]`, without padding.
        top_k (`int`): Experts per token.

    Returns:
        `torch.Tensor`: Scalar, differentiable through `P_i`.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)
        chosen = probabilities.detach().topk(top_k, dim=-1).indices.flatten()
        share = torch.bincount(chosen, minlength=logits.shape[-1]).float() / chosen.numel()
        losses.append(logits.shape[-1] * (share * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def router_z_loss(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ST-MoE z-loss, mean over layers and tokens of `logsumexp(logits) ** 2`: keeps router logits small.

    Args:
        router_logits (`Sequence[torch.Tensor]`): Per layer `[tokens, experts]`, without padding.

    Returns:
        `torch.Tensor`: Scalar.
    """
    return torch.stack([logits.float().logsumexp(dim=-1).square().mean() for logits in router_logits]).mean()


def expert_load(router_logits: Sequence[torch.Tensor], top_k: int) -> tuple[float, float]:
    """How evenly experts are used: the busiest and the idlest expert's share of the tokens, relative to an even share.

    Returns:
        `tuple[float, float]`: (max, min) over experts and layers; 1.0 is even, 0.0 is a dead expert.
    """
    shares = []
    for logits in router_logits:
        chosen = logits.detach().topk(top_k, dim=-1).indices.flatten()
        counts = torch.bincount(chosen, minlength=logits.shape[-1]).float()
        shares.append(counts * logits.shape[-1] / chosen.numel())
    stacked = torch.stack(shares)
    return stacked.max().item(), stacked.min().item()


def next_token_loss(hidden: torch.Tensor, embedding: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the labelled positions under `hidden @ embedding.T`.

    Only labelled rows are multiplied with the table, so positions inside an image cost nothing.

    Args:
        hidden (`torch.Tensor`): `[n, d]`, final-normed states, packed.
        embedding (`torch.Tensor`): `[vocab, d]`, the input embedding table (tied).
        labels (`torch.Tensor`): int64 `[n]`, the *next* token of each position or -100.

    Returns:
        `torch.Tensor`: Scalar, in nats per token.

    Raises:
        ValueError: If no position is labelled.
    """
    keep = labels != -100
    if not bool(keep.any()):
        raise ValueError("next_token_loss: no position has a label; the batch holds no text to predict.")
    return F.cross_entropy((hidden[keep] @ embedding.T).float(), labels[keep])
