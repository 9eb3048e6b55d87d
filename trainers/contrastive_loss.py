"""InfoNCE over the vectors of a batch: hard negatives, negatives of all processes, duplicates left out, Matryoshka."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .contrastive_batches import ContrastiveBatch


@dataclass
class LossOutput:
    """
    Args:
        loss (`torch.Tensor`): What to call `backward` on: the loss times the number of processes whose gradients are
            averaged afterwards.
        value (`torch.Tensor`): The loss of the whole batch, detached.
        by_dataset (`dict[int, float]`): The loss of this process' queries by data set.
        hits (`torch.Tensor`): Share of the queries whose positive is the nearest document, detached.
        masked (`torch.Tensor`): Share of the pairs that are left out as duplicates.
    """

    loss: Tensor
    value: Tensor
    by_dataset: dict[int, float]
    hits: Tensor
    masked: Tensor


class ContrastiveLoss(nn.Module):
    """
    For query `i` with positive `i` among all documents `j` (positives and negatives of all rows):
    `-log( exp(s q_i.d_i) / sum_j exp(s q_i.d_j) )`, the mean over all queries of all processes.

    Every process computes the loss of the whole batch, with a gradient for its own vectors, so that the sum of the
    processes' gradients is that of the batch. As gradients are averaged over processes, the loss is multiplied by
    their number.

    Args:
        scale (`float`): Inverse temperature `s`.
        symmetric (`bool`, *optional*, defaults to `False`): The mean with the loss from positives to queries.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Leave out documents that are right for the query.
        dims (`Sequence[int]`, *optional*): Lengths of the vector; the losses' weighted mean is taken.
        weights (`Sequence[float]`, *optional*): Weight of each length; equal by default.
        gather (`bool`, *optional*, defaults to `True`): Whether documents of all processes are negatives.
    """

    def __init__(
        self,
        scale: float,
        symmetric: bool = False,
        mask_duplicates: bool = True,
        dims: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        gather: bool = True,
    ):
        super().__init__()
        self.scale, self.symmetric, self.mask_duplicates, self.gather = scale, symmetric, mask_duplicates, gather
        self.dims = [None] if dims is None else list(dims)
        weights = [1.0] * len(self.dims) if weights is None else list(weights)
        self.weights = [weight / sum(weights) for weight in weights]

    def forward(self, vectors: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """
        Args:
            vectors (`torch.FloatTensor` of shape `(items, dim)`): Vectors of the batch's items.
            batch (`ContrastiveBatch`): The rows.
        """
        many = self.gather and dist.is_initialized() and dist.get_world_size() > 1
        collect = _gather if many else (lambda tensor: tensor)
        device = vectors.device
        keys = batch.keys.to(device)
        query, positive, negatives = (place.to(device) for place in (batch.query, batch.positive, batch.negatives))
        queries = collect(vectors[query])
        documents = torch.cat([collect(vectors[positive]), collect(vectors[negatives])])
        mask = self._right_documents(
            collect(keys[query]), collect(keys[positive]), collect(keys[negatives]), collect(batch.group.to(device))
        )
        total = vectors.new_zeros(())
        for dim, weight in zip(self.dims, self.weights):
            per_query, nearest = self._info_nce(queries[:, :dim], documents[:, :dim], mask)
            total = total + weight * per_query.mean()
        first = dist.get_rank() * len(query) if many else 0
        own = per_query.detach()[first : first + len(query)]
        by_dataset = {
            int(number): own[batch.dataset.to(device) == number].mean().item() for number in batch.dataset.unique()
        }
        world = dist.get_world_size() if many else 1
        right = torch.arange(len(queries), device=device)
        return LossOutput(
            total * world, total.detach(), by_dataset, (nearest == right).float().mean(), mask.float().mean()
        )

    def _info_nce(self, queries: Tensor, documents: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each query, and its nearest document; with `dim` vectors not yet normalised."""
        queries, documents = F.normalize(queries.float(), dim=-1), F.normalize(documents.float(), dim=-1)
        scores = (self.scale * queries @ documents.T).masked_fill(mask, -torch.inf)
        right = torch.arange(len(queries), device=queries.device)
        losses = F.cross_entropy(scores, right, reduction="none")
        if self.symmetric:
            backwards = scores[:, : len(queries)].T
            losses = (losses + F.cross_entropy(backwards, right, reduction="none")) / 2
        return losses, scores.detach().argmax(dim=1)

    def _right_documents(self, query: Tensor, positive: Tensor, negatives: Tensor, group: Tensor) -> Tensor:
        """bool `(queries, documents)`: documents other than the row's own positive that are right for the query.

        A document is right if it equals the positive, or is the positive of an equal query or of a row of equal key.
        """
        mask = positive[:, None] == torch.cat([positive, negatives])[None]
        rows = len(positive)
        mask[:, :rows] |= query[:, None] == query[None]
        mask[:, :rows] |= (group[:, None] == group[None]) & (group != 0)[:, None]
        mask[:, :rows].fill_diagonal_(False)
        return mask if self.mask_duplicates else torch.zeros_like(mask)


def _gather(tensor: Tensor) -> Tensor:
    """The rows of all processes in order; only this process' have a gradient. Their number may differ."""
    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device))
    counts = [int(count) for count in counts]
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    parts = [part[:count] for part, count in zip(parts, counts)]
    parts[rank] = tensor
    return torch.cat(parts)
