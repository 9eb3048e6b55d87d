"""Settings that the pretraining and the contrastive trainer share."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class PackedTrainingConfig(TrainingArguments):
    r"""
    Arguments of [`PackedTrainer`].

    Only what MoEMB's trainers add to, or set differently from, [`~transformers.TrainingArguments`] is listed.

    Args:
        corpus (`str`, *optional*): Folder of the corpus (`moemb data`). Defaults to the default corpus folder.
        init_from (`str`, *optional*):
            Checkpoint folder to take weights and tokenizer from; optimizer and step counter start anew.
        continue_run (`bool`, *optional*, defaults to `True`):
            Go on from the newest whole checkpoint in `output_dir`, if there is one. A run that was killed and one
            whose `max_steps` was raised are continued alike.
        weights_dtype (`str`, *optional*, defaults to `"bfloat16"`):
            dtype the model computes in; the optimizer always keeps float32 masters.
        ema_decay (`float`, *optional*, defaults to 0.0):
            Decay of the moving average of the weights. When set, evaluation and the exported weights use the average.
        decay_steps (`int`, *optional*, defaults to -1):
            The learning rate stays at its peak and falls as a cosine over the last `decay_steps` steps; -1 falls over
            the whole run after warm-up (plain cosine).
        min_lr_ratio (`float`, *optional*, defaults to 0.03): Learning rate at the end, relative to the peak.
        max_minutes (`float`, *optional*, defaults to 0.0): Save and stop after this time; 0 means no limit.
        router_balance_weight (`float`, *optional*, defaults to 1e-3): Weight of the load-balancing loss.
        router_z_weight (`float`, *optional*, defaults to 1e-3): Weight of the router z-loss.
    """

    corpus: str | None = field(default=None, metadata={"help": "Folder of the corpus."})
    init_from: str | None = field(default=None, metadata={"help": "Checkpoint folder to start from."})
    continue_run: bool = field(default=True, metadata={"help": "Go on from the newest whole checkpoint."})
    weights_dtype: str = field(default="bfloat16", metadata={"help": "bfloat16 or float32."})
    ema_decay: float = field(default=0.0, metadata={"help": "Decay of the moving average of the weights."})
    decay_steps: int = field(default=-1, metadata={"help": "Steps of the final cosine decay; -1: the whole run."})
    min_lr_ratio: float = field(default=0.03, metadata={"help": "Final learning rate relative to the peak."})
    max_minutes: float = field(default=0.0, metadata={"help": "Save and stop after this time."})
    router_balance_weight: float = field(default=1e-3, metadata={"help": "Weight of the load-balancing loss."})
    router_z_weight: float = field(default=1e-3, metadata={"help": "Weight of the router z-loss."})

    # Different defaults: every step is one batch that the mixture builds, and columns have no meaning.
    max_steps: int = field(default=1000, metadata={"help": "Steps of the whole run."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    adam_beta2: float = field(default=0.98, metadata={"help": "AdamW's second beta."})
    weight_decay: float = field(default=0.05, metadata={"help": "AdamW's weight decay (matrices only)."})
    warmup_steps: float = field(default=50, metadata={"help": "Steps of linear warm-up."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept."})
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "Must be false."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Must be 1: a step is one built batch."})

    def __post_init__(self):
        super().__post_init__()
        if self.weights_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"weights_dtype={self.weights_dtype!r}: use 'bfloat16' or 'float32'")
        if self.max_steps < 0:
            raise ValueError(
                f"max_steps={self.max_steps}: the length of a run is counted in steps; 0 only writes the weights it "
                "would start from"
            )
        if not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"ema_decay={self.ema_decay}: use a value in [0, 1)")
        if self.fp16 or self.bf16:
            raise ValueError("fp16 / bf16 (autocast) are not used here: set weights_dtype instead")
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: contrastive losses get no negatives "
                "from accumulation; change the sub-batch sizes instead"
            )
        if self.per_device_train_batch_size != 1:
            raise ValueError(
                f"per_device_train_batch_size={self.per_device_train_batch_size} must be 1: a step is one batch, "
                "built whole; change the documents or sub-batches of a step instead"
            )
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns must be false: a batch has no dataset columns")
