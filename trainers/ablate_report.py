"""What a study found: quality with intervals, speed, the table and the figure.

An interval covers both who was asked and how training went: a resample draws queries (the same for all variants and
seeds), and the mean over seeds is drawn from Student's t with the spread between them. A change from the first variant
is paired in both. The value of each seed stands beside the interval.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dial_quality import resampled_means
from .evaluation_metrics import METRICS, Ranks, chance_levels, entry_over_seeds, query_values
from .prune_experts_sweep import SweepTask, interval_text, points_text


def study_quality(
    ranks: Mapping[str, Sequence[Mapping[str, Ranks]]], tasks: Sequence[SweepTask], samples: int, seed: int
) -> dict[str, Any]:
    """
    Quality of variants over tasks and seeds.

    Args:
        ranks (`Mapping`): by variant, the one the others are compared with first; of each seed, by task.
        tasks (`Sequence[SweepTask]`): the tasks.
        samples (`int`): resamples.
        seed (`int`): seed of the resampling.

    Returns:
        `dict`: `tasks` (name, sizes, chance) and `variants`: by name `mean` over tasks and seeds and its `change`, by
        metric `{"value", "interval"}` in 0..1, `seeds` (by metric the mean over tasks of each) and `tasks` (by name
        and metric, means over seeds).
    """
    names, runs = list(ranks), len(next(iter(ranks.values())))
    generator = np.random.default_rng(seed)
    values, draws, about = [], [], []
    for task in tasks:
        first = ranks[names[0]][0][task.name]
        about.append({
            "name": task.name, "queries": len(task.queries), "documents": len(task.documents),
            "chance": chance_levels(first.pool, first.relevant),
        })  # fmt: skip
        found = [query_values(run[task.name]) for name in names for run in ranks[name]]
        table = np.stack(
            [[each[metric] for metric in METRICS] for each in found]
        )  # (variants * runs, metrics, queries)
        values.append(table.mean(axis=2).reshape(len(names), runs, len(METRICS)))
        drawn = resampled_means(table, task.clusters, samples, generator)
        draws.append(drawn.reshape(samples, len(names), runs, len(METRICS)))
    value, drawn = np.stack(values), np.mean(draws, axis=0)
    drawn = drawn.mean(axis=2)  # (samples, variants, metrics)
    each_seed = value.mean(axis=0)  # (variants, runs, metrics)
    variants = {}
    for place, name in enumerate(names):
        change = each_seed[place] - each_seed[0], drawn[:, place] - drawn[:, 0]
        variants[name] = {
            "mean": _entries(each_seed[place], drawn[:, place], generator),
            "change": _entries(*change, generator),
            "seeds": {metric: each_seed[place, :, m].tolist() for m, metric in enumerate(METRICS)},
            "tasks": {
                task.name: {metric: float(value[t, place, :, m].mean()) for m, metric in enumerate(METRICS)}
                for t, task in enumerate(tasks)
            },
        }
    return {"tasks": about, "variants": variants}


def _entries(each_seed: np.ndarray, drawn: np.ndarray, generator: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Value and interval by metric, of seeds `(seeds, metrics)` and resamples of the queries `(samples, metrics)`."""
    return {metric: entry_over_seeds(each_seed[:, m], drawn[:, m], generator) for m, metric in enumerate(METRICS)}


def table_rows(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each variant, and one for chance."""
    metric, rows = result["metric"], []
    first = next(iter(result["models"].values()))
    for place, (name, found) in enumerate(result["quality"]["variants"].items()):
        model = result["models"][name]
        row = {
            "variant": name,
            metric: interval_text(found["mean"][metric]),
            f"change of {metric}": "" if place == 0 else points_text(found["change"][metric]),
            "each seed": " / ".join(f"{100 * value:.1f}" for value in found["seeds"][metric]),
            "parameters": f"{model['parameters'] / 1e6:.1f} M",
            "active": f"{model['active'] / 1e6:.1f} M",
            "steps": str(model["steps"]),
            "training compute": f"{model['compute'] / first['compute']:.2f}",
        }
        if model.get("speed"):
            low, high = model["speed"]["quartiles"]
            row["items/s"] = f"{model['speed']['median']:.3g} ({low:.3g}–{high:.3g})"
        rows.append(row)
    chance = float(np.mean([task["chance"][metric] for task in result["quality"]["tasks"]]))
    rows.append({"variant": "chance", metric: f"{100 * chance:.1f}"})
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    quality, metric, rows = result["quality"], result["metric"], table_rows(result)
    about = ", ".join(f"{task['name']} ({task['queries']} x {task['documents']})" for task in quality["tasks"])
    lines = [
        f"# {result['title']}",
        "",
        f"{metric}, mean over {len(quality['tasks'])} held-out tasks (queries x documents: {about}); per cent. "
        f"{_interval_note(len(result['seeds']))} {_compute_note(result)}",
        "",
        *_table(rows),
        "",
        f"{metric} by task, means over seeds:",
        "",
        *_table([
            {"variant": name} | {t: f"{100 * entry[metric]:.1f}" for t, entry in found["tasks"].items()}
            for name, found in quality["variants"].items()
        ]),
    ]  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"Made by `{result['command']}`; {versions}."]) + "\n"


def _interval_note(seeds: int) -> str:
    changes = "Changes are points from the first variant, paired."
    if seeds == 1:
        return f"One seed: the 95 % intervals are over queries alone (bootstrap). {changes}"
    return (
        f"{seeds} seeds; 95 % intervals: a bootstrap over the queries of each task, and Student's t over the seeds. "
        f"{changes}"
    )


def _compute_note(result: Mapping[str, Any]) -> str:
    """What steps, compute, sizes and speed are, and what they leave out."""
    common = result["common_steps"]
    notes = [
        "Training compute is the forward FLOPs of the steps in the table, estimated from a label and a picture of 64 "
        f"x 64 pixels{' without the adapters' if result['adapters'] else ''}, relative to the first variant."
    ]
    if common:
        notes.append(f"Before them every variant had {common} steps in common with those that pretrain alike.")
    notes.append("Active parameters are what a text token meets: without embedding table and vision tower.")
    if result["presented"]:
        pairs = ", ".join(f"{task} as {name}" for task, name in result["presented"].items())
        notes.append(f"Items are presented as a data set of the training (its instruction and task): {pairs}.")
    speeds = [model["speed"] for model in result["models"].values() if model.get("speed")]
    if speeds:
        speed = speeds[0]
        notes.append(
            f"Items per second: {speed['items']} queries and documents of these tasks through `encode`, batches of "
            f"{speed['batch_size']}, seed {speed['seed']}, median and quartiles of {speed['rounds']} rounds in turn, "
            f"{speed['threads']} threads of {speed['processor']}."
        )
    return " ".join(notes)


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(row.get(name, '') for name in columns)} |" for row in rows]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The figure: mean and interval of each variant and a dot for each seed; a second panel for speed, if measured."""
    from matplotlib.figure import Figure

    metric, variants = result["metric"], result["quality"]["variants"]
    names = list(variants)
    places = [result["models"][name]["at"] if result["axis"] else n for n, name in enumerate(names)]
    speeds = [(result["models"][name].get("speed") or {}).get("median") for name in names]
    panels = 2 if all(speeds) else 1
    figure = Figure(figsize=(1.5 + panels * max(4.0, 0.9 * len(names)), 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    means = np.array([variants[name]["mean"][metric]["value"] for name in names]) * 100
    ends = np.array([variants[name]["mean"][metric]["interval"] for name in names]).T * 100
    style = "o-" if result["axis"] else "o"
    errors = np.abs(ends - means)
    axes[0].errorbar(places, means, errors, fmt=style, color="#4477aa", capsize=3, label="mean, 95 % interval")
    for place, name in zip(places, names, strict=True):
        seeds = 100 * np.array(variants[name]["seeds"][metric])
        axes[0].plot([place] * len(seeds), seeds, ".", color="#bbbbbb", zorder=0)
    axes[0].set_ylabel(f"{metric} (%)")
    axes[0].legend(frameon=False)
    if panels == 2:
        axes[1].plot(places, speeds, style, color="#ee6677")
        axes[1].set_ylabel("items per second")
        axes[1].set_ylim(bottom=0)
    for axis in axes:
        if result["axis"]:
            axis.set_xlabel(result["axis"])
        else:
            axis.set_xticks(places, names, rotation=30, ha="right")
    figure.suptitle(result["title"])
    figure.savefig(path, format="png", dpi=150)
