"""Packed execution: the decoder sees the tokens of all items in one row, without padding.

`pack_batch` drops the pads and computes the multimodal rotary positions of every item, vectorised over the batch;
`PackedTokens.compact` drops tokens later on (their original positions and order stay), `PackedTokens.replicate` lays
items out several times; `PackedTokens.unpack` scatters the rows back to a padded batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


TEXT, IMAGE, VIDEO = 0, 1, 2


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a batch in one row. Frozen: kernels cache by the identity of `cu_seqlens`.

    Args:
        cu_seqlens (`torch.IntTensor` of shape `(items + 1,)`): cumulative lengths; item `i` owns the rows
            `cu_seqlens[i]:cu_seqlens[i + 1]`.
        lengths (`list[int]`): the same lengths on the host, so that no layer has to synchronise with the device.
        position_ids (`torch.LongTensor` of shape `(3, tokens)`): temporal, height and width rotary positions.
        modality (`torch.LongTensor` of shape `(tokens,)`): 0 text, 1 image, 2 video.
        segment (`torch.LongTensor` of shape `(tokens,)`): the item each token belongs to.
        source (`torch.LongTensor` of shape `(tokens,)`): flat index of each token in the padded batch.
        prefix_of (`tuple[int, ...]`, *optional*): when items share prefixes, see [`shared_packing`]: the segments are
            then the prefixes and, after them, what each item has of its own; the prefix that each item continues, -1
            for none.
    """

    cu_seqlens: Tensor
    lengths: list[int]
    position_ids: Tensor
    modality: Tensor
    segment: Tensor
    source: Tensor
    prefix_of: tuple[int, ...] | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "PackedTokens":
        """The same packing on another device: a model spread over devices moves it along with the states."""
        if self.segment.device == torch.empty(0, device=device).device:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()})

    @property
    def num_tokens(self) -> int:
        return self.segment.shape[0]

    @property
    def num_items(self) -> int:
        return len(self.lengths) if self.prefix_of is None else len(self.prefix_of)

    @property
    def last_rows(self) -> Tensor:
        """`torch.LongTensor` of shape `(items,)`: the row of each item's last token, the pooled one."""
        return self.cu_seqlens[len(self.lengths) - self.num_items + 1 :].long() - 1

    def compact(self, keep: Tensor) -> tuple["PackedTokens", Tensor]:
        """Drop tokens: original rotary positions and order stay, lengths and `cu_seqlens` are new objects.

        Args:
            keep (`torch.BoolTensor` of shape `(tokens,)`): the survivors.

        Returns:
            The smaller `PackedTokens` and the indices (`torch.LongTensor`) of the survivors in this one.

        Raises:
            ValueError: if `keep` has the wrong shape or dtype, or an item would lose all its tokens.
        """
        if keep.shape != self.segment.shape or keep.dtype != torch.bool:
            raise ValueError(
                f"`keep` must be a bool tensor of shape {tuple(self.segment.shape)}, "
                f"got {keep.dtype} {tuple(keep.shape)}"
            )
        counts = torch.zeros(len(self.lengths), dtype=torch.long, device=keep.device)
        counts = counts.index_add(0, self.segment, keep.long())
        lengths = counts.tolist()  # the one synchronisation with the device
        if 0 in lengths:
            raise ValueError(f"item {lengths.index(0)} would lose all its tokens")
        index = torch.nonzero_static(keep, size=sum(lengths)).squeeze(1)
        return (
            replace(
                self,
                cu_seqlens=_cumulative(counts),
                lengths=lengths,
                position_ids=self.position_ids[:, index],
                modality=self.modality[index],
                segment=self.segment[index],
                source=self.source[index],
            ),
            index,
        )

    def replicate(self, copies: int | Sequence[int], size: int) -> tuple["PackedTokens", Tensor]:
        """Lay every item out several times, such as for rollouts that go on differently from here.

        Args:
            copies (`int` or `Sequence[int]`): copies of each item, or of every item; at least 1.
            size (`int`): entries of the padded batch, so that the copies of a token can be told apart: copy `g` has
                `source + g * size`.

        Returns:
            The larger `PackedTokens`, the copies of an item one after the other, and the indices
            (`torch.LongTensor`) of its rows in this one.

        Raises:
            ValueError: for a packing with shared prefixes, or a number of copies below 1.
        """
        if self.prefix_of is not None:
            raise ValueError("a packing with shared prefixes cannot be replicated; pass `share_prefixes=False`")
        counts = [copies] * self.num_items if isinstance(copies, int) else list(copies)
        if len(counts) != self.num_items or min(counts) < 1:
            raise ValueError(f"`copies` must be {self.num_items} numbers of at least 1, got {copies}")
        item = torch.arange(self.num_items).repeat_interleave(torch.tensor(counts))
        first = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        copy = torch.arange(len(item)) - first[item]
        lengths = torch.tensor(self.lengths)[item]
        ends = lengths.cumsum(0)
        starts = (torch.tensor(self.lengths).cumsum(0) - torch.tensor(self.lengths))[item]
        segment = torch.arange(len(item)).repeat_interleave(lengths)
        index = torch.arange(len(segment)) + (starts - ends + lengths)[segment]
        device = self.segment.device
        index, segment, copy = index.to(device), segment.to(device), copy.to(device)
        return (
            replace(
                self,
                cu_seqlens=_cumulative(lengths.to(device)),
                lengths=lengths.tolist(),
                position_ids=self.position_ids[:, index],
                modality=self.modality[index],
                segment=segment,
                source=self.source[index] + size * copy[segment],
            ),
            index,
        )

    def unpack(self, hidden_states: Tensor, batch_size: int, sequence_length: int) -> Tensor:
        """Scatter `(tokens, dim)` rows back to `(batch_size, sequence_length, dim)`; zero where no token is alive."""
        padded = hidden_states.new_zeros(batch_size * sequence_length, hidden_states.shape[-1])
        padded = padded.index_copy(0, self.source.to(hidden_states.device), hidden_states)
        return padded.view(batch_size, sequence_length, -1)


def _cumulative(counts: Tensor) -> Tensor:
    """A new `cu_seqlens` from the item lengths on the device."""
    cu_seqlens = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    cu_seqlens[1:] = counts.cumsum(0)
    return cu_seqlens


def pack_batch(
    modality: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    grids: dict[int, Tensor | None],
    spatial_merge_size: int,
    position_ids: Tensor | None = None,
) -> PackedTokens:
    """Pack a padded batch, or take an already flattened one.

    Args:
        modality (`torch.LongTensor` of shape `(batch, sequence)`): 0 text, 1 image, 2 video.
        attention_mask (`torch.Tensor` of shape `(batch, sequence)`, *optional*): 1 for tokens, 0 for pads on any side.
        cu_seqlens (`torch.IntTensor` of shape `(items + 1,)`, *optional*): item boundaries of a flattened batch of
            shape `(1, tokens)`; excludes `attention_mask`.
        grids (`dict[int, torch.LongTensor]`): per modality (1, 2) the `(count, 3)` patch grids, in batch order.
        spatial_merge_size (`int`): patches merged per side.
        position_ids (`torch.LongTensor` of shape `(batch, sequence)` or `(3 or 4, batch, sequence)`, *optional*):
            positions to use instead of the computed ones.

    Raises:
        ValueError: for 4-D masks, position ids that restart inside an item, empty items, and media tokens that do
            not match the grids.
    """
    if modality.dim() != 2 or modality.shape[0] == 0:
        raise ValueError(
            f"the inputs must have shape (batch, sequence) and hold at least one item, got {tuple(modality.shape)}"
        )
    batch_size, sequence_length = modality.shape
    if cu_seqlens is not None:
        cu_seqlens = torch.as_tensor(cu_seqlens, device=modality.device)
        counts = _check_cu_seqlens(cu_seqlens, attention_mask, batch_size, sequence_length)
        source = torch.arange(sequence_length, device=modality.device)
    else:
        counts, source = _check_attention_mask(attention_mask, modality)
    lengths = counts.tolist()
    if 0 in lengths:
        raise ValueError(f"item {lengths.index(0)} of the batch has no tokens (its attention mask is all zero)")
    segment = torch.arange(len(lengths), device=source.device).repeat_interleave(counts, output_size=source.shape[0])
    modality = modality.reshape(-1)[source]
    if position_ids is None:
        positions = mrope_positions(modality, segment, grids, spatial_merge_size)
    else:
        positions = _check_position_ids(position_ids, batch_size, sequence_length, source, segment)
    return PackedTokens(_cumulative(counts), lengths, positions, modality, segment, source)


def _check_attention_mask(attention_mask: Tensor | None, modality: Tensor) -> tuple[Tensor, Tensor]:
    batch_size, sequence_length = modality.shape
    if attention_mask is None:
        counts = torch.full((batch_size,), sequence_length, dtype=torch.long, device=modality.device)
        return counts, torch.arange(batch_size * sequence_length, device=modality.device)
    if attention_mask.dim() != 2:
        raise ValueError(
            f"`attention_mask` must have shape (batch, sequence), got {tuple(attention_mask.shape)}: the recurrent "
            "layers cannot honour a 4-D mask and would leak state between items; pass one row per item, or a "
            "flattened batch with `cu_seq_lens_q`"
        )
    if attention_mask.shape != modality.shape:
        raise ValueError(
            f"`attention_mask` has shape {tuple(attention_mask.shape)} but the inputs {tuple(modality.shape)}"
        )
    alive = attention_mask.bool()
    return alive.sum(dim=1), alive.reshape(-1).nonzero().squeeze(1)


def _check_cu_seqlens(
    cu_seqlens: Tensor, attention_mask: Tensor | None, batch_size: int, sequence_length: int
) -> Tensor:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"`cu_seq_lens_q` must be integers of shape (items + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if batch_size != 1:
        raise ValueError(f"a batch flattened by `cu_seq_lens_q` must have one row, got {batch_size}")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("`cu_seq_lens_q` describes a batch without padding; do not pass an attention mask with zeros")
    counts = cu_seqlens[1:].long() - cu_seqlens[:-1].long()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != sequence_length or bool((counts < 0).any()):
        raise ValueError(
            f"`cu_seq_lens_q` must rise from 0 to the number of tokens ({sequence_length}), got {cu_seqlens.tolist()}"
        )
    return counts


def _check_position_ids(
    position_ids: Tensor, batch_size: int, sequence_length: int, source: Tensor, segment: Tensor
) -> Tensor:
    shape = tuple(position_ids.shape)
    if position_ids.dim() == 2:
        position_ids = position_ids[None].expand(3, -1, -1)
    if (
        position_ids.dim() != 3
        or position_ids.shape[0] not in (3, 4)
        or position_ids.shape[1] not in (1, batch_size)
        or position_ids.shape[2] != sequence_length
    ):
        raise ValueError(
            "`position_ids` must have shape (batch, sequence), (3, batch, sequence) or (4, batch, sequence) with "
            f"batch {batch_size} and sequence {sequence_length}, got {shape}"
        )
    positions = position_ids[-3:].expand(3, batch_size, sequence_length).reshape(3, -1)[:, source]
    same_item = segment[1:] == segment[:-1]
    fallen = positions[0, 1:] < positions[0, :-1]
    repeated = (positions[:, 1:] == positions[:, :-1]).all(dim=0)  # a sequence of one token before another
    restarts = (fallen | repeated) & same_item
    if bool(restarts.any()):
        item = int(segment[1:][restarts][0])
        raise ValueError(
            f"`position_ids` of item {item} restart inside the item, as if several sequences were packed by position "
            "ids alone: the recurrent layers would leak state between them; pass `cu_seq_lens_q` instead"
        )
    return positions


def mrope_positions(
    modality: Tensor, segment: Tensor, grids: dict[int, Tensor | None], spatial_merge_size: int
) -> Tensor:
    """Interleaved multimodal rotary positions of packed tokens, as Qwen3.5 numbers them.

    Text advances all three axes by one per token. An image, or one temporal patch of a video, is laid out on its
    merged grid from the current position, and advances it by the longer side of that grid.

    Args:
        modality (`torch.LongTensor` of shape `(tokens,)`): 0 text, 1 image, 2 video.
        segment (`torch.LongTensor` of shape `(tokens,)`): item of each token.
        grids (`dict[int, torch.LongTensor]`): per modality the `(count, 3)` patch grids in order of appearance.
        spatial_merge_size (`int`): patches merged per side.

    Returns:
        `torch.LongTensor` of shape `(3, tokens)`.

    Raises:
        ValueError: if the runs of media tokens do not match the grids in number or size.
    """
    device = modality.device
    tokens = modality.shape[0]
    new_run = torch.ones(tokens, dtype=torch.bool, device=device)
    new_run[1:] = (modality[1:] != modality[:-1]) | (segment[1:] != segment[:-1])
    run_start = new_run.nonzero().squeeze(1)
    run_of = new_run.cumsum(0) - 1
    run_length = torch.diff(run_start, append=torch.tensor([tokens], device=device))
    run_modality, run_segment = modality[run_start], segment[run_start]

    # height and width of each run on the merged grid; text runs behave as a row of their own length
    height, width = torch.ones_like(run_length), run_length.clone()
    for kind in (IMAGE, VIDEO):
        _fill_grid_runs(
            kind, run_modality == kind, run_length, run_segment, grids.get(kind), spatial_merge_size, height, width
        )
    is_text = run_modality == TEXT
    advance = torch.where(is_text, run_length, torch.maximum(height, width))
    before = advance.cumsum(0) - advance
    first_run = torch.ones_like(is_text)
    first_run[1:] = run_segment[1:] != run_segment[:-1]
    item_base = before[first_run][run_segment]  # every item owns at least one run, so runs index items
    base = (before - item_base)[run_of]

    within = torch.arange(tokens, device=device) - run_start[run_of]
    token_width, token_area = width[run_of], (height * width)[run_of]
    text = is_text[run_of]
    temporal = torch.where(text, within, within // token_area)
    rows = torch.where(text, within, within % token_area // token_width)
    columns = torch.where(text, within, within % token_width)
    return torch.stack([temporal, rows, columns]) + base


def _fill_grid_runs(
    kind: int,
    is_kind: Tensor,
    run_length: Tensor,
    run_segment: Tensor,
    grid: Tensor | None,
    merge: int,
    height: Tensor,
    width: Tensor,
) -> None:
    name = "image" if kind == IMAGE else "video"
    count = int(is_kind.sum())
    if grid is None:
        if count:
            item = int(run_segment[is_kind][0])
            raise ValueError(f"item {item} has {name} tokens but no `{name}_grid_thw` was passed")
        return
    grid = grid.to(run_length)
    if kind == VIDEO:  # timestamps stand between the temporal patches of a video: each is a run of its own
        grid = grid.repeat_interleave(grid[:, 0], dim=0)
        grid = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], dim=1)
    if count != grid.shape[0]:
        raise ValueError(
            f"the inputs hold {count} runs of {name} tokens but `{name}_grid_thw` describes {grid.shape[0]}; "
            "each must stand between its own vision start and end tokens"
        )
    expected = grid[:, 0] * (grid[:, 1] // merge) * (grid[:, 2] // merge)
    wrong = (expected != run_length[is_kind]).nonzero()
    if wrong.numel():
        first = int(wrong[0])
        raise ValueError(
            f"{name} {first} (item {int(run_segment[is_kind][first])}) has {int(run_length[is_kind][first])} tokens "
            f"but its grid {grid[first].tolist()} gives {int(expected[first])}"
        )
    height[is_kind] = grid[:, 1] // merge
    width[is_kind] = grid[:, 2] // merge


__all__ = ["IMAGE", "TEXT", "VIDEO", "PackedTokens", "mrope_positions", "pack_batch"]
