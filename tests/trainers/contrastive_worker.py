"""One process of runs over several: writes the loss and the gradients of a step of each. Started by the tests."""

import sys
from pathlib import Path

import torch
import yaml

from moemb.trainers.contrastive_batches import model_inputs
from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_trainer import build_trainer
from moemb.trainers.distributed import is_spread, whole


def step(settings: dict, output: Path) -> None:
    """Runs one step, trains as many as the settings say and exports; writes what the main process has."""
    run = build_trainer(ContrastiveConfig(**settings))
    run._prepare_for_training(2, run.get_train_dataloader(), None)
    batch = next(iter(run.get_train_dataloader()))
    loss = run.training_step(run.model_wrapped, batch)
    named = dict(run.backbone.named_parameters())
    spread = [name for name, value in named.items() if is_spread(value)]
    gradients = {n: whole(p.grad).clone() for n, p in named.items() if p.grad is not None}
    run.model.zero_grad()
    wrapped = type(run.model_wrapped).__name__
    run.train()
    weights = {n: whole(p.detach()) for n, p in run.backbone.named_parameters() if p.requires_grad}
    items = batch["batch"].items
    inputs = model_inputs(items, run.encoder.normalisations, run.args.device)
    with torch.no_grad():
        vectors = run.embed(run.model.eval(), batch["batch"], range(len(items))).vectors
    final = run.export_final()
    if run.is_world_process_zero():
        record = {"loss": loss, "gradients": gradients, "weights": weights, "wrapped": wrapped, "spread": spread}
        record |= {"inputs": inputs, "vectors": vectors, "final": str(final), "rows": batch["batch"].numbers}
        torch.save(record, output)


if __name__ == "__main__":
    for recipe in map(Path, sys.argv[1:]):  # one after the other: a process takes longer to start than to train
        step(yaml.safe_load(recipe.read_text()), recipe.with_suffix(".pt"))
