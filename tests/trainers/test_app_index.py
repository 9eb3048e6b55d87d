"""The index follows its folder: incremental, resumable, and nothing is left out without a word."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moemb.trainers import rag_index
from moemb.trainers.rag_index import Indexer, IndexingError, embed_each
from moemb.trainers.rag_readers import MODALITIES
from moemb.trainers.rag_store import IndexFolderError, Store, unit_id

from .rag_samples import BLUE, DIMENSION, FACTS, GREEN, RED, FakeEncoder, fill, pdf, png, vector_of


@pytest.fixture
def folder(tmp_path):
    fill(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "index", FACTS)
    yield store
    store.close()


def paths_of(store):
    rows = store.units.search().select(["path", "modality", "part"]).limit(None).to_list()
    found = [(row["path"], row["modality"], row["part"]) for row in rows]
    assert len(found) == len(set(found)), "a unit is in the index twice"
    return sorted(found)


ALL = [
    ("clip.mp4", "clip", 1),
    ("moving.gif", "clip", 1),
    ("notes.md", "text", 1),
    ("red.png", "image", 1),
    ("sub/green.png", "image", 1),
    ("two.pdf", "page", 1),
    ("two.pdf", "page", 2),
    ("two.pdf", "text", 1),
    ("two.pdf", "text", 2),
]


def test_a_folder_is_indexed_once_and_then_only_what_changes(store, folder):
    indexer = Indexer(store, FakeEncoder(), folder)
    first = indexer.update()
    assert (first.indexed, first.units, first.unchanged, first.skipped) == (6, 9, 0, {})
    assert paths_of(store) == ALL and store.counts() == dict(zip(MODALITIES, (2, 2, 3, 2), strict=True))
    second = indexer.update()
    assert (second.indexed, second.units, second.unchanged) == (0, 0, 6) and indexer.encoder.embedded == 9
    (folder / "red.png").write_bytes(png(BLUE, (32, 32)))
    (folder / "two.pdf").write_bytes(pdf(["one page now"]))
    (folder / "notes.md").unlink()
    (folder / "new.txt").write_text("Fresh snow.")
    third = indexer.update()
    assert (third.indexed, third.unchanged, third.removed) == (3, 3, 1)
    gone = {("notes.md", "text", 1), ("two.pdf", "page", 2), ("two.pdf", "text", 2)}
    assert paths_of(store) == sorted({*ALL, ("new.txt", "text", 1)} - gone)
    row = store.get(unit_id("red.png", "image", 1), ["vector"])
    assert np.allclose(row["vector"], vector_of({"image": np.full((1, 1, 3), BLUE)}), atol=1e-6)


def test_a_touched_or_renamed_file_is_not_embedded_again(store, folder):
    indexer = Indexer(store, FakeEncoder(), folder)
    indexer.update()
    before = indexer.encoder.embedded
    os.utime(folder / "red.png", (1, 1))
    (folder / "two.pdf").rename(folder / "sub/moved.pdf")
    report = indexer.update()
    assert report.renamed == 1 and report.removed == 1 and indexer.encoder.embedded == before
    assert [path for path, *_ in paths_of(store)].count("sub/moved.pdf") == 4
    assert store.records()["red.png"].modified == 10**9
    row = store.get(unit_id("sub/moved.pdf", "text", 2), ["text", "page"])
    assert row == {"text": "plums", "page": 2}


def test_broken_files_are_reported_and_the_rest_indexed(store, folder):
    (folder / "corrupt.pdf").write_bytes(pdf(["a"])[:100])
    (folder / "empty.png").touch()
    (folder / "half.png").write_bytes(png(RED, (300, 300))[:200])
    (folder / "letter.docx").write_bytes(b"PK")
    indexer = Indexer(store, FakeEncoder(), folder)
    report = indexer.update()
    assert report.indexed == 6 and paths_of(store) == ALL
    assert set(report.skipped) == {"corrupt.pdf", "empty.png", "half.png", "letter.docx"}
    assert "0 bytes" in report.skipped["empty.png"] and ".docx" in report.skipped["letter.docx"]
    assert indexer.update().skipped == report.skipped, "what is wrong is said every time"
    (folder / "half.png").write_bytes(png(GREEN))
    mended = indexer.update()
    assert mended.indexed == 1 and "half.png" not in mended.skipped


def test_a_file_that_breaks_loses_its_old_vectors(store, folder):
    indexer = Indexer(store, FakeEncoder(), folder)
    indexer.update()
    (folder / "red.png").write_bytes(b"not a picture any more")
    report = indexer.update()
    assert "red.png" in report.skipped and ("red.png", "image", 1) not in paths_of(store)


def test_an_item_the_model_refuses_does_not_take_its_batch_along(store, folder):
    encoder = FakeEncoder()
    embed = encoder.documents

    def picky(items, budget=None):
        if any("text" in item and item["text"] == "plums" for item in items):
            raise ValueError("item 0: it is too sweet")
        vectors = embed(items, budget)
        for row, item in enumerate(items):
            if "text" in item and "harbour" in item["text"]:
                vectors[row] = np.nan
        return vectors

    encoder.documents = picky
    report = Indexer(store, encoder, folder).update()
    assert report.skipped == {
        "notes.md": "the model gave no finite vector",
        "two.pdf": "only in part: page 2 of 2: it is too sweet",
    }
    assert paths_of(store) == [unit for unit in ALL if unit not in (("notes.md", "text", 1), ("two.pdf", "text", 2))]


def test_a_folder_that_changes_while_it_is_indexed(store, folder):
    for number in range(40):
        (folder / f"n{number:02d}.png").write_bytes(png((number + 1, 0, 0)))
    encoder = FakeEncoder(batch_size=4)

    def meddle():
        if len(encoder.batches) == 2:
            (folder / "n39.png").unlink()
            (folder / "n38.png").write_bytes(png(BLUE, (20, 20)))
            (folder / "late.png").write_bytes(png(GREEN, (10, 10)))
            # read already, waiting to be noted as done:
            (folder / "n03.png").write_bytes(png(GREEN, (30, 30)))

    encoder.after = meddle
    indexer = Indexer(store, encoder, folder)
    first = indexer.update()
    assert "n39.png" in first.postponed and first.complete
    second = indexer.update()
    assert not second.postponed and not second.skipped and second.removed == 0
    assert indexer.update().unchanged == 6 + 39 + 1
    assert {path for path, *_ in paths_of(store)} == {str(p.relative_to(folder)) for p in folder.rglob("*.*")}
    for name, colour in (("n38.png", BLUE), ("n03.png", GREEN), ("late.png", GREEN)):
        row = store.get(unit_id(name, "image", 1), ["vector"])
        assert np.allclose(row["vector"], vector_of({"image": np.full((1, 1, 3), colour)}), atol=1e-6)


def test_files_in_a_folder_that_cannot_be_listed_are_kept(store, folder, monkeypatch):
    indexer = Indexer(store, FakeEncoder(), folder)
    indexer.update()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, os.strerror(13))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    report = indexer.update()
    assert report.removed == 0 and paths_of(store) == ALL and "cannot be listed" in report.skipped["sub"]
    monkeypatch.undo()
    assert indexer.update().skipped == {}


def test_stopping_and_going_on(store, folder):
    for number in range(30):
        (folder / f"n{number:02d}.txt").write_text(f"text {number}")
    encoder = FakeEncoder(batch_size=4)
    indexer = Indexer(store, encoder, folder)
    encoder.after = indexer.stop
    first = indexer.update()
    assert not first.complete and first.units == 4
    encoder.after = lambda: None
    rest = Indexer(store, encoder, folder).update()
    assert rest.complete and encoder.embedded == 39 and len(paths_of(store)) == 39


def test_a_full_disk_ends_with_a_clear_error(store, folder, monkeypatch):
    def full(entries, vectors):
        raise RuntimeError("lance error: LanceError(IO): Generic LocalFileSystem error: No space left on device")

    monkeypatch.setattr(store, "add", full)
    with pytest.raises(IndexingError, match="No space left"):
        Indexer(store, FakeEncoder(), folder).update()


KILLED = """
import sys, time
from pathlib import Path
from tests.trainers.rag_samples import FACTS, FakeEncoder
from moemb.trainers.rag_index import Indexer
from moemb.trainers.rag_store import Store
encoder = FakeEncoder(batch_size=4)
encoder.after = lambda: (print(encoder.embedded, flush=True), time.sleep(0.02))
Indexer(Store(Path(sys.argv[1]), FACTS), encoder, Path(sys.argv[2])).update()
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path, folder):
    (folder / "long.pdf").write_bytes(pdf([f"page {n}" for n in range(40)]))
    for number in range(60):
        (folder / f"n{number:02d}.txt").write_text(f"text {number}")
    total = 9 + 80 + 60
    command = [sys.executable, "-c", KILLED, str(tmp_path / "index"), str(folder)]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        for line in process.stdout:
            if int(line) >= 100:  # inside the long PDF, which comes last but one
                process.send_signal(signal.SIGKILL)
                break
    store = Store(tmp_path / "index", FACTS)
    kept = len(paths_of(store))
    assert 90 <= kept < total
    encoder = FakeEncoder(batch_size=4)
    report = Indexer(store, encoder, folder).update()
    assert encoder.embedded == total - kept, "vectors that were committed are not made again"
    assert len(paths_of(store)) == total and report.skipped == {}
    assert Indexer(store, encoder, folder).update().unchanged == 67
    store.close()


def test_two_writers_of_one_index_are_refused(tmp_path, store):
    with pytest.raises(IndexFolderError, match="in use by another"):
        Store(tmp_path / "index", FACTS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"probe": np.roll(np.eye(3, DIMENSION), 1, axis=0).tolist(), "model": "other"}, "'fake'.*'other'"),
        ({"dimension": 8}, "dimension 16, not 8"),
    ],
)
def test_an_index_of_another_model_is_not_mixed(tmp_path, store, change, words):
    store.close()
    with pytest.raises(IndexFolderError, match=words + ".*--rebuild"):
        Store(tmp_path / "index", {**FACTS, **change})


def test_the_same_model_under_another_name_is_the_same(tmp_path, store):
    store.close()
    slightly = (np.eye(3, DIMENSION) + 1e-3).tolist()
    Store(tmp_path / "index", {**FACTS, "model": "elsewhere/fake", "probe": slightly}).close()


def test_ranking_is_that_of_a_product_of_all_vectors(store):
    from moemb.trainers.rag_readers import Unit

    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, DIMENSION)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    kinds = [MODALITIES[number % 4] for number in range(500)]
    entries = [(f"{'ab'[n % 2]}/o'{n}.png", "d", Unit(kind, 1, None)) for n, kind in enumerate(kinds)]
    store.add(entries[:250], vectors[:250])
    store.add(entries[250:], vectors[250:])
    query = vectors[7] + 0.5 * vectors[8]
    query /= np.linalg.norm(query)
    scores = vectors @ query
    for modalities, folder in ((MODALITIES, ""), (("image", "clip"), ""), (MODALITIES, "b"), (("text",), "a/")):
        fits = [n for n in range(500) if kinds[n] in modalities and entries[n][0].startswith(folder.rstrip("/"))]
        best = sorted(fits, key=lambda n: -scores[n])[:20]
        hits = store.search(query, 20, modalities, folder)
        assert [hit.path for hit in hits] == [entries[n][0] for n in best]
        assert np.allclose([hit.score for hit in hits], scores[best], atol=1e-5)
    assert store.search(query, 5, ()) == []


def test_searching_while_indexing_sees_whole_versions(store, folder):
    for number in range(120):
        (folder / f"n{number:03d}.txt").write_text(f"text {number}")
    encoder = FakeEncoder(batch_size=8)
    encoder.after = lambda: time.sleep(0.005)
    indexer = Indexer(store, encoder, folder)
    sizes, errors, done = [], [], threading.Event()

    def look():
        try:
            while not done.is_set():
                sizes.append(len(store.search(np.eye(DIMENSION, dtype=np.float32)[0], 500)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    indexer.update()
    done.set()
    for thread in threads:
        thread.join()
    assert not errors and len(set(sizes)) > 2 and max(sizes) <= 129


def test_embedding_alone_names_the_reason():
    encoder = FakeEncoder()
    encoder.documents = lambda items, budget: (_ for _ in ()).throw(MemoryError("out of memory"))
    assert embed_each(encoder, ["a"]) == ([None], ["out of memory"])


@pytest.mark.slow
def test_ten_thousand_files(store, tmp_path):
    folder = tmp_path / "many"
    image = png(RED, (8, 8))
    for number in range(10_000):
        path = folder / f"{number % 50:02d}" / (f"{number}.png" if number % 4 == 0 else f"{number}.txt")
        if number < 50:
            path.parent.mkdir(parents=True)
        path.write_bytes(image if number % 4 == 0 else f"text number {number}".encode())
    encoder = FakeEncoder(batch_size=128)
    indexer = Indexer(store, encoder, folder)
    seen = []
    report = indexer.update(lambda progress: seen.append((progress.done, progress.total)))
    assert report.indexed == 10_000 and encoder.embedded == 10_000 and seen[-1] == (10_000, 10_000)
    assert store.counts() == dict(zip(MODALITIES, (2500, 0, 7500, 0), strict=True))
    again = indexer.update()
    assert again.unchanged == 10_000 and encoder.embedded == 10_000 and again.seconds < report.seconds / 2
    (hit, *_) = store.search(vector_of("text number 7777"), 5, ("text",))
    assert hit.path == "27/7777.txt" and hit.score == pytest.approx(1, abs=1e-5)


def test_what_waits_to_be_embedded_is_bounded(store, tmp_path, monkeypatch):
    monkeypatch.setattr(rag_index, "_PENDING_BYTES", 3 * 64 * 48 * 3 - 1)
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png((number, 9, 9)))
    encoder = FakeEncoder(batch_size=100)
    Indexer(store, encoder, tmp_path).update()
    assert max(encoder.batches) == 3
