"""How much memory activations take: measured on a few blocks of the true width, extrapolated to the model's depth.

Formulas of saved activations go stale with the first change of a layer. Here models of two and three blocks run
forward and backward on the CPU at two batch sizes while the storage of every tensor is counted; what a block and a
token cost follows from the differences. Such a model has the true widths, the true adapters and few experts: a token
passes through as many as in the large one. Other kernels may keep other tensors.
"""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers.initialization import no_init_weights

from modeling_moemb import MoEMBConfig, MoEMBModel, use_kernels

from .lora import prepare_trainable


if TYPE_CHECKING:
    from .contrastive_config import ContrastiveConfig


_ITEM_TOKENS = 64
_BATCHES = (64, 192)  # tokens
_SMALL_VOCABULARY = 512
_PICTURE = 8  # patches on a side of a picture


class LiveBytes(TorchDispatchMode):
    """
    Counts the bytes of all tensor storages that are made inside and still alive.

    Attributes:
        live (`int`): bytes alive now.
        peak (`int`): most bytes that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in given or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass(frozen=True)
class ChunkMemory:
    """
    What a chunk of tokens takes at its worst moment.

    Args:
        decoder (`float`): Bytes of a token in forward and backward of the whole decoder.
        vision (`float`): Bytes of a token (a merged block of patches) in the vision tower.
        vision_trained (`bool`): Whether the tower's activations wait for the backward pass.
        exchange (`float`): Bytes of a token's copies on their way to experts of other processes, and back.
        adapter_bytes (`int`): Bytes of a number in an adapter.
    """

    decoder: float
    vision: float
    vision_trained: bool
    exchange: float
    adapter_bytes: int

    def peak(self, tokens: int, travels: bool = False) -> float:
        """Bytes of a chunk of `tokens` tokens, all of which may come from pictures."""
        decoder = (self.decoder + (self.exchange if travels else 0.0)) * tokens
        vision = self.vision * tokens
        return decoder + vision if self.vision_trained else max(decoder, vision)


def measure_chunk_memory(config: MoEMBConfig, args: "ContrastiveConfig", kernels: bool = False) -> ChunkMemory:
    """
    Measures what a chunk takes.

    Args:
        config (`MoEMBConfig`): The model that will be trained.
        args (`ContrastiveConfig`): Its training.
        kernels (`bool`, *optional*, defaults to `False`):
            Whether the CPU's compiled kernels run, if they are there: right for a training on this machine's CPU.

    Returns:
        [`ChunkMemory`]
    """
    inner, last = Counter(config.text_config.layer_types[:-1]), config.text_config.layer_types[-1]
    rest = "linear_attention" if inner["linear_attention"] else last
    trained = args.tuning == "full" and args.train_vision
    with _kernels(kernels), tqdm(total=2 + len(inner) + trained, desc="measuring blocks", leave=False) as bar:
        # the last block computes pooled rows alone, so it is part of every model that is measured
        base, adapter_bytes = _per_token(config, args, [rest, last], bar.update)
        slopes = {kind: _per_token(config, args, [kind, rest, last], bar.update)[0] - base for kind in inner}
        vision = _vision_per_token(config, args, trained, bar.update)
    text = config.text_config
    decoder = base + sum(slopes[kind] * (count - (kind == rest)) for kind, count in inner.items())
    if args.gradient_checkpointing and slopes:
        # of every block the states that enter it are kept, and one block at a time runs again: the worst one
        kept = slopes.get(rest, min(slopes.values()))
        decoder = base + max(slopes.values()) - kept + kept * (text.num_hidden_layers - 2)
    # sent, received, computed and returned rows of a block; kept for the backward pass unless blocks run again
    blocks = 1 if args.gradient_checkpointing else text.num_hidden_layers
    exchange = 4 * text.num_experts_per_tok * text.hidden_size * getattr(torch, args.weights_dtype).itemsize * blocks
    return ChunkMemory(decoder, vision, trained, float(exchange), adapter_bytes)


@contextmanager
def _kernels(wanted: bool) -> Iterator[None]:
    previous = use_kernels(None if wanted else "off")
    try:
        yield
    finally:
        use_kernels(previous)


def small_config(config: MoEMBConfig, kinds: list[str], vision_depth: int = 1) -> MoEMBConfig:
    """A configuration of the same widths with other blocks, few experts and a small vocabulary."""
    settings = copy.deepcopy(config.to_dict())
    text = settings["text_config"]
    slots = text.get("num_experts_per_tok") or 1
    text |= {"num_hidden_layers": len(kinds), "layer_types": kinds, "vocab_size": _SMALL_VOCABULARY}
    text |= {"num_experts": slots, "pad_token_id": None}  # each token meets all: no more rows than there are pairs
    settings["vision_config"]["depth"] = vision_depth
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "emb_token_id")
    settings |= {name: _SMALL_VOCABULARY - 1 - number for number, name in enumerate(names)}
    settings |= {"adaptive_compute": None, "gates": None, "task_conditioning": None}
    return MoEMBConfig(**{key: value for key, value in settings.items() if key not in ("model_type", "architectures")})


def _model(config: MoEMBConfig, args: "ContrastiveConfig") -> MoEMBModel:
    with no_init_weights():
        model = MoEMBModel(config).to(getattr(torch, args.weights_dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # values do not matter; what memory happens to hold might be slow to compute with
    prepare_trainable(model, args)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    for parameter in model.parameters():
        if parameter.requires_grad:  # gradients are counted elsewhere
            parameter.grad = torch.zeros_like(parameter)
    return model.train()


def _slope(run: Callable[[int], int], sizes: tuple[int, int]) -> float:
    """Bytes that one more of what `run` takes costs."""
    run(sizes[0])  # fills caches
    small, large = (run(size) for size in sizes)
    return (large - small) / (sizes[1] - sizes[0])


def _per_token(
    config: MoEMBConfig, args: "ContrastiveConfig", kinds: list[str], done: Callable[[], object]
) -> tuple[float, int]:
    """Bytes of a token at the worst moment, and of a number in an adapter."""
    model = _model(small_config(config, kinds), args)

    def peak(tokens: int) -> int:
        ids = torch.randint(0, _SMALL_VOCABULARY - 8, (1, tokens))
        ids[0, _ITEM_TOKENS - 1 :: _ITEM_TOKENS] = model.config.emb_token_id
        bounds = torch.arange(0, tokens + 1, _ITEM_TOKENS, dtype=torch.int32)
        gc.collect()
        with LiveBytes() as live:
            vectors = model(input_ids=ids, cu_seq_lens_q=bounds, pooled_only=True).pooler_output
            vectors.float().square().sum().backward()
        return live.peak

    slope = _slope(peak, _BATCHES)
    adapters = [p.element_size() for name, p in model.named_parameters() if p.requires_grad and ".lora_" in name]
    done()
    return slope, adapters[0] if adapters else getattr(torch, args.weights_dtype).itemsize


def _vision_per_token(
    config: MoEMBConfig, args: "ContrastiveConfig", trained: bool, done: Callable[[], object]
) -> float:
    """Bytes of a merged token in the vision tower, which forgets what it computed unless it is trained."""
    kind, vision = [config.text_config.layer_types[-1]], config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    slopes = []
    for depth in (1, 2) if trained else (1,):
        model = _model(small_config(config, kind, depth), args)

        def peak(pictures: int, model: MoEMBModel = model) -> int:
            grid = torch.tensor([[1, _PICTURE, _PICTURE]] * pictures)
            gc.collect()
            with LiveBytes() as live:
                output = model.visual(torch.rand(pictures * _PICTURE**2, values).to(model.dtype), grid)
                if output.requires_grad:
                    output.float().square().sum().backward()
            return live.peak

        slopes.append(_slope(peak, (2, 4)) / (_PICTURE**2 / vision.spatial_merge_size**2))
        done()
    return slopes[0] if not trained else slopes[0] + (slopes[1] - slopes[0]) * (vision.depth - 1)
