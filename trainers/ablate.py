"""`moemb ablate`: a study of variants of a training, several seeds each, at equal training compute.

Every run is kept, and one that was stopped goes on: the same command continues the study, and one with more seeds or
variants adds to it. The report is written anew after every run that completes a seed.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .ablate_config import AblateConfig
from .ablate_measure import measure_speed, measured
from .ablate_report import draw, markdown, study_quality, table_rows
from .ablate_runs import Study
from .evaluation_metrics import Ranks
from .files import whole_file, write_atomically
from .prune_experts_sweep import SweepTask, sweep_tasks
from .recipe import load_recipe


HELP = "train variants of moemb-mini at equal compute, several seeds each, and compare them"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb ablate`."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="study, such as recipes/moemb-mini/ablations/x.yaml"
    )
    parser.add_argument("--list", action="store_true", help="print the runs, train nothing")


def run(args: argparse.Namespace) -> int:
    """Runs `moemb ablate`; returns the exit status."""
    (config,) = load_recipe(args.config, AblateConfig, overrides=args.overrides)
    for name in ("train", "pretrain", "common"):
        path = getattr(config, name)
        if path is not None and not path.is_absolute():
            setattr(config, name, args.config.parent / path)
    study = Study(config)
    if args.list:
        for seed in config.seeds:
            print("\n".join(f"{name}, seed {seed}" for name in config.variants))
        return 0
    result = run_study(study, shlex.join(["moemb", "ablate", "--config", str(args.config), *args.overrides]))
    for row in table_rows(result):
        print("  ".join(f"{name}: {value}" for name, value in row.items() if value))
    print("\n".join(f"wrote {path}" for path in report_files(config.report)))
    return 0


def run_study(study: Study, command: str = "") -> dict[str, Any]:
    """
    Trains and measures what is not there yet.

    Args:
        study ([`Study`]): the study.
        command (`str`, *optional*): the command line, for the report.

    Returns:
        `dict`: the results, as the report's `.json` holds them.
    """
    config = study.config
    tasks = sweep_tasks(config.tasks, config.corpus, config.gallery, 0)
    ranks: dict[str, list[dict[str, Ranks]]] = {name: [] for name in config.variants}
    result: dict[str, Any] = {}
    with tqdm(total=len(config.seeds) * len(config.variants), desc="Runs", unit="run") as bar:
        for place, seed in enumerate(config.seeds):
            for name in config.variants:
                repository = study.repository(name, seed)
                ranks[name].append(measured(repository, tasks, study))
                bar.update()
            result = report(study, ranks, tasks, config.seeds[: place + 1], command)
            write(result, config.report)
    if config.qps_items:
        for name, speed in measure_speed(study, tasks).items():
            result["models"][name]["speed"] = speed
        write(result, config.report)
    return result


def report(study: Study, ranks: dict, tasks: list[SweepTask], seeds: list[int], command: str) -> dict[str, Any]:
    """The results of the seeds that are complete."""
    from modeling_moemb import MoEMBConfig

    from .ablate_runs import item_flops, items_of_step
    from .evaluation_report import package_versions
    from .model_card import count_parameters

    config, models = study.config, {}
    for name, variant in config.variants.items():
        model = MoEMBConfig.from_pretrained(study.base(name, config.seeds[0]))
        sizes, steps = count_parameters(model), study.steps(name)
        cost = item_flops(model) * items_of_step(study.train_recipe(name))
        models[name] = {
            "parameters": sizes["total"], "active": sizes["active"], "steps": steps, "compute": cost * steps,
            "item_flops": item_flops(model), "at": variant.at, "settings": vars(variant),
        }  # fmt: skip
    return {
        "title": config.title,
        "command": command,
        "metric": config.metric,
        "axis": config.axis,
        "seeds": seeds,
        "equal": config.equal,
        "common_steps": study.common["max_steps"] if study.common is not None else None,
        "presented": config.presented,
        "adapters": any(study.train_recipe(name).get("tuning") == "lora" for name in config.variants),
        "models": models,
        "quality": study_quality(ranks, tasks, config.bootstrap_samples, 0),
        "versions": package_versions(),
    }


def report_files(stem: Path) -> tuple[Path, Path, Path]:
    """The files of a report: figures, page and plot."""
    return tuple(stem.with_name(stem.name + ending) for ending in (".json", ".md", ".png"))


def write(result: dict[str, Any], stem: Path) -> None:
    """The report, each file by rename."""
    figures, page, plot = report_files(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(figures, json.dumps(result, indent=2) + "\n")
    write_atomically(page, markdown(result))
    with whole_file(plot) as partial:
        draw(result, partial)
