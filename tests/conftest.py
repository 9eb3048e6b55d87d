"""Shared fixtures: tiny models built from a configuration, and no network.

Under pytest-xdist (`make test`, `make slow`) a test marked `alone` waits until the other processes of the run are
between two tests, and they wait for it.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# the models here are tiny: a second thread only waits, and beside other processes it waits long
os.environ.setdefault("OMP_NUM_THREADS", "1")
# transformers copies remote code file by file into this folder: two processes must not share it, nor leave it behind
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="moemb-tests-modules-")

import pytest
import torch
from transformers import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from modeling_moemb import MoEMBConfig, MoEMBModel, kernel_sources_moemb, kernels_moemb


IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID, EMB_ID = 290, 291, 292, 293, 299
TEXT_IDS = 280
PATCH_DIM = 3 * 2 * 8 * 8


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@contextmanager
def _turn(folder: Path, exclusive: bool):
    """A lock of this run, of many or of one. One at a time passes the gate before it: who waits is not overtaken."""
    with (folder / "gate").open("w") as gate, (folder / "turn").open("w") as turn:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)  # closing would leave it to a process that was forked meanwhile


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout, which must not count the waiting
def pytest_runtest_protocol(item):
    if not hasattr(item.config, "workerinput"):
        return (yield)
    run = Path(item.config.getoption("basetemp")).parent  # that of a worker lies in that of the run
    run.mkdir(parents=True, exist_ok=True)
    with _turn(run, "alone" in item.keywords):
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def seeded_module():
    """Models of a module's fixtures are the same, whichever test comes first and whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def kernels_as_before():
    """No test leaves other kernels to the next one; set up before `monkeypatch`, so torn down after it."""
    yield
    held = kernels_moemb._resolved
    if held not in (None, kernels_moemb.current_settings()):
        kernels_moemb.use_kernels(None)
        pytest.fail(f"the kernels chosen in this test stay chosen: {held}; end with use_kernels(previous) or (None)")


@pytest.fixture(scope="session")
def tiny_settings() -> dict:
    """Constructor arguments of a tiny configuration: 8 blocks (6 Gated DeltaNet, 2 attention), 8 experts, top-2."""
    return {
        "text_config": {
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "patch_size": 8,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
        },
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": VISION_START_ID,
        "vision_end_token_id": VISION_END_ID,
    }


def _liven(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights and non-trivial norms, so that every path matters to the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(2)
    return model.eval()


@pytest.fixture
def no_kernels_chosen(monkeypatch, tmp_path):
    """No kernel staged (but what a test puts into `tmp_path / "staged"`) or chosen; what was comes back afterwards."""
    for name in ("MOEMB_KERNELS", "LOCAL_KERNELS", "MOEMB_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernel_sources_moemb, "STAGED", tmp_path / "staged")
    for name in ("_settings", "_resolved"):
        monkeypatch.setattr(kernels_moemb, name, None)
    for name in ("_sources", "_choices", "_kept"):
        monkeypatch.setattr(kernels_moemb, name, {})


@pytest.fixture(scope="session")
def stock_model(tiny_settings) -> Qwen3_5MoeModel:
    """transformers' own model, the reference."""
    torch.manual_seed(0)
    return _liven(Qwen3_5MoeModel(Qwen3_5MoeConfig(**tiny_settings)))


@pytest.fixture(scope="session")
def tiny_config(tiny_settings) -> MoEMBConfig:
    return MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID)


@pytest.fixture(scope="session")
def shared_model(tiny_config, stock_model) -> MoEMBModel:
    model = MoEMBModel(tiny_config).eval()
    model.load_state_dict(stock_model.state_dict())
    return model


@pytest.fixture
def tiny_model(tiny_settings, stock_model) -> MoEMBModel:
    """A fresh MoEMB model with the weights of `stock_model`."""
    model = MoEMBModel(MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID)).eval()
    model.load_state_dict(stock_model.state_dict())
    return model
