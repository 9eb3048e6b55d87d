"""Items of a GRPO run as model inputs, one by one, so that any of them can be packed together."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


SIDES = ("query", "document")
GRIDS = ("image_grid_thw", "video_grid_thw")


@dataclass(frozen=True)
class EncodedItem:
    """Model inputs of one item.

    Args:
        inputs (`dict[str, torch.Tensor]`): of a batch of one, without a mask.
        key (`int`): 63 bits of a hash of the inputs: the same content has the same key.
    """

    inputs: dict[str, Tensor]
    key: int

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].shape[1]

    @property
    def grids(self) -> list[tuple[int, int, int]]:
        return [tuple(row) for name in GRIDS if name in self.inputs for row in self.inputs[name].tolist()]


def encode_item(processor, item: Any, side: str, number: int = 0, instruction: str | None = None) -> EncodedItem:
    """Run the processor on one item.

    Args:
        processor (`MoEMBProcessor`): the model's.
        item: as the processor takes it.
        side (`str`): `"query"` or `"document"`: which of the recorded prompts it gets.
        number (`int`): what the item is called in errors.
        instruction (`str`, *optional*): stands instead of the recorded prompt.
    """
    if instruction is not None:
        given = {"instruction": instruction}
    else:
        given = {"prompt_name": side if side in processor.embedding["prompts"] else None}
    inputs = dict(processor([item], indices=[number], **given))
    inputs.pop("attention_mask")
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(inputs):
        digest.update(name.encode() + repr(tuple(inputs[name].shape)).encode())
        digest.update(inputs[name].contiguous().numpy().tobytes())
    return EncodedItem(inputs, int.from_bytes(digest.digest()) >> 1)


def join_items(items: Sequence[EncodedItem], device: torch.device) -> dict[str, Tensor]:
    """One flattened batch, without padding, of several items."""
    joined = {}
    for name in dict.fromkeys(name for item in items for name in item.inputs):
        parts = [item.inputs[name] for item in items if name in item.inputs]
        of_tokens = len(parts) == len(items) and all(
            part.shape[:2] == (1, item.tokens) for part, item in zip(parts, items)
        )
        joined[name] = torch.cat(parts, dim=1 if of_tokens else 0).to(device)
    lengths = torch.tensor([0, *(item.tokens for item in items)])
    joined["cu_seq_lens_q"] = lengths.cumsum(0).to(device, torch.int32)
    return joined


def describe_item(item: Any) -> str:
    """An item in a line, for the table of completions."""
    parts = item.items() if isinstance(item, dict) else enumerate(item if isinstance(item, (list, tuple)) else [item])
    words = [value if isinstance(value, str) else f"<{type(value).__name__}>" for _, value in parts]
    return " ".join(words)[:200]
