"""`method: grpo`: a recipe becomes a trainer, and a trained model a repository."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from modeling_moemb import MoEMBModel
from modeling_moemb.gates_moemb import attach_gates, twin_null_experts
from modeling_moemb.processing_moemb import MoEMBProcessor

from .adaptive_adapters import adapter_config, check_adapters
from .calibration_repository import locate_model
from .gate_repository import RECORD, write_with_gates
from .grpo_config import MoEMBGRPOConfig
from .grpo_data import as_dataset, corpus_sources, dataset_sources
from .grpo_setup import GRPOError
from .grpo_trainer import MoEMBGRPOTrainer
from .lora import TARGETS
from .packed_trainer import JsonLines, StopAfter
from .repository import assemble_repository


@dataclass
class GRPORunConfig(MoEMBGRPOConfig):
    r"""
    Settings of `method: grpo`: those of [`MoEMBGRPOConfig`], and what is trained on what.

    Args:
        init_from (`str`): MoEMB repository to start from: a folder, a Hub id, or `moemb-mini`.
        device_map (`str`, *optional*): How to spread the weights over devices, such as `"auto"`; see transformers.
        weights_dtype (`str`, *optional*, defaults to `"float32"`): dtype of the backbone; gates compute in float32.
        gates (`dict`): The gates to train, see `validate_gates`; those that the model lacks are added.
        saving_at_start (`float`, *optional*):
            Probability with which added gates save at the start. By default they save next to nothing, and it takes
            a while before there is something to learn from. Null experts always start as twins of the router's rows.
        null_bias (`float`, *optional*, defaults to -2.0): Added to their logits at the start.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of LoRA adapters that are trained beside the gates; 0 leaves the backbone frozen.
        lora_alpha (`int`, *optional*): By default twice the rank.
        lora_targets (`list[str]`, *optional*): `attention`, `gated_delta`, `shared_expert`.
        corpus (`str`, *optional*): Folder of moemb-mini's corpus.
        corpus_pairs (`dict[str, int]`, *optional*): Training pairs of each source of the corpus.
        train_datasets, eval_datasets (`dict[str, dict]`, *optional*):
            Data sets of query and positive in place of the corpus, as `method: contrastive` takes them.
        continue_run (`bool`, *optional*, defaults to `True`): Go on from the newest whole checkpoint in `output_dir`.
        max_minutes (`float`, *optional*, defaults to 0.0): Save and stop after this time; 0 means no limit.
    """

    init_from: str = field(default="", metadata={"help": "Repository to start from."})
    device_map: str | None = field(default=None, metadata={"help": "How to spread the weights, such as auto."})
    weights_dtype: str = field(default="float32", metadata={"help": "bfloat16 or float32."})
    gates: dict[str, Any] = field(default_factory=dict, metadata={"help": "Gates to train."})
    saving_at_start: float | None = field(default=None, metadata={"help": "Probability that added gates save."})
    null_bias: float = field(default=-2.0, metadata={"help": "Added to the null logits at the start."})
    lora_rank: int = field(default=0, metadata={"help": "Rank of adapters; 0: the backbone is frozen."})
    lora_alpha: int | None = field(default=None, metadata={"help": "By default twice the rank."})
    lora_targets: list[str] = field(default_factory=lambda: list(TARGETS), metadata={"help": "What gets adapters."})
    corpus: str | None = field(default=None, metadata={"help": "Folder of the corpus."})
    corpus_pairs: dict[str, int] = field(default_factory=dict, metadata={"help": "Pairs of each source."})
    train_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Data sets by name."})
    eval_datasets: dict[str, Any] = field(default_factory=dict, metadata={"help": "Data sets by name."})
    continue_run: bool = field(default=True, metadata={"help": "Go on from the newest whole checkpoint."})
    max_minutes: float = field(default=0.0, metadata={"help": "Save and stop after this time."})

    def __post_init__(self):
        check_adapters(self.lora_rank, self.lora_targets)
        self.freeze_backbone = self.freeze_backbone and not self.lora_rank
        self.shuffle_dataset = False  # the order of the data keeps the pairs of a source together
        super().__post_init__()
        if self.weights_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"weights_dtype={self.weights_dtype!r}: use 'bfloat16' or 'float32'")
        if bool(self.corpus_pairs) == bool(self.train_datasets):
            raise ValueError("name the pairs to train on: exactly one of corpus_pairs and train_datasets")
        if self.saving_at_start is not None and not 0 < self.saving_at_start < 1:
            raise ValueError(f"saving_at_start={self.saving_at_start}: use a probability between 0 and 1")


class GRPORun(MoEMBGRPOTrainer):
    """The trainer of a recipe; `source` is the folder that the backbone came from."""

    source: Path

    def export_final(self) -> Path:
        """Writes `final/`, a repository: with a frozen backbone its weight files are links to the source's."""
        target, args = Path(self.args.output_dir) / "final", self.args
        names = ("seed", "num_generations", "loss_type", "recall_k", "efficiency_scope", "target_reduction", "gates")
        record = {"method": "grpo", "step": self.state.global_step, **{name: getattr(args, name) for name in names}}
        if not self.is_world_process_zero():
            return target
        if args.freeze_backbone:
            return write_with_gates(self.source, target, self.moemb, record)
        model = self.accelerator.unwrap_model(self.model)
        model = model.merge_and_unload() if is_peft_model(model) else model
        card = Path(self.args.output_dir) / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        assemble_repository(target, model=model, processor=self.processing_class, card_text=text, overwrite=True)
        (target / RECORD).write_text(json.dumps(record, indent=2).replace(str(Path.home()), "~") + "\n")
        return target


def start_saving(model, kinds: list[str], probability: float) -> None:
    """Set the biases of gates so that each saves with this probability.

    Args:
        model (`MoEMBModel`): with gates.
        kinds (`list[str]`): those to set; null experts, which stand against the router's logits, are left alone.
        probability (`float`): between 0 and 1.
    """
    log_odds = float(torch.logit(torch.tensor(probability, dtype=torch.float64)))
    with torch.no_grad():
        for kind in kinds:
            gate = getattr(model.gates, kind)
            if kind == "keep":
                gate.head.bias.copy_(torch.tensor([-log_odds / 2, log_odds / 2]))
            elif kind != "null":
                gate.bias.fill_(log_odds)


def build_trainer(args: GRPORunConfig) -> GRPORun:
    """Loads the model and the data that the settings name.

    Raises:
        GRPOError: without `init_from` or gates.
        CalibrationError: there is no such model, or it is not MoEMB's.
    """
    if not args.init_from:
        raise GRPOError("GRPO needs init_from: moemb-mini, or the folder of a MoEMB repository")
    source = locate_model(args.init_from)
    given = {} if args.device_map is None else {"device_map": args.device_map}
    model = MoEMBModel.from_pretrained(source, dtype=getattr(torch, args.weights_dtype), **given)
    added = [kind for kind in args.gates if kind not in (model.config.gates or {})]
    attach_gates(model, args.gates)
    if "null" in added:  # as they are, no action of theirs would ever be drawn
        twin_null_experts(model, bias=args.null_bias, seed=args.seed)
    if args.saving_at_start is not None:
        start_saving(model, added, args.saving_at_start)
    pairs = args.generation_batch_size // args.num_generations
    if args.corpus_pairs:
        from .corpus import load_corpus

        sources = corpus_sources(load_corpus(args.corpus), args.corpus_pairs, args.seed)
        train = as_dataset(sources, [len(rows) for rows in sources], pairs, args.seed)
    else:
        train = as_dataset(*dataset_sources(args.train_datasets), pairs, args.seed)
    evaluation = None
    if args.eval_datasets:
        size = args.per_device_eval_batch_size * args.world_size // (args.num_generations_eval or args.num_generations)
        evaluation = as_dataset(*dataset_sources(args.eval_datasets), size, args.seed)
    trainer = GRPORun(
        model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=MoEMBProcessor.from_pretrained(source),
        peft_config=adapter_config(args.lora_rank, args.lora_alpha, args.lora_targets) if args.lora_rank else None,
        callbacks=[JsonLines(args.output_dir), StopAfter(args.max_minutes)],
    )
    trainer.source = source
    return trainer
