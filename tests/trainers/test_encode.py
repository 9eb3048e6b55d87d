"""`moemb encode`: ids and vectors, once each, whoever makes them and however often it is stopped."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from moemb.trainers import encode
from moemb.trainers.encode_columns import Columns, InputError
from moemb.trainers.encode_inputs import ParquetSource, open_source
from moemb.trainers.encode_shards import EncodeError, read_result, shard_path
from moemb.trainers.repository import assemble_checkpoint

from .publish_cases import make_checkpoint


ITEMS, SHARD = 23, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_settings) -> Path:
    """A tiny model that loads through Sentence Transformers."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("source"), tiny_settings)
    return assemble_checkpoint(checkpoint, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def wanted(model) -> dict[str, np.ndarray]:
    """The vectors of the table's texts, straight from Sentence Transformers."""
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(str(model), trust_remote_code=True).encode_document(texts())
    return {f"row-{number}": vector for number, vector in enumerate(vectors)}


def texts() -> list[str]:
    return [f"text number {number} " + "and more " * (number % 7) for number in range(ITEMS)]


@pytest.fixture
def table(tmp_path) -> Path:
    """Two Parquet files with several row groups each."""
    folder = tmp_path / "table"
    folder.mkdir()
    content = pa.table({"id": [f"row-{n}" for n in range(ITEMS)], "text": texts(), "other": list(range(ITEMS))})
    pq.write_table(content.slice(0, 13), folder / "a.parquet", row_group_size=4)
    pq.write_table(content.slice(13), folder / "b.parquet", row_group_size=3)
    return folder


def arguments(source, output, model, *words: str) -> list[str]:
    sources = source if isinstance(source, list) else [source]
    return [
        "--input", *map(str, sources), "--output", str(output), "--model", str(model), "--shard-size", str(SHARD),
        "--threads", "1", *words,
    ]  # fmt: skip


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    encode.add_arguments(parser)
    return encode.run(parser.parse_args([*words]))


def read(output: Path) -> dict[str, np.ndarray]:
    """Ids and vectors of all shards; fails when an id is there twice."""
    rows = [row for path in sorted((output / "shards").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    found = {row["id"]: np.array(row["vector"], np.float32) for row in rows}
    assert len(found) == len(rows), "an id is there twice"
    return found


def same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, vector in found.items():
        np.testing.assert_allclose(vector, wanted[name], atol=1e-5, err_msg=name)


class TestTables:
    def test_parquet(self, table, tmp_path, model, wanted, capsys):
        assert run(*arguments(table, tmp_path / "out", model)) == 0
        same(read(tmp_path / "out"), wanted)
        assert "23 vectors of 64 columns in 5 shards" in capsys.readouterr().out
        names = sorted(path.name for path in (tmp_path / "out" / "shards").iterdir())
        assert names == [f"shard-0000{n}-of-00005.parquet" for n in range(5)], "no partial file is left"
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert (manifest["rows"], manifest["failed"], manifest["dimension"]) == (ITEMS, 0, 64)
        schema = pq.read_schema(tmp_path / "out" / "shards" / names[0])
        assert schema.field("vector").type == pa.list_(pa.float32(), 64) and schema.field("id").type == pa.string()

    def test_ranges_of_a_table(self, table):
        """Any range gives its rows, whatever files and row groups it crosses."""
        source = open_source([str(table)], table)
        source.prepare()
        assert isinstance(source, ParquetSource) and source.count() == ITEMS
        for start, stop in ((0, ITEMS), (3, 9), (12, 14), (13, 23), (22, 23), (5, 5)):
            rows = list(source.read(start, stop))
            assert [name for name, _ in rows] == [f"row-{n}" for n in range(start, stop)]
            assert [item["text"] for _, item in rows] == texts()[start:stop]

    def test_settings(self, table, tmp_path, model, wanted):
        words = (
            "--truncate-dim",
            "16",
            "--precision",
            "float16",
            "--side",
            "query",
            "--adaptive-compute",
            '{"top_k": 1}',
        )
        assert run(*arguments(table, tmp_path / "out", model, *words)) == 0
        found = read(tmp_path / "out")
        vector = found["row-3"]
        assert vector.shape == (16,) and abs(np.linalg.norm(vector) - 1) < 1e-2
        assert (
            pq.read_schema(next((tmp_path / "out" / "shards").iterdir())).field("vector").type.value_type
            == pa.float16()
        )
        assert np.abs(vector - wanted["row-3"][:16] / np.linalg.norm(wanted["row-3"][:16])).max() > 1e-3, (
            "the budget acts"
        )

    def test_columns(self, tmp_path):
        present = ["id", "text", "image", "caption"]
        assert Columns().resolve(present, "x") == Columns("id", "text", "image", None)
        assert Columns(text="caption").resolve(present, "x") == Columns("id", "caption", None, None)
        with pytest.raises(InputError, match="x has no column 'captoin'; did you mean 'caption'"):
            Columns(text="captoin").resolve(present, "x")
        with pytest.raises(InputError, match="no column text, image or video"):
            Columns().resolve(["id", "caption"], "x")
        assert Columns(None, "text").row({"text": "photo.png"}, 4) == ("4", {"text": "photo.png"}), (
            "a text, not a file"
        )
        stored = {"bytes": b"png", "path": None}
        assert Columns("id", None, "image").row({"id": 7, "image": stored}, 0) == ("7", {"image": b"png"})

    def test_a_datasets_source(self, tmp_path, model, wanted):
        lines = [json.dumps({"id": f"row-{n}", "text": text}) for n, text in enumerate(texts())]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        words = ("--format", "datasets", "--data-files", str(tmp_path / "rows.jsonl"), "--split", "train")
        assert run(*arguments("json", tmp_path / "out", model, *words)) == 0
        same(read(tmp_path / "out"), wanted)

    def test_a_saved_dataset_of_pictures(self, tmp_path, model):
        from datasets import Dataset, Features
        from datasets import Image as ImageFeature
        from sentence_transformers import SentenceTransformer

        draws = np.random.default_rng(0)
        pictures = [Image.fromarray(draws.integers(0, 256, (32, 48, 3), dtype=np.uint8)) for _ in range(3)]
        features = Features({"image": ImageFeature()})
        Dataset.from_dict({"image": pictures}, features=features).save_to_disk(tmp_path / "saved")
        assert run(*arguments(tmp_path / "saved", tmp_path / "out", model)) == 0
        vectors = SentenceTransformer(str(model), trust_remote_code=True).encode_document(pictures)
        same(read(tmp_path / "out"), {str(number): vector for number, vector in enumerate(vectors)})


class TestFiles:
    @pytest.fixture
    def corpus(self, tmp_path) -> Path:
        folder = tmp_path / "corpus"
        (folder / "deep").mkdir(parents=True)
        for number in range(7):
            (folder / f"note{number}.txt").write_text(f"note {number}")
        Image.new("RGB", (40, 40), (200, 30, 30)).save(folder / "deep" / "red.png")
        (folder / "deep" / "empty.png").touch()
        (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
        (folder / "table.xls").write_bytes(b"x")
        (folder / ".hidden.txt").write_text("x")
        return folder

    def test_a_folder(self, corpus, tmp_path, model, capsys):
        assert run(*arguments(corpus, tmp_path / "out", model)) == 0
        found = read(tmp_path / "out")
        assert found.keys() == {*(f"note{n}.txt" for n in range(7)), "deep/red.png"}
        said = capsys.readouterr().out
        assert "2 items have no vector" in said and "files of other kinds, left out: 1 .xls" in said
        lines = [json.loads(line) for path in (tmp_path / "out" / "failures").iterdir() for line in path.open()]
        reasons = {line["id"]: line["error"] for line in lines}
        assert reasons.keys() == {"deep/empty.png", "latin.txt"} and "empty" in reasons["deep/empty.png"]

    def test_stop_at_the_first_error(self, corpus, tmp_path, model):
        with pytest.raises(EncodeError, match="(deep/empty.png|latin.txt) cannot be embedded: .*--on-error skip"):
            run(*arguments(corpus, tmp_path / "out", model, "--on-error", "stop"))

    def test_files_that_went_away_since(self, corpus, tmp_path, model):
        output = tmp_path / "out"
        assert run(*arguments(corpus, output, model)) == 0
        (corpus / "note6.txt").unlink()
        last = max((output / "shards").iterdir())
        assert "note6.txt" in pq.read_table(last)["id"].to_pylist()
        last.unlink()
        assert run(*arguments(corpus, output, model)) == 0
        assert "note6.txt" not in read(output) and json.loads((output / "manifest.json").read_text())["failed"] == 3

    def test_a_corpus_of_nothing_but_errors(self, tmp_path, model):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
        with pytest.raises(EncodeError, match="none of the 1 items of shard 0 can be embedded, such as a.png"):
            run(*arguments(tmp_path / "bad", tmp_path / "out", model))

    @pytest.mark.parametrize(("name", "said"), [("none", "no such file"), ("void", "holds no items")])
    def test_nothing_there(self, tmp_path, model, name, said):
        (tmp_path / "void").mkdir()
        with pytest.raises((InputError, EncodeError), match=said):
            run(*arguments(tmp_path / name, tmp_path / "out", model, "--format", "files"))


class TestResuming:
    def test_only_what_is_missing_is_made(self, table, tmp_path, model, wanted):
        output = tmp_path / "out"
        assert run(*arguments(table, output, model)) == 0
        shards = sorted((output / "shards").iterdir())
        before = [path.stat().st_mtime_ns for path in shards]
        bits = shards[2].read_bytes()
        shards[2].unlink()
        shards[4].write_bytes(shards[4].read_bytes()[:-7])  # a copy that was cut off
        (output / "shards" / ".shard-00002-of-00005.parquet.host-1").write_bytes(b"left by a kill")
        assert read_result(output, 4, 5) is None
        assert run(*arguments(table, output, model)) == 0
        after = [path.stat().st_mtime_ns for path in shards]
        assert [a != b for a, b in zip(after, before)] == [False, False, True, False, True]
        assert shards[2].read_bytes() == bits, "the same file, whenever it is made"
        assert not list((output / "shards").glob(".*"))
        same(read(output), wanted)

    def test_other_settings_are_refused(self, table, tmp_path, model):
        output = tmp_path / "out"
        assert run(*arguments(table, output, model)) == 0
        with pytest.raises(EncodeError, match=r"begun with other settings \(truncate_dim\)"):
            run(*arguments(table, output, model, "--truncate-dim", "8"))
        pq.write_table(pa.table({"id": ["a"], "text": ["b"]}), table / "c.parquet")
        with pytest.raises(EncodeError, match="begun with another input"):
            run(*arguments(table, output, model))

    def test_one_run_at_a_time(self, table, tmp_path, model):
        import fcntl

        output = tmp_path / "out"
        output.mkdir()
        with (output / ".lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            with pytest.raises(EncodeError, match="another process encodes into"):
                run(*arguments(table, output, model))

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--batch-size", "0"), "--batch-size is 0"),
            (("--adaptive-compute", "{top_k"), "is not JSON"),
            (("--adaptive-compute", '{"topk": 2}'), "--adaptive-compute: .*topk"),
            (("--model", "no/such/model"), "neither a folder nor a Hub id"),
        ],
    )
    def test_refusals(self, table, tmp_path, model, words, said):
        with pytest.raises(EncodeError, match=said):
            run(*arguments(table, tmp_path / "out", model, *words))
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
class TestProcesses:
    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "moemb.trainers.cli", "encode", *words]

    def test_a_killed_run_goes_on(self, table, tmp_path, model, wanted):
        output = tmp_path / "out"
        words = arguments(table, output, model, "--batch-size", "1")
        process = subprocess.Popen(self.command(*words), stderr=subprocess.DEVNULL)
        wait_for(lambda: len(list((output / "shards").glob("shard-*"))) >= 2, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = {path: path.stat().st_mtime_ns for path in (output / "shards").glob("shard-*")}
        assert run(*words) == 0
        assert all(path.stat().st_mtime_ns == time for path, time in left.items()), "what was done is kept"
        same(read(output), wanted)

    def test_a_worker_that_dies_is_replaced(self, table, tmp_path, model, wanted):
        """Two processes, of which one is killed with a shard in hand."""
        output = tmp_path / "out"
        words = arguments(table, output, model, "--batch-size", "1", "--workers", "2")
        process = subprocess.Popen(self.command(*words), stderr=subprocess.DEVNULL)
        victim = wait_for(lambda: partial_of(output), process)
        os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=300) == 0
        same(read(output), wanted)
        assert not list((output / "shards").glob(".*"))


def partial_of(output: Path) -> int | None:
    """The process of a shard that is being written."""
    for path in (output / "shards").glob(".shard-*"):
        return int(path.name.rsplit("-", 1)[1])
    return None


def wait_for(condition, process, seconds: float = 300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the run ended before it could be killed"
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError("nothing happened")


def test_the_names_of_shards():
    assert shard_path(Path("o"), 7, 120).as_posix() == "o/shards/shard-00007-of-00120.parquet"
