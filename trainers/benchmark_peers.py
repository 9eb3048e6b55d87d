"""Whole models side by side: ours packed, transformers' as well as it can be run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .benchmark_models import Item, packed_batch, padded_batch


TOKEN_BUDGET = 16384  # tokens of one packed forward pass of ours
BACKENDS = ("eager", "grouped_mm", "batched_mm")
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
GATHERED_LIMIT = 1 << 30  # bytes of weights that batched_mm may copy for one block: it has lost long before


def by_length(items: list[Item]) -> list[int]:
    """Places of the items from the longest to the shortest: a batch too large for the memory fails at once."""
    return sorted(range(len(items)), key=lambda place: -len(items[place].ids))


def count_tokens(items: list[Item]) -> int:
    """Tokens of all items."""
    return sum(len(item.ids) for item in items)


def sample_of_all_lengths(items: list[Item], tokens: int) -> list[Item]:
    """Every n-th item by length, so that about `tokens` tokens are left; all where there are no more."""
    return [items[place] for place in by_length(items)[:: max(1, count_tokens(items) // tokens)]]


def token_batches(items: list[Item], budget: int | None) -> list[list[int]]:
    """Places of the items in batches of at most `budget` tokens (`None`: one batch), sorted by length."""
    order = by_length(items)
    if budget is None:
        return [order]
    batches, tokens = [[]], 0
    for place in order:
        length = len(items[place].ids)
        if batches[-1] and tokens + length > budget:
            batches.append([])
            tokens = 0
        batches[-1].append(place)
        tokens += length
    return batches


def encode_packed(model, items: list[Item], budget: int | None = TOKEN_BUDGET, **settings) -> Tensor:
    """
    Embeddings of our model.

    Args:
        model (`MoEMBModel`): the model.
        items (`list[Item]`): what to embed.
        budget (`int`, *optional*, defaults to 16384): tokens of one forward pass; `None` for a single pass.
        settings: passed to the model's forward, such as `adaptive_compute`.

    Returns:
        `torch.FloatTensor` of shape `(items, hidden)`, in the order of the items.
    """
    output, dtype = [None] * len(items), model.dtype
    with torch.inference_mode():
        for places in token_batches(items, budget):
            batch = packed_batch([items[place] for place in places], dtype)
            vectors = model(**batch, pooled_only=True, **settings).pooler_output
            for place, vector in zip(places, vectors):
                output[place] = vector
    return torch.stack(output).float()


@dataclass(frozen=True)
class StockChoice:
    """How transformers' model is run: its expert back-end and the items of one padded batch."""

    backend: str
    batch_size: int

    def __str__(self) -> str:
        return f"transformers {self.backend}, batches of {self.batch_size}"


def _stock_batches(items: list[Item], batch_size: int) -> Iterator[list[int]]:
    order = by_length(items)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def encode_stock(model, items: list[Item], choice: StockChoice, stop: Callable[[], bool] = lambda: False):
    """
    Embeddings of transformers' model: sorted by length, padded, masked, pooled at the last token of each item.

    Args:
        model (`Qwen3_5MoeModel`): the model; its expert back-end is set to the choice's.
        items (`list[Item]`): what to embed.
        choice (`StockChoice`): back-end and batch size.
        stop (`Callable[[], bool]`, *optional*): asked between batches; `True` gives up and returns `None`.
    """
    model.set_experts_implementation(choice.backend)
    output = [None] * len(items)
    with torch.inference_mode():
        for places in _stock_batches(items, choice.batch_size):
            if stop():
                return None
            batch = padded_batch([items[place] for place in places], model.dtype)
            states = model(**batch, use_cache=False).last_hidden_state
            for row, place in enumerate(places):
                output[place] = states[row, len(items[place].ids) - 1]
    return torch.stack(output).float()


def feasible(model, items: list[Item], choice: StockChoice) -> bool:
    """Whether batched_mm's copies of the weights fit; the other back-ends always do."""
    if choice.backend != "batched_mm":
        return True
    config, longest = model.config.text_config, max(len(item.ids) for item in items)
    expert = 3 * config.hidden_size * config.moe_intermediate_size * torch.finfo(model.dtype).bits // 8
    slots = longest * min(choice.batch_size, len(items)) * config.num_experts_per_tok
    return slots * expert <= GATHERED_LIMIT


def best_stock(
    items: list[Item],
    model,
    run: Callable[[list[Item], StockChoice, Callable[[], bool]], Any],
    backends=BACKENDS,
    batch_sizes=BATCH_SIZES,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[StockChoice, dict[str, float | None]]:
    """
    The fastest way to run transformers' model on these items, found by trying all.

    Args:
        items (`list[Item]`): the items; batch sizes beyond their number are not tried.
        model (`Qwen3_5MoeModel`): the model.
        run (`Callable`): called with items, a choice and a function that says when to give up.
        backends, batch_sizes (*optional*): what to try.
        progress (`Callable[[str], None]`, *optional*): is told what runs.

    Returns:
        The choice, and the seconds of every candidate (`None`: given up as too slow, or did not fit).
    """
    sizes = sorted((size for size in batch_sizes if size <= len(items)), key=lambda size: abs(size - 8)) or [1]
    few = [items[place] for place in by_length(items)[-2:]]
    for backend in backends:  # what is loaded and compiled on first use is nobody's speed
        run(few, StockChoice(backend, 2), lambda: False)
    # likely winners first: the others are then given up early
    choices = [StockChoice(backend, size) for size in sizes for backend in backends]
    possible = [choice for choice in choices if feasible(model, items, choice)]
    best, seconds = fastest_choice(possible, lambda choice, stop: run(items, choice, stop), progress)
    return best, {str(choice): seconds.get(choice) for choice in choices}


def fastest_choice(
    choices: list[StockChoice],
    run: Callable[[StockChoice, Callable[[], bool]], Any],
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[StockChoice, dict[StockChoice, float]]:
    """
    The fastest of some ways to run a peer. The three best run twice: one noisy run must not choose.

    Args:
        choices (`list[StockChoice]`): what to try, likely winners first.
        run (`Callable`): called with a choice and a function that says when to give up; returns `None` if it did.
        progress (`Callable[[str], None]`, *optional*): is told what runs.

    Returns:
        The choice, and the least seconds of all that were not given up and did not fail.

    Raises:
        RuntimeError: none ran.
    """
    limit, seconds = float("inf"), {}
    for choice in choices:
        progress(f"{choice}, candidate")
        start = time.perf_counter()
        try:
            finished = run(choice, lambda end=start + limit: time.perf_counter() > end)
        except (RuntimeError, MemoryError):  # out of memory, or shapes that a back-end refuses
            continue
        if finished is None:
            continue
        seconds[choice] = time.perf_counter() - start
        limit = min(limit, 1.2 * seconds[choice])
    if not seconds:
        raise RuntimeError("transformers' model ran with none of its back-ends and batch sizes")
    for choice in sorted(seconds, key=seconds.get)[:3]:
        progress(f"{choice}, again")
        start = time.perf_counter()
        run(choice, lambda: False)
        seconds[choice] = min(seconds[choice], time.perf_counter() - start)
    return min(seconds, key=seconds.get), seconds


def agreement(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How close two sets of vectors `(items, hidden)` are: largest difference of unit vectors, least cosine."""
    ours, theirs = (torch.nn.functional.normalize(vectors.double(), dim=-1) for vectors in (ours, theirs))
    return {
        "largest_difference": (ours - theirs).abs().max().item(),
        "least_cosine": (ours * theirs).sum(-1).min().item(),
    }
