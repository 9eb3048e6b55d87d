"""The tokenizer of moemb-mini: a byte-level BPE with Qwen3.5's split pattern, trained on the corpus' training texts.

Qwen3.5's own vocabulary has 248k rows; at hidden size 192 its embedding table alone would be four times the whole
model. An own table of 8,192 rows needs about as many tokens per text (2.2 characters a token over 25 languages).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from .errors import MoEMBError


# Qwen3.5's split: like Qwen2's, with combining marks (\p{M}) kept inside words, which Indic scripts and Thai need.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD, EMB = "<|image_pad|>", "<|video_pad|>", "<emb>"
# The order fixes the ids: they are the last ids of the vocabulary, as in Qwen, and <emb> is the very last.
SPECIAL_TOKENS = (PAD, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, EMB)
# What every vocabulary should hold as whole words whatever the corpus says: the timestamps of the template.
_ALWAYS = ["<0.2 seconds>"] * 64


class TokenizerError(MoEMBError, ValueError):
    """A tokenizer that cannot be trained or loaded; the text names the value and the remedy."""


def training_texts(corpus, pairs_per_source: int = 20_000) -> Iterator[str]:
    """Yields the texts of the *training* split that a tokenizer or a language model may see.

    Args:
        corpus (`Corpus`): The corpus on disk (`load_corpus`).
        pairs_per_source (`int`, *optional*, defaults to 20000):
            At most this many text pairs of each source, chosen by hash: a dictionary of 80k English glosses would
            otherwise leave no room for the 25 other languages.

    Yields:
        `str`: Labels in every language, tags, icon names, and both sides of text pairs.
    """
    yield from _ALWAYS
    for concept in corpus.concepts.values():
        if concept["split"] != "train":
            continue
        yield concept["en"]
        yield from (str(tag) for tag in concept.get("tags", ()))
        yield from concept.get("labels", {}).values()
    for row in corpus.image_rows:
        if row["split"] == "train" and not row.get("concept"):
            yield row["text"]
            yield from (str(tag) for tag in row.get("tags", ()))
    by_source: dict[str, list[dict]] = {}
    for pair in corpus.text_pairs:
        if pair["split"] == "train":
            by_source.setdefault(pair["source"], []).append(pair)
    for pairs in by_source.values():
        for pair in sorted(pairs, key=lambda pair: _hash(pair["query"] + pair["document"]))[:pairs_per_source]:
            yield pair["query"]
            yield pair["document"]


def train_tokenizer(texts: Iterable[str], vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """Trains the byte-level BPE and adds MoEMB's special tokens as the last ids.

    Text is put in NFC, lower-cased (a model of this size should not spend rows on capitals), and given a leading
    space, so that a word has the same token at the start of a text and inside it. Every byte is in the alphabet, so
    any text is tokenized without an unknown token.

    Args:
        texts (`Iterable[str]`): The training texts, e.g. [`training_texts`].
        vocab_size (`int`, *optional*, defaults to 8192): Rows of the embedding table, the 8 special tokens included.

    Returns:
        `PreTrainedTokenizerFast`: Saves to `tokenizer.json`; ids `vocab_size - 8 .. vocab_size - 1` are special and
        `<emb>` is the last one.

    Raises:
        TokenizerError: If the texts are too few to fill `vocab_size` (the embedding table would have dead rows).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend(" ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    plain_size = vocab_size - len(SPECIAL_TOKENS)
    trainer = BpeTrainer(
        vocab_size=plain_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # A literal "<emb>" in a text must not be learned as ordinary merges next to the special token of that name.
    marker = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
    tokenizer.train_from_iterator((marker.sub(" ", text) for text in texts), trainer)
    if tokenizer.get_vocab_size() != plain_size:
        raise TokenizerError(
            f"vocab_size={vocab_size} needs {plain_size} plain tokens but the texts give only "
            f"{tokenizer.get_vocab_size()}: lower vocab_size or build a larger corpus (`moemb data`)."
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=IM_END,
        additional_special_tokens=[IM_START, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, EMB],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        # Qwen3-VL's processor asks its tokenizer for these names.
        extra_special_tokens={
            "image_token": IMAGE_PAD,
            "video_token": VIDEO_PAD,
            "vision_bos_token": VISION_START,
            "vision_eos_token": VISION_END,
        },
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer saved by `save_pretrained`, and checks that MoEMB's special tokens are there.

    Raises:
        TokenizerError: If the folder holds no tokenizer, or a special token is missing, named in the message.
    """
    if not (Path(path) / "tokenizer.json").is_file():
        raise TokenizerError(f"{path} holds no tokenizer.json: it is written by `moemb train` (method: pretrain).")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path))
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise TokenizerError(
            f"The tokenizer in {path} lacks {missing}: train it with `moemb train` (method: pretrain)."
        )
    return tokenizer


def _hash(text: str) -> str:
    return hashlib.md5(text.encode("utf-8", "replace")).hexdigest()
