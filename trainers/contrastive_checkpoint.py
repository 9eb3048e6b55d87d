"""Folders that contrastive training writes: checkpoints to go on from, the adapter, the final repository."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from .checkpoint import RECORD
from .errors import MoEMBError
from .files import put_in_place, write_atomically
from .lora import load_adapter_weights, merged_model, portable_name, save_adapter
from .model_card import card_text, license_of
from .packed_trainer import COMPLETE_MARKER
from .repository import assemble_repository, write_repository_files
from .saliency import weights_fingerprint


OBJECTIVES = "objectives.pt"
# Settings that stand in the record of a run.
RECORDED = (
    "tuning", "lora_rank", "lora_alpha", "lora_targets", "lora_expert_rank", "train_router", "train_vision", "scale",
    "batch_size", "sub_batch_size", "symmetric", "matryoshka_dims", "hard_negatives", "learning_rate", "warmup_steps",
    "num_train_epochs", "weights_dtype", "seed",
)  # fmt: skip
ADAPTER_FOLDER, FINAL_FOLDER = "adapter", "final"


class CheckpointWriteError(MoEMBError, OSError):
    """A checkpoint that could not be written; the text names the step, the folder and the remedy."""


class AdapterError(MoEMBError, ValueError):
    """An adapter that does not fit its base; the text names both."""


def write_checkpoint_folder(trainer: Any, write: Callable[[], None]) -> None:
    """
    Writes a checkpoint whole or not at all; only then older ones are removed.

    Args:
        trainer (`ContrastiveTrainer`): The trainer.
        write (`Callable`): Writes `checkpoint-<step>/` into its `output_dir`.

    Raises:
        CheckpointWriteError: the disk is full or refuses; what was written of the folder is removed.
    """
    args, step = trainer.args, trainer.state.global_step
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        write()
        if args.should_save:
            states = [objective.state_dict() for objective in trainer.objectives]
            if states:
                torch.save(states, folder / OBJECTIVES)
            write_atomically(folder / COMPLETE_MARKER, json.dumps({"step": step}) + "\n")
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(args.output_dir).free / 2**20
        raise CheckpointWriteError(
            f"step {step}: the checkpoint {folder} cannot be written ({' '.join(str(error).split())}); {free:.0f} MiB "
            "are free there. Earlier checkpoints are whole: make room, and run the same command again"
        ) from error
    finally:
        args.save_total_limit = limit
    if args.should_save:
        rotate_checkpoints(
            output_dir=args.output_dir,
            save_total_limit=limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


def write_model(trainer: Any, folder: Path) -> None:
    """
    Writes the trained part of the model: the adapter with LoRA, a complete repository else.

    Args:
        trainer (`ContrastiveTrainer`): The trainer. All processes call this when its weights are spread over them;
            the main process writes.
        folder (`Path`): Where to.
    """
    backbone, writes = trainer.backbone, trainer.args.should_save
    folder.mkdir(parents=True, exist_ok=True)
    if trainer.args.tuning == "lora":
        if writes:
            save_adapter(backbone, folder, trainer.args.model)
        return
    backbone.save_pretrained(folder, is_main_process=writes)
    if writes:
        write_repository_files(folder, config=backbone.config, processor=trainer.processor)


def load_trained(trainer: Any, folder: Path) -> None:
    """Puts what [`write_model`] wrote back into the model, and the objectives' state if there is one."""
    if trainer.args.tuning == "lora":
        load_adapter_weights(trainer.backbone, folder)
    else:
        weights = {
            name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()
        }
        trainer.backbone.load_state_dict(weights)
    if (folder / OBJECTIVES).is_file():
        states = torch.load(folder / OBJECTIVES, weights_only=True, map_location="cpu")
        for objective, state in zip(trainer.objectives, states, strict=True):
            objective.load_state_dict(state)


def export_run(trainer: Any) -> Path:
    """
    Writes what a run is for: with LoRA `adapter/`, and `final/`, a repository of the (merged) weights.

    Args:
        trainer (`ContrastiveTrainer`): The trainer; its model is written as it is.

    Returns:
        `Path`: `final/`, or `adapter/` when no merged weights are wanted.
    """
    args, output = trainer.args, Path(trainer.args.output_dir)
    record = run_record(trainer)
    if args.tuning == "lora":
        adapter = output / ADAPTER_FOLDER
        if trainer.is_world_process_zero():
            _write_adapter(trainer, adapter, record)
        if not args.save_merged:
            return adapter
    final, weights = output / FINAL_FOLDER, {"model": trainer.backbone}
    if trainer.spreads_weights and args.tuning == "full":
        draft = output / f".{FINAL_FOLDER}.weights"
        trainer.backbone.save_pretrained(draft, is_main_process=trainer.is_world_process_zero())
        weights = {"weights_dir": draft}
    if trainer.is_world_process_zero():
        if args.tuning == "lora":
            merged = merged_model(trainer.base, output / ADAPTER_FOLDER, record["task_conditioning"])
            weights = {"model": merged}
        card = _card(trainer.backbone.config, record)
        assemble_repository(final, **weights, processor=trainer.processor, card_text=card, overwrite=True)
        write_atomically(final / RECORD, json.dumps(record, indent=2) + "\n")
        if "weights_dir" in weights:
            shutil.rmtree(weights["weights_dir"])
    return final


def _write_adapter(trainer: Any, folder: Path, record: dict[str, Any]) -> None:
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    save_adapter(trainer.backbone, draft, trainer.args.model)
    (draft / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    put_in_place(draft, folder)


def run_record(trainer: Any) -> dict[str, Any]:
    """What made the weights: base, data, settings that differ from the defaults, step, evaluation. Holds no folder."""
    args = trainer.args
    evaluations = [entry for entry in trainer.state.log_history if "eval_sequential_score" in entry]
    best = max(evaluations, key=lambda entry: entry["eval_sequential_score"], default=None)
    return {
        "method": "contrastive",
        "base_model": portable_name(args.model),
        "base_weights": weights_fingerprint(trainer.base),
        "step": trainer.state.global_step,
        "datasets": {dataset.name: len(dataset) for dataset in trainer.datasets},
        "settings": {name: getattr(args, name) for name in RECORDED},
        "task_conditioning": trainer.backbone.config.task_conditioning,
        "best_evaluation": best,
    }


def merge_adapter(base: Path, adapter: Path, target: Path) -> Path:
    """
    Writes a repository of a base model with an adapter merged into its weights.

    Args:
        base (`Path`): Folder of the repository that the adapter was trained on.
        adapter (`Path`): Folder of the adapter, wherever it was moved to.
        target (`Path`): The folder to make.

    Raises:
        AdapterError: the adapter was trained on other weights.
    """
    from modeling_moemb.processing_moemb import MoEMBProcessor

    record = json.loads((Path(adapter) / RECORD).read_text(encoding="utf-8"))
    if record["base_weights"] != weights_fingerprint(base):
        raise AdapterError(
            f"the adapter {adapter} was trained on {record['base_model']} (weights {record['base_weights'][:12]}), "
            f"not on the weights in {base}"
        )
    merged = merged_model(base, adapter, record["task_conditioning"])
    processor = MoEMBProcessor.from_pretrained(str(base))
    if (record["task_conditioning"] or {}).get("kind") == "instruction":
        processor.embedding["instruction_mask"] = True
    return assemble_repository(target, model=merged, processor=processor, card_text=_card(merged.config, record, base))


def _card(config: Any, record: dict[str, Any], base: Path | None = None) -> str:
    settings = record["settings"]
    sets = ", ".join(f"{name} ({rows:,} rows)" for name, rows in record["datasets"].items())
    how = f"LoRA of rank {settings['lora_rank']}, merged" if settings["tuning"] == "lora" else "full fine-tuning"
    description = (
        f"{record['base_model']}, trained further by contrast ({how}) for {record['step']:,} steps of "
        f"{settings['batch_size']} rows on: {sets}."
    )
    name = f"{record['base_model'].rsplit('/', 1)[-1]}-finetuned"
    base_model = record["base_model"] if "/" in record["base_model"] else None
    licence = license_of(base) if base is not None else None
    return card_text(config, name=name, base_model=base_model, license=licence, description=description, trained=True)
