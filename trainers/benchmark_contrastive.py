"""The suite `contrastive`: whole training steps against Sentence Transformers' cached InfoNCE on the stock model.

The same weights, adapters, pairs and loss (queries, positives, a hard negative each; scale 50). Sentence Transformers
runs as its users run it: columns padded, `CachedMultipleNegativesRankingLoss`, at the mini-batch size and the expert
back-end that are fastest here. Gradients are compared first.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import benchmark_report as report
from .benchmark_encode import OURS, OURS_TORCH, Context, trim_memory
from .benchmark_kernel_switch import any_kernel, kernels_off
from .benchmark_machine import peak_memory, resident_bytes
from .benchmark_models import Item, ModelPair, padded_batch, text_item
from .benchmark_peers import StockChoice, count_tokens, fastest_choice
from .benchmark_timing import interleave
from .benchmark_train import forget_adapters, gradient_difference, gradients, with_adapters
from .cached_gradients import Embedded, contrastive_step
from .contrastive_batches import ContrastiveBatch, EncodedItem, model_inputs, split_into_chunks
from .contrastive_loss import ContrastiveLoss


SCALE = 50.0
PAIRS = 16
CHUNK_TOKENS = 2048
MEMORY_BATCHES = (32, 512)
MINI_BATCHES = (4, 16)
BACKENDS = ("eager", "grouped_mm")  # batched_mm would keep a copy of the weights for every pair until the backward
GRADIENT_TOLERANCE = 1e-4
RATIO, FLAT = 1.5, 1.1


def columns(context: Context, rows: int, seed: int = 0) -> list[list[Item]]:
    """Queries of 8 to 64 tokens; positives and hard negatives of 32 to 512, most of them short."""
    scale = 16 if context.quick else 1
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> list[int]:
        spread = torch.rand(rows, generator=generator) ** 3
        return [max(4, int(low + (high - low) * share) // scale) for share in spread.tolist()]

    return [[text_item(n, generator) for n in lengths(*span)] for span in ((8, 64), (32, 512), (32, 512))]


def as_batch(given: list[list[Item]]) -> ContrastiveBatch:
    """The columns as our trainer's collator gives them."""
    items = [
        EncodedItem(torch.tensor(item.ids, dtype=torch.int32), (None, None), number + 1, 0)
        for number, item in enumerate(item for column in given for item in column)
    ]
    rows = len(given[0])
    query, positive, negative = torch.arange(3 * rows).split(rows)
    zeros = torch.zeros(rows, dtype=torch.long)
    return ContrastiveBatch(items, query, positive, negative, zeros, zeros, list(range(rows)))


def step_ours(model, batch: ContrastiveBatch, chunk_tokens: int) -> bool:
    """One step of ours: all columns packed, in chunks."""
    device = torch.device("cpu")

    def embed(places: range) -> Embedded:
        items = [batch.items[place] for place in places]
        inputs = model_inputs(items, (), device)
        vectors = nn.functional.normalize(model(**inputs, pooled_only=True).pooler_output.float(), dim=-1)
        return Embedded(vectors, (), inputs["cu_seq_lens_q"], torch.zeros(len(items), dtype=torch.long))

    chunks = split_into_chunks([item.tokens for item in batch.items], chunk_tokens)
    contrastive_step(chunks, embed, lambda vectors: ContrastiveLoss(SCALE)(vectors, batch), Tensor.backward)
    return True


class StockModule(nn.Module):
    """The stock model as the first module of a `SentenceTransformer`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {name: features[name] for name in ("input_ids", "attention_mask")}
        features["token_embeddings"] = self.model(**given, use_cache=False).last_hidden_state
        return features


def sentence_transformer(stock: nn.Module) -> Any:
    """The stock model, pooled at the last token and normalised, as Sentence Transformers composes it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    pooling = Pooling(stock.config.text_config.hidden_size, "lasttoken")
    return SentenceTransformer(modules=[StockModule(stock), pooling, Normalize()], device="cpu").train()


def step_stock(embedder: Any, given: list[list[Item]], choice: StockChoice) -> bool:
    """One step of Sentence Transformers."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    model = embedder[0].model
    model.set_experts_implementation(choice.backend)
    loss = CachedMultipleNegativesRankingLoss(embedder, scale=SCALE, mini_batch_size=choice.batch_size)
    features = [padded_batch(column, model.dtype) for column in given]
    loss([{key: column[key] for key in ("input_ids", "attention_mask")} for column in features], None).backward()
    return True


def fastest_stock(context: Context, embedder: Any, given: list[list[Item]]) -> tuple[StockChoice, dict[str, float]]:
    """The mini-batch size and expert back-end that Sentence Transformers is fastest with on a quarter of the rows."""
    few = [column[: max(4, len(column) // 4)] for column in given]
    choices = [StockChoice(backend, size) for backend in BACKENDS for size in context.batch_sizes(MINI_BATCHES)]
    for choice in choices:  # what is loaded on first use is nobody's speed
        step_stock(embedder, [column[:2] for column in few], choice)

    def run(choice: StockChoice, stop: Callable[[], bool]) -> bool:
        gradients(embedder[0].model)
        return step_stock(embedder, few, choice)

    best, seconds = fastest_choice(choices, run, lambda text: context.progress(f"sentence-transformers, {text}"))
    gradients(embedder[0].model)
    return best, {str(choice): value for choice, value in seconds.items()}


def _step(dtype: str) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        pair = context.pair("text", dtype)
        try:
            return _compare(context, pair, dtype)
        finally:
            forget_adapters()

    return run


def _compare(context: Context, pair: ModelPair, dtype: str) -> dict[str, Any]:
    stock, ours = with_adapters(pair)
    embedder, given = sentence_transformer(stock), columns(context, 8 if context.quick else PAIRS)
    batch, chunk = as_batch(given), CHUNK_TOKENS // (16 if context.quick else 1)

    def plain() -> bool:
        with kernels_off():
            return step_ours(ours, batch, chunk)

    runs: dict[str, Callable[[], Any]] = {OURS_TORCH: plain}
    if any_kernel():
        runs = {OURS: lambda: step_ours(ours, batch, chunk), **runs}
    choice, candidates = fastest_stock(context, embedder, given)
    theirs = f"sentence-transformers, {choice}"
    step_stock(embedder, given, choice)
    expected, differences = gradients(stock), {}
    for name, function in runs.items():
        function()
        differences[name] = gradient_difference(gradients(ours), expected)
    if dtype == "fp32" and not all(value <= GRADIENT_TOLERANCE for value in differences.values()):
        return {"failed": f"gradients differ from Sentence Transformers': {differences}"}
    runs[theirs] = lambda: step_stock(embedder, given, choice)
    timing = interleave(runs, context.protocol, progress=context.progress)
    seconds = {name: entry.median for name, entry in timing.timings.items()}
    first = next(name for name in (OURS, OURS_TORCH) if name in seconds)
    memory = {name: _peak(runs[name]) for name in (first, theirs)}
    goals = [report.judge("x over sentence-transformers", seconds[theirs] / seconds[first], RATIO)]
    return {
        "rows": len(given[0]), "tokens": sum(map(count_tokens, given)), "seconds": seconds, "candidates": candidates,
        "gradient_difference": differences, "memory": memory, "timing": timing.record(), "goals": goals,
    }  # fmt: skip


def _memory(context: Context) -> dict[str, Any]:
    """Peak memory of a step at growing batches: what the model and a chunk need, whatever the batch."""
    pair = context.pair("text", "bf16")
    try:
        _, ours = with_adapters(pair)
        memory, seconds, tokens = {}, {}, 0
        for rows in (4, 16) if context.quick else MEMORY_BATCHES:
            given = columns(context, rows)
            batch, tokens = as_batch(given), sum(map(count_tokens, given))
            name = f"batch {rows}"
            context.progress(name)
            start = time.perf_counter()
            memory[name] = _peak(lambda batch=batch: step_ours(ours, batch, CHUNK_TOKENS))
            seconds[name] = time.perf_counter() - start
        peaks = [value for value in memory.values() if value]
        growth = max(peaks) / min(peaks) if peaks else None
        goals = [report.judge("peak memory, largest over smallest batch", growth, FLAT, at_most=True)]
        return {"rows": rows, "tokens": tokens, "seconds": seconds, "memory": memory, "gradient_difference": {},
                "weight_bytes": pair.weight_bytes, "goals": goals}  # fmt: skip
    finally:
        forget_adapters()


def _peak(run: Callable[[], Any]) -> int | None:
    """Peak resident bytes of the process in a call, after one that warms up."""
    run()
    trim_memory()
    if resident_bytes() is None:
        return None
    with peak_memory() as peak:
        run()
    return peak["bytes"]


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    "step-fp32": _step("fp32"),
    "step-bf16": _step("bf16"),
    "memory-bf16": _memory,
}


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases."""
    return list(CASES)


def _cells(record: report.Record, name: str, value: float, number: int) -> dict[str, str]:
    difference, peak = record["gradient_difference"].get(name), record["memory"].get(name)
    return {
        "system": name,
        "step": report.seconds_text(value),
        "peak": "" if peak is None else f"{peak / 2**20:.0f} MB",
        "gradient difference": "" if difference is None else f"{difference:.1e}",
    }


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results: a line per system or batch."""
    return report.system_rows(records, _cells)


def plot(records: list[report.Record], path: Path) -> Path:
    """Seconds per step of each system, and peak memory by batch."""
    drawing, axes = report.figure(max(1, len(records)), height=2.6)
    for record, axis in zip(records, axes):
        memory = record["case"].startswith("memory")
        values = [
            (record["memory"][name] or 0) / 2**20 if memory else seconds for name, seconds in record["seconds"].items()
        ]
        title = "peak memory, MB" if memory else f"seconds a step, {record['rows']} rows"
        report.bars(axis, list(record["seconds"]), values, f"{record['case']}: {title}")
    return report.save_figure(drawing, path)
