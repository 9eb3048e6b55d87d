"""The memory of one process in contrastive training: weights, gradients, optimizer, activations, negatives.

All figures are bytes of tensors. What comes on top is the libraries': the device's context, and gaps that the
allocator leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.initialization import no_init_weights

from modeling_moemb import MoEMBConfig, MoEMBModel

from .lora import component, expected_trainable
from .plan_activations import ChunkMemory


if TYPE_CHECKING:
    from .contrastive_config import ContrastiveConfig


PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "negatives")
_FLOAT = 4
# AdamW on masters: the float32 weights and their two moments
_OPTIMIZER = 3 * _FLOAT
# At the worst moment of the loss there are scores, their logarithms and a gradient, and two bytes of masks
_SCORE_BYTES = 3 * _FLOAT + 2
# Of every vector: as embedded, as a query or document, normalised, and gradients of these
_VECTOR_COPIES = 6
_BUCKET = 1 << 25  # values that processes average at once
# FSDP2 holds a block that runs, the next one that is fetched meanwhile, and what that arrives in
_BLOCKS_AT_ONCE = 3


@dataclass(frozen=True)
class Layout:
    """
    How a training is spread.

    Args:
        processes (`int`): Processes, one per device.
        kind (`str`): `"ddp"` (every process holds all weights), `"fsdp2"` (weights are spread) or `"fsdp2+ep"`
            (and experts stay whole, each process owns some).
        ep_size (`int`, *optional*, defaults to 1): Processes that share out the experts.
    """

    processes: int
    kind: str
    ep_size: int = 1


@dataclass(frozen=True)
class ModelSizes:
    """
    Numbers of values of a model.

    Args:
        total (`int`): All weights.
        experts (`int`): Of them in routed experts.
        layer (`int`): The largest decoder block without its routed experts.
        layer_experts (`int`): Its routed experts.
        root (`int`): What FSDP2 gathers once a step: all that is in no block and no embedding table.
        table (`int`): The embedding table.
        trained (`int`): What the optimizer holds.
        largest (`int`): The largest tensor of it.
        adapters (`int`): What of it lies beside the weights, in adapters.
        width (`int`): Length of a vector.
    """

    total: int
    experts: int
    layer: int
    layer_experts: int
    root: int
    table: int
    trained: int
    largest: int
    adapters: int
    width: int


def model_sizes(config: MoEMBConfig, args: "ContrastiveConfig") -> ModelSizes:
    """
    Counts the model that a configuration describes, without allocating it.

    Args:
        config (`MoEMBConfig`): The model.
        args (`ContrastiveConfig`): What of it is trained.

    Returns:
        [`ModelSizes`]
    """
    with torch.device("meta"), no_init_weights():
        model = MoEMBModel(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers: dict[str, list[int]] = {}
    for name, size in sizes.items():
        if ".layers." in name:
            number = name.partition(".layers.")[2].partition(".")[0]
            layers.setdefault(number, [0, 0])[component(name) == "routed experts"] += size
    table = sum(size for name, size in sizes.items() if component(name) == "embeddings")
    trained = sum(expected_trainable(model, args).values())
    frozen = {"vision tower": not args.train_vision, "router": not args.train_router}
    full = args.tuning == "full"
    return ModelSizes(
        total=sum(sizes.values()),
        experts=sum(experts for _, experts in layers.values()),
        layer=max(rest for rest, _ in layers.values()),
        layer_experts=max(experts for _, experts in layers.values()),
        root=sum(sizes.values()) - table - sum(map(sum, layers.values())),
        table=table,
        trained=trained,
        largest=max(size for name, size in sizes.items() if not frozen.get(component(name), False)) if full else 0,
        adapters=0 if full else trained,
        width=config.text_config.hidden_size,
    )


def plan_memory(sizes: ModelSizes, chunk: ChunkMemory, args: "ContrastiveConfig", layout: Layout) -> dict[str, float]:
    """
    The memory of one process.

    Args:
        sizes (`ModelSizes`): The model.
        chunk (`ChunkMemory`): What activations take.
        args (`ContrastiveConfig`): The training.
        layout (`Layout`): How it is spread.

    Returns:
        `dict[str, float]`: bytes of `weights`, `gathered` (weights that are put together for the moment),
        `gradients`, `optimizer`, `activations`, `negatives`, and `peak`: the largest sum over the phases of a step.
        Activations are gone when the loss is computed and when the optimizer runs, so it is less than all together.
    """
    width = getattr(torch, args.weights_dtype).itemsize
    spread = layout.processes if layout.kind != "ddp" and args.tuning == "full" else 1
    trained, bytes_trained = sizes.trained / spread, chunk.adapter_bytes if args.tuning == "lora" else width
    weights, gathered = _weights(sizes, layout, args, chunk.adapter_bytes)
    backward = bytes_trained * trained + width * sizes.largest
    if layout.kind == "ddp" and layout.processes > 1:
        weights += bytes_trained * trained  # DDP keeps buckets for all gradients, used or not
        sent = 2 * _FLOAT * min(trained, _BUCKET)
    else:
        sent = 2 * _FLOAT * min(sizes.adapters, _BUCKET) if layout.processes > 1 else 0
    # the masters' float32 gradients take the place of the model's, one by one
    update = max(_FLOAT * trained, bytes_trained * trained + sent)
    activations = chunk.peak(args.mini_batch_tokens, layout.kind == "fsdp2+ep") + _merged_experts(sizes, args)
    negatives = _negatives(sizes, args, layout)
    # the row of <emb> is put into a copy of the table, whose gradient is as large
    replaced = width * sizes.table if args.tuning == "lora" and args.train_emb_token else 0
    phases = (gathered + activations + backward, gathered + replaced + backward, gathered + negatives, update)
    return {
        "weights": weights,
        "gathered": gathered,
        "gradients": max(backward, update),
        "optimizer": _OPTIMIZER * trained,
        "activations": activations,
        "negatives": negatives,
        "peak": weights + _OPTIMIZER * trained + max(phases),
    }


def _weights(sizes: ModelSizes, layout: Layout, args: "ContrastiveConfig", adapter_bytes: int) -> tuple[float, float]:
    """Bytes of weights that a process keeps, and of those it puts together for the moment."""
    width = getattr(torch, args.weights_dtype).itemsize
    adapters = sizes.adapters * adapter_bytes
    if layout.kind == "ddp" or layout.processes == 1:
        return sizes.total * width + adapters, 0.0
    experts = sizes.layer_experts
    if layout.kind == "fsdp2+ep":
        experts = experts / layout.ep_size if layout.processes > layout.ep_size else 0
    block = sizes.layer + experts
    # with full tuning the gradients of a block are whole before they are shared out
    at_once = _BLOCKS_AT_ONCE + (2 if args.tuning == "full" else 0)
    return sizes.total / layout.processes * width + adapters, (at_once * block + sizes.root + sizes.table) * width


def _merged_experts(sizes: ModelSizes, args: "ContrastiveConfig") -> float:
    """Adapters of the routed experts are added to copies of their weights, which wait for the backward pass."""
    if args.tuning != "lora" or not args.lora_expert_rank:
        return 0.0
    copies = 2 * sizes.layer_experts if args.gradient_checkpointing else sizes.experts + sizes.layer_experts
    return copies * getattr(torch, args.weights_dtype).itemsize


def _negatives(sizes: ModelSizes, args: "ContrastiveConfig", layout: Layout) -> float:
    sides = 2 + args.hard_negatives
    rows = args.batch_size if args.gather_across_devices else args.batch_size // layout.processes
    own = args.batch_size // layout.processes * sides
    documents = rows * (1 + args.hard_negatives)
    scores = rows * documents * (_SCORE_BYTES + (2 * _FLOAT if args.symmetric else 0))
    vectors = _VECTOR_COPIES * _FLOAT * sizes.width * (rows * sides) + _FLOAT * sizes.width * own
    return (scores + vectors) * len(args.matryoshka_dims or [None])


def gibibytes(size: float) -> str:
    """Returns bytes as GiB, with three significant digits."""
    value = size / 2**30
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def describe(plan: Mapping[str, float]) -> list[str]:
    """Returns the cells of a table row, in GiB: the parts, then the peak."""
    return [gibibytes(plan[name]) for name in (*PARTS, "peak")]
