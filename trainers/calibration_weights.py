"""Routing weights as histograms: how many experts a threshold would skip, without another forward pass.

Counts are kept by block, by token group (text, image, video, and the pooled token of each item), by the rank of the
weight in its token (the heaviest may be protected from skipping) and by bin. Bins are cut from the bits of the fp32
weight, 128 to an octave: a threshold is placed to 0.3 % of its value whatever its size, and memory is flat.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .saliency import GROUPS


_SHIFT = 16  # of fp32's 23 mantissa bits 7 are left
_OCTAVES = 24
LOWEST = 2.0**-_OCTAVES


def _bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


_FIRST = _bits(LOWEST) >> _SHIFT
BINS = (_bits(1.0) >> _SHIFT) - _FIRST + 1


class WeightHistogram:
    """
    Counts of routing weights.

    Args:
        blocks (`int`): decoder blocks.
        slots (`int`): experts per token.
        counts (`torch.LongTensor` of shape `(blocks, groups, slots, BINS)`, *optional*): counts to go on with; the
            groups are `saliency.GROUPS`.
    """

    def __init__(self, blocks: int, slots: int, counts: Tensor | None = None):
        shape = (blocks, len(GROUPS), slots, BINS)
        self.counts = torch.zeros(shape, dtype=torch.long) if counts is None else counts
        self._below: Tensor | None = None

    @property
    def pairs(self) -> int:
        """(token, expert) pairs that were counted."""
        return int(self.counts.sum())

    def add(self, block: int, groups: Tensor, weight: Tensor, skipped: Tensor) -> None:
        """
        Counts the weights of some tokens.

        Args:
            block (`int`): the block they were routed in.
            groups (`torch.LongTensor` of shape `(tokens,)`): index into `GROUPS` of each token.
            weight (`torch.FloatTensor` of shape `(tokens, slots)`): routing weights.
            skipped (`torch.BoolTensor` of shape `(tokens, slots)`): slots that run no expert; not counted.
        """
        slots = self.counts.shape[2]  # a policy may have cut off columns
        ordered = weight.float().masked_fill(skipped, -1).sort(dim=1, descending=True).values
        counted = ordered >= 0
        places = (ordered.clamp_min(0).view(torch.int32) >> _SHIFT) - _FIRST
        rank = torch.arange(weight.shape[1], device=weight.device)
        flat = ((groups[:, None] * slots + rank) * BINS + places.clamp(0, BINS - 1))[counted]
        size = len(GROUPS) * slots * BINS
        self.counts[block] += torch.bincount(flat, minlength=size).view(len(GROUPS), slots, BINS).cpu()
        self._below = None

    def skipped(self, scales: Tensor, tau: Sequence[float], protected: Sequence[int]) -> Tensor:
        """
        How many pairs a threshold skips, by the rule of `skip_below_threshold`.

        Args:
            scales (`torch.Tensor` of shape `(blocks, groups)`): scale of each block for each group.
            tau (`Sequence[float]`): threshold of each group.
            protected (`Sequence[int]`): how many of a token's heaviest experts are never skipped, by group.

        Returns:
            `torch.DoubleTensor` of shape `(groups,)`: pairs; a fraction of a bin counts as that fraction.
        """
        if self._below is None:
            zero = self.counts.new_zeros((*self.counts.shape[:-1], 1))
            self._below = torch.cat([zero, self.counts.cumsum(-1)], dim=-1).double()
        blocks, groups, slots = self._below.shape[:3]
        places = torch.tensor(
            [[_place(tau[group], float(scales[block, group])) for group in range(groups)] for block in range(blocks)],
            dtype=torch.float64,
        )
        low = places.floor().clamp(0, BINS - 1).long()[..., None, None].expand(blocks, groups, slots, 1)
        first, after = (self._below.gather(-1, index).squeeze(-1) for index in (low, low + 1))
        below = first + (after - first) * (places[..., None] - low.squeeze(-1))
        rank = torch.arange(slots)
        free = rank >= torch.tensor(protected)[:, None]  # (groups, slots)
        return (below * free).sum(dim=(0, 2))

    def rate(self, scales: Tensor, tau: Sequence[float], protected: Sequence[int]) -> float:
        """The same as a fraction of all pairs."""
        return float(self.skipped(scales, tau, protected).sum()) / max(1, self.pairs)

    def factor_for_rate(
        self, scales: Tensor, direction: Sequence[float], protected: Sequence[int], target: float
    ) -> float:
        """
        The factor that `direction` (a threshold of each group) is multiplied with to skip a fraction of all pairs.

        Raises:
            ValueError: when nothing that `direction` names can be skipped that often.
        """
        most = self.rate(scales, [math.inf if tau > 0 else 0.0 for tau in direction], protected)
        if target > most:
            raise ValueError(f"at most {most:.4f} of the pairs can be skipped, wanted are {target:.4f}")
        low, high = -60.0, 60.0  # powers of two
        for _ in range(60):
            middle = (low + high) / 2
            if self.rate(scales, [tau * 2.0**middle for tau in direction], protected) < target:
                low = middle
            else:
                high = middle
        return 2.0**high


def _place(tau: float, scale: float) -> float:
    """Where the weight `tau / scale` lies on the axis of bins: all whole bins left of it are below the threshold."""
    if tau <= 0:
        return 0.0
    edge = math.inf if scale <= 0 or math.isinf(tau) else tau / scale
    if edge > 1.0:
        return float(BINS)
    if edge < LOWEST:
        return 0.0
    return _bits(edge) / (1 << _SHIFT) - _FIRST


__all__ = ["BINS", "WeightHistogram"]
