"""Results of a public benchmark: a JSON file, which model cards read too, and a Markdown table for each task."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MoEMBError
from .evaluation_metrics import bootstrap_interval
from .evaluation_report import percent
from .files import write_atomically
from .ranking_task import RankingTask


FORMAT = "moemb-benchmark-1"


class ResultsError(MoEMBError, ValueError):
    """A results file that is none. The message names it."""


def task_result(
    task: RankingTask,
    values: Mapping[str, np.ndarray],
    tied: np.ndarray,
    *,
    seconds: float,
    samples: int,
    seed: int,
    limited: bool,
) -> dict[str, Any]:
    """
    The entry of a task in the results.

    Args:
        task (`RankingTask`): the task.
        values (`Mapping[str, np.ndarray]`): per metric the value of each query, float64 `[queries]`.
        tied (`np.ndarray`): bool `[queries]`.
        seconds (`float`): how long it took.
        samples (`int`): bootstrap resamples.
        seed (`int`): seed of them.
        limited (`bool`): whether only the first rows were read.

    Returns:
        `dict`: `name`, `group`, `metric`, `value` in 0..1 with `interval`, counts, `metrics`, and `parts` (by
        discipline) where rows have groups.
    """
    main = values[task.metric]
    result = {
        "name": task.name,
        "group": task.group,
        "metric": task.metric,
        "value": float(main.mean()),
        "interval": list(bootstrap_interval(main, samples, seed)),
        "queries": len(task.queries),
        "candidates": len(task.pool),
        "ranking": task.ranking,
        "tied_queries": float(tied.mean()),
        "metrics": {name: float(each.mean()) for name, each in values.items()},
        "source": task.source,
        "expected_rows": task.expected_rows,
        "complete": not limited and task.expected_rows in (None, len(task.queries)),
        "seconds": seconds,
    }
    groups = sorted({row.group for row in task.rows})
    if groups != [""]:
        result["parts"] = {}
        for group in groups:
            chosen = np.array([row.group == group for row in task.rows])
            result["parts"][group or "other"] = {"value": float(main[chosen].mean()), "queries": int(chosen.sum())}
    return result


def summary(tasks: Sequence[Mapping[str, Any]], wanted: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """
    Plain means over tasks, as the leaderboards report them.

    Args:
        tasks (`Sequence[Mapping]`): entries of [`task_result`].
        wanted (`Mapping[str, int]`): tasks that the benchmark has, by group; a group `a-b` counts for `a` too.

    Returns:
        `dict[str, dict]`: by `overall`, modality and group `{"value", "tasks", "of", "complete"}`. A mean over fewer
        tasks than the benchmark has says so and is not comparable with a leaderboard.
    """
    lines: dict[str, dict[str, Any]] = {}
    names = ["overall", *dict.fromkeys(group.partition("-")[0] for group in wanted), *wanted]
    for name in dict.fromkeys(names):
        chosen = [task for task in tasks if name in ("overall", task["group"], task["group"].partition("-")[0])]
        counts = [count for group, count in wanted.items() if name in ("overall", group, group.partition("-")[0])]
        if not chosen:
            continue
        complete = len(chosen) == sum(counts) and all(task["complete"] for task in chosen)
        mean = sum(task["value"] for task in chosen) / len(chosen)
        lines[name] = {"value": mean, "tasks": len(chosen), "of": sum(counts), "complete": complete}
    return lines


def write_results(report: Mapping[str, Any], output: Path) -> tuple[Path, Path]:
    """Writes the results as JSON and as a Markdown table beside it, atomically; returns both paths."""
    table = output.with_suffix(".md")
    write_atomically(output, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_atomically(table, results_markdown(report))
    return output, table


def read_results(path: Path) -> dict[str, Any]:
    """
    Reads a results file.

    Raises:
        ResultsError: it is missing, broken, or of another format.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"the results {path} cannot be read: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ResultsError(f"{path} holds no results of a public benchmark (its format is not '{FORMAT}')")
    return report


def results_markdown(report: Mapping[str, Any]) -> str:
    """Returns the results as Markdown."""
    model = report["model"]
    parameters = model["parameters"]
    lines = [
        f"# {report['benchmark']} of {model['name']}",
        "",
        f"Fingerprint `{model['fingerprint'][:16]}`, {parameters['total']:,} parameters of which "
        f"{parameters['active']:,} work on a text token, seed {report['seed']}, command `{report['command']}`.",
        "",
        "Values are per cent; brackets hold 95 % bootstrap intervals over the queries. Candidates that score the same "
        "count against the query.",
        "",
        "| mean over | value | tasks |",
        "| --- | ---: | --- |",
        *(_summary_row(name, line) for name, line in report["summary"].items()),
        "",
        *result_rows(report),
    ]
    if parts := [task for task in report["tasks"] if task.get("parts")]:
        lines += ["", "| task | part | value | queries |", "| --- | --- | ---: | ---: |"]
        lines += [
            f"| {task['name']} | {name} | {percent(part['value'])} | {part['queries']} |"
            for task in parts
            for name, part in task["parts"].items()
        ]
    if report["not_run"]:
        lines += ["", "## Not run", "", *(f"- {entry['name']}: {entry['reason']}" for entry in report["not_run"])]
    lines += ["", "## How items were presented", ""]
    lines += [f"- `{key}`: `{json.dumps(value)}`" for key, value in report["conventions"].items()]
    if report["adaptive_compute"] is not None:
        lines.append(f"- `adaptive_compute`: `{json.dumps(report['adaptive_compute'])}`")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, "", f"Made with {versions}."]) + "\n"


def _summary_row(name: str, line: Mapping[str, Any]) -> str:
    note = f"{line['tasks']} of {line['of']}" + ("" if line["complete"] else ", not comparable")
    return f"| {name} | {percent(line['value'])} | {note} |"


def result_rows(report: Mapping[str, Any]) -> list[str]:
    """Returns the Markdown rows of the table of tasks."""
    rows = [
        "| task | group | metric | value | queries x candidates | ranking |",
        "| --- | --- | --- | ---: | --- | --- |",
    ]
    for task in report["tasks"]:
        value = percent(task["value"])
        if task.get("interval"):
            low, high = task["interval"]
            value += f" ({percent(low)}–{percent(high)})"
        if not task["complete"]:
            value += " *"
        size = f"{task['queries']} x {task['candidates']}" if task.get("queries") else "see mteb"
        rows.append(
            f"| {task['name']} | {task['group']} | {task['metric']} | {value} | {size} | {task.get('ranking', '')} |"
        )
    if any(not task["complete"] for task in report["tasks"]):
        rows.append("\n\\* not all rows of the leaderboard's version.")
    return rows
