"""Quality of many compute policies on the same items.

Each batch is preprocessed, and seen by the vision tower, once: no policy touches them. It is then decoded under all.

Vectors and FLOPs are kept by batch and policy, so that a run that was stopped goes on, and a policy that is added
later is the only one that runs. FLOPs are those that were executed, summed over every distinct item of the tasks.
"""

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from modeling_moemb.compute_moemb import Flops, count_flops

from .baselines import cosine_system
from .dial_policies import Prepared
from .evaluation_encoding import SIDES, EncodingError, batch_order, describe_item, encoder_input, item_key
from .evaluation_metrics import METRICS, Ranks, chance_levels, query_values, rank_queries
from .files import whole_file
from .prune_experts_sweep import SweepTask


_ROWS_AT_ONCE = 500  # resamples held at once


@dataclass(frozen=True)
class ItemBatch:
    """
    Items that are run together.

    Args:
        prompt (`str`): the instruction.
        keys (`tuple[str, ...]`): their content addresses.
        items (`list[Mapping]`): items with the keys text, image and video.
    """

    prompt: str
    keys: tuple[str, ...]
    items: list[Mapping[str, Any]] = field(repr=False)

    @property
    def identity(self) -> str:
        return hashlib.sha256(repr((self.prompt, self.keys)).encode()).hexdigest()[:32]


@dataclass
class Outcome:
    """
    What a policy gave.

    Args:
        vectors (`dict[tuple[str, str], np.ndarray]`): by prompt and content address, float32 `[dim]`, unit length.
        flops (`Flops`): executed over all items.
        pairs (`int`): (token, expert) pairs that were run.
    """

    vectors: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    flops: Flops = field(default_factory=Flops)
    pairs: int = 0

    def add(self, batch: ItemBatch, done: Mapping[str, np.ndarray]) -> None:
        """Takes in one batch."""
        self.vectors.update(zip([(batch.prompt, key) for key in batch.keys], done["vectors"], strict=True))
        self.flops += Flops(*map(int, done["flops"]))
        self.pairs += int(done["pairs"])


def item_batches(tasks: Sequence[SweepTask], prompts: Mapping[str, str], batch_size: int) -> Iterator[ItemBatch]:
    """
    Every distinct item of some tasks, once for each prompt.

    Args:
        tasks (`Sequence[SweepTask]`): the tasks.
        prompts (`Mapping[str, str]`): prompt of `"query"` and `"document"`; the same one makes them one pool.
        batch_size (`int`): items in one batch.
    """
    pools: dict[str, dict[str, Mapping[str, Any]]] = {}
    for side in SIDES:
        pool = pools.setdefault(prompts.get(side) or "", {})
        for task in tasks:
            for item in task.queries if side == "query" else task.documents:
                pool.setdefault(item_key(item), item)
    for prompt, pool in pools.items():
        order = sorted(pool, key=lambda key: (batch_order(pool[key]), key))
        for start in range(0, len(order), batch_size):
            keys = tuple(order[start : start + batch_size])
            yield ItemBatch(prompt, keys, [pool[key] for key in keys])


class DialQuality:
    """
    Runs policies over the items of tasks.

    Args:
        model (`MoEMBModel`): the model, in evaluation mode.
        processor (`MoEMBProcessor`): its processor.
        fingerprint (`str`): identity of the model, see `evaluation_encoding.model_fingerprint`.
        tasks (`Sequence[SweepTask]`): the tasks.
        cache (`Path`): folder of all that is kept.
        batch_size (`int`, *optional*, defaults to 64): items in one forward pass.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        fingerprint: str,
        tasks: Sequence[SweepTask],
        cache: Path,
        batch_size: int = 64,
        progress: bool = True,
    ):
        self.model, self.processor, self.tasks, self.progress = model, processor, tasks, progress
        self.prompts = {side: processor.embedding["prompts"].get(side) or "" for side in SIDES}
        self.batches = list(item_batches(tasks, self.prompts, batch_size))
        self.folder = cache / fingerprint[:32]

    def run(self, policies: Sequence[Prepared]) -> dict[str, Outcome]:
        """Outcome of each policy by its name."""
        outcomes = {policy.name: Outcome() for policy in policies}
        with tqdm(
            total=len(self.batches) * len(policies), desc="Policies", unit="batch", disable=not self.progress
        ) as bar:
            for batch in self.batches:
                features = None
                with remembered(self.model.visual):
                    for policy in policies:
                        path = self.folder / policy.identity[:32] / f"{batch.identity}.npz"
                        done = _read(path)
                        if done is None:
                            features = self.features(batch) if features is None else features
                            done = self._forward(batch, features, policy)
                            _write(path, done)
                        outcomes[policy.name].add(batch, done)
                        bar.update()
        return outcomes

    def features(self, batch: ItemBatch) -> dict[str, torch.Tensor]:
        """The model's inputs."""
        device = next(self.model.parameters()).device
        features = self.processor([encoder_input(item) for item in batch.items], instruction=batch.prompt)
        return {name: value.to(device) for name, value in features.items()}

    @torch.inference_mode()
    def _forward(
        self, batch: ItemBatch, features: Mapping[str, torch.Tensor], policy: Prepared
    ) -> dict[str, np.ndarray]:
        # without shared prefixes, which some budgets rule out: all policies are to save on the same work
        with policy.applied(self.model):
            output = self.model(
                **features,
                adaptive_compute=policy.budget,
                pooled_only=True,
                output_compute=True,
                share_prefixes=False,
            )
        vectors = torch.nn.functional.normalize(output.pooler_output.float(), dim=-1).cpu().numpy()
        if not np.isfinite(vectors).all():
            broken = describe_item(batch.items[int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])])
            raise EncodingError(f"policy '{policy.name}': the vector of {broken} is not finite")
        flops = count_flops(self.model.config, output.compute)
        pairs = np.array(int(output.compute.expert_pairs.sum()))
        return {"vectors": vectors, "flops": np.array(astuple(flops)), "pairs": pairs}

    def ranks(self, outcome: Outcome) -> dict[str, Ranks]:
        """Ranks of the right documents, by task."""
        ranks = {}
        for task in self.tasks:
            queries = self._stack(outcome, task.queries, "query")
            documents = self._stack(outcome, task.documents, "document")
            scores = cosine_system(task.name, queries, documents).scores
            ranks[task.name] = rank_queries(scores, task.relevant, task.exclude)
        return ranks

    def _stack(self, outcome: Outcome, items: Sequence[Mapping[str, Any]], side: str) -> np.ndarray:
        return np.stack([outcome.vectors[self.prompts[side], item_key(item)] for item in items])


@contextmanager
def remembered(module: torch.nn.Module) -> Iterator[None]:
    """While the context lasts, a module that is called again with the same tensors returns what it returned before."""
    forward, known = module.forward, {}

    def run(*tensors: torch.Tensor) -> Any:
        key = tuple(map(id, tensors))
        if key not in known:
            known[key] = (tensors, forward(*tensors))  # with the tensors, so that no other can take their places
        return known[key][1]

    module.forward = run
    try:
        yield
    finally:
        del module.forward


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """What was kept; a file that was cut off counts as missing."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in ("vectors", "flops", "pairs")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(path: Path, done: Mapping[str, np.ndarray]) -> None:
    with whole_file(path) as partial, partial.open("wb") as stream:
        np.savez(stream, **done)


def quality_report(
    ranks: Mapping[str, Mapping[str, Ranks]], tasks: Sequence[SweepTask], samples: int, seed: int
) -> dict[str, Any]:
    """
    Quality of policies with 95 % bootstrap intervals. All policies meet the same resampled queries, so that a change
    from the first one is paired.

    Args:
        ranks (`Mapping`): by policy, the one the others are compared with first, then by task.
        tasks (`Sequence[SweepTask]`): the tasks.
        samples (`int`): resamples.
        seed (`int`): seed of the resampling.

    Returns:
        `dict`: `tasks` (name, sizes, chance), and `policies`: by name `tasks` (by name and metric), `mean` over the
        tasks and `change` of it, each metric as `{"value", "interval"}` in 0..1.
    """
    names, generator = list(ranks), np.random.default_rng(seed)
    values, draws, about = [], [], []
    for task in tasks:
        first = ranks[names[0]][task.name]
        about.append({
            "name": task.name, "queries": len(task.queries), "documents": len(task.documents),
            "chance": chance_levels(first.pool, first.relevant),
        })  # fmt: skip
        per_query = [query_values(ranks[name][task.name]) for name in names]
        table = np.stack(
            [[found[metric] for metric in METRICS] for found in per_query]
        )  # (policies, metrics, queries)
        values.append(table.mean(axis=2))
        draws.append(resampled_means(table, task.clusters, samples, generator))
    value, drawn = np.stack(values), np.stack(draws)  # (tasks, policies, metrics), the latter after the samples
    mean, drawn_mean = value.mean(axis=0), drawn.mean(axis=0)
    policies = {}
    for place, name in enumerate(names):
        change = drawn_mean[:, place] - drawn_mean[:, 0]
        policies[name] = {
            "tasks": {task.name: _entries(value[row, place], drawn[row, :, place]) for row, task in enumerate(tasks)},
            "mean": _entries(mean[place], drawn_mean[:, place]),
            "change": _entries(mean[place] - mean[0], change),
        }
    return {"tasks": about, "policies": policies}


def resampled_means(
    table: np.ndarray, clusters: Sequence[int] | None, samples: int, generator: np.random.Generator
) -> np.ndarray:
    """Means over resampled queries, `(samples, policies, metrics)`; those of one cluster are drawn together."""
    labels = np.arange(table.shape[2]) if clusters is None else np.asarray(clusters)
    _, member = np.unique(labels, return_inverse=True)
    sizes = np.bincount(member).astype(np.float64)
    flat = table.reshape(-1, table.shape[2])
    sums = np.stack([np.bincount(member, weights=row) for row in flat], axis=1)  # (clusters, policies * metrics)
    means = []
    for start in range(0, samples, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, samples - start)
        times = generator.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=rows).astype(np.float64)
        means.append(times @ sums / (times @ sizes)[:, None])
    return np.concatenate(means).reshape(samples, *table.shape[:2])


def _entries(value: np.ndarray, drawn: np.ndarray) -> dict[str, dict[str, Any]]:
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return {
        metric: {"value": float(value[place]), "interval": [float(low[place]), float(high[place])]}
        for place, metric in enumerate(METRICS)
    }
