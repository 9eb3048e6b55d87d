"""The suite `rollouts`: what a group of GRPO's rollouts costs, against one full forward of the same items.

Gates that save as trained ones do: a one-shot gate that drops 70 % of the visual tokens after the first block, and
gates that drop gradually and skip experts. The rollouts of an item share the vision tower and the blocks before the
first gate, and what they drop is not computed. Peers: the same rollouts without sharing, or without removing anything.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from modeling_moemb.gates_moemb import attach_gates

from . import benchmark_report as report
from .benchmark_encode import Context
from .benchmark_models import ModelPair, image_item, packed_batch
from .benchmark_timing import interleave
from .grpo_actions import SAMPLED, ActionReplay, ActionSampler, Exploration, rollout_keys
from .grpo_run import start_saving


GROUP = 8
AT_MOST = 4.0
TOLERANCE = 1e-4
FULL, ROLLOUTS = "one full forward", f"{GROUP} rollouts"
UNSHARED, KEPT = f"{GROUP} rollouts, nothing shared", f"{GROUP} full forwards"

GATES = {
    "one-shot": ({"keep": {"layer": 1, "width": 256}}, {"keep": 0.7}),
    "gradual": ({"gradual": {"blocks": [1, 2, 3]}, "skip": {"blocks": [1, 2, 3]}}, {"gradual": 0.5, "skip": 0.5}),
}
BUDGETS = {
    "one-shot": {"token_pruning": {"layer": 1, "score": "gate", "threshold": 0.5}},
    "gradual": {"gradual_pruning": {}, "expert_skip": {}},
}


def _case(kind: str, dtype: str) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        pair = context.pair("text", dtype)
        gates, saving = GATES[kind]
        attach_gates(pair.ours, gates)
        try:
            for name, probability in saving.items():
                start_saving(pair.ours, [name], probability)
            with torch.no_grad():
                return _compare(context, pair, kind, dtype)
        finally:  # the pair is kept for other suites
            pair.ours.gates = pair.ours.config.gates = None

    return run


def _compare(context: Context, pair: ModelPair, kind: str, dtype: str) -> dict[str, Any]:
    generator, side = torch.Generator().manual_seed(0), 8 if context.quick else 40
    items = [image_item(side, side, 6 if context.quick else 64, generator) for _ in range(2 if context.quick else 4)]
    model, budget, count = pair.ours, BUDGETS[kind], len(items)
    once, often = (packed_batch(given, model.dtype) for given in (items, [i for i in items for _ in range(GROUP)]))
    keys = rollout_keys(0, 0, torch.arange(GROUP * count), 0)
    exploration = Exploration(0.0, 1, model.config.text_config.num_hidden_layers)

    def sample() -> tuple[ActionSampler, torch.Tensor]:
        starts = once["cu_seq_lens_q"][:-1].long().repeat_interleave(GROUP)
        roles = torch.full((GROUP * count,), SAMPLED)
        policy = ActionSampler(keys, exploration, roles, starts, once["input_ids"].numel())
        output = model(**once, adaptive_compute=budget, gate_policy=policy, rollouts=GROUP, pooled_only=True)
        return policy, output.pooler_output

    policy, shared = sample()
    width = int(policy.lengths.max())
    everywhere = torch.arange(GROUP * count)
    empty = torch.zeros(GROUP * count, width, dtype=torch.long)
    actions = policy.write("actions", empty, everywhere, torch.zeros_like(everywhere))

    def unshared() -> torch.Tensor:
        replay = ActionReplay(keys, exploration, actions)
        return model(**often, adaptive_compute=budget, gate_policy=replay, pooled_only=True).pooler_output

    difference = (F.normalize(shared.float(), dim=-1) - F.normalize(unshared().float(), dim=-1)).abs().max().item()
    if dtype == "fp32" and not difference <= TOLERANCE:
        return {"failed": f"rollouts differ from the same rollouts without sharing by {difference:.1e}"}
    runs = {
        FULL: lambda: model(**once, adaptive_compute={}, pooled_only=True),
        ROLLOUTS: sample,
        UNSHARED: unshared,
        KEPT: lambda: model(**often, adaptive_compute={}, pooled_only=True),
    }
    timing = interleave(runs, context.protocol, progress=context.progress)
    seconds = {name: entry.median for name, entry in timing.timings.items()}
    goal = report.judge(f"{ROLLOUTS} over one full forward", seconds[ROLLOUTS] / seconds[FULL], AT_MOST, at_most=True)
    saved = sum(int(call.actions.sum()) for call in policy.calls.values()) / int(policy.lengths.sum())
    return {
        "items": count, "tokens": once["input_ids"].numel(), "saved": saved, "seconds": seconds,
        "difference": difference, "timing": timing.record(), "goals": [goal],
    }  # fmt: skip


CASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    f"{kind}-{dtype}": _case(kind, dtype) for kind in GATES for dtype in ("fp32", "bf16")
}


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases."""
    return list(CASES)


def _cells(record: report.Record, name: str, value: float, number: int) -> dict[str, str]:
    return {
        "what": name,
        "time": report.seconds_text(value),
        "full forwards": f"{value / record['seconds'][FULL]:.2f}x",
        "saved": f"{100 * record['saved']:.0f}%" if number == 1 else "",
        "difference": f"{record['difference']:.1e}" if number == 1 else "",
    }


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results: a line per way to run the group."""
    return report.system_rows(records, _cells)


def plot(records: list[report.Record], path: Path) -> Path:
    """Each way to run the group, in full forwards."""
    drawing, axes = report.figure(max(1, len(records)), height=2.2)
    for record, axis in zip(records, axes):
        values = [seconds / record["seconds"][FULL] for seconds in record["seconds"].values()]
        report.bars(axis, list(record["seconds"]), values, f"{record['case']}: full forwards")
    return report.save_figure(drawing, path)
