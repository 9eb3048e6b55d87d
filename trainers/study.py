"""`moemb study`: trained gates beside inference-only policies, over seeds, measured on held-out tasks.

A run is a training recipe with changes; each is trained once for every seed, a run whose gate collapses is reported
with its message. What was trained and measured is kept: an interrupted study goes on, and a run that is added later is
the only one that is trained.
"""

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm

from .calibration_repository import locate_model
from .corpus_sources import cache_folder
from .dial_policies import BASELINE, Policy, Preparation, Prepared, check_policies
from .dial_quality import DialQuality, Outcome
from .errors import MoEMBError
from .evaluation_encoding import model_fingerprint
from .evaluation_report import package_versions, prepare_output
from .files import write_atomically
from .prune_experts_sweep import sweep_tasks
from .recipe import expand_paths, load_recipe, read_recipe
from .saliency import weights_fingerprint
from .study_report import firing_figure, markdown, summary


HELP = "train gates with several recipes and seeds, and compare them with inference-only policies"
ACCEPTS_OVERRIDES = True
STOPPED = "stopped.json"
_FIRING_BATCHES = 3  # of each kind of item


class StudyError(MoEMBError, ValueError):
    """A study that cannot be made; the text names the run and the remedy."""


@dataclass(frozen=True)
class StudyRun:
    """
    A training.

    Args:
        recipe (`str`): its recipe, from the folder of the study's recipe.
        changes (`dict`, *optional*): keys of it that are set otherwise.
        group (`str`, *optional*, defaults to `"actions"`): table that it stands in: `"actions"` or `"combination"`.
        match (`str`, *optional*): the inference-only policy that is also measured at the same savings: `"beta"` keeps
            as many visual tokens, `"modes"` runs as many (token, expert) pairs.
    """

    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    group: Literal["actions", "combination"] = "actions"
    match: Literal["beta", "modes"] | None = None


@dataclass
class StudyConfig:
    """
    What is trained and measured.

    Args:
        model (`str`): the model that all start from, and that inference-only policies run on.
        runs (`dict[str, StudyRun]`): trainings by name.
        work (`Path`): folder of the trained gates.
        policies (`dict[str, Policy]`, *optional*): inference-only policies, see `dial_policies`.
        seeds (`list[int]`, *optional*, defaults to `[0, 1, 2]`): every training is made with each.
        tasks (`list[str]`): held-out tasks.
        metric (`str`, *optional*, defaults to `"R@10"`): `R@1`, `R@10` or `MRR`.
        layer (`int`, *optional*, defaults to 4): block after which `match: beta` drops tokens.
        calibration_data (`dict[str, int]`, *optional*): items for thresholds, see `calibration_data`.
        output (`Path`, *optional*): folder of the report.
        batch_size (`int`, *optional*, defaults to 64): items in one forward pass.
        bootstrap_samples (`int`, *optional*, defaults to 2000): resamples behind each interval.
        seed (`int`, *optional*, defaults to 0): of the resampling and of calibration items.
        corpus, gallery (`Path`, *optional*): where they are, when not in their usual places.
        device (`str`, *optional*): device of the measurement.
    """

    model: str
    runs: dict[str, StudyRun]
    work: Path
    tasks: list[str]
    policies: dict[str, Policy] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    metric: Literal["R@1", "R@10", "MRR"] = "R@10"
    layer: int = 4
    calibration_data: dict[str, int] = field(default_factory=dict)
    output: Path = Path("results")
    batch_size: int = 64
    bootstrap_samples: int = 2000
    seed: int = 0
    corpus: Path | None = None
    gallery: Path | None = None
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        if not self.runs or not self.seeds or not self.tasks:
            raise ValueError("a study needs runs, seeds and tasks")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}, but each must be there once")
        if set(self.runs) & set(self.policies):
            raise ValueError(f"{sorted(set(self.runs) & set(self.policies))} stand in runs and in policies")
        if any(run.match == "modes" for run in self.runs.values()) and not self.calibration_data:
            raise ValueError("match: modes needs calibration_data, such as {corpus:emoji: 256}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb; keys of the recipe can also be given as `--key value`."""
    parser.add_argument("--config", required=True, type=Path, help="recipe: recipes/moemb-mini/adaptive/study.yaml")
    parser.add_argument("--no-plots", action="store_true", help="write no figure")


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, measures, and writes `<output>/<name>.json`, `.md` and `.png`."""
    (config,) = load_recipe(args.config, StudyConfig, overrides=args.overrides)
    name = args.config.stem
    prepare_output(config.output / f"{name}.json")
    trained = train_all(config, args.config.parent)
    result = measure_all(config, trained)
    command = shlex.join(["moemb", "study", "--config", str(args.config), *args.overrides])
    result |= {
        "study": name,
        "command": command,
        "versions": package_versions(),
        "metric": config.metric,
        "seeds": config.seeds,
    }
    write_atomically(config.output / f"{name}.json", json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    write_atomically(config.output / f"{name}.md", text)
    if not args.no_plots:
        firing_figure(result["firing"], config.output / f"{name}.png")
    print(text)
    return 0


# Training


def run_folder(config: StudyConfig, name: str, seed: int, recipe: Path, weights: str) -> Path:
    """Folder of a training; another recipe, other changes or another model (name or weights) make another one."""
    run = config.runs[name]
    about = {"model": config.model, "weights": weights, "recipe": read_recipe(recipe), "changes": run.changes}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
    slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return config.work / f"{slug}-{digest}" / f"seed-{seed}"


def train_all(config: StudyConfig, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """
    Trains every run with every seed, unless that has been done.

    Args:
        config ([`StudyConfig`]): the study.
        folder (`Path`): where its recipes are.

    Returns:
        `dict`: by run, for each seed `seed`, `folder` (of the repository) or `stopped` (why there is none).

    Raises:
        StudyError: a recipe that is not there, or a training that failed otherwise than by a collapsed gate.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in config.runs}
    places = [(name, seed) for name in config.runs for seed in config.seeds]
    weights = weights_fingerprint(locate_model(config.model))
    for name, seed in tqdm(places, desc="Trainings", unit="run", disable=None):
        recipe = folder / config.runs[name].recipe
        if not recipe.is_file():
            raise StudyError(f"run '{name}': there is no recipe {recipe}")
        target = run_folder(config, name, seed, recipe, weights)
        if not (target / "final" / "config.json").is_file() and not (target / STOPPED).is_file():
            _train(config, name, seed, recipe, target)
        if (target / STOPPED).is_file():
            found[name].append({"seed": seed, **json.loads((target / STOPPED).read_text())})
        else:
            found[name].append({"seed": seed, "folder": str(target / "final")})
    return found


def _train(config: StudyConfig, name: str, seed: int, recipe: Path, target: Path) -> None:
    given = {"init_from": config.model, **config.runs[name].changes, "output_dir": str(target), "seed": seed}
    if config.corpus is not None:
        given["corpus"] = str(config.corpus)
    words = [word for key, value in given.items() for word in (f"--{key}", _as_text(value))]
    target.mkdir(parents=True, exist_ok=True)
    status = _moemb(["train", "--config", str(recipe), *words], target / "output.txt")
    if not status:
        return
    text = (target / "output.txt").read_text(errors="replace")
    # a progress bar leaves its line open: the message does not begin one
    _, found, message = text.rpartition("moemb train: error: ")
    message = (message.strip().splitlines() or [""])[0] if found else ""
    if message.startswith("step "):  # only a monitor's message begins with the step at which it stopped the run
        write_atomically(target / STOPPED, json.dumps({"stopped": message}) + "\n")
        return
    last = (text.splitlines() or [""])[-1]
    raise StudyError(f"run '{name}', seed {seed}: {message or f'see {target}/output.txt: {last}'}")


def _moemb(words: list[str], log: Path) -> int:
    """Runs the command in a process of its own, whose memory is free again when it ends; returns its status."""
    with log.open("w") as file:
        command = [sys.executable, "-m", f"{__package__}.cli", *words]
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Measurement


class _Measured:
    """A model with its quality on the tasks."""

    def __init__(self, config: StudyConfig, model: str, tasks: Sequence[Any]):
        from .quickstart_model import load_model

        encoder, source = load_model(model, config.device)
        self.model, self.processor = encoder[0].model.eval(), encoder[0].processor
        cache = cache_folder() / "evaluation" / "study"
        fingerprint = model_fingerprint(encoder, source)
        self.quality = DialQuality(self.model, self.processor, fingerprint, tasks, cache, config.batch_size)

    def entry(self, outcome: Outcome) -> dict[str, Any]:
        return {"outcome": outcome, "ranks": self.quality.ranks(outcome)}

    @torch.inference_mode()
    def firing(self, budget: Mapping[str, Any]) -> dict[str, Any]:
        """What is dropped and skipped in each block, by modality, as shares of what full compute does there."""
        tokens = pairs = 0
        for batch in sample_batches(self.quality.batches):
            given = {"pooled_only": False, "output_compute": True, "share_prefixes": False}
            record = self.model(**self.quality.features(batch), adaptive_compute=dict(budget), **given).compute
            tokens, pairs = tokens + record.tokens.cpu(), pairs + record.expert_pairs.cpu()
        slots = self.model.config.text_config.num_experts_per_tok
        alive = tokens / tokens[0].clamp_min(1)
        run = pairs / (slots * tokens).clamp_min(1)
        present = (tokens[0] > 0).tolist()
        return {
            "dropped": [[1 - float(v) if here else None for v, here in zip(row, present)] for row in alive],
            "skipped": [[1 - float(v) if here else None for v, here in zip(row, present)] for row in run],
        }


def sample_batches(batches: Sequence[Any]) -> list[Any]:
    """A few batches of every kind of item (text, picture, clip, mixed), evenly spaced among those of the kind."""
    kinds: dict[tuple[str, ...], list[Any]] = {}
    for batch in batches:
        kinds.setdefault(tuple(sorted({name for item in batch.items for name in item})), []).append(batch)
    chosen = []
    for of_kind in kinds.values():
        count = min(_FIRING_BATCHES, len(of_kind))
        chosen += [of_kind[place * len(of_kind) // count] for place in range(count)]
    return chosen


def mean_rates(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Firing rates, by block and modality, averaged over seeds."""
    return {
        key: [
            [None if values[0] is None else sum(values) / len(values) for values in zip(*blocks, strict=True)]
            for blocks in zip(*(rate[key] for rate in rates), strict=True)
        ]
        for key in ("dropped", "skipped")
    }


def measure_all(config: StudyConfig, trained: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Quality, FLOPs and firing rates of all runs and policies."""
    tasks = sweep_tasks(config.tasks, config.corpus, config.gallery, config.seed)
    entries: dict[str, list[dict[str, Any]]] = {}
    rates: dict[str, list[dict[str, Any]]] = {}
    budgets: dict[str, Mapping[str, Any]] = {}
    for name, runs in trained.items():
        for done in runs:
            if "folder" not in done:
                continue
            measured = _Measured(config, done["folder"], tasks)
            budget = budgets[name] = measured.model.config.adaptive_compute or {}
            outcome = measured.quality.run([Prepared(name, Policy(adaptive_compute=budget), budget)])[name]
            entries.setdefault(name, []).append(measured.entry(outcome))
            rates.setdefault(name, []).append(measured.firing(budget))
    firing = {name: mean_rates(of_seeds) for name, of_seeds in rates.items()}
    base = _Measured(config, config.model, tasks)
    prepared = [Prepared(BASELINE, Policy(), {}), *_prepare(config, base, config.policies)]
    matched, partners = _matched(config, base, firing, entries, budgets)
    outcomes = base.quality.run([*prepared, *matched])
    entries = {BASELINE: [base.entry(outcomes[BASELINE])]} | entries
    for policy in (*prepared[1:], *matched):
        entries[policy.name] = [base.entry(outcomes[policy.name])]
    stopped = {name: [done for done in runs if "stopped" in done] for name, runs in trained.items()}
    groups = {name: run.group for name, run in config.runs.items()}
    table = summary(entries, tasks, config.metric, config.bootstrap_samples, config.seed, partners)
    return {"table": table, "firing": firing, "groups": groups, "partners": partners, "stopped": stopped,
            "tasks": [{"name": task.name, "queries": len(task.queries)} for task in tasks]}  # fmt: skip


def _prepare(config: StudyConfig, base: _Measured, policies: Mapping[str, Policy]) -> list[Prepared]:
    check_policies(policies, base.model.config.text_config)
    folder = locate_model(config.model)
    preparation = Preparation(
        base.model, base.processor, config.model.rsplit("/", 1)[-1], weights_fingerprint(folder),
        config.calibration_data, config.seed, config.corpus, config.gallery,
    )  # fmt: skip
    return [preparation.prepare(name, policy) for name, policy in policies.items()]


def _matched(
    config: StudyConfig,
    base: _Measured,
    firing: Mapping[str, Any],
    entries: Mapping[str, Any],
    budgets: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Prepared], dict[str, str]]:
    """Inference-only policies with the savings of the trained runs that ask for one."""
    policies: dict[str, Policy] = {}
    partners: dict[str, str] = {}
    full = base.quality.run([Prepared(BASELINE, Policy(), {})])[BASELINE]
    for name, run in config.runs.items():
        if run.match is None or name not in entries:
            continue
        partner = f"{run.match} at the savings of '{name}'"
        if run.match == "beta":
            keep = budgets[name].get("token_pruning", {}).get("keep")  # a gate that drops a fraction: the same one
            if keep is None:
                last = zip(("image", "video"), firing[name]["dropped"][-1][1:], strict=True)
                keep = {kind: round(max(1 - share, 0.001), 3) for kind, share in last if share is not None}
            if not keep:
                continue
            policies[partner] = Policy({"token_pruning": {"layer": config.layer, "keep": keep}})
        else:
            rates = [1 - entry["outcome"].pairs / full.pairs for entry in entries[name]]
            rate = sum(rates) / len(rates)
            if not 0.01 < rate < 0.99:
                continue
            policies[partner] = Policy(skip_rate=round(rate, 3))
        partners[name] = partner
    return _prepare(config, base, policies), partners
