"""A MoEMB model in mteb: instructions from the tasks, vectors kept on disk, a full description of the model.

mteb's own wrapper for Sentence Transformers does the talking; what it talks to is a model that looks each item up
before it encodes it, batch by batch, so that a killed run loses at most one batch.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from PIL import Image
from tqdm.auto import tqdm

from modeling_moemb.items_moemb import CANONICAL_ORDER

from .evaluation_conventions import EvaluationConventions
from .model_card import count_parameters, license_of
from .ranking_encoding import TaskVectors, encode_parts
from .ranking_items import ItemPresenter
from .ranking_task import TaskItem


# mteb's sampling by rate keeps short clips as they are, its fixed number repeats their frames; at this rate the number
# of frames is set by the cap alone.
_EVERY_FRAME = 1000.0


def content_digest(value: Any) -> bytes | None:
    """
    The identity of a value that mteb hands to a model.

    Args:
        value: text, number, picture, array, tensor, or lists and mappings of them.

    Returns:
        `bytes` or `None`: 16 bytes, equal for equal content; `None` for a value that cannot be looked into.
    """
    if isinstance(value, Image.Image):
        head, body = f"{value.mode}{value.size}", value.tobytes()
    elif isinstance(value, torch.Tensor):
        return content_digest(value.detach().cpu().contiguous().numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        head, body = f"{value.shape}{value.dtype.str}", np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        pairs = [
            content_digest(part) for item in sorted(value.items(), key=lambda pair: str(pair[0])) for part in item
        ]
        return None if None in pairs else content_digest(b"".join(pairs))
    elif isinstance(value, (list, tuple)):
        parts = [content_digest(part) for part in value]
        return None if None in parts else content_digest(b"".join(parts))
    elif isinstance(value, (str, bytes, int, float, bool)) or value is None:
        head, body = type(value).__name__, value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
    else:
        return None
    return hashlib.blake2b(head.encode() + b"\0" + body, digest_size=16).digest()


class RememberingModel:
    """
    A `SentenceTransformer` that keeps the vectors of a task on disk.

    Args:
        model (`SentenceTransformer`): the model.
        conventions (`EvaluationConventions`): how items are presented.
        cache (`Path`): folder of this model's vectors.
        adaptive_compute (`dict`, *optional*): compute budget; the one of the model when left out.
    """

    def __init__(
        self,
        model: Any,
        conventions: EvaluationConventions,
        cache: Path,
        adaptive_compute: dict[str, Any] | None = None,
    ):
        self.model = model
        self.prompts: dict[str, str] = {}  # those of the model are given to mteb by task
        self.task = "task"
        self.encoded_items = 0
        self._presenter = ItemPresenter(conventions, {})
        self._budget = {} if adaptive_compute is None else {"adaptive_compute": adaptive_compute}
        changing = {key: value for key, value in conventions.to_dict().items() if key != "dataset_variants"}
        settings = json.dumps([changing, self._budget], sort_keys=True)
        self._cache = cache / hashlib.sha256(settings.encode()).hexdigest()[:16]

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # copying looks it up before it is there
            raise AttributeError(name)
        return getattr(self.model, name)

    def encode_query(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> np.ndarray:
        """Encodes queries, see [`encode`]."""
        return self.encode(inputs, prompt=prompt, **kwargs)

    encode_document = encode_query

    def encode(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        **_: Any,
    ) -> np.ndarray:
        """
        Encodes items that were not encoded before; returns the vectors of all.

        Args:
            inputs (`Sequence`): texts, or mappings from modality to value.
            prompt (`str`, *optional*): instruction of the items.
            batch_size (`int`, *optional*, defaults to 32): items in one forward pass.
            show_progress_bar (`bool`, *optional*, defaults to `False`): whether to show one.

        Returns:
            `np.ndarray`: float32 `[items, dim]`.
        """
        prompt = prompt or ""
        store = TaskVectors(self._cache / self.task / hashlib.sha256(prompt.encode()).hexdigest()[:16])
        parts = [self._parts(item) for item in inputs]
        keys = [content_digest(part) for part in parts]
        names = [f"unknown-{number}" if key is None else key.hex() for number, key in enumerate(keys)]
        missing = {
            name: number for number, name in enumerate(names) if keys[number] is None or name not in store.vectors
        }
        order = sorted(missing, key=lambda name: -sum(len(v) for k, v in parts[missing[name]] if k == "text"))
        passing: dict[str, np.ndarray] = {}
        with tqdm(total=len(order), desc=self.task, unit="item", disable=not show_progress_bar, leave=False) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                vectors = self._forward([parts[missing[name]] for name in batch], prompt)
                known = [row for row, name in enumerate(batch) if keys[missing[name]] is not None]
                if known:
                    store.add([batch[row] for row in known], vectors[known])
                passing |= dict(zip(batch, vectors, strict=True))
                bar.update(len(batch))
        self.encoded_items += len(order)
        found = store.vectors | passing
        return np.stack([found[name] for name in names]) if names else np.zeros((0, self._dimension()), np.float32)

    def finish_task(self) -> None:
        """Makes one file of the vectors of each side of the task."""
        for folder in (self._cache / self.task).glob("*"):
            TaskVectors(folder).merge()

    def _dimension(self) -> int:
        return int(self.model.get_embedding_dimension() or 0)

    @staticmethod
    def _parts(item: Any) -> list[tuple[str, Any]]:
        given = {"text": item} if isinstance(item, str) else dict(item)
        return [(kind, given[kind]) for kind in CANONICAL_ORDER if given.get(kind) is not None]

    def _forward(self, batch: Sequence[list[tuple[str, Any]]], prompt: str) -> np.ndarray:
        conventions = self._presenter.conventions
        in_user = conventions.instruction_placement == "user"
        contents = []
        for parts in batch:
            item = TaskItem(tuple(parts), prompt if in_user else "")
            content = self._presenter.texts(item, "query")
            contents.append([part for kind, value in content for part in self._typed(kind, value)])
        return encode_parts(
            self.model, contents, "" if in_user else prompt, limits={"video": {"num_frames": conventions.num_frames}},
            budget=self._budget, label=self.task,
        )  # fmt: skip

    def _typed(self, kind: str, value: Any) -> list[dict[str, Any]]:
        if kind != "video":
            return [{"type": kind, kind: value}]
        if self._presenter.conventions.video_input == "images":
            return [{"type": "image", "image": frame} for frame in value]
        rate = self._presenter.conventions.frames_fps
        return [{"type": "video", "video": value if rate is None else {"frames": value, "fps": rate}}]


class MoEMBEncoder(SentenceTransformerEncoderWrapper):
    """
    The encoder that `mteb.evaluate` takes.

    Args:
        model (`SentenceTransformer`): a loaded MoEMB model.
        meta (`ModelMeta`): its description, see [`model_meta`].
        conventions (`EvaluationConventions`): how items are presented.
        cache (`Path`): folder of this model's vectors.
        tasks (`Iterable[AbsTask]`): tasks whose instructions will be used.
        adaptive_compute (`dict`, *optional*): compute budget; the one of the model when left out.
    """

    def __init__(
        self,
        model: Any,
        meta: ModelMeta,
        conventions: EvaluationConventions,
        cache: Path,
        tasks: Iterable[Any],
        adaptive_compute: dict[str, Any] | None = None,
    ):
        remembering = RememberingModel(model, conventions, cache, adaptive_compute)
        recorded = ItemPresenter(conventions, dict(model.prompts or {}), model.default_prompt_name)
        super().__init__(
            remembering,
            model_prompts=task_prompts(tasks, recorded),
            fps=_EVERY_FRAME,
            max_frames=conventions.num_frames,
        )
        self.mteb_model_meta = meta

    def encode(self, inputs: Any, *, task_metadata: Any, **kwargs: Any) -> Any:
        self.model.task = task_metadata.name
        return super().encode(inputs, task_metadata=task_metadata, **kwargs)


def task_prompts(tasks: Iterable[Any], recorded: ItemPresenter) -> dict[str, str]:
    """
    The instruction of each side of each task, in the form that mteb looks them up.

    Args:
        tasks (`Iterable[AbsTask]`): the tasks.
        recorded (`ItemPresenter`): the model's conventions and prompts.

    Returns:
        `dict[str, str]`: by `"<task>-query"`, `"<task>-document"` and `"<task>"`, and the model's own by side.
    """
    empty = TaskItem(())
    prompts = {side: recorded.prompt(empty, side) for side in ("query", "document")}
    for task in tasks:
        asked = task.metadata.prompt or {}
        asked = {"query": asked, "document": asked} if isinstance(asked, str) else asked
        name = task.metadata.name
        for side in ("query", "document"):
            item = TaskItem((), asked.get(side) or "")
            own = recorded.instruction(item, side)
            prompts[f"{name}-{side}"] = own or recorded.prompt(empty, side)
        prompts[name] = prompts[f"{name}-query"]
    return prompts


def model_meta(
    model: Any,
    name: str,
    revision: str,
    folder: Path | None = None,
    adaptive_compute: dict[str, Any] | None = None,
    training_datasets: Iterable[str] = (),
) -> ModelMeta:
    """
    Describes a model for mteb and its leaderboard.

    Args:
        model (`SentenceTransformer`): the loaded model.
        name (`str`): `"organisation/name"`; an organisation `moemb` is put before a bare name.
        revision (`str`): revision on the Hub, or the fingerprint of a folder.
        folder (`Path`, *optional*): the repository, for its licence.
        adaptive_compute (`dict`, *optional*): compute budget of this run, kept apart in the results.
        training_datasets (`Iterable[str]`, *optional*): tasks of mteb that it was trained on.

    Returns:
        `ModelMeta`: with total, embedding and active parameters (what a text token multiplies with).
    """
    transformer = next(iter(model))
    config = transformer.model.config
    sizes = count_parameters(config)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = transformer.processor.tokenizer.model_max_length
    licence = license_of(folder) if folder is not None else None
    fields = {
        "loader": None,
        "name": name if "/" in name else f"moemb/{name}",
        "revision": revision,
        "release_date": None,
        "languages": None,
        "n_parameters": sizes["total"],
        "n_active_parameters_override": sizes["active"],
        "n_embedding_parameters": sizes["embedding_table"],
        "memory_usage_mb": weights / 2**20,
        "max_tokens": limit if limit < 10**9 else None,
        "embed_dim": config.get_text_config().hidden_size,
        "license": licence,
        "open_weights": True,
        "public_training_code": None,
        "public_training_data": None,
        "framework": ["Sentence Transformers", "PyTorch", "Transformers", "safetensors"],
        "similarity_fn_name": "cosine",
        "use_instructions": True,
        "training_datasets": set(training_datasets),
        "modalities": ["text", "image", "video"],
        "model_type": ["dense"],
        "experiment_kwargs": None if adaptive_compute is None else {"adaptive_compute": json.dumps(adaptive_compute)},
    }
    try:
        return ModelMeta(**fields)
    except ValueError:  # mteb knows a list of licences
        return ModelMeta(**(fields | {"license": None}))
