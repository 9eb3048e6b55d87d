"""`moemb convert`: a stock Qwen3.5-MoE checkpoint becomes a MoEMB model repository.

The weights are copied by byte range (see `convert_safetensors.py`): memory stays at one block whatever the size of the
checkpoint, so 35B and 122B models convert on a small machine with enough disk.
"""

import argparse
import json
import math
import shutil
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

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
from .convert_work import WorkFolder, recipe_of


HELP = "turn a stock Qwen3.5-MoE checkpoint into a MoEMB model repository"

EMB_TOKEN = "<emb>"
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
        help="write model_type qwen3_5_moe, which stock stacks load without remote code (no compute dial)",
    )
    parser.add_argument("--emb-seed", type=int, default=0, help="seed of the noise in the <emb> row (default 0)")
    parser.add_argument(
        "--max-shard-gb", type=float, default=MAX_SHARD_BYTES / 2**30, help="size of a weight file in GiB (default 4)"
    )


def run(args: argparse.Namespace) -> int:
    """Convert as the flags say and print where the repository is."""
    target = convert_checkpoint(
        args.source,
        args.target,
        plain=args.plain,
        emb_seed=args.emb_seed,
        revision=args.revision,
        max_shard_bytes=args.max_shard_gb * 2**30,
    )
    kind = "plain" if args.plain else "MoEMB"
    print(f"{kind} model repository written to {target}")
    return 0


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    plain: bool = False,
    emb_seed: int = 0,
    revision: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> Path:
    """Convert a `Qwen3_5MoeForConditionalGeneration` checkpoint, packed or one key per expert, sharded or not.

    Rerunning after an interruption continues with the first unfinished weight file. The target appears only whole.

    Args:
        source (`str` or `Path`): a folder as transformers saves it, or a Hub id.
        target (`str` or `Path`): the folder to create.
        plain (`bool`, *optional*, defaults to `False`): write the variant that stock stacks load without our code:
            `model_type: qwen3_5_moe`, stock key names and expert layout, no `lm_head`.
        emb_seed (`int`, *optional*, defaults to 0): seed of the noise in the `<emb>` row, not negative.
        revision (`str`, *optional*): branch, tag or commit of a Hub id.
        max_shard_bytes (`float`, *optional*, defaults to 4 GiB): size of a weight file, at least 1.

    Returns:
        `Path`: the target.

    Raises:
        ConversionError: the source is not such a checkpoint or is incomplete, the target exists, an option is out of
            range, or the disk is full; each names the file or key and the remedy.
    """
    from .repository import processor_from_checkpoint

    if emb_seed < 0:
        raise ConversionError(f"--emb-seed is {emb_seed}, but must be 0 or more")
    if not 1 <= max_shard_bytes < math.inf:
        raise ConversionError(f"--max-shard-gb is {max_shard_bytes / 2**30:g}, but must be finite and above 0")
    max_shard_bytes = int(max_shard_bytes)
    target = Path(target).expanduser().absolute()
    folder = locate_source(source, revision)
    stored = read_checkpoint(folder)
    settings = read_stock_config(folder)
    for name in PROCESSOR_FILES:
        if (folder / name).is_file():
            read_json_mapping(folder / name)
    kept_id, used_rows = read_vocabulary(folder)
    processor = processor_from_checkpoint(folder, plain=plain)
    emb_token_id = processor.tokenizer.convert_tokens_to_ids(EMB_TOKEN)
    tensors = base_keys(stored)
    planned = plan_tensors(
        tensors, emb_token_id, used_rows, emb_seed, plain=plain, keep_row=kept_id == emb_token_id, settings=settings
    )
    config = build_config(settings, emb_token_id, _vocabulary_size(planned), plain)
    shards = split_into_shards(planned, max_shard_bytes)
    recipe = recipe_of(stored, shards, options=[plain, emb_seed, emb_token_id, max_shard_bytes])
    with WorkFolder(target, recipe) as work:
        if work.finished:
            work.forget()
            return target
        write_weights(work, shards)
        _write_rest(work.folder, target.name, config, processor, source, folder)
        work.publish()
    return target


def locate_source(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint; a Hub id is downloaded into the Hub cache (resumable) first."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    name = str(source)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConversionError(f"--from {name} is neither a folder nor a Hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "README.md"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConversionError(f"--from {name} is no folder here and the Hub did not give it: {error}") from error


def read_stock_config(folder: Path) -> dict:
    """Read `config.json` and make sure it describes an unquantised Qwen3.5-MoE model with its vision tower."""
    from transformers import Qwen3_5MoeConfig

    path = folder / "config.json"
    try:
        settings = read_json_mapping(path)
    except FileNotFoundError:
        raise ConversionError(f"{folder} has no config.json; is it a checkpoint folder?") from None
    model_type = settings.get("model_type")
    remedies = {
        "moemb": "it is a MoEMB repository already",
        "qwen3_5": "that is the dense Qwen3.5; the converter wants a mixture-of-experts one",
        "qwen3_5_moe_text": "that is the text-only half; take the checkpoint that has the vision tower",
    }
    if model_type != "qwen3_5_moe":
        remedy = remedies.get(str(model_type), "the converter wants 'qwen3_5_moe'")
        raise ConversionError(f"{path} has model_type {model_type!r}: {remedy}")
    quantization = settings.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ConversionError(f"{path} is quantised ({method}); convert the bf16 checkpoint")
    for part in ("text_config", "vision_config"):
        if not isinstance(settings.get(part), dict):
            state = f"{part} {settings[part]!r}" if part in settings else f"no {part}"
            raise ConversionError(f"{path} has {state}; the converter wants a mapping there, as transformers saves it")
    _check_layers(path, settings["text_config"])
    with _names_file(path):
        Qwen3_5MoeConfig.from_dict(json.loads(json.dumps(settings)))
    return settings


@contextmanager
def _names_file(path: str | Path):
    """Name `config.json` in what transformers and torch raise, errors of many types, for settings of no use."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConversionError(f"{path} describes no model that can be built: {reason}") from error


def _check_layers(path: Path, text: dict) -> None:
    count, kinds = text.get("num_hidden_layers"), text.get("layer_types")
    if count is not None and (type(count) is not int or count < 1):
        raise ConversionError(f"{path} has num_hidden_layers {count!r}, not a number of layers")
    if kinds is not None and not isinstance(kinds, list):
        raise ConversionError(f"{path} has layer_types {kinds!r}, not a list")
    if count is not None and kinds is not None and len(kinds) != count:
        raise ConversionError(
            f"{path} contradicts itself: num_hidden_layers is {count}, but layer_types lists {len(kinds)} layers"
        )


def read_vocabulary(folder: Path) -> tuple[int | None, int]:
    """Return the id that `<emb>` has in the stock tokenizer, if any, and how many ids that tokenizer can produce."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no tokenizer.json; save its processor there with save_pretrained")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions for whatever it cannot read
        raise ConversionError(f"{path} is not a tokenizer that can be read ({error}); download it again") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConversionError(f"{path} has no vocabulary; download it again")
    return tokenizer.token_to_id(EMB_TOKEN), max(vocabulary.values()) + 1


def plan_tensors(
    tensors: dict[str, StoredTensor],
    emb_token_id: int,
    used_rows: int,
    emb_seed: int,
    *,
    plain: bool,
    keep_row: bool,
    settings: dict,
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

    packed = add_row(pack_experts(tensors))
    with _names_file("config.json"):
        expected = expected_shapes(build_config(settings, emb_token_id, _vocabulary_size(packed), False))
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


def build_config(settings: dict, emb_token_id: int, vocabulary_size: int, plain: bool):
    """Return the configuration of the new repository: `MoEMBConfig`, or the stock class when `plain`."""
    from transformers import Qwen3_5MoeConfig

    from modeling_moemb import MoEMBConfig

    settings = json.loads(json.dumps(settings))
    text = settings["text_config"]
    text["vocab_size"] = vocabulary_size
    if plain:
        settings["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
        return Qwen3_5MoeConfig.from_dict(settings)
    for unused in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        text.pop(unused, None)
    settings |= {"model_type": "moemb", "architectures": ["MoEMBModel"], "emb_token_id": emb_token_id}
    return MoEMBConfig.from_dict(settings)


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


def _write_rest(folder: Path, name: str, config, processor, source: str | Path, source_folder: Path) -> None:
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
        description=f"Converted from {source if from_hub else source_folder.name} by `moemb convert`.",
    )
    write_repository_files(folder, config=config, processor=processor, card_text=card, plain=plain)
    read_checkpoint(folder)
