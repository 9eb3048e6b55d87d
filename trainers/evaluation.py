"""`moemb evaluate`: the held-out tasks, with chance, baselines and intervals beside every number.

The model is loaded as users load it, `SentenceTransformer(..., trust_remote_code=True)`, so that what is measured is
what is served. Vectors are kept under the model's fingerprint and the report is written after every task: a run that
was stopped goes on where it stood.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .baselines import System
from .baselines_pretrained import PretrainedBaselines
from .corpus_sources import cache_folder
from .evaluation_encoding import CachedEncoder, model_fingerprint, weights_of
from .evaluation_metrics import chance_levels, rank_queries, summarise
from .evaluation_report import (
    NothingEvaluatedError,
    console_lines,
    package_versions,
    prepare_output,
    verdict,
    write_reports,
)
from .evaluation_tasks import (
    TASKS,
    NotRun,
    TaskSource,
    baseline_systems,
    model_systems,
    select_task_names,
    task_lines,
)
from .recipe import check_least, expand_paths, load_recipe, parse_overrides, read_recipe


HELP = "measure a model on the held-out tasks, beside chance and honest baselines"
ACCEPTS_OVERRIDES = True


@dataclass
class EvaluateConfig:
    """
    Settings of an evaluation.

    Args:
        model (`str`, *optional*, defaults to `"moemb-mini"`):
            `"moemb-mini"` (the shipped checkpoint), a folder of a model repo, or a Hub id.
        tasks (`list[str]`, *optional*):
            Names or numbers of tasks; all when left out.
        gallery (`Path`, *optional*):
            Folder of the shipped items; the one beside the recipes when left out.
        corpus (`Path`, *optional*):
            Folder of the locally built corpus; the one in the cache when left out.
        output (`Path`, *optional*):
            The JSON report; a Markdown table is written beside it. `results/evaluation-<model>.json` in the cache when
            left out.
        pretrained_baselines (`bool`, *optional*, defaults to `True`):
            Whether to run MiniLM and the EfficientNet pipeline too.
        batch_size (`int`, *optional*, defaults to 64):
            Items in one forward pass.
        bootstrap_samples (`int`, *optional*, defaults to 2000):
            Resamples behind each interval.
        seed (`int`, *optional*, defaults to 0):
            Seed of the resampling.
        device (`str`, *optional*):
            Device; chosen by Sentence Transformers when left out.
    """

    model: str = "moemb-mini"
    tasks: list[str] = field(default_factory=list)
    gallery: Path | None = None
    corpus: Path | None = None
    output: Path | None = None
    pretrained_baselines: bool = True
    batch_size: int = 64
    bootstrap_samples: int = 2000
    seed: int = 0
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        self.model = str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model
        check_least(self, batch_size=1, bootstrap_samples=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb evaluate`."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="recipe, such as recipes/moemb-mini/evaluate.yaml, or one of recipes/benchmarks; all defaults without",
    )
    parser.add_argument("--list-tasks", action="store_true", help="print the tasks and leave")
    parser.epilog = "Every key of the recipe is a flag too: --model DIR --tasks '[style, 7a]' --output FILE."


def run(args: argparse.Namespace) -> int:
    """Runs `moemb evaluate`; returns the exit status."""
    command = shlex.join(["moemb", *sys.argv[1:]])
    if names_benchmark(args.config, args.overrides):
        from .evaluation_benchmarks import run_command

        return run_command(args, command)
    if args.list_tasks:
        print("\n".join(f"{number:>3}  {name}" for name, number in TASKS.items()))
        return 0
    (config,) = load_recipe(args.config, EvaluateConfig, overrides=args.overrides)
    report, output = evaluate(config, command=command)
    written = write_reports(report, output)
    for entry in report["not_run"]:
        print(f"not run: {entry['name']}: {entry['reason']}")
    print("\n".join(f"wrote {path}" for path in written))
    return 0


def names_benchmark(recipe: Path | None, overrides: Sequence[str]) -> bool:
    """Returns whether a recipe or the command line names a public benchmark (`benchmark: mmeb-v2`)."""
    return "benchmark" in parse_overrides(overrides) or (recipe is not None and "benchmark" in read_recipe(recipe))


def evaluate(config: EvaluateConfig, command: str = "", model: Any = None) -> tuple[dict[str, Any], Path]:
    """
    Runs the tasks.

    Args:
        config (`EvaluateConfig`):
            The settings.
        command (`str`, *optional*, defaults to `""`):
            The command line, for the report.
        model (`SentenceTransformer`, *optional*):
            A loaded model to use in place of loading `config.model`.

    Returns:
        `tuple[dict, Path]`: the report and the JSON file it belongs to (already written after each task).

    Raises:
        UnknownTaskError: a task name that does not exist.
        NothingEvaluatedError: none of the tasks is there.
    """
    from .quickstart_model import MINI, load_model

    names = select_task_names(config.tasks)
    source = config.model
    if model is None:
        model, source = load_model(config.model, config.device)
    fingerprint = model_fingerprint(model, source)
    own_folder = config.model != MINI and Path(source).is_dir()
    display = Path(source).resolve().name if own_folder else config.model.rsplit("/", 1)[-1]
    cache = cache_folder() / "evaluation"
    encoder = CachedEncoder(model, fingerprint, cache / "vectors", config.batch_size)
    pretrained = PretrainedBaselines(corpus_loader(config.corpus), cache) if config.pretrained_baselines else None
    output = config.output or cache_folder() / "results" / f"evaluation-{display}-{fingerprint[:12]}.json"
    prepare_output(output)
    report = {
        "model": {
            "name": display,
            "fingerprint": fingerprint,
            "weights": weights_of(source),
            "parameters": sum(weight.numel() for weight in model.parameters()),
        },
        "command": command,
        "seed": config.seed,
        "bootstrap_samples": config.bootstrap_samples,
        "versions": package_versions(),
        "tasks": [],
        "not_run": [],
    }
    tasks = TaskSource(config.gallery, config.corpus)
    for name in names:
        task = tasks.load(name)
        if isinstance(task, NotRun):
            report["not_run"].append({"name": f"task {TASKS[name]} {name}", "reason": task.reason})
            continue
        result = evaluate_task(task, encoder, display, pretrained, config)
        report["tasks"].append(result)
        print("\n".join(console_lines(result)), flush=True)
        write_reports(report, output)
    if not report["tasks"]:
        reasons = "; ".join(f"{entry['name']}: {entry['reason']}" for entry in report["not_run"])
        raise NothingEvaluatedError(f"nothing to evaluate: {reasons}")
    return report, output


def corpus_loader(folder: Path | None) -> Callable:
    """Returns a function that loads the corpus, for the baseline that is fitted on it."""

    def load():
        from .corpus import default_corpus_folder, load_corpus

        return load_corpus(folder or default_corpus_folder())

    return load


def evaluate_task(
    task: Any,
    encoder: CachedEncoder,
    name: str,
    pretrained: PretrainedBaselines | None,
    config: EvaluateConfig,
) -> dict[str, Any]:
    """
    Runs one task.

    Args:
        task (`EvaluationTask`):
            The task.
        encoder (`CachedEncoder`):
            The model.
        name (`str`):
            Name of the model in the tables.
        pretrained (`PretrainedBaselines`, *optional*):
            The pretrained baselines.
        config (`EvaluateConfig`):
            Bootstrap settings.

    Returns:
        `dict`: the task's part of the report.
    """
    started = time.perf_counter()

    def encode(items: Sequence[dict], side: str) -> np.ndarray:
        return encoder.encode(items, side, f"{task.name}: {side} side")

    own = model_systems(task, encode, name)
    others, not_run = baseline_systems(task, pretrained)
    lines = _measure(task, own, others, config)
    return {
        "name": task.name,
        "number": str(task.number),
        "kind": task.kind,
        "tag": task.tag,
        "description": task.description,
        "licence": task.licence,
        "queries": len(task.queries),
        "documents": len(task.documents),
        "seconds": time.perf_counter() - started,
        "lines": lines,
        "not_run": [{"name": entry.name, "reason": entry.reason} for entry in not_run],
    }


def _measure(
    task: Any, own: Sequence[System], others: Sequence[System], config: EvaluateConfig
) -> list[dict[str, Any]]:
    systems = [*own, *others]
    ranks = [rank_queries(system.scores, task.relevant, task.exclude or None) for system in systems]
    lines = []
    for title, rows in task_lines(task).items():
        clusters = None if task.clusters is None else [task.clusters[row] for row in rows]
        picked = [rank.select(rows) for rank in ranks]
        pool, relevant = picked[0].pool, picked[0].relevant
        line = {
            "line": title,
            "queries": len(rows),
            "pool": [int(pool.min()), int(pool.max())],
            "chance": chance_levels(pool, relevant),
            "systems": [
                {"name": system.name, "note": system.note, "ablation": 0 < place < len(own)}
                | summarise(rank, config.bootstrap_samples, config.seed, clusters)
                for place, (system, rank) in enumerate(zip(systems, picked, strict=True))
            ],
        }
        lines.append(line | {"verdict": verdict(line)})
    return lines
