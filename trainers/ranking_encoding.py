"""Encoding for the public benchmarks: batch by batch, each batch kept on disk before the next one starts.

A killed evaluation has lost at most the batch it was in. Vectors are kept by model, by the settings that change them,
and by task, so that one task's vectors are in memory at a time. Under `torchrun` the processes share the batches of
each task and read each other's vectors afterwards.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .evaluation_encoding import EncodingError, VectorStore
from .ranking_items import ItemPresenter, describe_task_item, item_size
from .ranking_task import TaskItem


class TaskVectors(VectorStore):
    """The vectors of one task on disk; a shard for each batch until [`merge`] makes one of them."""

    def merge(self) -> None:
        """Writes all vectors as one shard and removes the others; a kill in between loses nothing."""
        shards = sorted(self.folder.glob("*.npz")) if self.folder.is_dir() else []
        if len(shards) < 2:
            return
        self.add(list(self.vectors), np.stack(list(self.vectors.values())))
        for path in shards:
            path.unlink(missing_ok=True)


class Processes:
    """
    The processes that share an evaluation: one, or as many as `torchrun` started.

    Attributes:
        rank (`int`): number of this process.
        count (`int`): how many there are.
    """

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def leads(self) -> bool:
        """Whether this process writes reports."""
        return self.rank == 0

    def device(self) -> str | None:
        """Returns the GPU of this process where there are several processes, `None` otherwise."""
        import torch

        local = os.environ.get("LOCAL_RANK", "0")
        return f"cuda:{local}" if self.count > 1 and torch.cuda.is_available() else None

    def meet(self) -> None:
        """Waits until every process is here."""
        if self.count == 1:
            return
        import torch.distributed

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()


class TaskEncoder:
    """
    A model that encodes the items of tasks.

    Args:
        model (`SentenceTransformer`): the model.
        presenter (`ItemPresenter`): how items are presented to it.
        cache (`Path`): folder of this model's vectors.
        batch_size (`int`, *optional*, defaults to 16): items in one forward pass.
        adaptive_compute (`dict`, *optional*): compute budget; the one of the model when left out.
        max_length (`int`, *optional*): most tokens of an item; the model's when left out.
        max_pixels (`int`, *optional*): most pixels of a picture; the model's when left out.
        progress (`bool`, *optional*, defaults to `True`): whether to show a progress bar.
    """

    def __init__(
        self,
        model: Any,
        presenter: ItemPresenter,
        cache: Path,
        batch_size: int = 16,
        adaptive_compute: dict[str, Any] | None = None,
        max_length: int | None = None,
        max_pixels: int | None = None,
        progress: bool = True,
    ):
        self.model, self.presenter, self.batch_size, self.progress = model, presenter, batch_size, progress
        self.processes = Processes()
        self.encoded_items = 0
        self._limits = {"text": {"max_length": max_length}, "image": {"max_pixels": max_pixels}}
        self._budget = {} if adaptive_compute is None else {"adaptive_compute": adaptive_compute}
        changing = {key: value for key, value in presenter.conventions.to_dict().items() if key != "dataset_variants"}
        settings = json.dumps([changing, self._limits, self._budget], sort_keys=True)
        self.cache = cache / hashlib.sha256(settings.encode()).hexdigest()[:16]

    def encode(self, task: str, items: Sequence[TaskItem], side: str) -> np.ndarray:
        """
        Encodes items, each distinct one once.

        Args:
            task (`str`): name of the task, for the cache and the progress bar.
            items (`Sequence[TaskItem]`): the items.
            side (`str`): `"query"` or `"document"`.

        Returns:
            `np.ndarray`: float32 `[items, dim]`.

        Raises:
            EncodingError: an item cannot be read, or its vector is not finite; vectors of earlier batches are kept.
        """
        store = TaskVectors(self.cache / task / side)
        keys = [self.presenter.key(item, side) for item in items]
        missing = {key: index for index, key in enumerate(keys) if key not in store.vectors}
        self.processes.meet()  # all have read the same vectors before anyone writes, so all divide the same batches
        batches = list(self._batches(missing, items, side))[self.processes.rank :: self.processes.count]
        total = sum(map(len, batches))
        hidden = not self.progress or not total or not self.processes.leads
        with tqdm(total=total, desc=f"{task}: {side} side", unit="item", disable=hidden, leave=False) as bar:
            for batch in batches:
                chosen = [items[missing[key]] for key in batch]
                store.add(batch, self._forward(chosen, side, task))
                bar.update(len(batch))
        self.encoded_items += total
        if self.processes.count > 1:
            self.processes.meet()
            store = TaskVectors(store.folder)
            self.processes.meet()
        if self.processes.leads:
            store.merge()
        return np.stack([store.vectors[key] for key in keys])

    def _batches(self, missing: dict[str, int], items: Sequence[TaskItem], side: str) -> Iterator[list[str]]:
        """Yields keys of like items, never two prompts in one batch."""
        prompts = {key: self.presenter.prompt(items[index], side) for key, index in missing.items()}
        order = sorted(missing, key=lambda key: (prompts[key], item_size(items[missing[key]]), key))
        batch: list[str] = []
        for key in order:
            if batch and (len(batch) == self.batch_size or prompts[key] != prompts[batch[0]]):
                yield batch
                batch = []
            batch.append(key)
        if batch:
            yield batch

    def _forward(self, items: Sequence[TaskItem], side: str, task: str) -> np.ndarray:
        prompt = self.presenter.prompt(items[0], side)
        vectors = encode_parts(
            self.model, [self.presenter.content(item, side) for item in items], prompt,
            limits=self._limits | {"video": {"num_frames": self.presenter.conventions.num_frames}},
            budget=self._budget, label=task, names=[describe_task_item(item) for item in items],
        )  # fmt: skip
        return vectors


def encode_parts(
    model: Any,
    inputs: Sequence[Any],
    prompt: str,
    *,
    limits: dict[str, dict[str, Any]] | None = None,
    budget: dict[str, Any] | None = None,
    label: str = "",
    names: Sequence[str] = (),
) -> np.ndarray:
    """
    Encodes one batch.

    Args:
        model (`SentenceTransformer`): the model.
        inputs (`Sequence`): items as its processor takes them.
        prompt (`str`): their system turn, `""` for none.
        limits (`dict`, *optional*): `processing_kwargs`; entries that are `None` are left to the model.
        budget (`dict`, *optional*): further arguments of `encode`.
        label (`str`, *optional*): what the batch belongs to, for errors.
        names (`Sequence[str]`, *optional*): how errors call the items.

    Returns:
        `np.ndarray`: float32 `[items, dim]`, of unit length.

    Raises:
        EncodingError: an item cannot be read, or the vectors are not finite.
    """
    given = {kind: {k: v for k, v in values.items() if v is not None} for kind, values in (limits or {}).items()}
    arguments = {"processing_kwargs": {kind: values for kind, values in given.items() if values}} | (budget or {})
    names = names or [str(item)[:60] for item in inputs]
    try:
        vectors = model.encode(
            list(inputs), prompt=prompt, batch_size=len(inputs), show_progress_bar=False, normalize_embeddings=True,
            **arguments,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise EncodingError(
            f"{label}: a batch cannot be encoded ({error}); its items are: {'; '.join(names)}"
        ) from error
    vectors = np.asarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(inputs):
        raise EncodingError(f"{label}: {len(inputs)} items gave vectors of shape {vectors.shape}")
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        raise EncodingError(f"{label}: {len(broken)} vectors are not finite, such as that of {names[broken[0]]}")
    return vectors
