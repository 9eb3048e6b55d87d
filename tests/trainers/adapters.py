"""A LoRA adapter as training leaves it, made with peft alone."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from modeling_moemb import MoEMBModel
from moemb.trainers.saliency import weights_fingerprint


RANK, ALPHA = 2, 6


def write_adapter(folder: Path, base: Path, name: str) -> Path:
    """An adapter of the queries of attention, with weights other than zero, and the record of its training."""
    torch.manual_seed(0)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"])
    model = get_peft_model(MoEMBModel.from_pretrained(str(base), dtype="auto"), settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    record = {
        "method": "contrastive", "base_model": name, "base_weights": weights_fingerprint(base), "step": 7,
        "datasets": {"pairs": 12}, "settings": {"tuning": "lora", "lora_rank": RANK, "batch_size": 4},
        "task_conditioning": None,
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(record))
    return folder
