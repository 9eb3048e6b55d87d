"""Policies of the compute dial by name: what a recipe may ask for, and how it is put to work in a model in memory.

    policies:
      top-2: {adaptive_compute: {top_k: 2}}
      beta 50 %: {adaptive_compute: {token_pruning: {layer: 4, keep: 0.5}}}
      MoDES 57 %: {skip_rate: 0.57}                           # the threshold is calibrated first
      REAP 8: {experts: 8, saliency: reap}                    # experts removed for good, here by a mask
      masked 50 %: {adaptive_compute: {...}, execution: masking}

Experts are removed before a threshold is calibrated, because removing them changes the weights that it cuts.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from modeling_moemb import validate_adaptive_compute

from .calibration_data import CalibrationItem, data_fingerprint, read_calibration_data
from .calibration_passes import BlockMeasurement, CalibrationError, CalibrationInputs, measure_blocks
from .calibration_thresholds import ThresholdSearch, ThresholdSettings
from .corpus_sources import cache_folder
from .errors import MoEMBError
from .prune_experts_sweep import RANDOM, kept_experts, masked_experts
from .saliency import ExpertStatistics, check_keep, check_saliency, measure


BASELINE = "full compute"
REMOVAL, MASKING, LOOP = "removal", "masking", "loop"
# What a calibrated threshold never skips, as in `moemb calibrate` by default.
_MODES = {"min_experts": 0, "min_experts_emb": 1, "renormalise": False}


class PolicyError(MoEMBError, ValueError):
    """A policy that cannot be used. The message names it, the setting, the value and what is allowed."""


@dataclass(frozen=True)
class Policy:
    """
    What a recipe says of one policy; nothing at all is full compute.

    Args:
        adaptive_compute (`dict`, *optional*): a compute budget, see `validate_adaptive_compute`.
        skip_rate (`float`, *optional*): fraction of the (token, expert) pairs that MoDES shall skip, of those that
            the other settings leave; the threshold is calibrated.
        thresholds (`str`, *optional*, defaults to `"one"`): `"two"` calibrates one for text and one for the rest.
        experts (`int`, *optional*): routed experts that stay in each block.
        saliency (`str`, *optional*, defaults to `"reap"`): what they are chosen by; `"random"` is a control.
        execution (`str`, *optional*, defaults to `"removal"`): `"masking"` computes everything and multiplies by
            zero, `"loop"` runs one expert after the other: two ways not to save time, for comparison.
    """

    adaptive_compute: dict[str, Any] = field(default_factory=dict)
    skip_rate: float | None = None
    thresholds: Literal["one", "two"] = "one"
    experts: int | None = None
    saliency: str = "reap"
    execution: Literal["removal", "masking", "loop"] = REMOVAL

    def __post_init__(self):
        check_saliency(self.saliency, also=[RANDOM])
        if self.skip_rate is not None and not 0 < self.skip_rate < 1:
            raise ValueError(f"skip_rate is {self.skip_rate}, but must be above 0 and below 1")
        if self.skip_rate is not None and "modes" in self.adaptive_compute:
            raise ValueError("skip_rate calibrates 'modes': leave it out of adaptive_compute")

    @property
    def family(self) -> str:
        """What it turns: the same for all budgets of one action."""
        budget = self.adaptive_compute
        parts = [name for key, name in (("top_k", "top-k"), ("per_modality", "top-k"), ("random_k", "random-k"),
                                        ("tiered_top_k", "tiers"), ("modes", "MoDES")) if key in budget]  # fmt: skip
        parts += ["MoDES"] if self.skip_rate is not None else []
        gated = {"expert_skip": "skip gates", "null_experts": "null experts", "gradual_pruning": "gradual gates"}
        parts += [name for key, name in gated.items() if key in budget]
        if "token_pruning" in budget:
            parts.append(f"tokens by {budget['token_pruning'].get('score', 'beta')}")
        parts += [f"experts by {self.saliency}"] if self.experts is not None else []
        name = " + ".join(dict.fromkeys(parts)) or BASELINE
        return name if self.execution == REMOVAL else f"{name}, {self.execution}"

    def check(self, name: str, text_config: Any, gates: Mapping[str, Any] | None = None) -> None:
        """Raises `PolicyError` when the settings do not fit the model, before anything is measured."""
        budget = dict(self.adaptive_compute)
        if self.skip_rate is not None:
            budget["modes"] = {"tau": 0.0}
        try:
            validate_adaptive_compute(budget, text_config, gates)
            if self.experts is not None:
                check_keep(self.experts, text_config.num_experts, text_config.num_experts_per_tok, "experts")
        except (ValueError, TypeError) as error:
            raise PolicyError(f"policy '{name}': {error}") from error


@dataclass(frozen=True)
class Prepared:
    """
    A policy ready to run.

    Args:
        name (`str`): its name.
        policy ([`Policy`]): the settings.
        budget (`dict`): the compute budget with its thresholds.
        keep (`torch.LongTensor` of shape `(layers, kept)`, *optional*): the experts that stay.
        calibrated (`dict`, *optional*): `skip_rate` and `distance` on the calibration items.
    """

    name: str
    policy: Policy
    budget: dict[str, Any]
    keep: Tensor | None = None
    calibrated: dict[str, float] | None = None

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """Leaves the removed experts out of a model while the context lasts; the budget goes to its `forward`."""
        with nullcontext() if self.keep is None else masked_experts(model, self.keep):
            yield

    @property
    def identity(self) -> str:
        """A hash of what changes the vectors."""
        about = {"budget": self.budget, "keep": None if self.keep is None else self.keep.tolist()}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """All of it as plain data."""
        settings = {key: value for key, value in vars(self.policy).items() if value != getattr(Policy(), key)}
        return {
            "name": self.name, "family": self.policy.family, "settings": settings, "adaptive_compute": self.budget,
            "kept_experts": None if self.keep is None else self.keep.tolist(), "calibrated": self.calibrated,
        }  # fmt: skip


def check_policies(policies: Mapping[str, Policy], text_config: Any, gates: Mapping[str, Any] | None = None) -> None:
    """Raises `PolicyError` for the first policy that does not fit the model, or has the name of the baseline."""
    for name, policy in policies.items():
        if name == BASELINE:
            raise PolicyError(f"'{BASELINE}' is always measured: give the policy another name")
        policy.check(name, text_config, gates)


class Preparation:
    """
    Turns policies into runnable ones: calibrates thresholds and scores experts, once each; the sums are kept where
    `moemb calibrate` and `moemb prune-experts` keep theirs, so that nothing is measured twice.

    Args:
        model (`MoEMBModel`): the model.
        processor (`MoEMBProcessor`): its processor.
        name (`str`): name of the model in file names.
        weights (`str`): hash of its weights, see `saliency.weights_fingerprint`.
        calibration_data (`Mapping[str, int]`): items, see `calibration_data`.
        seed (`int`): seed of the items and of random controls.
        corpus, gallery (`Path`, *optional*): where they are, when not in their usual places.
        batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
        tolerance (`float`, *optional*, defaults to 0.005): how far off a skip rate may be.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        name: str,
        weights: str,
        calibration_data: Mapping[str, int],
        seed: int = 0,
        corpus: Path | None = None,
        gallery: Path | None = None,
        batch_size: int = 32,
        tolerance: float = 0.005,
    ):
        self.model, self.processor, self.name, self.weights = model, processor, name, weights
        self.calibration_data, self.seed, self.corpus, self.gallery = calibration_data, seed, corpus, gallery
        self.batch_size, self.tolerance = batch_size, tolerance
        self._items: list[CalibrationItem] | None = None
        self._statistics: ExpertStatistics | None = None
        self._measured: dict[tuple[str, bool], BlockMeasurement] = {}

    def prepare(self, name: str, policy: Policy) -> Prepared:
        """
        Makes a policy runnable.

        Raises:
            PolicyError: the wanted skip rate cannot be met.
            CalibrationDataError: items are needed, and cannot be read.
        """
        keep = None
        if policy.experts is not None and policy.experts < self.model.config.text_config.num_experts:
            keep = kept_experts(self.statistics(), policy.saliency, policy.experts, seed=self.seed)
        budget = dict(policy.adaptive_compute)
        if policy.skip_rate is None:
            return Prepared(name, policy, budget, keep)
        with Prepared(name, policy, budget, keep).applied(self.model):
            try:
                found = self._search(policy, keep)
            except CalibrationError as error:
                raise PolicyError(f"policy '{name}': {error}") from error
        return Prepared(name, policy, found.budget, keep, {"skip_rate": found.rate, "distance": found.distance})

    def items(self) -> list[CalibrationItem]:
        """The calibration items, read once."""
        if self._items is None:
            self._items = read_calibration_data(self.calibration_data, self.seed, self.corpus, self.gallery)
        return self._items

    def statistics(self) -> ExpertStatistics:
        """What the experts do on the calibration items; measured once."""
        if self._statistics is None:
            data = data_fingerprint(self.items())
            path = cache_folder() / "saliency" / f"{self.name}-{self.weights[:12]}-{data[:12]}.safetensors"
            identity = {"model": self.weights, "data": data}
            self._statistics = measure(self.model, self.processor, self.items(), identity, path, self.batch_size)
        return self._statistics

    def _search(self, policy: Policy, keep: Tensor | None) -> Any:
        """Thresholds for a policy, on the model as it is masked at the moment."""
        weights = self.weights
        if keep is not None:
            weights = hashlib.sha256(f"{weights} {keep.tolist()}".encode()).hexdigest()
        data, two = data_fingerprint(self.items()), policy.thresholds == "two"
        folder = cache_folder() / "calibration" / f"{self.name}-{weights[:12]}-{data[:12]}"
        identity = {"model": weights, "data": data}
        inputs = CalibrationInputs(self.model.eval(), self.processor, self.items(), identity, folder, self.batch_size)
        if (weights, two) not in self._measured:
            self._measured[weights, two] = measure_blocks(inputs, two)
        settings = ThresholdSettings(policy.skip_rate, self.tolerance, two, base=policy.adaptive_compute, modes=_MODES)
        return ThresholdSearch(inputs, self._measured[weights, two], settings).run()
