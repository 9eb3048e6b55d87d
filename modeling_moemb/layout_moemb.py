"""Index tables of a packing: which rows form the chunks and groups that the mixers work on.

Items are grouped by length class, so an item's arithmetic depends on its own length only, never on what shares its
batch. Tables are built once per packing and shared by all layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


MAX_CHUNK = 64


@dataclass(frozen=True)
class ChunkClass:
    """Items whose chunks have one size, in scan order: first the first chunk of every item, then the second, ...

    Args:
        size (`int`): tokens per chunk.
        index (`torch.LongTensor` of shape `(chunks, size)`): packed row of each chunk position (clamped in the tail).
        valid (`torch.BoolTensor` of shape `(chunks, size)`): false in the tail of an item's last chunk.
        active (`list[int]`): number of items that still have a chunk at each scan step; a prefix of the items.
        items (`torch.LongTensor` of shape `(items,)`): the items, in scan order.
        state (`torch.LongTensor` of shape `(items,)`, *optional*): the given state that each item starts from; `None`
            when all start from 0.
    """

    size: int
    index: Tensor
    valid: Tensor
    active: list[int]
    items: Tensor
    state: Tensor | None = None


class PackedLayout:
    """Index tables of one packing, built once and shared by all layers.

    Args:
        lengths (`Sequence[int]`): item lengths.
        device (`torch.device`): where the tables live.
        state_of (`Sequence[int]`, *optional*): the given state that the delta rule starts each item from, -1 for 0.
    """

    shared: "PackedLayout | None" = None  # a `SharedLayout` is itself here: its items continue shared prefixes

    def __init__(self, lengths: Sequence[int], device: torch.device, state_of: Sequence[int] | None = None):
        self.lengths = list(lengths)
        self.device = device
        self.state_of = [-1] * len(self.lengths) if state_of is None else list(state_of)
        self._elsewhere: dict[torch.device, PackedLayout] = {}

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "PackedLayout":
        """The tables on another device, built once: a model spread over devices moves them along with the states."""
        device = torch.empty(0, device=device).device
        if device == torch.empty(0, device=self.device).device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._on(device)
            self._elsewhere[device]._elsewhere = self._elsewhere
        return self._elsewhere[device]

    def _on(self, device: torch.device) -> "PackedLayout":
        return PackedLayout(self.lengths, device, self.state_of)

    @cached_property
    def _starts(self) -> Tensor:
        lengths = torch.tensor(self.lengths)
        return lengths.cumsum(0) - lengths

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`torch.IntTensor` `(items + 1,)`: cumulative lengths, for kernels that take the packing as it is."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(self.device)

    @cached_property
    def single_rows(self) -> Tensor:
        """`torch.IntTensor` `(items + 1,)`: cumulative lengths of one row per item."""
        return torch.arange(len(self.lengths) + 1, dtype=torch.int32, device=self.device)

    @cached_property
    def states(self) -> Tensor:
        """`torch.IntTensor` `(items,)`: `state_of` on the device."""
        return torch.tensor(self.state_of, dtype=torch.int32).to(self.device)

    @cached_property
    def chunks(self) -> list[ChunkClass]:
        """Chunk tables by length class: the smallest multiple of 8 that holds the item, at most `MAX_CHUNK`.

        Items of several chunks form a class of their own: an item that fits one chunk carries no state. So do those
        that start from a given state.
        """
        classes: dict[tuple[int, bool, bool], list[int]] = {}
        for item, length in enumerate(self.lengths):
            size = min(-(-length // 8) * 8, MAX_CHUNK)
            classes.setdefault((size, length > size, self.state_of[item] >= 0), []).append(item)
        return [self._chunk_class(size, items, begun) for (size, _, begun), items in sorted(classes.items())]

    def _chunk_class(self, size: int, items: list[int], begun: bool) -> ChunkClass:
        items = sorted(items, key=lambda item: -self.lengths[item])
        lengths = torch.tensor([self.lengths[item] for item in items])
        starts = self._starts[torch.tensor(items)]
        steps = -(-int(lengths[0]) // size)
        active = [int((lengths > step * size).sum()) for step in range(steps)]
        within = torch.cat([torch.full((count,), step * size) for step, count in enumerate(active)])
        within = within[:, None] + torch.arange(size)
        rank = torch.cat([torch.arange(count) for count in active])
        valid = within < lengths[rank][:, None]
        index = starts[rank][:, None] + torch.minimum(within, lengths[rank][:, None] - 1)
        state = torch.tensor([self.state_of[item] for item in items]).to(self.device) if begun else None
        order = torch.tensor(items).to(self.device)
        return ChunkClass(size, index.to(self.device), valid.to(self.device), active, order, state)

    @cached_property
    def chunk_order(self) -> Tensor:
        """`torch.LongTensor` `(tokens,)`: where each packed row stands in the concatenated chunk positions."""
        return self._order([(chunk.index, chunk.valid) for chunk in self.chunks])

    @cached_property
    def causal_groups(self) -> list[tuple[Tensor, Tensor]]:
        """Items by padded width for causal attention: `(index, valid)` of shape `(items, width)` each."""
        return self._groups(padded_width)

    @cached_property
    def exact_groups(self) -> list[tuple[Tensor, Tensor]]:
        """Items by exact length for bidirectional attention."""
        return self._groups(lambda length: length)

    def _groups(self, width_of: Callable[[int], int]) -> list[tuple[Tensor, Tensor]]:
        groups: dict[int, list[int]] = {}
        for item, length in enumerate(self.lengths):
            groups.setdefault(width_of(length), []).append(item)
        tables = []
        for width, items in sorted(groups.items()):
            items = torch.tensor(items)
            lengths = torch.tensor(self.lengths)[items][:, None]
            within = torch.arange(width)[None]
            index = self._starts[items][:, None] + torch.minimum(within, lengths - 1)
            tables.append((index.to(self.device), (within < lengths).to(self.device)))
        return tables

    @cached_property
    def causal_order(self) -> Tensor:
        return self._order(self.causal_groups)

    @cached_property
    def exact_order(self) -> Tensor:
        return self._order(self.exact_groups)

    @cached_property
    def item_order(self) -> Tensor:
        """`torch.LongTensor` `(items,)`: where each item stands in the concatenated causal groups."""
        last = torch.cat([index[:, 0] for index, _ in self.causal_groups])
        return torch.argsort(last)

    def _order(self, groups: list[tuple[Tensor, Tensor]]) -> Tensor:
        flat = torch.cat([index.reshape(-1) for index, _ in groups])
        valid = torch.cat([valid.reshape(-1) for _, valid in groups])
        order = torch.empty(sum(self.lengths), dtype=torch.long, device=self.device)
        order[flat[valid]] = torch.arange(flat.shape[0], device=self.device)[valid]
        return order


def padded_width(length: int) -> int:
    """Width class of a length: multiples of an eighth of the next power of two, at least 8."""
    step = max(8, (1 << max(length - 1, 1).bit_length()) // 8)
    return -(-length // step) * step
