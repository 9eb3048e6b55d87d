"""Writes a model repository with fewer experts: router rows and expert slices are copied by byte range.

Memory stays at one block whatever the size of the checkpoint, and the target appears only whole: see
`convert_safetensors` and `convert_work`. Nothing is computed: the routing weights renormalise over the chosen experts
by themselves, as if the removed ones had a router logit of minus infinity.

Everything else in the source repository is copied as it is, but weights in other formats, which would be those of all
experts.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .convert import expected_shapes, write_weights
from .convert_plan import MAX_SHARD_BYTES, check_against_model, split_into_shards
from .convert_safetensors import (
    ConversionError,
    PlannedTensor,
    Segment,
    StoredTensor,
    read_checkpoint,
    read_json_mapping,
    rows,
    whole,
)
from .convert_work import WorkFolder, recipe_of
from .errors import MoEMBError
from .model_card import UNTRAINED_EMB, card_text, human, license_of
from .saliency import check_keep


RECORD_NAME = "expert_pruning.json"
STALE_BUDGET = (
    "The compute budget in `config.json` was calibrated with all experts; calibrate it again before you rely on it."
)
_PER_EXPERT = re.compile(
    r"^language_model\.layers\.(\d+)\.mlp\.((gate|task_router)\.weight|experts\.(gate_up_proj|down_proj))$"
)
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf", ".h5", ".msgpack", ".ot")


class PruningError(MoEMBError, ValueError):
    """A repository that cannot be pruned. The message names the setting or file, its value and the remedy."""


def read_pruning_config(folder: Path) -> dict[str, Any]:
    """Reads `config.json` of a MoEMB repository.

    Raises:
        PruningError: no repository, or a checkpoint that is not MoEMB's.
    """
    path = folder / "config.json"
    try:
        settings = read_json_mapping(path)
    except FileNotFoundError:
        raise PruningError(f"model {folder} has no config.json; is it a model repository?") from None
    except ConversionError as error:
        raise PruningError(str(error)) from error
    if settings.get("model_type") != "moemb":
        raise PruningError(
            f"model {folder} has model_type {settings.get('model_type')!r}: experts are pruned from MoEMB "
            f"repositories; make one with 'moemb convert --from {folder} --to DIR'"
        )
    if settings.get("feed_forward", "moe") != "moe":
        raise PruningError(
            f"model {folder} has no learned router (feed_forward {settings['feed_forward']!r}); experts are pruned "
            "from native or upcycled models"
        )
    text = settings.get("text_config")
    if not isinstance(text, dict) or not all(
        type(text.get(name)) is int for name in ("num_experts", "num_experts_per_tok", "num_hidden_layers")
    ):
        raise PruningError(
            f"{path} must say num_experts, num_experts_per_tok and num_hidden_layers in its text_config; save the "
            "model again with save_pretrained"
        )
    return settings


def check_target(target: Path) -> None:
    """Raises `PruningError` when there is something at the target already: called before anything is measured."""
    if target.is_symlink() or (target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None)):
        raise PruningError(f"output {target} exists already; remove it or choose another output")


def write_pruned_repository(
    source: Path,
    target: Path,
    keep: Tensor,
    record: Mapping[str, Any],
    base_model: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """
    Writes a repository with a part of the experts. Rerunning after an interruption continues with the first
    unfinished weight file.

    Args:
        source (`Path`): folder of a MoEMB repository.
        target (`Path`): the folder to create.
        keep (`torch.LongTensor` of shape `(layers, kept)`): ascending indices of the experts to keep in each block.
        record (`Mapping`): how they were chosen: `model` (its name), `saliency`, `items`, and whatever else is to be
            kept in `expert_pruning.json`, JSON-serialisable.
        base_model (`str`, *optional*): Hub id of the source, for the card.
        max_shard_bytes (`int`, *optional*, defaults to 4 GiB): size of a weight file.

    Returns:
        `Path`: the target.

    Raises:
        PruningError: `keep` does not fit the model, the source is incomplete or not MoEMB's, the target exists, or
            the disk is full.
    """
    source, target = Path(source), Path(target).expanduser().absolute()
    with _as_pruning_errors():
        stored = read_checkpoint(source)
        settings = read_pruning_config(source)
        planned = plan_pruned(stored, settings, keep)
        config = pruned_config(settings, keep.shape[1])
        check_against_model(planned, expected_shapes(config))
        shards = split_into_shards(planned, max_shard_bytes)
        recipe = recipe_of(stored, shards, keep=keep.tolist())
        with WorkFolder(target, recipe, option="output", doing="writing") as work:
            if work.finished:
                work.forget()
                return target
            write_weights(work, shards)
            _write_rest(source, work.folder, target.name, settings, config, keep, record, base_model)
            read_checkpoint(work.folder)
            work.publish()
    return target


@contextmanager
def _as_pruning_errors() -> Iterator[None]:
    """The machinery is the converter's, and so are its errors."""
    try:
        yield
    except ConversionError as error:
        raise PruningError(str(error)) from error


def plan_pruned(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], keep: Tensor) -> list[PlannedTensor]:
    """Plans the tensors of the smaller checkpoint.

    Args:
        stored (`Mapping[str, StoredTensor]`): the checkpoint.
        settings (`Mapping`): its `config.json`.
        keep (`torch.LongTensor` of shape `(layers, kept)`): ascending indices per block.

    Raises:
        PruningError: `keep` does not fit the configuration, or a tensor does not.
    """
    text = settings["text_config"]
    experts, layers = text["num_experts"], text["num_hidden_layers"]
    if keep.dim() != 2 or keep.shape[0] != layers:
        raise PruningError(f"the kept experts have shape {tuple(keep.shape)}, but the model has {layers} blocks")
    check_keep(keep.shape[1], experts, text["num_experts_per_tok"])
    if bool((keep < 0).any() | (keep >= experts).any()) or bool((keep.diff(dim=1) <= 0).any()):
        raise PruningError(f"the kept experts must be ascending indices from 0 to {experts - 1} in every block")
    planned = []
    for key, tensor in stored.items():
        match = _PER_EXPERT.match(key)
        if not match:
            planned.append(PlannedTensor(key, tensor.dtype, tensor.shape, (whole(tensor),)))
            continue
        if not tensor.shape or tensor.shape[0] != experts or int(match[1]) >= layers:
            raise PruningError(
                f"'{key}' in {tensor.file} is {tensor.shape}, which does not fit the {experts} experts and {layers} "
                "blocks of config.json"
            )
        chosen = keep[int(match[1])].tolist()
        shape = (len(chosen), *tensor.shape[1:])
        planned.append(PlannedTensor(key, tensor.dtype, shape, tuple(_runs(tensor, chosen))))
    return planned


def _runs(tensor: StoredTensor, chosen: list[int]) -> Iterator[Segment]:
    """One segment per run of neighbouring rows."""
    start = 0
    for place in range(1, len(chosen) + 1):
        if place == len(chosen) or chosen[place] != chosen[place - 1] + 1:
            yield rows(tensor, chosen[start], chosen[place - 1] + 1)
            start = place


def pruned_config(settings: Mapping[str, Any], num_experts: int) -> Any:
    """The `MoEMBConfig` of the smaller model; checks that it is a valid one."""
    from modeling_moemb import MoEMBConfig

    settings = json.loads(json.dumps(settings))
    settings["text_config"]["num_experts"] = num_experts
    try:
        return MoEMBConfig.from_dict(settings)
    except (ValueError, TypeError) as error:
        raise PruningError(f"config.json of the model describes none that can be built: {error}") from error


def _write_rest(
    source: Path,
    folder: Path,
    name: str,
    settings: Mapping[str, Any],
    config: Any,
    keep: Tensor,
    record: Mapping[str, Any],
    base_model: str | None,
) -> None:
    """Everything but the weights."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        weights = path.suffix in _OTHER_WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not hidden and not weights and relative.as_posix() not in ("README.md", "config.json"):
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / relative)
    # The file is changed, not written anew: whatever else its author put there stays.
    text = dict(settings["text_config"]) | {"num_experts": keep.shape[1]}
    _write_json(folder / "config.json", dict(settings) | {"text_config": text})
    if not (source / "modules.json").is_file():
        _complete(source, folder, config)
    experts = settings["text_config"]["num_experts"]
    earlier = read_json_mapping(source / RECORD_NAME) if (source / RECORD_NAME).is_file() else None
    about = {"experts_before": experts, "experts_kept": keep.shape[1], **record, "kept": keep.tolist()}
    _write_json(folder / RECORD_NAME, about | ({"before": earlier} if earlier else {}))
    (folder / "README.md").write_text(_card(source, name, settings, config, record, base_model), encoding="utf-8")


def _complete(source: Path, folder: Path, config: Any) -> None:
    """A bare checkpoint (weights, configuration, processor) gets what makes it a repository."""
    from modeling_moemb.processing_moemb import MoEMBProcessor

    from .repository import write_repository_files

    try:
        processor = MoEMBProcessor.from_pretrained(str(source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PruningError(f"model {source} has no complete processor ({error}); save it there") from error
    write_repository_files(folder, config=config, processor=processor)


def _card(
    source: Path,
    name: str,
    settings: Mapping[str, Any],
    config: Any,
    record: Mapping[str, Any],
    base_model: str | None,
) -> str:
    text, kept = settings["text_config"], config.text_config.num_experts
    removed = (text["num_experts"] - kept) * text["num_hidden_layers"]
    size = removed * 3 * config.text_config.hidden_size * config.text_config.moe_intermediate_size
    description = (
        f"{record['model']} with {kept} of its {text['num_experts']} routed experts in every block, the "
        f"others removed by `moemb prune-experts`: {human(size)} parameters fewer, the same number of experts per "
        f"token. Kept are those with the highest {record['saliency']} saliency on {record['items']} "
        f"calibration items. Nothing was trained afterwards. `{RECORD_NAME}` lists what was kept and why."
    )
    readme = source / "README.md"
    before = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    return card_text(
        config,
        name=name,
        base_model=base_model,
        license=license_of(source),
        description=description,
        limits=[STALE_BUDGET] if settings.get("adaptive_compute") else [],
        trained=UNTRAINED_EMB not in before,
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
