"""What a conversion starts from: finds the folder of a checkpoint and reads what it says about itself."""

import json
from contextlib import contextmanager
from pathlib import Path

from .convert_safetensors import ConversionError, read_json_mapping
from .upcycling import Design


EMB_TOKEN = "<emb>"


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


def read_stock_config(folder: Path, design: Design | None = None) -> dict:
    """Read `config.json` and make sure it describes an unquantised model, with its vision tower, that a design takes.

    Args:
        folder (`Path`): the checkpoint.
        design (`Design`, *optional*): native when `None`, which takes a Qwen3.5-MoE model; the others take a dense
            Qwen3.5, those with experts also a dense MoEMB repository.

    Returns:
        `dict`: the settings; of a dense stock model with every default written out, for they differ from
        mixture-of-experts ones.
    """
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    design = design or Design()
    path = folder / "config.json"
    try:
        settings = read_json_mapping(path)
    except FileNotFoundError:
        raise ConversionError(f"{folder} has no config.json; is it a checkpoint folder?") from None
    model_type = settings.get("model_type")
    wanted = "qwen3_5_moe" if design.kind == "native" else "qwen3_5"
    upcycled = design.kind in ("upcycled", "modality") and settings.get("feed_forward") == "dense"
    if model_type != wanted and not (model_type == "moemb" and upcycled):
        remedies = {
            "moemb": "it is a MoEMB repository already",
            "qwen3_5": "that is the dense Qwen3.5; take --design upcycled, modality or dense",
            "qwen3_5_moe": f"it has experts already, and --design {design.kind} starts from a dense Qwen3.5",
            "qwen3_5_text": "that is the text-only half; take the checkpoint that has the vision tower",
            "qwen3_5_moe_text": "that is the text-only half; take the checkpoint that has the vision tower",
        }
        remedy = remedies.get(str(model_type), f"the converter wants {wanted!r}")
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
    with names_file(path):
        if wanted == "qwen3_5" and model_type == wanted:
            return Qwen3_5Config.from_dict(json.loads(json.dumps(settings))).to_dict()
        Qwen3_5MoeConfig.from_dict(json.loads(json.dumps(settings)))
    return settings


@contextmanager
def names_file(path: str | Path):
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


def processor_of(folder: Path, settings: dict, plain: bool):
    """Return the processor of the new repository: the stock one with `<emb>`, or that of a MoEMB repository."""
    from .repository import RepositoryError, processor_from_checkpoint

    if settings.get("model_type") != "moemb":
        return processor_from_checkpoint(folder, plain=plain)
    from modeling_moemb import MoEMBProcessor

    try:
        return MoEMBProcessor.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RepositoryError(f"{folder} has no complete processor ({error}); save it there") from error


def was_trained(folder: Path) -> bool:
    """Whether the source is a MoEMB model whose card does not say that `<emb>` is fresh."""
    from .model_card import UNTRAINED_EMB

    if read_json_mapping(folder / "config.json").get("model_type") != "moemb":
        return False
    readme = folder / "README.md"
    return not (readme.is_file() and UNTRAINED_EMB in readme.read_text(encoding="utf-8", errors="replace"))
