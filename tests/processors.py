"""Tiny processors for tests: a byte-level tokenizer with MoEMB's special tokens, and both chat templates."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLVideoProcessor

from modeling_moemb.processing_moemb import MoEMBProcessor
from moemb.trainers.chat_templates import QWEN_TEMPLATE
from moemb.trainers.repository import mini_processor
from moemb.trainers.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN


TEXTS = ["the quick brown fox jumps over the lazy dog", "user\nassistant\nsystem\n <0.5 seconds> hello world"] * 20


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    # As in Qwen's tokenizers, some added tokens are not special: they are ordinary text to everyone.
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer.to_str()


def tiny_tokenizer(padding_side: str = "right", max_length: int = 512) -> PreTrainedTokenizerFast:
    """299 tokens or fewer: bytes, a few merges, `<think>` (not special) and the special tokens, `<emb>` last."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        pad_token="<|endoftext|>",
        padding_side=padding_side,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def lean_processor(**tokenizer_settings) -> MoEMBProcessor:
    """moemb-mini's processor over the tiny tokenizer."""
    return mini_processor(tiny_tokenizer(**tokenizer_settings))


def qwen_processor(embedding: dict | None = None, **tokenizer_settings) -> MoEMBProcessor:
    """The large models' template and an fps-sampled video, with small patches."""
    cut = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return MoEMBProcessor(
        Qwen2VLImageProcessor(**cut, size={"shortest_edge": 256, "longest_edge": 128 * 128}),
        tiny_tokenizer(**tokenizer_settings),
        Qwen3VLVideoProcessor(
            **cut, size={"shortest_edge": 256, "longest_edge": 128 * 128 * 4}, fps=2.0, cap_pixels_per_frame=False
        ),
        chat_template=QWEN_TEMPLATE,
        embedding=embedding,
    )
