"""An adapter as a repository: peft's own files, pointing at the published base instead of a folder of this machine."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .convert_safetensors import ConversionError, read_header, read_json_mapping
from .model_card import human
from .model_card_results import read_json
from .publish_assemble import Tree, add_license, tree_folder, write_record
from .publish_card import RECIPES, TRAINING, CardError, cited, together_part, training_part, versions_part
from .publish_sources import PublishError, Sources, record_of


SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_adapter(folder: Path) -> dict[str, Any]:
    """
    Reads the settings of an adapter.

    Args:
        folder (`Path`): as peft's `save_pretrained` writes it.

    Raises:
        PublishError: no adapter, or weights that are no safetensors.
    """
    if not (folder / SETTINGS).is_file():
        raise PublishError(f"--adapter {folder} has no {SETTINGS}; name a folder that peft's save_pretrained wrote")
    if not (folder / WEIGHTS).is_file():
        raise PublishError(f"--adapter {folder} has no {WEIGHTS}; save it with safe_serialization=True")
    try:
        read_header(folder / WEIGHTS)
        return read_json_mapping(folder / SETTINGS)
    except ConversionError as error:
        raise PublishError(f"--adapter {folder}: {error}") from error


def assemble_adapter(
    sources: Sources, adapter: Path, root: Path, repository: str, base: str, together: Sequence[str]
) -> Tree:
    """
    Writes the tree of an adapter.

    Args:
        sources (`Sources`): the base model, whose licence and code state the adapter shares.
        adapter (`Path`): the adapter's folder.
        root (`Path`): folder of the publication.
        repository (`str`): Hub id.
        base (`str`): Hub id of the base model.
        together (`Sequence[str]`): ids of what is published with it.

    Returns:
        `Tree`
    """
    settings = check_adapter(adapter)
    folder = tree_folder(root, repository, "model")
    folder.mkdir(parents=True)
    shutil.copy(adapter / WEIGHTS, folder / WEIGHTS)
    # peft records the folder or id that the base was loaded from, and code for classes of other packages
    settings |= {"base_model_name_or_path": base, "revision": None, "auto_mapping": None, "inference_mode": True}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in ("training.json", "log.jsonl"):
        if (adapter / name).is_file():
            shutil.copy(adapter / name, folder / name)
    for path in sorted((adapter / RECIPES).glob("*.yaml")):
        (folder / RECIPES).mkdir(exist_ok=True)
        shutil.copy(path, folder / RECIPES / path.name)
    add_license(sources, folder)
    write_record(folder, record_of(sources, repository, "adapter", together) | {"description": "", "limits": []})
    return Tree(repository, "model", "adapter", folder)


def adapter_card(folder: Path, about: Mapping[str, Any]) -> str:
    """
    The card of an adapter, from its files.

    Args:
        folder (`Path`): the repository.
        about (`Mapping`): its publication record.
    """
    settings = read_json(folder / SETTINGS)
    try:
        size = sum(math.prod(tensor.shape) for tensor in read_header(folder / WEIGHTS).values())
    except ConversionError as error:
        raise CardError(str(error)) from error
    base = settings["base_model_name_or_path"]
    header = {
        "library_name": "peft",
        "base_model": base,
        "base_model_relation": "adapter",
        "pipeline_tag": "sentence-similarity",
        "tags": ["moemb", "lora", "sentence-transformers", "feature-extraction", "base_model:adapter:" + base],
        "license": about["license"],
    }
    targets = settings.get("target_modules") or []
    rows = {
        "kind": settings.get("peft_type"),
        "rank": settings.get("r"),
        "alpha": settings.get("lora_alpha"),
        "parameters": human(size),
        "modules": [targets] if isinstance(targets, str) else sorted(targets),
        "parameter stacks": settings.get("target_parameters"),
        "trained rows and modules": settings.get("modules_to_save"),
    }
    training = training_part(folder) if (folder / RECIPES).is_dir() or (folder / TRAINING).is_file() else []
    described = cited(about.get("description", ""), folder, "the description")
    lines = [
        "---", yaml.safe_dump(header, sort_keys=False).strip(), "---", "", f"# {about['repository']}", "",
        described or f"An adapter of [{base}](https://huggingface.co/{base}).", "",
        "| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value), "",
        "## Use it", "", "```python", *_snippet(base, about["repository"]), "```", "",
        *(["## Training", "", *training, ""] if training else []),
        "## Versions", "", *versions_part(about), "",
        *(["## Published together", "", *together_part(about), ""] if about["together"] else []),
        "## Limits", "", "Those of the base model.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"`{name}`" for name in value)
    return str(value)


def _snippet(base: str, repository: str) -> list[str]:
    return [
        "from peft import PeftModel",
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{base}", trust_remote_code=True)',
        f'adapted = PeftModel.from_pretrained(model[0].model, "{repository}")',
        "model[0].model = adapted.merge_and_unload()",
        'print(model.encode(["a red bicycle"]).shape)',
    ]
