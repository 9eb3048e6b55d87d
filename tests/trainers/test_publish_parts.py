"""An adapter and kernel repositories among the trees, loaded by their ids from a Hub cache, offline."""

import argparse
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from modeling_moemb import MoEMBModel
from moemb.trainers import publish
from moemb.trainers.publish_adapter import check_adapter
from moemb.trainers.publish_assemble import Tree
from moemb.trainers.publish_checks import check_tree, open_tree
from moemb.trainers.publish_kernels import choose_kernels, kernel_card, kernel_reports, measured_part
from moemb.trainers.publish_sources import PublishError, SourceState, source_state
from moemb.trainers.publish_upload import version_branch
from moemb.trainers.publish_verify import Embedded, _compare_bits, fresh_reference, probe

from .publish_cases import make_checkpoint, to_hub_cache


MODEL, ADAPTER, KERNEL = "moemb-test/tiny", "moemb-test/tiny-adapter", "moemb-test/moemb-experts"


def dry_run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    publish.add_arguments(parser)
    assert publish.run(parser.parse_args([*words, "--to", MODEL, "--allow-dirty"])) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_settings) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source"), tiny_settings)


@pytest.fixture(scope="module")
def adapter(checkpoint) -> Path:
    """As peft leaves it, with the folder of this machine inside."""
    from peft import LoraConfig, get_peft_model

    model = MoEMBModel.from_pretrained(str(checkpoint))
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "in_proj_qkv"])
    model = get_peft_model(model, settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(checkpoint.parent / "adapter")
    settings = json.loads((checkpoint.parent / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(checkpoint)
    return checkpoint.parent / "adapter"


def test_no_adapter(tmp_path):
    with pytest.raises(PublishError, match=r"has no adapter_config.json; name a folder"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(PublishError, match="has no adapter_model.safetensors; save it with"):
        check_adapter(tmp_path)


@pytest.mark.slow
def test_an_adapter_points_at_the_published_base(checkpoint, adapter, tmp_path, monkeypatch):
    words = ("--model", str(checkpoint), "--adapter", str(adapter), "--no-kernels", "--no-plain")
    dry_run(*words, "--dry-run", str(tmp_path / "dry"))
    tree = tmp_path / "dry" / "models" / ADAPTER
    assert json.loads((tree / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL
    text = (tree / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["library_name"], header["base_model"], header["license"]) == ("peft", MODEL, "apache-2.0")
    assert "| rank | 4 |" in text and "| modules | `in_proj_qkv`, `q_proj` |" in text
    for name in (MODEL, ADAPTER):
        to_hub_cache(tmp_path / "dry" / "models" / name, name, tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "scratch").mkdir()
    request = {"folder": MODEL, "adapter": ADAPTER, "trust_remote_code": True, "routes": ["sentence_transformers"]}
    found = probe(request, tmp_path / "scratch").vectors["sentence_transformers/encode"]
    np.testing.assert_array_equal(found, fresh_reference(checkpoint, adapter=adapter).vectors["encode"])
    assert np.abs(found - fresh_reference(checkpoint).vectors["encode"]).max() > 1e-3, "the adapter does something"


@pytest.mark.slow
def test_a_kernel_repository_loads_by_its_id(checkpoint, tmp_path):
    words = ("--model", str(checkpoint), "--kernels", "moemb-experts", "--no-plain")
    dry_run(*words, "--dry-run", str(tmp_path / "dry"))
    tree = tmp_path / "dry" / "kernels" / KERNEL
    assert check_tree(open_tree(tree, KERNEL, "kernel")) == []
    assert f'get_kernel("{KERNEL}", version=1' in (tree / "README.md").read_text()
    assert f'repo-id = "{KERNEL}"' in (tree / "build.toml").read_text()
    branch = version_branch(tree)
    to_hub_cache(tree, KERNEL, tmp_path / "hub", "kernel")
    refs = tmp_path / "hub" / f"kernels--{KERNEL.replace('/', '--')}" / "refs"
    (refs / "main").rename(refs / branch)
    code = f"""
        import kernels, torch
        kernel = kernels.get_kernel("{KERNEL}", version=1, backend="cpu", trust_remote_code=["{KERNEL}"])
        index, weight = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
        states, gate_up, down = torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
        out = kernel.experts(states, index, weight, gate_up, down)
        expected = 3 * torch.nn.functional.silu(torch.tensor(4.0)) * 4
        torch.testing.assert_close(out, expected.expand(3, 4))
    """
    cache = dict.fromkeys(("HF_HUB_CACHE", "KERNELS_CACHE"), str(tmp_path / "hub")) | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | cache, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_kernel_cards_show_measurements_of_files_alone(tmp_path):
    (tmp_path / "CARD.md").write_text("---\nlicense: apache-2.0\n---\n\n# fast\n")
    (tmp_path / "build" / "torch-cpu").mkdir(parents=True)
    metadata = {"id": "_fast_1", "version": 2, "backend": {"type": "cpu"}, "digest": {"files": {"a": "", "b": ""}}}
    (tmp_path / "build" / "torch-cpu" / "metadata.json").write_text(json.dumps(metadata))
    about = {"source": {"commit": "c" * 40}, "versions": {"torch": "2.14.1"}, "together": [MODEL]}
    card = kernel_card(tmp_path, about)
    assert "| `torch-cpu` | cpu | 2 | `_fast_1` | 2 |" in card and "No measurement of these builds travels" in card
    assert "c" * 40 in card and f"[{MODEL}]" in card
    case = {
        "case": "experts-64", "ours": "moemb kernel", "best_peer": "transformers grouped_mm", "ratio": 2.5,
        "goals": [],
        "seconds": {"moemb kernel": 0.001, "transformers grouped_mm": 0.0025}, "timing": None,
        "check": {"implementations": {"moemb kernel": {"row_error": 1e-6}}, "wrong": []},
        "share_of_peak": {"moemb kernel": 0.5}, "bytes_per_second": {"moemb kernel": 2e9},
    }  # fmt: skip
    report = {
        "suite": "kernels", "machine": {"processor": "a CPU", "threads": 2}, "protocol": {"rounds": 7},
        "cases": [case, {"case": "x", "failed": "no"}],
    }  # fmt: skip
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "kernels.json").write_text(json.dumps(report))
    shown = "\n".join(measured_part(tmp_path))
    assert "medians of 7 interleaved rounds on a CPU, threads: 2" in shown
    assert "| experts-64 | kernel | 1 ms | transformers grouped_mm 2.5 ms | 2.50x | 50.0% | 2.0 | 1.0e-06 |" in shown
    (tmp_path / "results" / "kernels.json").write_text(json.dumps(report | {"suite": "encode"}))
    with pytest.raises(PublishError, match="is no report of 'moemb bench --suite kernels'"):
        measured_part(tmp_path)


def test_measurements_of_the_checkout_are_found(tmp_path):
    results = tmp_path / "recipes/bench/results"
    results.mkdir(parents=True)
    for name, content in (("encode", {"suite": "encode"}), ("gpu", {"suite": "kernels"}), ("list", [1])):
        (results / f"{name}.json").write_text(json.dumps(content))
    state = SourceState(tmp_path, None, "2026-01-01")
    assert kernel_reports(state) == [results / "gpu.json"]
    assert kernel_reports(SourceState(tmp_path / "elsewhere", None, "2026-01-01")) == []


def test_which_kernels():
    state = source_state(allow_dirty=True)
    assert set(choose_kernels(state, None)) == {"moemb-cpu", "moemb-experts", "moemb-gated-delta"}
    with pytest.raises(PublishError, match="no such kernel repository; there are moemb-cpu"):
        choose_kernels(state, ["moemb-gpu"])


def test_other_kernels_are_named_where_bits_differ(tmp_path):
    """A process that did not find the kernels rounds otherwise: the message says so, and does not blame the model."""
    vectors = np.ones((1, 2), dtype=np.float32)
    ours = Embedded({"encode": vectors}, ["linear on cpu: moemb-cpu (float32), staged"])
    theirs = Embedded({"auto/encode": vectors * 2}, ["linear on cpu: torch (), not staged"])
    tree = Tree(MODEL, "model", "model", tmp_path)
    with pytest.raises(PublishError, match=r"other kernels than the source.*torch \(\), not staged.*moemb-cpu"):
        _compare_bits(tree, theirs, ours)
    with pytest.raises(PublishError, match="differ from the source's by 1;"):
        _compare_bits(tree, Embedded(theirs.vectors, ours.kernels), ours)
