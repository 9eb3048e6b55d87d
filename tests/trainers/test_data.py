import numpy as np
import pytest
import torch

from moemb.trainers.data import FILLER_ROWS, BatchEncoder, Sample, augment, clip_timestamps
from moemb.trainers.repository import mini_processor
from moemb.trainers.tokenizer import PAD


def picture(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def encoder(fake_tokenizer):
    return BatchEncoder(fake_tokenizer)


@pytest.fixture(scope="module")
def pairs():
    """Samples, and the same as a user hands them to the processor."""
    image, strip, clip = picture(64, 64, 3), picture(32, 128, 3, seed=1), picture(8, 64, 64, 3, seed=2)
    other = picture(64, 64, 3, seed=3)
    return [
        (Sample(("thing number 3",)), "thing number 3"),
        (Sample((image,)), image),
        (Sample((strip,)), strip),
        (Sample((clip,)), {"video": clip}),
        (Sample((other, "dark skin tone")), {"image": other, "text": "dark skin tone"}),
        (Sample(("漢字 Ünï",)), "漢字 Ünï"),
    ]


def test_a_batch_equals_the_processors(encoder, pairs, fake_tokenizer):
    processor = mini_processor(fake_tokenizer)
    ours = encoder([sample for sample, _ in pairs])
    theirs = processor([item for _, item in pairs])
    mask = theirs["attention_mask"].bool()
    assert ours["input_ids"][0].tolist() == theirs["input_ids"][mask].tolist()
    assert ours["cu_seq_lens_q"].diff().tolist() == mask.sum(1).tolist()
    for name in ("pixel_values", "pixel_values_videos"):
        assert torch.allclose(ours[name], theirs[name], atol=1e-6)
    for name in ("image_grid_thw", "video_grid_thw"):
        assert ours[name].tolist() == theirs[name].tolist()


def test_an_instruction_equals_the_processors(encoder, fake_tokenizer):
    processor = mini_processor(fake_tokenizer)
    ours = encoder([Sample(("thing",), instruction="Find the text.")])
    theirs = processor(["thing"], instruction="Find the text.")
    assert ours["input_ids"][0].tolist() == theirs["input_ids"][0].tolist()


def test_every_row_ends_with_emb(encoder, pairs):
    batch = encoder([sample for sample, _ in pairs])
    assert (batch["input_ids"][0, batch["cu_seq_lens_q"][1:].long() - 1] == encoder.emb_id).all()
    assert (batch["input_ids"] == encoder.emb_id).sum() == len(pairs)


def test_filler_brings_the_tokens_to_a_multiple(fake_tokenizer, pairs):
    encoder = BatchEncoder(fake_tokenizer, token_multiple=64)
    for count in range(1, len(pairs) + 1):
        samples = [sample for sample, _ in pairs[:count]]
        batch, plain = encoder(samples), BatchEncoder(fake_tokenizer)(samples)
        tokens = plain["input_ids"].shape[1]
        assert batch["input_ids"].shape[1] % 64 == 0
        assert len(batch["cu_seq_lens_q"]) - 1 == count + FILLER_ROWS
        assert torch.equal(batch["input_ids"][:, :tokens], plain["input_ids"])


def test_final_token_of_a_document(encoder, fake_tokenizer):
    batch = encoder([Sample(("thing",))], final_token=PAD)
    assert batch["input_ids"][0, -1] == fake_tokenizer.convert_tokens_to_ids(PAD)


def test_long_text_is_cut(fake_tokenizer):
    batch = BatchEncoder(fake_tokenizer, max_text_tokens=5)([Sample(("thing " * 50,))])
    assert batch["input_ids"].shape[1] == 6


def test_a_part_of_another_shape_is_an_error(encoder):
    with pytest.raises(ValueError, match=r"\(64, 64\)"):
        encoder([Sample((picture(64, 64),))])


def test_timestamps_are_the_mean_of_a_patchs_frames():
    assert clip_timestamps(8, 2) == ["<0.0 seconds>", "<0.1 seconds>", "<0.2 seconds>", "<0.3 seconds>"]
    assert len(clip_timestamps(3, 2)) == 2


def test_augmentation_is_repeatable_varied_and_keeps_white_white():
    images = torch.from_numpy(picture(4, 64, 64, 3))
    images[3] = 255

    def run(seed):
        return augment(images, torch.Generator().manual_seed(seed))

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))
    assert run(0).shape == images.shape and run(0).dtype == torch.uint8
    assert not torch.equal(run(0)[0], images[0]) and (run(0)[3] == 255).all()
    assert len(augment(images[:0], torch.Generator())) == 0
