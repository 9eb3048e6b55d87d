"""The compute dial against the clock: all policies in turn on one batch, time by scope, conversion, peak memory."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modeling_moemb.compute_moemb import Flops, count_flops

from .benchmark_dishonest import expert_loop, masking
from .benchmark_encode import trim_memory
from .benchmark_machine import peak_memory, resident_bytes
from .benchmark_timing import CLOCKS, Protocol, interleave, quartiles
from .dial_policies import BASELINE, LOOP, MASKING, Prepared
from .saliency import expert_blocks


SCOPES = ("total", "decoder", "moe")


class ScopeClock:
    """
    Times whole calls of a model, and inside them the decoder and the expert blocks.

    Args:
        model (`MoEMBModel`): the model; watched while the context lasts.
        clock (`Callable[[], float]`): returns seconds.
    """

    def __init__(self, model: Any, clock: Callable[[], float] = time.perf_counter):
        self.model, self.clock = model, clock
        self.samples: dict[str, list[dict[str, float]]] = {}
        self._spent = dict.fromkeys(SCOPES, 0.0)
        self._handles: list[Any] = []

    def __enter__(self) -> "ScopeClock":
        watched = [("decoder", self.model.language_model), *(("moe", block) for block in expert_blocks(self.model))]
        for scope, module in watched:
            started: list[float] = []

            def begin(_, args, started=started):
                started.append(self.clock())

            def end(_, args, output, scope=scope, started=started):
                self._spent[scope] += self.clock() - started.pop()

            self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def timed(self, name: str, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function, which then adds a sample under `name` at each call."""

        def run():
            self._spent = dict.fromkeys(SCOPES, 0.0)
            start = self.clock()
            result = function()
            self._spent["total"] = self.clock() - start
            self.samples.setdefault(name, []).append(dict(self._spent))  # calls that are not timed add to it, too
            return result

        return run

    def rounds(self, name: str, repeats: int, count: int) -> list[dict[str, float]]:
        """Seconds of each scope in the last `count` rounds, each the mean of its `repeats` calls."""
        samples = self.samples[name][-count * repeats :]  # those before are of the warm-up
        return [
            {scope: statistics.fmean(sample[scope] for sample in samples[first : first + repeats]) for scope in SCOPES}
            for first in range(0, len(samples), repeats)
        ]


@contextlib.contextmanager
def executed(model: Any, policy: Prepared) -> Iterator[dict[str, Any]]:
    """The policy at work in a model; yields the arguments of forward."""
    arguments = {"adaptive_compute": policy.budget, "pooled_only": True, "share_prefixes": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(policy.applied(model))
        if policy.policy.execution == LOOP:
            stack.enter_context(expert_loop(model))
        elif policy.policy.execution == MASKING:
            stack.enter_context(masking(model, policy.budget))
            arguments |= {"adaptive_compute": {}, "output_compute": True}
        yield arguments


@torch.inference_mode()
def work_of(model: Any, features: Mapping[str, Tensor], policy: Prepared) -> tuple[Flops, int]:
    """
    What a batch costs when what the policy removes is removed, from a run that records it.

    Returns:
        FLOPs, and the bytes of the decoder's weights that are read: all dense ones, and the experts that are hit.
    """
    arguments = {"pooled_only": True, "share_prefixes": False, "output_compute": True}
    with policy.applied(model):
        output = model(**features, adaptive_compute=policy.budget, **arguments)
    hit = int((output.compute.expert_load.sum(dim=1) > 0).sum())
    return count_flops(model.config, output.compute), weight_bytes(model, hit)


def weight_bytes(model: Any, experts: int) -> int:
    """Bytes of the decoder's dense weights, and of so many experts."""
    block = expert_blocks(model)[0].experts
    each = sum(weight[0].numel() * weight.element_size() for weight in (block.gate_up_proj, block.down_proj))
    dense = sum(
        weight.numel() * weight.element_size()
        for name, weight in model.language_model.named_parameters()
        if ".experts." not in name and "embed_tokens" not in name
    )
    return dense + experts * each


def time_policies(
    model: Any,
    features: Mapping[str, Tensor],
    policies: Sequence[Prepared],
    protocol: Protocol,
    progress: Callable[[str], None] = lambda text: None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """
    Times policies on one batch, one after the other in each round.

    Args:
        model (`MoEMBModel`): the model, in evaluation mode.
        features (`Mapping[str, Tensor]`): the model's inputs.
        policies (`Sequence[Prepared]`): full compute first.
        protocol (`Protocol`): rounds and clock.
        progress (`Callable[[str], None]`, *optional*): is told what runs.
        bandwidth (`float`, *optional*): bytes per second that can be read from memory.

    Returns:
        `dict`: `items`, `tokens`, `timing` (see `Interleaved`), and `policies`: by name `seconds` and
        `flops_removed`, `time_removed` and its quartiles (see [`time_removed`]), `conversion` by scope, `qps`,
        `peak_bytes` (above what was resident), `weight_bytes` that are read, and `floor_seconds`, what reading them
        once takes. FLOPs and time are compared with full compute, those of the expert loop with full compute in the
        expert loop when that is there.
    """
    work = {policy.name: work_of(model, features, policy) for policy in policies}
    memory = {}
    with torch.inference_mode(), ScopeClock(model, CLOCKS[protocol.clock]) as clock:
        runs = {policy.name: clock.timed(policy.name, _call(model, features, policy)) for policy in policies}
        timing = interleave(runs, protocol, progress=progress)
        trim_memory()
        for policy in policies:
            progress(f"{policy.name}, memory")
            memory[policy.name] = _peak(_call(model, features, policy))
    items = _items(features)
    loop = next((p.name for p in policies if p.policy.execution == LOOP and not p.budget and p.keep is None), BASELINE)
    rounds = {}
    for name, entry in timing.timings.items():
        every = clock.rounds(name, entry.repeats, timing.rounds)
        rounds[name] = [every[number] for number in timing.counted]
    seconds = {name: {scope: statistics.median(row[scope] for row in kept) for scope in SCOPES}
               for name, kept in rounds.items()}  # fmt: skip
    rows = {}
    for policy in policies:
        full = loop if policy.policy.execution == LOOP else BASELINE
        removed = work[policy.name][0].removed_from(work[BASELINE][0])
        low, middle, high = time_removed(rounds[policy.name], rounds[full])
        rows[policy.name] = {
            "seconds": seconds[policy.name], "qps": items / seconds[policy.name]["total"], "flops_removed": removed,
            "time_removed": middle, "time_removed_quartiles": {scope: [low[scope], high[scope]] for scope in SCOPES},
            "compared_with": full, "peak_bytes": memory[policy.name],
            "weight_bytes": work[policy.name][1],
            "floor_seconds": None if bandwidth is None else work[policy.name][1] / bandwidth,
            "conversion": {scope: middle[scope] / removed[scope] if removed[scope] > 1e-9 else None
                           for scope in SCOPES},
        }  # fmt: skip
    return {
        "items": items, "tokens": _tokens(features), "visual_tokens": _visual(model, features),
        "timing": timing.record(), "policies": rows,
    }  # fmt: skip


def time_removed(
    rounds: Sequence[Mapping[str, float]], full: Sequence[Mapping[str, float]]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """
    The share of the time that is gone, by scope: lower quartile, median and upper quartile over the rounds.

    A round is compared with full compute of the same round: a machine that is slow for a while is slow for both.
    """
    low, middle, high = {}, {}, {}
    for scope in SCOPES:
        values = sorted(1 - mine[scope] / whole[scope] for mine, whole in zip(rounds, full))
        low[scope], high[scope] = quartiles(values)
        middle[scope] = statistics.median(values)
    return low, middle, high


def _call(model: Any, features: Mapping[str, Tensor], policy: Prepared) -> Callable[[], Tensor]:
    def run():
        with executed(model, policy) as arguments:
            return model(**features, **arguments).pooler_output

    return run


def _peak(run: Callable[[], Tensor]) -> int | None:
    """Bytes that a call needs above what is resident before it."""
    trim_memory(collect=False)
    before = resident_bytes()
    with peak_memory() as peak:
        run()
    if peak["bytes"] is None or before is None:
        return None
    return max(0, peak["bytes"] - before)


def _tokens(features: Mapping[str, Tensor]) -> int:
    mask = features.get("attention_mask")
    return features["input_ids"].numel() if mask is None else int(mask.sum())


def _items(features: Mapping[str, Tensor]) -> int:
    bounds = features.get("cu_seq_lens_q")
    return features["input_ids"].shape[0] if bounds is None else len(bounds) - 1


def _visual(model: Any, features: Mapping[str, Tensor]) -> int:
    grids = [features[name] for name in ("image_grid_thw", "video_grid_thw") if features.get(name) is not None]
    return sum(int(grid.prod(-1).sum()) for grid in grids) // model.config.vision_config.spatial_merge_size**2
