"""Two processes over gloo give what one gives on the same batch."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from modeling_moemb import MoEMBModel

from .contrastive_runs import SETTINGS, small_repository, write_data


ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(command: list[str], count: int, folder: Path) -> None:
    """Runs a command as each of several processes of a group, with logs in a folder, and waits for all."""
    port, processes = free_port(), []
    logs = [folder / f"process-{rank}-of-{count}.log" for rank in range(count)]
    for rank, log in enumerate(logs):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if count > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        with log.open("w") as output:  # a pipe that nobody reads would stop a process when it is full
            processes.append(subprocess.Popen([sys.executable, *command], env=environment, cwd=ROOT, stderr=output))
    statuses = [process.wait(timeout=900) for process in processes]
    assert not any(statuses), "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)


FULL = {"tuning": "full", "train_router": True, "save_strategy": "no"}
FSDP, EXPERTS = {"fsdp_size": 2}, {"fsdp_size": 2, "ep_size": 2}
CASES = {
    "ddp-full": {**FULL, "train_vision": True},
    "ddp-lora": {"lora_expert_rank": 2},
    "fsdp2-full": {**FULL, "distributed": FSDP},
    "fsdp2-lora": {"train_router": True, "gradient_checkpointing": True, "distributed": FSDP},
    "fsdp2-ep-full": {**FULL, "gradient_checkpointing": True, "distributed": EXPERTS},
    "fsdp2-ep-lora": {"distributed": EXPERTS},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_settings) -> dict[str, list[dict]]:
    """What one process, and the first of two, has of each case. One process has nothing to spread over."""
    folder = tmp_path_factory.mktemp("distributed")
    repository, data = small_repository(folder / "tiny", tiny_settings), write_data(folder / "data")
    usual = {**SETTINGS, "save_strategy": "no", "model": str(repository), "max_steps": 2, "train_datasets": data,
             "symmetric": True}  # fmt: skip
    written: dict[str, list[dict]] = {case: [] for case in CASES}
    for count in (1, 2):
        recipes = {case: folder / f"{case}-{count}.yaml" for case in CASES}
        for case, recipe in recipes.items():
            settings = {key: value for key, value in CASES[case].items() if key != "distributed" or count > 1}
            recipe.write_text(yaml.safe_dump({**usual, **settings, "output_dir": str(recipe.with_suffix(""))}))
        start(["-m", "tests.trainers.contrastive_worker", *map(str, recipes.values())], count, folder)
        for case, recipe in recipes.items():
            written[case].append(torch.load(recipe.with_suffix(".pt"), weights_only=False))
    return written


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(runs, case):
    one, two = runs[case]
    settings = CASES[case]
    spread = "distributed" in settings
    assert one["wrapped"] == "SentenceTransformer"
    assert two["wrapped"] == ("SentenceTransformer" if spread else "DistributedDataParallel")
    assert bool(two["spread"]) == spread and not any("lora_" in name for name in two["spread"])
    assert len(two["rows"]) == 4 and one["rows"][:4] == two["rows"]
    assert torch.allclose(one["loss"], two["loss"], atol=1e-5)
    assert one["gradients"].keys() == two["gradients"].keys()
    scale = max(value.abs().max() for value in one["gradients"].values())
    for name, value in one["gradients"].items():
        assert torch.allclose(two["gradients"][name], value, rtol=1e-4, atol=1e-5 * scale), name
    assert one["weights"].keys() == two["weights"].keys()
    again = load_file(Path(two["final"]) / "model.safetensors")
    assert again.keys() == load_file(Path(one["final"]) / "model.safetensors").keys()
    model = MoEMBModel.from_pretrained(two["final"]).eval()
    assert model.config.to_dict().get("distributed_config") is None
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(model(**two["inputs"], pooled_only=True).pooler_output, dim=-1)
    assert torch.allclose(vectors, two["vectors"], atol=1e-5)


@pytest.mark.slow
def test_a_killed_run_with_spread_weights_goes_on_to_the_same_adapter(tmp_path, tiny_settings):
    repository, output = small_repository(tmp_path / "tiny", tiny_settings), tmp_path / "run"
    data = write_data(tmp_path / "data")
    recipe = {**SETTINGS, "method": "contrastive", "model": str(repository), "train_datasets": data,
              "distributed": EXPERTS, "output_dir": str(output), "save_merged": False}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["-m", "moemb.trainers.cli", "train", "--config", str(tmp_path / "recipe.yaml")]
    start(command, 2, tmp_path)
    whole = load_file(output / "adapter" / "adapter_model.safetensors")
    first = load_file(output / "checkpoint-2" / "adapter_model.safetensors")
    for folder in (output / "adapter", output / "checkpoint-4"):  # as if killed after the second step
        shutil.rmtree(folder)
    start(command, 2, tmp_path)
    again = load_file(output / "adapter" / "adapter_model.safetensors")
    assert whole.keys() == again.keys() == first.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert not any(torch.equal(value, first[name]) for name, value in whole.items() if "lora_B" in name)
