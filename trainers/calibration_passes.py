"""The forward passes of a calibration: what each block is worth, and what a budget skips and costs.

Both passes run as encoding does, with the last block computing the pooled tokens alone, add up sums that do not grow
with the data, write them every `SAVE_SECONDS` seconds, and go on where an earlier run was stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from modeling_moemb.adaptive_moemb import BlockDial
from modeling_moemb.packing_moemb import PackedTokens

from .calibration_data import CalibrationItem, batches_of_one_side
from .calibration_weights import WeightHistogram
from .errors import MoEMBError
from .files import whole_file
from .saliency import GROUPS, POOLED


SAVE_SECONDS = 30.0
# Whose routed experts are bypassed: everybody's, or one modality's. `<emb>` is routed as text.
BYPASSED = ("all", "text", "image", "video")
_FORMAT = "moemb-calibration-1"
_LAYER_ARGUMENTS = ("hidden_states", "packed", "layout", "position_embeddings", "dial", "output_rows")


class CalibrationError(MoEMBError, ValueError):
    """A calibration that cannot be made. The message names the setting or file, its value and the remedy."""


@dataclass(frozen=True)
class CalibrationInputs:
    """What the passes run on.

    Args:
        model (`MoEMBModel`): the model.
        processor (`MoEMBProcessor`): its processor.
        items (`Sequence[CalibrationItem]`): the items, one side after the other.
        identity (`Mapping[str, str]`): hashes of model and data, kept with the sums.
        folder (`Path`): where the sums are kept.
        batch_size (`int`): items in one forward pass; no sum depends on it but by rounding.
        progress (`bool`): whether to show progress bars.
    """

    model: Any
    processor: Any
    items: Sequence[CalibrationItem]
    identity: Mapping[str, str]
    folder: Path
    batch_size: int = 32
    progress: bool = True

    @property
    def blocks(self) -> int:
        return self.model.config.text_config.num_hidden_layers

    @property
    def slots(self) -> int:
        return self.model.config.text_config.num_experts_per_tok

    def features(self, batch: Sequence[CalibrationItem]) -> dict[str, Tensor]:
        """The model's inputs for items of one side."""
        instruction = self.processor.embedding["prompts"].get(batch[0].side) or ""
        device = next(self.model.parameters()).device
        features = self.processor([item.value for item in batch], instruction=instruction)
        return {name: value.to(device) for name, value in features.items()}


def row_groups(packed: PackedTokens, output_rows: Tensor | None = None) -> Tensor:
    """The group (index into `GROUPS`) of each row that a block's experts see, `torch.LongTensor` `(rows,)`."""
    groups = packed.modality.clone()
    groups[packed.last_rows] = POOLED
    return groups if output_rows is None else groups[output_rows]


@contextmanager
def before_each_block(model: Any, see: Callable[[int, dict[str, Any]], None]) -> Iterator[None]:
    """Calls `see(block, arguments)` before each decoder block while the context lasts; the arguments by name."""

    def hook(number: int) -> Callable:
        return lambda _, args, kwargs: see(number, dict(zip(_LAYER_ARGUMENTS, args)) | kwargs)

    handles = [
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)
        for number, layer in enumerate(model.language_model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def vector_distance(first: Tensor, second: Tensor) -> Tensor:
    """`1 - cosine` of each row, fp64; from the difference, which keeps digits where the cosine is nearly 1."""
    first, second = (torch.nn.functional.normalize(rows.double(), dim=-1) for rows in (first, second))
    return (first - second).square().sum(-1) / 2


@dataclass
class BlockMeasurement:
    """What the blocks are worth at full compute.

    Args:
        histogram ([`WeightHistogram`]): routing weights.
        distance (`torch.DoubleTensor` of shape `(bypassed, blocks)`): sum over items of the distance that the vector
            moves when a block's routed output is left out for all tokens, or those of one modality; see `BYPASSED`.
        present (`torch.LongTensor` of shape `(bypassed,)`): items that have such tokens.
        vectors (`torch.FloatTensor` of shape `(items, hidden)`): at full compute, not normalised.
    """

    histogram: WeightHistogram
    distance: Tensor
    present: Tensor
    vectors: Tensor

    def scales(self, by_modality: bool) -> list[float] | dict[str, list[float]]:
        """
        Layer scales: each block's share of the distance. A modality that is not in the data has the common scales.

        Raises:
            CalibrationError: no routed output moves any vector.
        """
        if not bool(self.distance[0].sum() > 0):
            raise CalibrationError(
                "leaving out routed experts moves no vector in any block: the experts of this model return zeros, or "
                "its layers are broken"
            )
        shares = []
        for row in self.distance:
            row = row if bool(row.sum() > 0) else self.distance[0]
            shares.append([float(value) for value in row / row.sum()])
        return dict(zip(BYPASSED[1:], shares[1:], strict=True)) if by_modality else shares[0]


@torch.inference_mode()
def measure_blocks(inputs: CalibrationInputs, by_modality: bool) -> BlockMeasurement:
    """
    One pass over the items at full compute. From its states before each block the rest of the model is run again with
    that block's routed output left out: half the work of a forward pass for each block, the vision tower's not at all.

    Args:
        inputs ([`CalibrationInputs`]): model and items.
        by_modality (`bool`): also leave it out for the tokens of one modality at a time.

    Raises:
        CalibrationError: no items, or sums of something else.
    """
    if not inputs.items:
        raise CalibrationError("there are no calibration items: name some in calibration_data")
    kinds = BYPASSED if by_modality else BYPASSED[:1]
    width = inputs.model.config.text_config.hidden_size
    sums = {
        "counts": WeightHistogram(inputs.blocks, inputs.slots).counts,
        "distance": torch.zeros(len(kinds), inputs.blocks, dtype=torch.float64),
        "present": torch.zeros(len(kinds), dtype=torch.long),
        "vectors": torch.zeros(len(inputs.items), width),
    }
    name = "blocks-by-modality" if by_modality else "blocks"

    def add(batch: Sequence[CalibrationItem], done: int) -> None:
        histogram = WeightHistogram(inputs.blocks, inputs.slots, sums["counts"])
        seen: list[dict[str, Any]] = []

        def see(block: int, arguments: dict[str, Any]) -> None:
            seen.append(arguments)
            _record_weights(histogram, block, arguments, arguments["dial"].policies)

        features = inputs.features(batch)
        with before_each_block(inputs.model, see):
            vectors = run_as_encoding(inputs.model, features, {}).pooler_output
        sums["vectors"][done : done + len(batch)] = vectors.float().cpu()
        for kind, bypassed in enumerate(kinds):
            types = features["mm_token_type_ids"]
            present = (types == BYPASSED.index(bypassed) - 1).any(dim=1) if kind else torch.ones_like(types[:, 0] > 0)
            sums["present"][kind] += int(present.sum())
            sums["distance"][kind] += _distances(inputs.model, seen, vectors, bypassed, present)

    stream_items(inputs, inputs.items, name, {}, sums, "Measuring blocks", add)
    histogram = WeightHistogram(inputs.blocks, inputs.slots, sums["counts"])
    return BlockMeasurement(histogram, sums["distance"], sums["present"], sums["vectors"])


def run_as_encoding(model: Any, features: Mapping[str, Tensor], budget: Mapping[str, Any]) -> Any:
    """A forward pass as encoding makes it, with a record (which puts a dial before every block).

    No prefix is shared: every token of every item counts.
    """
    given = {"adaptive_compute": dict(budget), "pooled_only": True, "output_compute": True, "share_prefixes": False}
    return model(**features, **given)


def _record_weights(histogram: WeightHistogram, block: int, arguments: dict[str, Any], policies: list) -> None:
    """Adds a policy that changes nothing and counts the weights that the ones after it will see."""
    groups = row_groups(arguments["packed"], arguments["output_rows"])

    def count(routing: Any) -> Any:
        histogram.add(block, groups.to(routing.weight.device), routing.weight, routing.skipped)
        return routing

    policies.append(count)


def _distances(model: Any, seen: list[dict[str, Any]], vectors: Tensor, bypassed: str, present: Tensor) -> Tensor:
    """How far the vectors move when one block after the other leaves its routed output out: sums, fp64 `(blocks,)`."""
    sums = torch.zeros(len(seen), dtype=torch.float64)
    for block, arguments in enumerate(seen):
        modality, rows = arguments["packed"].modality, arguments["output_rows"]
        modality = modality if rows is None else modality[rows]
        mask = torch.ones_like(modality > 0) if bypassed == "all" else modality == GROUPS.index(bypassed)
        if bool(present.any()) and bool(mask.any()):
            moved = _rest_of_the_model(model, seen[block:], mask)
            sums[block] = vector_distance(vectors, moved)[present].sum().cpu()
    return sums


def _rest_of_the_model(model: Any, seen: list[dict[str, Any]], mask: Tensor) -> Tensor:
    """Pooled states when the first block of `seen` runs no routed expert for the rows of `mask`."""
    text, first = model.language_model, model.config.text_config.num_hidden_layers - len(seen)

    def bypass(routing: Any) -> Any:
        return routing.skip(mask.to(routing.weight.device)[:, None])

    states = seen[0]["hidden_states"]
    for place, arguments in enumerate(seen):
        dial = BlockDial([bypass], False) if place == 0 else None
        given = arguments | {"hidden_states": states, "dial": dial}
        states, _ = text.layers[first + place](*(given[name] for name in _LAYER_ARGUMENTS))
    return text.norm(states).to(mask.device)


@dataclass
class BudgetMeasurement:
    """What a budget with MoDES skipped and cost.

    Args:
        rate (`float`): skipped fraction of the pairs that the other settings of the budget leave.
        distance (`float`): mean over items of 1 - cosine to the vector of full compute.
        histogram ([`WeightHistogram`]): the weights that MoDES saw: other than at full compute, because what is
            skipped in one block changes the routing of the next ones.
    """

    rate: float
    distance: float
    histogram: WeightHistogram


@torch.inference_mode()
def measure_budget(
    inputs: CalibrationInputs, budget: Mapping[str, Any], vectors: Tensor, most: int | None = None, label: str = ""
) -> BudgetMeasurement:
    """
    One pass over the items with a compute budget that holds `modes`; read when it was made before.

    Args:
        inputs ([`CalibrationInputs`]): model and items.
        budget (`Mapping`): the budget.
        vectors (`torch.FloatTensor` of shape `(items, hidden)`): of full compute.
        most (`int`, *optional*): take so many items, spread over all; all by default.
        label (`str`, *optional*): text of the progress bar.
    """
    index = range(len(inputs.items))
    if most is not None and most < len(index):
        index = [place * len(inputs.items) // most for place in range(most)]
    items, vectors = [inputs.items[place] for place in index], vectors[list(index)]
    tau = budget["modes"]["tau"]
    skips = any(tau.values()) if isinstance(tau, dict) else tau > 0
    sums = {
        "counts": WeightHistogram(inputs.blocks, inputs.slots).counts,
        "pairs": torch.zeros(1, dtype=torch.long),
        "distance": torch.zeros(1, dtype=torch.float64),
    }

    def add(batch: Sequence[CalibrationItem], done: int) -> None:
        histogram = WeightHistogram(inputs.blocks, inputs.slots, sums["counts"])

        def see(block: int, arguments: dict[str, Any]) -> None:
            policies = arguments["dial"].policies
            modes = [policies.pop()] if skips else []  # the last one, see `ComputeDial.begin`
            _record_weights(histogram, block, arguments, policies)
            policies += modes

        with before_each_block(inputs.model, see):
            output = run_as_encoding(inputs.model, inputs.features(batch), budget)
        sums["pairs"] += int(output.compute.expert_pairs.sum())
        full = vectors[done : done + len(batch)]
        sums["distance"] += float(vector_distance(full, output.pooler_output.cpu()).sum())

    about = {"budget": budget, "items": len(items)}
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    stream_items(inputs, items, name, about, sums, label or "Measuring a budget", add)
    histogram = WeightHistogram(inputs.blocks, inputs.slots, sums["counts"])
    rate = 1 - int(sums["pairs"]) / max(1, histogram.pairs)
    return BudgetMeasurement(rate, float(sums["distance"]) / len(items), histogram)


def stream_items(
    inputs: CalibrationInputs,
    items: Sequence[CalibrationItem],
    name: str,
    about: Mapping[str, Any],
    sums: dict[str, Tensor],
    label: str,
    add: Callable[[Sequence[CalibrationItem], int], None],
) -> None:
    """Calls `add(batch, items done)`, which adds to `sums`, over all items, from where the file of these sums stands.

    Args:
        inputs ([`CalibrationInputs`]): identity, folder and batch size.
        items (`Sequence[CalibrationItem]`): the items.
        name (`str`): of the file.
        about (`Mapping[str, Any]`): what the sums are of, beside model and data; JSON-serialisable.
        sums (`dict[str, torch.Tensor]`): zeros; filled in place.
        label (`str`): text of the progress bar.
        add (`Callable`): called with a batch and the number of items before it.

    Raises:
        CalibrationError: the file holds something else.
    """
    path = inputs.folder / f"{name}.safetensors"
    identity = json.dumps(dict(inputs.identity) | {"about": about}, sort_keys=True)
    done = _load(path, identity, sums)
    if done == len(items):
        return
    saved = time.monotonic()
    with tqdm(total=len(items), initial=done, desc=label, unit="item", disable=not inputs.progress) as bar:
        for batch in batches_of_one_side(items, inputs.batch_size, done):
            add(batch, done)
            done += len(batch)
            bar.update(len(batch))
            if time.monotonic() - saved > SAVE_SECONDS:
                _save(path, identity, sums, done)
                saved = time.monotonic()
    _save(path, identity, sums, done)


def _save(path: Path, identity: str, sums: Mapping[str, Tensor], done: int) -> None:
    with whole_file(path) as partial:
        save_file(dict(sums), partial, metadata={"format": _FORMAT, "identity": identity, "done": str(done)})


def _load(path: Path, identity: str, sums: dict[str, Tensor]) -> int:
    """Reads sums into `sums`; returns the items they hold, 0 when there is no file.

    Raises:
        CalibrationError: the file is broken, or holds sums of another model, other data or another budget.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("identity") != identity:
                raise CalibrationError(
                    f"{path} holds sums of another model, other data or other settings: remove it, or choose another "
                    "folder under 'work'"
                )
            found = {key: file.get_tensor(key) for key in sums}
            done = int(metadata["done"])
    except (OSError, SafetensorError, KeyError) as error:
        raise CalibrationError(f"{path} cannot be read ({error}); remove it") from error
    for key, value in found.items():
        sums[key].copy_(value)
    return done


__all__ = ["BlockMeasurement", "BudgetMeasurement", "CalibrationError", "CalibrationInputs", "measure_blocks"]
