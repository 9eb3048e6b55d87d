"""The suite `train`: forward and backward with LoRA on the dense projections, router and experts frozen."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import benchmark_report as report
from .benchmark_encode import OURS, OURS_TORCH, Context
from .benchmark_kernel_switch import any_kernel, kernels_off
from .benchmark_models import Item, ModelPair, packed_batch, padded_batch
from .benchmark_peers import StockChoice, best_stock, by_length, count_tokens, sample_of_all_lengths
from .benchmark_report import BenchmarkError
from .benchmark_timing import interleave
from .lora import use_packed_adapters


TARGETS = (
    r".*language_model\.layers\..*\.(in_proj_qkv|in_proj_z|out_proj|q_proj|k_proj|v_proj|o_proj)"
    r"|.*language_model\.layers\..*\.shared_expert\.(gate_proj|up_proj|down_proj)"
)
RANK = 16
GRADIENT_TOLERANCE = 1e-4
BACKENDS = ("eager", "grouped_mm")  # batched_mm would keep a copy of the weights for every pair until the backward
BATCH_SIZES = (1, 2, 4, 8)
SEARCHED_TOKENS = 1365  # every third item by length: what transformers' best way is searched for on


def with_adapters(pair: ModelPair) -> tuple[torch.nn.Module, torch.nn.Module]:
    """
    Both models with the same LoRA adapters; all other parameters frozen.

    Args:
        pair (`ModelPair`): models on the same weights; they are changed in place.

    Returns:
        Transformers' model and ours.

    Raises:
        BenchmarkError: when peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise BenchmarkError('the suite `train` needs peft: pip install "moemb[train]"') from error
    models = []
    for model in (pair.stock, pair.ours):
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, lora_dropout=0.0)
        inject_adapter_in_model(config, model)
        if model is pair.ours:
            use_packed_adapters(model)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(model.named_parameters()):
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:  # peft starts one factor at zero, and half of the gradients would be zero
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data = (values * parameter.shape[-1] ** -0.5).to(model.dtype)
        models.append(model.train())
    return models[0], models[1]


def gradients(model) -> dict[str, Tensor]:
    """Gradients of the adapters by name; clears them."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def gradient_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over the largest entry of the whole gradient; infinite when one is missing."""
    scale = max(value.abs().max().item() for value in expected.values())
    if actual.keys() != expected.keys() or any(value is None for value in actual.values()):
        return float("inf")
    return max((actual[name].double() - value.double()).abs().max().item() for name, value in expected.items()) / scale


def step_packed(model, items: list[Item], weight: Tensor) -> bool:
    """Forward and backward of `sum(weight * unit vectors)` on one packed batch; `weight` is `(items, hidden)`."""
    pooled = model(**packed_batch(items, model.dtype), pooled_only=True).pooler_output
    (torch.nn.functional.normalize(pooled.float(), dim=-1) * weight).sum().backward()
    return True


def step_stock(model, items: list[Item], weight: Tensor, choice: StockChoice, stop: Callable[[], bool]):
    """The same in padded batches, whose gradients add up; `None` when `stop()` says to give up."""
    model.set_experts_implementation(choice.backend)
    order = by_length(items)
    for start in range(0, len(order), choice.batch_size):
        if stop():
            return None
        places = order[start : start + choice.batch_size]
        chosen = [items[place] for place in places]
        states = model(**padded_batch(chosen, model.dtype), use_cache=False).last_hidden_state
        pooled = states[torch.arange(len(chosen)), torch.tensor([len(item.ids) - 1 for item in chosen])]
        (torch.nn.functional.normalize(pooled.float(), dim=-1) * weight[places]).sum().backward()
    return True


def _step(dtype: str) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        pair = context.pair("text", dtype)
        try:
            return _compare(context, pair, dtype)
        finally:
            forget_adapters()

    return run


def forget_adapters() -> None:
    """The pair was changed in place: the next case builds its own."""
    from .benchmark_models import build_pair

    build_pair.cache_clear()


def _compare(context: Context, pair: ModelPair, dtype: str) -> dict[str, Any]:
    stock, ours = with_adapters(pair)
    items = context.items(context.lengths(4096))
    hidden = pair.ours.config.text_config.hidden_size
    weight = torch.randn(len(items), hidden, generator=torch.Generator().manual_seed(0))

    def plain():
        with kernels_off():
            return step_packed(ours, items, weight)

    runs: dict[str, Callable[[], Any]] = {OURS_TORCH: plain}
    if any_kernel():
        runs = {OURS: lambda: step_packed(ours, items, weight), **runs}
    by_name = {id(item): place for place, item in enumerate(items)}

    def peer(some: list[Item], choice: StockChoice, stop: Callable[[], bool] = lambda: False):
        done = step_stock(stock, some, weight[[by_name[id(item)] for item in some]], choice, stop)
        if done is None:
            gradients(stock)
        return done

    search = sample_of_all_lengths(items, SEARCHED_TOKENS)
    choice, candidates = best_stock(search, stock, peer, BACKENDS, context.batch_sizes(BATCH_SIZES), context.progress)
    gradients(stock)
    peer(items, choice)
    expected, differences = gradients(stock), {}
    for name, function in runs.items():
        function()
        differences[name] = gradient_difference(gradients(ours), expected)
    if dtype == "fp32" and not all(value <= GRADIENT_TOLERANCE for value in differences.values()):
        return {"failed": f"gradients differ from transformers': {differences}", "gradient_difference": differences}
    runs[str(choice)] = lambda: peer(items, choice)
    timing = interleave(runs, context.protocol, progress=context.progress)
    seconds = {name: entry.median for name, entry in timing.timings.items()}
    first = next(name for name in (OURS, OURS_TORCH) if name in seconds)
    goals = [report.judge("x over transformers", seconds[str(choice)] / seconds[first], 1.5)]
    return {
        "items": len(items), "tokens": count_tokens(items), "gradient_difference": differences,
        "searched_items": len(search), "candidates": candidates, "seconds": seconds, "timing": timing.record(),
        "goals": goals,
        "adapters": sum(bool(re.fullmatch(TARGETS, name)) for name, _ in pair.ours.named_modules()),
    }  # fmt: skip


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {"lora-fp32": _step("fp32"), "lora-bf16": _step("bf16")}


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases."""
    return list(CASES)


def _cells(record: report.Record, name: str, value: float, number: int) -> dict[str, str]:
    difference = record["gradient_difference"].get(name)
    return {
        "system": name,
        "step": report.seconds_text(value),
        "tokens/s": f"{record['tokens'] / value:.0f}",
        "gradient difference": "" if difference is None else f"{difference:.1e}",
    }


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results: a line per system."""
    return report.system_rows(records, _cells)


def plot(records: list[report.Record], path: Path) -> Path:
    """Tokens per second of a training step, by case."""
    drawing, axes = report.figure(max(1, len(records)), height=2.6)
    for record, axis in zip(records, axes):
        speeds = [record["tokens"] / value for value in record["seconds"].values()]
        report.bars(axis, list(record["seconds"]), speeds, f"{record['case']}: tokens/s, forward and backward")
    return report.save_figure(drawing, path)
