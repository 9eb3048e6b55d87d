"""Quality against the number of experts kept, without writing a repository: the removed experts are masked.

A router logit of minus infinity is the same as a removed router row: the expert's probability is 0, it is never
chosen, and the weights renormalise over the chosen ones. So one model in memory gives the whole curve.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .baselines import cosine_system
from .calibration_data import item_of_parts
from .errors import MoEMBError
from .evaluation_encoding import CachedEncoder
from .evaluation_metrics import METRICS, Ranks, chance_levels, query_values, rank_queries, summarise
from .saliency import ExpertStatistics, check_keep, check_saliency, expert_blocks, experts_to_keep


VALIDATION = "validation"
# A control beside the saliencies: experts drawn at random.
RANDOM = "random"


class SweepError(MoEMBError, ValueError):
    """A sweep that cannot be run. The message names the setting and the remedy."""


@contextmanager
def masked_experts(model: Any, keep: Tensor) -> Iterator[None]:
    """
    Removes experts from a model in memory while the context lasts.

    Args:
        model (`MoEMBModel`): the model.
        keep (`torch.LongTensor` of shape `(layers, kept)`): indices of the experts that stay, per block.

    Raises:
        SweepError: `keep` has another number of blocks than the model.
        SaliencyError: fewer experts are kept than a token uses, or more than there are.
    """
    blocks = expert_blocks(model)
    if keep.dim() != 2 or keep.shape[0] != len(blocks):
        raise SweepError(f"the kept experts have shape {tuple(keep.shape)}, but the model has {len(blocks)} blocks")
    experts = blocks[0].gate.weight.shape[0]
    check_keep(keep.shape[1], experts, blocks[0].top_k)
    removed = torch.ones(len(blocks), experts, dtype=torch.bool).scatter_(1, keep, False)

    def mask(row: Tensor) -> Callable:
        return lambda module, args, logits: logits.masked_fill(row.to(logits.device), -torch.inf)

    handles = [block.gate.register_forward_hook(mask(row)) for block, row in zip(blocks, removed, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class SweepPoint:
    """One point of the curve.

    Args:
        saliency (`str`): what the experts were chosen by; `""` for the whole model.
        experts (`int`): experts kept per block.
        keep (`torch.LongTensor` of shape `(layers, experts)`): which.
        result (`Any`): what the evaluation returned.
    """

    saliency: str
    experts: int
    keep: Tensor = field(repr=False)
    result: Any = field(repr=False)


def kept_experts(
    statistics: ExpertStatistics, saliency: str, experts: int, last_block_pooled: bool = False, seed: int = 0
) -> Tensor:
    """The experts that a saliency keeps, or `"random"` ones: `torch.LongTensor` of shape `(layers, experts)`."""
    check_saliency(saliency, also=[RANDOM])
    if saliency == RANDOM:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(statistics.pairs.shape[0], statistics.num_experts, generator=generator)
    else:
        scores = statistics.scores(saliency, last_block_pooled=last_block_pooled)
    return experts_to_keep(scores, experts)


def sweep_experts(
    model: Any,
    statistics: ExpertStatistics,
    experts: Sequence[int],
    evaluate: Callable[[Tensor], Any],
    saliencies: Sequence[str] = ("reap",),
    last_block_pooled: bool = False,
    seed: int = 0,
) -> list[SweepPoint]:
    """
    Evaluates a model with fewer and fewer experts.

    Args:
        model (`MoEMBModel`): the model, masked in turn.
        statistics ([`ExpertStatistics`]): measured on that model.
        experts (`Sequence[int]`): numbers of experts to keep per block.
        evaluate (`Callable`): called as `evaluate(keep)` while the model is masked.
        saliencies (`Sequence[str]`, *optional*): names of `SALIENCIES`, or `"random"`.
        last_block_pooled (`bool`, *optional*): see [`ExpertStatistics.scores`].
        seed (`int`, *optional*, defaults to 0): seed of the random control.

    Returns:
        `list[SweepPoint]`: the whole model first, then each number, largest first, with each saliency.

    Raises:
        SaliencyError: an unknown saliency, or a number of experts out of range.
    """
    blocks = expert_blocks(model)
    total, top_k = statistics.num_experts, blocks[0].top_k
    for count in experts:
        check_keep(count, total, top_k, "sweep")
    for saliency in saliencies:
        check_saliency(saliency, also=[RANDOM])
    everything = torch.arange(total).expand(len(blocks), total)
    points = [SweepPoint("", total, everything, evaluate(everything))]
    for count in sorted(set(experts) - {total}, reverse=True):
        for saliency in saliencies:
            keep = kept_experts(statistics, saliency, count, last_block_pooled, seed)
            with masked_experts(model, keep):
                points.append(SweepPoint(saliency, count, keep, evaluate(keep)))
    return points


@dataclass(frozen=True)
class SweepTask:
    """Queries, documents and answers; items are mappings with the keys text, image and video."""

    name: str
    queries: Sequence[dict]
    documents: Sequence[dict]
    relevant: Sequence[Sequence[int]]
    exclude: Sequence[Sequence[int]] | None = None
    clusters: Sequence[int] | None = None


def sweep_tasks(names: Sequence[str], corpus: Path | None, gallery: Path | None, seed: int) -> list[SweepTask]:
    """
    The tasks of a sweep.

    Args:
        names (`Sequence[str]`): `"validation"`, the small tasks on the validation families of moemb-mini's corpus, on
            which settings may be chosen; and names of held-out tasks of `moemb evaluate`.
        corpus, gallery (`Path`, *optional*): where they are, see `evaluation_tasks.TaskSource`.
        seed (`int`): seed of the validation tasks.

    Raises:
        SweepError: no tasks, or one that is not there.
        UnknownTaskError: a name that no task has.
    """
    from .evaluation_tasks import NotRun, TaskSource, select_task_names

    if not names:
        raise SweepError("sweep_tasks is empty: name 'validation', or tasks of `moemb evaluate --list-tasks`")
    tasks = _validation_tasks(corpus, seed) if VALIDATION in names else []
    source = TaskSource(gallery, corpus)
    held_out = [name for name in names if name != VALIDATION]
    for name in select_task_names(held_out) if held_out else []:
        task = source.load(name)
        if isinstance(task, NotRun):
            raise SweepError(f"sweep_tasks has '{name}', which is not there: {task.reason}")
        tasks.append(SweepTask(name, task.queries, task.documents, task.relevant, task.exclude or None, task.clusters))
    return tasks


def _validation_tasks(corpus: Path | None, seed: int) -> list[SweepTask]:
    from .corpus import load_corpus
    from .mini_contrastive_validation import ValidationSet

    return [
        SweepTask(
            f"{VALIDATION}: {task.name}",
            [item_of_parts(sample.parts) for sample in task.queries],
            [item_of_parts(sample.parts) for sample in task.documents],
            [np.flatnonzero(row).tolist() for row in task.right],
        )
        for task in ValidationSet(load_corpus(corpus), encoder=None, seed=seed).tasks
    ]


class TaskEvaluation:
    """
    Ranks every task with the model as it is masked at the moment; vectors are kept, so that a sweep can go on.

    Args:
        encoder (`SentenceTransformer`): the model as users load it.
        fingerprint (`str`): identity of the unmasked model, see `evaluation_encoding.model_fingerprint`.
        tasks (`Sequence[SweepTask]`): the tasks.
        cache (`Path`): folder of all kept vectors.
        batch_size (`int`, *optional*, defaults to 64): items in one forward pass.
    """

    def __init__(self, encoder: Any, fingerprint: str, tasks: Sequence[SweepTask], cache: Path, batch_size: int = 64):
        self.encoder, self.fingerprint, self.tasks = encoder, fingerprint, tasks
        self.cache, self.batch_size = cache, batch_size

    def __call__(self, keep: Tensor) -> dict[str, Ranks]:
        """Returns the ranks of each task by its name, for the experts `keep`, `(layers, kept)`."""
        total = expert_blocks(self.encoder[0].model)[0].gate.weight.shape[0]
        identity = self.fingerprint
        if keep.shape[1] < total:
            identity = hashlib.sha256(f"{identity} {keep.tolist()}".encode()).hexdigest()
        encoder = CachedEncoder(self.encoder, identity, self.cache, self.batch_size)
        ranks = {}
        for task in self.tasks:
            label = f"{keep.shape[1]} experts, {task.name}"
            documents = encoder.encode(task.documents, "document", label)
            queries = encoder.encode(task.queries, "query", label)
            scores = cosine_system(task.name, queries, documents).scores
            ranks[task.name] = rank_queries(scores, task.relevant, task.exclude)
        return ranks


def sweep_report(points: Sequence[SweepPoint], tasks: Sequence[SweepTask], samples: int, seed: int) -> dict[str, Any]:
    """
    What a sweep says, with 95 % bootstrap intervals.

    Args:
        points (`Sequence[SweepPoint]`): results of [`TaskEvaluation`], the whole model first.
        tasks (`Sequence[SweepTask]`): the tasks.
        samples (`int`): resamples behind each interval.
        seed (`int`): seed of the resampling.

    Returns:
        `dict`: `tasks` (name, sizes and chance), and `points`: per point `saliency`, `experts`, `tasks` (see
        `evaluation_metrics.summarise`), `mean` over the tasks, and `change` from the whole model: `value` and the
        paired `interval`. All in 0..1.
    """
    whole = points[0].result
    about = [
        {
            "name": task.name,
            "queries": len(task.queries),
            "documents": len(task.documents),
            "chance": chance_levels(whole[task.name].pool, whole[task.name].relevant),
        }
        for task in tasks
    ]
    clusters = {task.name: task.clusters for task in tasks}
    rows = []
    for point in points:
        results = {name: summarise(ranks, samples, seed, clusters[name]) for name, ranks in point.result.items()}
        rows.append(
            {
                "saliency": point.saliency,
                "experts": point.experts,
                "tasks": results,
                "mean": {m: float(np.mean([result[m]["value"] for result in results.values()])) for m in METRICS},
                "change": {m: _change(point.result, whole, m, clusters, samples, seed) for m in METRICS},
            }
        )
    return {"tasks": about, "points": rows}


def _change(
    result: Mapping[str, Ranks], whole: Mapping[str, Ranks], metric: str, clusters: Mapping, samples: int, seed: int
) -> dict[str, Any]:
    """Mean over the tasks of the mean change per query; each task's queries are resampled together with themselves."""
    generator = np.random.default_rng(seed)
    values, means = [], np.zeros(samples)
    for name, ranks in result.items():
        change = query_values(ranks)[metric] - query_values(whole[name])[metric]
        labels = np.arange(len(change)) if clusters[name] is None else np.asarray(clusters[name])
        _, member = np.unique(labels, return_inverse=True)
        sums, sizes = np.bincount(member, weights=change), np.bincount(member).astype(float)
        values.append(change.mean())
        for draw in range(samples):
            drawn = generator.integers(0, len(sums), len(sums))
            means[draw] += sums[drawn].sum() / sizes[drawn].sum() / len(result)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"value": float(np.mean(values)), "interval": [float(low), float(high)]}


def sweep_markdown(report: Mapping[str, Any]) -> str:
    """Returns a sweep's report as Markdown; values are per cent."""
    lines = [
        f"# Experts of {report['model']}",
        "",
        f"Command `{report['command']}`; scores measured on {report['items']} items. Values are per cent, means over "
        f"{len(report['tasks'])} tasks; changes are points from the whole model, with paired 95 % bootstrap "
        f"intervals. '{RANDOM}' is a control.",
        "",
        "| experts per block | chosen by | R@1 | R@10 | MRR | change of R@10 | change of MRR |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for point in report["points"]:
        means = " | ".join(f"{100 * point['mean'][metric]:.1f}" for metric in METRICS)
        changes = " | ".join(
            points_text(point["change"][metric]) if point["saliency"] else "" for metric in METRICS[1:]
        )
        lines.append(f"| {point['experts']} | {point['saliency'] or 'all'} | {means} | {changes} |")
    chance = {m: np.mean([task["chance"][m] for task in report["tasks"]]) for m in METRICS}
    lines += [f"| | chance | {' | '.join(f'{100 * chance[metric]:.1f}' for metric in METRICS)} | | |"]
    for task in report["tasks"]:
        lines += ["", f"**{task['name']}**: {task['queries']} queries x {task['documents']} documents", ""]
        lines += ["| experts per block | chosen by | R@1 | R@10 | MRR |", "| ---: | --- | ---: | ---: | ---: |"]
        for point in report["points"]:
            cells = " | ".join(interval_text(point["tasks"][task["name"]][metric]) for metric in METRICS)
            lines.append(f"| {point['experts']} | {point['saliency'] or 'all'} | {cells} |")
    return "\n".join(lines) + "\n"


def points_text(change: Mapping[str, Any]) -> str:
    """A difference in points with its interval, such as `-1.2 (-1.9 to -0.6)`."""
    low, high = change["interval"]
    return f"{100 * change['value']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def interval_text(entry: Mapping[str, Any]) -> str:
    """A share as per cent with its interval, such as `62.1 (60.2–64.0)`."""
    low, high = entry["interval"]
    return f"{100 * entry['value']:.1f} ({100 * low:.1f}–{100 * high:.1f})"
