"""Encoding for evaluation: each distinct item once, kept on disk under the model's fingerprint, resumable.

The tasks share pools (1,914 images serve five of them), so items are addressed by their content. Vectors are written
every `_ITEMS_PER_SHARD` items: an evaluation that was stopped goes on where it stood, and one that is repeated
encodes nothing.
"""

import hashlib
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm

from .errors import MoEMBError
from .files import whole_file


_ITEMS_PER_SHARD = 256
_HASH_BLOCK = 1 << 20
SIDES = ("query", "document")

Item = Mapping[str, Any]


class EncodingError(MoEMBError, ValueError):
    """An encoder returned something that cannot be scored. The message names the items."""


def folder_fingerprint(folder: Path) -> str:
    """
    The identity of a model repo: SHA-256 over the names and contents of its files, the card left out.

    Args:
        folder (`Path`):
            Folder of the model repo.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if not path.is_file() or "__pycache__" in relative or relative.startswith(".") or relative == "README.md":
            continue
        digest.update(relative.encode() + b"\0")
        with path.open("rb") as stream:
            while block := stream.read(_HASH_BLOCK):
                digest.update(block)
        digest.update(b"\0")
    return digest.hexdigest()


def model_fingerprint(model: Any, source: str) -> str:
    """
    The identity of a loaded `SentenceTransformer`.

    Args:
        model (`SentenceTransformer`):
            The loaded model.
        source (`str`):
            The folder or Hub id that it was loaded from. For a folder its files are hashed, for an id the weights in
            memory.

    Returns:
        `str`: 64 hexadecimal digits.
    """
    if Path(source).is_dir():
        return folder_fingerprint(Path(source))
    digest = hashlib.sha256(source.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def item_key(item: Item) -> str:
    """
    The content address of an item.

    Args:
        item (`Mapping`):
            Keys among `"text"` (`str`), `"image"` (uint8 `[H, W, 3]`) and `"video"` (uint8 `[F, H, W, 3]`).

    Returns:
        `str`: 32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(item):
        value = item[name]
        digest.update(name.encode() + b"\0")
        if isinstance(value, np.ndarray):
            digest.update(repr((value.shape, value.dtype.str)).encode() + np.ascontiguousarray(value).tobytes())
        else:
            digest.update(str(value).encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()


def encoder_input(item: Item) -> Any:
    """Returns an item as users pass it to `encode`: a bare string for text alone, else a dict."""
    if set(item) == {"text"}:
        return item["text"]
    return {
        name: Image.fromarray(value) if name == "image" and isinstance(value, np.ndarray) else value
        for name, value in item.items()
    }


class VectorStore:
    """
    Vectors on disk by content address.

    Args:
        folder (`Path`):
            Folder of this model's and this side's vectors; made when the first shard is written. An unreadable shard
            (a copy that was cut off) is dropped and its items are encoded again.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.vectors: dict[str, np.ndarray] = {}
        for path in sorted(folder.glob("*.npz")) if folder.is_dir() else []:
            try:
                with np.load(path, allow_pickle=False) as shard:
                    self.vectors.update(zip(shard["keys"].tolist(), shard["vectors"], strict=True))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                path.unlink()

    def add(self, keys: Sequence[str], vectors: np.ndarray) -> None:
        """Adds vectors float32 `[items, dim]` and writes them as one shard, atomically."""
        with whole_file(self.folder / f"{uuid.uuid4().hex}.npz") as partial, partial.open("wb") as stream:
            np.savez(stream, keys=np.array(keys), vectors=vectors)
        self.vectors.update(zip(keys, vectors, strict=True))


class CachedEncoder:
    """
    A `SentenceTransformer` behind a `VectorStore`.

    Args:
        model (`SentenceTransformer`):
            Anything with `prompts`, `encode_query` and `encode_document`.
        fingerprint (`str`):
            Identity of the model; its vectors are kept under it.
        cache (`Path`):
            Folder of all kept vectors.
        batch_size (`int`, *optional*, defaults to 64):
            Items in one forward pass.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.
    """

    def __init__(self, model: Any, fingerprint: str, cache: Path, batch_size: int = 64, progress: bool = True):
        self.model = model
        self.batch_size = batch_size
        self.progress = progress
        self.encoded_items = 0
        self._stores = {}
        for side in SIDES:
            # Without prompts a query and a document are encoded alike, and so share their vectors.
            prompt = (model.prompts or {}).get(side) or ""
            name = hashlib.sha256(prompt.encode()).hexdigest()[:16]
            shared = [store for store in self._stores.values() if store.folder.name == name]
            self._stores[side] = shared[0] if shared else VectorStore(cache / fingerprint[:32] / name)

    def encode(self, items: Sequence[Item], side: str, label: str = "") -> np.ndarray:
        """
        Encodes items, each distinct one once.

        Args:
            items (`Sequence[Mapping]`):
                Items with keys among `"text"`, `"image"` and `"video"`.
            side (`str`):
                `"query"` or `"document"`, which decides the prompt.
            label (`str`, *optional*, defaults to `""`):
                Text of the progress bar.

        Returns:
            `np.ndarray`: float32 `[items, dim]`.

        Raises:
            EncodingError: the model returned another number of vectors or values that are not finite.
        """
        store = self._stores[side]
        keys = [item_key(item) for item in items]
        missing = {key: index for index, key in enumerate(keys) if key not in store.vectors}
        # Texts of like length in one batch, and one modality after the other, waste no compute on padding.
        order = sorted(missing, key=lambda key: batch_order(items[missing[key]]))
        bar = tqdm(
            total=len(order), desc=label or side, unit="item", disable=not self.progress or not order, leave=False
        )
        with bar:
            for start in range(0, len(order), _ITEMS_PER_SHARD):
                chosen = order[start : start + _ITEMS_PER_SHARD]
                store.add(chosen, self._forward([items[missing[key]] for key in chosen], side, label))
                bar.update(len(chosen))
        self.encoded_items += len(order)
        return np.stack([store.vectors[key] for key in keys])

    def _forward(self, items: Sequence[Item], side: str, label: str) -> np.ndarray:
        method = self.model.encode_query if side == "query" else self.model.encode_document
        inputs = [encoder_input(item) for item in items]
        vectors = np.asarray(method(inputs, batch_size=self.batch_size, show_progress_bar=False), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(items):
            raise EncodingError(f"{label}: {len(items)} items gave vectors of shape {vectors.shape}.")
        broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(broken):
            names = ", ".join(describe_item(items[index]) for index in broken[:3])
            raise EncodingError(
                f"{label}: {len(broken)} of {len(items)} vectors are not finite, such as that of {names}."
            )
        return vectors


def describe_item(item: Item) -> str:
    """Returns an item as errors print it, such as `text 'cat' + image 64x64`."""
    parts = []
    for name, value in item.items():
        if isinstance(value, np.ndarray):
            parts.append(f"{name} {'x'.join(str(size) for size in value.shape[:-1])}")
        else:
            parts.append(f"{name} {str(value)[:60]!r}")
    return " + ".join(parts)


def batch_order(item: Item) -> tuple:
    """A sort key that puts items into batches together that waste little on each other: same kinds, like sizes."""
    kinds = tuple(sorted(item))
    pixels = sum(value.size for value in item.values() if isinstance(value, np.ndarray))
    return kinds, pixels, len(str(item.get("text", "")))


def weights_of(source: str) -> str | None:
    """Returns the identity of the weights of a model folder, `None` for a model that came from elsewhere."""
    from .saliency import weights_fingerprint

    folder = Path(source)
    return weights_fingerprint(folder) if folder.is_dir() and any(folder.glob("*.safetensors")) else None
