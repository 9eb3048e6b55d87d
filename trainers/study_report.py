"""The tables and the figure of `moemb study`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .dial_policies import BASELINE
from .evaluation_metrics import entry_over_seeds, query_values
from .files import whole_file


MODALITIES = ("text", "image", "video")


def summary(
    entries: Mapping[str, Sequence[Mapping[str, Any]]],
    tasks: Sequence[Any],
    metric: str,
    samples: int,
    seed: int,
    partners: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """
    Quality with intervals, and FLOPs removed, of every run and policy.

    The value is the mean over tasks, then over seeds. The interval is of a bootstrap over the queries of each task
    (the same draws for all, so that a change from full compute is paired), and of Student's t over the seeds.

    Args:
        entries (`Mapping`): by name, for each seed `outcome` and `ranks`; full compute is among them.
        tasks (`Sequence[SweepTask]`): the tasks.
        metric (`str`): the metric.
        samples (`int`): resamples.
        seed (`int`): of the resampling.
        partners (`Mapping[str, str]`, *optional*): to runs, the policy with the same savings.

    Returns:
        `list[dict]`: `name`, `seeds`, `value`, `change` from full compute and, for a run with a partner,
        `against_partner` (`{"value", "interval"}` in 0..1), `by_seed`, `flops_removed` by scope and `pairs_removed`
        (means over seeds).
    """
    generator = np.random.default_rng(seed)
    weights = [_weights(task, samples, generator) for task in tasks]
    values = {
        name: np.stack([_means(entry["ranks"], tasks, metric, weights) for entry in runs])
        for name, runs in entries.items()
    }  # (seeds, 1 + samples)
    full = entries[BASELINE][0]["outcome"]
    base, rows = values[BASELINE][0], []
    for name, runs in entries.items():
        table = values[name]
        by_seed, drawn = table[:, 0], table[:, 1:].mean(axis=0)
        removed = [run["outcome"].flops.removed_from(full.flops) for run in runs]
        row = {
            "name": name, "seeds": len(runs), "by_seed": by_seed.tolist(),
            "value": entry_over_seeds(by_seed, drawn, generator),
            "change": entry_over_seeds(by_seed - base[0], drawn - base[1:], generator),
            "flops_removed": {scope: float(np.mean([r[scope] for r in removed])) for scope in removed[0]},
            "pairs_removed": float(np.mean([1 - run["outcome"].pairs / full.pairs for run in runs])),
        }  # fmt: skip
        if partners and name in partners:
            other = values[partners[name]].mean(axis=0)
            row["against_partner"] = entry_over_seeds(by_seed - other[0], drawn - other[1:], generator)
        rows.append(row)
    return rows


def _weights(task: Any, samples: int, generator: np.random.Generator) -> np.ndarray:
    """How often each query is drawn, `(1 + samples, queries)`; the first row is the queries as they are."""
    labels = np.arange(len(task.queries)) if task.clusters is None else np.asarray(task.clusters)
    _, member = np.unique(labels, return_inverse=True)
    count = int(member.max()) + 1
    times = generator.multinomial(count, np.full(count, 1 / count), size=samples)
    return np.concatenate([np.ones((1, len(member))), times[:, member]]).astype(np.float64)


def _means(ranks: Mapping[str, Any], tasks: Sequence[Any], metric: str, weights: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over tasks, `(1 + samples,)`."""
    by_task = []
    for task, weight in zip(tasks, weights, strict=True):
        values = query_values(ranks[task.name])[metric]
        by_task.append(weight @ values / weight.sum(axis=1))
    return np.mean(by_task, axis=0)


def markdown(result: Mapping[str, Any]) -> str:
    """The report: actions one by one, combinations, and the runs that were stopped."""
    metric, rows = result["metric"], {row["name"]: row for row in result["table"]}
    queries = sum(task["queries"] for task in result["tasks"])
    groups, partners = result["groups"], set(result["partners"].values())
    about = (
        f"{metric}, mean over {len(result['tasks'])} held-out tasks ({queries} queries), per cent; trained with seeds "
        f"{result['seeds']} on one backbone. In brackets 95 % intervals: a bootstrap over the queries of each task "
        "and, where gates were trained, Student's t over the seeds. Changes are from full compute and from the policy "
        "in the row below, in points, paired by query. FLOPs and pairs (of a token and an expert) removed are sums "
        "over all distinct items of the tasks."
    )
    lines = [f"# Trained gates beside inference-only policies ({result['study']})", "", about, ""]
    combined = [name for name in rows if groups.get(name) == "combination"]
    single = [name for name in rows if groups.get(name) == "actions"]
    plain = [name for name in rows if name not in groups and name not in partners]
    with_partners = [n for name in single for n in (name, result["partners"].get(name)) if n is not None]
    lines += [
        "## Actions",
        "",
        *_table([BASELINE, *[n for n in plain if n != BASELINE], *with_partners], rows, groups),
    ]
    if combined:
        both = [n for name in combined for n in (name, result["partners"].get(name)) if n is not None]
        lines += ["", "## Ways to combine actions", "", *_table(both, rows, groups)]
    stopped = [(name, done) for name, runs in result["stopped"].items() for done in runs]
    if stopped:
        lines += ["", "## Runs that were stopped", ""]
        lines += [f"- {name}, seed {done['seed']}: {done['stopped']}" for name, done in stopped]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"Made by `{result['command']}`; {versions}."]) + "\n"


def _table(names: Sequence[str], rows: Mapping[str, Mapping[str, Any]], groups: Mapping[str, str]) -> list[str]:
    lines = [
        "| policy | quality | each seed | change | against the row below | total FLOPs removed "
        "| decoder FLOPs removed | pairs removed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        row = rows[name]
        trained = " / ".join(f"{100 * v:.1f}" for v in row["by_seed"]) if name in groups else "not trained"
        removed = row["flops_removed"]
        value, change = _shown(row["value"]), "" if name == BASELINE else _shown(row["change"], "+")
        against = _shown(row["against_partner"], "+") if "against_partner" in row else ""
        shares = " | ".join(f"{100 * v:.1f} %" for v in (removed["total"], removed["decoder"], row["pairs_removed"]))
        lines.append(f"| {name} | {value} | {trained} | {change} | {against} | {shares} |")
    return lines


def _shown(entry: Mapping[str, Any], sign: str = "") -> str:
    low, high = entry["interval"]
    return f"{100 * entry['value']:{sign}.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def firing_figure(firing: Mapping[str, Mapping[str, Any]], path: Path) -> Path | None:
    """What every run drops and skips, by block and modality (the axes of the paper's figure 9)."""
    if not firing:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(firing), 2, figsize=(9, 2.4 * len(firing)), squeeze=False, sharex=True)
    for row, (name, rates) in enumerate(firing.items()):
        for column, (key, title) in enumerate((("dropped", "tokens dropped"), ("skipped", "experts not run"))):
            axis, table = axes[row][column], rates[key]
            for place, modality in enumerate(MODALITIES):
                values = [block[place] for block in table]
                if values[0] is not None:
                    axis.plot(range(1, len(table) + 1), values, marker="o", markersize=3, label=modality)
            axis.set_ylim(-0.03, 1.03)
            axis.set_title(f"{name}: {title}", fontsize=9)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("block")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=130)
    pyplot.close(figure)
    return path
