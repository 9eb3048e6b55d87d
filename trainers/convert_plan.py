"""What a converted checkpoint consists of: which bytes of the stock one make each tensor, and in which shard it goes.

Departures from the stock checkpoint: `lm_head.*` and `mtp.*` are left out (an embedder never reads them), keys lose
their `model.` (a MoEMB repository) or keep it (`plain`), experts stored one by one are packed (not when `plain`), and
the embedding table receives the `<emb>` row.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from .convert_safetensors import (
    ConversionError,
    PlannedTensor,
    Segment,
    StoredTensor,
    encode,
    mean_row,
    rows,
    some,
    whole,
)


EMBEDDING_KEY = "language_model.embed_tokens.weight"
EMB_NOISE = 1e-3
MAX_SHARD_BYTES = 4 * 2**30

_UNUSED = re.compile(r"^(lm_head|mtp|model\.mtp)\.")
_STOCK_PREFIX = re.compile(r"^model\.(?=language_model\.|visual\.)")
_EXPERT = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def base_keys(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename the keys of a stock checkpoint to those of its base model and drop what an embedder does not use.

    Raises:
        ConversionError: a key that belongs to no part of a Qwen3.5-MoE model.
    """
    renamed = {_STOCK_PREFIX.sub("", key): tensor for key, tensor in stored.items() if not _UNUSED.match(key)}
    strange = [key for key in renamed if not key.startswith(("language_model.", "visual."))]
    if strange:
        raise ConversionError(
            f"{len(strange)} keys belong to no part of a Qwen3.5-MoE model: {some(sorted(strange))}; the converter "
            "wants a Qwen3_5MoeForConditionalGeneration checkpoint as transformers saves it"
        )
    return renamed


def pack_experts(tensors: Mapping[str, StoredTensor]) -> list[PlannedTensor]:
    """Plan base-model tensors, with experts that are stored one by one packed into stacks.

    Per expert, `gate_proj` over `up_proj` (each `(intermediate, hidden)`) make `gate_up_proj`, `(experts, 2 *
    intermediate, hidden)`, and `down_proj` stacks to `(experts, hidden, intermediate)`: the layout of
    transformers' `Qwen3_5MoeExperts`. Row-major stacks are plain concatenations of the experts' bytes.

    Raises:
        ConversionError: an expert without one of its projections, or projections that differ in shape or type.
    """
    planned, experts = [], defaultdict(dict)
    for key, tensor in tensors.items():
        match = _EXPERT.match(key)
        if match:
            experts[match[1]][int(match[2]), match[3]] = tensor
        else:
            planned.append(PlannedTensor(key, tensor.dtype, tensor.shape, (whole(tensor),)))
    for prefix, parts in experts.items():
        count = max(index for index, _ in parts) + 1
        gate_up = [(i, name) for i in range(count) for name in ("gate_proj", "up_proj")]
        down = [(i, "down_proj") for i in range(count)]
        for name, order in (("gate_up_proj", gate_up), ("down_proj", down)):
            planned.append(_stack(f"{prefix}.{name}", prefix, order, parts, count))
    return planned


def _stack(key: str, prefix: str, order, parts, count: int) -> PlannedTensor:
    missing = [f"{prefix}.{i}.{name}.weight" for i, name in order if (i, name) not in parts]
    if missing:
        raise ConversionError(f"{len(missing)} keys are missing: {some(missing)}")
    first = parts[order[0]]
    if len(first.shape) != 2:
        raise ConversionError(f"'{prefix}.{order[0][0]}.{order[0][1]}.weight' is {first.shape}, not a matrix")
    for i, name in order:
        if (parts[i, name].shape, parts[i, name].dtype) != (first.shape, first.dtype):
            raise ConversionError(
                f"'{prefix}.{i}.{name}.weight' is {parts[i, name].shape} {parts[i, name].dtype}, but the experts "
                f"beside it are {first.shape} {first.dtype}"
            )
    shape = (count, len(order) // count * first.shape[0], *first.shape[1:])
    return PlannedTensor(key, first.dtype, shape, tuple(whole(parts[part]) for part in order))


def with_emb_row(
    planned: list[PlannedTensor], table: StoredTensor, emb_token_id: int, used_rows: int, seed: int
) -> list[PlannedTensor]:
    """Give the embedding table its `<emb>` row: the mean of the rows in use plus normal noise of 1e-3.

    Args:
        planned (`list[PlannedTensor]`): tensors of the new checkpoint.
        table (`StoredTensor`): the stock embedding table, `(vocabulary, hidden)`.
        emb_token_id (`int`): the row. Stock tables are padded beyond the tokenizer; a row of the padding is replaced
            in place, a row past the end is appended (rows between, if any, get the same values).
        used_rows (`int`): rows that the stock tokenizer can produce; the padding stays out of the mean.
        seed (`int`): seed of the noise.
    """
    mean = mean_row(table, min(used_rows, table.shape[0]))
    noise = np.random.default_rng(seed).standard_normal(table.shape[1]) * EMB_NOISE
    row = encode(mean + noise, table.dtype)
    size = table.shape[0]
    if emb_token_id < size:
        segments = (rows(table, 0, emb_token_id), Segment(len(row), literal=row), rows(table, emb_token_id + 1, size))
    else:
        added = emb_token_id + 1 - size
        segments = (whole(table), Segment(len(row) * added, literal=row * added))
    shape = (max(size, emb_token_id + 1), table.shape[1])
    new = PlannedTensor(EMBEDDING_KEY, table.dtype, shape, tuple(s for s in segments if s.num_bytes))
    return [new if tensor.key == EMBEDDING_KEY else tensor for tensor in planned]


def check_against_model(planned: list[PlannedTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare planned tensors with the keys and shapes of the model that will load them.

    Raises:
        ConversionError: missing keys, keys the model does not have, or wrong shapes, each named.
    """
    shapes = {tensor.key: tensor.shape for tensor in planned}
    missing = sorted(set(expected) - set(shapes))
    if missing:
        raise ConversionError(
            f"the checkpoint lacks {len(missing)} keys that its config.json asks for: {some(missing)}"
        )
    extra = sorted(set(shapes) - set(expected))
    if extra:
        raise ConversionError(
            f"the checkpoint has {len(extra)} keys that its config.json has no place for: {some(extra)}"
        )
    wrong = [f"{k} is {shapes[k]}, not {tuple(expected[k])}" for k in expected if shapes[k] != tuple(expected[k])]
    if wrong:
        raise ConversionError(f"{len(wrong)} tensors do not fit config.json: {some(wrong)}")


def split_into_shards(
    planned: list[PlannedTensor], max_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[PlannedTensor]]:
    """Group tensors, in natural key order, into files of at most `max_bytes` (a larger tensor has its own).

    Returns:
        `dict[str, list[PlannedTensor]]`: file name -> tensors; `model.safetensors` when one file is enough.
    """
    groups, size = [[]], 0
    for tensor in sorted(planned, key=_order):
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _order(tensor: PlannedTensor) -> list[tuple[int, int, str]]:
    """Layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in tensor.key.split(".")]
