"""What a model card says of measurements: tables, and the Hub's `model-index`, from the files that hold the figures.

Every function takes the content of a file and formats it; none of them computes or rounds beyond the digits it shows.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .benchmark_report import load_text
from .evaluation_benchmark_report import result_rows
from .evaluation_report import overview_rows, percent


EVALUATION, DIAL, SPEED = "results/evaluation.json", "results/dial.json", "results/bench.json"
BENCHMARKS = "results/benchmarks"
SERVING = "results/serving.json"
NOT_EVALUATED = "No evaluation of this repository has been run."
_LONGEST_BUDGET = 70
_METRICS = {"R@1": ("recall_at_1", "Recall@1"), "R@10": ("recall_at_10", "Recall@10"), "MRR": ("mrr", "MRR")}


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def evaluation_part(report: Mapping[str, Any]) -> list[str]:
    """The lines of the evaluation section: what brackets mean, and one row per line of a task."""
    return [
        "Per cent, with 95 % bootstrap intervals in parentheses; chance and the best baseline on the same items.",
        "",
        *overview_rows(report),
    ]


def benchmark_part(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """
    Tables of public benchmarks.

    Args:
        reports (`Mapping[str, Mapping]`): by file name, what `moemb evaluate` writes for a benchmark: `benchmark`,
            `tasks` (each with `name`, `group`, `metric`, `value` as a share, `interval` and `complete`), and `mean`
            where all tasks were run.
    """
    lines = []
    for report in reports.values():
        lines += [
            "",
            f"### {report['benchmark']}",
            "",
            *result_rows(report),
        ]
        if report["mean"] is not None:
            lines += ["", f"Mean of the benchmark: {percent(report['mean'])}."]
    return lines


def dial_part(report: Mapping[str, Any], speed: Mapping[str, Any] | None = None) -> list[str]:
    """
    The table of the compute dial: for each policy its quality, what it removes, and queries per second.

    Args:
        report (`Mapping`): what `moemb bench --config` wrote for a recipe with tasks (quality).
        speed (`Mapping`, *optional*): the same of a recipe that times; by default `report` itself, if it timed.
    """
    metric = report["config"].get("metric", "R@10")
    timed = _timed(speed) or _timed(report)
    names = [policy["name"] for policy in report["policies"]]
    budgets = {policy["name"]: _budget(policy["adaptive_compute"]) for policy in report["policies"]}
    head = ["policy", "`adaptive_compute`", f"{metric} (interval)", "change", "FLOPs removed", "QPS", "time removed"]
    lines = [_dial_text(report, metric, timed), ""]
    lines += [f"| {' | '.join(head)} |", f"| --- | --- |{' ---: |' * (len(head) - 2)}"]
    quality = report.get("quality", {}).get("policies", {})
    for name in names:
        row = timed["policies"].get(name) if timed else None
        mean, change = (quality.get(name, {}).get(key, {}).get(metric) for key in ("mean", "change"))
        removed = report.get("work", {}).get(name, {}).get("flops_removed") or (row or {}).get("flops_removed")
        cells = [
            name,
            budgets[name],
            "" if mean is None else f"{percent(mean['value'])} ({_between(mean['interval'])})",
            "" if change is None or name == names[0] else f"{100 * change['value']:+.1f}",
            "" if removed is None else _share(removed["total"]),
            "" if row is None else f"{row['qps']:.3g}",
            "" if row is None or row["time_removed"]["total"] is None else _share(row["time_removed"]["total"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _timed(report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The largest size that was timed."""
    sizes = [size for size in (report or {}).get("sizes", []) if "failed" not in size]
    return max(sizes, key=lambda size: size["size"], default=None)


def _dial_text(report: Mapping[str, Any], metric: str, timed: Mapping[str, Any] | None) -> str:
    tasks = report.get("quality", {}).get("tasks", [])
    text = "Quality was not measured."
    if tasks:
        text = f"Quality is {metric} in per cent with 95 % bootstrap intervals, over {len(tasks)} held-out tasks."
    text += " Removed is per cent of full compute."
    if timed is None:
        return f"{text} Time was not measured."
    load = load_text(timed)
    busy = f"; other processes took {load} of the machine" if load else ""
    machine = report["machine"]
    return (
        f"{text} QPS is items per second at {timed['items']} items and {timed['tokens']} tokens a batch, medians of "
        f"interleaved rounds on {machine['processor']}, threads: {machine['threads']}{busy}."
    )


def _budget(settings: Mapping[str, Any]) -> str:
    text = json.dumps(dict(settings))
    if not settings:
        return ""
    return f"`{text}`" if len(text) <= _LONGEST_BUDGET else f"in `{DIAL}`"


def _between(interval: Sequence[float]) -> str:
    return f"{percent(interval[0])}–{percent(interval[1])}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}"


def serving_part(report: Mapping[str, Any]) -> list[str]:
    """What was compared when the plain variant was served, from `moemb serving`'s report."""
    compared = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"The plain variant, served by `{report['server']}`, beside our code at full compute ({compared}; "
        f"{report['dtype']}, {report['device']}):",
        "",
        "| route | items | median cosine | lowest cosine |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['route']} | {row['items']} | {row['median_cosine']:.6f} | {row['lowest_cosine']:.6f} |"
        for row in report["routes"]
    ]
    return [
        *lines,
        *([""] if report["not_run"] else []),
        *(f"- Not run: {sentence}" for sentence in report["not_run"]),
    ]


def model_index(folder: Path, name: str) -> list[dict[str, Any]]:
    """
    The `model-index` of a repository.

    Args:
        folder (`Path`): the repository, with its results.
        name (`str`): the model's name.

    Returns:
        `list[dict]`: empty when nothing was measured.
    """
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    if (folder / EVALUATION).is_file():
        for task in read_json(folder / EVALUATION)["tasks"]:
            for line in task["lines"]:
                system = line["systems"][0]
                part = "" if line["line"] == "all" else f" ({line['line']})"
                results += [
                    EvalResult(
                        task_type="retrieval",
                        task_name=f"{task['kind']} retrieval",
                        dataset_type=f"{name.rsplit('/', 1)[-1]}/{task['name']}",
                        dataset_name=f"{task['name']}{part}",
                        dataset_config=line["line"],
                        metric_type=kind,
                        metric_name=f"{title}, per cent",
                        metric_value=round(100 * system[metric]["value"], 2),
                    )
                    for metric, (kind, title) in _METRICS.items()
                ]
    for path in benchmark_files(folder):
        report = read_json(path)
        results += [
            EvalResult(
                task_type="retrieval",
                dataset_type=task.get("dataset") or f"{report['benchmark']}/{task['name']}",
                dataset_name=f"{report['benchmark']} {task['name']}",
                dataset_revision=task.get("revision"),
                metric_type=task["metric"],
                metric_value=round(100 * task["value"], 2),
            )
            for task in report["tasks"]
            if task["complete"]  # the Hub compares what has the same name
        ]
    return eval_results_to_model_index(name, results) if results else []


def benchmark_files(folder: Path) -> list[Path]:
    """Result files of public benchmarks in a repository."""
    return sorted((folder / BENCHMARKS).glob("*.json"))
