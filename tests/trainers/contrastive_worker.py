"""One process of a run over several: writes the loss and the gradients of a step. Started by the tests."""

import sys
from pathlib import Path

import torch
import yaml

from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_trainer import build_trainer


def step(settings: dict, output: Path) -> None:
    """Runs one step and then trains two; writes what the main process has."""
    run = build_trainer(ContrastiveConfig(**settings))
    run._prepare_for_training(2, run.get_train_dataloader(), None)
    batch = next(iter(run.get_train_dataloader()))
    loss = run.training_step(run.model_wrapped, batch)
    gradients = {n: p.grad.clone() for n, p in run.backbone.named_parameters() if p.grad is not None}
    run.model.zero_grad()
    wrapped = type(run.model_wrapped).__name__
    run.train()
    weights = {n: p.detach() for n, p in run.backbone.named_parameters() if p.requires_grad}
    if run.is_world_process_zero():
        record = {"loss": loss, "gradients": gradients, "weights": weights, "wrapped": wrapped}
        torch.save({**record, "rows": batch["batch"].numbers}, output)


if __name__ == "__main__":
    step(yaml.safe_load(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
