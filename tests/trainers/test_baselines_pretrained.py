from types import SimpleNamespace

import numpy as np
import pytest

from moemb.trainers import baselines_pretrained
from moemb.trainers.baselines_pretrained import (
    BaselineUnavailable,
    PretrainedBaselines,
    choose_ridge,
    fit_ridge,
    load_efficientnet,
    load_minilm,
    ridge_items,
)
from moemb.trainers.corpus_sources import SourceError
from moemb.trainers.errors import MoEMBError


def _corpus():
    rng = np.random.default_rng(0)
    rows = [
        {"key": "noto/a", "concept": "a", "split": "train"},
        {"key": "noto/b", "concept": "b", "split": "test"},
        {"key": "noto/c", "concept": "c", "split": "train"},
        {"key": "mdi/x", "concept": None, "split": "train"},
        {"key": "noto/d", "concept": "d", "split": "train"},
        {"key": "noto/e", "concept": "e", "split": "validation"},
    ]
    concepts = {
        name: {"en": f"label {name}", "base": base}
        for name, base in [("a", None), ("b", None), ("c", "a"), ("d", None), ("e", None)]
    }
    images = rng.integers(0, 255, (6, 64, 64, 3), dtype=np.uint8)
    return SimpleNamespace(image_rows=rows, concepts=concepts, images=images)


def test_the_ridge_recovers_a_linear_map():
    rng = np.random.default_rng(0)
    features, weight = rng.normal(size=(400, 12)), rng.normal(size=(12, 5))
    ridge = fit_ridge(features, features @ weight + 3.0, penalty=1e-6)
    assert np.allclose(ridge.weight, weight, atol=1e-4)
    images = ridge.images(features.astype(np.float32))
    texts = ridge.texts((features @ weight + 3.0).astype(np.float32))
    assert np.allclose(images, texts, atol=1e-3)


def test_it_is_fitted_on_training_images_of_base_concepts_alone():
    images, labels = ridge_items(_corpus(), "train")
    assert labels == ["label a", "label d"]
    assert len(images) == 2
    assert ridge_items(_corpus(), "validation")[1] == ["label e"]
    with pytest.raises(BaselineUnavailable, match="no nothing images"):
        ridge_items(_corpus(), "nothing")


def test_the_penalty_is_chosen_on_validation_concepts():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(30, 6))
    training = rng.normal(size=(40, 30))
    noisy = training @ weight + rng.normal(scale=6.0, size=(40, 6))
    validation = rng.normal(size=(200, 30))
    _, strong = choose_ridge((training, noisy), (validation, validation @ weight))
    _, weak = choose_ridge((training, training @ weight), (validation, validation @ weight))
    assert strong > weak


def test_a_missing_package_is_a_reason_with_a_remedy(monkeypatch):
    def refuse():
        raise SourceError("the registry cannot be reached: check the network")

    monkeypatch.setattr(baselines_pretrained.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(baselines_pretrained, "vision_encoder", refuse)
    with pytest.raises(BaselineUnavailable, match="pip install"):
        load_minilm()
    with pytest.raises(BaselineUnavailable, match="check the network"):
        load_efficientnet()


def test_features_have_unit_length_for_any_size_of_image(monkeypatch):
    monkeypatch.setattr(
        baselines_pretrained, "vision_encoder", lambda: lambda batch: batch.reshape(len(batch), -1)[:, :1280] + 1.0
    )
    extract = load_efficientnet()
    features = extract([np.full((32, 128, 3), 7, np.uint8), np.full((64, 64, 3), 9, np.uint8)])
    assert features.shape == (2, 1280) and np.allclose(np.linalg.norm(features, axis=1), 1.0, atol=1e-5)
    assert extract([]).shape == (0, 1280)


def test_a_missing_corpus_is_a_reason_and_is_asked_for_once():
    calls = []

    def load_corpus():
        calls.append(1)
        raise MoEMBError("no corpus in X: build it with moemb data")

    pretrained = PretrainedBaselines(load_corpus, cache=None)
    for _ in range(2):
        with pytest.raises(BaselineUnavailable, match="moemb data"):
            pretrained.ridge()
    assert len(calls) == 1


def test_features_of_the_training_images_are_kept(tmp_path, monkeypatch):
    counted = []

    def extract(images):
        counted.append(len(images))
        return np.stack([image.reshape(-1)[:8] for image in images]).astype(np.float32)

    monkeypatch.setattr(baselines_pretrained, "load_efficientnet", lambda: extract)
    monkeypatch.setattr(
        baselines_pretrained, "load_minilm", lambda: lambda texts: np.eye(len(texts), 4, dtype=np.float32)
    )
    first = PretrainedBaselines(_corpus, tmp_path).ridge()
    second = PretrainedBaselines(_corpus, tmp_path).ridge()
    assert counted == [2, 1]
    assert np.array_equal(first.weight, second.weight)
