"""What an evaluation leaves behind: one JSON file with everything, and a Markdown table of it."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import MoEMBError
from .evaluation_metrics import METRICS
from .files import write_atomically


_PACKAGES = ("moemb", "torch", "transformers", "sentence-transformers", "numpy", "scikit-learn")


class NothingEvaluatedError(MoEMBError, RuntimeError):
    """None of the wanted tasks is there. The message lists the reasons."""


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the numbers depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


class OutputError(MoEMBError, OSError):
    """A file that cannot be written. The message names it."""


def prepare_output(path: Path) -> None:
    """
    Makes the folder of an output file, before any work is done for it.

    Raises:
        OutputError: the path is a folder, or its own folder cannot be made.
    """
    if path.is_dir():
        raise OutputError(f"the output {path} is a folder; give the name of a file")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the output {path} cannot be written ({error}); give another file") from error


def write_reports(report: Mapping[str, Any], output: Path) -> tuple[Path, Path]:
    """
    Writes the report as JSON and as Markdown beside it.

    Args:
        report (`Mapping`):
            The report.
        output (`Path`):
            The JSON file; the table has the same name with `.md`.

    Returns:
        `tuple[Path, Path]`: both files.
    """
    table = output.with_suffix(".md")
    write_atomically(output, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_atomically(table, markdown(report))
    return output, table


def verdict(line: Mapping[str, Any], metric: str = "R@10") -> dict[str, Any]:
    """
    Whether the model stands above chance and above each baseline.

    Args:
        line (`Mapping`):
            One line of a task: `chance` and `systems`, the model first; a system with `ablation` is the model itself
            with a part hidden and no rival.
        metric (`str`, *optional*, defaults to `"R@10"`):
            The metric that is compared.

    Returns:
        `dict`: `above_chance` (the interval lies above it), `above_baselines` (no intervals overlap; `None` when
        there is no baseline) and `not_above`, the names of those it is not clearly above.
    """
    model, *others = line["systems"]
    low = model[metric]["interval"][0]
    rivals = [system for system in others if not system["ablation"]]
    behind = [system["name"] for system in rivals if low <= system[metric]["interval"][1]]
    return {
        "above_chance": low > line["chance"][metric],
        "above_baselines": not behind if rivals else None,
        "not_above": behind,
    }


def percent(value: float) -> str:
    """Returns a share as per cent with one digit, and two where one would hide it: 0.0005 as `0.05`."""
    return f"{value * 100:.2f}" if 0 < value < 0.001 else f"{value * 100:.1f}"


def _cell(entry: Mapping[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{percent(entry['value'])} ({percent(low)}–{percent(high)})"


def line_table(line: Mapping[str, Any]) -> list[str]:
    """Returns the Markdown rows of one line of a task: chance, the model, its parts, the baselines."""
    rows = [f"| system | {' | '.join(METRICS)} |", f"| --- |{' ---: |' * len(METRICS)}"]
    for number, system in enumerate(line["systems"]):
        name = f"**{system['name']}**" if number == 0 else system["name"]
        note = f" ({system['note']})" if system["note"] and not system["ablation"] else ""
        rows.append(f"| {name}{note} | {' | '.join(_cell(system[metric]) for metric in METRICS)} |")
    rows.append(f"| chance | {' | '.join(percent(line['chance'][metric]) for metric in METRICS)} |")
    return rows


def pool_text(line: Mapping[str, Any]) -> str:
    """Returns the size of a line as `165 queries x 1914 documents`."""
    low, high = line["pool"]
    pool = f"{low}" if low == high else f"{low} to {high}"
    return f"{line['queries']} queries x {pool} documents"


def overview_rows(report: Mapping[str, Any]) -> list[str]:
    """Returns the Markdown rows of the overview: a row for each line of each task."""
    rows = [
        "| # | task | line | n x pool | R@1 | R@10 | chance R@1 / R@10 | best baseline R@1 / R@10 | clearly above |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for task in report["tasks"]:
        for line in task["lines"]:
            rows.append(_overview_row(task, line))
    return rows


def _overview_row(task: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    model = line["systems"][0]
    rivals = [system for system in line["systems"][1:] if not system["ablation"]]
    best = max(rivals, key=lambda system: system["R@10"]["value"], default=None)
    baseline = (
        f"{best['name']}: {percent(best['R@1']['value'])} / {percent(best['R@10']['value'])}"
        if best
        else "none applies"
    )
    low, high = line["pool"]
    cells = [
        task["number"],
        task["name"],
        line["line"],
        f"{line['queries']} x {high if low == high else f'{low}-{high}'}",
        _cell(model["R@1"]),
        _cell(model["R@10"]),
        f"{percent(line['chance']['R@1'])} / {percent(line['chance']['R@10'])}",
        baseline,
        _verdict_text(line["verdict"]),
    ]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _verdict_text(judged: Mapping[str, Any]) -> str:
    if not judged["above_chance"]:
        return "no: not above chance"
    if judged["above_baselines"] is None:
        return "chance"
    if judged["above_baselines"]:
        return "chance and every baseline"
    return f"chance; not {', '.join(judged['not_above'])}"


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    model = report["model"]
    parts = [
        f"# Evaluation of {model['name']}",
        "",
        f"Fingerprint `{model['fingerprint'][:16]}`, {model['parameters']:,} parameters, seed {report['seed']}, "
        f"command `{report['command']}`.",
        "",
        "All items are held out. Values are per cent; brackets hold 95 % bootstrap intervals. Ties count against the "
        'query. "Clearly above" compares R@10: the interval of the model must lie above chance and above the interval '
        "of every baseline.",
        "",
        *overview_rows(report),
    ]
    if report["not_run"]:
        parts += ["", "## Not run", "", *(f"- {entry['name']}: {entry['reason']}" for entry in report["not_run"])]
    for task in report["tasks"]:
        parts += [
            "",
            f"## Task {task['number']}: {task['name']} ({task['kind']}, {task['tag']})",
            "",
            task["description"],
        ]
        for line in task["lines"]:
            parts += ["", f"**{line['line']}**: {pool_text(line)}", "", *line_table(line)]
        parts += [f"\n{entry['name']} not run: {entry['reason']}" for entry in task["not_run"]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*parts, "", f"Made with {versions}."]) + "\n"


def console_lines(task: Mapping[str, Any]) -> Sequence[str]:
    """Returns the lines printed when a task is done."""
    lines = [f"task {task['number']} {task['name']} ({task['kind']}, {task['tag']}), {task['seconds']:.0f} s"]
    for line in task["lines"]:
        lines.append(f"  {line['line']}: {pool_text(line)}")
        for system in line["systems"]:
            values = "   ".join(f"{metric} {_cell(system[metric]):>20}" for metric in METRICS)
            lines.append(f"    {system['name']:<34} {values}")
        chance = "   ".join(f"{metric} {percent(line['chance'][metric]):>20}" for metric in METRICS)
        lines.append(f"    {'chance':<34} {chance}")
    return lines + [f"  {entry['name']} not run: {entry['reason']}" for entry in task["not_run"]]
