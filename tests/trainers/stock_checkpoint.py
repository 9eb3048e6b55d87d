"""Stock Qwen3.5 checkpoints, dense and of experts, as transformers saves them, small enough for tests."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)


SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCABULARY = 300  # rows of the table: 256 bytes and 7 special tokens are in use, the rest is padding
CHAT_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def stock_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with Qwen3.5's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=4096
    )


def stock_processor() -> Qwen3VLProcessor:
    """Qwen3.5's processor classes for patches of 8 pixels."""
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    vision = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        tokenizer=stock_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**vision),
        chat_template=CHAT_TEMPLATE,
    )


def stock_config(settings: dict, vocab_size: int = VOCABULARY) -> Qwen3_5MoeConfig:
    """The tiny configuration of the tests with the token ids of [`stock_tokenizer`]."""
    ids = stock_tokenizer().convert_tokens_to_ids
    settings = json.loads(json.dumps(settings))
    settings["text_config"]["vocab_size"] = vocab_size
    settings |= {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    return Qwen3_5MoeConfig(**settings)


def save_stock_checkpoint(
    folder: Path, config: Qwen3_5MoeConfig, *, packed: bool, dtype=torch.float32, shard: str = "200KB"
) -> Qwen3_5MoeForConditionalGeneration:
    """Save a stock checkpoint and its processor; returns the model.

    Args:
        folder (`Path`): where to.
        config (`Qwen3_5MoeConfig`): see [`stock_config`].
        packed (`bool`): one stack of experts per block, or one key per expert.
        dtype (`torch.dtype`, *optional*): of the weights.
        shard (`str`, *optional*): largest file.
    """
    model = _lively(Qwen3_5MoeForConditionalGeneration, config, dtype)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=not packed)
    stock_processor().save_pretrained(folder)
    return model


def dense_config(settings: dict, width: int, vocab_size: int = VOCABULARY) -> Qwen3_5Config:
    """[`stock_config`] of a dense model whose networks have `width` channels."""
    settings = stock_config(settings, vocab_size).to_dict()
    text = {k: v for k, v in settings["text_config"].items() if "expert" not in k and "router" not in k}
    text.pop("moe_intermediate_size")
    text |= {"model_type": "qwen3_5_text", "intermediate_size": width}
    settings["vision_config"]["model_type"] = "qwen3_5_vision"
    return Qwen3_5Config(**settings | {"model_type": "qwen3_5", "text_config": text})


def save_dense_checkpoint(
    folder: Path, config: Qwen3_5Config, *, dtype=torch.float32, shard: str = "200KB"
) -> Qwen3_5ForConditionalGeneration:
    """Save a stock dense checkpoint and its processor; see [`save_stock_checkpoint`]. Returns the model."""
    model = _lively(Qwen3_5ForConditionalGeneration, config, dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    stock_processor().save_pretrained(folder)
    return model


def _lively(model_class, config, dtype):
    """A random model in which every path matters to the output."""
    torch.manual_seed(1)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 2 if parameter.dim() > 1 else parameter + torch.randn_like(parameter) * 0.1)
    return model
