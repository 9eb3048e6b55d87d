"""The learning curve of a run: what its validation said over the steps, as JSON, a page and a figure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import benchmark_report as report
from .evaluation_report import percent
from .files import write_atomically


NAME = "learning-curve"
SCORE = "score"  # the mean that the best checkpoint is chosen by
METRIC = "r10"


def read_log(path: Path) -> list[dict[str, Any]]:
    """
    Reads a run's log without what was done twice: steps after the checkpoint that a run went on from.

    Args:
        path (`Path`): `log.jsonl` of a run.

    Returns:
        `list[dict]`: entries in the order of their steps.
    """
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        while kept and kept[-1]["step"] > entry["step"]:
            kept.pop()
        kept.append(entry)
    return kept


def curve(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """
    What a log says of the validation.

    Args:
        log (`Sequence[dict]`): entries of [`read_log`].

    Returns:
        `dict`: `validation` (a row per evaluation: step, CPU-hours where they were logged, score and R@10 of each
        set, as shares), `loss` (step and loss), and `best`, the row of the highest score.
    """
    rows, seen = [], set()
    for entry in log:
        if f"eval_{SCORE}" not in entry or entry["step"] in seen:
            continue
        seen.add(entry["step"])
        sets = {key.split("_")[1]: value for key, value in entry.items() if key.endswith(f"_{METRIC}")}
        rows.append(
            {"step": entry["step"], "cpu_hours": entry.get("cpu_hours"), "score": entry[f"eval_{SCORE}"], "sets": sets}
        )
    losses = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
    best = max(rows, key=lambda row: row["score"], default=None)
    return {"validation": rows, "loss": losses, "best": best}


def write_curve(log: Path, folder: Path, command: str, title: str) -> Path:
    """
    Writes `learning-curve.json`, `.md` and `.png`.

    Args:
        log (`Path`): the run's `log.jsonl`.
        folder (`Path`): where to.
        command (`str`): the command that writes them again.
        title (`str`): the model's name.

    Returns:
        `Path`: the JSON file.
    """
    found = {"command": command, "title": title, **curve(read_log(log))}
    path = folder / f"{NAME}.json"
    write_atomically(path, json.dumps(found, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), markdown(found))
    report.save_figure(drawing(found), path.with_suffix(".png"))
    return path


def markdown(found: dict[str, Any], rows_at_most: int = 16) -> str:
    """The page: evaluations at even distances, the best one among them."""
    rows, best = found["validation"], found["best"]
    every = max(1, -(-len(rows) // rows_at_most))
    shown = [row for place, row in enumerate(rows) if place % every == 0 or row is best or place == len(rows) - 1]
    names = list(rows[-1]["sets"]) if rows else []
    table = [
        {"step": f"**{row['step']}**" if row is best else f"{row['step']}"}
        | {"CPU-hours": "" if row["cpu_hours"] is None else f"{row['cpu_hours']:.2f}", "score": percent(row["score"])}
        | {name: percent(row["sets"][name]) if name in row["sets"] else "" for name in names}
        for row in shown
    ]
    about = (
        "Validation sets hold families of concepts that were not trained on: R@10 of each, and the score that chooses "
        "the checkpoint, the mean of their reciprocal ranks. Per cent. The shipped step is in bold; CPU-hours stand "
        "where they were logged."
    )
    return "\n".join([f"# Learning curve of {found['title']}", "", about, "", *report.markdown_table(table)]) + "\n"


def drawing(found: dict[str, Any]):
    """The figure: validation beside the training loss."""
    picture, (left, right) = report.figure(2)
    steps = [row["step"] for row in found["validation"]]
    for name in found["validation"][-1]["sets"] if steps else []:
        values = [row["sets"].get(name, float("nan")) for row in found["validation"]]
        left.plot(steps, [100 * value for value in values], linewidth=1, label=name)
    left.plot(steps, [100 * row["score"] for row in found["validation"]], color="black", linewidth=2, label="score")
    if found["best"]:
        left.axvline(found["best"]["step"], color="grey", linestyle=":", linewidth=1)
    left.set(title="validation: R@10 by set, and the score", xlabel="step", ylabel="per cent")
    left.legend(fontsize=7, ncols=3)
    right.plot(*zip(*found["loss"], strict=True) if found["loss"] else ([], []), linewidth=1)
    right.set(title="training loss", xlabel="step", yscale="log")
    return picture
