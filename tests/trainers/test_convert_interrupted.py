"""What a killed conversion leaves behind, and that a rerun finishes it."""

import fcntl
import os

import pytest
import torch
from transformers import AutoModel

from moemb.trainers import convert_safetensors, repository
from moemb.trainers.convert import convert_checkpoint
from moemb.trainers.convert_safetensors import ConversionError, read_checkpoint

from .killed import die, run_killed
from .stock_checkpoint import save_stock_checkpoint, stock_config


SHARD_BYTES = 300_000


def die_among_files() -> None:
    write = repository.write_repository_files
    repository.write_repository_files = lambda folder, **kwargs: (write(folder, **kwargs), die())


def kill_at(point: str, source, target) -> None:
    """Convert in a forked child that dies at `point`."""
    run_killed(point, lambda: convert_checkpoint(source, target, max_shard_bytes=SHARD_BYTES), die_among_files)


@pytest.fixture(scope="module")
def stock(tmp_path_factory, tiny_settings):
    folder = tmp_path_factory.mktemp("stock") / "checkpoint"
    save_stock_checkpoint(folder, stock_config(tiny_settings), packed=False)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(stock, tmp_path_factory):
    return convert_checkpoint(stock, tmp_path_factory.mktemp("whole") / "repo", max_shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("point", ["1000", "450000", "1000000", "files", "before the rename", "after the rename"])
def test_a_killed_run_shows_no_half_repository_and_a_rerun_finishes(stock, uninterrupted, tmp_path, point):
    target = tmp_path / "repo"
    kill_at(point, stock, target)
    assert target.exists() == (point == "after the rename")
    work = tmp_path / ".repo.converting"
    complete = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")} if work.exists() else {}
    if point.isdigit():
        assert list(work.glob("*.part")) and not (work / "config.json").exists()
        assert bool(complete) == (int(point) > SHARD_BYTES)
    assert convert_checkpoint(stock, target, max_shard_bytes=SHARD_BYTES) == target
    for name, written_at in complete.items():
        assert (target / name).stat().st_mtime_ns == written_at, f"{name} was written twice"
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    assert sorted(p.name for p in target.rglob("*")) == sorted(p.name for p in uninterrupted.rglob("*"))
    for path in uninterrupted.rglob("*.safetensors"):
        assert (target / path.name).read_bytes() == path.read_bytes()
    AutoModel.from_pretrained(target, trust_remote_code=True)


def test_leftovers_of_other_settings_are_not_reused(stock, tmp_path):
    target = tmp_path / "repo"
    kill_at("450000", stock, target)
    convert_checkpoint(stock, target, emb_seed=5, max_shard_bytes=SHARD_BYTES)
    reference = convert_checkpoint(stock, tmp_path / "reference", emb_seed=5, max_shard_bytes=SHARD_BYTES)
    for path in reference.glob("*.safetensors"):
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_leftovers_of_a_changed_source_are_not_reused(tiny_settings, tmp_path):
    source, target = tmp_path / "source", tmp_path / "repo"
    save_stock_checkpoint(source, stock_config(tiny_settings), packed=True)
    kill_at("450000", source, target)
    for path in source.glob("*.safetensors"):
        os.utime(path, ns=(0, 0))
    target = convert_checkpoint(source, target, max_shard_bytes=SHARD_BYTES)
    assert len({path.stat().st_mtime_ns for path in target.glob("*.safetensors")}) > 1
    assert all(torch.isfinite(p).all() for p in AutoModel.from_pretrained(target, trust_remote_code=True).parameters())


def test_a_source_that_shrinks_while_it_is_read_is_named(stock, tmp_path, monkeypatch):
    real = convert_safetensors._copy

    def truncate_then_copy(segment, out, on_bytes):
        if segment.file is not None:
            path = tmp_path / "short.safetensors"
            path.write_bytes(b"")
            segment = convert_safetensors.Segment(segment.num_bytes, path, 0)
        real(segment, out, on_bytes)

    monkeypatch.setattr(convert_safetensors, "_copy", truncate_then_copy)
    with pytest.raises(ConversionError, match="ended .* bytes early while it was read"):
        convert_checkpoint(stock, tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_two_runs_to_one_target_do_not_mix(stock, tmp_path):
    with open(tmp_path / ".repo.converting.json", "a+") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another process is converting to"):
            convert_checkpoint(stock, tmp_path / "repo")


def test_a_finished_repository_reads_back(uninterrupted):
    assert read_checkpoint(uninterrupted)
