"""What the figures of `moemb analyze` are drawn from: one pass at full compute, and one for each compute budget.

Sums do not grow with the data but for a few numbers per item; they are kept as in a calibration, so that a pass that
was stopped goes on.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modeling_moemb.packing_moemb import IMAGE, VIDEO
from modeling_moemb.pruning_moemb import attention_weights

from .calibration_data import CalibrationItem
from .calibration_passes import CalibrationInputs, before_each_block, run_as_encoding, stream_items


# Kinds of tokens; delimiters are what encloses images and frames.
TYPES = ("text", "delimiter", "image", "video", "emb")
# Whose attention or strength is shared out among the kinds of tokens.
SOURCES = ("tokens", "beta", "received", "emb row")
# Rankings of an item's visual tokens that are compared.
PAIRS = (("beta", "emb row"), ("beta", "received"), ("received", "emb row"))
BETA_BINS = 512
# A rank correlation of fewer tokens says nothing.
LEAST_TOKENS = 6


@dataclass
class Analysis:
    """
    Sums over items at full compute.

    Args:
        load (`torch.LongTensor` of shape `(blocks, 3, experts)`): pairs by block, modality and expert.
        beta (`torch.LongTensor` of shape `(linear blocks, types, BETA_BINS)`): tokens by their beta, mean over heads.
        focus (`torch.DoubleTensor` of shape `(attention blocks, sources, types)`): sum over items of the share that
            falls to each kind of token.
        items (`int`): items.
        correlation (`torch.DoubleTensor` of shape `(items, attention blocks, pairs)`): Spearman's rank correlation
            over an item's visual tokens; NaN where an item has too few. Beta is the mean of the linear blocks before.
        overlap (`torch.DoubleTensor`, same shape): the part that the better halves have in common; 0.5 by chance.
        by_block (`torch.DoubleTensor` of shape `(items, linear blocks, 2)`): correlation of one block's beta with the
            `<emb>` row and the attention received in the next attention block; NaN if none follows.
    """

    load: Tensor
    beta: Tensor
    focus: Tensor
    items: int
    correlation: Tensor
    overlap: Tensor
    by_block: Tensor


def token_types(input_ids: Tensor, modality: Tensor, pooled: Tensor, delimiters: Sequence[int]) -> Tensor:
    """The kind (index into `TYPES`) of each token, `torch.LongTensor` of shape `(tokens,)`."""
    types = torch.zeros_like(modality)
    for token in delimiters:
        types[input_ids == token] = TYPES.index("delimiter")
    types[modality == IMAGE] = TYPES.index("image")
    types[modality == VIDEO] = TYPES.index("video")
    types[pooled] = TYPES.index("emb")
    return types


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 0, equal values share the mean of theirs; fp64."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    return (first.double() + (counts - 1).double() / 2)[inverse]


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's rank correlation; NaN for fewer than `LEAST_TOKENS` values, or constant ones."""
    if len(first) < LEAST_TOKENS:
        return float("nan")
    a, b = (average_ranks(values) - (len(values) - 1) / 2 for values in (first, second))
    scale = float(a.square().sum() * b.square().sum()) ** 0.5
    return float((a * b).sum()) / scale if scale > 0 else float("nan")


def half_overlap(first: Tensor, second: Tensor) -> float:
    """The part of the better half by one score that is in the better half by the other; ties by index."""
    if len(first) < LEAST_TOKENS:
        return float("nan")
    count = -(-len(first) // 2)
    kept = [set(values.argsort(descending=True, stable=True)[:count].tolist()) for values in (first, second)]
    return len(kept[0] & kept[1]) / count


@dataclass
class TokenScores:
    """
    What a batch says of its packed tokens at full compute.

    Args:
        lengths (`list[int]`): tokens of each item.
        types (`torch.LongTensor` of shape `(tokens,)`): index into `TYPES`.
        beta (`dict[int, torch.FloatTensor]`): by linear block, `(tokens,)`, mean over heads.
        received (`dict[int, torch.FloatTensor]`): by attention block, `(tokens,)`: mean attention from the item's
            tokens, over heads.
        emb_row (`dict[int, torch.FloatTensor]`): by attention block, `(tokens,)`: attention of the pooled token.
        features (`dict[str, torch.Tensor]`): the model's inputs.
        output (`MoEMBOutput`): of the forward pass.
    """

    lengths: list[int]
    types: Tensor
    beta: dict[int, Tensor]
    received: dict[int, Tensor]
    emb_row: dict[int, Tensor]
    features: dict[str, Tensor]
    output: Any

    def beta_before(self, block: int) -> Tensor:
        """The score that tokens are pruned by: mean beta of the linear blocks before `block`."""
        return torch.stack([beta for number, beta in self.beta.items() if number < block]).mean(0)


@torch.inference_mode()
def score_tokens(inputs: CalibrationInputs, batch: Sequence[CalibrationItem]) -> TokenScores:
    """Runs a batch of one side at full compute and scores its tokens."""
    model, features = inputs.model, inputs.features(batch)
    seen: list[dict[str, Any]] = []
    with before_each_block(model, lambda _, arguments: seen.append(arguments)):
        output = model(**features, adaptive_compute={}, output_compute=True, output_beta=True, packed_hidden=True)
    packed, config = output.packed, model.config
    kinds = config.text_config.layer_types
    ids = features["input_ids"].reshape(-1)[packed.source]
    pooled = torch.zeros_like(packed.modality, dtype=torch.bool)
    pooled[packed.last_rows] = True
    delimiters = (config.vision_start_token_id, config.vision_end_token_id)
    linear = [block for block, kind in enumerate(kinds) if kind == "linear_attention"]
    beta = {
        block: padded.flatten(0, 1)[packed.source].float().mean(-1).cpu()
        for block, padded in zip(linear, output.beta, strict=True)
    }
    received, emb_row = {}, {}
    for block in (block for block, kind in enumerate(kinds) if kind == "full_attention"):
        received[block], emb_row[block] = _attention_scores(model.language_model.layers[block], seen[block])
    types = token_types(ids, packed.modality, pooled, delimiters).cpu()
    return TokenScores(list(packed.lengths), types, beta, received, emb_row, features, output)


def _attention_scores(layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Attention received, and the pooled tokens' own rows, both fp32 `(tokens,)` on the CPU."""
    lengths = arguments["packed"].lengths
    states = layer.input_layernorm(arguments["hidden_states"])
    received, emb_row = torch.zeros(2, states.shape[0], dtype=torch.float32, device=states.device)
    for _, keys, weights in attention_weights(layer.self_attn, states, arguments["position_embeddings"], lengths):
        mean = weights.mean(0)
        received[keys] += mean.sum(0)
        emb_row[keys] = mean[-1]  # the last queries of an item come last
    counts = torch.tensor(lengths, device=states.device)
    return (received / counts.repeat_interleave(counts)).cpu(), emb_row.cpu()


def measure_full(inputs: CalibrationInputs) -> Analysis:
    """One pass over the items at full compute."""
    text = inputs.model.config.text_config
    kinds, count = text.layer_types, len(inputs.items)
    linear, attention = (kinds.count(kind) for kind in ("linear_attention", "full_attention"))
    nan = float("nan")
    sums = {
        "load": torch.zeros(len(kinds), 3, text.num_experts, dtype=torch.long),
        "beta": torch.zeros(linear, len(TYPES), BETA_BINS, dtype=torch.long),
        "focus": torch.zeros(attention, len(SOURCES), len(TYPES), dtype=torch.float64),
        "correlation": torch.full((count, attention, len(PAIRS)), nan, dtype=torch.float64),
        "overlap": torch.full((count, attention, len(PAIRS)), nan, dtype=torch.float64),
        "by_block": torch.full((count, linear, 2), nan, dtype=torch.float64),
    }

    def add(batch: Sequence[CalibrationItem], done: int) -> None:
        scores = score_tokens(inputs, batch)
        sums["load"] += scores.output.compute.expert_load.cpu()
        for place, beta in enumerate(scores.beta.values()):
            bins = (beta * BETA_BINS).long().clamp(0, BETA_BINS - 1)
            flat = torch.bincount(scores.types * BETA_BINS + bins, minlength=len(TYPES) * BETA_BINS)
            sums["beta"][place] += flat.view(len(TYPES), BETA_BINS)
        start = 0
        for item, length in enumerate(scores.lengths):
            _add_item(sums, scores, slice(start, start + length), done + item)
            start += length

    stream_items(inputs, inputs.items, "analysis", {"types": TYPES}, sums, "Full compute", add)
    return Analysis(items=count, **sums)


def _add_item(sums: dict[str, Tensor], scores: TokenScores, rows: slice, item: int) -> None:
    types = scores.types[rows]
    visual = (types == TYPES.index("image")) | (types == TYPES.index("video"))
    attention = list(scores.received)
    for place, block in enumerate(attention):
        values = {"received": scores.received[block][rows], "emb row": scores.emb_row[block][rows]}
        before = any(number < block for number in scores.beta)
        if before:
            values["beta"] = scores.beta_before(block)[rows]
        values["tokens"] = torch.ones(len(types))
        for number, source in enumerate(SOURCES):
            if source in values:
                share = values[source].double() / values[source].double().sum()
                sums["focus"][place, number].index_add_(0, types, share)
        for number, (one, other) in enumerate(PAIRS):
            if one in values:
                pair = values[one][visual], values[other][visual]
                sums["correlation"][item, place, number] = rank_correlation(*pair)
                sums["overlap"][item, place, number] = half_overlap(*pair)
    for place, (block, beta) in enumerate(scores.beta.items()):
        following = next((number for number in attention if number > block), None)
        if following is not None:
            for number, target in enumerate((scores.emb_row, scores.received)):
                value = rank_correlation(beta[rows][visual], target[following][rows][visual])
                sums["by_block"][item, place, number] = value


@dataclass
class Firing:
    """What a budget executed, as encoding runs it: in the last block the pooled tokens alone reach the experts.

    Args:
        tokens (`torch.LongTensor` of shape `(blocks, 3)`): tokens that were alive, by modality.
        pairs (`torch.LongTensor` of shape `(blocks, 3)`): (token, expert) pairs that were run.
    """

    tokens: Tensor
    pairs: Tensor


@torch.inference_mode()
def measure_firing(inputs: CalibrationInputs, budget: Mapping[str, Any], label: str) -> Firing:
    """One pass over the items with a budget; read when it was made before."""
    sums = {name: torch.zeros(inputs.blocks, 3, dtype=torch.long) for name in ("tokens", "pairs")}

    def add(batch: Sequence[CalibrationItem], done: int) -> None:
        record = run_as_encoding(inputs.model, inputs.features(batch), budget).compute
        sums["tokens"] += record.tokens.cpu()
        sums["pairs"] += record.expert_pairs.cpu()

    about = {"firing of": dict(budget)}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    stream_items(inputs, inputs.items, f"firing-{name}", about, sums, label, add)
    return Firing(**sums)


def mean_and_interval(values: Tensor, samples: int = 1000, seed: int = 0) -> tuple[float, float, float, int]:
    """Mean over the items that have a value, 95 % bootstrap interval, and how many they are."""
    known = values[~values.isnan()].numpy()
    if not len(known):
        return float("nan"), float("nan"), float("nan"), 0
    draws = np.random.default_rng(seed).integers(0, len(known), (samples, len(known)))
    low, high = np.percentile(known[draws].mean(axis=1), [2.5, 97.5])
    return float(known.mean()), float(low), float(high), len(known)


__all__ = ["Analysis", "Firing", "TokenScores", "measure_firing", "measure_full", "score_tokens"]
