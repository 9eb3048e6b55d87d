"""Settings of `method: adaptive`: training gates by gradients."""

from dataclasses import dataclass, field
from typing import Any

from .adaptive_adapters import check_adapters
from .adaptive_strategies import ORDER, STRATEGIES
from .lora import TARGETS
from .packed_config import PackedTrainingConfig


KEEP_ESTIMATORS = ("gumbel", "straight_through")
GRADUAL_ESTIMATORS = ("straight_through", "halting")
NULL_ESTIMATORS = ("straight_through", "balance")
SCOPES = ("total", "decoder")
TEACHERS = ("start", "current")


@dataclass
class AdaptiveConfig(PackedTrainingConfig):
    r"""
    Arguments of [`AdaptiveTrainer`].

    > Parameters that say what is trained

    Args:
        init_from (`str`): MoEMB repository to start from: a folder, or `moemb-mini`.
        device_map (`str`, *optional*): How to spread the weights over devices, such as `"auto"`; see transformers.
        gates (`dict`): The gates to train, see `validate_gates`; those that the model lacks are added.
        backbone_learning_rate (`float`, *optional*, defaults to 0.0):
            Learning rate of the decoder (without its routers), which is then trained whole; 0 leaves it frozen.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of LoRA adapters that are trained beside the gates; 0: there are none.
        lora_alpha (`int`, *optional*): By default twice the rank.
        lora_targets (`list[str]`, *optional*): What gets adapters, of `attention`, `gated_delta`, `shared_expert`.
        lora_learning_rate (`float`, *optional*, defaults to 1e-5): Peak learning rate of the adapters.
        teacher (`str`, *optional*):
            Whose vectors of full compute are distilled from: those of the weights the run started from (`"start"`, the
            default where adapters train: it is the model without them), or those of the weights as they are
            (`"current"`, the default else, and the only one where the decoder is trained whole).
        strategy (`str`, *optional*, defaults to `"joint"`): How several gates are combined: `"global"` (one budget of
            FLOPs), `"joint"`, `"alternating"` or `"sequential"` (a budget each), see `adaptive_strategies`.
        alternate_every (`int`, *optional*, defaults to 50): Steps before `alternating` turns to the next gate.

    > Parameters that control the budgets

    Args:
        targets (`dict[str, float]`, *optional*):
            Share that each gate shall keep of what it may save: of visual tokens (`keep`), of visual tokens and blocks
            (`gradual`), of tokens and blocks (`skip`), of the expert slots of tokens that are not skipped (`null`).
        flops_removed (`float`, *optional*):
            Share of the FLOPs that shall be removed in the end. The budget of `global`; with every strategy the
            trained gates are shifted to it when training is over (`match_flops`), so that runs can be compared.
        flops_scope (`str`, *optional*, defaults to `"total"`): `"total"` or `"decoder"`.
        match_flops (`bool`, *optional*, defaults to `True`): Whether to shift the gates to `flops_removed` at the end.
        keep_deployment (`str`, *optional*, defaults to `"threshold"`):
            How a one-shot gate decides afterwards: `"fraction"` keeps the target's share of each item, `"threshold"`
            what it finds more likely to be kept than not.

    > Parameters that control how decisions become differentiable

    Args:
        keep_estimator (`str`, *optional*, defaults to `"gumbel"`): `"gumbel"` (noise, then straight-through) or
            `"straight_through"`.
        compact (`bool`, *optional*, defaults to `False`): Remove what the one-shot gate drops during training, too:
            cheaper, but a dropped token gets no gradient from the vectors.
        gradual_estimator (`str`, *optional*, defaults to `"straight_through"`): or `"halting"` (A-ViT). Both are known
            to be unstable; see `method: grpo`.
        halting_epsilon (`float`, *optional*, defaults to 0.01): Of halting.
        null_estimator (`str`, *optional*, defaults to `"straight_through"`): or `"balance"`: AdaMoE's load balance is
            then what moves the null experts.
        null_bias (`float`, *optional*, defaults to 0.0): Added to the null experts' logits at the start.
        null_noise (`float`, *optional*, defaults to 1e-3): Of the copies of the router's rows that they start as.
        temperature_start, temperature_end (`float`, *optional*, default to 1.0, 0.1): Of all relaxations.
        straight_through_share (`float`, *optional*, defaults to 0.2):
            Part of the run, at its end, in which skipping is decided hard in the forward.

    > Parameters that control the losses

    Args:
        contrast_weight (`float`, *optional*, defaults to 1.0): Of InfoNCE between the vectors of reduced compute.
        scale (`float`, *optional*, defaults to 20.0): Its inverse temperature.
        distill_weight (`float`, *optional*, defaults to 1.0): Of 1 - cosine to the vectors of full compute.
        budget_weight (`float`, *optional*, defaults to 10.0): Of each squared budget.
        binarity_weight (`float`, *optional*, defaults to 0.1):
            Of `p (1 - p)` of the skip gates; rises over the second half of the schedule.
        ponder_weight, depth_prior_weight (`float`, *optional*, default to 5e-4, 1e-3): Of A-ViT's losses.
        depth_prior (`float`, *optional*): Centre of its prior in blocks; two thirds of them by default.
        null_balance_weight (`float`, *optional*, defaults to 1e-3): Of AdaMoE's load balance.

    > Parameters that control when a run is stopped because a gate has collapsed, see [`CollapseLimits`]

    Args:
        collapse_window, collapse_after (`int`, *optional*, default to 20): Steps.
        collapse_cosine (`float`, *optional*, defaults to 0.2): Least mean cosine to full compute.
        collapse_gap (`float`, *optional*, defaults to 0.25): Most difference between trained and deployed shares.

    > Parameters that name the data

    Args:
        corpus_sources (`dict[str, dict]`, *optional*):
            Sources of moemb-mini's corpus, each with `rate` (sub-batches per step) and `chunk` (things in one).
        train_datasets, eval_datasets (`dict[str, dict]`, *optional*):
            Data sets of query and positive in place of the corpus, as `method: contrastive` takes them.
        batch_pairs (`int`, *optional*, defaults to 16): Pairs of a step from `train_datasets`.
        gap_items (`int`, *optional*, defaults to 64):
            Items that the deployed gates are compared with the trained form on, at every line of the log.
    """

    device_map: str | None = field(default=None, metadata={"help": "How to spread the weights, such as auto."})
    gates: dict[str, Any] = field(default_factory=dict, metadata={"help": "Gates to train."})
    backbone_learning_rate: float = field(default=0.0, metadata={"help": "Of the decoder; 0: frozen."})
    lora_rank: int = field(default=0, metadata={"help": "Rank of adapters; 0: there are none."})
    lora_alpha: int | None = field(default=None, metadata={"help": "By default twice the rank."})
    lora_targets: list[str] = field(default_factory=lambda: list(TARGETS), metadata={"help": "What gets adapters."})
    lora_learning_rate: float = field(default=1e-5, metadata={"help": "Of the adapters."})
    teacher: str | None = field(default=None, metadata={"help": "start or current."})
    strategy: str = field(default="joint", metadata={"help": "global, joint, alternating or sequential."})
    alternate_every: int = field(default=50, metadata={"help": "Steps before the next gate's turn."})

    targets: dict[str, float] = field(default_factory=dict, metadata={"help": "Kept share of each gate."})
    flops_removed: float | None = field(default=None, metadata={"help": "Share of the FLOPs to remove."})
    flops_scope: str = field(default="total", metadata={"help": "total or decoder."})
    match_flops: bool = field(default=True, metadata={"help": "Shift the gates to flops_removed at the end."})
    keep_deployment: str = field(default="threshold", metadata={"help": "threshold or fraction."})

    keep_estimator: str = field(default="gumbel", metadata={"help": "gumbel or straight_through."})
    compact: bool = field(default=False, metadata={"help": "Remove dropped tokens during training, too."})
    gradual_estimator: str = field(default="straight_through", metadata={"help": "straight_through or halting."})
    halting_epsilon: float = field(default=0.01, metadata={"help": "Of halting."})
    null_estimator: str = field(default="straight_through", metadata={"help": "straight_through or balance."})
    null_bias: float = field(default=0.0, metadata={"help": "Added to the null logits at the start."})
    null_noise: float = field(default=1e-3, metadata={"help": "Noise of the null experts at the start."})
    temperature_start: float = field(default=1.0, metadata={"help": "Of all relaxations."})
    temperature_end: float = field(default=0.1, metadata={"help": "Of all relaxations."})
    straight_through_share: float = field(default=0.2, metadata={"help": "Part of the run with hard skipping."})

    contrast_weight: float = field(default=1.0, metadata={"help": "Of InfoNCE."})
    scale: float = field(default=20.0, metadata={"help": "Inverse temperature of InfoNCE."})
    distill_weight: float = field(default=1.0, metadata={"help": "Of the distance to full compute."})
    budget_weight: float = field(default=10.0, metadata={"help": "Of each squared budget."})
    binarity_weight: float = field(default=0.1, metadata={"help": "Of p (1 - p) of skip gates."})
    ponder_weight: float = field(default=5e-4, metadata={"help": "Of A-ViT's ponder cost."})
    depth_prior_weight: float = field(default=1e-3, metadata={"help": "Of A-ViT's prior over depth."})
    depth_prior: float | None = field(default=None, metadata={"help": "Centre of that prior, in blocks."})
    null_balance_weight: float = field(default=1e-3, metadata={"help": "Of AdaMoE's load balance."})

    collapse_window: int = field(default=20, metadata={"help": "Steps that are judged together."})
    collapse_after: int = field(default=20, metadata={"help": "Steps before anything is judged."})
    collapse_cosine: float = field(default=0.2, metadata={"help": "Least mean cosine to full compute."})
    collapse_gap: float = field(default=0.25, metadata={"help": "Most difference of trained and deployed shares."})

    corpus_sources: dict[str, Any] = field(default_factory=dict, metadata={"help": "Sources of the corpus."})
    train_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Data sets by name."})
    eval_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Retrieval sets by name."})
    batch_pairs: int = field(default=16, metadata={"help": "Pairs of a step from train_datasets."})
    gap_items: int = field(default=64, metadata={"help": "Items to compare the deployed gates on."})

    # Different defaults: gates are small and are not decayed.
    learning_rate: float = field(default=2e-4, metadata={"help": "Peak learning rate of the gates."})
    weight_decay: float = field(default=0.0, metadata={"help": "A frozen gate must not be moved by it."})
    router_balance_weight: float = field(default=0.0, metadata={"help": "Must be 0: routers are not trained."})
    router_z_weight: float = field(default=0.0, metadata={"help": "Must be 0: routers are not trained."})

    def __post_init__(self):
        if self.gradient_checkpointing and self.gradient_checkpointing_kwargs is None:
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}  # what comes in has no gradient
        super().__post_init__()
        # YAML reads a bare null as nothing
        self.gates, self.targets = (
            {"null" if kind is None else kind: value for kind, value in given.items()}
            for given in (self.gates, self.targets)
        )
        if not self.gates or set(self.gates) - set(ORDER):
            raise ValueError(f"gates={self.gates!r}: name the gates to train, among {list(ORDER)}")
        for name, allowed in (
            ("strategy", STRATEGIES),
            ("keep_estimator", KEEP_ESTIMATORS),
            ("gradual_estimator", GRADUAL_ESTIMATORS),
            ("null_estimator", NULL_ESTIMATORS),
            ("flops_scope", SCOPES),
            ("keep_deployment", ("threshold", "fraction")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {list(allowed)}")
        self._check_backbone()
        if self.weight_decay or self.router_balance_weight or self.router_z_weight:
            raise ValueError(
                "weight_decay, router_balance_weight and router_z_weight must be 0: they move frozen gates"
            )
        if bool(self.corpus_sources) == bool(self.train_datasets):
            raise ValueError("name the data: either corpus_sources or train_datasets")
        self._check_budgets()

    def _check_backbone(self) -> None:
        check_adapters(self.lora_rank, self.lora_targets)
        if self.lora_rank and self.backbone_learning_rate:
            raise ValueError(
                f"lora_rank={self.lora_rank} trains adapters and backbone_learning_rate={self.backbone_learning_rate} "
                "the decoder itself: set one of them to 0"
            )
        if self.teacher is None:
            self.teacher = "start" if self.lora_rank else "current"
        if self.teacher not in TEACHERS:
            raise ValueError(f"teacher={self.teacher!r}: use one of {list(TEACHERS)}")
        if self.teacher == "start" and self.backbone_learning_rate:
            raise ValueError(
                "teacher 'start' needs the weights of the start, which backbone_learning_rate changes: train adapters "
                "(lora_rank), or use teacher 'current'"
            )

    def _check_budgets(self) -> None:
        for kind, share in self.targets.items():
            if kind not in self.gates or not 0 < share < 1:
                raise ValueError(f"targets={self.targets!r}: give trained gates {list(self.gates)} a share in (0, 1)")
        if self.flops_removed is not None and not 0 < self.flops_removed < 1:
            raise ValueError(f"flops_removed={self.flops_removed}: use a share in (0, 1)")
        if self.strategy == "global":
            if self.flops_removed is None or self.targets:
                raise ValueError("strategy 'global' has one budget: set flops_removed, and no targets")
        else:
            free = {"null"} if self.null_estimator == "balance" else set()
            if self.gradual_estimator == "halting":
                free.add("gradual")
            missing = [kind for kind in self.gates if kind not in self.targets and kind not in free]
            if missing:
                raise ValueError(f"targets lacks {missing}: strategy {self.strategy!r} needs one for each gate")
        if self.keep_deployment == "fraction" and "keep" in self.gates:
            if "keep" not in self.targets:
                raise ValueError("keep_deployment 'fraction' needs targets['keep']")
            if self.flops_removed is not None and self.match_flops:
                raise ValueError(
                    "match_flops shifts thresholds: use keep_deployment 'threshold', or match_flops false"
                )
        if self.alternate_every < 1 or self.collapse_window < 1 or self.batch_pairs < 2:
            raise ValueError("alternate_every and collapse_window must be at least 1, batch_pairs at least 2")
