"""`moemb calibrate`: the compute budget that skips a wanted share of the experts (MoDES, arXiv 2511.15690).

One pass over calibration items measures what each block's routed experts are worth to the vector and collects the
routing weights; the thresholds follow from the weights and are checked, and mended, by passes with the budget. The
result becomes `adaptive_compute` of the repository's `config.json`, which every later `encode` follows.

Departures from MoDES: what a block is worth is the distance between vectors, `1 - cosine`, not a divergence between
answers; a bypassed block's routed output is zero, not its input; the thresholds are looked for among quantiles of this
model's scores.
"""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .calibration_data import data_fingerprint, read_calibration_data
from .calibration_passes import CalibrationError, CalibrationInputs, measure_blocks
from .calibration_repository import check_output, locate_model, own_folder, write_budget
from .calibration_thresholds import MODALITIES, Calibrated, ThresholdSearch, ThresholdSettings
from .convert_safetensors import read_json_mapping
from .corpus_sources import cache_folder
from .evaluation_report import package_versions, prepare_output
from .files import write_atomically
from .quickstart_model import load_model
from .recipe import check_least, expand_paths, load_recipe
from .saliency import weights_fingerprint


HELP = "find how many experts to skip, and where, on calibration items; write the budget into the model"
ACCEPTS_OVERRIDES = True


@dataclass
class CalibrationConfig:
    """
    Settings of a calibration.

    Args:
        model (`str`): `"moemb-mini"`, a folder of a MoEMB repository, or a Hub id of one.
        calibration_data (`dict[str, int]`): where items come from and how many, see `calibration_data`.
        skip_rate (`float`, *optional*, defaults to 0.5): fraction of the (token, expert) pairs to skip.
        tolerance (`float`, *optional*, defaults to 0.005): how far off the measured fraction may be.
        thresholds (`str`, *optional*, defaults to `"one"`): `"two"` looks for a threshold for text and one for
            images and video, with layer scales of each modality.
        grid (`int`, *optional*, defaults to 16): values of each of two thresholds that are looked at.
        frontier_items (`int`, *optional*, defaults to 128): items on which their combinations are compared.
        min_experts, min_experts_emb (`int`, *optional*, default to 0 and 1): experts that a token, and `<emb>`, keep.
        renormalise (`bool`, *optional*, defaults to `False`): scale the kept weights to sum to 1.
        adaptive_compute (`dict`, *optional*): other settings of the budget, such as `token_pruning`; the fraction is
            then that of the pairs these settings leave.
        output (`Path`, *optional*): the repository to write: a copy of the model with the budget. When left out, the
            budget goes into the model's own folder; a model that has none of yours (moemb-mini, a Hub id) stays as it
            is, and only the report is written.
        keep_previous (`bool`, *optional*, defaults to `False`): keep the configuration that is replaced beside it.
        report (`Path`, *optional*): JSON of the result; among the sums when left out.
        work (`Path`, *optional*): folder of the sums, from which an interrupted run goes on; in the cache, named after
            model and data, when left out.
        corpus, gallery (`Path`, *optional*): where corpus and gallery are, when not in their usual places.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        seed (`int`, *optional*, defaults to 0): seed of the items that are drawn.
        device (`str`, *optional*): device; chosen by Sentence Transformers when left out.
    """

    model: str
    calibration_data: dict[str, int]
    skip_rate: float = 0.5
    tolerance: float = 0.005
    thresholds: Literal["one", "two"] = "one"
    grid: int = 16
    frontier_items: int = 128
    min_experts: int = 0
    min_experts_emb: int = 1
    renormalise: bool = False
    adaptive_compute: dict[str, Any] = field(default_factory=dict)
    output: Path | None = None
    keep_previous: bool = False
    report: Path | None = None
    work: Path | None = None
    corpus: Path | None = None
    gallery: Path | None = None
    batch_size: int = 32
    seed: int = 0
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        for name in ("skip_rate", "tolerance"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0 and below 1")
        check_least(self, grid=2, frontier_items=1, batch_size=1, seed=0)
        if "modes" in self.adaptive_compute:
            raise ValueError("adaptive_compute has 'modes', which is what is calibrated: leave it out")

    def thresholds_settings(self) -> ThresholdSettings:
        """What the search needs to know."""
        modes = {name: getattr(self, name) for name in ("min_experts", "min_experts_emb", "renormalise")}
        return ThresholdSettings(
            self.skip_rate,
            self.tolerance,
            self.thresholds == "two",
            self.grid,
            self.frontier_items,
            self.adaptive_compute,
            modes,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb calibrate`."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="recipe, recipes/moemb-mini/calibrate.yaml"
    )
    parser.epilog = "Every key of the recipe is a flag too: --skip_rate 0.57 --thresholds two --output DIR."


def run(args: argparse.Namespace) -> int:
    """Runs `moemb calibrate`; returns the exit status."""
    (config,) = load_recipe(args.config, CalibrationConfig, overrides=args.overrides)
    record, written = calibrate(config, command=shlex.join(["moemb", *sys.argv[1:]]))
    print("\n".join(summary(record)))
    print("\n".join(f"wrote {path}" for path in written))
    return 0


def calibrate(config: CalibrationConfig, command: str = "") -> tuple[dict[str, Any], list[Path]]:
    """
    Calibrates a model. What can be refused is refused before anything is measured.

    Args:
        config (`CalibrationConfig`): the settings.
        command (`str`, *optional*): kept in the record.

    Returns:
        `tuple`: the record of the result, and what was written.

    Raises:
        CalibrationError: no such model, a setting out of range, or a rate that cannot be reached.
        CalibrationDataError: the calibration data cannot be read.
        PruningError: the output exists.
    """
    folder, settings = locate_model(config.model), config.thresholds_settings()
    _check_budget(folder, settings)
    check_output(config.model, config.output)
    if config.report is not None:
        prepare_output(config.report)
    items = read_calibration_data(config.calibration_data, config.seed, config.corpus, config.gallery)
    identity = {"model": weights_fingerprint(folder), "data": data_fingerprint(items)}
    name = folder.name if own_folder(config.model) else config.model.rsplit("/", 1)[-1]
    work = config.work or cache_folder() / "calibration" / f"{name}-{identity['model'][:12]}-{identity['data'][:12]}"
    first = load_model(config.model, config.device)[0][0]
    inputs = CalibrationInputs(first.model.eval(), first.processor, items, identity, work, config.batch_size)
    search = ThresholdSearch(inputs, measure_blocks(inputs, settings.two), settings)
    found = search.run()
    record = _record(config, found, identity, name, len(items), command)
    report = config.report or work / f"calibration-{config.thresholds}-{config.skip_rate:g}.json"
    write_atomically(report, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    target = config.output or own_folder(config.model)
    if target is None:
        return record, [report]
    return record, [report, write_budget(folder, target, found.budget, record, config.keep_previous)]


def _check_budget(folder: Path, settings: ThresholdSettings) -> None:
    """The settings that do not depend on the measurement, by the rules of the model."""
    from modeling_moemb import MoEMBConfig, validate_adaptive_compute

    try:
        model = MoEMBConfig.from_dict(read_json_mapping(folder / "config.json"))
        if model.feed_forward != "moe":
            raise CalibrationError(
                f"the model {folder} has no learned router (feed_forward {model.feed_forward!r}): there are no "
                "routing weights to calibrate thresholds on"
            )
        text = model.text_config
        scales = [1.0] * text.num_hidden_layers
        by_modality = dict.fromkeys(MODALITIES, scales)
        validate_adaptive_compute(
            settings.budget(by_modality if settings.two else scales, [1.0, 1.0]), text, model.gates
        )
    except (ValueError, TypeError) as error:
        raise CalibrationError(str(error)) from error


def _record(
    config: CalibrationConfig, found: Calibrated, identity: dict[str, str], name: str, items: int, command: str
) -> dict[str, Any]:
    return {
        "model": name,
        "model_weights": identity["model"],
        "calibration_data": config.calibration_data,
        "calibration_items": identity["data"],
        "items": items,
        "seed": config.seed,
        "wanted_skip_rate": config.skip_rate,
        "tolerance": config.tolerance,
        "skip_rate": found.rate,
        "distance": found.distance,
        "thresholds": config.thresholds,
        "adaptive_compute": found.budget,
        "frontier": found.frontier,
        "frontier_items": min(config.frontier_items, items) if found.frontier else 0,
        "budgets_measured": found.passes,
        "command": command,
        "versions": package_versions(),
    }


def summary(record: dict[str, Any]) -> list[str]:
    """What was found, for the console."""
    modes = record["adaptive_compute"]["modes"]
    scales, tau = modes["layer_scales"], modes["tau"]
    columns = scales if isinstance(scales, dict) else {"scale": scales}
    lines = [
        f"{record['items']} items; {record['skip_rate']:.2%} of the pairs skipped (wanted "
        f"{record['wanted_skip_rate']:.2%}), mean 1 - cosine to full compute {record['distance']:.4g}; "
        f"{record['budgets_measured']} budgets measured",
        "block  " + "  ".join(f"{name:>8}" for name in columns),
    ]
    for block, row in enumerate(zip(*columns.values(), strict=True)):
        lines.append(f"{block:>5}  " + "  ".join(f"{value:8.4f}" for value in row))
    shown = {name: f"{value:.5g}" for name, value in tau.items()} if isinstance(tau, dict) else f"{tau:.5g}"
    lines.append(f"tau {shown}")
    for cell in record["frontier"]:
        mark = "  <- chosen" if cell["chosen"] else ""
        lines.append(
            f"text {cell['tau_text']:.4g}, visual {cell['tau_visual']:.4g}: {cell['rate']:.2%} skipped, "
            f"distance {cell['distance']:.4g}{mark}"
        )
    return lines
