"""Assembles the trees of a publication: the model, its plain variant, an adapter, and the kernel repositories.

Each tree is exactly what will be uploaded: weights, settings, code, results and recipes, a licence, `publication.json`
(what no other file says), the card that these files give, and last the manifest of all of it.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from .convert_safetensors import INDEX_NAME, read_checkpoint
from .model_card import count_parameters
from .publish_card import CARD, PUBLICATION, RECIPES, render_card
from .publish_manifest import write_manifest
from .publish_plain import export_plain
from .publish_sources import PublishError, Sources, record_of
from .repository import write_repository_files


# Records of how a model came about that lie beside its weights.
RECORDS = ("training.json", "log.jsonl", "calibration.json", "expert_pruning.json", "upcycling.json")
NOTICES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "ATTRIBUTION.md")
DISK_MARGIN = 128 * 2**20
_COPY_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Tree:
    """One repository to be: where it goes and the folder that holds it."""

    repository: str
    repo_type: str
    kind: str
    folder: Path


def tree_folder(root: Path, repository: str, repo_type: str) -> Path:
    """Where a repository lies below the folder of a publication: `models/ORG/NAME`, `kernels/ORG/NAME`."""
    return root / f"{repo_type}s" / repository


def check_disk(sources: Sources, root: Path, copies: int) -> None:
    """
    Raises before anything is written when the disk has no room for it.

    Args:
        sources (`Sources`): the model.
        root (`Path`): a folder on the disk.
        copies (`int`): how many times the weights are written.

    Raises:
        PublishError: the disk is too full.
    """
    weights = sum(tensor.num_bytes for tensor in read_checkpoint(sources.folder).values())
    needed = copies * weights + DISK_MARGIN
    free = shutil.disk_usage(root).free
    if free < needed:
        raise PublishError(
            f"the disk of {root} is too full: {needed / 1e9:.1f} GB are needed to assemble the repositories, "
            f"{free / 1e9:.1f} GB are free; make room or choose another folder. Nothing was published"
        )


def assemble_model(sources: Sources, root: Path, repository: str, together: Sequence[str]) -> Tree:
    """
    Writes the tree of the model.

    Args:
        sources (`Sources`): what it is made of.
        root (`Path`): folder of the publication.
        repository (`str`): Hub id.
        together (`Sequence[str]`): ids of what is published with it.

    Returns:
        `Tree`
    """
    from modeling_moemb import MoEMBConfig
    from modeling_moemb.processing_moemb import MoEMBProcessor

    folder = tree_folder(root, repository, "model")
    folder.mkdir(parents=True)
    _copy_weights(sources.folder, folder)
    config = MoEMBConfig.from_pretrained(str(sources.folder))
    if not config.architectures:
        config.architectures = ["MoEMBModel"]
    processor = MoEMBProcessor.from_pretrained(str(sources.folder))
    write_repository_files(folder, config=config, processor=processor)
    _keep_calibration_note(sources.folder, folder)
    parameters = count_parameters(config) if _has_stock_blocks(config) else None
    finish_tree(sources, folder, record_of(sources, repository, "model", together, parameters=parameters))
    return Tree(repository, "model", "model", folder)


def assemble_plain(sources: Sources, root: Path, repository: str, source: str, together: Sequence[str]) -> Tree:
    """
    Writes the tree of the plain variant.

    Args:
        sources (`Sources`): what it is made of.
        root (`Path`): folder of the publication.
        repository (`str`): Hub id.
        source (`str`): Hub id of the model that it is the plain variant of.
        together (`Sequence[str]`): ids of what is published with it.

    Raises:
        PlainError: the stock architecture has no place for this model.
    """
    folder = tree_folder(root, repository, "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    export_plain(sources.folder, folder)
    about = record_of(sources, repository, "plain", together, source_repository=source)
    about |= {"base_model": source, "description": "", "limits": []}
    finish_tree(sources, folder, about, with_records=False)
    return Tree(repository, "model", "plain", folder)


def finish_tree(sources: Sources, folder: Path, about: dict[str, Any], with_records: bool = True) -> None:
    """Adds what tells of a model: records, results, recipes, licence, card and manifest."""
    if with_records:
        for name in RECORDS:
            if (sources.folder / name).is_file():
                shutil.copy(sources.folder / name, folder / name)
        for path in sources.recipes:
            (folder / RECIPES).mkdir(exist_ok=True)
            shutil.copy(path, folder / RECIPES / path.name)
    for name, path in sources.results.items():
        # the plain variant has no dial: of all figures only those of its own serving are its
        if with_records or name == "serving.json":
            (folder / "results" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "results" / name)
    add_license(sources, folder)
    write_record(folder, about)


def add_license(sources: Sources, folder: Path) -> None:
    """Copies the text of the licence and notices: the model's own, or the checkout's where it is the same licence."""
    found = {path.name: path for path in sources.notices}
    found |= {name: sources.folder / name for name in NOTICES if (sources.folder / name).is_file()}
    for name, path in found.items():
        shutil.copy(path, folder / name)
    text = sources.state.root / "LICENSE"
    if (
        sources.card.license == "apache-2.0"
        and not any(name.startswith("LICENSE") for name in found)
        and text.is_file()
    ):
        shutil.copy(text, folder / "LICENSE")


def write_record(folder: Path, about: dict[str, Any]) -> None:
    """Writes `publication.json`, the card that the folder's files now give, and the manifest."""
    text = json.dumps(about, indent=2, ensure_ascii=False)
    (folder / PUBLICATION).write_text(text.replace(str(Path.home()), "~") + "\n", encoding="utf-8")
    (folder / CARD).write_text(render_card(folder), encoding="utf-8")
    write_manifest(folder)


def _copy_weights(source: Path, target: Path) -> None:
    """Copies the weight files with a progress bar."""
    files = sorted({tensor.file for tensor in read_checkpoint(source).values()})
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Copying weights", delay=2) as bar:
        for path in files:
            with path.open("rb") as reader, (target / path.name).open("wb") as writer:
                while block := reader.read(_COPY_BLOCK):
                    writer.write(block)
                    bar.update(len(block))
                writer.flush()
                os.fsync(writer.fileno())
    if (source / INDEX_NAME).is_file():
        shutil.copy(source / INDEX_NAME, target / INDEX_NAME)


def _keep_calibration_note(source: Path, target: Path) -> None:
    """Settings of config.json that no field of the configuration holds, such as what a budget was calibrated on."""
    old = json.loads((source / "config.json").read_text(encoding="utf-8"))
    path = target / "config.json"
    new = json.loads(path.read_text(encoding="utf-8"))
    lost = {key: value for key, value in old.items() if key not in new and key not in ("torch_dtype", "_name_or_path")}
    if lost:
        path.write_text(json.dumps(new | lost, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _has_stock_blocks(config: Any) -> bool:
    """Whether `count_parameters`, which counts the stock architecture, counts this one."""
    return getattr(config, "feed_forward", "moe") in (None, "moe")
