import json

import numpy as np
import pytest
from PIL import Image

from moemb.trainers.corpus_gallery import GalleryError, load_gallery, load_sheet, save_sheet
from moemb.trainers.corpus_render import MOTIONS
from moemb.trainers.corpus_sources import PACKAGES, file_sha256
from moemb.trainers.corpus_split import concept_family, family_split
from moemb.trainers.corpus_tasks import TASK_LANGUAGES, EvaluationTask


SIZES = {
    "emoji-artist": (1403, 1906),
    "emoji-flags": (250, 1906),
    "emoji-concept": (161, 161),
    "emoji-concept-full": (161, 1906),
    "emoji-caption": (1814, 1906),
    "emoji-subgroup": (161, 98),
    "style": (155, 1594),
    "xling-image": (9624, 1906),
    "xling-text": (1103, 1906),
    "skin-edit": (1853, 2028),
    "clip": (178, 187),
    "motion": (1288, 1288),
    "strip": (499, 499),
}


@pytest.fixture(scope="module")
def gallery():
    return load_gallery()


@pytest.fixture(scope="module")
def tasks(gallery):
    return {name: gallery.task(name) for name in gallery.task_names}


def test_the_shipped_files_are_whole_small_and_permissive(gallery):
    files = gallery.about["files"]
    assert {path.name for path in gallery.folder.iterdir()} == {*files, "gallery.json"}
    assert all(file_sha256(gallery.folder / name) == digest for name, digest in files.items())
    assert sum(path.stat().st_size for path in gallery.folder.iterdir()) <= 8_000_000
    licences = {source["licence"] for source in gallery.about["sources"].values()}
    assert not any("SA" in licence or "GPL" in licence for licence in licences)
    attribution = (gallery.folder / "ATTRIBUTION.md").read_text()
    assert all(PACKAGES[key].credit in attribution for key in gallery.about["sources"])


def test_tasks_have_the_sizes_the_documents_quote(tasks):
    assert {name: (len(task.queries), len(task.documents)) for name, task in tasks.items()} == SIZES
    assert all(task.name == name for name, task in tasks.items())


def test_the_split_in_the_gallery_is_the_rule(gallery):
    for concept in gallery.concepts.values():
        base = gallery.concepts[concept["base"]] if concept["base"] else concept
        assert concept["family"] == concept_family(base["en"])
        assert concept["split"] == family_split(concept["family"])
        assert not (concept["trained"] and concept["split"] != "train")


def texts(items):
    return [item["text"] for item in items]


def test_unseen_tasks_ask_only_for_unseen_concepts(gallery, tasks):
    bases = [c for c in gallery.concepts.values() if c["base"] is None]
    unseen = {c["en"] for c in bases if c["split"] == "test"}
    trained = {c["en"] for c in bases if c["trained"]}
    assert set(texts(tasks["emoji-concept"].queries)) <= unseen
    assert texts(tasks["emoji-concept"].queries) == texts(tasks["emoji-concept-full"].queries)
    assert {
        text.rsplit(f" {kind}", 1)[0]
        for text in texts(tasks["motion"].queries)
        for kind in MOTIONS
        if text.endswith(kind)
    } <= unseen
    assert set(texts(tasks["emoji-artist"].queries)) <= trained
    validation = {c["en"] for c in bases if c["split"] == "validation"}
    for task in tasks.values():
        assert not validation & {query.get("text") for query in task.queries}


def test_near_duplicates_of_training_pictures_are_in_no_task(gallery, tasks):
    near = [picture for picture in gallery.pictures["twemoji"] if picture.near_duplicate]
    assert len(near) == gallery.about["near_duplicates_left_out"] > 0
    for picture in near:
        assert not any(picture.pixels is document.get("image") for document in tasks["emoji-artist"].documents)


def test_items_hold_pixels_of_the_right_form(tasks):
    for task in tasks.values():
        for item in (*task.queries, *task.documents):
            assert item and set(item) <= {"text", "image", "video"}
            if "image" in item:
                assert item["image"].dtype == np.uint8 and item["image"].shape in ((64, 64, 3), (32, 128, 3))
            if "video" in item:
                assert item["video"].dtype == np.uint8 and item["video"].shape == (8, 64, 64, 3)


def test_each_label_finds_its_own_picture(gallery, tasks):
    task = tasks["emoji-artist"]
    concept = next(key for key, c in gallery.concepts.items() if c["en"] == "rocket")
    picture = next(p for p in gallery.pictures["twemoji"] if p.concept == concept)
    (answer,) = task.relevant[texts(task.queries).index("rocket")]
    assert task.documents[answer]["image"] is picture.pixels
    twins = [answers for answers in tasks["emoji-flags"].relevant if len(answers) > 1]
    assert twins, "flags that are equal pixel for pixel count as one answer"


def test_cross_lingual_queries_are_not_spelt_as_in_english(gallery, tasks):
    task = tasks["xling-text"]
    assert tuple(task.groups) == TASK_LANGUAGES and sum(map(len, task.groups.values())) == len(task.queries)
    for query, answers in zip(task.queries, task.relevant, strict=True):
        assert query["text"].casefold() != task.documents[answers[0]]["text"].casefold()
    assert len(task.clusters) == len(task.queries) and max(task.clusters) + 1 == len(set(task.clusters))


def test_edits_ask_with_the_base_picture_and_the_tone(tasks):
    task = tasks["skin-edit"]
    assert set(task.queries[0]) == {"image", "text"} and "dark skin tone" in texts(task.queries)
    pool = {id(document["image"]) for document in task.documents}
    assert not any(id(query["image"]) in pool for query in task.queries)
    assert set(task.groups) == {"trained concepts", "unseen concepts"}


def test_clips_move(tasks):
    moving = [np.abs(np.diff(d["video"].astype(int), axis=0)).mean() for d in tasks["clip"].documents]
    assert min(moving) > 0.3


def test_unknown_and_missing_are_named(gallery, tmp_path):
    with pytest.raises(GalleryError, match="'emoji-artst'; did you mean 'emoji-artist'"):
        gallery.task("emoji-artst")
    with pytest.raises(GalleryError, match="moemb data --gallery"):
        load_gallery(tmp_path)


def test_a_task_checks_its_answers():
    with pytest.raises(ValueError, match=r"query 1 has the answers \[2\] of 2 documents"):
        EvaluationTask("x", "1", "text->text", "IND", "", [{"text": "a"}] * 2, [{"text": "b"}] * 2, [[0], [2]], "MIT")
    with pytest.raises(ValueError, match="2 queries but 1"):
        EvaluationTask("x", "1", "text->text", "IND", "", [{"text": "a"}] * 2, [{"text": "b"}] * 2, [[0]], "MIT")


@pytest.mark.parametrize(("count", "shape"), [(1, (64, 64)), (65, (64, 64)), (40, (32, 128))])
def test_sheets_give_back_their_tiles(tmp_path, count, shape):
    rows = np.linspace(40, 220, count)[:, None, None, None]
    tiles = np.broadcast_to(rows, (count, *shape, 3)).astype(np.uint8)
    save_sheet(tmp_path / "sheet.webp", tiles)
    read = load_sheet(tmp_path / "sheet.webp", count, *shape)
    assert read.shape == tiles.shape and np.abs(read[:, 8:-8, 8:-8].astype(int) - tiles[:, 8:-8, 8:-8]).max() <= 8


def test_a_cut_sheet_is_said(gallery, tmp_path):
    for path in gallery.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with Image.open(tmp_path / "clips.webp") as image:
        image.crop((0, 0, image.width, 80)).save(tmp_path / "clips.webp", "WEBP")
    with pytest.raises(GalleryError, match=r"clips\.webp holds 51 tiles.*187 items of 8"):
        load_gallery(tmp_path).pictures  # noqa: B018


def test_the_concepts_file_is_plain_json_with_labels(gallery):
    concepts = json.loads((gallery.folder / "concepts.json").read_text(encoding="utf-8"))
    assert len(concepts) == 3944 and concepts["1f680"]["labels"]["fr"] == "fusée"
