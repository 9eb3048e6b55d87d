"""Wider heads of Gated DeltaNet for the plain variant, filled up with zeros to what kernels of serving stacks take.

The function stays the same. Zero rows of the projections give zero queries, keys, values and gates; lengths of
queries and keys do not see them. Two scales change and are undone. Queries are multiplied by `1 / sqrt(key size)`, so
the mean square before the norm after the rule shrinks by `key size / new key size`, and the mean over more values by
`value size / new value size`: that norm's weight is multiplied by `sqrt(value size / new value size)`, and
`rms_norm_eps` by both ratios. The other norms share that epsilon; beside the mean squares that they see, a smaller
one changes nothing that can be measured.

Parameters: `transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeGatedDeltaNet`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .convert_safetensors import (
    ITEM_SIZE,
    PlannedTensor,
    Segment,
    StoredTensor,
    decode,
    encode,
    rows,
    whole,
)


HEAD_SIZE = 128  # of Qwen3.5's own checkpoints: what every kernel for them knows
_LAYER = ".linear_attn."


def needs_wider_heads(config: Any) -> bool:
    """Whether the heads of a `Qwen3_5MoeConfig` are smaller than kernels for Qwen3.5 take them."""
    text = config.text_config
    sizes = (text.linear_key_head_dim, text.linear_value_head_dim)
    return min(sizes) < HEAD_SIZE >= max(sizes)


def widened_config(config: Any) -> Any:
    """A copy of a configuration with heads of `HEAD_SIZE`."""
    settings, text = config.to_dict(), config.text_config
    ratio = text.linear_key_head_dim * text.linear_value_head_dim / HEAD_SIZE**2
    settings["text_config"] |= {
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
        "rms_norm_eps": text.rms_norm_eps * ratio,
    }
    return type(config).from_dict(settings)


def widen(tensors: Mapping[str, StoredTensor], config: Any) -> list[PlannedTensor]:
    """
    Plans the tensors of a model with wider heads.

    Args:
        tensors (`Mapping[str, StoredTensor]`): of the model as it is, by base-model keys.
        config (`Qwen3_5MoeConfig`): of the model as it is.

    Returns:
        `list[PlannedTensor]`: all tensors; those of Gated DeltaNet with zeros between their rows or columns.
    """
    text = config.text_config
    key_heads, value_heads = text.linear_num_key_heads, text.linear_num_value_heads
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    mixed = [key] * (2 * key_heads) + [value] * value_heads  # queries, keys, values
    planned = []
    for name, tensor in tensors.items():
        part = name.partition(_LAYER)[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            planned.append(_padded_rows(name, tensor, mixed))
        elif part == "in_proj_z.weight":
            planned.append(_padded_rows(name, tensor, [value] * value_heads))
        elif part == "out_proj.weight":
            planned.append(_padded_columns(name, tensor, [value] * value_heads))
        elif part == "norm.weight":
            planned.append(_norm(name, tensor))
        else:
            planned.append(PlannedTensor(name, tensor.dtype, tensor.shape, (whole(tensor),)))
    return planned


def _padded_rows(name: str, tensor: StoredTensor, heads: list[int]) -> PlannedTensor:
    """Zero rows after the rows of each head."""

    def segments() -> Iterator[Segment]:
        start = 0
        for size in heads:
            yield rows(tensor, start, start + size)
            yield _zeros((HEAD_SIZE - size) * tensor.row_bytes)
            start += size

    shape = (len(heads) * HEAD_SIZE, *tensor.shape[1:])
    return PlannedTensor(name, tensor.dtype, shape, tuple(segments()))


def _padded_columns(name: str, tensor: StoredTensor, heads: list[int]) -> PlannedTensor:
    """Zero columns after the columns of each head."""
    item = ITEM_SIZE[tensor.dtype]

    def segments() -> Iterator[Segment]:
        place = tensor.offset
        for _ in range(tensor.shape[0]):
            for size in heads:
                yield Segment(size * item, tensor.file, place)
                yield _zeros((HEAD_SIZE - size) * item)
                place += size * item

    return PlannedTensor(name, tensor.dtype, (tensor.shape[0], len(heads) * HEAD_SIZE), tuple(segments()))


def _norm(name: str, tensor: StoredTensor) -> PlannedTensor:
    """The weight of the norm over a head's values; those of the zeros multiply zeros."""
    size = tensor.shape[0]
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        weight = decode(file.read(tensor.num_bytes), tensor.dtype)
    data = encode(weight * math.sqrt(size / HEAD_SIZE), tensor.dtype)
    segments = (Segment(len(data), literal=data), _zeros((HEAD_SIZE - size) * ITEM_SIZE[tensor.dtype]))
    return PlannedTensor(name, tensor.dtype, (HEAD_SIZE,), segments)


def _zeros(num_bytes: int) -> Segment:
    return Segment(num_bytes, literal=bytes(num_bytes))


__all__ = ["HEAD_SIZE", "needs_wider_heads", "widen", "widened_config"]
