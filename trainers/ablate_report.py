"""What a study found: quality with intervals, speed, the table and the figure.

An interval covers both who was asked and how training went: a resample draws queries (the same for all variants and
seeds) and seeds (the same for all variants), so that a change from the first variant is paired. With three seeds the
spread between them is known only roughly; the value of each stands beside the interval.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dial_quality import resampled_means
from .evaluation_metrics import METRICS, Ranks, chance_levels, query_values
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
    chosen = generator.integers(0, runs, size=(samples, runs))
    drawn = np.take_along_axis(drawn, chosen[:, None, :, None], axis=2).mean(axis=2)  # (samples, variants, metrics)
    each_seed = value.mean(axis=0)  # (variants, runs, metrics)
    mean = each_seed.mean(axis=1)
    variants = {}
    for place, name in enumerate(names):
        variants[name] = {
            "mean": _entries(mean[place], drawn[:, place]),
            "change": _entries(mean[place] - mean[0], drawn[:, place] - drawn[:, 0]),
            "seeds": {metric: each_seed[place, :, m].tolist() for m, metric in enumerate(METRICS)},
            "tasks": {
                task.name: {metric: float(value[t, place, :, m].mean()) for m, metric in enumerate(METRICS)}
                for t, task in enumerate(tasks)
            },
        }
    return {"tasks": about, "variants": variants}


def _entries(value: np.ndarray, drawn: np.ndarray) -> dict[str, dict[str, Any]]:
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return {
        metric: {"value": float(value[m]), "interval": [float(low[m]), float(high[m])]}
        for m, metric in enumerate(METRICS)
    }


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
        if model.get("qps"):
            row["QPS"] = f"{model['qps']:.3g}"
        rows.append(row)
    chance = float(np.mean([task["chance"][metric] for task in result["quality"]["tasks"]]))
    rows.append({"variant": "chance", metric: f"{100 * chance:.1f}"})
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    quality, metric, rows = result["quality"], result["metric"], table_rows(result)
    about = ", ".join(f"{task['name']} ({task['queries']} x {task['documents']})" for task in quality["tasks"])
    seeds = len(result["seeds"])
    lines = [
        f"# {result['title']}",
        "",
        f"{metric}, mean over {len(quality['tasks'])} held-out tasks (queries x documents: {about}) and {seeds} "
        f"{'seeds' if seeds > 1 else 'seed'}; per cent, with 95 % bootstrap intervals over queries and seeds. Changes "
        "are points from the first variant, paired. Training compute is forward FLOPs of all items of the contrastive "
        "training, relative to the first variant.",
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
    speeds = [result["models"][name].get("qps") for name in names]
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
