from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from moemb.trainers.contrastive_batches import RowEncoder
from moemb.trainers.contrastive_data import load_datasets
from moemb.trainers.corpus_export import CorpusExport, encoded, export_corpus

from ..processors import lean_processor


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, fake_corpus):
    folder = tmp_path_factory.mktemp("export")
    fake_corpus.folder = folder
    (folder / "ATTRIBUTION.md").write_text("who drew it")
    counts = export_corpus(fake_corpus, folder / "sets", progress=False)
    return folder / "sets", counts


def test_pictures_lose_no_bit():
    import io

    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded(pixels)["bytes"]))), pixels)


def test_every_set_is_written(exported, fake_corpus):
    folder, counts = exported
    assert set(counts) == {"captions", "foreign", "icons", "styles", "glosses", "headings", "edits", "motions"}
    assert counts["captions"] == {"train": 40, "validation": 20} and counts["icons"] == {"train": 6}
    assert (folder / "ATTRIBUTION.md").read_text() == "who drew it"


def test_no_test_item_and_no_held_out_artist_is_written(fake_corpus):
    for split in ("train", "validation"):
        numbers = {number for number, _ in CorpusExport(fake_corpus, split).rows}
        assert {fake_corpus.image_rows[number]["split"] for number in numbers} == {split}
        assert all(fake_corpus.image_rows[number]["source"] != "twemoji" for number in numbers)


def test_the_recipes_data_sets_load_and_encode(exported):
    folder, _ = exported
    recipe = (ROOT / "recipes/moemb-mini/lora.yaml").read_text().replace("~/.cache/moemb/mini-datasets", str(folder))
    recipe = yaml.safe_load(recipe)
    for kind in ("train_datasets", "eval_datasets"):
        sets = load_datasets(recipe[kind], hard_negatives=1)
        assert [dataset.name for dataset in sets] == list(recipe[kind])
        batch = RowEncoder(lean_processor(), sets)([dataset[0] for dataset in sets])["batch"]
        assert len(batch.query) == len(sets)
        if kind == "train_datasets":
            with_negatives = [dataset.name for dataset in sets if dataset[0].negatives]
            assert with_negatives == ["edits", "motions"]
            edit = sets[2][0]
            assert set(edit.query) == {"image", "text"}
