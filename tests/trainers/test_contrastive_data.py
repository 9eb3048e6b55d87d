import datasets
import numpy as np
import pytest
from PIL import Image

from moemb.trainers.contrastive_data import PairDataset, RowError, load_datasets
from moemb.trainers.contrastive_sources import DataError, dataset_settings

from .contrastive_runs import write_data, write_jsonl, write_pictures


def pairs(name="d", hard_negatives=9, **settings):
    return PairDataset(name, 0, dataset_settings(name, settings), hard_negatives)


def jsonl(path, rows, **settings):
    return pairs(path="json", data_files=str(write_jsonl(path, rows)), **settings)


@pytest.mark.parametrize(
    "row",
    [
        {"anchor": "a", "positive": "b", "negative": "c"},
        {"query": "a", "document": "b", "negatives": ["c"]},
        {"question": "a", "answer": "b", "negative_1": "c"},
    ],
)
def test_usual_column_names_are_understood(tmp_path, row):
    found = jsonl(tmp_path / "x.jsonl", [row])[0]
    assert (found.query, found.positive, found.negatives) == ({"text": "a"}, {"text": "b"}, [{"text": "c"}])


def test_a_text_that_names_a_file_is_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path, 1)
    assert jsonl(tmp_path / "x.jsonl", [{"query": "0.png", "positive": "b"}])[0].query == {"text": "0.png"}


def test_columns_make_mixed_items_and_negatives(tmp_path):
    write_pictures(tmp_path, 3)
    rows = [{"q": "which", "at": "0.png", "doc": "1.png", "bad": ["2.png", "0.png"], "why": ["no", ""], "c": 7}]
    columns = {
        "query": {"image": "at", "text": "q"},
        "positive": {"image": "doc"},
        "negatives": {"image": "bad", "text": "why"},
        "key": "c",
    }
    row = jsonl(tmp_path / "x.jsonl", rows, columns=columns, media_root=str(tmp_path))[0]
    assert row.query == {"image": str(tmp_path / "0.png"), "text": "which"} and row.key == "7"
    assert row.negatives == [{"image": str(tmp_path / "2.png"), "text": "no"}, {"image": str(tmp_path / "0.png")}]


def test_as_many_negatives_as_wanted_are_taken(tmp_path):
    rows = [{"query": "a", "positive": "b", "negative": "c", "negative_1": None, "negative_2": "e"}]
    dataset = jsonl(tmp_path / "x.jsonl", rows)
    assert dataset[0].negatives == [{"text": "c"}, {"text": "e"}]
    dataset.hard_negatives = 1
    assert dataset[0].negatives == [{"text": "c"}]
    dataset.hard_negatives = 0
    assert dataset[0].negatives == []


def test_encoded_pictures_keep_their_bytes(tmp_path):
    picture = Image.fromarray(np.full((16, 16, 3), 9, np.uint8))
    made = datasets.Dataset.from_dict({"query": ["a"], "positive": [picture]}).cast_column(
        "positive", datasets.Image()
    )
    made.to_parquet(str(tmp_path / "x.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for settings in (
        {"path": "parquet", "data_files": str(tmp_path / "x.parquet")},
        {"path": str(tmp_path / "saved")},
    ):
        assert pairs(**settings)[0].positive["image"].startswith(b"\x89PNG")


def test_image_folders_load(tmp_path):
    write_pictures(tmp_path / "red", 2)
    write_jsonl(tmp_path / "red" / "metadata.jsonl", [{"file_name": f"{n}.png", "text": f"t{n}"} for n in range(2)])
    dataset = pairs(path="imagefolder", data_dir=str(tmp_path / "red"), columns={"query": "text", "positive": "image"})
    row = dataset[1]
    assert row.query == {"text": "t1"} and row.positive["image"].endswith("1.png")


def mmeb_row(**changes):
    row = {"qry": "<|image_1|>\nRepresent the image.", "qry_image_path": "0.png", "pos_text": "a cat",
           "pos_image_path": "", "neg_text": "", "neg_image_path": "1.png"}  # fmt: skip
    return row | changes


def test_the_official_mmeb_layout(tmp_path):
    write_pictures(tmp_path / "images", 2)
    rows = [
        mmeb_row(),
        mmeb_row(qry="", qry_image_path=""),
        mmeb_row(qry="What is in <|image_1|>\nnow?", neg_text="x <|image_1|>", neg_image_path=""),
    ]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(str(tmp_path / "original.parquet"))
    settings = {"path": "parquet", "data_files": {"original": str(tmp_path / "original.parquet")}}
    dataset = pairs(**settings, split="original", layout="mmeb", media_root=str(tmp_path / "images"))
    assert len(dataset) == 2
    first, second = str(tmp_path / "images" / "0.png"), str(tmp_path / "images" / "1.png")
    assert dataset[0].query == {"image": first, "text": "Represent the image."}
    assert dataset[0].positive == {"text": "a cat"} and dataset[0].negatives == [{"image": second}]
    assert dataset[1].query == [{"text": "What is in"}, {"image": first}, {"text": "now?"}]
    assert dataset[1].negatives == [{"text": "x"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "", "positive": "b"}, "row 1: the query is empty"),
        ({"query": "a", "positive": None}, "row 1: the positive is empty"),
    ],
)
def test_an_empty_side_names_its_row(tmp_path, row, message):
    dataset = jsonl(tmp_path / "x.jsonl", [{"query": "a", "positive": "b"}, row])
    assert dataset[0].query == {"text": "a"}
    with pytest.raises(RowError, match=message):
        dataset[1]


def test_a_missing_picture_names_its_row_and_file(tmp_path):
    rows = [{"query": "a", "file": "gone.png"}]
    dataset = jsonl(tmp_path / "x.jsonl", rows, columns={"query": "query", "positive": {"image": "file"}})
    with pytest.raises(RowError, match=r"data set 'd', row 0 \(positive, column 'file'\).*gone.png.*media_root"):
        dataset[0]


def test_a_number_is_no_text(tmp_path):
    dataset = jsonl(tmp_path / "x.jsonl", [{"q": 3, "p": "b"}], columns={"query": {"text": "q"}, "positive": "p"})
    with pytest.raises(RowError, match=r"row 0 \(query, column 'q'\): it is 3 \(int\)"):
        dataset[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pth": "json"}, "unknown key 'pth'; did you mean 'path'"),
        ({}, "has no path"),
        ({"path": "json", "layout": "mmb"}, "layout 'mmb'"),
        ({"path": "json", "weight": 0}, "weight 0"),
        ({"path": "json", "data_files": "nowhere.jsonl"}, "cannot be loaded"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(DataError, match=message):
        load_datasets({"d": settings})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query": "q", "positive": "pp"}, "no column 'pp' for its positive; did you mean 'p'"),
        ({"query": "q"}, "name no positive"),
        ({"query": "q", "positiv": "p"}, "'positiv'; did you mean 'positive'"),
        ({"query": "q", "positive": {"picture": "p"}}, "'picture'"),
        ({"query": "q", "positive": ["p"]}, "the positive is"),
        (None, "none of them says that it is the query"),
    ],
)
def test_columns_that_are_not_there_are_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        jsonl(tmp_path / "x.jsonl", [{"q": "a", "p": "b"}], columns=columns)


def test_the_data_of_the_other_tests(tmp_path):
    texts, captions = load_datasets(write_data(tmp_path), hard_negatives=2)
    assert (len(texts), len(captions)) == (8, 10) and captions[9].key == "1"
    assert [len(texts[n].negatives) for n in range(3)] == [1, 2, 1]


def test_clips_are_lists_of_pictures_and_their_negatives_lists_of_clips(tmp_path):
    shades = [Image.fromarray(np.full((16, 16, 3), shade, np.uint8)) for shade in range(4)]
    rows = {"query": ["a"], "clip": [shades[:2]], "others": [[shades[2:], shades[1:3]]]}
    features = datasets.Features(
        query=datasets.Value("string"),
        clip=datasets.List(datasets.Image()),
        others=datasets.List(datasets.List(datasets.Image())),
    )
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "x.parquet"))
    columns = {"query": "query", "positive": {"video": "clip"}, "negatives": {"video": "others"}}
    row = pairs(path="parquet", data_files=str(tmp_path / "x.parquet"), columns=columns)[0]
    assert [len(row.positive["video"]), len(row.negatives)] == [2, 2]
    assert all(isinstance(frame, bytes) for frame in row.positive["video"] + row.negatives[1]["video"])
