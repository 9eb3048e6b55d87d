"""`moemb evaluate` with a recipe that names a public benchmark: MMEB-V2, MRMR, or any of mteb.

The model is loaded as users load it, items are presented by the conventions the model records, every batch is kept on
disk, and the results are written after each task: a stopped run goes on where it stood. A task whose data are not
there is reported with the reason; the others run.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .corpus_sources import cache_folder
from .errors import MoEMBError
from .evaluation_benchmark_report import FORMAT, summary, task_result, write_results
from .evaluation_conventions import ConventionError, EvaluationConventions, conventions_of, record_conventions
from .evaluation_encoding import model_fingerprint, weights_of
from .evaluation_report import NothingEvaluatedError, package_versions, percent, prepare_output
from .ranking_encoding import Processes, TaskEncoder
from .ranking_items import ItemPresenter
from .ranking_metrics import ranking_values
from .ranking_task import RankingTask
from .recipe import check_least, expand_paths, load_recipe


TITLES = {"mmeb-v2": "MMEB-V2", "mrmr": "MRMR", "mteb": "MTEB"}
_DATASETS = {"mmeb-v2": "TIGER-Lab/MMEB-V2", "mrmr": "MRMRbenchmark", "mteb": "mteb"}


@dataclass
class BenchmarkConfig:
    """
    Settings of a run of a public benchmark.

    Args:
        benchmark (`str`):
            `"mmeb-v2"`, `"mrmr"` or `"mteb"`.
        model (`str`, *optional*, defaults to `"moemb-mini"`):
            `"moemb-mini"` (the shipped checkpoint), a folder of a model repo, or a Hub id.
        tasks (`list[str]`, *optional*):
            Names of tasks (of MMEB-V2 also groups); all of the benchmark when left out.
        benchmarks (`list[str]`, *optional*):
            Only for mteb: its benchmarks, such as `"ViDoRe(v3)"`.
        data (`Path`, *optional*):
            Folder of the benchmark's data in its official layout; what is not there comes from the Hub.
        label_names (`Path`, *optional*):
            Class names for the video classification of MMEB-V2, see [`video_labels`].
        images (`str`, *optional*, defaults to `"interleaved"`):
            For MRMR: `"interleaved"` or `"merged"`, see [`read_mrmr_task`].
        output (`Path`, *optional*):
            The JSON results; a Markdown table is written beside it. In the cache when left out.
        conventions (`dict`, *optional*):
            Conventions of this run in place of the model's, see [`EvaluationConventions`].
        record_conventions (`bool`, *optional*, defaults to `False`):
            Whether to write the conventions used into the model's `config.json` first (a folder of yours only).
        adaptive_compute (`dict`, *optional*):
            Compute budget; the one the model was calibrated for when left out.
        batch_size (`int`, *optional*, defaults to 16):
            Items in one forward pass.
        max_length (`int`, *optional*):
            Most tokens of an item; the model's when left out. Not for mteb.
        max_pixels (`int`, *optional*):
            Most pixels of a picture; the model's when left out. Not for mteb.
        limit (`int`, *optional*):
            Rows of each task that are read, for a first look. Such results are marked. Not for mteb.
        bootstrap_samples (`int`, *optional*, defaults to 2000):
            Resamples behind each interval.
        seed (`int`, *optional*, defaults to 0):
            Seed of the resampling.
        device (`str`, *optional*):
            Device; chosen by Sentence Transformers, or by `torchrun`'s rank, when left out.
    """

    benchmark: Literal["mmeb-v2", "mrmr", "mteb"]
    model: str = "moemb-mini"
    tasks: list[str] = field(default_factory=list)
    benchmarks: list[str] = field(default_factory=list)
    data: Path | None = None
    label_names: Path | None = None
    images: Literal["interleaved", "merged"] = "interleaved"
    output: Path | None = None
    conventions: dict[str, Any] = field(default_factory=dict)
    record_conventions: bool = False
    adaptive_compute: dict[str, Any] | None = None
    batch_size: int = 16
    max_length: int | None = None
    max_pixels: int | None = None
    limit: int | None = None
    bootstrap_samples: int = 2000
    seed: int = 0
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        self.model = str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model
        check_least(self, batch_size=1, bootstrap_samples=1, limit=1, max_length=1, max_pixels=1)
        foreign = {"benchmarks": "mteb", "label_names": "mmeb-v2"}
        for name, owner in foreign.items():
            if getattr(self, name) and self.benchmark != owner:
                raise ValueError(f"{name} belongs to the benchmark {owner}, not to {self.benchmark}")
        if self.images != "interleaved" and self.benchmark != "mrmr":
            raise ValueError(f"images belongs to the benchmark mrmr, not to {self.benchmark}")
        own = [name for name in ("data", "limit", "max_length", "max_pixels") if getattr(self, name) is not None]
        if self.benchmark == "mteb" and own:
            raise ValueError(f"{own[0]} is not for mteb, which finds and cuts its data itself: leave it out")

    def data_folder(self) -> Path:
        """Folder of the benchmark's data."""
        return self.data or cache_folder() / "benchmarks" / self.benchmark


def run_command(args: argparse.Namespace, command: str) -> int:
    """Runs `moemb evaluate` with a recipe that names a benchmark; returns the exit status."""
    (config,) = load_recipe(args.config, BenchmarkConfig, overrides=args.overrides)
    if args.list_tasks:
        print("\n".join(task_names(config)))
        return 0
    report, output = run_benchmark(config, command)
    if Processes().leads:
        for entry in report["not_run"]:
            print(f"not run: {entry['name']}: {entry['reason']}")
        for name, line in report["summary"].items():
            print(f"{name}: {percent(line['value'])} over {line['tasks']} of {line['of']} tasks")
        print("\n".join(f"wrote {path}" for path in (output, output.with_suffix(".md"))))
    return 0


def task_names(config: BenchmarkConfig) -> list[str]:
    """Returns the names of the tasks that a run with these settings has."""
    if config.benchmark == "mteb":
        from .mteb_benchmarks import select_mteb_tasks

        return [task.metadata.name for task in select_mteb_tasks(config.benchmarks, config.tasks)]
    chosen = {key: value for key, value in config.conventions.items() if key == "dataset_variants"}
    return [job.name for job in benchmark_jobs(config, EvaluationConventions(**chosen))]


@dataclass(frozen=True)
class Job:
    """A task that is yet to be read.

    Args:
        name (`str`): its name.
        read (`Callable`): reads it.
        dataset (`Mapping`): `dataset` (Hub id), `config`, `split` and `revision` of its data.
        pool (`int`, *optional*): candidates of the published version, where known.
    """

    name: str
    read: Callable[[], RankingTask]
    dataset: Mapping[str, Any]
    pool: int | None = None


def run_benchmark(config: BenchmarkConfig, command: str = "", model: Any = None) -> tuple[dict[str, Any], Path]:
    """
    Runs a benchmark.

    Args:
        config (`BenchmarkConfig`): the settings.
        command (`str`, *optional*, defaults to `""`): the command line, for the results.
        model (`SentenceTransformer`, *optional*): a loaded model to use in place of loading `config.model`.

    Returns:
        `tuple[dict, Path]`: the results and the file they were written to after each task.

    Raises:
        NothingEvaluatedError: not one task could be read.
        MoEMBError: an unknown task or convention, a model that cannot be loaded, an item that cannot be encoded.
    """
    from .quickstart_model import load_model

    processes = Processes()
    source = config.model
    if model is None:
        model, source = load_model(config.model, config.device or processes.device())
    conventions = conventions_of(model, config.conventions)
    if config.record_conventions:
        _record(config, source, conventions)
    fingerprint = model_fingerprint(model, source)
    report = _new_report(config, model, source, fingerprint, conventions, command)
    name = report["model"]["name"].replace("/", "--")
    output = config.output or cache_folder() / "results" / f"{config.benchmark}-{name}-{fingerprint[:12]}.json"
    prepare_output(output)
    vectors = cache_folder() / "benchmarks" / "vectors" / fingerprint[:32]

    def finish(entry: Mapping[str, Any]) -> None:
        report["tasks"].append(entry)
        report["summary"] = _summary(config, report)
        overall = report["summary"]["overall"]
        report["mean"] = overall["value"] if overall["complete"] else None
        if processes.leads:
            print(
                f"{entry['name']}: {entry['metric']} {percent(entry['value'])}  ({entry['seconds']:.0f} s)", flush=True
            )
            write_results(report, output)

    if config.benchmark == "mteb":
        _run_mteb(config, model, source, report, vectors / "mteb", finish)
    else:
        presenter = ItemPresenter(conventions, dict(model.prompts or {}), model.default_prompt_name)
        encoder = TaskEncoder(
            model, presenter, vectors / config.benchmark, config.batch_size, config.adaptive_compute,
            config.max_length, config.max_pixels,
        )  # fmt: skip
        _run_jobs(config, conventions, encoder, report, finish)
    if not report["tasks"]:
        reasons = "; ".join(f"{entry['name']}: {entry['reason']}" for entry in report["not_run"][:5])
        raise NothingEvaluatedError(f"none of {len(report['not_run'])} tasks could be evaluated: {reasons}")
    if processes.leads:
        write_results(report, output)
    return report, output


def _new_report(
    config: BenchmarkConfig,
    model: Any,
    source: str,
    fingerprint: str,
    conventions: EvaluationConventions,
    command: str,
) -> dict[str, Any]:
    from .model_card import count_parameters

    settings = next(iter(model)).model.config
    folder = Path(source)
    display = folder.resolve().name if folder.is_dir() and config.model == source else config.model
    sizes = count_parameters(settings)
    return {
        "format": FORMAT,
        "benchmark": TITLES[config.benchmark],
        "dataset": _DATASETS[config.benchmark],
        "model": {
            "name": display,
            "fingerprint": fingerprint,
            "weights": weights_of(source),
            "parameters": {"total": sizes["total"], "active": sizes["active"]},
            "dimension": settings.get_text_config().hidden_size,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        },
        "conventions": conventions.to_dict() | ({"images": config.images} if config.benchmark == "mrmr" else {}),
        "presentation": dict(getattr(settings, "embedding", None) or {}),
        "adaptive_compute": config.adaptive_compute or getattr(settings, "adaptive_compute", None),
        "limits": {"max_length": config.max_length, "max_pixels": config.max_pixels, "rows": config.limit},
        "command": command,
        "seed": config.seed,
        "bootstrap_samples": config.bootstrap_samples,
        "versions": package_versions(),
        "tasks": [],
        "mean": None,
        "not_run": [],
        "summary": {},
    }


def _record(config: BenchmarkConfig, source: str, conventions: EvaluationConventions) -> None:
    if config.model != source or not Path(source).is_dir():
        raise ConventionError(f"record_conventions needs a model folder of yours; '{config.model}' is none")
    if Processes().leads:
        record_conventions(Path(source), conventions)
    Processes().meet()


def benchmark_jobs(config: BenchmarkConfig, conventions: EvaluationConventions) -> list[Job]:
    """
    The tasks of MMEB-V2 or MRMR that a run will read.

    Args:
        config (`BenchmarkConfig`): the settings.
        conventions (`EvaluationConventions`): they decide between variants of a data set.

    Returns:
        `list[Job]`: in order.
    """
    if config.benchmark == "mrmr":
        from .mrmr_tasks import read_mrmr_task, select_mrmr_tasks

        return [
            Job(
                task.name,
                partial(read_mrmr_task, task, config.data_folder(), config.images, config.limit),
                {"dataset": task.repository, "config": "query", "split": "test", "revision": task.revision},
                task.documents,
            )
            for task in select_mrmr_tasks(config.tasks)
        ]
    from .mmeb_readers import read_mmeb_task
    from .mmeb_sources import MMEBSources
    from .mmeb_tasks import select_tasks

    sources = MMEBSources(config.data_folder(), config.label_names, config.limit)
    return [
        Job(
            task.name,
            partial(read_mmeb_task, task, sources),
            {"dataset": task.repository, "config": task.subset, "split": task.split, "revision": None},
        )
        for task in select_tasks(config.tasks, conventions)
    ]


def _run_jobs(
    config: BenchmarkConfig,
    conventions: EvaluationConventions,
    encoder: TaskEncoder,
    report: dict[str, Any],
    finish: Callable[[Mapping[str, Any]], None],
) -> None:
    from .ranking_task import BenchmarkDataError

    for job in benchmark_jobs(config, conventions):
        started = time.perf_counter()
        try:
            task = job.read()
        except BenchmarkDataError as error:
            report["not_run"].append({"name": job.name, "reason": str(error)})
            continue
        queries = encoder.encode(task.name, task.queries, "query")
        candidates = encoder.encode(task.name, list(task.pool.values()), "document")
        values, tied = ranking_values(task, queries, candidates)
        entry = task_result(
            task, values, tied, seconds=time.perf_counter() - started, samples=config.bootstrap_samples,
            seed=config.seed, limited=config.limit is not None,
        )  # fmt: skip
        entry |= job.dataset
        if job.pool is not None and len(task.pool) < job.pool:
            entry |= {"complete": False, "expected_candidates": job.pool}
        finish(entry)


def _run_mteb(
    config: BenchmarkConfig,
    model: Any,
    source: str,
    report: dict[str, Any],
    vectors: Path,
    finish: Callable[[Mapping[str, Any]], None],
) -> None:
    from .mteb_benchmarks import run_mteb_tasks, select_mteb_tasks
    from .mteb_encoder import MoEMBEncoder, model_meta

    if Processes().count > 1:
        raise MTEBProcessesError("mteb runs in one process; start `moemb evaluate` without torchrun for it")
    tasks = select_mteb_tasks(config.benchmarks, config.tasks)
    report["wanted"] = dict(Counter(task.metadata.type for task in tasks))
    report["benchmark"] = ", ".join(["MTEB", *config.benchmarks])
    folder = Path(source) if Path(source).is_dir() else None
    meta = model_meta(
        model, report["model"]["name"], report["model"]["fingerprint"][:40], folder, config.adaptive_compute
    )
    conventions = conventions_of(model, config.conventions)
    encoder = MoEMBEncoder(model, meta, conventions, vectors, tasks, config.adaptive_compute)
    results = (config.output.parent if config.output else cache_folder() / "results") / "mteb"

    def refuse(name: str, reason: str) -> None:
        report["not_run"].append({"name": name, "reason": reason})

    run_mteb_tasks(encoder, tasks, results, config.batch_size, finish, refuse)


class MTEBProcessesError(MoEMBError, RuntimeError):
    """mteb was started by several processes."""


def _summary(config: BenchmarkConfig, report: Mapping[str, Any]) -> dict[str, Any]:
    """Means over tasks; MRMR's is over its eleven columns (the disciplines of two tasks, the other three tasks)."""
    if config.benchmark == "mteb":
        return summary(report["tasks"], report["wanted"])
    if config.benchmark == "mmeb-v2":
        from .mmeb_tasks import ALL_TASKS, LEADERBOARD

        return summary(report["tasks"], Counter(ALL_TASKS[name].group for name in LEADERBOARD))
    from .mrmr_tasks import TASKS

    columns = [
        {"group": f"mrmr-{task['name']}", "value": part["value"], "complete": task["complete"]}
        for task in report["tasks"]
        for part in (task.get("parts") or {"": task}).values()
    ]
    wanted = {f"mrmr-{name}": len(set((task.disciplines or {"": ""}).values())) for name, task in TASKS.items()}
    return summary(columns, wanted)
