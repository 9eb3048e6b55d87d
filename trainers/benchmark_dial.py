"""`moemb bench --config`: the compute dial, every policy on the same batches in one process.

Quality on held-out tasks, FLOPs removed, time, queries per second, how much of the removed FLOPs shows up as time
(conversion), and peak memory, beside think-then-embed and two ways to save nothing. Batches that were run and sizes
that were timed are kept: an interrupted run goes on.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from . import benchmark_report as report
from .benchmark_dial_config import DialBenchConfig
from .benchmark_dial_inputs import RandomInputs, RealInputs, baseline
from .benchmark_dial_report import console_rows, markdown, plot
from .benchmark_dial_timing import time_policies
from .benchmark_kernel_switch import active_kernels
from .benchmark_machine import machine, read_bandwidth
from .benchmark_timing import Protocol
from .corpus_sources import cache_folder
from .dial_policies import BASELINE, MASKING, REMOVAL, Policy, Prepared
from .dial_quality import DialQuality, Outcome, quality_report
from .evaluation_report import package_versions, prepare_output
from .files import write_atomically


# At the widths of Qwen3.5-35B-A3B, decoder scope: image tokens of the batch, packed tokens, and what must be reached.
TOKEN_GOAL = (4096, 0.85)
EXPERT_GOAL = (16384, 0.75)
MASKING_GOAL = 0.05


def run_config(config: DialBenchConfig, name: str, output: Path, protocol: Protocol, args: argparse.Namespace) -> int:
    """
    Measures, writes `<output>/<name>.json`, `.md` and `.png`, and prints a table.

    Args:
        config ([`DialBenchConfig`]): the settings.
        name (`str`): name of the report.
        output (`Path`): its folder.
        protocol (`Protocol`): timing.
        args (`argparse.Namespace`): the flags `quick`, `fresh` and `no_plots`.

    Returns:
        `int`: 1 when a size could not be timed, else 0.
    """
    prepare_output(output / f"{name}.json")
    config = config.quick() if args.quick else config
    inputs = RandomInputs(config) if config.random else RealInputs(config)
    policies = [baseline()]
    for policy_name, policy in tqdm(config.policies.items(), desc="Preparing policies", unit="policy", disable=None):
        policies.append(inputs.prepare(policy_name, policy))
    result: dict[str, Any] = {
        "recipe": name, "model": {"name": inputs.name, "fingerprint": inputs.fingerprint},
        "command": shlex.join(["moemb", *sys.argv[1:]]), "config": config.record(), "quick": args.quick,
        "machine": machine(), "kernels": active_kernels(), "protocol": asdict(protocol),
        "versions": package_versions(),
    }  # fmt: skip
    if config.candidates:
        chosen, result["choice"] = choose(config, inputs)
        policies += [chosen] if chosen is not None else []
    result["policies"] = [policy.record() for policy in policies]
    if config.tasks and not args.quick:
        result |= measure_quality(config, inputs, policies)
    result["sizes"], result["think"] = _timed(config, inputs, policies, protocol, args, result)
    return _finish(result, output / f"{name}.json", args)


def _quality(config: DialBenchConfig, inputs: RealInputs, tasks: Sequence[Any]) -> DialQuality:
    cache = cache_folder() / "evaluation" / "dial"
    return DialQuality(inputs.model, inputs.processor, inputs.fingerprint, tasks, cache, config.batch_size)


def measure_quality(config: DialBenchConfig, inputs: RealInputs, policies: Sequence[Prepared]) -> dict[str, Any]:
    """Quality and FLOPs of the policies that remove what they remove: `quality` and `work` of the report."""
    quality = _quality(config, inputs, inputs.tasks)
    outcomes = quality.run([policy for policy in policies if policy.policy.execution == REMOVAL])
    ranks = {name: quality.ranks(outcome) for name, outcome in outcomes.items()}
    return {
        "quality": quality_report(ranks, inputs.tasks, config.bootstrap_samples, config.seed),
        "work": _work(outcomes),
    }


def _work(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """By policy: FLOPs removed by scope, and the fraction of (token, expert) pairs that were not run."""
    full = outcomes[BASELINE]
    return {
        name: {
            "flops": asdict(outcome.flops), "flops_removed": outcome.flops.removed_from(full.flops),
            "pairs_removed": 1 - outcome.pairs / full.pairs,
        }
        for name, outcome in outcomes.items()
    }  # fmt: skip


def choose(config: DialBenchConfig, inputs: RealInputs) -> tuple[Prepared | None, dict[str, Any]]:
    """
    The candidate that removes the most decoder FLOPs at no more than the allowed loss, on tasks of its own.

    Returns:
        The candidate (`None`: all lose more), under a name that says so, and the record of all candidates.
    """
    prepared = [baseline(), *(inputs.prepare(name, policy) for name, policy in config.candidates.items())]
    tasks = inputs.choosing_tasks()
    quality = _quality(config, inputs, tasks)
    outcomes = quality.run(prepared)
    ranks = {name: quality.ranks(outcome) for name, outcome in outcomes.items()}
    found = quality_report(ranks, tasks, config.bootstrap_samples, config.seed)["policies"]
    work = _work(outcomes)
    rows = [
        {
            "name": policy.name, "change": found[policy.name]["change"][config.metric],
            "flops_removed": work[policy.name]["flops_removed"],
        }
        for policy in prepared[1:]
    ]  # fmt: skip
    good = [row for row in rows if 100 * row["change"]["value"] >= -config.most_loss]
    best = max(good, key=lambda row: row["flops_removed"]["decoder"], default=None)
    record = {"tasks": [task.name for task in tasks], "most_loss": config.most_loss, "metric": config.metric,
              "candidates": rows, "chosen": None if best is None else best["name"]}  # fmt: skip
    if best is None:
        return None, record
    policy = next(policy for policy in prepared if policy.name == best["name"])
    return Prepared(f"chosen: {policy.name}", policy.policy, policy.budget, policy.keep, policy.calibrated), record


def _timed(
    config: DialBenchConfig,
    inputs: RealInputs | RandomInputs,
    policies: Sequence[Prepared],
    protocol: Protocol,
    args: argparse.Namespace,
    result: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The sizes, and think-then-embed; each kept as soon as it is measured."""
    conditions = {
        "code": report.code_fingerprint(), "kernels": result["kernels"], "protocol": result["protocol"],
        "quick": args.quick, "threads": result["machine"]["threads"], "processor": result["machine"]["processor"],
        "versions": result["machine"]["versions"], "model": inputs.fingerprint, "tasks": config.tasks,
        "policies": [policy.record() for policy in policies], "seed": config.seed, "gallery": config.gallery,
        "think": (config.think_tokens, config.think_items),
    }  # fmt: skip
    store = report.CaseStore(cache_folder() / "bench" / inputs.name, "dial", conditions)
    cases: dict[str, Callable[[Callable[[str], None]], dict[str, Any]]] = {}
    for size in config.sizes:
        cases[str(size)] = lambda progress, size=size: _time_size(
            config, inputs, policies, protocol, size, args.quick, progress
        )
    if config.think_tokens:
        cases["think"] = lambda progress: _think(config, inputs, protocol, progress)
    with tqdm(cases.items(), unit="case", disable=None) as bar:
        for name, case in bar:
            if args.fresh or store.get(name) is None:
                store.put(name, _attempt(case, lambda text, name=name: _tell(bar, name, text)))
    sizes = [store.get(str(size), failed=True) for size in config.sizes]
    return sizes, store.get("think", failed=True) if config.think_tokens else None


def _tell(bar: Any, name: str, text: str) -> None:
    bar.set_description_str(f"{name}: {text}"[:90])


def _attempt(case: Callable, progress: Callable[[str], None]) -> dict[str, Any]:
    """A case; one that does not fit into the memory does not end the others."""
    try:
        return case(progress)
    except (RuntimeError, MemoryError) as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def _time_size(
    config: DialBenchConfig,
    inputs: RealInputs | RandomInputs,
    policies: Sequence[Prepared],
    protocol: Protocol,
    size: int,
    quick: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    features = inputs.features(size)
    progress("read bandwidth")
    bandwidth = _bandwidth(1 << 24 if quick else 1 << 28)
    found = time_policies(inputs.model, features, policies, protocol, progress, bandwidth)
    goals = []
    if config.model == "width-true":
        goals = conversion_goals(found, {policy.name: policy.policy for policy in policies})
    return {"size": size, **found, "read_bytes_per_second": bandwidth, "goals": goals}


@cache
def _bandwidth(size: int) -> float:
    """Bytes per second that can be read from memory, measured once."""
    return read_bandwidth(size)


def conversion_goals(found: Mapping[str, Any], policies: Mapping[str, Policy]) -> list[dict[str, Any]]:
    """What must be reached at the true widths, for the batch sizes that it is asked of."""
    goals = []
    for name, policy in policies.items():
        conversion = found["policies"][name]["conversion"]["decoder"]
        dropping, fewer = "token_pruning" in policy.adaptive_compute, _fewer_experts(policy)
        if policy.execution == MASKING and found["visual_tokens"] >= TOKEN_GOAL[0]:
            goals.append(report.judge(f"{name}: conversion", conversion, MASKING_GOAL, at_most=True))
        elif policy.execution != REMOVAL or dropping == fewer:  # dishonest ones, full compute, or a combination
            continue
        elif dropping and found["visual_tokens"] >= TOKEN_GOAL[0]:
            goals.append(report.judge(f"{name}: conversion", conversion, TOKEN_GOAL[1]))
        elif fewer and found["tokens"] >= EXPERT_GOAL[0]:
            goals.append(report.judge(f"{name}: conversion", conversion, EXPERT_GOAL[1]))
    return goals


def _fewer_experts(policy: Policy) -> bool:
    return policy.skip_rate is not None or any(
        key in policy.adaptive_compute for key in ("top_k", "per_modality", "random_k", "tiered_top_k", "modes")
    )


def _think(
    config: DialBenchConfig, inputs: RealInputs | RandomInputs, protocol: Protocol, progress: Callable[[str], None]
) -> dict[str, Any]:
    from .benchmark_think import ThinkThenEmbed

    features = inputs.features_of(config.think_items)
    # a call takes many times a forward pass: a few rounds tell as much
    rounds = replace(protocol, rounds=min(3, protocol.rounds))
    return ThinkThenEmbed(inputs.model, features, config.think_tokens).measure(rounds, progress)


def _finish(result: dict[str, Any], path: Path, args: argparse.Namespace) -> int:
    write_atomically(path, json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n")
    write_atomically(path.with_suffix(".md"), markdown(result))
    written = [path, path.with_suffix(".md")]
    if not args.no_plots and any("failed" not in case for case in result["sizes"]):
        written.append(plot(result, path.with_suffix(".png")))
    for title, rows in console_rows(result).items():
        print(f"{title}\n{report.table(rows)}\n")
    failed = [case for case in [*result["sizes"], *filter(None, [result["think"]])] if "failed" in case]
    for case in failed:
        print(f"{case['case']} failed: {case['failed']}", file=sys.stderr)
    missed = [goal for case in result["sizes"] for goal in case.get("goals", ()) if not goal["met"]]
    for goal in missed if not args.quick else ():
        print(f"goal missed: {report.goal_text([goal])}", file=sys.stderr)
    print("\n".join(f"wrote {file}" for file in written))
    return int(bool(failed))
