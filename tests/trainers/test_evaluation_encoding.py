import numpy as np
import pytest
import torch
from PIL import Image

from moemb.trainers.evaluation_encoding import (
    CachedEncoder,
    EncodingError,
    VectorStore,
    encoder_input,
    folder_fingerprint,
    item_key,
    model_fingerprint,
)


class _Encoder:
    """Counts what it is given; the vector of a text depends on the text alone."""

    def __init__(self, prompts=None):
        self.prompts = prompts or {}
        self.seen = []

    def encode_query(self, inputs, batch_size, show_progress_bar):
        self.seen += inputs
        return np.array([[len(str(text)), sum(map(ord, str(text))) % 97, 1.0] for text in inputs])

    encode_document = encode_query

    def state_dict(self):
        return {"weight": torch.ones(3, dtype=torch.bfloat16)}


def _texts(*texts):
    return [{"text": text} for text in texts]


def test_each_distinct_item_is_encoded_once(tmp_path):
    model = _Encoder()
    encoder = CachedEncoder(model, "f" * 64, tmp_path, progress=False)
    vectors = encoder.encode(_texts("b", "a", "b"), "query")
    assert sorted(model.seen) == ["a", "b"]
    assert np.array_equal(vectors[0], vectors[2]) and vectors.dtype == np.float32
    encoder.encode(_texts("a", "c"), "query")
    assert model.seen[2:] == ["c"]


def test_vectors_are_kept_for_the_next_run_and_only_for_the_same_model(tmp_path):
    CachedEncoder(_Encoder(), "f" * 64, tmp_path, progress=False).encode(_texts("a", "b"), "query")
    same, other = _Encoder(), _Encoder()
    CachedEncoder(same, "f" * 64, tmp_path, progress=False).encode(_texts("a", "b"), "query")
    CachedEncoder(other, "e" * 64, tmp_path, progress=False).encode(_texts("a", "b"), "query")
    assert same.seen == [] and len(other.seen) == 2


def test_sides_share_vectors_only_without_prompts(tmp_path):
    plain, prompted = _Encoder(), _Encoder({"query": "find: "})
    for number, model in enumerate((plain, prompted)):
        encoder = CachedEncoder(model, str(number) * 64, tmp_path, progress=False)
        encoder.encode(_texts("a"), "query")
        encoder.encode(_texts("a"), "document")
    assert (len(plain.seen), len(prompted.seen)) == (1, 2)


def test_a_cut_off_shard_is_encoded_again(tmp_path):
    CachedEncoder(_Encoder(), "f" * 64, tmp_path, progress=False).encode(_texts("a"), "query")
    (shard,) = tmp_path.rglob("*.npz")
    shard.write_bytes(shard.read_bytes()[:40])
    model = _Encoder()
    CachedEncoder(model, "f" * 64, tmp_path, progress=False).encode(_texts("a"), "query")
    assert model.seen == ["a"]
    assert VectorStore(shard.parent).vectors


def test_vectors_that_are_not_finite_name_the_item(tmp_path):
    model = _Encoder()
    model.encode_query = lambda inputs, **_: np.full((len(inputs), 2), np.nan)
    with pytest.raises(EncodingError, match="'cat'"):
        CachedEncoder(model, "f" * 64, tmp_path, progress=False).encode(_texts("cat"), "query", "task")


def test_a_wrong_number_of_vectors_is_an_error(tmp_path):
    model = _Encoder()
    model.encode_query = lambda inputs, **_: np.zeros((1, 2))
    with pytest.raises(EncodingError, match="2 items"):
        CachedEncoder(model, "f" * 64, tmp_path, progress=False).encode(_texts("a", "b"), "query", "task")


def test_the_key_is_the_content():
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    keys = {
        item_key({"text": "a"}),
        item_key({"image": image}),
        item_key({"image": image, "text": "a"}),
        item_key({"image": image.reshape(1, 4, 3)}),
        item_key({"video": image}),
    }
    assert len(keys) == 5
    assert item_key({"text": "a", "image": image}) == item_key({"image": image.copy(), "text": "a"})


def test_inputs_are_what_users_pass():
    image = np.zeros((4, 4, 3), np.uint8)
    assert encoder_input({"text": "a"}) == "a"
    composed = encoder_input({"image": image, "text": "a"})
    assert isinstance(composed["image"], Image.Image) and composed["text"] == "a"
    assert encoder_input({"video": image[None]})["video"].shape == (1, 4, 4, 3)


def test_the_fingerprint_follows_weights_and_code_but_not_the_card_or_the_place(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
        (folder / "README.md").write_text(folder.name)
    assert folder_fingerprint(first) == folder_fingerprint(second)
    (second / "modeling.py").write_text("x")
    assert folder_fingerprint(first) != folder_fingerprint(second)


def test_a_model_without_a_folder_is_identified_by_its_weights():
    assert model_fingerprint(_Encoder(), "org/name") == model_fingerprint(_Encoder(), "org/name")
    assert model_fingerprint(_Encoder(), "org/name") != model_fingerprint(_Encoder(), "org/other")
