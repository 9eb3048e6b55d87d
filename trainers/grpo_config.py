"""Settings of GRPO for gates: TRL's, without what only concerns text, and with what gates need."""

from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig


SCOPES = ("total", "decoder", "moe")
DISTILLATIONS = ("auto", "reward", "loss", "both", "none")
REPLAYS = ("auto", "stored", "forward")
ACTING = ("both", "query", "positive")

# settings of TRL that say how text is generated, or need a reference policy: refused when set
NOT_FOR_GATES = {
    "beta": "there is no reference policy; set distillation and distillation_weight",
    "sync_ref_model": "there is no reference policy",
    "use_vllm": "rollouts are forward passes of the model itself",
    "use_transformers_continuous_batching": "rollouts are forward passes of the model itself",
    "mask_truncated_completions": "actions are never truncated",
    "top_p": "an action is one of two choices",
    "top_k": "an action is one of two choices",
    "min_p": "an action is one of two choices",
    "repetition_penalty": "actions are not text",
    "generation_kwargs": "actions are not text",
    "chat_template_kwargs": "the processor has its own template",
    "cast_lm_head_to_fp32": "there is no language-model head",
    "use_liger_kernel": "use MoEMB's kernels, see `moemb kernels`",
}


@dataclass
class MoEMBGRPOConfig(GRPOConfig):
    r"""
    Arguments of [`MoEMBGRPOTrainer`].

    Only what MoEMB adds to, or sets differently from, [`~trl.GRPOConfig`] is listed. What concerns the generation of
    text, and the reference policy (`beta`), is refused.

    > Parameters that control what is trained

    Args:
        gate_learning_rate (`float`, *optional*):
            Learning rate of the gates. `learning_rate` when `None`; set it apart where adapters train, too.
        freeze_backbone (`bool`, *optional*, defaults to `True`):
            Train the gates alone. With `False` every other parameter that requires gradients is trained, too.
        adaptive_compute (`dict`, *optional*):
            The compute budget that the gates decide in, see `validate_adaptive_compute`; it may hold the gates' parts
            alone. By default every gate of the model acts, with its threshold at one half. The trained model keeps it.

    > Parameters that control rollouts

    Args:
        acting (`str`, *optional*, defaults to `"both"`):
            Whose gates act: `"both"`, `"query"` or `"positive"`. The others are embedded with full compute.
        exploration_sigma (`float`, *optional*, defaults to 0.5):
            Standard deviation of the logit offset that all gates of a kind in a group of blocks share within a
            rollout. Gates that are drawn independently save nearly the same in all rollouts of a group, and there is
            nothing to learn from. 0 switches it off.
        exploration_groups (`int`, *optional*, defaults to 4): Groups of blocks with an offset of their own.
        rollout_batch_size (`int`, *optional*, defaults to 256): Copies of items in one packed batch at most.
        replay (`str`, *optional*, defaults to `"auto"`):
            `"stored"` keeps what the gates saw, so that the policy gradient needs no second pass through a frozen
            backbone; `"forward"` runs the rollouts again, which needs less memory, and is what trained adapters need;
            `"auto"` is the first with a frozen backbone, else the second.

    > Parameters that control the reward

    Args:
        rewards (`list[str]`, *optional*, defaults to `["efficiency", "margin"]`):
            Reward functions by name, or as `module:function`; `reward_weights` holds a weight for each. Functions
            passed to the trainer stand instead.
        recall_k (`int`, *optional*):
            Retrieval succeeds if the partner is among so many best candidates of the generation batch;
            `num_generations` when `None`, as in the paper.
        target_reduction (`float`, *optional*):
            FLOPs to remove, as a share; more is not rewarded. When `None` there is no limit.
        efficiency_scope (`str`, *optional*, defaults to `"total"`): FLOPs that count: `"total"`, `"decoder"`, `"moe"`.
        distillation (`str`, *optional*, defaults to `"auto"`):
            How the distance to the vector of full compute enters, in place of the KL term: as a `"reward"`, as a
            `"loss"`, `"both"` or `"none"`; `"auto"` is the first with a frozen backbone, else the second.
        distillation_weight (`float`, *optional*, defaults to 1.0): Its weight.
        zero_variance (`float`, *optional*, defaults to 1e-6):
            A group whose rewards have no larger standard deviation contributes nothing, neither to the policy term
            nor to the entropy bonus or the distillation loss.
        flat_patience (`int`, *optional*, defaults to 50):
            Stop with a message after so many generation batches in a row in which no group had variance; 0 never does.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`]: `loss_type` (`"dr_grpo"`),
    > `max_completion_length` (`None`: the constant that `"dr_grpo"` divides by is the most gates that a rollout of the
    > first generation batch reached), `entropy_coef` (1e-3), `learning_rate` (2e-4), `router_aux_loss_coef` (0.0),
    > `bf16` and `gradient_checkpointing` (`False`).
    """

    gate_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the gates."})
    freeze_backbone: bool = field(default=True, metadata={"help": "Train the gates alone."})
    adaptive_compute: dict[str, Any] | None = field(default=None, metadata={"help": "Budget the gates decide in."})

    acting: str = field(default="both", metadata={"help": "Whose gates act: both, query or positive."})
    exploration_sigma: float = field(default=0.5, metadata={"help": "Standard deviation of the shared offset."})
    exploration_groups: int = field(default=4, metadata={"help": "Groups of blocks with an offset of their own."})
    rollout_batch_size: int = field(default=256, metadata={"help": "Copies of items in one packed batch."})
    replay: str = field(default="auto", metadata={"help": "auto, stored or forward."})

    rewards: list[str] = field(
        default_factory=lambda: ["efficiency", "margin"], metadata={"help": "Reward functions, by name."}
    )
    recall_k: int | None = field(default=None, metadata={"help": "Retrieval succeeds among so many best."})
    target_reduction: float | None = field(default=None, metadata={"help": "FLOPs to remove, as a share."})
    efficiency_scope: str = field(default="total", metadata={"help": "FLOPs that count: total, decoder, moe."})
    distillation: str = field(default="auto", metadata={"help": "auto, reward, loss, both or none."})
    distillation_weight: float = field(default=1.0, metadata={"help": "Weight of distillation."})
    zero_variance: float = field(default=1e-6, metadata={"help": "Groups with less spread contribute nothing."})
    flat_patience: int = field(default=50, metadata={"help": "Batches without variance before the run is stopped."})

    loss_type: str = field(default="dr_grpo", metadata={"help": "Loss formulation, see TRL."})
    max_completion_length: int | None = field(default=None, metadata={"help": "Constant that dr_grpo divides by."})
    entropy_coef: float = field(default=1e-3, metadata={"help": "Weight of the entropy bonus."})
    learning_rate: float = field(default=2e-4, metadata={"help": "Learning rate."})
    router_aux_loss_coef: float | None = field(default=0.0, metadata={"help": "Must be 0."})
    bf16: bool | None = field(default=False, metadata={"help": "bfloat16 autocast."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute activations."})

    def __post_init__(self):
        super().__post_init__()
        self._refuse_text_settings()
        if self.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} must be 0: balancing the router would be a second "
                "objective, and the reward does not know of it"
            )
        for name, allowed in (
            ("acting", ACTING),
            ("replay", REPLAYS),
            ("efficiency_scope", SCOPES),
            ("distillation", DISTILLATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: use one of {list(allowed)}")
        for name, low in (("exploration_groups", 1), ("rollout_batch_size", 1), ("recall_k", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value}: the least is {low}")
        for name in ("exploration_sigma", "distillation_weight", "zero_variance", "flat_patience"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: use a number of at least 0")
        if self.target_reduction is not None and not 0 < self.target_reduction < 1:
            raise ValueError(f"target_reduction={self.target_reduction}: use a share between 0 and 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: use a number above 0")
        self._check_recall()

    def _refuse_text_settings(self) -> None:
        defaults = {each.name: each.default for each in fields(GRPOConfig)}
        for name, reason in NOT_FOR_GATES.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning for gates: {reason}")

    def _check_recall(self) -> None:
        pairs = self.generation_batch_size // self.num_generations
        if "efficiency" in self.rewards and self.num_recalled >= pairs:
            raise ValueError(
                f"recall@{self.num_recalled} among the {pairs} pairs of a generation batch always succeeds, so "
                "nothing would hold back saving: lower recall_k, or raise per_device_train_batch_size or "
                f"steps_per_generation (pairs = generation_batch_size {self.generation_batch_size} / num_generations "
                f"{self.num_generations})"
            )

    @property
    def num_recalled(self) -> int:
        """`recall_k`, or what stands for it."""
        return self.recall_k or self.num_generations
