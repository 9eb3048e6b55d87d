"""Two processes over gloo give what one gives on the same batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from .contrastive_runs import SETTINGS, small_repository, write_data


ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_processes(folder: Path, settings: dict, count: int) -> dict:
    """Starts the processes of one run and returns what the first wrote."""
    recipe, output = folder / f"{count}.yaml", folder / f"{count}.pt"
    recipe.write_text(yaml.safe_dump({**settings, "output_dir": str(folder / f"run{count}")}))
    port, processes = free_port(), []
    for rank in range(count):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if count > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, "-m", "tests.trainers.contrastive_worker", str(recipe), str(output)]
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=500)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(text[-3000:] for text in errors)
    return torch.load(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"tuning": "full", "train_router": True, "train_vision": True}, {"lora_expert_rank": 2}]
)
def test_two_processes_equal_one(tmp_path, tiny_settings, settings):
    repository = small_repository(tmp_path / "tiny", tiny_settings)
    given = {**SETTINGS, **settings, "model": str(repository), "train_datasets": write_data(tmp_path / "data"),
             "save_strategy": "no", "max_steps": 2, "symmetric": True}  # fmt: skip
    one, two = (run_processes(tmp_path, given, count) for count in (1, 2))
    assert one["wrapped"] == "SentenceTransformer" and two["wrapped"] == "DistributedDataParallel"
    assert len(two["rows"]) == 4 and one["rows"][:4] == two["rows"]
    assert torch.allclose(one["loss"], two["loss"], atol=1e-5)
    assert one["gradients"].keys() == two["gradients"].keys()
    scale = max(value.abs().max() for value in one["gradients"].values())
    for name, value in one["gradients"].items():
        assert torch.allclose(two["gradients"][name], value, rtol=1e-4, atol=1e-5 * scale), name
    assert one["weights"].keys() == two["weights"].keys()
