"""Where calibration items come from, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from moemb.trainers import corpus, evaluation_tasks
from moemb.trainers.calibration_data import (
    CORPUS_SOURCES,
    CalibrationDataError,
    data_fingerprint,
    item_of_parts,
    read_calibration_data,
)


@pytest.fixture
def rows(tmp_path):
    """A file of twelve items, one with a picture."""
    Image.fromarray(np.full((32, 32, 3), 200, np.uint8)).save(tmp_path / "red.png")
    lines = [{"text": f"text {number}", "side": ("query", "document")[number % 2]} for number in range(11)]
    lines.append({"text": "a caption", "image": "red.png"})
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    return path


def texts(items) -> set[str]:
    return {item.value if isinstance(item.value, str) else item.value["text"] for item in items}


def test_lines_of_a_file(rows):
    items = read_calibration_data({str(rows): 12})
    assert texts(items) == {*(f"text {number}" for number in range(11)), "a caption"}
    sides = [item.side for item in items]
    assert sides == ["query"] * 6 + ["document"] * 6
    (picture,) = [item for item in items if isinstance(item.value, dict)]
    assert picture.value == {"text": "a caption", "image": str(rows.parent / "red.png")}
    assert picture.side == "document"


def test_draws_depend_on_the_seed_alone(rows):
    first, again, other = (read_calibration_data({str(rows): 5}, seed) for seed in (0, 0, 1))
    assert len(first) == 5 and len(texts(first)) == 5
    assert first == again and data_fingerprint(first) == data_fingerprint(again)
    assert texts(first) != texts(other)


def test_a_changed_picture_is_other_data(rows):
    before = data_fingerprint(read_calibration_data({str(rows): 12}))
    Image.fromarray(np.full((32, 32, 3), 201, np.uint8)).save(rows.parent / "red.png")
    assert data_fingerprint(read_calibration_data({str(rows): 12})) != before


def test_sources_of_the_corpus(fake_corpus, monkeypatch):
    monkeypatch.setattr(corpus, "load_corpus", lambda folder: fake_corpus)
    entries = {f"corpus:{name}": 9 for name in CORPUS_SOURCES}
    items = read_calibration_data(entries)
    assert len(items) == 9 * len(CORPUS_SOURCES)
    assert items[0].side == "query" and items[-1].side == "document"
    kinds = {tuple(sorted(i.value)) if isinstance(i.value, dict) else "text" for i in items}
    assert kinds == {"text", ("image",), ("video",), ("image", "text")}
    assert data_fingerprint(items) == data_fingerprint(read_calibration_data(entries))
    held_out = {row["text"] for row in fake_corpus.image_rows if row["split"] != "train"}
    held_out -= {row["text"] for row in fake_corpus.image_rows if row["split"] == "train"}
    assert held_out and not held_out & texts(i for i in items if not isinstance(i.value, dict) or "text" in i.value)


def test_both_sides_of_a_task(monkeypatch):
    task = SimpleNamespace(
        queries=[{"text": "q"}], documents=[{"text": "d"}, {"image": np.zeros((8, 8, 3), np.uint8)}]
    )
    monkeypatch.setattr(evaluation_tasks.TaskSource, "load", lambda self, name: task)
    items = read_calibration_data({"task:wiki": 3})
    assert [item.side for item in items] == ["query", "document", "document"]


def test_parts_of_one_kind_do_not_hide_each_other():
    with pytest.raises(CalibrationDataError, match="several parts of one kind"):
        item_of_parts(["a", "b"])


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({}, r"calibration_data is empty: name items"),
        ({"corpus:emoij": 3}, r"'corpus:emoij', but there is no such source; did you mean 'emoji'"),
        ({"task:stlye": 3}, r"no task 'stlye'; did you mean 'style'"),
        ({"emoji": 3}, r"has 'emoji': write corpus:SOURCE, task:NAME, or the path of a .jsonl file"),
        ({"nowhere.jsonl": 3}, "'nowhere.jsonl', which is no file"),
        ({"corpus:emoji": 0}, "asks for 0 items of 'corpus:emoji': the least is 1"),
    ],
)
def test_unknown_entries_are_named(entries, match):
    with pytest.raises(ValueError, match=match):
        read_calibration_data(entries)


def test_more_items_than_there_are(rows):
    with pytest.raises(CalibrationDataError, match=r"asks for 13 items of '.*items.jsonl', which has 12"):
        read_calibration_data({str(rows): 13})


def test_a_task_that_is_not_built(monkeypatch, tmp_path):
    with pytest.raises(CalibrationDataError, match="'task:wiki', which is not there: build it with"):
        read_calibration_data({"task:wiki": 1}, corpus=tmp_path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", ":2 is not JSON"),
        ("[1]", ":2 is a list, not an object"),
        ('{"text": "a", "side": "left"}', "has the side 'left'; write one of"),
        ('{"txet": "a"}', "has the key 'txet'; did you mean 'text'"),
        ('{"text": 3}', "'text' is 3, but must be a text"),
        ('{"image": "no.png"}', "no.png is no file"),
        ('{"side": "query"}', "holds no part of an item"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, match):
    path = tmp_path / "items.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(CalibrationDataError, match=match):
        read_calibration_data({str(path): 1})
