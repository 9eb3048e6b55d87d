"""Loads published trees in fresh processes and compares their vectors with the source's.

The reference is the source: the same checkpoint, loaded by the classes of this checkout. A model and an adapter must
give the same bits by every route; the plain variant runs on transformers' own arithmetic, so its vectors are compared
by their cosine.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from .convert_safetensors import read_checkpoint
from .publish_assemble import Tree
from .publish_sources import PublishError


PROBE = Path(__file__).with_name("publish_probe.py")
# fp32 sums in another order; bf16 weights round every product.
LOWEST_COSINE = {"float32": 0.99999, "bfloat16": 0.99, "float16": 0.999}
# Up to this size of the weights a plain variant is compared in fp32, whatever they are stored in.
FLOAT32_UP_TO = 4 * 2**30


@dataclass(frozen=True)
class Embedded:
    """
    What a process made of the fixed items.

    Args:
        vectors (`dict[str, np.ndarray]`): float32 `[items, dim]` by route and side, or by side.
        kernels (`list[str]`): what computed each operation; empty for a model that has no kernels of ours.
    """

    vectors: dict[str, np.ndarray]
    kernels: list[str]


def probe(request: dict[str, Any], folder: Path) -> Embedded:
    """
    Vectors of the fixed items, by route and side, from a process that knows only the model's folder.

    Args:
        request (`dict`): see `publish_probe`; `output` is added.
        folder (`Path`): for the file of vectors.

    Raises:
        PublishError: the folder does not load; the message ends with the process' own.
    """
    output = folder / f"{len(list(folder.iterdir()))}.npz"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", str(PROBE), json.dumps(request | {"output": str(output)})]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-25:])
        raise PublishError(f"{request['folder']} does not embed in a fresh process:\n{said}\nNothing was published")
    with np.load(output, allow_pickle=False) as arrays:
        vectors = {name: arrays[name] for name in arrays.files if name != "kernels"}
        return Embedded(vectors, arrays["kernels"].tolist())


def reference(
    source: Path,
    device: str | None = None,
    adapter: Path | None = None,
    dtype: str | None = None,
    full_compute: bool = False,
) -> Embedded:
    """
    The source's vectors of the fixed items, by the classes of this checkout.

    Args:
        source (`Path`): repository or checkpoint.
        device (`str`, *optional*): where the model runs.
        adapter (`Path`, *optional*): merged into the model.
        dtype (`str`, *optional*): of the weights; as they are stored by default.
        full_compute (`bool`, *optional*, defaults to `False`): as a plain variant: without the recorded budget,
            and only the texts that a stock stack reads as we do.

    Returns:
        `Embedded`: vectors by side: `encode`, `query`, `document`.
    """
    import torch

    from modeling_moemb import MoEMBModel
    from modeling_moemb.processing_moemb import MoEMBProcessor

    from . import publish_probe

    settings: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    if dtype is not None:
        settings["dtype"] = getattr(torch, dtype)
    model = MoEMBModel.from_pretrained(str(source), **settings).eval()
    if device != "auto":
        model = model.to(device or "cpu")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    processor = MoEMBProcessor.from_pretrained(str(source))
    prompts, default = processor.embedding["prompts"], processor.embedding["default_prompt_name"]
    sides = {"encode": prompts.get(default, ""), **{side: prompts.get(side, "") for side in ("query", "document")}}
    items, budget = [*publish_probe.texts(), *publish_probe.media(), *publish_probe.mixed()], None
    if full_compute:
        items, budget = publish_probe.plain_texts(), {}
    vectors: dict[str, np.ndarray] = {}
    for side, prompt in sides.items():
        rows = []
        for item in items:
            features = processor([item], instruction=prompt).to(model.device)
            with torch.inference_mode():
                pooled = model(**features, adaptive_compute=budget, pooled_only=True).pooler_output.float()
            rows.append(publish_probe.unit(pooled).cpu())
        vectors[side] = torch.cat(rows).numpy()
    return Embedded(vectors, publish_probe.kernels_of(model))


def fresh_reference(*args: Any, **kwargs: Any) -> Embedded:
    """[`reference`] in a process of its own: what was switched in this one (kernels, threads) does not count."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(reference, *args, **kwargs).result()


def verify(source: Path, trees: Sequence[Tree], adapter: Path | None = None, device: str | None = None) -> list[dict]:
    """
    Compares every tree that holds weights with the source.

    Args:
        source (`Path`): repository or checkpoint.
        trees (`Sequence[Tree]`): what would be uploaded.
        adapter (`Path`, *optional*): the adapter's source.
        device (`str`, *optional*): `cpu` by default; `auto` spreads a model that fits no single device.

    Returns:
        `list[dict]`: one row per tree: `repository`, `routes`, `items`, `largest_difference` and, for a plain variant,
        `lowest_cosine`.

    Raises:
        PublishError: a tree does not load, or gives other vectors.
    """
    rows = []
    base = next(tree for tree in trees if tree.kind == "model")
    wanted = fresh_reference(source, device)
    with tempfile.TemporaryDirectory(prefix="moemb-verify-") as name:
        scratch = Path(name)
        for tree in trees:
            request: dict[str, Any] = {"folder": str(tree.folder), "device": device, "trust_remote_code": True}
            if tree.kind == "model":
                request["routes"] = ["sentence_transformers", *([] if device == "auto" else ["auto"])]
                rows.append(_compare_bits(tree, probe(request, scratch), wanted))
            elif tree.kind == "plain":
                dtype = "float32" if _weight_bytes(source) <= FLOAT32_UP_TO else None
                request |= {"routes": ["sentence_transformers"], "trust_remote_code": False, "text_only": True}
                full = fresh_reference(source, device, dtype=dtype, full_compute=True)
                rows.append(_compare_cosine(tree, probe(request | {"dtype": dtype}, scratch), full, dtype))
            elif tree.kind == "adapter":
                request |= {
                    "folder": str(base.folder), "adapter": str(tree.folder), "routes": ["sentence_transformers"]
                }  # fmt: skip
                rows.append(_compare_bits(tree, probe(request, scratch), fresh_reference(source, device, adapter)))
    return rows


def _side(route: str) -> str:
    return route.rsplit("/", 1)[1]


def _compare_bits(tree: Tree, found: Embedded, wanted: Embedded) -> dict:
    differences = {}
    for route, vectors in found.vectors.items():
        expected = wanted.vectors[_side(route)]
        if vectors.shape != expected.shape:
            raise PublishError(
                f"{tree.repository} by {route} gives vectors of shape {vectors.shape}, not {expected.shape}"
            )
        differences[route] = float(np.abs(vectors - expected).max())
    worst = max(differences, key=differences.get)
    if differences[worst] != 0.0 and found.kernels != wanted.kernels:  # also NaN
        there = sorted(set(found.kernels) - set(wanted.kernels))
        here = sorted(set(wanted.kernels) - set(found.kernels))
        raise PublishError(
            f"{tree.repository} by {worst} was computed by other kernels than the source, so its vectors differ by "
            f"{differences[worst]:.3g}: {'; '.join(there) or 'none'}; the source: {'; '.join(here) or 'none'}. Mend "
            "the kernels (`moemb kernels` shows them), or set MOEMB_KERNELS=off for both. Nothing was published"
        )
    if differences[worst] != 0.0:
        raise PublishError(
            f"{tree.repository} by {worst} gives vectors that differ from the source's by {differences[worst]:.3g}; "
            "they must be the same bits: is the source's config.json that of its weights? Nothing was published"
        )
    items = len(next(iter(found.vectors.values())))
    return {"repository": tree.repository, "routes": sorted(found.vectors), "items": items, "largest_difference": 0.0}


def _weight_bytes(source: Path) -> int:
    return sum(tensor.num_bytes for tensor in read_checkpoint(source).values())


def _compare_cosine(tree: Tree, found: Embedded, wanted: Embedded, dtype: str | None) -> dict:
    dtype = dtype or json.loads((tree.folder / "config.json").read_text(encoding="utf-8")).get("dtype") or "float32"
    limit = LOWEST_COSINE.get(dtype, 0.99)
    lowest, largest = 1.0, 0.0
    for route, vectors in found.vectors.items():
        expected = wanted.vectors[_side(route)]
        lowest = min(lowest, float((vectors * expected).sum(axis=1).min()))
        largest = max(largest, float(np.abs(vectors - expected).max()))
    if not lowest >= limit:
        raise PublishError(
            f"{tree.repository} gives texts a vector whose cosine with the source's is {lowest:.7f}, below {limit} "
            f"({dtype}). Nothing was published"
        )
    return {
        "repository": tree.repository,
        "routes": sorted(found.vectors),
        "items": len(next(iter(found.vectors.values()))),
        "largest_difference": largest,
        "lowest_cosine": lowest,
    }
