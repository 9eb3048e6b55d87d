"""Trains a step in a process of its own and writes how much memory they took. Started by the tests."""

import gc
import json
import sys
from pathlib import Path

import yaml

from moemb.trainers.benchmark_machine import peak_memory, resident_bytes
from moemb.trainers.contrastive_config import ContrastiveConfig
from moemb.trainers.contrastive_trainer import build_trainer


def measure(warm: dict, settings: dict) -> int:
    """Bytes that a training adds to a process that has trained another model before."""
    build_trainer(ContrastiveConfig(**warm)).train()
    gc.collect()
    before = resident_bytes()
    trainer = build_trainer(ContrastiveConfig(**settings))
    gc.collect()
    with peak_memory() as peak:
        trainer.train()
    return peak["bytes"] - before


if __name__ == "__main__":
    warm, settings = (yaml.safe_load(Path(path).read_text()) for path in sys.argv[1:3])
    Path(sys.argv[3]).write_text(json.dumps(measure(warm, settings)))
