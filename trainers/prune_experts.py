"""`moemb prune-experts`: a model repository with fewer routed experts, chosen by what they do on calibration items.

First the experts are measured, in one pass, once per model and data. Then either the smaller repository is written,
or, with `sweep`, the quality at several sizes is measured with masks and nothing is written but a report.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .calibration_data import data_fingerprint, read_calibration_data
from .convert import locate_source
from .convert_plan import MAX_SHARD_BYTES
from .convert_safetensors import ConversionError
from .corpus_sources import cache_folder
from .evaluation_encoding import model_fingerprint
from .evaluation_report import package_versions, prepare_output
from .files import write_atomically
from .prune_experts_repository import PruningError, check_target, read_pruning_config, write_pruned_repository
from .prune_experts_sweep import (
    RANDOM,
    TaskEvaluation,
    kept_experts,
    sweep_experts,
    sweep_markdown,
    sweep_report,
    sweep_tasks,
)
from .quickstart_model import MINI, load_model, mini_repository
from .recipe import check_least, expand_paths, load_recipe
from .saliency import (
    GROUPS,
    ExpertStatistics,
    check_identity,
    check_keep,
    check_saliency,
    load_statistics,
    measure,
    weights_fingerprint,
)


HELP = "remove the experts that matter least on calibration items, or measure what removing them costs"
ACCEPTS_OVERRIDES = True


@dataclass
class PruneExpertsConfig:
    """
    Settings of expert pruning.

    Args:
        model (`str`): `"moemb-mini"`, a folder of a MoEMB repository, or a Hub id of one.
        calibration_data (`dict[str, int]`, *optional*): where items come from and how many, see `calibration_data`.
            May be left out when `statistics` names a finished measurement.
        keep (`int`, *optional*): experts to keep in every block, at least as many as a token uses.
        output (`Path`, *optional*): the repository to write.
        saliency (`str`, *optional*, defaults to `"reap"`): `reap`, `man`, `msan`, `frequency` or `probability`.
        last_block_tokens (`str`, *optional*, defaults to `"all"`): `"pooled"` scores the last block's experts on the
            pooled tokens alone, the only ones whose output there reaches the vector.
        statistics (`Path`, *optional*): safetensors file of the measurement; in the cache, named after model and
            data, when left out.
        sweep (`list[int]`, *optional*): numbers of experts to compare by masks; then no repository is written.
        sweep_saliencies (`list[str]`, *optional*): what to choose the experts by; `saliency` when left out. `random`
            is a control.
        sweep_tasks (`list[str]`, *optional*, defaults to `["validation"]`): tasks to measure, see
            `prune_experts_sweep.sweep_tasks`.
        report (`Path`, *optional*): JSON report of the sweep, with a Markdown table beside it; in the cache when left
            out.
        corpus, gallery (`Path`, *optional*): where corpus and gallery are, when not in their usual places.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        bootstrap_samples (`int`, *optional*, defaults to 1000): resamples behind each interval.
        seed (`int`, *optional*, defaults to 0): seed of all draws.
        max_shard_gb (`float`, *optional*, defaults to 4): size of a weight file in GiB.
        device (`str`, *optional*): device; chosen by Sentence Transformers when left out. `"auto"` spreads a model
            that does not fit over the devices, the memory and the disk, by accelerate.
    """

    model: str
    calibration_data: dict[str, int] = field(default_factory=dict)
    keep: int | None = None
    output: Path | None = None
    saliency: str = "reap"
    last_block_tokens: Literal["all", "pooled"] = "all"
    statistics: Path | None = None
    sweep: list[int] = field(default_factory=list)
    sweep_saliencies: list[str] = field(default_factory=list)
    sweep_tasks: list[str] = field(default_factory=lambda: ["validation"])
    report: Path | None = None
    corpus: Path | None = None
    gallery: Path | None = None
    batch_size: int = 32
    bootstrap_samples: int = 1000
    seed: int = 0
    max_shard_gb: float = MAX_SHARD_BYTES / 2**30
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        check_saliency(self.saliency)
        self.sweep_saliencies = self.sweep_saliencies or [self.saliency]
        for name in self.sweep_saliencies:
            check_saliency(name, also=[RANDOM])
        check_least(self, batch_size=1, bootstrap_samples=1, seed=0)
        if not 0 < self.max_shard_gb < float("inf"):
            raise ValueError(f"max_shard_gb is {self.max_shard_gb}, but must be finite and above 0")
        if not self.sweep and (self.output is None) != (self.keep is None):
            given, other = ("keep", "output") if self.output is None else ("output", "keep")
            raise ValueError(f"{given} is set but {other} is not: a smaller repository needs both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb prune-experts`."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="recipe, recipes/moemb-mini/prune-experts.yaml"
    )
    parser.add_argument(
        "--sweep",
        metavar="N,N,...",
        help="measure quality with so many experts per block, by masks; writes a report and no repository",
    )
    parser.epilog = "Every key of the recipe is a flag too: --keep 8 --output DIR --saliency man."


def run(args: argparse.Namespace) -> int:
    """Runs `moemb prune-experts`; returns the exit status."""
    overrides = [*args.overrides, *(["--sweep", f"[{args.sweep.strip('[]')}]"] if args.sweep else [])]
    (config,) = load_recipe(args.config, PruneExpertsConfig, overrides=overrides)
    work = ExpertPruning(config)
    statistics = work.statistics()
    print("\n".join(_summary(statistics, work.statistics_path)))
    if config.sweep:
        written = work.sweep(statistics, command=shlex.join(["moemb", *sys.argv[1:]]))
        print(written[1].read_text(encoding="utf-8"))
        print("\n".join(f"wrote {path}" for path in written))
    elif config.output:
        print(f"model repository with {config.keep} experts per block written to {work.write(statistics)}")
    return 0


class ExpertPruning:
    """
    The steps of the verb: measure, then sweep or write. What can be refused is refused before anything is measured.

    Args:
        config (`PruneExpertsConfig`): the settings.

    Raises:
        PruningError: the model is no MoEMB repository, or the output exists.
        SaliencyError: a number of experts out of range.
    """

    def __init__(self, config: PruneExpertsConfig):
        self.config = config
        self.folder = self._locate(config.model)
        settings = read_pruning_config(self.folder)
        text = settings["text_config"]
        wanted = [("sweep", count) for count in config.sweep] if config.sweep else [("keep", config.keep)]
        for name, count in wanted:
            if count is not None:
                check_keep(count, text["num_experts"], text["num_experts_per_tok"], name)
        if config.output and not config.sweep:
            check_target(config.output)
        own_folder = config.model != MINI and Path(config.model).expanduser().is_dir()
        self.name = self.folder.name if own_folder else config.model.rsplit("/", 1)[-1]
        self.from_hub = config.model != MINI and not own_folder
        self.tasks = (
            sweep_tasks(config.sweep_tasks, config.corpus, config.gallery, config.seed) if config.sweep else []
        )
        self.statistics_path = config.statistics
        self._encoder: Any = None
        with _names_model():
            self.fingerprint = weights_fingerprint(self.folder)

    @staticmethod
    def _locate(model: str) -> Path:
        if model == MINI:
            return mini_repository()
        with _names_model():
            return locate_source(model)

    @property
    def encoder(self) -> Any:
        """The model as users load it, a `SentenceTransformer`; loaded on first use."""
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def _load(self) -> Any:
        if self.config.device != "auto":
            return load_model(str(self.folder), self.config.device)[0]
        from sentence_transformers import SentenceTransformer

        offload = cache_folder() / "offload" / self.fingerprint[:16]
        offload.mkdir(parents=True, exist_ok=True)
        placement = {"device_map": "auto", "offload_folder": str(offload)}
        try:
            return SentenceTransformer(str(self.folder), trust_remote_code=True, model_kwargs=placement)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise PruningError(f"the model '{self.folder}' cannot be loaded with device 'auto': {error}") from error

    def statistics(self) -> ExpertStatistics:
        """
        The measurement: read when it is there, gone on with or made when it is not.

        Raises:
            SaliencyError: the file was measured on another model or other data, or there is nothing to measure on.
            CalibrationDataError: the calibration data cannot be read.
        """
        config, path = self.config, self.statistics_path
        identity = {"model": self.fingerprint}
        if path is not None and path.exists() and not config.calibration_data:
            statistics = load_statistics(path)
            check_identity(statistics, identity, path)
            if not statistics.complete:
                raise PruningError(
                    f"statistics {path} hold {statistics.items} of {statistics.identity['items']} items: set "
                    "calibration_data to go on"
                )
            return statistics
        if path is not None and path.exists():
            check_identity(load_statistics(path), identity, path)
        items = read_calibration_data(config.calibration_data, config.seed, config.corpus, config.gallery)
        identity["data"] = data_fingerprint(items)
        if path is None:
            name = f"{self.name}-{self.fingerprint[:12]}-{identity['data'][:12]}.safetensors"
            path = self.statistics_path = cache_folder() / "saliency" / name
        if path.exists() and (statistics := load_statistics(path)).complete:
            check_identity(statistics, identity, path)
            return statistics
        first = self.encoder[0]
        return measure(first.model, first.processor, items, identity, path, config.batch_size)

    def write(self, statistics: ExpertStatistics) -> Path:
        """Writes the smaller repository; returns its folder."""
        config = self.config
        keep = kept_experts(statistics, config.saliency, config.keep, config.last_block_tokens == "pooled")
        record = {
            "model": config.model if self.from_hub else self.name,
            "model_weights": self.fingerprint,
            "saliency": config.saliency,
            "last_block_tokens": config.last_block_tokens,
            "items": statistics.items,
            "calibration_data": config.calibration_data,
            "calibration_items": statistics.identity["data"],
            "seed": config.seed,
        }
        return write_pruned_repository(
            self.folder,
            config.output,
            keep,
            record,
            base_model=config.model if self.from_hub else None,
            max_shard_bytes=max(1, int(config.max_shard_gb * 2**30)),
        )

    def sweep(self, statistics: ExpertStatistics, command: str = "") -> tuple[Path, Path]:
        """Runs the sweep; returns the JSON and the Markdown file."""
        config = self.config
        fingerprint = model_fingerprint(self.encoder, str(self.folder))
        output = config.report or cache_folder() / "results" / f"prune-experts-{self.name}-{fingerprint[:12]}.json"
        prepare_output(output)
        evaluation = TaskEvaluation(
            self.encoder, fingerprint, self.tasks, cache_folder() / "evaluation" / "vectors", config.batch_size
        )
        points = sweep_experts(
            self.encoder[0].model,
            statistics,
            config.sweep,
            evaluation,
            config.sweep_saliencies,
            config.last_block_tokens == "pooled",
            config.seed,
        )
        report = {
            "model": self.name,
            "model_weights": self.fingerprint,
            "command": command,
            "items": statistics.items,
            "calibration_data": config.calibration_data,
            "calibration_items": statistics.identity["data"],
            "last_block_tokens": config.last_block_tokens,
            "seed": config.seed,
            "bootstrap_samples": config.bootstrap_samples,
            "versions": package_versions(),
            **sweep_report(points, self.tasks, config.bootstrap_samples, config.seed),
        }
        table = output.with_suffix(".md")
        write_atomically(output, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        write_atomically(table, sweep_markdown(report))
        return output, table


@contextmanager
def _names_model() -> Iterator[None]:
    """The converter's functions name its flag `--from` where the setting here is `model`."""
    try:
        yield
    except ConversionError as error:
        raise PruningError(str(error).replace("--from", "model")) from error


def _summary(statistics: ExpertStatistics, path: Path) -> list[str]:
    """What was measured, for the console."""
    tokens = statistics.tokens[0].tolist()
    counts = ", ".join(f"{count} {name}" for name, count in zip(GROUPS, tokens, strict=True) if count)
    never = statistics.never_routed()
    lines = [f"{statistics.items} items, tokens per block: {counts}; in {path}"]
    if bool(never.any()):
        blocks = ", ".join(f"{int(row.sum())} in block {block}" for block, row in enumerate(never) if bool(row.any()))
        lines.append(
            f"no token was routed to {int(never.sum())} of {never.numel()} experts ({blocks}); their score is 0"
        )
    return lines
