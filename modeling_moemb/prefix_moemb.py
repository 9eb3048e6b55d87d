"""Shared prefixes: leading text tokens that several items of a batch have in common are computed once.

An instruction stands before the content of every query, so short queries are mostly instruction. The tokens of a
decoder see only what stands before them: a prefix has the same states in every item, and what follows needs its keys
and values, the memory of the delta rule behind it and the last rows before the convolution.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .packing_moemb import TEXT, PackedTokens


SHORTEST = 16  # tokens: below, what sharing costs is more than what it saves
WORTHWHILE = 0.1  # of the tokens of a batch


def may_share(budget: dict[str, Any]) -> bool:
    """Whether a compute budget decides the same for a prefix whatever follows it.

    Tiers rank the text tokens of a whole item, random numbers are drawn from its whole content, and the attention that
    a token receives comes from all that follows.
    """
    score = (budget.get("token_pruning") or {}).get("score")
    return "tiered_top_k" not in budget and "random_k" not in budget and score not in ("random", "attention")


def shared_packing(packed: PackedTokens, ids: Tensor) -> tuple[PackedTokens, Tensor] | None:
    """Find the prefixes that items share and pack the batch so that each stands in it once.

    Only text tokens are shared, and never an item's last one. An item continues one prefix at most: items that share
    some tokens, of which some share more, continue one short prefix or several long ones, whichever saves more.

    Args:
        packed (`PackedTokens`): the batch, with the positions that follow from its content.
        ids (`torch.LongTensor` of shape `(tokens,)`): its token ids.

    Returns:
        The packing with prefixes, and the rows (`torch.LongTensor`) of `packed` that it is made of; `None` when
        sharing saves less than a tenth of the tokens.
    """
    if packed.num_items < 2:
        return None
    limits = _leading_text(packed)
    starts = list(accumulate(packed.lengths, initial=0))[:-1]
    words = ids.cpu().numpy()
    heads = [words[start : start + limit] for start, limit in zip(starts, limits)]
    groups = find_prefixes(heads)
    saved = sum((len(items) - 1) * length for items, length in groups)
    if saved < WORTHWHILE * packed.num_tokens or not groups:
        return None
    prefix_of, shared = [-1] * packed.num_items, [0] * packed.num_items
    for prefix, (items, length) in enumerate(groups):
        for item in items:
            prefix_of[item], shared[item] = prefix, length
    spans = [(starts[items[0]], length) for items, length in groups]
    spans += [(start + cut, length - cut) for start, length, cut in zip(starts, packed.lengths, shared)]
    return _repacked(packed, spans, tuple(prefix_of))


def _leading_text(packed: PackedTokens) -> list[int]:
    """How many tokens of each item may be shared: the text before its first image or video, but for its last token."""
    limits = np.array(packed.lengths) - 1
    media = (packed.modality != TEXT).cpu().numpy().nonzero()[0]
    if len(media):
        starts = np.cumsum(packed.lengths) - packed.lengths
        first = np.searchsorted(media, starts)
        found = first < len(media)
        limits[found] = np.minimum(limits[found], media[first[found]] - starts[found])
    return limits.tolist()


def find_prefixes(heads: Sequence[np.ndarray]) -> list[tuple[list[int], int]]:
    """The prefixes to share.

    Args:
        heads (`Sequence[np.ndarray]`): int64 token ids that may be shared, of each item.

    Returns:
        `list[tuple[list[int], int]]`: two or more items each, and how many tokens these share; no item twice.
    """
    begins: dict[bytes, list[int]] = {}
    for item, head in enumerate(heads):
        if len(head) >= SHORTEST:
            begins.setdefault(head[:SHORTEST].tobytes(), []).append(item)
    groups = []
    for items in begins.values():
        if len(items) > 1:
            # in sorted order what any two items share is the least that neighbours between them share
            items = sorted(items, key=lambda item: heads[item].tobytes())
            common = [_common(heads[one], heads[two]) for one, two in pairwise(items)]
            groups += [(sorted(items[first:last]), length) for first, last, length in _most_saving(common)]
    return groups


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(two))
    differs = one[:length] != two[:length]
    return int(differs.argmax()) if differs.any() else length


def _most_saving(common: list[int]) -> list[tuple[int, int, int]]:
    """Disjoint ranges `(first, last, length)` of sorted items: what shares most, whole or in parts that share more.

    Args:
        common (`list[int]`): tokens that each item shares with its neighbour to the right.
    """
    # an open range holds items that share `length` tokens, from number `first` on; what is the best inside of it
    # saves `gain` tokens with the ranges `inner`
    stack: list[tuple[int, int, int, list]] = [(0, 0, 0, [])]
    for item, shared in enumerate([*common, 0], start=1):
        first, gain, inner = item - 1, 0, []
        while stack[-1][0] > shared:
            length, first, gain, inner = stack.pop()
            whole = (item - first - 1) * length
            if whole >= gain:
                gain, inner = whole, [(first, item, length)]
            if stack[-1][0] >= shared:  # else a new range opens around this one
                length, start, others, ranges = stack.pop()
                stack.append((length, start, others + gain, ranges + inner))
                gain, inner = 0, []
        if stack[-1][0] < shared:
            stack.append((shared, first, gain, inner))
    return stack[0][3]


def _repacked(
    packed: PackedTokens, spans: list[tuple[int, int]], prefix_of: tuple[int, ...]
) -> tuple[PackedTokens, Tensor]:
    """The packing of the rows in `spans` (first row, number of rows), one segment each."""
    starts, counts = torch.tensor(spans).unbind(1)
    ends = counts.cumsum(0)
    rows = torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + counts, counts)
    segment = torch.repeat_interleave(torch.arange(len(spans)), counts)
    device = packed.segment.device
    rows, segment = rows.to(device), segment.to(device)
    shared = replace(
        packed,
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32),
        lengths=counts.tolist(),
        position_ids=packed.position_ids[:, rows],
        modality=packed.modality[rows],
        segment=segment,
        source=packed.source[rows],
        prefix_of=prefix_of,
    )
    return shared, rows


__all__ = ["find_prefixes", "may_share", "shared_packing"]
