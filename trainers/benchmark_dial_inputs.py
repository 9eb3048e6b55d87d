"""What `moemb bench --config` runs on: a real model and the items of tasks, or a random one and random items."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .benchmark_dial_config import DialBenchConfig
from .benchmark_models import MERGE, build_pair, image_item, packed_batch
from .benchmark_operations import DTYPES
from .benchmark_report import BenchmarkError
from .calibration_passes import before_each_block
from .calibration_search import threshold_for_rate
from .dial_policies import BASELINE, Policy, Preparation, Prepared, check_policies
from .evaluation_encoding import encoder_input, item_key, model_fingerprint
from .prune_experts_sweep import RANDOM, SweepTask, kept_experts, sweep_tasks
from .saliency import ExpertStatistics, expert_blocks, weights_fingerprint


class RealInputs:
    """
    A model that was trained, and the documents of tasks.

    Args:
        config ([`DialBenchConfig`]): the settings.

    Raises:
        PolicyError: a policy that does not fit the model.
        SweepError: a task that is not there.
    """

    def __init__(self, config: DialBenchConfig):
        from .calibration_repository import locate_model, own_folder
        from .quickstart_model import load_model

        self.config = config
        folder = locate_model(config.model)
        self.name = folder.name if own_folder(config.model) else config.model.rsplit("/", 1)[-1]
        self.encoder, source = load_model(config.model, config.device)
        self.model, self.processor = self.encoder[0].model.eval(), self.encoder[0].processor
        check_policies(
            {**config.policies, **config.candidates}, self.model.config.text_config, self.model.config.gates
        )
        self.tasks = sweep_tasks(config.tasks, config.corpus, config.gallery, config.seed)
        self._pool = {item_key(item): item for task in self.tasks for item in task.documents}
        for key, size in [("sizes", size) for size in config.sizes] + [("think_items", config.think_items)]:
            if config.sizes and size > len(self._pool):
                raise BenchmarkError(
                    f"{key} has {size}, but the tasks hold {len(self._pool)} distinct documents: take fewer"
                )
        self.fingerprint = model_fingerprint(self.encoder, source)
        self._preparation = Preparation(
            self.model, self.processor, self.name, weights_fingerprint(Path(folder)), config.calibration_data,
            config.seed, config.corpus, config.gallery,
        )  # fmt: skip

    def prepare(self, name: str, policy: Policy) -> Prepared:
        """A policy ready to run."""
        return self._preparation.prepare(name, policy)

    def choosing_tasks(self) -> list[SweepTask]:
        """The tasks on which a combination is chosen."""
        config = self.config
        return sweep_tasks(config.choose_on, config.corpus, config.gallery, config.seed)

    def features(self, size: int) -> dict[str, Tensor]:
        """The model's inputs for `size` distinct documents of the tasks, drawn by the seed."""
        pool, keys = self._pool, sorted(self._pool)
        drawn = np.random.default_rng(self.config.seed).permutation(len(keys))[:size]
        instruction = self.processor.embedding["prompts"].get("document") or ""
        features = self.processor([encoder_input(pool[keys[row]]) for row in drawn], instruction=instruction)
        device = next(self.model.parameters()).device
        return {name: value.to(device) for name, value in features.items()}

    def features_of(self, items: int) -> dict[str, Tensor]:
        """The same: sizes count items."""
        return self.features(items)


class RandomInputs:
    """
    A random model, and items of one image and some text each.

    Args:
        config ([`DialBenchConfig`]): the settings.

    Raises:
        PolicyError: a policy that does not fit the model.
        BenchmarkError: a policy that needs to know what the experts do.
    """

    tasks: Sequence[SweepTask] = ()
    processor = None

    def __init__(self, config: DialBenchConfig):
        self.config, self.name = config, config.model
        for name, policy in config.policies.items():
            if policy.experts is not None and policy.saliency != RANDOM:
                raise BenchmarkError(
                    f"policy '{name}': the experts of a random model are all alike; write saliency: random"
                )
        self.model = build_pair(config.random, config.dtype).ours
        check_policies(config.policies, self.model.config.text_config)
        about = (config.random, config.dtype, config.image, config.text_tokens, config.seed)
        self.fingerprint = hashlib.sha256(repr(about).encode()).hexdigest()

    def prepare(self, name: str, policy: Policy) -> Prepared:
        """A policy ready to run."""
        keep = None
        text = self.model.config.text_config
        if policy.experts is not None and policy.experts < text.num_experts:
            shape = ExpertStatistics.zeros(len(expert_blocks(self.model)), text.num_experts)
            keep = kept_experts(shape, RANDOM, policy.experts, seed=self.config.seed)
        if policy.skip_rate is None:
            return Prepared(name, policy, dict(policy.adaptive_compute), keep)
        with Prepared(name, policy, {}, keep).applied(self.model):
            budget, rate = threshold_on_batch(
                self.model, self.features(min(self.config.sizes)), policy.adaptive_compute, policy.skip_rate
            )
        return Prepared(name, policy, budget, keep, {"skip_rate": rate})

    def features(self, size: int) -> dict[str, Tensor]:
        """Inputs of as many items as hold `size` image tokens, at least one."""
        config = self.config
        height, width = config.image
        return self.features_of(max(1, round(size / (height * width / MERGE**2))))

    def features_of(self, items: int) -> dict[str, Tensor]:
        """Inputs of so many items."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed)
        drawn = [image_item(*config.image, config.text_tokens, generator) for _ in range(items)]
        return packed_batch(drawn, DTYPES[config.dtype])


@torch.inference_mode()
def threshold_on_batch(
    model: Any, features: Mapping[str, Tensor], base: Mapping[str, Any], skip_rate: float, tolerance: float = 0.005
) -> tuple[dict[str, Any], float]:
    """
    A budget with one MoDES threshold, even layer scales, and the wanted skip rate on a batch.

    Args:
        model (`MoEMBModel`): the model.
        features (`Mapping[str, Tensor]`): the batch.
        base (`Mapping`): other settings of the budget; the rate is that of the pairs they leave.
        skip_rate (`float`): the wanted rate.
        tolerance (`float`, *optional*, defaults to 0.005): how far off it may be.

    Returns:
        The budget and its rate.

    Raises:
        BenchmarkError: the rate cannot be met.
    """
    blocks = model.config.text_config.num_hidden_layers
    weights: list[Tensor] = []

    def see(block: int, arguments: Mapping[str, Any]) -> None:
        def collect(routing: Any) -> Any:
            weights.append(routing.weight[~routing.skipped].float().flatten())
            return routing

        arguments["dial"].policies.append(collect)

    def pairs(budget: Mapping[str, Any]) -> int:
        output = model(
            **features, adaptive_compute=dict(budget), pooled_only=True, output_compute=True, share_prefixes=False
        )
        return int(output.compute.expert_pairs.sum())

    def budget_of(tau: float) -> dict[str, Any]:
        return {**base, "modes": {"tau": tau}}

    with before_each_block(model, see):
        full = pairs(base)
    sorted_weights = torch.cat(weights).sort().values
    guess = float(sorted_weights[int(skip_rate * len(sorted_weights))]) / blocks
    tau, rate = threshold_for_rate(lambda tau: 1 - pairs(budget_of(tau)) / full, guess, skip_rate, tolerance)
    if abs(rate - skip_rate) > tolerance:
        raise BenchmarkError(f"no threshold skips {skip_rate} of the pairs; the nearest skips {rate:.4f}")
    return budget_of(tau), rate


def baseline() -> Prepared:
    """Full compute."""
    return Prepared(BASELINE, Policy(), {})
