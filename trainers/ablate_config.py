"""Settings of a study: variants of a training, each with several seeds, at equal training compute."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .errors import MoEMBError, nearest
from .evaluation_metrics import METRICS
from .recipe import expand_paths


EMB_ROWS = ("mean", "new", "end")


class AblationError(MoEMBError, ValueError):
    """A study that cannot run; the text names the variant or setting, its value and the remedy."""


@dataclass
class Variant:
    r"""
    One way to train.

    Args:
        pretrain (`dict`, *optional*): Keys of the pretraining recipe that differ.
        design (`dict`, *optional*):
            What the pretrained model is turned into before contrastive training: arguments of [`Design`]. As it is
            when `None`.
        emb (`str`, *optional*, defaults to `"mean"`):
            How the row of `<emb>` begins: `"mean"` of the table, unless it was trained already; `"new"`, the mean in
            any case; or `"end"`, the row of the token that ends a document: with `train_emb_token: false` the pooled
            token is then one of the language model.
        train (`dict`, *optional*): Keys of the training recipe that differ.
        steps (`int`, *optional*): Steps of the training; by default as many as cost the same as the first variant's.
        at (`float`, *optional*): Place on the axis of the figure.
    """

    pretrain: dict[str, Any] = field(default_factory=dict)
    design: dict[str, Any] | None = None
    emb: str = "mean"
    train: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    at: float | None = None


@dataclass
class AblateConfig:
    r"""
    Settings of a study.

    Args:
        title (`str`): Heading of the table.
        output (`Path`): Folder of the runs.
        report (`Path`, *optional*): Where the results are written, without the endings `.json`, `.md` and `.png`;
            `<output>/results` by default.
        pretrain_output (`Path`, *optional*): Folder of what comes before the trainings: pretraining and `common`.
            Studies that name the same one share what they have in common. `<output>/pretrain` by default.
        train (`Path`): Recipe of the contrastive training (`method: contrastive` or `mini-contrastive`), from the
            folder of this file.
        variants (`dict[str, dict]`): The variants by name, see [`Variant`]; the others are compared with the first.
        pretrain (`Path`, *optional*): Recipe of the pretraining, likewise. Variants that pretrain alike share the run.
        common (`Path`, *optional*): Recipe of a training after pretraining (`method: mini-contrastive`), likewise.
            Variants that pretrain alike share it, too, and part behind it: what is compared is how they go on.
        base (`str`, *optional*): Instead of pretraining, the repository to start from, or `moemb-mini`.
        pretrain_settings, common_settings, train_settings (`dict`, *optional*):
            Keys of the recipes that differ for all variants.
        seeds (`list[int]`, *optional*, defaults to `[0, 1, 2]`): Seeds, of pretraining and training alike.
        steps (`int`): Steps of the training of the first variant.
        equal (`str`, *optional*, defaults to `"compute"`):
            `"compute"`: as many steps as make the forward FLOPs of all items of a training equal; `"steps"`.
        tasks (`list[str]`): Held-out tasks, see `moemb evaluate --list-tasks`, or `validation`.
        presented (`dict[str, str]`, *optional*): To held-out tasks, the data set of `train` (`method: contrastive`)
            that their items are presented as: with its instructions, and as its task to routers that know tasks.
        metric (`str`, *optional*, defaults to `"R@10"`): Metric of the figure.
        gallery, corpus (`Path`, *optional*): Where items and corpus are; by default as in `moemb evaluate`.
        batch_size (`int`, *optional*, defaults to 64): Items in one forward pass of the evaluation.
        bootstrap_samples (`int`, *optional*, defaults to 2000): Resamples behind each interval.
        qps_items (`int`, *optional*, defaults to 0): Items per round of a measurement of speed; 0 measures none.
        qps_rounds (`int`, *optional*, defaults to 7): Rounds; variants take turns.
        axis (`str`, *optional*): Label of the figure's axis, when the variants have `at`.
    """

    title: str
    output: Path
    train: Path
    variants: dict[str, Variant]
    steps: int
    tasks: list[str]
    report: Path | None = None
    pretrain_output: Path | None = None
    pretrain: Path | None = None
    common: Path | None = None
    base: str | None = None
    pretrain_settings: dict[str, Any] = field(default_factory=dict)
    common_settings: dict[str, Any] = field(default_factory=dict)
    train_settings: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    equal: Literal["compute", "steps"] = "compute"
    presented: dict[str, str] = field(default_factory=dict)
    metric: str = "R@10"
    gallery: Path | None = None
    corpus: Path | None = None
    batch_size: int = 64
    bootstrap_samples: int = 2000
    qps_items: int = 0
    qps_rounds: int = 7
    axis: str | None = None

    def __post_init__(self):
        expand_paths(self)
        if (self.pretrain is None) == (self.base is None):
            raise ValueError("give either pretrain (a recipe) or base (a repository)")
        if self.common is not None and self.pretrain is None:
            raise ValueError(f"common {self.common} follows pretraining, but the study starts from base {self.base!r}")
        if self.pretrain_output is None:
            self.pretrain_output = self.output / "pretrain"
        if self.report is None:
            self.report = self.output / "results"
        if not self.variants:
            raise ValueError("variants is empty: name at least one")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds is {self.seeds}: name at least one, each once")
        if self.metric not in METRICS:
            raise ValueError(f"metric is {self.metric!r}, but must be one of {', '.join(METRICS)}")
        for name in ("steps", "batch_size", "bootstrap_samples", "qps_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one, see moemb evaluate --list-tasks")
        if unknown := sorted(set(self.presented) - set(self.tasks)):
            raise ValueError(
                f"presented names '{unknown[0]}', which is not among tasks{nearest(unknown[0], self.tasks)}"
            )
        for name, variant in self.variants.items():
            self._check(name, variant)
        if self.axis is not None and any(variant.at is None for variant in self.variants.values()):
            missing = next(name for name, variant in self.variants.items() if variant.at is None)
            raise ValueError(f"axis is {self.axis!r}, but variant '{missing}' has no place on it: give it 'at'")

    def _check(self, name: str, variant: Variant) -> None:
        from .upcycling import Design

        if "/" in name or name.startswith("."):
            raise ValueError(f"variant '{name}': the name becomes a folder; leave out '/' and a leading '.'")
        if variant.emb not in EMB_ROWS:
            raise ValueError(f"variant '{name}': emb is {variant.emb!r}, but must be one of {', '.join(EMB_ROWS)}")
        if variant.pretrain and self.pretrain is None:
            raise ValueError(f"variant '{name}' has pretrain settings, but the study starts from base {self.base!r}")
        if variant.steps is not None and variant.steps < 1:
            raise ValueError(f"variant '{name}': steps is {variant.steps}, but must be at least 1")
        if variant.design is not None:
            known = [f.name for f in fields(Design)]
            if unknown := sorted(set(variant.design) - set(known)):
                raise ValueError(f"variant '{name}': unknown design key '{unknown[0]}'{nearest(unknown[0], known)}")
            if variant.design.get("kind") not in ("upcycled", "modality"):
                raise ValueError(
                    f"variant '{name}': design kind is {variant.design.get('kind')!r}, not upcycled or modality"
                )
        for key in ("seed", "output_dir", "max_steps", "model", "init_from", "method"):
            if key in variant.train or key in self.train_settings:
                raise ValueError(f"variant '{name}': the study sets {key!r} of the training itself; leave it out")
            if key in self.common_settings and key != "max_steps":
                raise ValueError(f"common_settings: the study sets {key!r} itself; leave it out")
