"""Embeds fixed items with a model folder: the fresh process that `publish_verify` starts, once for each folder.

It imports nothing of MoEMB: what it embeds with is the code in the folder. Usage: `python publish_probe.py REQUEST`, a
JSON object with `folder`, `output` (an .npz to write), `routes` and, where they apply, `adapter`, `device` and
`text_only`.
"""

import json
import os
import sys
import tempfile


def texts() -> list:
    """Short and long, of several scripts, with what a careless template would obey."""
    return [
        "red apple",
        "a small green animal that lives in trees and sings at night",
        "犬 и кошка, κύων και γάτα",
        "<|im_end|><emb> is only text here",
        "0",
        " ".join(f"word {number}" for number in range(60)),
    ]


def plain_texts() -> list:
    """Texts that a stock stack reads as we do: those without special tokens, which it obeys and we do not."""
    return [text for text in texts() if "<" not in text]


def media() -> list:
    """Pictures, a clip, and mixes in order; arrays, so that no file has to travel."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(7)
    square, wide = (
        Image.fromarray(draws.integers(0, 256, shape, dtype=np.uint8)) for shape in ((64, 64, 3), (48, 96, 3))
    )
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    clip = [
        Image.fromarray(np.stack([np.roll(np.tile(ramp, (64, 1)), 8 * step, axis=1)] * 3, axis=-1))
        for step in range(4)
    ]
    return [{"image": square}, {"image": wide, "text": "dark skin tone"}, {"video": clip}]


def mixed() -> list:
    """One document of texts and pictures in order, an item that only our processor takes."""
    pictures = [part["image"] for part in media() if "image" in part]
    return [["a page with", pictures[0], "and", pictures[1]]]


def load(request: dict):
    """The model behind `SentenceTransformer`, with the adapter merged where one is asked for."""
    from sentence_transformers import SentenceTransformer

    device = request.get("device")
    settings = {"device_map": "auto"} if device == "auto" else {}
    if request.get("dtype"):
        settings["dtype"] = request["dtype"]
    model = SentenceTransformer(
        request["folder"],
        trust_remote_code=request["trust_remote_code"],
        device=None if device == "auto" else device or "cpu",
        model_kwargs=settings,
    )
    if request.get("adapter"):
        from peft import PeftModel

        model[0].model = PeftModel.from_pretrained(model[0].model, request["adapter"]).merge_and_unload()
    return model


def kernels_of(model) -> list[str]:
    """
    What computes each operation of a model, `operation on device: source (dtypes), why`, by the model's own code.

    Args:
        model (`torch.nn.Module`): of any class; without kernels of ours, as a stock model, the list is empty.
    """
    package = type(model).__module__.rpartition(".")[0]
    module = sys.modules.get(f"{package}.kernels_moemb")
    if module is None:
        return []
    return [
        f"{row.op} on {row.device}: {row.source} ({', '.join(row.dtypes)}), {row.why}"
        for row in module.kernels_report()
    ]


def by_sentence_transformers(model, items: list) -> dict:
    """Vectors of every side that a user may ask for, one item at a time."""
    sides = {"encode": model.encode, "query": model.encode_query, "document": model.encode_document}
    return {
        f"sentence_transformers/{name}": encode(items, batch_size=1, show_progress_bar=False)
        for name, encode in sides.items()
    }


def unit(vectors):
    """
    Unit vectors, bit for bit as Sentence Transformers makes them: in its module, and once more after `truncate_dim`.

    Args:
        vectors (`torch.FloatTensor` of shape `(items, dim)`): pooled states.
    """
    import torch

    once = torch.nn.functional.normalize(vectors, p=2, dim=-1)
    return torch.nn.functional.normalize(once, p=2, dim=-1)


def by_auto_classes(request: dict, items: list) -> dict:
    """`AutoModel` and `AutoProcessor`, divided by their length."""
    import torch
    from transformers import AutoModel, AutoProcessor

    trust = {"trust_remote_code": request["trust_remote_code"]}
    model = AutoModel.from_pretrained(request["folder"], **trust).eval()
    processor = AutoProcessor.from_pretrained(request["folder"], **trust)
    rows = []
    for item in items:
        with torch.inference_mode():
            pooled = model(**processor([item]), pooled_only=True).pooler_output.float()
        rows.append(unit(pooled))
    return {"auto/encode": torch.cat(rows).numpy()}


def by_mteb(model, items: list) -> dict:
    """The wrapper that mteb puts around a Sentence Transformers model, for texts."""
    import mteb
    from datasets import Dataset
    from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
    from torch.utils.data import DataLoader

    wrapper = SentenceTransformerEncoderWrapper(model)
    task = mteb.get_task("NFCorpus")
    found = {}
    for side in (PromptType.query, PromptType.document):
        loader = DataLoader(Dataset.from_dict({"text": items}), batch_size=1)
        found[f"mteb/{side.value}"] = wrapper.encode(
            loader, task_metadata=task.metadata, hf_split="test", hf_subset="default", prompt_type=side, batch_size=1
        )
    return found


def main(request: dict) -> int:
    """Embeds by every route and writes the vectors."""
    import numpy as np

    model = load(request)
    items = (
        plain_texts()
        if request.get("text_only")
        else [*texts(), *media(), *(mixed() if request["trust_remote_code"] else [])]
    )
    found = {}
    if "sentence_transformers" in request["routes"]:
        found |= by_sentence_transformers(model, items)
    if "auto" in request["routes"]:
        found |= by_auto_classes(request, items)
    if "mteb" in request["routes"]:
        found |= by_mteb(model, texts())
    code = sorted(name for name in sys.modules if name.split(".")[0] in ("moemb", "modeling_moemb"))
    if code:
        raise SystemExit(f"the folder was to run on its own code, but {code[:3]} were imported")
    with open(request["output"], "wb") as stream:
        arrays = {name: np.asarray(value, dtype=np.float32) for name, value in found.items()}
        np.savez(stream, kernels=np.asarray(kernels_of(model[0].model), dtype=str), **arrays)
    return 0


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    with tempfile.TemporaryDirectory() as modules:
        os.environ["HF_MODULES_CACHE"] = modules
        sys.exit(main(json.loads(sys.argv[1])))
