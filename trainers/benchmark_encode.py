"""The suite `encode`: whole models, ours against transformers' (and vLLM's CPU build where there is one)."""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modeling_moemb.compute_moemb import count_flops, record_of_shapes

from . import benchmark_report as report
from .benchmark_kernel_switch import any_kernel, kernels_off
from .benchmark_machine import peak_memory, read_bandwidth, resident_bytes, threads
from .benchmark_models import Item, ModelPair, build_pair, image_item, packed_batch, text_item
from .benchmark_operations import ragged_lengths
from .benchmark_peers import (
    BATCH_SIZES,
    agreement,
    best_stock,
    count_tokens,
    encode_packed,
    encode_stock,
    sample_of_all_lengths,
)
from .benchmark_timing import Protocol, interleave
from .benchmark_vllm_peer import VllmPeer


OURS, OURS_TORCH, VLLM = "moemb", "moemb torch", "vllm"
SEARCHED_TOKENS = 4096  # of items of all lengths, on which transformers' best way is searched for
FP32_TOLERANCE = 1e-4  # of unit vectors: below it the peers computed the same thing


@dataclass
class Context:
    """
    How a whole-model case runs.

    Args:
        protocol (`Protocol`): timing.
        quick (`bool`): tiny models and few items, to see that all works.
        progress (`Callable[[str], None]`): is told what runs.
        vllm_python (`Path`, *optional*): the Python of an environment that holds vLLM.
    """

    protocol: Protocol
    quick: bool
    progress: Callable[[str], None]
    vllm_python: Path | None = None

    def pair(self, shape: str, dtype: str) -> ModelPair:
        self.progress(f"building {shape} {dtype}")
        return build_pair("tiny" if self.quick else shape, dtype)

    def lengths(self, tokens: int, low: int = 16, high: int = 1024) -> list[int]:
        """Ragged lengths that sum to `tokens`, all at least 2."""
        scale = 32 if self.quick else 1
        lengths = ragged_lengths(max(64, tokens // scale), max(2, low // scale), high // scale)
        return [max(2, length) for length in lengths]

    def batch_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Batch sizes to try for transformers' model."""
        return (4,) if self.quick else sizes

    def items(self, lengths: list[int], seed: int = 0) -> list[Item]:
        generator = torch.Generator().manual_seed(seed)
        return [text_item(length, generator) for length in lengths]


def _ours(model, items: list[Item], **settings) -> dict[str, Callable[[], Any]]:
    """Our model as it comes, and beside it without kernels when it has some."""

    def plain():
        with kernels_off():
            return encode_packed(model, items, **settings)

    if not any_kernel():
        return {OURS_TORCH: plain}
    return {OURS: lambda: encode_packed(model, items, **settings), OURS_TORCH: plain}


def _first(names) -> str:
    return next(name for name in (OURS, OURS_TORCH) if name in names)


def _against_stock(context: Context, pair: ModelPair, items: list[Item], ratio: float, dtype: str) -> dict[str, Any]:
    """Correctness, then transformers' best way, then all in turn."""
    runs = _ours(pair.ours, items)
    search = sample_of_all_lengths(items, SEARCHED_TOKENS)
    choice, candidates = best_stock(
        search, pair.stock, lambda some, choice, stop: encode_stock(pair.stock, some, choice, stop),
        batch_sizes=context.batch_sizes(BATCH_SIZES), progress=context.progress,
    )  # fmt: skip
    theirs = encode_stock(pair.stock, items, choice)
    check = {name: agreement(run(), theirs) for name, run in runs.items()}
    wrong = [name for name, entry in check.items() if not entry["largest_difference"] <= FP32_TOLERANCE]
    if dtype == "fp32" and wrong:
        return {"failed": f"{', '.join(wrong)} disagree with transformers: {check}", "check": check}
    runs[str(choice)] = lambda: encode_stock(pair.stock, items, choice)
    goals, helpers, notes = {str(choice): ratio}, [], {}
    vllm = None
    try:
        if context.vllm_python is not None and dtype == "bf16" and not any(item.grids for item in items):
            context.progress("starting vLLM")
            try:
                vllm = VllmPeer(context.vllm_python, pair.stock, torch.get_num_threads())
            except report.BenchmarkError as error:  # an optional peer: its absence is told, and ends nothing
                notes["not_run"] = {VLLM: str(error)}
        if vllm is not None:
            notes["vllm"] = {"version": vllm.version, **agreement(vllm.encode(items), theirs)}
            runs[VLLM], goals[VLLM], helpers = lambda: vllm.run(items), 1.3, [vllm.process.pid]
        timing = interleave(runs, context.protocol, helpers, context.progress)
    finally:
        if vllm is not None:
            vllm.close()
    seconds = {name: entry.median for name, entry in timing.timings.items()}
    ours = _first(seconds)
    tokens = count_tokens(items)
    return {
        "items": len(items), "tokens": tokens, "check": check,
        "searched_items": len(search), "candidates": candidates, **notes,
        "seconds": seconds, "tokens_per_second": {name: tokens / value for name, value in seconds.items()},
        "timing": timing.record(), "weight_bytes": pair.weight_bytes,
        "goals": [report.judge(f"x over {name}", seconds[name] / seconds[ours], goal) for name, goal in goals.items()],
    }  # fmt: skip


def _text(dtype: str, ratio: float) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        items = context.items(context.lengths(8192))
        return _against_stock(context, context.pair("text", dtype), items, ratio, dtype)

    return run


def _mixed(context: Context) -> dict[str, Any]:
    """Every second item an image of its own size with a caption, the others ragged text."""
    generator = torch.Generator().manual_seed(0)
    sides = (2, 4) if context.quick else (16, 20, 24, 28, 32)
    texts = context.items(context.lengths(4096))
    images = [
        image_item(sides[n % len(sides)], sides[(n // 2) % len(sides)], 8 + n % 17, generator)
        for n in range(len(texts))
    ]
    items = [item for both in zip(texts, images) for item in both]
    return _against_stock(context, context.pair("text", "bf16"), items, 3.0, "bf16")


def _timed(context: Context, runs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    timing = interleave(runs, context.protocol, progress=context.progress)
    return {
        "seconds": {name: entry.median for name, entry in timing.timings.items()},
        "timing": timing.record(),
    }


def _shared_prefix(context: Context) -> dict[str, Any]:
    """Short queries after one instruction of 60 tokens, against as long ones whose first 60 tokens all differ."""
    pair = context.pair("text", "bf16")
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(0, 1000, (60,), generator=generator).tolist()
    lengths = [60 + 5 + n % 12 for n in range(8 if context.quick else 128)]
    shared = [text_item(length, generator, prefix) for length in lengths]
    apart = [text_item(length, generator) for length in lengths]
    result = _timed(context, {
        "one instruction": lambda: encode_packed(pair.ours, shared),
        "no common tokens": lambda: encode_packed(pair.ours, apart),
    })  # fmt: skip
    seconds = result["seconds"]
    ratio = seconds["no common tokens"] / seconds["one instruction"]
    return {**result, "tokens": count_tokens(shared), "goals": [report.judge("x by sharing", ratio, 2.0)]}


def touched_bytes(model, items: list[Item]) -> int:
    """Bytes of the decoder's weights that these items read: all dense ones, and the experts that are hit."""
    with torch.inference_mode():
        batch = packed_batch(items, model.dtype)
        logits = model(**batch, pooled_only=True, output_router_logits=True).router_logits
    text = model.config.text_config
    expert = 3 * text.hidden_size * text.moe_intermediate_size * torch.finfo(model.dtype).bits // 8
    hit = sum(block.topk(text.num_experts_per_tok, dim=-1).indices.unique().numel() for block in logits)
    dense = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.language_model.named_parameters()
        if ".experts." not in name and "embed_tokens" not in name
    )
    return dense + hit * expert


def _query(context: Context) -> dict[str, Any]:
    """One query of 32 tokens at the true widths: it cannot be faster than reading the weights that it touches."""
    pair = context.pair("true", "bf16")
    items = context.items([32])
    size = touched_bytes(pair.ours, items)
    context.progress("read bandwidth")
    bandwidth = read_bandwidth(1 << 24 if context.quick else 1 << 30)
    result = _timed(context, _ours(pair.ours, items))
    seconds = result["seconds"]
    ideal = size / bandwidth
    return {
        **result, "tokens": 32, "touched_bytes": size, "read_bytes_per_second": bandwidth, "ideal_seconds": ideal,
        "goals": [report.judge("of the reading time", seconds[_first(seconds)] / ideal, 1.5, at_most=True)],
    }  # fmt: skip


def _conversion(tokens: int, wanted: float | None) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        """Half the experts: the share of the decoder's FLOPs that is removed, and the share of the time."""
        pair = context.pair("true", "bf16")
        items = context.items(context.lengths(tokens))
        slots = pair.ours.config.text_config.num_experts_per_tok
        fewer = {"top_k": slots // 2}
        shapes = [item.shape for item in items]
        flops = [
            count_flops(pair.ours.config, record_of_shapes(pair.ours.config, shapes, budget, pooled_only=True))
            for budget in ({}, fewer)
        ]
        runs = {}
        for name, function in _ours(pair.ours, items, budget=None, adaptive_compute={}).items():
            runs[name] = function
        for name, function in _ours(pair.ours, items, budget=None, adaptive_compute=fewer).items():
            runs[f"{name}, top-{slots // 2}"] = function
        result = _timed(context, runs)
        seconds, removed = result["seconds"], flops[1].removed_from(flops[0])
        ours = _first(seconds)
        saved = 1 - seconds[f"{ours}, top-{slots // 2}"] / seconds[ours]
        conversion = saved / removed["decoder"]
        goals = [] if wanted is None else [report.judge("conversion", conversion, wanted)]
        return {
            **result, "tokens": count_tokens(items), "flops_removed": removed, "time_removed": saved,
            "conversion": conversion, "flops": [entry.decoder for entry in flops], "goals": goals,
        }  # fmt: skip

    return run


def trim_memory(collect: bool = True) -> None:
    """Gives freed memory back to the system, so that the next peak is the next run's own; `collect`: cycles, too."""
    if collect:
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def block_activation_bytes(config, tokens: int, element: int) -> int:
    """What the widest block must hold at once: residual, normed input, and its mixer's projections and output."""
    text = config.text_config
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    delta = 2 * (2 * keys + values) + 2 * values  # projected and convolved, gate and output
    heads = text.num_attention_heads * text.head_dim
    attention = 3 * heads + 2 * text.num_key_value_heads * text.head_dim
    return tokens * element * (2 * text.hidden_size + max(delta, attention))


def _long(context: Context) -> dict[str, Any]:
    """Eight times the items in one packing: time per token, and peak memory."""
    pair = context.pair("text", "bf16")
    lengths = context.lengths(8192)
    few, many = context.items(lengths), context.items(lengths * 8)
    runs = {f"{name}, {count_tokens(items)} tokens": function
            for items in (few, many) for name, function in _ours(pair.ours, items, budget=None).items()}  # fmt: skip
    memory = {}
    for items in (few, many):
        name = _first(_ours(pair.ours, items))
        run = _ours(pair.ours, items, budget=None)[name]
        run()
        trim_memory()
        before = resident_bytes()
        with peak_memory() as peak:
            run()
        needed = pair.weight_bytes + block_activation_bytes(
            pair.ours.config, count_tokens(items), torch.finfo(pair.ours.dtype).bits // 8
        )
        if peak["bytes"] is not None and before is not None:
            used = pair.weight_bytes + peak["bytes"] - before
            memory[str(count_tokens(items))] = {"bytes": used, "needed": needed, "ratio": used / needed}
    result = _timed(context, runs)
    seconds = result["seconds"]
    ours = OURS if any(name.startswith(f"{OURS},") for name in seconds) else OURS_TORCH
    per_token = {count_tokens(items): seconds[f"{ours}, {count_tokens(items)} tokens"] / count_tokens(items)
                 for items in (few, many)}  # fmt: skip
    growth = per_token[count_tokens(many)] / per_token[count_tokens(few)]
    goals = [report.judge("time per token", growth, 1.1, at_most=True)]
    goals += [report.judge(f"memory at {name}", entry["ratio"], 1.3, at_most=True) for name, entry in memory.items()]
    return {**result, "tokens": count_tokens(many), "memory": memory, "seconds_per_token": per_token, "goals": goals}


def _bits(dtype: str) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        """The same bits for one and two threads, and for an item alone and in its batch."""
        pair = context.pair("text", dtype)
        items = context.items([2, 17, 63, 64, 65, 130, 257][: 5 if context.quick else 7])
        with threads(1):
            one = encode_packed(pair.ours, items)
        with threads(2):
            two = encode_packed(pair.ours, items)
        alone = torch.cat([encode_packed(pair.ours, [item]) for item in items])
        batch = encode_packed(pair.ours, items)
        same_threads = float((one == two).all(1).float().mean())
        same_alone = float((alone == batch).all(1).float().mean())
        return {
            "tokens": count_tokens(items),
            "seconds": {},
            "goals": [
                report.judge("items with equal bits, 1 and 2 threads", same_threads, 1.0),
                report.judge("items with equal bits, alone and in a batch", same_alone, 1.0),
            ],
        }

    return run


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    "text-bf16": _text("bf16", 6.0),
    "mixed-bf16": _mixed,
    "shared-prefix": _shared_prefix,
    "long": _long,
    "bits-bf16": _bits("bf16"),
    "text-fp32": _text("fp32", 2.5),
    "bits-fp32": _bits("fp32"),
    "query": _query,
    "conversion-2k": _conversion(2048, None),
    "conversion-8k": _conversion(8192, None),
    "conversion-32k": _conversion(32768, 0.85),
}


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases; those of one model stand together, since it is built once."""
    return list(CASES)


def _cells(record: report.Record, name: str, value: float | None, number: int) -> dict[str, str]:
    speed = "" if value is None or ", top-" in name else f"{_tokens_of(name, record['tokens']) / value:.0f}"
    return {"system": name, "time": "" if value is None else report.seconds_text(value), "tokens/s": speed}


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results: a line per system, the goals on the first one."""
    lines = []
    for record in records:
        lines += report.system_rows([record], _cells)
        for name, reason in record.get("not_run", {}).items():
            lines.append({"system": f"{name} not run", "goal": reason[:100]})
    return lines


def _tokens_of(name: str, tokens: int) -> int:
    """Tokens of a run whose name says how many, else the case's."""
    words = name.rsplit(", ", 1)[-1].split()
    return int(words[0]) if len(words) == 2 and words[1] == "tokens" else tokens


def plot(records: list[report.Record], path: Path) -> Path:
    """Tokens per second of each system, by case."""
    shown = [record for record in records if record["seconds"]]
    drawing, axes = report.figure(max(1, len(shown)), height=2.6)
    for record, axis in zip(shown, axes):
        names = list(record["seconds"])
        speeds = [_tokens_of(name, record["tokens"]) / record["seconds"][name] for name in names]
        report.bars(axis, names, speeds, f"{record['case']}: tokens/s")
    return report.save_figure(drawing, path)
