"""Batches of contrastive training: the distinct items of the rows, prepared once, and cut into chunks for the model.

Items are prepared by the model's processor, the instruction of each side included. Equal items (class names, documents
that several queries share) are kept once. Pixels are kept as the bytes they came from, a quarter of the size.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from modeling_moemb.items_moemb import ItemError

from .contrastive_data import PairDataset, Row, RowError


MEDIA = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))


@dataclass(frozen=True)
class Normalisation:
    """
    How pixels became patch values, to go back and forth without a change of one bit.

    Args:
        offset, divisor (`torch.FloatTensor` of shape `(channels, 1)`): subtracted from a pixel, and divided by.
    """

    offset: Tensor
    divisor: Tensor

    @classmethod
    def of(cls, processor: Any) -> "Normalisation":
        """The one of an image or video processor of Qwen's kind."""
        scale = 1.0 / processor.rescale_factor if processor.do_rescale else 1.0
        mean = processor.image_mean if processor.do_normalize else (0.0, 0.0, 0.0)
        std = processor.image_std if processor.do_normalize else (1.0, 1.0, 1.0)
        return cls(torch.tensor(mean)[:, None] * scale, torch.tensor(std)[:, None] * scale)

    def pixels(self, values: Tensor) -> Tensor:
        """uint8 pixels of patch values float32 `[patches, values]`, or the values if they are no such pixels."""
        channels = values.unflatten(1, (len(self.offset), -1))
        pixels = (channels * self.divisor + self.offset).round_().clamp_(0, 255).to(torch.uint8).flatten(1)
        return pixels if torch.equal(self.values(pixels), values) else values

    def values(self, pixels: Tensor) -> Tensor:
        """The patch values, float32, of what [`Normalisation.pixels`] gave."""
        if pixels.dtype != torch.uint8:
            return pixels
        channels = pixels.float().unflatten(1, (len(self.offset), -1))
        return channels.sub_(self.offset.to(pixels.device)).div_(self.divisor.to(pixels.device)).flatten(1)


@dataclass
class EncodedItem:
    """
    One item, ready for the model.

    Args:
        ids (`torch.IntTensor` of shape `(tokens,)`): Token ids.
        media (`tuple`): For images and videos, `None` or (patches `[patches, values]`, grids int64 `[count, 3]`).
        key (`int`): Hash of all of it; equal items have equal keys.
        task (`int`): Number of the data set it came from first.
        instructed (`torch.BoolTensor` of shape `(tokens,)`, *optional*):
            Which tokens are the instruction, for models whose routers are conditioned on it.
    """

    ids: Tensor
    media: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]
    key: int
    task: int
    instructed: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass
class ContrastiveBatch:
    """
    The rows of one process.

    Args:
        items (`list[EncodedItem]`): Their distinct items.
        query, positive (`torch.LongTensor` of shape `(rows,)`): Place of each row's query and positive in `items`.
        negatives (`torch.LongTensor` of shape `(negatives,)`): Places of all negatives.
        group (`torch.LongTensor` of shape `(rows,)`): Hash of each row's `key`; 0 for none.
        dataset (`torch.LongTensor` of shape `(rows,)`): Number of each row's data set.
        numbers (`list[int]`): Number of each row in its data set.
        router_task (`torch.LongTensor` of shape `(items,)`, *optional*):
            The task that the routers are told of each item, for models that are conditioned on it.
    """

    items: list[EncodedItem]
    query: Tensor
    positive: Tensor
    negatives: Tensor
    group: Tensor
    dataset: Tensor
    numbers: list[int]
    router_task: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """`torch.LongTensor` of shape `(items,)`: the items' keys."""
        return torch.tensor([item.key for item in self.items])


class RowEncoder:
    """
    Collator: rows to a batch.

    Args:
        processor (`MoEMBProcessor`): The model's processor.
        datasets (`Sequence[PairDataset]`): The data sets that rows come from, for their instructions.
        max_length (`int`, *optional*): Most tokens of an item; by default the processor's.
    """

    def __init__(self, processor: Any, datasets: Sequence[PairDataset], max_length: int | None = None):
        self.processor, self.max_length = processor, max_length
        prompts = processor.embedding["prompts"]
        given = [(dataset.settings.query_instruction, dataset.settings.document_instruction) for dataset in datasets]
        self.instructions = [
            (prompts.get("query", "") if q is None else q, prompts.get("document", "") if d is None else d)
            for q, d in given
        ]
        self.normalisations = [Normalisation.of(p) for p in (processor.image_processor, processor.video_processor)]

    def __call__(self, rows: Sequence[Row]) -> dict[str, ContrastiveBatch]:
        """
        Returns:
            `dict`: the batch under the key `batch`, for `Trainer` wants a mapping.

        Raises:
            RowError: an item cannot be embedded; the text names its data set, row and column.
        """
        sides = [(row, "query", row.query) for row in rows]
        sides += [(row, "positive", row.positive) for row in rows]
        sides += [(row, "negatives", item) for row in rows for item in row.negatives]
        encoded = self._encode(sides)
        places: dict[tuple[int, int], int] = {}
        index = torch.tensor([places.setdefault((item.key, item.task), len(places)) for item in encoded])
        first = {place: number for number, place in reversed(list(enumerate(index.tolist())))}
        count = len(rows)
        batch = ContrastiveBatch(
            items=[encoded[first[place]] for place in range(len(places))],
            query=index[:count],
            positive=index[count : 2 * count],
            negatives=index[2 * count :],
            group=torch.tensor([0 if row.key is None else _hash(row.key.encode()) for row in rows]),
            dataset=torch.tensor([row.dataset for row in rows]),
            numbers=[row.number for row in rows],
        )
        return {"batch": batch}

    def _encode(self, sides: Sequence[tuple[Row, str, Any]]) -> list[EncodedItem]:
        """One processor call per instruction."""
        by_instruction: dict[str, list[int]] = {}
        for place, (row, side, _) in enumerate(sides):
            instruction = self.instructions[row.dataset][0 if side == "query" else 1]
            by_instruction.setdefault(instruction, []).append(place)
        encoded: list[EncodedItem | None] = [None] * len(sides)
        for instruction, places in by_instruction.items():
            try:
                features = self.processor(
                    [sides[place][2] for place in places],
                    instruction=instruction,
                    max_length=self.max_length,
                )
            except ItemError as error:
                raise self._row_error(error, [sides[place] for place in places]) from error
            tasks = [sides[place][0].dataset for place in places]
            for place, item in zip(places, self._split(features, tasks), strict=True):
                encoded[place] = item
        return encoded

    @staticmethod
    def _row_error(error: ItemError, sides: Sequence[tuple[Row, str, Any]]) -> RowError:
        found = re.match(r"item (\d+): (.*)", str(error), re.DOTALL)
        if found is None:
            return RowError(str(error))
        row, side, _ = sides[int(found[1])]
        return RowError(f"data set '{row.source}', row {row.number} ({side}): {found[2]}")

    def _split(self, features: dict[str, Tensor], tasks: Sequence[int]) -> list[EncodedItem]:
        """The items of a padded batch."""
        media = [self._split_media(features, kind) for kind in range(len(MEDIA))]
        marked, items = "instruction_mask" in features, []
        for number, task in enumerate(tasks):
            alive = features["attention_mask"][number].bool()
            ids = features["input_ids"][number][alive].to(torch.int32)
            instructed = features["instruction_mask"][number][alive].bool() if marked else None
            own = tuple(kind[number] for kind in media)
            parts = [ids.numpy().tobytes()]
            parts += [part.numpy().tobytes() for one in own if one is not None for part in one]
            items.append(EncodedItem(ids, own, _hash(*parts), task, instructed))
        return items

    def _split_media(self, features: dict[str, Tensor], kind: int) -> list[tuple[Tensor, Tensor] | None]:
        """Patches and grids of each item, by where its media tokens end."""
        values_name, grid_name = MEDIA[kind]
        count = len(features["input_ids"])
        if values_name not in features:
            return [None] * count
        values, grids = features[values_name], features[grid_name]
        merged = self.processor.image_processor.merge_size**2
        patches = grids.prod(1)
        tokens = (features["mm_token_type_ids"] == kind + 1).sum(1)
        upto = torch.searchsorted((patches // merged).cumsum(0), tokens.cumsum(0), right=True).tolist()
        bounds = [0, *accumulate(patches.tolist())]
        split, start = [], 0
        for end in upto:
            own = values[bounds[start] : bounds[end]]
            # a copy: a view would keep the patches of the whole batch alive
            split.append((self.normalisations[kind].pixels(own).clone(), grids[start:end]) if end > start else None)
            start = end
        return split


def _hash(*parts: bytes) -> int:
    """A positive 63-bit number; 0 is left for none."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def content_hash(item: Any) -> str:
    """A short name of an item that has not been prepared: equal items have equal names."""
    return format(_hash(repr(_plain(item)).encode()), "x")


def _plain(item: Any) -> Any:
    """Pictures as their pixels, for their text names a place in memory."""
    if isinstance(item, Mapping):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(value) for value in item]
    if isinstance(item, (Image.Image, np.ndarray)):
        pixels = np.asarray(item)
        return pixels.shape, pixels.tobytes()
    return item


def split_into_chunks(tokens: Sequence[int], most: int, count: int | None = None) -> list[range]:
    """
    Consecutive items whose tokens add up to at most `most` (an item with more stands alone).

    Args:
        tokens (`Sequence[int]`): Tokens of each item.
        most (`int`): Tokens of a chunk.
        count (`int`, *optional*): Split further until there are so many chunks, if there are as many items.

    Returns:
        `list[range]`: the items of each chunk.
    """
    bounds, held = [0], 0
    for item, number in enumerate(tokens):
        if held and held + number > most:
            bounds.append(item)
            held = 0
        held += number
    chunks = [range(a, b) for a, b in zip(bounds, [*bounds[1:], len(tokens)])]
    while count is not None and len(chunks) < min(count, len(tokens)):
        longest = max(range(len(chunks)), key=lambda number: len(chunks[number]))
        whole = chunks[longest]
        middle = whole.start + len(whole) // 2
        chunks[longest : longest + 1] = [range(whole.start, middle), range(middle, whole.stop)]
    return chunks


def model_inputs(
    items: Sequence[EncodedItem], normalisations: Sequence[Normalisation], device: torch.device
) -> dict[str, Tensor]:
    """
    The packed inputs of some items, on a device.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` int64 `[1, tokens]`, `cu_seq_lens_q` int32 `[items + 1]`, and where
        there are such items `pixel_values` float32 with `image_grid_thw`, `pixel_values_videos` with `video_grid_thw`,
        and `instruction_mask` int64 `[1, tokens]`.
    """
    bounds = np.cumsum([0, *(item.tokens for item in items)], dtype=np.int32)
    inputs = {
        "input_ids": torch.cat([item.ids for item in items]).to(device).long()[None],
        "cu_seq_lens_q": torch.from_numpy(bounds).to(device),
    }
    if items[0].instructed is not None:
        inputs["instruction_mask"] = torch.cat([item.instructed for item in items]).to(device).long()[None]
    for kind, (values_name, grid_name) in enumerate(MEDIA):
        own = [item.media[kind] for item in items if item.media[kind] is not None]
        if own:
            whole = [normalisations[kind].values(values.to(device)) for values, _ in own]
            inputs[values_name] = torch.cat(whole)
            inputs[grid_name] = torch.cat([grids for _, grids in own]).to(device)
    return inputs
