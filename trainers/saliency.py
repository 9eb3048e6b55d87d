"""How much each routed expert matters, measured in one pass over calibration items.

For expert `j` of a block, with `X` the tokens routed to it (`n` of `T`), `o` its output before weighting, `a` the
routing weight renormalised over the chosen experts and `p` the softmax over all experts:

    frequency    n / T
    probability  sum of p over all tokens / T
    man          mean over X of |o|          (mean activation norm)
    msan         mean over X of |o| ** 2     (mean squared activation norm, arXiv 2606.15716)
    reap         mean over X of a * |o|      (router-weighted expert activation pruning, arXiv 2510.13999)

An expert that no token is routed to has score 0 where the score is a mean over `X`. Sums are kept in fp64, apart for
text, image and video tokens and for the pooled token of each item, so every score can be had from one measurement.

Departure from REAP's released code: its weights are the ones the model runs with, renormalised; that code
renormalises only where the configuration has `norm_topk_prob`, which Qwen3.5's has not.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from modeling_moemb.routing_moemb import route

from .calibration_data import CalibrationItem, batches_of_one_side
from .convert_safetensors import BLOCK_BYTES, read_checkpoint
from .errors import MoEMBError, nearest
from .files import whole_file


SALIENCIES = ("reap", "man", "msan", "frequency", "probability")
GROUPS = ("text", "image", "video", "pooled")
POOLED = GROUPS.index("pooled")
FORMAT = "moemb-expert-statistics-1"
SAVE_SECONDS = 30.0
# Rows whose expert outputs are held at once: the measurement then needs no more memory than a forward pass.
ROWS_AT_ONCE = 8192

_SUMS = ("probability", "norm", "squared_norm", "weighted_norm")


class SaliencyError(MoEMBError, ValueError):
    """Statistics that cannot be measured or used. The message names the setting or file, its value and the remedy."""


@dataclass
class ExpertStatistics:
    """Sums over calibration tokens, from which every saliency is computed.

    Args:
        tokens (`torch.LongTensor` of shape `(layers, groups)`): tokens seen; the groups are `GROUPS`.
        pairs (`torch.LongTensor` of shape `(layers, groups, experts)`): tokens routed to each expert.
        probability (`torch.DoubleTensor` of shape `(layers, groups, experts)`): router probabilities, over all tokens.
        norm, squared_norm, weighted_norm (`torch.DoubleTensor` of shape `(layers, groups, experts)`): over the tokens
            routed to the expert, the norm of its output, its square, and the norm times the routing weight.
        items (`int`): calibration items these sums hold.
        identity (`dict[str, str]`): what was measured on what, see [`measure`].
    """

    tokens: Tensor
    pairs: Tensor
    probability: Tensor
    norm: Tensor
    squared_norm: Tensor
    weighted_norm: Tensor
    items: int = 0
    identity: dict[str, str] = field(default_factory=dict)

    @classmethod
    def zeros(cls, layers: int, experts: int, identity: Mapping[str, str] | None = None) -> "ExpertStatistics":
        """Statistics of no items."""
        shape = (layers, len(GROUPS), experts)
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name in _SUMS}
        tokens, pairs = torch.zeros(shape[:2], dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        return cls(tokens, pairs, **sums, identity=dict(identity or {}))

    @property
    def num_experts(self) -> int:
        return self.pairs.shape[-1]

    @property
    def complete(self) -> bool:
        """Whether all the items of the identity were measured."""
        return self.items == int(self.identity.get("items", self.items))

    def scores(
        self, saliency: str = "reap", groups: Sequence[str] = GROUPS, last_block_pooled: bool = False
    ) -> Tensor:
        """The saliency of every expert.

        Args:
            saliency (`str`, defaults to `"reap"`): one of `SALIENCIES`.
            groups (`Sequence[str]`, *optional*): the tokens that count, names of `GROUPS`; all by default.
            last_block_pooled (`bool`, defaults to `False`): in the last block only pooled tokens count: nothing else
                that this block computes reaches the vector.

        Returns:
            `torch.DoubleTensor` of shape `(layers, experts)`: the scores; 0, never NaN, where nothing was routed.

        Raises:
            SaliencyError: for an unknown saliency or group.
        """
        check_saliency(saliency)
        if unknown := sorted(set(groups) - set(GROUPS)):
            raise SaliencyError(f"there are no tokens {unknown}; the groups are {list(GROUPS)}")
        counts = torch.zeros(self.tokens.shape, dtype=torch.float64)
        counts[:, [GROUPS.index(name) for name in groups]] = 1
        if last_block_pooled and POOLED in (GROUPS.index(name) for name in groups):
            counts[-1] = torch.eye(len(GROUPS), dtype=torch.float64)[POOLED]

        def total(values: Tensor) -> Tensor:
            return (values * counts[..., None]).sum(dim=1)

        pairs, tokens = total(self.pairs), (self.tokens * counts).sum(dim=1)[:, None]
        if saliency in ("frequency", "probability"):
            return (pairs if saliency == "frequency" else total(self.probability)) / tokens.clamp_min(1)
        sums = {"man": self.norm, "msan": self.squared_norm, "reap": self.weighted_norm}
        return total(sums[saliency]) / pairs.clamp_min(1)

    def never_routed(self) -> Tensor:
        """`torch.BoolTensor` of shape `(layers, experts)`: the experts that no calibration token was routed to."""
        return self.pairs.sum(dim=1) == 0


def check_saliency(name: str, also: Sequence[str] = ()) -> None:
    """Raises `SaliencyError` for a name that is neither in `SALIENCIES` nor in `also`."""
    choices = [*SALIENCIES, *also]
    if name not in choices:
        raise SaliencyError(f"there is no saliency {name!r}{nearest(str(name), choices)}; choose one of {choices}")


def check_keep(keep: int, num_experts: int, top_k: int, setting: str = "keep") -> None:
    """Raises `SaliencyError` when `keep` experts are fewer than a token uses or more than there are."""
    if keep < top_k:
        raise SaliencyError(
            f"{setting} is {keep}, but each token runs {top_k} experts (num_experts_per_tok): keep {top_k} to "
            f"{num_experts}"
        )
    if keep > num_experts:
        raise SaliencyError(f"{setting} is {keep}, but there are {num_experts} experts: keep {top_k} to {num_experts}")


def experts_to_keep(scores: Tensor, keep: int) -> Tensor:
    """The `keep` experts of each layer with the highest scores; equal scores go to the lower index.

    Args:
        scores (`torch.Tensor` of shape `(layers, experts)`): see [`ExpertStatistics.scores`].
        keep (`int`): from 1 to the number of experts.

    Returns:
        `torch.LongTensor` of shape `(layers, keep)`: their indices, ascending.
    """
    if not 1 <= keep <= scores.shape[1]:
        raise SaliencyError(f"keep is {keep}, but must be from 1 to {scores.shape[1]}")
    return scores.argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values


def expert_blocks(model: Any) -> list[Any]:
    """The blocks of a `MoEMBModel` that hold a router (`gate`) and experts, in order.

    Raises:
        SaliencyError: the model has no learned router.
    """
    kind = getattr(model.config, "feed_forward", "moe")
    if kind != "moe":
        raise SaliencyError(f"the model has no learned router (feed_forward {kind!r}): its experts have no saliency")
    return [layer.mlp for layer in model.language_model.layers]


@contextmanager
def observed(model: Any, statistics: ExpertStatistics) -> Iterator[Callable[[Tensor], None]]:
    """Adds what the model's experts do to `statistics` while the context lasts.

    Router and experts are called as modules, so that their precision, kernels and offloading are those of the model.

    Args:
        model (`MoEMBModel`): the model.
        statistics ([`ExpertStatistics`]): added to in place.

    Yields:
        `Callable`: to be called before each forward with the group (index into `GROUPS`) of each packed token, int64
        `(tokens,)`, see [`token_groups`].

    Raises:
        SaliencyError: when a block sees another number of tokens than it was told.
    """
    current: dict[str, Tensor] = {}

    def hook(layer: int) -> Callable:
        def add(block: Any, args: tuple, kwargs: dict) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            groups = current["groups"].to(states.device)
            if groups.shape[0] != states.shape[0]:
                raise SaliencyError(
                    f"block {layer} sees {states.shape[0]} tokens but the items have {groups.shape[0]}: measure with "
                    "adaptive_compute={} and without pooled_only"
                )
            for start in range(0, states.shape[0], ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                condition = args[3] if len(args) > 3 else kwargs.get("condition")
                condition = None if condition is None else condition.take(rows)
                _add_rows(statistics, layer, block, states[rows], groups[rows], condition)

        return add

    handles = [
        block.register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer, block in enumerate(expert_blocks(model))
    ]
    try:
        yield lambda groups: current.update(groups=groups)
    finally:
        for handle in handles:
            handle.remove()


def _add_rows(
    statistics: ExpertStatistics, layer: int, block: Any, states: Tensor, groups: Tensor, condition: Any = None
) -> None:
    logits = block.gate(states)
    if condition is not None:
        logits = logits + block.task_router(condition)
    routing = route(logits, block.top_k, torch.float32)
    index, experts = routing.expert_index, logits.shape[-1]
    # one slot of weight 1 per pair: what comes back is each expert's own output
    pairs = states.repeat_interleave(index.shape[1], dim=0)
    one = torch.ones(index.numel(), 1, dtype=torch.float32, device=states.device)
    norm = block.experts(pairs, index.reshape(-1, 1), one).double().norm(dim=-1)  # (tokens * top_k,)
    place = (groups[:, None] * experts + index).reshape(-1)

    def by_expert(values: Tensor) -> Tensor:
        sums = torch.zeros(len(GROUPS) * experts, dtype=torch.float64, device=values.device)
        return sums.index_add(0, place, values).view(len(GROUPS), experts).cpu()

    statistics.tokens[layer] += torch.bincount(groups, minlength=len(GROUPS)).cpu()
    statistics.pairs[layer] += torch.bincount(place, minlength=len(GROUPS) * experts).view(-1, experts).cpu()
    probability = torch.zeros(len(GROUPS), experts, dtype=torch.float64, device=states.device)
    probability.index_add_(0, groups, torch.softmax(logits.double(), dim=-1))
    statistics.probability[layer] += probability.cpu()
    statistics.norm[layer] += by_expert(norm)
    statistics.squared_norm[layer] += by_expert(norm.square())
    statistics.weighted_norm[layer] += by_expert(norm * routing.weight.double().reshape(-1))


def token_groups(mm_token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The group of each packed token of a padded batch: its modality, or `POOLED` for the last of an item.

    Args:
        mm_token_type_ids (`torch.LongTensor` of shape `(batch, sequence)`): 0 text, 1 image, 2 video.
        attention_mask (`torch.Tensor` of shape `(batch, sequence)`): 0 at pads, on either side.

    Returns:
        `torch.LongTensor` of shape `(tokens,)`.
    """
    alive = attention_mask.bool()
    groups = mm_token_type_ids[alive].clone()
    groups[alive.sum(dim=1).cumsum(0) - 1] = POOLED
    return groups


@torch.inference_mode()
def measure(
    model: Any,
    processor: Any,
    items: Sequence[CalibrationItem],
    identity: Mapping[str, str],
    path: Path,
    batch_size: int = 32,
    progress: bool = True,
) -> ExpertStatistics:
    """Measures the experts on calibration items, at full compute; goes on where an earlier run was stopped.

    Args:
        model (`MoEMBModel`): the model.
        processor (`MoEMBProcessor`): its processor.
        items (`Sequence[CalibrationItem]`): the items, see `calibration_data`.
        identity (`Mapping[str, str]`): `model` and `data`, the hashes of both; kept with the statistics.
        path (`Path`): the safetensors file; written every `SAVE_SECONDS` seconds and at the end, by rename.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar.

    Returns:
        [`ExpertStatistics`]: over all items, the same bits whether the run was interrupted or not.

    Raises:
        SaliencyError: no items, or `path` holds a measurement of something else.
    """
    if not items:
        raise SaliencyError("there are no calibration items: name some in calibration_data")
    identity = dict(identity) | {"items": str(len(items)), "batch_size": str(batch_size)}
    blocks = expert_blocks(model)
    statistics = ExpertStatistics.zeros(len(blocks), blocks[0].gate.weight.shape[0], identity)
    if path.exists():
        statistics = load_statistics(path)
        # how items fall into batches matters only where a measurement goes on
        settled = ("batch_size",) if statistics.complete else ()
        check_identity(statistics, {k: v for k, v in identity.items() if k not in settled}, path)
    # parameters that wait on the disk are on the meta device
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    saved = time.monotonic()
    bar = tqdm(total=len(items), initial=statistics.items, desc="Measuring experts", unit="item", disable=not progress)
    with bar, observed(model, statistics) as announce:
        for batch in batches_of_one_side(items, batch_size, statistics.items):
            instruction = processor.embedding["prompts"].get(batch[0].side) or ""
            features = processor([item.value for item in batch], instruction=instruction)
            announce(token_groups(features["mm_token_type_ids"], features["attention_mask"]))
            model(**{k: v.to(device) for k, v in features.items()}, adaptive_compute={}, packed_hidden=True)
            statistics.items += len(batch)
            bar.update(len(batch))
            if time.monotonic() - saved > SAVE_SECONDS:
                save_statistics(statistics, path)
                saved = time.monotonic()
    save_statistics(statistics, path)
    return statistics


def check_identity(statistics: ExpertStatistics, wanted: Mapping[str, str], path: Path) -> None:
    """Raises `SaliencyError` when the statistics of a file were measured on another model or other data."""
    names = {"model": "another model", "data": "other calibration data"}
    for key, value in wanted.items():
        found = statistics.identity.get(key)
        if found != value:
            what = names.get(key, f"another {key.replace('_', ' ')}")
            raise SaliencyError(
                f"statistics {path} were measured with {what} ({key} {str(found)[:16]}, here {value[:16]}): remove "
                "the file, or name another one under 'statistics'"
            )


def save_statistics(statistics: ExpertStatistics, path: Path) -> None:
    """Writes statistics as safetensors, atomically; identity and number of items are in the header."""
    tensors = {name: getattr(statistics, name) for name in ("tokens", "pairs", *_SUMS)}
    about = {"format": FORMAT, "items_done": str(statistics.items), "identity": json.dumps(statistics.identity)}
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata=about)


def load_statistics(path: Path) -> ExpertStatistics:
    """Reads what [`save_statistics`] wrote.

    Raises:
        SaliencyError: the file is missing, unreadable, or something else.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise SaliencyError(f"{path} is not a file of expert statistics ({FORMAT}); name another one")
            tensors = {name: file.get_tensor(name) for name in ("tokens", "pairs", *_SUMS)}
        return ExpertStatistics(**tensors, items=int(about["items_done"]), identity=json.loads(about["identity"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, SaliencyError):
            raise
        raise SaliencyError(f"the statistics {path} cannot be read ({error}); remove the file") from error


def weights_fingerprint(folder: Path, progress: bool = True) -> str:
    """The identity of a checkpoint's weights: SHA-256 over its tensors in key order, however they are sharded.

    Code, card and settings are left out: a repository that was assembled again holds the same experts.

    Args:
        folder (`Path`): folder with safetensors.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar for large checkpoints.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    tensors = read_checkpoint(folder)
    digest = hashlib.sha256()
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="Hashing weights", disable=not progress, delay=2) as bar:
        for key, tensor in sorted(tensors.items()):
            digest.update(f"{key} {tensor.dtype} {tensor.shape}\0".encode())
            with open(tensor.file, "rb") as file:
                file.seek(tensor.offset)
                left = tensor.num_bytes
                while left and (block := file.read(min(BLOCK_BYTES, left))):
                    digest.update(block)
                    left -= len(block)
                    bar.update(len(block))
    return digest.hexdigest()
