"""Index tables of a packing whose items continue shared prefixes, see [`shared_packing`].

The rows are those of the prefixes, then what each item has of its own. What looks back (attention, the delta rule, the
convolution) finds here which rows of its prefix an item needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .layout_moemb import MAX_CHUNK, PackedLayout, padded_width


Span = tuple[int, int]  # first row, number of rows


@dataclass(frozen=True)
class RuleSteps:
    """How the delta rule runs over shared prefixes: first their whole chunks, then all that follows.

    The rest of a prefix that fills no chunk is run again with every item: its chunk then has the same tokens, and an
    item the same bits, as without sharing.

    Args:
        heads (`PackedLayout`, *optional*): the whole chunks of the prefixes; `None` when there are none.
        head_rows (`torch.LongTensor`): their rows.
        tails (`PackedLayout`): of each item what no head holds; its `state_of` names the head that it follows.
        tail_rows (`torch.LongTensor`): their rows.
        silent (`torch.IntTensor` of shape `(items,)`): how many rows at the start of each tail are those of an earlier
            one, too.
    """

    heads: PackedLayout | None
    head_rows: Tensor
    tails: PackedLayout
    tail_rows: Tensor
    silent: Tensor

    @cached_property
    def place(self) -> Tensor:
        """`torch.LongTensor` `(tokens,)`: where each row stands in the outputs of the heads, then the tails."""
        rows = torch.cat([self.head_rows, self.tail_rows]).cpu().numpy()
        return torch.from_numpy(np.unique(rows, return_index=True)[1]).to(self.tail_rows.device)


@dataclass(frozen=True)
class ConvolutionSeams:
    """The first tokens of the items that continue a prefix: a convolution that starts there misses the prefix's end.

    Args:
        rows (`torch.LongTensor`): the last rows of each item's prefix, and its own first ones.
        cu_seqlens (`torch.IntTensor`): cumulative lengths of these stretches.
        place (`torch.LongTensor`): where the items' own rows stand among `rows`.
        target (`torch.LongTensor`): the same rows in the packing.
    """

    rows: Tensor
    cu_seqlens: Tensor
    place: Tensor
    target: Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Segments of one padded width with equally many tokens before them.

    Args:
        queries (`torch.LongTensor` of shape `(segments, width)`): their rows, clamped in the tail.
        keys (`torch.LongTensor` of shape `(segments, before + width)`): the rows before them, and `queries`.
        valid (`torch.BoolTensor` of shape `(segments, width)`): false in the tail.
        before (`int`): tokens before each segment.
    """

    queries: Tensor
    keys: Tensor
    valid: Tensor
    before: int


class SharedLayout(PackedLayout):
    """The tables of one packing with shared prefixes.

    Args:
        lengths (`Sequence[int]`): lengths of the prefixes, then of what each item has of its own.
        device (`torch.device`): where the tables live.
        prefix_of (`Sequence[int]`): the prefix that each item continues, -1 for none.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, prefix_of: Sequence[int]):
        super().__init__(lengths, device)
        self.prefix_of = list(prefix_of)
        self.prefixes = len(self.lengths) - len(self.prefix_of)
        starts = list(accumulate(self.lengths, initial=0))
        self._own = list(zip(starts, self.lengths))
        # of each segment: the span of the prefix before it
        none = [(0, 0)] * self.prefixes
        self._before = none + [self._own[prefix] if prefix >= 0 else (0, 0) for prefix in self.prefix_of]
        self._steps: dict[bool, RuleSteps] = {}
        self._seams: dict[int, ConvolutionSeams] = {}

    @property
    def shared(self) -> "SharedLayout":
        return self

    def _on(self, device: torch.device) -> "SharedLayout":
        return SharedLayout(self.lengths, device, self.prefix_of)

    # attention

    @cached_property
    def key_rows(self) -> Tensor:
        """`torch.LongTensor`: the rows that each segment sees, one segment after the other."""
        return self._rows_on_device(span for pair in zip(self._before, self._own) for span in pair)

    @cached_property
    def key_cu_seqlens(self) -> Tensor:
        """`torch.IntTensor` `(segments + 1,)`: cumulative lengths of `key_rows`."""
        seen = [before[1] + own[1] for before, own in zip(self._before, self._own)]
        return torch.tensor(list(accumulate(seen, initial=0)), dtype=torch.int32).to(self.device)

    @cached_property
    def items(self) -> PackedLayout:
        """The whole items, as `item_rows` hold them."""
        pairs = list(zip(self._before, self._own))[self.prefixes :]
        return PackedLayout([before[1] + own[1] for before, own in pairs], self.device)

    @cached_property
    def item_rows(self) -> Tensor:
        """`torch.LongTensor`: the rows of the whole items, one item after the other."""
        pairs = list(zip(self._before, self._own))[self.prefixes :]
        return self._rows_on_device(span for pair in pairs for span in pair)

    @cached_property
    def attention_groups(self) -> list[AttentionGroup]:
        """The segments, for attention by padded products."""
        groups: dict[tuple[int, int], list[int]] = {}
        for segment, (before, own) in enumerate(zip(self._before, self._own)):
            groups.setdefault((padded_width(own[1]), before[1]), []).append(segment)
        tables = []
        for (width, before), segments in sorted(groups.items()):
            starts, lengths = torch.tensor([self._own[segment] for segment in segments]).T[..., None]
            within = torch.arange(width)
            queries = starts + torch.minimum(within, lengths - 1)
            prefixes = torch.tensor([self._before[segment][0] for segment in segments])
            keys = torch.cat([prefixes[:, None] + torch.arange(before), queries], dim=1)
            tensors = (tensor.to(self.device) for tensor in (queries, keys, within < lengths))
            tables.append(AttentionGroup(*tensors, before))
        return tables

    @cached_property
    def attention_order(self) -> Tensor:
        """`torch.LongTensor` `(tokens,)`: where each row stands in the concatenated queries of the groups."""
        return self._order([(group.queries, group.valid) for group in self.attention_groups])

    # delta rule and convolution

    def steps(self, carried: bool) -> RuleSteps:
        """The steps of the delta rule; without `carried` no state is handed on, and every item runs from its start."""
        if carried not in self._steps:
            self._steps[carried] = self._rule_steps(carried)
        return self._steps[carried]

    def _rule_steps(self, carried: bool) -> RuleSteps:
        chunks = [length // MAX_CHUNK * MAX_CHUNK * carried for _, length in self._own[: self.prefixes]]
        with_chunks = [prefix for prefix, length in enumerate(chunks) if length]
        heads = [(self._own[prefix][0], chunks[prefix]) for prefix in with_chunks]
        tails, lengths, states, silent, seen = [], [], [], [], set()
        for prefix, own in zip(self.prefix_of, self._own[self.prefixes :]):
            start, rest = self._own[prefix] if prefix >= 0 else (0, 0)
            done = chunks[prefix] if prefix >= 0 else 0
            tails += [(start + done, rest - done), own]
            lengths.append(rest - done + own[1])
            states.append(with_chunks.index(prefix) if done else -1)
            silent.append(rest - done if prefix in seen else 0)
            seen.add(prefix)
        return RuleSteps(
            heads=PackedLayout([length for _, length in heads], self.device) if heads else None,
            head_rows=self._rows_on_device(heads),
            tails=PackedLayout(lengths, self.device, states),
            tail_rows=self._rows_on_device(tails),
            silent=torch.tensor(silent, dtype=torch.int32).to(self.device),
        )

    def seams(self, taps: int) -> ConvolutionSeams:
        """The seams of a convolution with so many taps."""
        if taps not in self._seams:
            spans, lengths, place, target = [], [0], [], []
            for (start, before), (own, length) in zip(self._before, self._own):
                if before:
                    back, ahead = min(taps - 1, before), min(taps - 1, length)
                    spans += [(start + before - back, back), (own, ahead)]
                    place.append((sum(lengths) + back, ahead))
                    target.append((own, ahead))
                    lengths.append(back + ahead)
            cu_seqlens = torch.tensor(list(accumulate(lengths)), dtype=torch.int32).to(self.device)
            rows, place, target = (self._rows_on_device(table) for table in (spans, place, target))
            self._seams[taps] = ConvolutionSeams(rows, cu_seqlens, place, target)
        return self._seams[taps]

    def _rows_on_device(self, spans) -> Tensor:
        return torch.from_numpy(_rows(list(spans))).to(self.device)


def _rows(spans: list[Span]) -> np.ndarray:
    """The rows of spans, one span after the other."""
    starts, lengths = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - ends + lengths, lengths)
