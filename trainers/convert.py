"""`moemb convert`: a stock Qwen3.5 checkpoint becomes a MoEMB model repository of one of four designs.

The weights are copied by byte range (see `convert_safetensors.py`): memory stays at one block whatever the size of the
checkpoint, so 35B and 122B models convert on a small machine with enough disk.
"""

import argparse
import json
import math
import shutil
from dataclasses import astuple
from pathlib import Path

from tqdm import tqdm

from .convert_design import add_design_arguments, description_of, design_of
from .convert_plan import (
    EMBEDDING_KEY,
    MAX_SHARD_BYTES,
    base_keys,
    check_against_model,
    pack_experts,
    split_into_shards,
    with_emb_row,
)
from .convert_safetensors import (
    INDEX_NAME,
    ConversionError,
    PlannedTensor,
    StoredTensor,
    read_checkpoint,
    read_json_mapping,
    whole,
    write_shard,
)
from .convert_source import locate_source, names_file, processor_of, read_stock_config, read_vocabulary, was_trained
from .convert_work import WorkFolder, recipe_of
from .upcycling import Design, moemb_settings, plan_feed_forward


HELP = "turn a stock Qwen3.5 checkpoint into a MoEMB repository: native experts, upcycled, by modality, dense"

DISK_MARGIN = 64 * 2**20
PROCESSOR_FILES = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `moemb convert`."""
    parser.add_argument(
        "--from", dest="source", required=True, metavar="DIR_OR_ID", help="checkpoint folder or Hub id"
    )
    parser.add_argument("--to", dest="target", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="write the stock model_type, which stock stacks load without remote code (no compute dial); for the "
        "designs native and dense",
    )
    parser.add_argument("--emb-seed", type=int, default=0, help="seed of the noise in the <emb> row (default 0)")
    parser.add_argument(
        "--max-shard-gb", type=float, default=MAX_SHARD_BYTES / 2**30, help="size of a weight file in GiB (default 4)"
    )
    add_design_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Convert as the flags say and print where the repository is."""
    target = convert_checkpoint(
        args.source,
        args.target,
        plain=args.plain,
        emb_seed=args.emb_seed,
        revision=args.revision,
        max_shard_bytes=args.max_shard_gb * 2**30,
        design=design_of(args),
    )
    kind = "plain" if args.plain else "MoEMB"
    print(f"{kind} model repository ({args.design}) written to {target}")
    return 0


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    plain: bool = False,
    emb_seed: int = 0,
    revision: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    design: Design | None = None,
) -> Path:
    """Convert a `Qwen3_5MoeForConditionalGeneration` checkpoint, packed or one key per expert, sharded or not; for the
    designs that are not native a dense `Qwen3_5ForConditionalGeneration` one, or a dense MoEMB repository.

    Rerunning after an interruption continues with the first unfinished weight file. The target appears only whole.

    Args:
        source (`str` or `Path`): a folder as transformers saves it, or a Hub id.
        target (`str` or `Path`): the folder to create.
        plain (`bool`, *optional*, defaults to `False`): write the variant that stock stacks load without our code:
            the stock `model_type`, key names and expert layout, no `lm_head`.
        emb_seed (`int`, *optional*, defaults to 0): seed of the noise in the `<emb>` row, not negative.
        revision (`str`, *optional*): branch, tag or commit of a Hub id.
        max_shard_bytes (`float`, *optional*, defaults to 4 GiB): size of a weight file, at least 1.
        design (`Design`, *optional*): native experts when `None`.

    Returns:
        `Path`: the target.

    Raises:
        ConversionError: the source is not such a checkpoint or is incomplete, the target exists, an option is out of
            range, or the disk is full; each names the file or key and the remedy.
    """
    design = design or Design()
    if plain and design.kind not in ("native", "dense"):
        raise ConversionError(
            f"--plain does not go with --design {design.kind}: stock stacks have no such block; leave --plain out"
        )
    if emb_seed < 0:
        raise ConversionError(f"--emb-seed is {emb_seed}, but must be 0 or more")
    if not 1 <= max_shard_bytes < math.inf:
        raise ConversionError(f"--max-shard-gb is {max_shard_bytes / 2**30:g}, but must be finite and above 0")
    max_shard_bytes = int(max_shard_bytes)
    target = Path(target).expanduser().absolute()
    folder = locate_source(source, revision)
    stored = read_checkpoint(folder)
    settings = read_stock_config(folder, design)
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            read_json_mapping(folder / name)
    kept_id, used_rows = read_vocabulary(folder)
    processor = processor_of(folder, settings, plain)
    emb_token_id = processor.tokenizer.convert_tokens_to_ids("<emb>")
    tensors = base_keys(stored)
    planned = plan_tensors(
        tensors, emb_token_id, used_rows, emb_seed, plain=plain, keep_row=kept_id == emb_token_id, settings=settings,
        design=design,
    )  # fmt: skip
    config = build_config(settings, emb_token_id, _vocabulary_size(planned), plain, design)
    shards = split_into_shards(planned, max_shard_bytes)
    recipe = recipe_of(stored, shards, options=[plain, emb_seed, emb_token_id, max_shard_bytes, *astuple(design)])
    with WorkFolder(target, recipe) as work:
        if work.finished:
            work.forget()
            return target
        write_weights(work, shards)
        _write_rest(work.folder, target.name, config, processor, source, folder, design)
        work.publish()
    return target


def plan_tensors(
    tensors: dict[str, StoredTensor],
    emb_token_id: int,
    used_rows: int,
    emb_seed: int,
    *,
    plain: bool,
    keep_row: bool,
    settings: dict,
    design: Design | None = None,
) -> list[PlannedTensor]:
    """Plan every tensor of the new checkpoint and check it against the model that will load it.

    Args:
        tensors (`dict[str, StoredTensor]`): base-model keys, see [`base_keys`].
        emb_token_id (`int`): row of `<emb>`.
        used_rows (`int`): rows of the embedding table that the tokenizer can produce.
        emb_seed (`int`): seed of the row's noise.
        plain (`bool`): stock key names and expert layout.
        keep_row (`bool`): the stock tokenizer has `<emb>` already, so its row is trained: leave it.
        settings (`dict`): the stock `config.json`.
        design (`Design`, *optional*): native when `None`.
    """
    table = tensors.get(EMBEDDING_KEY)
    if table is None:
        raise ConversionError(f"the checkpoint lacks the embedding table 'model.{EMBEDDING_KEY}'")
    if len(table.shape) != 2 or not table.num_bytes:
        raise ConversionError(f"the embedding table 'model.{EMBEDDING_KEY}' in {table.file} has shape {table.shape}")

    def add_row(planned):
        if keep_row and emb_token_id < table.shape[0]:
            return planned
        return with_emb_row(planned, table, emb_token_id, used_rows, emb_seed)

    design = design or Design()
    packed = add_row(pack_experts(tensors) if design.kind == "native" else plan_feed_forward(tensors, design))
    with names_file("config.json"):
        config = build_config(settings, emb_token_id, _vocabulary_size(packed), False, design)
        expected = expected_shapes(config)
    check_against_model(packed, expected)
    if not plain:
        return packed
    return [
        PlannedTensor(f"model.{t.key}", t.dtype, t.shape, t.segments)
        for t in add_row([PlannedTensor(k, t.dtype, t.shape, (whole(t),)) for k, t in tensors.items()])
    ]


def expected_shapes(config) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the MoEMB model of a configuration, without allocating its weights."""
    import torch

    from modeling_moemb import MoEMBModel

    with torch.device("meta"):
        model = MoEMBModel(config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def build_config(settings: dict, emb_token_id: int, vocabulary_size: int, plain: bool, design: Design | None = None):
    """Return the configuration of the new repository: `MoEMBConfig`, or the stock class when `plain`."""
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    from modeling_moemb import MoEMBConfig

    design = design or Design()
    settings = json.loads(json.dumps(settings))
    settings["text_config"]["vocab_size"] = vocabulary_size
    if plain:
        dense = design.kind == "dense"
        settings["architectures"] = [f"Qwen3_5{'' if dense else 'Moe'}ForConditionalGeneration"]
        return (Qwen3_5Config if dense else Qwen3_5MoeConfig).from_dict(settings)
    return MoEMBConfig.from_dict(moemb_settings(settings, design) | {"emb_token_id": emb_token_id})


def _vocabulary_size(planned: list[PlannedTensor]) -> int:
    return next(t.shape[0] for t in planned if t.key.endswith(EMBEDDING_KEY))


def write_weights(work: WorkFolder, shards: dict[str, list[PlannedTensor]]) -> None:
    """Write the shards that are not there yet, then the index; the progress bar counts bytes.

    Raises:
        ConversionError: the disk has no room for what is left to write.
    """
    sizes = {name: sum(t.num_bytes for t in group) for name, group in shards.items()}
    present = {name for name in shards if work.has(name, sizes[name])}
    needed = sum(size for name, size in sizes.items() if name not in present) + DISK_MARGIN
    free = shutil.disk_usage(work.folder).free
    if free < needed:
        raise ConversionError(
            f"{needed / 1e9:.1f} GB are needed at {work.target.parent}, {free / 1e9:.1f} GB are free; make room or "
            f"choose another {work.option}"
        )
    total, done = sum(sizes.values()), sum(sizes[name] for name in present)
    with tqdm(total=total, initial=done, unit="B", unit_scale=True, desc=f"{work.doing.capitalize()} weights") as bar:
        for name, group in shards.items():
            if name not in present:
                write_shard(work.folder / name, group, bar.update)
    if len(shards) > 1:
        weight_map = {tensor.key: name for name, group in shards.items() for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (work.folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_rest(
    folder: Path, name: str, config, processor, source: str | Path, source_folder: Path, design: Design
) -> None:
    """Write everything but the weights, and read the weight headers back as a last check."""
    from .model_card import card_text, license_of
    from .repository import write_repository_files

    plain = config.model_type != "moemb"
    if not plain:
        config.embedding = processor.conventions()
    from_hub = not Path(source).expanduser().is_dir()
    card = card_text(
        config,
        name=name,
        base_model=str(source) if from_hub else None,
        license=license_of(source_folder),
        description=description_of(design, str(source) if from_hub else source_folder.name),
        trained=was_trained(source_folder),
    )
    write_repository_files(folder, config=config, processor=processor, card_text=card, plain=plain)
    read_checkpoint(folder)
