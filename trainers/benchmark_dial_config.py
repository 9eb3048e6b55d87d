"""Settings of `moemb bench --config`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .dial_policies import REMOVAL, Policy
from .recipe import check_least, expand_paths


# Random models of `benchmark_models`, for speed alone.
RANDOM_MODELS = {"width-true": "true", "width-text": "text", "width-tiny": "tiny"}


@dataclass
class DialBenchConfig:
    """
    What the compute dial is measured on.

    Args:
        model (`str`): `"moemb-mini"`, a folder of a MoEMB repository, a Hub id of one; or a random model that only
            speed can be measured on: `"width-true"` (the layer shapes of Qwen3.5-35B-A3B, 4 blocks), `"width-text"`,
            `"width-tiny"`.
        policies (`dict[str, Policy]`): by name, see `dial_policies`; full compute is always measured.
        candidates (`dict[str, Policy]`, *optional*): combinations of which one is chosen: the one that removes the
            most decoder FLOPs at a loss of at most `most_loss` points.
        choose_on (`list[str]`, *optional*, defaults to `["validation"]`): tasks on which it is chosen, see
            `prune_experts_sweep.sweep_tasks`; not the ones it is then reported on.
        most_loss (`float`, *optional*, defaults to 1.2): points of `metric`, mean over `choose_on`.
        tasks (`list[str]`, *optional*): held-out tasks on which quality is measured; none when empty.
        metric (`str`, *optional*, defaults to `"R@10"`): `R@1`, `R@10` or `MRR`.
        sizes (`list[int]`, *optional*): batches that are timed: image tokens of a random model's batch, else items,
            drawn from the documents of `tasks`. Nothing is timed when empty.
        think_tokens (`int`, *optional*, defaults to 0): tokens of think-then-embed; 0 leaves it out.
        think_items (`int`, *optional*, defaults to 8): items in its batch.
        calibration_data (`dict[str, int]`, *optional*): items for `skip_rate` and `experts`, see `calibration_data`;
            a random model is calibrated on its first batch.
        dtype (`str`, *optional*, defaults to `"bf16"`): of a random model, `bf16` or `fp32`.
        image (`list[int]`, *optional*, defaults to `[32, 32]`): patches of the image of a random model's item, high
            and wide; four make a token.
        text_tokens (`int`, *optional*, defaults to 41): text tokens of such an item, `<emb>` left out.
        batch_size (`int`, *optional*, defaults to 64): items in one forward pass where quality is measured.
        bootstrap_samples (`int`, *optional*, defaults to 2000): resamples behind each interval.
        seed (`int`, *optional*, defaults to 0): seed of all draws.
        output (`Path`, *optional*): folder of the report, which is named after the recipe; `--output` stands over it.
        corpus, gallery (`Path`, *optional*): where they are, when not in their usual places.
        device (`str`, *optional*): device; chosen by Sentence Transformers when left out.
    """

    model: str
    policies: dict[str, Policy]
    candidates: dict[str, Policy] = field(default_factory=dict)
    choose_on: list[str] = field(default_factory=lambda: ["validation"])
    most_loss: float = 1.2
    tasks: list[str] = field(default_factory=list)
    metric: Literal["R@1", "R@10", "MRR"] = "R@10"
    sizes: list[int] = field(default_factory=list)
    think_tokens: int = 0
    think_items: int = 8
    calibration_data: dict[str, int] = field(default_factory=dict)
    dtype: Literal["bf16", "fp32"] = "bf16"
    image: list[int] = field(default_factory=lambda: [32, 32])
    text_tokens: int = 41
    batch_size: int = 64
    bootstrap_samples: int = 2000
    seed: int = 0
    output: Path | None = None
    corpus: Path | None = None
    gallery: Path | None = None
    device: str | None = None

    def __post_init__(self):
        expand_paths(self)
        check_least(self, most_loss=0, think_tokens=0, think_items=1, text_tokens=1, batch_size=1, bootstrap_samples=1)
        check_least(self, seed=0)
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"sizes is {self.sizes}, but each must be at least 1")
        if len(self.image) != 2 or any(side < 2 or side % 2 for side in self.image):
            raise ValueError(f"image is {self.image}, but must be two even numbers of patches, each at least 2")
        if not self.policies:
            raise ValueError("policies is empty: name one, such as {top-2: {adaptive_compute: {top_k: 2}}}")
        for name in set(self.policies) & set(self.candidates):
            raise ValueError(f"'{name}' stands in policies and in candidates: give one of them another name")
        for name, policy in self.candidates.items():
            if policy.execution != REMOVAL:
                raise ValueError(f"candidate '{name}' has the execution '{policy.execution}', which is for comparison")
        self._check_model()

    def _check_model(self) -> None:
        random = self.model in RANDOM_MODELS
        if random and (self.tasks or self.candidates):
            raise ValueError(f"model is '{self.model}', whose weights are random: leave tasks and candidates out")
        if not random and self.sizes and not self.tasks:
            raise ValueError("sizes needs tasks: the items that are timed are their documents")
        if self.candidates and not self.tasks:
            raise ValueError("candidates needs tasks to report the chosen one on")
        if set(self.candidates) and set(self.choose_on) & set(self.tasks):
            both = sorted(set(self.choose_on) & set(self.tasks))
            raise ValueError(f"choose_on and tasks share {both}: what is chosen on a task cannot be reported on it")
        if not self.sizes and not self.tasks:
            raise ValueError("there is nothing to measure: set sizes, tasks or both")
        if self.think_tokens and not self.sizes:
            raise ValueError("think_tokens needs sizes: it is timed beside the policies")
        calibrated = [n for n, p in {**self.policies, **self.candidates}.items() if p.skip_rate or p.experts]
        if calibrated and not random and not self.calibration_data:
            raise ValueError(f"policy '{calibrated[0]}' needs calibration_data, such as {{corpus:emoji: 256}}")

    @property
    def random(self) -> str | None:
        """The shape of a random model, `None` for a real one."""
        return RANDOM_MODELS.get(self.model)

    def quick(self) -> "DialBenchConfig":
        """Tiny sizes, to see that all works; quality is not measured."""
        return replace(
            self,
            model="width-tiny" if self.random else self.model,
            sizes=[min(size, 32 if self.random else 6) for size in self.sizes[:1]],
            image=[4, 8],
            think_tokens=min(self.think_tokens, 3),
            think_items=min(self.think_items, 2),
            candidates={},
            bootstrap_samples=20,
        )

    def chosen(self, names: list[str]) -> "DialBenchConfig":
        """With these policies alone."""
        return replace(self, policies={name: self.policies[name] for name in names})

    def record(self) -> dict[str, Any]:
        """All settings as plain data."""
        values = dict(vars(self))
        for group in ("policies", "candidates"):
            values[group] = {name: vars(policy) for name, policy in values[group].items()}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
