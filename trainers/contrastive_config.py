"""Settings of contrastive training: data, batches, loss, and what of the model is trained."""

from dataclasses import dataclass, field
from typing import Any, Literal

from sentence_transformers import SentenceTransformerTrainingArguments

from .distributed import check_distributed


# Which groups of layers may have LoRA adapters by name; the routed experts have a rank of their own.
LORA_TARGETS = ("attention", "gated_delta", "shared_expert")


@dataclass
class ContrastiveConfig(SentenceTransformerTrainingArguments):
    r"""
    Arguments of [`ContrastiveTrainer`].

    Only what MoEMB adds to, or sets differently from,
    [`~sentence_transformers.SentenceTransformerTrainingArguments`] is listed. The defaults of the learning knobs are
    those of the paper.

    > Parameters that name what is trained, on what

    Args:
        model (`str`): `"moemb-mini"`, the folder of a MoEMB repository, or its Hub id.
        train_datasets (`dict[str, dict]`): Settings of each data set by name, see [`DatasetSettings`].
        eval_datasets (`dict[str, dict]`, *optional*):
            Data sets in which each query is to find its positive among all of them, likewise. Their mean nDCG@10 is
            the metric `eval_sequential_score`.
        max_length (`int`, *optional*): Most tokens of an item; by default the one recorded in the model.
        hard_negatives (`int`, *optional*, defaults to 1): Negatives used of each row, the first ones; 0 uses none.

    > Parameters that control the batch

    Args:
        batch_size (`int`, *optional*, defaults to 512):
            Rows of a batch over all processes. Each query is contrasted with the positives and negatives of all rows.
        sub_batch_size (`int`, *optional*, defaults to 64):
            Consecutive rows of a batch that come from one data set. At most `batch_size`, and a divisor of it.
        mini_batch_tokens (`int`, *optional*, defaults to 16384):
            Tokens that are embedded at once; more only if one item has more. It bounds the memory of a step, whatever
            the batch size: a batch with more tokens is embedded twice, see [`contrastive_step`].
        gather_across_devices (`bool`, *optional*, defaults to `True`):
            Whether the negatives are those of all processes, or of each process alone.

    > Parameters that control the loss

    Args:
        scale (`float`, *optional*, defaults to 50.0): Inverse temperature.
        symmetric (`bool`, *optional*, defaults to `False`): Whether positives are to find their queries, too.
        mask_duplicates (`bool`, *optional*, defaults to `True`):
            Whether documents that are right for a query, because they equal its positive or belong to an equal query
            or `key`, are left out of its negatives.
        matryoshka_dims (`list[int]`, *optional*): Lengths of the vector that are trained; by default all of it alone.
        matryoshka_weights (`list[float]`, *optional*): Weight of each length; equal by default.

    > Parameters that control what of the model is trained

    Args:
        tuning (`str`, *optional*, defaults to `"lora"`): `"lora"` or `"full"`.
        lora_rank (`int`, *optional*, defaults to 64): Rank of the adapters.
        lora_alpha (`int`, *optional*, defaults to 128): Their scale times the rank.
        lora_targets (`list[str]`, *optional*, defaults to all of `LORA_TARGETS`): Layers that have adapters.
        lora_expert_rank (`int`, *optional*, defaults to 0):
            Rank of an adapter in every routed expert (with the same scale); 0 leaves the experts as they are. At rank
            64 these are 3.7 billion parameters for the 35B model.
        train_emb_token (`bool`, *optional*, defaults to `True`): Whether LoRA also trains the row of `<emb>`.
        train_router (`bool`, *optional*, defaults to `False`): Whether the routers and the shared experts' gates are.
        train_vision (`bool`, *optional*, defaults to `False`): Whether the vision tower is; with `tuning: full` alone.
        weights_dtype (`str`, *optional*, defaults to `"bfloat16"`):
            dtype the model computes in; the optimizer keeps float32 masters of what is trained.

    > Parameters that control the run

    Args:
        distributed (`dict[str, int]`, *optional*):
            Spreads the weights over the processes while they load: `{fsdp_size: 8}` by FSDP2, `{fsdp_size: 8,
            ep_size: 8}` with the routed experts shared out among every 8 processes. `fsdp_size` is the number of
            processes. By default every process holds all weights (DDP). See [`check_distributed`] for its limits.
        continue_run (`bool`, *optional*, defaults to `True`):
            Go on from the newest whole checkpoint in `output_dir`, if there is one.
        max_minutes (`float`, *optional*, defaults to 0.0): Save and stop after this time; 0 means no limit.
        save_merged (`bool`, *optional*, defaults to `True`):
            Whether `final/`, a repository with the adapters merged into the weights, is written beside `adapter/`.
    """

    model: str = field(default="", metadata={"help": "moemb-mini, a repository's folder, or its Hub id."})
    train_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Data sets by name."})
    eval_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Retrieval sets by name."})
    max_length: int | None = field(default=None, metadata={"help": "Most tokens of an item."})
    hard_negatives: int = field(default=1, metadata={"help": "Negatives used of each row."})

    batch_size: int = field(default=512, metadata={"help": "Rows of a batch over all processes."})
    sub_batch_size: int = field(default=64, metadata={"help": "Consecutive rows from one data set."})
    mini_batch_tokens: int = field(default=16384, metadata={"help": "Tokens that are embedded at once."})
    gather_across_devices: bool = field(default=True, metadata={"help": "Negatives of all processes."})

    scale: float = field(default=50.0, metadata={"help": "Inverse temperature."})
    symmetric: bool = field(default=False, metadata={"help": "Positives find their queries, too."})
    mask_duplicates: bool = field(default=True, metadata={"help": "Right documents are no negatives."})
    matryoshka_dims: list[int] | None = field(default=None, metadata={"help": "Lengths that are trained."})
    matryoshka_weights: list[float] | None = field(default=None, metadata={"help": "Weight of each length."})

    tuning: Literal["lora", "full"] = field(default="lora", metadata={"help": "lora or full."})
    lora_rank: int = field(default=64, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=128, metadata={"help": "Scale of the adapters times their rank."})
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS), metadata={"help": "Adapted layers."})
    lora_expert_rank: int = field(default=0, metadata={"help": "Rank in every routed expert; 0: none."})
    train_emb_token: bool = field(default=True, metadata={"help": "LoRA also trains the row of <emb>."})
    train_router: bool = field(default=False, metadata={"help": "Train routers and shared experts' gates."})
    train_vision: bool = field(default=False, metadata={"help": "Train the vision tower (full tuning)."})
    weights_dtype: Literal["bfloat16", "float32"] = field(default="bfloat16", metadata={"help": "dtype of the model."})

    distributed: dict[str, Any] | None = field(default=None, metadata={"help": "Sizes: {fsdp_size: N, ep_size: M}."})
    continue_run: bool = field(default=True, metadata={"help": "Go on from the newest whole checkpoint."})
    max_minutes: float = field(default=0.0, metadata={"help": "Save and stop after this time."})
    save_merged: bool = field(default=True, metadata={"help": "Write a repository of merged weights."})

    # Different defaults: the paper's protocol, and what this trainer takes over from the base class.
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    warmup_steps: float = field(default=10, metadata={"help": "Steps of linear warm-up; below 1: share of the run."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule after warm-up."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "Passes over the rows."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    per_device_eval_batch_size: int = field(default=32, metadata={"help": "Items per forward in evaluation."})
    per_device_train_batch_size: int = field(default=0, metadata={"help": "Follows from batch_size."})
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "Must be false."})

    def __post_init__(self):
        given = self.per_device_train_batch_size
        if self.eval_datasets and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = "eval_sequential_score", True
        if self.gradient_checkpointing and self.gradient_checkpointing_kwargs is None:
            self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        super().__post_init__()
        self._check_batch(given)
        self._check_loss()
        self._check_tuning()
        check_distributed(self)
        if not self.model:
            raise ValueError("model is missing: 'moemb-mini', the folder of a MoEMB repository, or its Hub id")
        if not self.train_datasets:
            raise ValueError("train_datasets is empty: name at least one, such as {pairs: {path: json, ...}}")
        if not self.eval_datasets and self.eval_strategy != "no":
            raise ValueError(f"eval_strategy={self.eval_strategy.value!r} needs eval_datasets; name some, or use 'no'")

    def _check_batch(self, given: int) -> None:
        if self.n_gpu > 1:
            raise ValueError(
                f"{self.n_gpu} GPUs in one process: start one process per GPU with 'accelerate launch', or show one "
                "with CUDA_VISIBLE_DEVICES"
            )
        if self.batch_size < 2 or self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} counts the rows of all processes: make it a multiple of their number "
                f"({self.world_size}), at least 2"
            )
        self.per_device_train_batch_size = self.batch_size // self.world_size
        if given not in (0, self.per_device_train_batch_size):
            raise ValueError(
                f"per_device_train_batch_size={given} contradicts batch_size={self.batch_size} over {self.world_size} "
                "processes: leave it out"
            )
        self.sub_batch_size = min(self.sub_batch_size, self.batch_size)
        if self.sub_batch_size < 1 or self.batch_size % self.sub_batch_size:
            raise ValueError(f"sub_batch_size={self.sub_batch_size} must divide batch_size={self.batch_size}")
        if self.mini_batch_tokens < 1:
            raise ValueError(f"mini_batch_tokens={self.mini_batch_tokens}: use at least 1, better some thousands")
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: accumulation adds no negatives; set "
                "batch_size instead, its memory is bounded by mini_batch_tokens"
            )
        if self.fp16 or self.bf16:
            raise ValueError("fp16 / bf16 (autocast) are not used here: set weights_dtype instead")

    def _check_loss(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale={self.scale}: the inverse temperature is positive, such as 50")
        if self.hard_negatives < 0:
            raise ValueError(f"hard_negatives={self.hard_negatives}: use 0 or more")
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        if dims is not None and (not dims or min(dims) < 1 or len(set(dims)) != len(dims)):
            raise ValueError(f"matryoshka_dims={dims}: name different positive lengths")
        if weights is not None and (dims is None or len(weights) != len(dims) or min(weights) <= 0):
            raise ValueError(f"matryoshka_weights={weights}: one positive weight for each of matryoshka_dims={dims}")

    def _check_tuning(self) -> None:
        unknown = sorted(set(self.lora_targets) - set(LORA_TARGETS))
        if unknown:
            raise ValueError(f"lora_targets names {unknown}; known are {list(LORA_TARGETS)}")
        if self.tuning == "lora":
            if self.train_vision:
                raise ValueError("train_vision needs tuning: full; LoRA leaves the vision tower as it is")
            if self.lora_rank < 1 or self.lora_alpha <= 0 or self.lora_expert_rank < 0:
                raise ValueError(
                    f"lora_rank={self.lora_rank}, lora_alpha={self.lora_alpha}, lora_expert_rank="
                    f"{self.lora_expert_rank}: ranks are positive (0 experts: none), alpha too"
                )
            if not self.lora_targets and not self.lora_expert_rank:
                raise ValueError("lora_targets is empty and lora_expert_rank is 0: nothing would have an adapter")
