import numpy as np
import pytest
import torch

from modeling_moemb.items_moemb import as_batch
from moemb.trainers.contrastive_batches import Normalisation, RowEncoder, model_inputs, split_into_chunks
from moemb.trainers.contrastive_data import Row, RowError, load_datasets

from ..processors import lean_processor
from .contrastive_runs import small_repository, write_data


def picture(seed, height=32, width=48):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return load_datasets(write_data(tmp_path_factory.mktemp("data")), hard_negatives=2)


@pytest.fixture(scope="module")
def encoder(datasets):
    return RowEncoder(lean_processor(), datasets)


def rows():
    clip = np.stack([picture(seed) for seed in range(4)])
    return [
        Row(0, "texts", 0, {"text": "a long query of words"}, {"text": "b"}, [{"text": "c"}, {"image": picture(1)}]),
        Row(1, "captions", 5, {"text": "d"}, [{"image": picture(2)}, {"text": "then"}, {"image": picture(3, 64)}]),
        Row(1, "captions", 6, {"text": "d"}, {"video": clip}, key="k"),
    ]


def test_pixels_go_back_and_forth_without_a_bit_changed():
    processor = lean_processor().image_processor
    normalisation = Normalisation.of(processor)
    values = lean_processor()([picture(0)])["pixel_values"]
    pixels = normalisation.pixels(values)
    assert pixels.dtype == torch.uint8 and torch.equal(normalisation.values(pixels), values)
    foreign = values + 1e-3
    assert torch.equal(normalisation.values(normalisation.pixels(foreign)), foreign)


def test_items_of_a_batch_are_what_the_processor_makes_of_each(encoder, tmp_path, tiny_settings):
    from modeling_moemb import MoEMBModel

    model = MoEMBModel.from_pretrained(small_repository(tmp_path / "r", tiny_settings)).eval()
    batch = encoder(rows())["batch"]
    inputs = model_inputs(batch.items, encoder.normalisations, torch.device("cpu"))
    packed = model(**inputs, pooled_only=True).pooler_output
    wanted = [
        (batch.query[0], "a long query of words", ""),
        (batch.positive[0], "b", ""),
        (batch.query[1], "d", "Find the picture."),
        (batch.positive[1], rows()[1].positive, ""),
        (batch.positive[2], rows()[2].positive, ""),
        (batch.negatives[1], {"image": picture(1)}, ""),
    ]
    for place, item, instruction in wanted:
        features = encoder.processor(as_batch(item)[0] if isinstance(item, str) else [item], instruction=instruction)
        alone = model(**features, pooled_only=True).pooler_output[0]
        assert torch.allclose(packed[place], alone, atol=1e-5)


def test_equal_items_are_kept_once(encoder):
    batch = encoder(rows())["batch"]
    assert batch.query[1] == batch.query[2] and len(batch.items) == 7
    assert len(set(batch.keys.tolist())) == 7 and batch.group.count_nonzero() == 1
    again = encoder(rows()[::-1])["batch"]
    assert set(again.keys.tolist()) == set(batch.keys.tolist())


def test_an_item_that_cannot_be_read_names_its_row(encoder, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG no picture")
    bad = Row(1, "captions", 41, {"text": "a"}, {"image": str(tmp_path / "broken.png")})
    with pytest.raises(RowError, match=r"data set 'captions', row 41 \(positive\): .*cannot be read"):
        encoder([*rows(), bad])


def test_a_length_limit_is_kept(datasets):
    short = RowEncoder(lean_processor(), datasets, max_length=8)(
        [Row(0, "texts", 0, {"text": "word " * 50}, {"text": "b"})]
    )["batch"]
    assert short.items[0].tokens == 8


@pytest.mark.parametrize(
    ("tokens", "most", "count", "expected"),
    [
        ([3, 3, 3, 3], 6, None, [2, 2]),
        ([9, 1, 1, 9], 6, None, [1, 2, 1]),
        ([1, 1, 1, 1], 9, None, [4]),
        ([1, 1, 1, 1], 9, 3, [2, 1, 1]),
        ([1, 1], 9, 5, [1, 1]),
    ],
)
def test_chunks_hold_as_many_tokens_as_allowed(tokens, most, count, expected):
    chunks = split_into_chunks(tokens, most, count)
    assert sorted(map(len, chunks)) == sorted(expected)
    assert [item for chunk in chunks for item in chunk] == list(range(len(tokens)))
