"""The plain variant of a MoEMB repository: the same weights under `model_type: qwen3_5_moe`, without code of ours.

Stock stacks (transformers, Sentence Transformers, vLLM) load it and compute the embedding at full compute: the state
of the last token, which the chat template makes `<emb>`. Weights are copied by byte range, only their keys get the
stock prefix, so memory stays at one block whatever the size of the checkpoint. Heads of Gated DeltaNet that are
smaller than kernels of serving stacks take are filled up with zeros, see `publish_heads`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .chat_templates import LEAN_STOCK_TEMPLATE, LEAN_TEMPLATE
from .convert import write_weights
from .convert_plan import MAX_SHARD_BYTES, check_against_model, split_into_shards
from .convert_safetensors import (
    ConversionError,
    PlannedTensor,
    StoredTensor,
    read_checkpoint,
    read_json_mapping,
    whole,
)
from .convert_work import WorkFolder, recipe_of
from .errors import MoEMBError
from .publish_heads import needs_wider_heads, widen, widened_config


ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
_STOCK_PREFIX = "model."
_SAMPLES = ("red apple", "Red Apple", " two  spaces", "it's 12 o'clock.\n", "犬 и кошка, \u0065\u0301t\u00e9", "x", "")


class PlainError(MoEMBError, ValueError):
    """A model that has no plain variant. The message names what the stock architecture has no place for."""


def plain_config(folder: Path) -> Any:
    """
    The stock configuration of a MoEMB checkpoint.

    Args:
        folder (`Path`): holds `config.json` of `model_type` `moemb`.

    Returns:
        `Qwen3_5MoeConfig`: with what MoEMB adds left out; `tie_word_embeddings` is set, as there is no output layer.

    Raises:
        PlainError: the model is no MoEMB model, or its embedding is not that of `<emb>`.
    """
    from transformers import Qwen3_5MoeConfig

    from modeling_moemb import MoEMBConfig

    settings = read_json_mapping(Path(folder) / "config.json")
    if settings.get("model_type") != MoEMBConfig.model_type:
        raise PlainError(
            f"{folder} has model_type {settings.get('model_type')!r}; the plain variant is made of a MoEMB repository"
        )
    if settings.get("pooling", "emb") != "emb":
        raise PlainError(f"{folder} pools {settings['pooling']!r}; the plain variant pools <emb>, its last token")
    stock = set(Qwen3_5MoeConfig().to_dict())
    kept = {key: value for key, value in settings.items() if key in stock and key != "auto_map"}
    kept |= {"model_type": Qwen3_5MoeConfig.model_type, "architectures": [ARCHITECTURE], "tie_word_embeddings": True}
    return Qwen3_5MoeConfig.from_dict(json.loads(json.dumps(kept)))


def plan_plain(stored: Mapping[str, StoredTensor], config: Any) -> list[PlannedTensor]:
    """
    The tensors of the plain variant, checked against transformers' own model.

    Args:
        stored (`Mapping[str, StoredTensor]`): tensors of the MoEMB checkpoint.
        config (`Qwen3_5MoeConfig`): see [`plain_config`].

    Raises:
        PlainError: there are tensors that the stock model has no place for (gates, other experts), or too few.
    """
    import torch
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

    with torch.device("meta"):
        model = Qwen3_5MoeModel(type(config).from_dict(config.to_dict()))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    planned = [PlannedTensor(key, t.dtype, t.shape, (whole(t),)) for key, t in stored.items()]
    try:
        check_against_model(planned, shapes)
    except ConversionError as error:
        raise PlainError(f"the stock architecture cannot hold this model: {error}") from error
    planned = widen(stored, config) if needs_wider_heads(config) else planned
    return [PlannedTensor(_STOCK_PREFIX + t.key, t.dtype, t.shape, t.segments) for t in planned]


def plain_processor(processor: Any) -> Any:
    """
    The stock processor with the parts of a `MoEMBProcessor`.

    transformers builds the tokenizer of a `qwen3_5_moe` repository anew from its vocabulary, whatever tokenizer.json
    says beside it. What the tokenizer does to a text before is therefore moved into the chat template.

    Raises:
        PlainError: the tokenizer does what neither the stock class nor a template of ours does.
    """
    from transformers import Qwen3VLProcessor

    template = processor.chat_template
    extra = [step for step in _normalizers(processor.tokenizer) if step.get("type") != "NFC"]
    if extra:
        lean = [{"type": "Lowercase"}, {"type": "Prepend", "prepend": " "}]
        if extra != lean or template != LEAN_TEMPLATE:
            raise PlainError(
                f"the tokenizer normalises texts by {extra}, which stock stacks leave out; a tokenizer with NFC "
                "alone, as Qwen3.5's, is needed"
            )
        template = LEAN_STOCK_TEMPLATE
    return Qwen3VLProcessor(
        processor.image_processor, processor.tokenizer, processor.video_processor, chat_template=template
    )


def _normalizers(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps that a tokenizer takes before it cuts a text, as tokenizer.json writes them."""
    step = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"]
    if step is None:
        return []
    return step["normalizers"] if step["type"] == "Sequence" else [step]


def check_tokens(folder: Path, processor: Any) -> None:
    """
    Compares the token ids that a stock stack gives texts with ours.

    Args:
        folder (`Path`): the plain variant.
        processor (`MoEMBProcessor`): ours.

    Raises:
        PlainError: they differ.
    """
    from transformers import AutoProcessor

    stock = AutoProcessor.from_pretrained(str(folder))
    for text in _SAMPLES:
        rendered = stock.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        theirs = stock.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        ours = processor([text], instruction="")["input_ids"][0].tolist()
        if theirs != ours:
            raise PlainError(
                f"stock stacks read {text!r} as the tokens {theirs}, not {ours}: the tokenizer of {folder.name} is "
                "none that transformers builds for Qwen3.5-MoE"
            )


def export_plain(source: Path, target: Path, card_text: str = "", max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """
    Writes the plain variant of a MoEMB repository or checkpoint. Rerunning after an interruption continues with the
    first unfinished weight file; the target appears only whole.

    Args:
        source (`Path`): folder with `config.json`, safetensors and the files of a `MoEMBProcessor`.
        target (`Path`): the folder to create.
        card_text (`str`, *optional*): README.md; none is written when empty.
        max_shard_bytes (`int`, *optional*, defaults to 4 GiB): size of a weight file.

    Returns:
        `Path`: the target.

    Raises:
        PlainError: the model has no plain variant.
        ConversionError: the source is incomplete, the target exists, or the disk is full.
    """
    from modeling_moemb.processing_moemb import MoEMBProcessor

    from .repository import write_repository_files

    source, target = Path(source), Path(target).expanduser().absolute()
    stored, config = read_checkpoint(source), plain_config(source)
    shards = split_into_shards(plan_plain(stored, config), max_shard_bytes)
    if needs_wider_heads(config):
        config = widened_config(config)
    processor = MoEMBProcessor.from_pretrained(str(source))
    recipe = recipe_of(stored, shards, plain=config.to_dict(), conventions=processor.embedding, card=card_text)
    with WorkFolder(target, recipe, option="target", doing="exporting") as work:
        if work.finished:
            work.forget()
            return target
        write_weights(work, shards)
        write_repository_files(
            work.folder,
            config=config,
            processor=plain_processor(processor),
            card_text=card_text,
            plain=True,
            conventions=processor.embedding,
        )
        read_checkpoint(work.folder)
        check_tokens(work.folder, processor)
        work.publish()
    return target


__all__ = [
    "ARCHITECTURE",
    "PlainError",
    "check_tokens",
    "export_plain",
    "plain_config",
    "plain_processor",
    "plan_plain",
]
