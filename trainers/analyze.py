"""`moemb analyze`: where a model spends its compute and what its beta looks at, as PNGs with the CSV behind each.

firing       how often each action of each budget fires, by block and modality
beta         beta by block and kind of token
agreement    beta's ranking of an item's visual tokens, beside the attention of `<emb>` and the attention received
focus        what share of beta and of attention falls to each kind of token
heatmaps     beta and attention over pictures
load         the load of each expert by block and modality
saliency     quality against the experts kept, for each saliency (a sweep of `moemb prune-experts`)
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import analyze_figures, analyze_tables
from .analyze_heatmaps import draw_maps, heat_map, items_with_pictures, map_rows
from .analyze_measure import Analysis, measure_firing, measure_full
from .benchmark_report import figure, save_figure
from .calibration_data import data_fingerprint, read_calibration_data
from .calibration_passes import CalibrationInputs
from .calibration_repository import locate_model, own_folder
from .convert_safetensors import read_json_mapping
from .corpus_sources import cache_folder
from .errors import MoEMBError, nearest
from .evaluation_report import package_versions
from .files import write_atomically
from .quickstart_model import load_model
from .recipe import check_least, expand_paths, load_recipe
from .saliency import SALIENCIES, weights_fingerprint


HELP = "draw where a model spends its compute: firing rates, beta, expert load, heat maps"
ACCEPTS_OVERRIDES = True
FIGURES = ("firing", "beta", "agreement", "focus", "heatmaps", "load", "saliency")


class AnalysisError(MoEMBError, ValueError):
    """An analysis that cannot be made. The message names the setting, its value and the remedy."""


@dataclass
class AnalyzeConfig:
    """
    Settings of an analysis.

    Args:
        model (`str`): `"moemb-mini"`, a folder of a MoEMB repository, or a Hub id of one.
        calibration_data (`dict[str, int]`): the items: where from and how many, see `calibration_data`.
        output (`Path`): folder of the PNGs and CSVs.
        figures (`list[str]`, *optional*): which of `FIGURES`; all by default, `saliency` only with a sweep.
        budgets (`dict[str, dict]`, *optional*): compute budgets by name, for the firing rates; the model's own is
            added as "configured".
        layer (`int`, *optional*, defaults to 4): blocks whose beta is looked at in the heat maps.
        maps (`int`, *optional*, defaults to 6): pictures with heat maps.
        sweep_report (`Path`, *optional*): JSON of `moemb prune-experts --sweep`, for the saliencies.
        sweep (`list[int]`, *optional*): numbers of experts to sweep over instead, on the same items; slow.
        sweep_tasks (`list[str]`, *optional*, defaults to `["validation"]`): tasks that are then evaluated.
        work (`Path`, *optional*): folder of the sums, from which an interrupted run goes on; in the cache when left
            out.
        corpus, gallery (`Path`, *optional*): where corpus and gallery are, when not in their usual places.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        seed (`int`, *optional*, defaults to 0): seed of the items that are drawn and of the intervals.
        device (`str`, *optional*): device; chosen by Sentence Transformers when left out.
    """

    model: str
    calibration_data: dict[str, int]
    output: Path
    figures: list[str] = field(default_factory=list)
    budgets: dict[str, dict] = field(default_factory=dict)
    layer: int = 4
    maps: int = 6
    sweep_report: Path | None = None
    sweep: list[int] = field(default_factory=list)
    sweep_tasks: list[str] = field(default_factory=lambda: ["validation"])
    work: Path | None = None
    corpus: Path | None = None
    gallery: Path | None = None
    batch_size: int = 32
    seed: int = 0
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        check_least(self, layer=1, maps=1, batch_size=1, seed=0)
        for name in self.figures:
            if name not in FIGURES:
                raise ValueError(f"there is no figure '{name}'{nearest(name, FIGURES)}; choose among {list(FIGURES)}")
        swept = self.sweep_report is not None or bool(self.sweep)
        if "saliency" in self.figures and not swept:
            raise ValueError("the figure 'saliency' needs sweep_report (of moemb prune-experts --sweep) or sweep")
        self.figures = self.figures or [name for name in FIGURES if swept or name != "saliency"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moemb analyze`."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="recipe, recipes/moemb-mini/analyze.yaml"
    )
    parser.epilog = f"Every key of the recipe is a flag too: --figures '[beta, load]'. Figures: {', '.join(FIGURES)}."


def run(args: argparse.Namespace) -> int:
    """Runs `moemb analyze`; returns the exit status."""
    (config,) = load_recipe(args.config, AnalyzeConfig, overrides=args.overrides)
    for path in Analyzer(config).run(shlex.join(["moemb", *sys.argv[1:]])):
        print(f"wrote {path}")
    return 0


class Analyzer:
    """
    The figures of one model on some items. What can be refused is refused before anything is measured.

    Args:
        config (`AnalyzeConfig`): the settings.

    Raises:
        AnalysisError: a budget or layer that the model cannot take, or a report that is none.
        CalibrationError: no such model.
        CalibrationDataError: the items cannot be read.
        BenchmarkError: matplotlib is not installed.
    """

    def __init__(self, config: AnalyzeConfig):
        self.config = config
        figure(1)
        self.folder = locate_model(config.model)
        self.kinds, self.slots, self.budgets = _read_model(self.folder, config)
        self.sweep_report = _read_report(config.sweep_report) if config.sweep_report else None
        self.items = read_calibration_data(config.calibration_data, config.seed, config.corpus, config.gallery)
        self.identity = {"model": weights_fingerprint(self.folder), "data": data_fingerprint(self.items)}
        self._inputs: CalibrationInputs | None = None
        self._full: Analysis | None = None

    @property
    def inputs(self) -> CalibrationInputs:
        """Model and items; the model is loaded on first use."""
        if self._inputs is None:
            config = self.config
            first = load_model(config.model, config.device)[0][0]
            name = self.folder.name if own_folder(config.model) else config.model.rsplit("/", 1)[-1]
            short = (self.identity["model"][:12], self.identity["data"][:12])
            work = config.work or cache_folder() / "analysis" / "-".join([name, *short])
            model = first.model.eval()
            self._inputs = CalibrationInputs(
                model, first.processor, self.items, self.identity, work, config.batch_size
            )
        return self._inputs

    @property
    def full(self) -> Analysis:
        """The pass at full compute, made on first use."""
        if self._full is None:
            self._full = measure_full(self.inputs)
        return self._full

    def blocks(self, kind: str) -> list[int]:
        """The blocks of a kind."""
        return [block for block, found in enumerate(self.kinds) if found == kind]

    def run(self, command: str = "") -> list[Path]:
        """Measures and draws; returns what was written."""
        self.config.output.mkdir(parents=True, exist_ok=True)
        written = []
        for name in self.config.figures:
            made = getattr(self, f"_{name}")()
            if made is None:
                continue
            rows, drawing = made
            written.append(analyze_tables.write_csv(self.config.output / f"{name}.csv", rows))
            written.append(save_figure(drawing, self.config.output / f"{name}.png"))
        about = {
            "model": self.config.model,
            "model_weights": self.identity["model"],
            "calibration_data": self.config.calibration_data,
            "calibration_items": self.identity["data"],
            "items": len(self.items),
            "seed": self.config.seed,
            "budgets": self.budgets,
            "command": command,
            "versions": package_versions(),
        }
        path = self.config.output / "analysis.json"
        write_atomically(path, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
        return [*written, path]

    def _firing(self) -> tuple[Sequence[dict], Any] | None:
        if not self.budgets:
            return None
        fired = {name: measure_firing(self.inputs, budget, name) for name, budget in self.budgets.items()}
        rows = analyze_tables.firing_rows(fired, self.slots, len(self.items))
        return rows, analyze_figures.draw_firing(rows, self.blocks("full_attention"))

    def _beta(self) -> tuple[Sequence[dict], Any]:
        rows = analyze_tables.beta_rows(self.full, self.blocks("linear_attention"))
        return rows, analyze_figures.draw_beta(rows, self.blocks("full_attention"))

    def _agreement(self) -> tuple[Sequence[dict], Any]:
        places = self.blocks("linear_attention"), self.blocks("full_attention")
        rows = analyze_tables.agreement_rows(self.full, *places, self.config.seed)
        return rows, analyze_figures.draw_agreement(rows)

    def _focus(self) -> tuple[Sequence[dict], Any]:
        rows = analyze_tables.focus_rows(self.full, self.blocks("full_attention"))
        return rows, analyze_figures.draw_focus(rows)

    def _load(self) -> tuple[Sequence[dict], Any]:
        rows = analyze_tables.load_rows(self.full)
        return rows, analyze_figures.draw_load(rows)

    def _heatmaps(self) -> tuple[Sequence[dict], Any] | None:
        chosen = items_with_pictures(self.items, self.config.maps)
        maps = [heat_map(self.inputs, index, self.config.layer) for index in chosen]
        maps = [found for found in maps if found is not None]
        if not maps:
            return None
        return map_rows(maps), draw_maps(maps, self.config.layer)

    def _saliency(self) -> tuple[Sequence[dict], Any]:
        if self.sweep_report is None:
            self.sweep_report = self._swept()
        rows = analyze_tables.saliency_rows(self.sweep_report)
        if not rows:
            raise AnalysisError("the sweep compares nothing: name fewer experts than the model has under 'sweep'")
        return rows, analyze_figures.draw_saliency(rows)

    def _swept(self) -> dict[str, Any]:
        from .prune_experts import ExpertPruning, PruneExpertsConfig

        config = self.config
        work = ExpertPruning(
            PruneExpertsConfig(
                model=config.model,
                calibration_data=config.calibration_data,
                sweep=config.sweep,
                sweep_saliencies=[*SALIENCIES, "random"],
                sweep_tasks=config.sweep_tasks,
                report=config.output / "saliency-sweep.json",
                corpus=config.corpus,
                gallery=config.gallery,
                batch_size=config.batch_size,
                seed=config.seed,
                device=config.device,
            )
        )
        path, _ = work.sweep(work.statistics())
        return _read_report(path)


def _read_model(folder: Path, config: AnalyzeConfig) -> tuple[list[str], int, dict[str, dict]]:
    """Kinds of the model's blocks, experts per token, and the budgets by name, checked."""
    from modeling_moemb import MoEMBConfig, validate_adaptive_compute

    model = MoEMBConfig.from_dict(read_json_mapping(folder / "config.json"))
    text, budgets = model.text_config, {}
    own = {"configured": model.adaptive_compute} if model.adaptive_compute else {}
    for name, budget in (own | config.budgets).items():
        try:
            budgets[name] = validate_adaptive_compute(budget, text, model.gates)
        except (ValueError, TypeError) as error:
            raise AnalysisError(f"the budget '{name}': {error}") from error
    linear = [block for block, kind in enumerate(text.layer_types) if kind == "linear_attention"]
    if not linear or "full_attention" not in text.layer_types:
        raise AnalysisError(f"the model has no {'Gated DeltaNet' if not linear else 'attention'} block to look at")
    if not linear[0] < config.layer <= len(text.layer_types):
        raise AnalysisError(
            f"layer is {config.layer}, but must be from {linear[0] + 1} to {len(text.layer_types)}: the first Gated "
            f"DeltaNet block is {linear[0]}"
        )
    return list(text.layer_types), text.num_experts_per_tok, budgets


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        analyze_tables.saliency_rows(report)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise AnalysisError(
            f"sweep_report {path} is no report of 'moemb prune-experts --sweep' ({type(error).__name__}: {error})"
        ) from error
    return report
