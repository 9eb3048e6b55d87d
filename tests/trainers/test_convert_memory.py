"""A checkpoint several times larger than the memory the process may have converts."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from moemb.trainers.convert import plan_tensors
from moemb.trainers.convert_plan import base_keys, split_into_shards
from moemb.trainers.convert_safetensors import read_checkpoint

from .stock_checkpoint import dense_config, stock_config, stock_processor


MEMORY = 1_200_000_000  # what the process may have resident, libraries included
EXTRA = 384 * 2**20  # address space it may take beyond what importing the libraries took
LIMITED_RUN = """
import resource, sys
import torch, transformers
import modeling_moemb.processing_moemb
from transformers import AutoProcessor, Qwen3_5MoeForConditionalGeneration
from moemb.trainers import convert, model_card, repository, upcycling

status = open("/proc/self/status").read()
size = int(status.split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[3]),) * 2)
design = upcycling.Design(sys.argv[4], granularity=8, replicas=2)
convert.convert_checkpoint(sys.argv[1], sys.argv[2], design=design)
# not ru_maxrss: that survives exec, and would be the size of the process that started this one
status = open("/proc/self/status").read()
print("peak", int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def write_sparse_checkpoint(folder, config, packed: bool, model_class=Qwen3_5MoeForConditionalGeneration) -> int:
    """Write headers over holes: files with the sizes of a real checkpoint that take no room on the disk.

    Returns:
        `int`: bytes of all tensors.
    """
    with torch.device("meta"):
        state = model_class(config).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    if not packed:
        shapes = dict(one_by_one(shapes))
    folder.mkdir()
    weight_map, total = {}, 0
    groups = {}
    for key in shapes:
        groups.setdefault(".".join(key.split(".")[:4]), []).append(key)
    for number, keys in enumerate(groups.values()):
        name, header, end = f"model-{number}.safetensors", {}, 0
        for key in keys:
            size = 2 * torch.Size(shapes[key]).numel()
            header[key] = {"dtype": "BF16", "shape": shapes[key], "data_offsets": [end, end + size]}
            end += size
            weight_map[key] = name
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    stock_processor().save_pretrained(folder)
    return total


def one_by_one(shapes):
    """The per-expert keys of packed ones."""
    for key, shape in shapes.items():
        if key.endswith("experts.gate_up_proj"):
            for i in range(shape[0]):
                for name in ("gate_proj", "up_proj"):
                    yield key.replace("gate_up_proj", f"{i}.{name}.weight"), (shape[1] // 2, shape[2])
        elif key.endswith("experts.down_proj"):
            for i in range(shape[0]):
                yield key.replace("down_proj", f"{i}.down_proj.weight"), shape[1:]
        else:
            yield key, shape


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-expert"])
def test_conversion_needs_memory_for_a_block_not_for_a_shard(tmp_path, tiny_settings, packed):
    settings = json.loads(json.dumps(tiny_settings))
    settings["text_config"] |= {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_experts": 128,
        "moe_intermediate_size": 640,
    }
    settings["vision_config"]["out_hidden_size"] = 1024
    config = stock_config(settings, vocab_size=200_000)
    total = write_sparse_checkpoint(tmp_path / "stock", config, packed)
    assert total > 4 * MEMORY
    run = subprocess.run(
        [sys.executable, "-c", LIMITED_RUN, str(tmp_path / "stock"), str(tmp_path / "new"), str(EXTRA), "native"],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split("peak")[1]) < MEMORY
    converted = read_checkpoint(tmp_path / "new")
    assert sum(tensor.num_bytes for tensor in converted.values()) == total - 2 * 200_000 * 1024  # all but lm_head


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("design", ["upcycled", "modality"])
def test_upcycling_needs_memory_for_a_block_not_for_a_matrix(tmp_path, tiny_settings, design):
    settings = json.loads(json.dumps(tiny_settings))
    settings["text_config"] |= {"hidden_size": 2048, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    settings["vision_config"]["out_hidden_size"] = 2048
    width = 163_840
    config = dense_config(settings, width)
    write_sparse_checkpoint(tmp_path / "stock", config, True, Qwen3_5ForConditionalGeneration)
    matrix = 2 * 2048 * width
    assert matrix > EXTRA
    run = subprocess.run(
        [sys.executable, "-c", LIMITED_RUN, str(tmp_path / "stock"), str(tmp_path / "new"), str(EXTRA), design],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout.split("peak")[1]) < MEMORY
    copies = {"upcycled": 2, "modality": 3}[design]
    experts = {k: t for k, t in read_checkpoint(tmp_path / "new").items() if ".experts." in k}
    assert sum(tensor.num_bytes for tensor in experts.values()) == copies * 3 * matrix


A10B = {
    "hidden_size": 3072,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-expert"])
@pytest.mark.parametrize(("name", "text", "billions"), [("35B-A3B", {}, 34.6), ("122B-A10B", A10B, 121.8)])
def test_every_tensor_of_the_real_models_finds_its_place(tmp_path, name, text, billions, packed):
    """The published shapes, as headers over holes: planned and checked against the model, not written."""
    vision = {"out_hidden_size": text.get("hidden_size", 2048)}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    write_sparse_checkpoint(tmp_path / "stock", config, packed)
    settings = json.loads((tmp_path / "stock" / "config.json").read_text())
    tensors = base_keys(read_checkpoint(tmp_path / "stock"))
    planned = plan_tensors(tensors, 248077, 248077, 0, plain=False, keep_row=False, settings=settings)
    parameters = sum(t.num_bytes for t in planned) / 2
    assert parameters / 1e9 == pytest.approx(billions, abs=0.6)
    shards = split_into_shards(planned)
    assert max(sum(t.num_bytes for t in group) for group in shards.values()) <= 4 * 2**30
