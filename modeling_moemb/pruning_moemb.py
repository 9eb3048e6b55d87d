"""Token policies: which image and video tokens the later blocks still see.

After decoder block K the visual tokens of each item are ranked by a score and the best are kept; the others are
dropped by re-packing, never by masking: dropped rows cost nothing, and the convolutions and the delta rule of later
blocks run over the survivors as if the others had never been there. How many tokens stay depends on the item's own
shape alone, never on its batch. Text tokens and `<emb>` are never dropped.

The score is beta, the write strength of Gated DeltaNet, which costs nothing. The controls are the attention a token
receives (FastV, arXiv 2403.06764; computed for this score only), random numbers, and every n-th token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .elementwise_moemb import rotate
from .packing_moemb import IMAGE, VIDEO, PackedTokens


VISUAL = {"image": IMAGE, "video": VIDEO}
QUERY_ROWS = 512  # queries whose attention weights are held at a time


@dataclass(frozen=True)
class TokenPruning:
    """The `token_pruning` part of a compute budget, see `validate_adaptive_compute`.

    Args:
        layer (`int`): decoder blocks that see all tokens.
        amount (`dict[int, Fraction | int]`): what to keep of each modality that is pruned (1 image, 2 video): a
            fraction, rounded up, or a number of tokens.
        per_image (`bool`): whether each image and each video frame is ranked on its own.
        score (`str`): `"beta"`, `"attention"`, `"random"`, `"uniform"` or `"gate"`.
    """

    layer: int
    amount: dict[int, Fraction | int]
    per_image: bool = False
    score: str = "beta"

    @classmethod
    def from_settings(cls, settings: dict[str, Any] | None) -> "TokenPruning | None":
        """From validated settings; `None` when there is nothing that could be dropped by rank."""
        if settings is None or "threshold" in settings:
            return None
        amount = settings["keep"] if "keep" in settings else settings["budget"]
        if not isinstance(amount, dict):
            amount = dict.fromkeys(settings.get("modalities") or VISUAL, amount)
        if "keep" in settings:  # as written: 0.3 means 3/10, of which a whole number of tokens comes out whole
            amount = {name: Fraction(value).limit_denominator(10**6) for name, value in amount.items()}
            # not a fraction of 0: the smallest keeps a token of any item
            amount = {name: max(value, Fraction(1, 10**6)) for name, value in amount.items() if value != 1}
        if not amount:
            return None
        by_modality = {VISUAL[name]: value for name, value in amount.items()}
        return cls(settings["layer"], by_modality, settings.get("scope") == "image", settings.get("score", "beta"))

    def keep(self, packed: PackedTokens, score: Tensor | None) -> Tensor:
        """Choose the survivors.

        Args:
            packed (`PackedTokens`): the tokens.
            score (`torch.Tensor` of shape `(tokens,)`, *optional*): higher is kept first, ties by index; not needed
                for `"uniform"`.

        Returns:
            `torch.BoolTensor` of shape `(tokens,)`.
        """
        if self.per_image:  # text stands between any two images and frames, so each is a run of its own
            starts = torch.ones_like(packed.segment)
            starts[1:] = (packed.modality[1:] != packed.modality[:-1]) | (packed.segment[1:] != packed.segment[:-1])
            group = starts.cumsum(0)
        else:
            group = 3 * packed.segment + packed.modality
        uniform = self.score == "uniform"
        rank, size = rank_in_groups(torch.zeros_like(group) if uniform else score, group)
        keep = torch.ones_like(packed.segment, dtype=torch.bool)
        for modality, amount in self.amount.items():
            count = kept_count(size, amount)
            # every n-th: the steps of a line that rises by `count` over the group
            chosen = (rank + 1) * count // size > rank * count // size if uniform else rank < count
            keep &= chosen | (packed.modality != modality)
        return keep

    def kept(self, sizes: list[int], modality: int) -> int:
        """How many tokens stay of one item's images (or frames) with `sizes` tokens each."""
        amount = self.amount.get(modality)
        if amount is None:
            return sum(sizes)
        return sum(kept_count(size, amount) for size in (sizes if self.per_image else [sum(sizes)]))


def prunable(budget: dict[str, Any]) -> list[int]:
    """The modalities (1 image, 2 video) that the `token_pruning` of a budget is about."""
    pruning = budget["token_pruning"]
    amount = next(pruning[key] for key in ("keep", "budget", "threshold") if key in pruning)
    names = amount if isinstance(amount, dict) else pruning.get("modalities") or VISUAL
    return [VISUAL[name] for name in names]


def kept_count(size: Any, amount: Fraction | int) -> Any:
    """Tokens that stay of `size` (an `int` or a `torch.LongTensor`): a fraction, rounded up, or at most a number."""
    if isinstance(amount, Fraction):  # in whole numbers: no rounding differs between devices
        return -(-size * amount.numerator // amount.denominator)
    return size.clamp_max(amount) if isinstance(size, Tensor) else min(size, amount)


def rank_in_groups(score: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each token in its group, without a synchronisation with the device.

    Args:
        score (`torch.Tensor` of shape `(tokens,)`): rank 0 has the largest; ties by index.
        group (`torch.LongTensor` of shape `(tokens,)`): the group of each token.

    Returns:
        Two `torch.LongTensor` of shape `(tokens,)`: the ranks, and the size of each token's group.
    """
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    ordered = group[order]
    first = torch.searchsorted(ordered, ordered)
    size = torch.searchsorted(ordered, ordered, right=True) - first
    place = torch.arange(len(group), device=group.device)
    return (torch.empty_like(group).index_copy(0, order, tensor) for tensor in (place - first, size))


def attention_weights(
    attention: torch.nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], lengths: list[int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Attention weights of a full-attention mixer, a few queries at a time: the mixer itself never forms them.

    Args:
        attention (`MoEMBAttention`): the mixer.
        hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): its input.
        position_embeddings (`tuple[torch.Tensor, torch.Tensor]`): cosine and sine of shape `(tokens, rotary_dim)`.
        lengths (`list[int]`): item lengths.

    Yields:
        The rows of some queries, the rows of the keys they see, and fp32 weights `(heads, queries, keys)`.
    """
    dim, (cos, sin) = attention.head_dim, position_embeddings
    query, _ = attention.q_proj(hidden_states).unflatten(-1, (-1, 2 * dim)).chunk(2, dim=-1)
    key = attention.k_norm(attention.k_proj(hidden_states).unflatten(-1, (-1, dim)))
    query = rotate(attention.q_norm(query), cos, sin, hidden_states.dtype).float()
    key = rotate(key, cos, sin, hidden_states.dtype).float()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    start = 0
    for length in lengths:
        for low in range(start, start + length, QUERY_ROWS):
            high = min(low + QUERY_ROWS, start + length)
            queries, keys = slice(low, high), slice(start, high)
            scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys]) * attention.scaling
            future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(low - start + 1)
            yield queries, keys, scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        start += length


@torch.no_grad()
def received_attention(
    attention: torch.nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], lengths: list[int]
) -> Tensor:
    """Mean attention each token receives from the tokens of its item, over heads: the score of FastV.

    Arguments as in [`attention_weights`].

    Returns:
        `torch.FloatTensor` of shape `(tokens,)`, fp32.
    """
    received = torch.zeros(hidden_states.shape[0], dtype=torch.float32, device=hidden_states.device)
    for _, keys, weights in attention_weights(attention, hidden_states, position_embeddings, lengths):
        received[keys] += weights.mean(0).sum(0)
    return received / torch.tensor(lengths, device=received.device).repeat_interleave(
        torch.tensor(lengths, device=received.device), output_size=sum(lengths)
    )


def hashed(*parts: Tensor | int) -> Tensor:
    """A random 64-bit number from numbers that broadcast: the same ones on any device and in any batch.

    Each part passes the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = torch.zeros((), dtype=torch.int64)
    for part in parts:
        part = torch.as_tensor(part, dtype=torch.int64)
        state = (state if state.dim() else state.to(part.device)) + part.to(torch.int64) + -7046029254386353131
        state = (state ^ (state >> 30 & (1 << 34) - 1)) * -4658895280553007687
        state = (state ^ (state >> 27 & (1 << 37) - 1)) * -7723592293110705685
        state = state ^ (state >> 31 & (1 << 33) - 1)
    return state


def fingerprints(rows: Tensor) -> Tensor:
    """One number for the bits of each row of `(rows, dim)`, `torch.LongTensor` of shape `(rows,)`."""
    if rows.is_floating_point():
        rows = rows.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    places = hashed(torch.arange(rows.shape[1], device=rows.device))
    return (rows.long() * (2 * places + 1)).sum(1)


__all__ = [
    "TokenPruning",
    "attention_weights",
    "hashed",
    "kept_count",
    "prunable",
    "rank_in_groups",
    "received_attention",
]
