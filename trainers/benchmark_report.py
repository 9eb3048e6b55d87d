"""What a benchmark leaves behind: one file per case as soon as it is measured, one of all, tables and plots."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import modeling_moemb

from .errors import MoEMBError
from .files import whole_file, write_atomically


Record = dict[str, Any]


class BenchmarkError(MoEMBError, ValueError):
    """A benchmark that cannot be run as asked; the text names the value and the remedy."""


def code_fingerprint() -> str:
    """SHA-256 over the sources of the model and of the benchmarks: what other code measured is measured again."""
    digest = hashlib.sha256()
    model, benchmarks = Path(modeling_moemb.__file__).parent.glob("*.py"), Path(__file__).parent.glob("benchmark*.py")
    for path in [*sorted(model), *sorted(benchmarks)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class CaseStore:
    """
    Results by case, each written when it is done, so that a run that was killed goes on where it stood.

    Args:
        folder (`Path`): folder of the benchmark.
        suite (`str`): name of the suite.
        conditions (`Mapping`): everything that a result depends on; a result under other conditions is not taken.
    """

    def __init__(self, folder: Path, suite: str, conditions: Mapping[str, Any]):
        self.folder, self.suite = folder / "cases" / suite, suite
        text = json.dumps(conditions, sort_keys=True, default=str)
        self.conditions = hashlib.sha256(text.encode()).hexdigest()[:16]

    def _path(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^\w.+-]", "_", name) + ".json")

    def get(self, name: str, failed: bool = False) -> Record | None:
        """The result of a case; `None`: missing, unreadable, from other conditions, or failed (unless `failed`)."""
        try:
            stored = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.get("conditions") != self.conditions:
            return None
        if "failed" in stored and not failed:
            return None
        return stored

    def put(self, name: str, result: Mapping[str, Any]) -> Record:
        """Writes the result of a case and returns it as it will be read."""
        text = json.dumps(
            {"case": name, "suite": self.suite, "conditions": self.conditions, **result}, indent=1, default=str
        )
        write_atomically(self._path(name), text + "\n")
        return json.loads(text)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as aligned text, columns in the order of their first appearance; figures stand to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    numeric = [
        all(re.fullmatch(r"(\d[\d.e+\-]*[x%]?)?", line[column]) for line in cells[1:])
        for column in range(len(columns))
    ]
    lines = []
    for line in cells:
        padded = (text.rjust(w) if right else text.ljust(w) for text, w, right in zip(line, widths, numeric))
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Rows as the lines of a Markdown table; columns that are empty in all of them are left out."""
    columns = [
        name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)
    ]
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(row.get(name, '') for name in columns)} |" for row in rows]


def markdown(report: Mapping[str, Any], about: str, rows: Sequence[Mapping[str, str]]) -> str:
    """
    A suite's results as a page.

    Args:
        report (`Mapping`): what is written as JSON: `suite`, `command`, `machine`, `protocol` and `cases` are read.
        about (`str`): what the suite measures and how.
        rows (`Sequence[Mapping]`): its table.
    """
    machine = report["machine"]
    where = f"{machine['processor']}, threads: {machine['threads']}"
    if machine["accelerator"]:
        where += f", {machine['accelerator']}"
    compared = any("timings" in (case.get("timing") or {}) for case in report["cases"])
    how = f", medians of {report['protocol']['rounds']} interleaved rounds" if compared else ""
    lines = [
        f"# Speed: {report['suite']}", "", about, "",
        f"On {where}; {machine['date'][:10]}{how}. Others: what other processes took of the machine meanwhile. "
        f"Command `{report['command']}`.", "",
        *markdown_table(rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def system_rows(
    records: Iterable[Record], cells: Callable[[Record, str, float | None, int], Mapping[str, str]]
) -> list[dict[str, str]]:
    """
    Table rows of results, a line per system; case, load and goals stand on the first of each.

    Args:
        records (`Iterable[dict]`): results with `seconds` by system; one without any system has a line, too.
        cells (`Callable`): the columns between, from a result, the system's name, its seconds and its number.
    """
    lines = []
    for record in records:
        for number, (name, value) in enumerate((record["seconds"] or {"": None}).items()):
            first = number == 0
            lines.append({
                "case": record["case"] if first else "",
                **cells(record, name, value, number),
                "others": load_text(record) if first else "",
                "goal": goal_text(record["goals"]) if first else "",
            })  # fmt: skip
    return lines


def seconds_text(seconds: float) -> str:
    """A duration with three digits and a unit."""
    for factor, unit in ((1e-6, "us"), (1e-3, "ms"), (1.0, "s")):
        if seconds < 1000 * factor or unit == "s":
            return f"{seconds / factor:.3g} {unit}"
    raise AssertionError


def goal_text(goals: Iterable[Mapping[str, Any]]) -> str:
    """Goals as `ratio 2.7 of 2.5 ok`; one that was missed says so in capitals."""
    parts = []
    for goal in goals:
        verdict = "ok" if goal["met"] else "MISSED"
        parts.append(f"{goal['what']} {goal['value']:.3g} of {goal['wanted']:.3g} {verdict}")
    return "; ".join(parts)


def judge(what: str, value: float | None, wanted: float, at_most: bool = False) -> dict[str, Any]:
    """One goal: `value` against `wanted`, which is a lower bound unless `at_most`."""
    value = float("nan") if value is None else value
    return {"what": what, "value": value, "wanted": wanted, "met": value <= wanted if at_most else value >= wanted}


def load_text(record: Mapping[str, Any]) -> str:
    """How busy others kept the machine, as `3% (7 of 7 rounds clean)`."""
    timing = record.get("timing")
    if not timing or timing["others"] is None:
        return ""
    return f"{timing['others'] * 100:.0f}% ({timing['clean_rounds']}/{timing['rounds']} clean)"


def figure(panels: int, width: float = 5.5, height: float = 4.2):
    """A figure with `panels` plots side by side (at most three in a row), and its list of axes.

    Raises:
        BenchmarkError: when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError(
            'plots need matplotlib: pip install "moemb[eval]", or pass --no-plots for the figures alone'
        ) from error
    columns = min(3, max(1, panels))
    rows = -(-max(1, panels) // columns)
    drawing = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return drawing, axes[:panels]


def save_figure(drawing, path: Path) -> Path:
    """Writes a figure as PNG, by rename."""
    with whole_file(path) as partial:
        drawing.savefig(partial, format="png", dpi=120)
    return path


def bars(axis, labels: Sequence[str], values: Sequence[float], title: str, goal: Sequence[float | None] = ()) -> None:
    """Horizontal bars, the first on top, with an optional mark for each one's goal."""
    places = list(range(len(labels)))
    axis.barh(places, values, color="#4477aa")
    for place, wanted in zip(places, goal):
        if wanted is not None:
            axis.plot([wanted, wanted], [place - 0.4, place + 0.4], color="#cc3311")
    axis.set_yticks(places, labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=10)
    for place, value in zip(places, values):
        axis.text(value, place, f" {value:.0f}" if value >= 1000 else f" {value:.3g}", va="center", fontsize=7)
    axis.margins(x=0.15)
