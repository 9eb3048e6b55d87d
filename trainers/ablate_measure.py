"""What `moemb ablate` measures of a trained variant: ranks on held-out tasks, and items per second."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .ablate_runs import Study
from .evaluation_encoding import SIDES, CachedEncoder, encoder_input, model_fingerprint
from .evaluation_metrics import Ranks, rank_queries
from .prune_experts_sweep import SweepTask


class AsDataset:
    """
    An embedder that is given items as a data set of its training gave them.

    Args:
        model (`SentenceTransformer`): the embedder.
        name (`str`): the data set; routers that know tasks are told it.
        instructions (`dict[str, str | None]`): of `"query"` and `"document"`; the model's own by default.
    """

    def __init__(self, model: Any, name: str, instructions: dict[str, str | None]):
        self.model = model
        self.prompts = {side: instructions[side] or (model.prompts or {}).get(side) or "" for side in SIDES}
        knows_tasks = ((model[0].model.config.task_conditioning or {}).get("tasks")) is not None
        self.router_task = name if knows_tasks else None

    def _encode(self, side: str, inputs: Sequence[Any], settings: dict[str, Any]) -> np.ndarray:
        told = {} if self.router_task is None else {"router_task": self.router_task}
        encode = self.model.encode_query if side == "query" else self.model.encode_document
        return encode(inputs, prompt=self.prompts[side] or None, **told, **settings)

    def encode_query(self, inputs: Sequence[Any], **settings: Any) -> np.ndarray:
        """As `SentenceTransformer.encode_query`, under the data set's instruction."""
        return self._encode("query", inputs, settings)

    def encode_document(self, inputs: Sequence[Any], **settings: Any) -> np.ndarray:
        """As `SentenceTransformer.encode_document`, under the data set's instruction."""
        return self._encode("document", inputs, settings)


def measured(repository: Path, tasks: list[SweepTask], study: Study) -> dict[str, Ranks]:
    """Ranks of the right documents by task; vectors are kept, and what is there is not encoded again."""
    from .baselines import cosine_system
    from .quickstart_model import load_model

    model, source = load_model(str(repository))
    fingerprint, folder = model_fingerprint(model, source), study.config.output / "vectors"
    encoders = {None: CachedEncoder(model, fingerprint, folder, study.config.batch_size)}
    ranks = {}
    for task in tasks:
        name = study.config.presented.get(task.name)
        if name not in encoders:
            given = AsDataset(model, name, study.instructions(name))
            kept = folder if given.router_task is None else folder / f"router-task-{name}"
            encoders[name] = CachedEncoder(given, fingerprint, kept, study.config.batch_size)
        queries = encoders[name].encode(task.queries, "query", f"{task.name}: queries")
        documents = encoders[name].encode(task.documents, "document", f"{task.name}: documents")
        scores = cosine_system(task.name, queries, documents).scores
        ranks[task.name] = rank_queries(scores, task.relevant, task.exclude)
    return ranks


def measure_speed(study: Study, tasks: list[SweepTask]) -> dict[str, dict[str, Any]]:
    """
    Items per second of each variant's first seed, preprocessing included, over rounds in which variants take turns.

    Returns:
        `dict`: by variant `median`, `quartiles`, and how it was measured: `items`, `rounds`, `batch_size`, `seed`,
        `threads`, `processor`.
    """
    import torch

    from .benchmark_machine import machine
    from .quickstart_model import load_model

    config = study.config
    pool = [item for task in tasks for item in (*task.queries, *task.documents)]
    picked = np.random.default_rng(0).permutation(len(pool))[: config.qps_items]
    items = [encoder_input(pool[row]) for row in picked]
    models = {name: load_model(str(study.repository(name, config.seeds[0])))[0] for name in config.variants}
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for turn in tqdm(range(config.qps_rounds + 1), desc="Speed", unit="round"):
        for name, model in models.items():
            started = time.perf_counter()
            model.encode(items, batch_size=config.batch_size, show_progress_bar=False)
            if turn:  # the first round warms up
                speeds[name].append(len(items) / (time.perf_counter() - started))
    about = {
        "items": len(items), "rounds": config.qps_rounds, "batch_size": config.batch_size, "seed": config.seeds[0],
        "threads": torch.get_num_threads(), "processor": machine()["processor"],
    }  # fmt: skip
    return {
        name: {"median": statistics.median(values), "quartiles": np.percentile(values, [25, 75]).tolist(), **about}
        for name, values in speeds.items()
    }
