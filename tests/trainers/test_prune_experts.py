"""Pruned repositories against masks and plain indexing, and what stopped or mistaken runs leave."""

import json
import os
import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from modeling_moemb import MoEMBModel
from modeling_moemb.processing_moemb import MoEMBProcessor
from moemb.trainers import cli, convert_safetensors, prune_experts_repository
from moemb.trainers.convert_safetensors import read_checkpoint
from moemb.trainers.model_card import UNTRAINED_EMB
from moemb.trainers.prune_experts_repository import PruningError, plan_pruned, write_pruned_repository
from moemb.trainers.prune_experts_sweep import masked_experts
from tests.processors import lean_processor

from .killed import die, run_killed
from .pruning_repository import (
    BLOCKS,
    EXPERTS,
    TOP_K,
    calibration_items,
    pruning_config,
    pruning_model,
    write_repository,
)
from .stock_checkpoint import save_stock_checkpoint, stock_config


RECORD = {"model": "tiny", "saliency": "reap", "items": 10}
PER_EXPERT = (".mlp.gate.weight", ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
SHARD_BYTES = 200_000


@pytest.fixture(scope="module")
def source(tmp_path_factory, tiny_settings):
    folder = write_repository(tmp_path_factory.mktemp("source") / "whole", tiny_settings)
    (folder / "notes.txt").write_text("kept", encoding="utf-8")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"all experts")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_bytes(b"")
    return folder


def some_experts(keep: int, seed: int = 0) -> torch.Tensor:
    """Other experts in every block, with runs of neighbours and gaps."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(BLOCKS, EXPERTS, generator=generator)
    return scores.argsort(dim=1)[:, :keep].sort(dim=1).values


def indexed(state: dict[str, torch.Tensor], keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: plain indexing of the weights in memory."""
    result = {}
    for key, value in state.items():
        layer = re.search(r"layers\.(\d+)\.", key)
        result[key] = value[keep[int(layer[1])]] if key.endswith(PER_EXPERT) else value
    return result


def embed(model, processor) -> torch.Tensor:
    vectors = [item.value for item in calibration_items(8, seed=3)]
    with torch.no_grad():
        return model(**processor(vectors)).pooler_output


@pytest.mark.parametrize("keep", [EXPERTS, 5, TOP_K])
def test_a_removed_expert_equals_minus_infinity_on_its_router_row(tiny_settings, keep):
    processor = lean_processor()
    whole, kept = pruning_model(tiny_settings, processor), some_experts(keep)
    config = pruning_config(tiny_settings, processor)
    config.text_config.num_experts = keep
    small = MoEMBModel(config).eval()
    small.load_state_dict(indexed(whole.state_dict(), kept))
    before = embed(whole, processor)
    with masked_experts(whole, kept):
        masked = embed(whole, processor)
    torch.testing.assert_close(embed(small, processor), masked, rtol=1e-6, atol=1e-6 * before.abs().max().item())
    assert torch.equal(embed(whole, processor), before), "the mask outlives its context"
    difference = (masked - before).abs().max()
    assert difference == 0 if keep == EXPERTS else difference > 1e-2


FRESH = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
vectors = {}
for folder in sys.argv[3:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        vectors[folder] = model(**load_file(sys.argv[1])).pooler_output
assert "modeling_moemb" not in sys.modules, "the package was used, not the repository's code"
save_file(vectors, sys.argv[2])
"""


def test_the_repository_loads_in_a_fresh_process_and_equals_the_mask(source, tmp_path):
    kept = some_experts(5)
    one = write_pruned_repository(source, tmp_path / "one", kept, RECORD)
    many = write_pruned_repository(source, tmp_path / "many", kept, RECORD, max_shard_bytes=SHARD_BYTES)
    assert len(list(one.glob("*.safetensors"))) == 1 < len(list(many.glob("*.safetensors")))
    whole, processor = (
        AutoModel.from_pretrained(source, trust_remote_code=True),
        MoEMBProcessor.from_pretrained(source),
    )
    features = processor([item.value for item in calibration_items(6, seed=5)])
    save_file(dict(features), tmp_path / "features")
    run = subprocess.run(
        [sys.executable, "-c", FRESH, *map(str, (tmp_path / "features", tmp_path / "vectors", one, many))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with torch.no_grad(), masked_experts(whole, kept):
        wanted = whole(**features).pooler_output
    found = load_file(tmp_path / "vectors")
    assert torch.equal(found[str(one)], found[str(many)])
    torch.testing.assert_close(found[str(one)], wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())


def test_what_a_repository_consists_of(source, tmp_path):
    kept = some_experts(4)
    target = write_pruned_repository(source, tmp_path / "small", kept, RECORD)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    wanted = indexed(load_file(source / "model.safetensors"), kept)
    found = load_file(target / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    names = {
        folder: {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        for folder in (source, target)
    }
    assert names[target] == names[source] - {"onnx/model.onnx", ".cache/lock"} | {"expert_pruning.json"}
    for name in names[target] - {"model.safetensors", "config.json", "README.md", "expert_pruning.json"}:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert new["text_config"].pop("num_experts") == 4 and old["text_config"].pop("num_experts") == EXPERTS
    assert new == old and "auto_map" in new
    record = json.loads((target / "expert_pruning.json").read_text())
    assert record == RECORD | {"experts_before": EXPERTS, "experts_kept": 4, "kept": kept.tolist()}
    card = (target / "README.md").read_text()
    assert "tiny with 4 of its 8 routed experts in every block" in card and "4 routed, 2 per token" in card
    assert "license: apache-2.0" in card and UNTRAINED_EMB not in card


def test_a_stale_budget_and_an_untrained_token_are_said(tmp_path, tiny_settings):
    folder = write_repository(tmp_path / "whole", tiny_settings, adaptive_compute={"top_k": 1})
    with open(folder / "README.md", "a", encoding="utf-8") as file:
        file.write(f"- {UNTRAINED_EMB}\n")
    card = (write_pruned_repository(folder, tmp_path / "small", some_experts(4), RECORD) / "README.md").read_text()
    assert UNTRAINED_EMB in card and "calibrate it again" in card


def test_a_pruned_repository_can_be_pruned_again(source, tmp_path):
    first, second = some_experts(6), torch.tensor([[0, 2, 5]] * BLOCKS)
    middle = write_pruned_repository(source, tmp_path / "six", first, RECORD)
    last = write_pruned_repository(middle, tmp_path / "three", second, RECORD)
    direct = indexed(load_file(source / "model.safetensors"), first.gather(1, second))
    found = load_file(last / "model.safetensors")
    assert all(torch.equal(found[key], direct[key]) for key in direct)
    assert json.loads((last / "expert_pruning.json").read_text())["before"]["kept"] == first.tolist()


def test_a_bare_checkpoint_becomes_a_repository(tmp_path, tiny_settings):
    processor = lean_processor()
    pruning_model(tiny_settings, processor).save_pretrained(tmp_path / "bare")
    processor.save_pretrained(tmp_path / "bare")
    target = write_pruned_repository(tmp_path / "bare", tmp_path / "small", some_experts(4), RECORD)
    assert (target / "modules.json").is_file() and (target / "modeling_moemb.py").is_file()
    model = AutoModel.from_pretrained(target, trust_remote_code=True)
    assert model.config.text_config.num_experts == 4


def kill_at(point: str, call) -> None:
    """Prune in a forked child that dies at `point`."""
    run_killed(point, call, lambda: setattr(prune_experts_repository, "_card", die))


@pytest.mark.parametrize("point", ["1000", "450000", "files", "before the rename", "after the rename"])
def test_a_killed_run_shows_no_half_repository_and_a_rerun_finishes(source, tmp_path, point):
    target, kept = tmp_path / "small", some_experts(5)
    kill_at(point, lambda: write_pruned_repository(source, target, kept, RECORD, max_shard_bytes=SHARD_BYTES))
    assert target.exists() == (point == "after the rename")
    work = tmp_path / ".small.converting"
    complete = {p.name: p.stat().st_mtime_ns for p in work.glob("*.safetensors")} if work.exists() else {}
    assert bool(complete) == (point not in ("1000", "after the rename"))
    assert write_pruned_repository(source, target, kept, RECORD, max_shard_bytes=SHARD_BYTES) == target
    for name, written_at in complete.items():
        assert (target / name).stat().st_mtime_ns == written_at, f"{name} was written twice"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    wanted = indexed(load_file(source / "model.safetensors"), kept)
    found = {k: v for path in target.glob("*.safetensors") for k, v in load_file(path).items()}
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    AutoModel.from_pretrained(target, trust_remote_code=True)


def test_leftovers_of_other_experts_are_not_reused(source, tmp_path):
    target = tmp_path / "small"
    kill_at("files", lambda: write_pruned_repository(source, target, some_experts(5), RECORD))
    assert (tmp_path / ".small.converting" / "model.safetensors").exists()
    kept = some_experts(5, seed=1)
    write_pruned_repository(source, target, kept, RECORD)
    wanted = indexed(load_file(source / "model.safetensors"), kept)
    assert torch.equal(
        load_file(target / "model.safetensors")[key := next(k for k in wanted if "gate_up" in k)], wanted[key]
    )


def test_memory_is_that_of_a_block_not_of_a_tensor(tmp_path, tiny_settings, monkeypatch):
    """A checkpoint of holes, its expert stacks many times larger than a block."""
    settings = json.loads(json.dumps(tiny_settings))
    settings["text_config"] |= {"hidden_size": 128, "num_experts": 64, "moe_intermediate_size": 100}
    settings["vision_config"]["out_hidden_size"] = 128
    processor = lean_processor()
    config = pruning_config(settings, processor)
    folder = tmp_path / "whole"
    folder.mkdir()
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in MoEMBModel(config).state_dict().items()}
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    block = 2**16
    monkeypatch.setattr(convert_safetensors, "BLOCK_BYTES", block)
    largest = max(4 * int(np.prod(shape)) for shape in shapes.values())
    assert end > 400 * block and largest > 40 * block
    kept = torch.arange(0, 64, 2).expand(BLOCKS, 32)
    tracemalloc.start()
    write_pruned_repository(folder, tmp_path / "small", kept, RECORD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21, f"{peak / block:.1f} blocks"
    written = sum(tensor.num_bytes for tensor in read_checkpoint(tmp_path / "small").values())
    experts = sum(4 * int(np.prod(shape)) for key, shape in shapes.items() if key.endswith(PER_EXPERT))
    assert written == end - experts // 2


@pytest.mark.parametrize(
    ("keep", "match"),
    [
        (torch.zeros(BLOCKS, 1, dtype=torch.long), "keep is 1, but each token runs 2 experts"),
        (torch.arange(9).expand(BLOCKS, 9), "keep is 9, but there are 8 experts"),
        (torch.arange(4).expand(BLOCKS - 1, 4), "the model has 8 blocks"),
        (torch.tensor([[0, 1, 8]] * BLOCKS), "ascending indices from 0 to 7"),
        (torch.tensor([[0, 2, 2]] * BLOCKS), "ascending indices from 0 to 7"),
    ],
)
def test_experts_that_do_not_fit_are_refused(source, keep, match):
    settings = json.loads((source / "config.json").read_text())
    with pytest.raises(ValueError, match=match):
        plan_pruned(read_checkpoint(source), settings, keep)


def test_other_checkpoints_and_targets_are_refused(source, tmp_path, tiny_settings):
    save_stock_checkpoint(tmp_path / "stock", stock_config(tiny_settings), packed=False)
    cases = [
        (tmp_path / "stock", tmp_path / "a", r"qwen3_5_moe.*make one with 'moemb convert --from .*stock --to DIR'"),
        (tmp_path, tmp_path / "a", "no weights to read"),
        (source, source, "exists already; remove it or choose another output"),
    ]
    for folder, target, match in cases:
        with pytest.raises(PruningError, match=match):
            write_pruned_repository(folder, target, some_experts(4), RECORD)
    assert not (tmp_path / "a").exists()


def test_the_verb_is_there(capsys):
    with pytest.raises(SystemExit):
        cli.main(["prune-experts", "--help"])
    assert "--sweep" in capsys.readouterr().out
