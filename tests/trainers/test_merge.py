"""`moemb merge`: what is in the merged weights, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from moemb.trainers import cli

from .adapters import ALPHA, RANK, write_adapter
from .contrastive_runs import small_repository


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_settings):
    return small_repository(tmp_path_factory.mktemp("merge") / "tiny", tiny_settings)


@pytest.fixture
def adapter(tmp_path, base):
    return write_adapter(tmp_path / "moved" / "adapter", base, "tiny")


def merge(*words) -> int:
    return cli.main(["merge", *map(str, words)])


def weights(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def test_the_product_is_added_and_nothing_else_changes(base, adapter, tmp_path, capsys):
    assert merge("--adapter", adapter, "--to", tmp_path / "merged", "--model", base) == 0
    assert str(tmp_path / "merged") in capsys.readouterr().out
    before, after, low = weights(base), weights(tmp_path / "merged"), load_file(adapter / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if key.endswith("q_proj.weight")} != set()
    for key in changed:
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        product = low[f"{stem}.lora_B.weight"] @ low[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(after[key], before[key] + ALPHA / RANK * product, atol=1e-5, rtol=1e-5)
    assert "7 steps of 4 rows on: pairs (12 rows)" in (tmp_path / "merged/README.md").read_text()
    assert (tmp_path / "merged/modules.json").is_file()


def test_the_base_is_found_by_its_name(base, tmp_path, monkeypatch):
    monkeypatch.setattr("moemb.trainers.calibration_repository.mini_repository", lambda: base)
    adapter = write_adapter(tmp_path / "adapter", base, "moemb-mini")
    assert merge("--adapter", adapter, "--to", tmp_path / "merged") == 0
    assert weights(tmp_path / "merged").keys() == weights(base).keys()


def test_a_base_that_was_a_folder_has_to_be_named(adapter, tmp_path, capsys):
    assert merge("--adapter", adapter, "--to", tmp_path / "merged") == 1
    assert "was trained on the folder 'tiny'; say with --model where that is" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_other_weights_are_refused(adapter, tmp_path, tiny_settings, capsys):
    other = small_repository(tmp_path / "other", tiny_settings, seed=1)
    assert merge("--adapter", adapter, "--to", tmp_path / "merged", "--model", other) == 1
    assert "was trained on tiny" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_target_that_is_there(base, adapter, tmp_path, capsys):
    assert merge("--adapter", adapter, "--to", tmp_path, "--model", base) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_config.json", None, "has no adapter_config.json"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
        ("training.json", None, "has no training.json"),
        ("training.json", "{", "is no record of a training"),
        ("training.json", json.dumps({"method": "mini"}), "is no record of a training"),
        ("training.json", "[]", "is no record of a training"),
    ],
)
def test_an_adapter_that_is_not_whole(base, adapter, tmp_path, capsys, name, content, said):
    (adapter / name).unlink()
    if content is not None:
        (adapter / name).write_text(content)
    assert merge("--adapter", adapter, "--to", tmp_path / "merged", "--model", base) == 1
    assert said in capsys.readouterr().err


def test_no_such_model(adapter, tmp_path, capsys):
    assert merge("--adapter", adapter, "--to", tmp_path / "merged", "--model", tmp_path / "none") == 1
    assert "neither a folder nor a Hub id" in capsys.readouterr().err
