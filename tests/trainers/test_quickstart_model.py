"""The shipped checkpoint, assembled and loaded as users load it: here a tiny untrained one in its place."""

import argparse
import json
import threading
import time

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoProcessor

from modeling_moemb import MoEMBConfig, MoEMBModel
from moemb.trainers import quickstart_model, repository
from moemb.trainers.evaluation_encoding import CachedEncoder, encoder_input, model_fingerprint
from moemb.trainers.quickstart import add_arguments, run
from moemb.trainers.quickstart_model import ModelError, load_model, mini_repository
from moemb.trainers.quickstart_search import Meter, count_parameters, counting, embed
from moemb.trainers.repository import RepositoryError, mini_processor
from moemb.trainers.tokenizer import EMB, IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, train_tokenizer


VOCABULARY = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_settings):
    """A checkpoint folder as training leaves it."""
    words = [f"{first}{second}at the end" for first in "abcdefgh" for second in "klmnop"]
    tokenizer = train_tokenizer(words * 4, VOCABULARY)
    names = {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "emb_token_id": EMB,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    MoEMBModel(MoEMBConfig(**tiny_settings | ids)).save_pretrained(folder)
    mini_processor(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shipped(checkpoint, cache, monkeypatch):
    """Puts the tiny checkpoint in the shipped one's place."""
    monkeypatch.setenv("MOEMB_CACHE", str(cache))
    monkeypatch.setattr(quickstart_model, "recipe_folder", lambda: checkpoint.parent / "recipe")
    link = checkpoint.parent / "recipe"
    link.mkdir(exist_ok=True)
    if not (link / "checkpoint").exists():
        (link / "checkpoint").symlink_to(checkpoint)
    return checkpoint


def _items():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)
    return {
        "text": {"text": "hello"},
        "image": {"image": image},
        "heading": {"image": rng.integers(0, 255, (32, 128, 3), dtype=np.uint8)},
        "composed": {"image": image, "text": "dark skin tone"},
        "clip": {"video": rng.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)},
    }


def test_it_is_assembled_once_and_again_when_the_checkpoint_changes(shipped, tmp_path, checkpoint):
    first = mini_repository()
    stamp = (first / "config.json").stat().st_mtime_ns
    assert mini_repository() == first and (first / "config.json").stat().st_mtime_ns == stamp
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in checkpoint.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    settings = json.loads((changed / "config.json").read_text()) | {"note": "changed"}
    (changed / "config.json").write_text(json.dumps(settings))
    assert mini_repository(changed) != first


def test_two_at_once_assemble_it_once(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    assembled, assemble, found = [], repository.assemble_checkpoint, []

    def slowly(source, target):
        assembled.append(target)
        time.sleep(0.3)  # the other one arrives meanwhile
        return assemble(source, target)

    monkeypatch.setattr(repository, "assemble_checkpoint", slowly)
    threads = [threading.Thread(target=lambda: found.append(mini_repository(checkpoint))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(assembled) == 1 and found == [assembled[0]] * 2


def test_print_model_prints_only_the_folder(shipped, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--print-model"])) == 0
    assert capsys.readouterr().out == f"{mini_repository()}\n"


def test_an_incomplete_checkpoint_says_what_it_lacks(checkpoint, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(cache))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(RepositoryError, match=r"tokenizer\.json"):
        mini_repository(tmp_path)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelError, match="nothing-here"):
        load_model(str(tmp_path / "nothing-here"), "cpu")


def test_every_kind_of_item_embeds_through_sentence_transformers(shipped):
    model, source = load_model("moemb-mini", "cpu")
    assert source == str(mini_repository())
    inputs = [encoder_input(item) for item in _items().values()]
    together = model.encode_document(inputs, normalize_embeddings=True)
    alone = np.stack([model.encode_query(one, normalize_embeddings=True) for one in inputs])
    assert together.shape == (5, 64)
    assert np.abs(together - alone).max() < 1e-5
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    assert np.linalg.matrix_rank(together) == 5


def test_the_output_holds_hidden_states_and_the_pooled_vector(shipped):
    folder = str(mini_repository())
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.inference_mode():
        output = model(**processor(["hello"]))
    assert output.last_hidden_state.shape[-1] == output.pooler_output.shape[-1] == 64


def test_tokens_and_patches_are_counted_from_what_ran(shipped):
    model, _ = load_model("moemb-mini", "cpu")
    network, meter, items = model[0].auto_model, Meter(), _items()
    with counting(network, meter):
        embed(model, [items["image"]], "image", meter)
        assert meter.patches == 64 and meter.tokens >= 16 + 3
        embed(model, [items["clip"]], "clip", meter)
        assert meter.patches == 64 + 4 * 64
        embed(model, [items["text"]], "text", meter)
    sizes = count_parameters(network)
    assert sizes.total == sum(weight.numel() for weight in network.parameters())
    assert 0 < sizes.decoder < sizes.total and sizes.vision and sizes.merger
    assert meter.items == {"image": 1, "clip": 1, "text": 1}
    assert sizes.flops(meter) > 0


def test_evaluation_identifies_and_encodes_it(shipped, tmp_path):
    model, source = load_model("moemb-mini", "cpu")
    encoder = CachedEncoder(model, model_fingerprint(model, source), tmp_path, progress=False)
    items = list(_items().values())
    vectors = encoder.encode(items, "document")
    assert vectors.shape == (5, 64) and encoder.encoded_items == 5
    assert np.array_equal(encoder.encode(items, "query"), vectors)
    assert encoder.encoded_items == 5
