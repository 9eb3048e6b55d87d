"""MoEMB in Sentence Transformers: the input module, and the methods of `SentenceTransformer` that need to differ.

The stock input module fetches whatever looks like a URL, refuses bytes and paths, cuts image tokens off and may lose
the pooled token. [`MoEMBTransformer`] hands items to [`MoEMBProcessor`] instead, so that Sentence Transformers and
AutoProcessor give the same vector. Pooling and normalisation are the stock modules.
"""

import inspect
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers
import torch
from sentence_transformers.base.modules.transformer import Transformer
from transformers.dynamic_module_utils import get_relative_import_files

from .items_moemb import as_batch


# Set while only vectors are wanted: the last block then computes the pooled tokens alone. One value per thread.
_POOLED_ONLY: ContextVar[bool] = ContextVar("pooled_only", default=False)
FORWARD_KWARGS = ["adaptive_compute", "router_task"]  # that `encode` hands to the model
_OVERRIDES = {"text": ("max_length",), "image": ("min_pixels", "max_pixels"), "video": ("num_frames", "fps")}


@contextmanager
def pooled_only(wanted: bool = True) -> Iterator[None]:
    """Inside, [`MoEMBTransformer`] computes nothing but the pooled vectors, when `wanted`."""
    token = _POOLED_ONLY.set(wanted)
    try:
        yield
    finally:
        _POOLED_ONLY.reset(token)


class MoEMBTransformer(Transformer):
    """
    Items in, states of the pooled tokens out.

    It takes every item that [`MoEMBProcessor`] takes; the prompt becomes the instruction. Per-call
    `processing_kwargs` may hold `{"text": {"max_length"}, "image": {"min_pixels", "max_pixels"}, "video":
    {"num_frames", "fps"}}`.
    """

    def preprocess(
        self,
        inputs: list[Any],
        prompt: str | None = None,
        processing_kwargs: dict[str, dict[str, Any]] | None = None,
        indices: list[int] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """
        Prepares a batch of items.

        Args:
            inputs (`list`): the items.
            prompt (`str`, *optional*): the instruction; none by default.
            processing_kwargs (`dict`, *optional*): overrides of this call, see the class.
            indices (`list[int]`, *optional*): indices to call the items by in errors.
            kwargs: `max_length` and `task` (which selects `query_length` or `document_length`) are heeded.

        Returns:
            `dict`: the processor's tensors, `modality`, and the number of images and videos of each item.

        Raises:
            ItemError: an item cannot be embedded; the message names its index.
        """
        if not inputs:
            return {}
        overrides = self._overrides(processing_kwargs)
        by_task = {"query": self.query_length, "document": self.document_length}.get(kwargs.get("task"))
        limit = kwargs.get("max_length") or by_task
        if limit is not None:
            overrides.setdefault("max_length", limit)
        features = dict(self.processor(list(inputs), instruction=prompt or "", indices=indices, **overrides))
        types, merge = features["mm_token_type_ids"], self.processor.image_processor.merge_size
        if "pixel_values" in features:
            features["num_images_per_sample"] = _media_per_item(types == 1, features["image_grid_thw"], merge)
        if "pixel_values_videos" in features:
            features["num_videos_per_sample"] = _media_per_item(types == 2, features["video_grid_thw"], merge)
        features["modality"] = "message"
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs the model; when only vectors are wanted, features keep just the pooled token of each item, float32."""
        if not _POOLED_ONLY.get() or "pooled_only" not in self._declared_forward_params:
            return super().forward(features, **kwargs)
        given = {key: value for key, value in {**features, **kwargs}.items() if key in self._declared_forward_params}
        pooled = self.model(**given, pooled_only=True).pooler_output
        features["token_embeddings"] = pooled.float()[:, None]
        features["attention_mask"] = torch.ones(len(pooled), 1, dtype=torch.long, device=pooled.device)
        return features

    def on_model_ready(self, model: Any) -> None:
        """Gives the model that holds this module the methods of [`SentenceTransformer`] below."""
        if type(model) is sentence_transformers.SentenceTransformer:
            model.__class__ = SentenceTransformer

    def _overrides(self, per_call: dict[str, dict[str, Any]] | None) -> dict[str, Any]:
        overrides: dict[str, Any] = {}
        for source in (self.processing_kwargs, per_call or {}):
            for kind, values in source.items():
                unknown = sorted(set(values) - set(_OVERRIDES.get(kind, ())))
                if unknown or kind not in _OVERRIDES:
                    raise ValueError(f"processing_kwargs[{kind!r}] has unknown keys {unknown}; known: {_OVERRIDES}")
                overrides.update(values)
        return overrides


def _media_per_item(is_media: torch.Tensor, grids: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Counts the images or videos of each item: int64 `[B]`, from where their tokens are and how many each has."""
    ends = (grids.prod(1) // merge_size**2).cumsum(0)
    upto = torch.searchsorted(ends, is_media.sum(1).cumsum(0), right=True)
    return upto.diff(prepend=upto.new_zeros(1))


@dataclass
class _Numbered:
    """An item with the place the user gave it: batches are sorted by length, and errors must name the user's place."""

    index: int
    item: Any


class SentenceTransformer(sentence_transformers.SentenceTransformer):
    """
    What `SentenceTransformer(...)` becomes when it loads MoEMB.

    It differs from its parent in five points: any item is accepted, errors name an item's index in the user's list,
    `encode([])` has shape `(0, d)`, vectors are of unit length after `truncate_dim` too, and a saved model is
    complete.
    It bears the parent's name because model cards and hub messages print it.
    """

    def is_singular_input(self, inputs: Any) -> bool:
        return as_batch(inputs)[1]

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        items, single = as_batch(inputs)
        numbered = [_Numbered(index, item) for index, item in enumerate(items)]
        embeddings = super().encode(numbered, *args, **kwargs)
        if single:
            return embeddings[0]
        return embeddings if items else self._no_embeddings(embeddings, *args, **kwargs)

    encode.__doc__ = sentence_transformers.SentenceTransformer.encode.__doc__

    def preprocess(self, inputs: list[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        if inputs and all(isinstance(item, _Numbered) for item in inputs):
            kwargs["indices"] = [numbered.index for numbered in inputs]
            inputs = [numbered.item for numbered in inputs]
        return self[0].preprocess(inputs, prompt=prompt, **kwargs)

    def save(self, path: str, *args: Any, **kwargs: Any) -> None:
        self._record_prompts()
        super().save(path, *args, **kwargs)
        complete_saved_code(Path(path))

    def _record_prompts(self) -> None:
        """Tells the processor of prompts that were changed here, so that both routes keep giving the same vector."""
        for module in self.modules():
            if isinstance(module, MoEMBTransformer):
                processor = module.processor
                processor.embedding |= {"prompts": dict(self.prompts), "default_prompt_name": self.default_prompt_name}
                module.model.config.embedding = processor.conventions()

    @staticmethod
    def _input_length(sample: Any) -> int:
        if isinstance(sample, _Numbered):
            sample = sample.item
        if isinstance(sample, dict):
            return sum(map(SentenceTransformer._input_length, sample.values()))
        if isinstance(sample, (list, tuple)):
            return sum(map(SentenceTransformer._input_length, sample))
        return sentence_transformers.SentenceTransformer._input_length(sample)

    @torch.inference_mode()
    def _inference(self, inputs: list, **kwargs: Any) -> Any:
        wanted = kwargs["output_value"]
        unit = any(isinstance(module, sentence_transformers.sentence_transformer.modules.Normalize) for module in self)
        kwargs["normalize_embeddings"] = kwargs["normalize_embeddings"] or unit
        with pooled_only(wanted == "sentence_embedding"):
            outputs = super()._inference(inputs, **kwargs)
        if wanted is None and kwargs["normalize_embeddings"]:
            for output in outputs:
                vector = output["sentence_embedding"]
                output["sentence_embedding"] = torch.nn.functional.normalize(vector, dim=-1)
        return outputs

    def _no_embeddings(self, empty: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of no items: as many columns as any item would have, and its type."""
        if isinstance(empty, list):
            return empty
        call = inspect.signature(sentence_transformers.SentenceTransformer.encode).bind(self, [], *args, **kwargs)
        precision = call.arguments.get("precision") or "float32"
        columns = min(self._full_dimension(), call.arguments.get("truncate_dim") or self.truncate_dim or 2**31)
        columns = -(-columns // 8) if precision.endswith("binary") else columns
        dtype = {"binary": "int8", "ubinary": "uint8"}.get(precision, precision)
        if isinstance(empty, np.ndarray):
            return np.zeros((0, columns), dtype=dtype)
        return torch.zeros((0, columns), dtype=getattr(torch, dtype), device=empty.device)

    def _full_dimension(self) -> int:
        return next(m.get_embedding_dimension() for m in reversed(self) if hasattr(m, "get_embedding_dimension"))

    def _get_model_config(self) -> dict[str, Any]:
        from importlib.metadata import version

        requirements = {
            "transformers": f"~={'.'.join(version('transformers').split('.')[:2])}.0",
            "sentence-transformers": ">=6.2",
        }
        return super()._get_model_config() | {"requirements": requirements}


def complete_saved_code(folder: Path) -> None:
    """
    Makes a folder that Sentence Transformers saved loadable without the package it was saved from.

    The code files are copied in, and the classes in `modules.json`, `config.json` and `processor_config.json` point
    at them.

    Args:
        folder (`Path`): the saved model.
    """
    own = Path(__file__)
    entries = {
        "AutoConfig": "configuration_moemb.MoEMBConfig",
        "AutoModel": "modeling_moemb.MoEMBModel",
        "AutoProcessor": "processing_moemb.MoEMBProcessor",
    }
    roots = [own, *(own.parent / f"{entry.split('.')[0]}.py" for entry in entries.values())]
    # Loaded as remote code, each class sits in a folder of its own, and what saved it has copied it already.
    for root in filter(Path.is_file, roots):
        for file in {str(root), *get_relative_import_files(root)}:
            if Path(file).parent.resolve() != folder.resolve():
                shutil.copy(file, folder / Path(file).name)
    for name, autos in (("config.json", ("AutoConfig", "AutoModel")), ("processor_config.json", ("AutoProcessor",))):
        _update_json(folder / name, lambda data, autos=autos: data | {"auto_map": {a: entries[a] for a in autos}})
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8"))
    for module in listed:
        if module["type"].endswith(f"{own.stem}.{MoEMBTransformer.__name__}"):
            module |= {"type": f"{own.stem}.{MoEMBTransformer.__name__}", "kwargs": FORWARD_KWARGS}
    modules.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def _update_json(path: Path, change: Any) -> None:
    if path.is_file():
        data = change(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


__all__ = ["MoEMBTransformer", "SentenceTransformer", "complete_saved_code", "pooled_only"]
