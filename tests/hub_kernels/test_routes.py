"""The four routes that load a kernel, each in a fresh process with its own environment."""

import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import torch

from .toy_kernels import KERNELS


def load_by_all_routes(repo: Path) -> list[str]:
    command = [sys.executable, str(KERNELS / "tools" / "routes.py"), str(repo)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return [line.partition(":")[0] for line in result.stdout.splitlines()]


def test_a_compiled_repository(toy_build):
    """Beside a CUDA build of torch as well, whose own backend has no variant here."""
    routes = load_by_all_routes(toy_build)
    assert {"cpu, path", "cpu, LOCAL_KERNELS", "cpu, Hub cache", "cpu, layer Scale"} <= set(routes)


def test_a_noarch_repository(plain_build):
    routes = load_by_all_routes(plain_build)
    expected = {"cpu, path", "cpu, LOCAL_KERNELS", "cpu, Hub cache", "cpu, layer Scale"}
    if torch.version.cuda is not None:  # a build with CUDA, with or without a device
        expected |= {"cuda, path", "cuda, Hub cache", "cuda, stock layer Scale"}
    assert expected <= set(routes)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in KERNELS.glob("*/build.toml")))
def test_our_repositories(name, request):
    import stage

    if name == "moemb-cpu":
        request.getfixturevalue("compiler")
    stage.stage(KERNELS / name)
    routes = load_by_all_routes(KERNELS / name)
    assert {"cpu, path", "cpu, LOCAL_KERNELS", "cpu, Hub cache"} <= set(routes)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in KERNELS.glob("*/build.toml")))
def test_the_tests_that_travel_with_a_repository(name, request):
    import stage

    if name == "moemb-cpu":
        request.getfixturevalue("compiler")
    stage.stage(KERNELS / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "kernels_ci", f"{name}/tests"]
    result = subprocess.run(command, cwd=KERNELS, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_layer_takes_the_place_of_a_forward(plain_build):
    from routes import BackendLayerRepository

    class Doubling(torch.nn.Module):
        def forward(self, x):
            return x + x

    kernels.replace_kernel_forward_from_hub(Doubling, "Doubling")
    model = torch.nn.Sequential(Doubling())
    repository = BackendLayerRepository(plain_build, "Scale", "cpu")
    assert hash(repository) == hash(BackendLayerRepository(plain_build, "Scale", "cpu"))
    with kernels.use_kernel_mapping({"Doubling": {"cpu": repository}}):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    assert model[0].forward.__func__.__module__.endswith("layers")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
