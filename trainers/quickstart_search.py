"""Embedding and searching for the quickstart, with a meter for time and compute."""

import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from .evaluation_encoding import encoder_input
from .evaluation_metrics import TIE_TOLERANCE
from .quickstart_items import Entry, Question


_CHUNK = 128


@dataclass
class Meter:
    """
    What embedding took.

    Args:
        items (`dict[str, int]`):
            Items by modality.
        seconds (`dict[str, float]`):
            Seconds of wall time by modality, preprocessing included.
        tokens (`int`):
            Tokens that went through the decoder.
        patches (`int`):
            Image patches that went through the vision tower.
    """

    items: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    patches: int = 0

    @property
    def rates(self) -> dict[str, float]:
        """`dict[str, float]`: items per second by modality."""
        return {name: count / self.seconds[name] for name, count in self.items.items() if self.seconds[name] > 0}


@dataclass(frozen=True)
class Parameters:
    """
    How many weights there are, and how many work.

    Args:
        total (`int`):
            All parameters.
        vision (`int`):
            Those of the vision tower, per patch.
        merger (`int`):
            Those that turn a square of patches into a token.
        decoder (`int`):
            Those of the decoder that one token meets: shared parts and the experts it is routed to.
        patches_per_token (`int`):
            Patches that become one token.
    """

    total: int
    vision: int
    merger: int
    decoder: int
    patches_per_token: int

    def flops(self, meter: Meter) -> float:
        """Floating-point operations of the weights' products: two per weight and token or patch."""
        merged = meter.patches / self.patches_per_token
        return 2.0 * (self.decoder * meter.tokens + self.vision * meter.patches + self.merger * merged)


def count_parameters(model: Any) -> Parameters:
    """
    Counts the weights of a MoEMB model.

    Args:
        model (`MoEMBModel`):
            The loaded model.

    Returns:
        `Parameters`: the embedding table is in the total, but is looked up and not multiplied.
    """
    text = model.config.text_config
    share = text.num_experts_per_tok / text.num_experts
    totals = {"vision": 0.0, "merger": 0.0, "decoder": 0.0}
    total = 0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if name.startswith("visual."):
            totals["merger" if ".merger" in name else "vision"] += weight.numel()
        elif "embed_tokens" not in name:
            totals["decoder"] += weight.numel() * (share if ".experts." in name else 1.0)
    merge = model.config.vision_config.spatial_merge_size
    counts = {name: round(count) for name, count in totals.items()}
    return Parameters(total=total, patches_per_token=merge * merge, **counts)


@contextmanager
def counting(model: Any, meter: Meter):
    """Counts in `meter` the tokens and patches that go through `model` while the context is open."""

    def count(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        meter.tokens += int(mask.sum()) if mask is not None else int(kwargs["input_ids"].numel())
        for name in ("pixel_values", "pixel_values_videos"):
            if kwargs.get(name) is not None:
                meter.patches += len(kwargs[name])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield meter
    finally:
        handle.remove()


def embed(
    model: Any, items: Sequence[Mapping], modality: str, meter: Meter, side: str = "document", batch_size: int = 64
) -> np.ndarray:
    """
    Embeds items of one modality as users do, under a progress bar.

    Args:
        model (`SentenceTransformer`):
            The model.
        items (`Sequence[Mapping]`):
            Items with keys among `"text"`, `"image"` and `"video"`.
        modality (`str`):
            Name in the meter and on the bar.
        meter (`Meter`):
            Time and items are added to it.
        side (`str`, *optional*, defaults to `"document"`):
            `"query"` or `"document"`.
        batch_size (`int`, *optional*, defaults to 64):
            Items in one forward pass.

    Returns:
        `np.ndarray`: float32 `[items, dim]` of unit length.
    """
    method = model.encode_query if side == "query" else model.encode_document
    started = time.perf_counter()
    rows = []
    bar = tqdm(
        total=len(items), desc=f"embedding {modality}", unit="item", leave=False, disable=len(items) < _CHUNK // 2
    )
    with bar:
        for start in range(0, len(items), _CHUNK):
            inputs = [encoder_input(item) for item in items[start : start + _CHUNK]]
            vectors = method(inputs, batch_size=batch_size, show_progress_bar=False, normalize_embeddings=True)
            rows.append(np.asarray(vectors, dtype=np.float32))
            bar.update(len(inputs))
    meter.items[modality] = meter.items.get(modality, 0) + len(items)
    meter.seconds[modality] = meter.seconds.get(modality, 0.0) + time.perf_counter() - started
    return np.concatenate(rows)


@dataclass(frozen=True)
class Answer:
    """
    The ranking of one question.

    Args:
        question (`Question`):
            The question.
        top (`list[tuple[Entry, float]]`):
            The best entries with their cosine similarity.
        rank (`int`):
            Where the best right entry stands, 1 is best; entries that score the same stand before it.
        right (`tuple[Entry, float]`):
            That entry with its similarity.
        pool (`int`):
            Entries that were ranked.
    """

    question: Question
    top: list[tuple[Entry, float]]
    rank: int
    right: tuple[Entry, float]
    pool: int

    def is_right(self, entry: Entry) -> bool:
        """Returns whether an entry is a right answer."""
        return entry.key in self.question.relevant


class Index:
    """
    Embedded entries, searchable by modality.

    Args:
        entries (`Sequence[Entry]`):
            The entries.
        vectors (`np.ndarray`):
            Float32 `[entries, dim]`, of unit length.
    """

    def __init__(self, entries: Sequence[Entry], vectors: np.ndarray):
        self.entries = list(entries)
        self.vectors = vectors

    def search(self, question: Question, vector: np.ndarray, results: int = 5) -> Answer:
        """Ranks the entries of the question's target modality for a query vector float32 `[dim]`."""
        rows = [
            row
            for row, entry in enumerate(self.entries)
            if entry.modality == question.target
            and entry.key not in question.exclude
            and (not question.within or entry.language in question.within)
        ]
        scores = self.vectors[rows] @ vector
        order = np.argsort(-scores, kind="stable")
        right = [place for place, row in enumerate(rows) if self.entries[row].key in question.relevant]
        best = max(right, key=lambda place: scores[place])
        wrong = np.ones(len(rows), dtype=bool)
        wrong[right] = False
        rank = 1 + int((scores[wrong] >= scores[best] - TIE_TOLERANCE).sum())
        top = [(self.entries[rows[place]], float(scores[place])) for place in order[:results]]
        return Answer(question, top, rank, (self.entries[rows[best]], float(scores[best])), len(rows))
