"""What `moemb bench --config` says: tables for the console and in Markdown, and the Pareto plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import benchmark_report as report
from .benchmark_dial_timing import SCOPES
from .dial_policies import BASELINE, LOOP, MASKING, REMOVAL
from .evaluation_metrics import METRICS
from .prune_experts_sweep import interval_text, points_text


_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_MARKS = "osD^vPX*"
_NOTES = {
    MASKING: "computed and multiplied by zero; its FLOPs are removed on paper only",
    LOOP: "one expert after the other; compared with full compute in the same loop where that was timed",
}


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def _scopes(values: Mapping[str, float | None], digits: int = 1) -> str:
    return " / ".join(_percent(values[scope], digits) or "-" for scope in SCOPES)


def _timed(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [case for case in result["sizes"] if "failed" not in case]


def _executions(result: Mapping[str, Any]) -> dict[str, str]:
    return {policy["name"]: policy["settings"].get("execution", REMOVAL) for policy in result["policies"]}


def console_rows(result: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Rows of the tables by their title."""
    tables = {}
    if "quality" in result:
        metric = result["config"]["metric"]
        tables["quality"] = [
            {
                "policy": name,
                **{metric: _percent(found["mean"][metric]["value"]) for metric in METRICS},
                f"change of {metric}": "" if name == BASELINE else points_text(found["change"][metric]),
                "FLOPs removed": "" if name == BASELINE else _scopes(result["work"][name]["flops_removed"]),
            }
            for name, found in result["quality"]["policies"].items()
        ]
    for case in _timed(result):
        title = f"{case['items']} items, {case['tokens']} tokens, {case['visual_tokens']} of them visual"
        tables[title] = [_time_row(name, row) for name, row in case["policies"].items()]
    think = result["think"]
    if think is not None and "failed" not in think:
        tables[f"thinking {think['tokens']} tokens"] = [
            {"system": name, "QPS": f"{think['qps'][name]:.3g}", "time": report.seconds_text(seconds)}
            for name, seconds in think["seconds"].items()
        ]
    return tables


def _time_row(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    peak = row["peak_bytes"]
    conversion = row["conversion"]["decoder"]
    return {
        "policy": name,
        "time": report.seconds_text(row["seconds"]["total"]),
        "QPS": f"{row['qps']:.3g}",
        "FLOPs removed": "" if name == BASELINE else _scopes(row["flops_removed"]),
        "time removed": "" if name == BASELINE else _scopes(row["time_removed"]),
        "conversion": "" if conversion is None else f"{conversion:.2f}",
        "floor": "" if row["floor_seconds"] is None else report.seconds_text(row["floor_seconds"]),
        "peak": "" if peak is None else f"{peak / 2**20:.0f} MB",
    }


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(row.get(name, '') for name in columns)} |" for row in rows]


def markdown(result: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    model = result["model"]
    lines = [
        f"# The compute dial of {model['name']}",
        "",
        f"Fingerprint `{model['fingerprint'][:16]}`, command `{result['command']}`. FLOPs and time removed are per "
        "cent of full compute, in three scopes: total (vision tower, merger, decoder) / decoder / MoE (routers, "
        "routed and shared experts).",
    ]
    if result["quick"]:
        lines += ["", "**Sizes of --quick: the numbers say nothing.**"]
    if "quality" in result:
        lines += _quality_part(result)
    if result.get("choice"):
        lines += _choice_part(result["choice"])
    for case in result["sizes"]:
        lines += _size_part(case, _executions(result))
    if result["think"] is not None:
        lines += _think_part(result["think"])
    lines += _policies_part(result)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    threads = result["machine"]["threads"]
    return "\n".join([*lines, "", f"{result['machine']['processor']}, {threads} threads; {versions}."]) + "\n"


def _quality_part(result: Mapping[str, Any]) -> list[str]:
    quality, metric, rows = result["quality"], result["config"]["metric"], []
    for name, found in quality["policies"].items():
        work = result["work"][name]
        rows.append({
            "policy": name, **{each: interval_text(found["mean"][each]) for each in METRICS},
            f"change of {metric}": "" if name == BASELINE else points_text(found["change"][metric]),
            "FLOPs removed": "" if name == BASELINE else _scopes(work["flops_removed"]),
            "pairs removed": "" if name == BASELINE else _percent(work["pairs_removed"]),
        })  # fmt: skip
    chance = {each: _percent(float(np.mean([t["chance"][each] for t in quality["tasks"]]))) for each in METRICS}
    rows.append({"policy": "chance", **chance})
    about = [f"{task['name']} ({task['queries']} x {task['documents']})" for task in quality["tasks"]]
    lines = [
        "",
        "## Quality",
        "",
        f"Means over {len(about)} held-out tasks (queries x documents): {', '.join(about)}. Per cent, with 95 % "
        "bootstrap intervals; changes are points from full compute, paired: all policies meet the same resampled "
        "queries. Pairs are those of token and expert. Removing experts frees memory; a token still runs as many.",
        "",
        *_table(rows),
        "",
        f"{metric} by task:",
        "",
    ]
    by_task = [
        {"policy": name} | {task: interval_text(entry[metric]) for task, entry in found["tasks"].items()}
        for name, found in quality["policies"].items()
    ]
    by_task.append({"policy": "chance"} | {t["name"]: _percent(t["chance"][metric]) for t in quality["tasks"]})
    return lines + _table(by_task)


def _choice_part(choice: Mapping[str, Any]) -> list[str]:
    rows = [
        {
            "candidate": f"**{row['name']}**" if row["name"] == choice["chosen"] else row["name"],
            f"change of {choice['metric']}": points_text(row["change"]),
            "FLOPs removed": _scopes(row["flops_removed"]),
        }
        for row in choice["candidates"]
    ]
    verdict = "none loses so little" if choice["chosen"] is None else f"'{choice['chosen']}'"
    return [
        "",
        "## Choice of a combination",
        "",
        f"The most decoder FLOPs removed at a loss of at most {choice['most_loss']:g} points of {choice['metric']}, "
        f"on other items than those above ({', '.join(choice['tasks'])}): {verdict}.",
        "",
        *_table(rows),
    ]


def _size_part(case: Mapping[str, Any], executions: Mapping[str, str]) -> list[str]:
    if "failed" in case:
        return ["", f"## {case['case']}", "", f"Failed: {case['failed']}"]
    rows = []
    for name, row in case["policies"].items():
        conversion = row["conversion"]
        rows.append(_time_row(name, row) | {
            "conversion": "" if name == BASELINE else _conversions(conversion),
            "decoder, quartiles": "" if name == BASELINE else _quartiles(row),
        })  # fmt: skip
    title = f"{case['items']} items, {case['tokens']} tokens, {case['visual_tokens']} of them visual"
    notes = []
    for execution, note in _NOTES.items():
        names = [name for name in case["policies"] if executions[name] == execution]
        notes += [f"Dishonest on purpose: {', '.join(names)}: {note}."] if names else []
    goals = [report.goal_text([goal]) for goal in case["goals"]]
    timing = case["timing"]
    lines = [
        "",
        f"## Time: {title}",
        "",
        f"Medians of {timing['rounds']} interleaved rounds; others kept the machine busy: "
        f"{report.load_text(case) or 'unknown'}. Conversion: time removed over FLOPs removed, total / decoder / MoE. "
        "Floor: reading the decoder's weights once, all dense ones and every expert that is hit. Peak: memory above "
        "what was resident, the weights among it.",
        "",
        *_table(rows),
    ]
    return lines + [text for note in notes for text in ("", note)] + (["", "; ".join(goals)] if goals else [])


def _quartiles(row: Mapping[str, Any]) -> str:
    """Conversion of the decoder at the quartiles of the rounds."""
    removed = row["flops_removed"]["decoder"]
    if row["conversion"]["decoder"] is None:
        return "-"
    return " to ".join(f"{value / removed:.2f}" for value in row["time_removed_quartiles"]["decoder"])


def _conversions(conversion: Mapping[str, float | None]) -> str:
    return " / ".join("-" if conversion[scope] is None else f"{conversion[scope]:.2f}" for scope in SCOPES)


def _think_part(think: Mapping[str, Any]) -> list[str]:
    if "failed" in think:
        return ["", "## Think-then-embed", "", f"Failed: {think['failed']}"]
    rows = [
        {"system": name, "time": report.seconds_text(seconds), "QPS": f"{think['qps'][name]:.3g}"}
        for name, seconds in think["seconds"].items()
    ]
    slower = ", ".join(f"{factor:.0f} times as long as {name}" for name, factor in think["slower"].items())
    return [
        "",
        "## Think-then-embed",
        "",
        f"{think['items']} items, {think['tokens']} tokens generated for each by transformers' greedy generation with "
        f"its cache on the same weights (experts: {think['backend']}, the faster of its back-ends), then `<emb>` read "
        "from the cache. The head is the embedding table, so the thoughts mean nothing; their cost is the same. "
        f"Thinking takes {slower}. Its vectors agree with one pass of ours over item and thoughts to a cosine of "
        f"{think['check']['least_cosine']:.4f}.",
        "",
        *_table(rows),
    ]


def _policies_part(result: Mapping[str, Any]) -> list[str]:
    rows = []
    for policy in result["policies"][1:]:
        found = policy["calibrated"] or {}
        settings = ", ".join(f"{key}: {value}" for key, value in policy["settings"].items())
        rows.append({
            "policy": policy["name"], "settings": f"`{settings}`",
            "skipped on calibration items": _percent(found.get("skip_rate"), 2),
        })  # fmt: skip
    return ["", "## Settings", "", *_table(rows)]


def plot(result: Mapping[str, Any], path: Path) -> Path:
    """Writes the PNG: FLOPs removed against time removed for each size, then quality against QPS."""
    cases = _timed(result)
    families = list(dict.fromkeys(policy["family"] for policy in result["policies"]))
    style = {
        name: (_COLOURS[n % len(_COLOURS)], _MARKS[(n + n // len(_COLOURS)) % len(_MARKS)])
        for n, name in enumerate(families)
    }
    family = {policy["name"]: policy["family"] for policy in result["policies"]}
    with_quality = "quality" in result
    drawing, axes = report.figure(len(cases) + with_quality, width=6.5, height=5.0)
    for case, axis in zip(cases, axes):
        points = [
            (name, row["flops_removed"]["decoder"], row["time_removed"]["decoder"])
            for name, row in case["policies"].items()
            if name != BASELINE
        ]
        _conversion_axis(axis, points, family, style)
        axis.set_title(f"{case['items']} items, {case['tokens']} tokens ({case['visual_tokens']} visual)", fontsize=10)
    if with_quality:
        _quality_axis(axes[-1], result, cases[-1], family, style)
    return report.save_figure(drawing, path)


def _scatter(axis: Any, points: Sequence[tuple[str, float, float]], family: Mapping, style: Mapping) -> None:
    """Points with their names; a line joins the budgets of one family."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, x, y in points:
        groups.setdefault(family[name], []).append((x, y))
        axis.annotate(name, (x, y), fontsize=6, xytext=(4, 3), textcoords="offset points")
    for group, places in groups.items():
        colour, mark = style[group]
        places = sorted(places)
        axis.plot(*zip(*places), color=colour, marker=mark, markersize=5, linewidth=0.8, label=group)
    axis.legend(fontsize=6, loc="best")
    axis.grid(alpha=0.3)


def _conversion_axis(axis: Any, points: Sequence[tuple[str, float, float]], family: Mapping, style: Mapping) -> None:
    points = [(name, 100 * x, 100 * y) for name, x, y in points]
    most = max([10.0, *(x for _, x, _ in points)])
    axis.plot([0, most], [0, most], color="#999999", linestyle="--", linewidth=1, label="ideal")
    _scatter(axis, points, family, style)
    axis.set_xlabel("decoder FLOPs removed, %")
    axis.set_ylabel("decoder time removed, %")


def _quality_axis(
    axis: Any, result: Mapping[str, Any], case: Mapping[str, Any], family: Mapping, style: Mapping
) -> None:
    metric, found = result["config"]["metric"], result["quality"]["policies"]
    names = [name for name in found if name in case["policies"]]
    points = [(name, case["policies"][name]["qps"], 100 * found[name]["mean"][metric]["value"]) for name in names]
    _scatter(axis, points, family, style)
    best, front = float("-inf"), []
    for _, qps, value in sorted(points, key=lambda point: -point[1]):
        if value > best:
            best = value
            front.append((qps, value))
    axis.step(*zip(*front), where="pre", color="#999999", linestyle="--", linewidth=1)
    axis.set_xlabel(f"items per second ({case['items']} items, {case['tokens']} tokens)")
    axis.set_ylabel(f"{metric}, %, mean of {len(result['quality']['tasks'])} tasks")
    axis.set_title("Quality against throughput", fontsize=10)
