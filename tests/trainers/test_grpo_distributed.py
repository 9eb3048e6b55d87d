"""Two gloo processes train as one does: the same actions, candidates, advantages and gradients."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


ROOT = Path(__file__).parents[2]


def train(folder, processes, per_device, replay, loss_type):
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(processes):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MOEMB_KERNELS": "off"}
        if processes > 1:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        words = [sys.executable, "-m", "tests.trainers.grpo_cases", folder, str(per_device), replay, loss_type]
        running.append(
            subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    for process in running:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output.decode()[-3000:]
    return load_file(folder / "gates.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "loss_type"), [("stored", "dapo"), ("forward", "dr_grpo")])
def test_two_processes_equal_one(tmp_path, replay, loss_type):
    one = train(tmp_path / "one", 1, 24, replay, loss_type)
    two = train(tmp_path / "two", 2, 12, replay, loss_type)  # three groups of eight: one goes on in the second process
    assert set(one) == set(two)
    for name, value in one.items():
        if name.startswith("log/") and name.split("/", 1)[1] in ("step_time", "num_tokens"):
            continue
        torch.testing.assert_close(
            two[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
