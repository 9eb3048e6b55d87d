"""Think-then-embed on the same backbone: generate tokens greedily, then embed what was thought with the item.

The model is transformers' own, on the same weights, with its cache: each new token costs one step, and the vector is
the state of `<emb>` after the item and the thoughts, read from the cache, too. The head is the embedding table: MoEMB
checkpoints hold no other, so what a model thinks here means nothing, but costs the same. Our model has no cache, and
embedding needs none.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5MoeConfig
from transformers.initialization import no_init_weights
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from .benchmark_peers import agreement
from .benchmark_timing import Protocol, interleave


BACKENDS = ("eager", "grouped_mm")  # batched_mm copies the weights of every chosen expert for every prompt token
OURS, STOCK, THINK = "moemb", "transformers, embedding alone", "think-then-embed"
_TRIAL_TOKENS = 4


def generator_of(model: Any) -> Qwen3_5MoeForConditionalGeneration:
    """transformers' generating model on the very tensors of a `MoEMBModel`, the head tied to the embedding table."""
    config, default = model.config, torch.get_default_dtype()
    settings = {
        "text_config": config.text_config.to_dict(), "vision_config": config.vision_config.to_dict(),
        "tie_word_embeddings": True,
        **{name: getattr(config, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id",
                                                    "vision_end_token_id")},
    }  # fmt: skip
    torch.set_default_dtype(model.dtype)
    try:
        with no_init_weights():
            stock = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**settings))
    finally:
        torch.set_default_dtype(default)
    stock.model.load_state_dict(model.state_dict(), assign=True)
    stock.lm_head.weight = stock.model.language_model.embed_tokens.weight
    return stock.eval().requires_grad_(False)


def left_padded(rows: list[Tensor], types: list[Tensor]) -> dict[str, Tensor]:
    """Ids, mask and token types padded on the left, as generation needs them."""
    longest = max(map(len, rows))

    def pad(values: list[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(value, (longest - len(value), 0)) for value in values])

    return {
        "input_ids": pad(rows),
        "attention_mask": pad([torch.ones_like(row) for row in rows]),
        "mm_token_type_ids": pad(types),
    }


def item_rows(model: Any, features: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Ids and token types of each item, without padding and without the `<emb>` at its end."""
    ids, bounds = features["input_ids"], features.get("cu_seq_lens_q")
    if bounds is not None:
        rows = [ids[0, start : stop - 1] for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist())]
    else:
        rows = [row[mask.bool()][:-1] for row, mask in zip(ids, features["attention_mask"])]
    config = model.config
    types = [(row == config.image_token_id).int() + 2 * (row == config.video_token_id).int() for row in rows]
    return rows, types


class ThinkThenEmbed:
    """
    Think-then-embed on one batch.

    Args:
        model (`MoEMBModel`): the model whose weights are used.
        features (`Mapping[str, Tensor]`): its inputs.
        tokens (`int`): tokens that each item thinks, neither more nor less.
    """

    def __init__(self, model: Any, features: Mapping[str, Tensor], tokens: int):
        self.ours, self.features, self.tokens = model, dict(features), tokens
        self.stock = generator_of(model)
        self.rows, types = item_rows(model, features)
        media = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
        self.media = {name: value for name, value in features.items() if name in media and value is not None}
        self.prompt = left_padded(self.rows, types)
        config = model.config
        self.special = [config.image_token_id, config.video_token_id, config.vision_start_token_id,
                        config.vision_end_token_id, config.emb_token_id]  # fmt: skip

    @torch.inference_mode()
    def think(self, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """The ids with the thoughts, left padded, and the vectors `(items, hidden)`."""
        self.stock.model.rope_deltas = None  # left over from other items
        count = self.tokens if tokens is None else tokens
        settings = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=self.special,
            return_dict_in_generate=True,
            use_cache=True,
        )
        done = self.stock.generate(**self.prompt, **self.media, generation_config=settings)
        mask = torch.nn.functional.pad(self.prompt["attention_mask"], (0, count + 1), value=1)
        last = torch.full_like(done.sequences[:, :1], self.ours.config.emb_token_id)
        # the cache holds all but the token that was generated last
        ids = torch.cat([done.sequences[:, -1:], last], dim=1)
        delta = self.stock.model.rope_deltas
        position = mask.sum(1, keepdim=True) - 2 + torch.arange(2) + (0 if delta is None else delta)
        states = self.stock.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position.expand(3, -1, -1),
            past_key_values=done.past_key_values,
            use_cache=True,
        ).last_hidden_state
        return done.sequences, states[:, -1].float()

    @torch.inference_mode()
    def embed_alone(self) -> Tensor:
        """The vectors of transformers' model without a thought."""
        emb = torch.tensor([self.ours.config.emb_token_id])
        rows = [torch.cat([row, emb]) for row in self.rows]
        _, types = item_rows(self.ours, self.features)
        batch = left_padded(rows, [torch.nn.functional.pad(kind, (0, 1)) for kind in types])
        self.stock.model.rope_deltas = None
        return self.stock.model(**batch, **self.media, use_cache=False).last_hidden_state[:, -1].float()

    @torch.inference_mode()
    def embed_thoughts(self, sequences: Tensor) -> Tensor:
        """The vectors of our model for items and given thoughts, in one pass: what `think` must agree with."""
        added = sequences.shape[1] - self.prompt["input_ids"].shape[1]
        emb = torch.tensor([self.ours.config.emb_token_id])
        rows = [torch.cat([row, thought, emb]) for row, thought in zip(self.rows, sequences[:, -added:], strict=True)]
        bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        packed = {"input_ids": torch.cat(rows)[None], "cu_seq_lens_q": bounds}
        return self.ours(**packed, **self.media, pooled_only=True, adaptive_compute={}).pooler_output.float()

    def measure(self, protocol: Protocol, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """Times it against embedding alone, by our model and by transformers', in turn.

        Returns:
            `dict`: `tokens`, `items`, `backend` (the faster one), `seconds` and `qps` by system, `slower` (how many
            times longer than ours, and than transformers' embedding alone), `check` (against one pass of our model
            over items and thoughts), and `timing`.
        """
        backend = self._fastest(progress)
        self.stock.model.set_experts_implementation(backend)
        sequences, vectors = self.think()
        check = agreement(vectors, self.embed_thoughts(sequences))
        runs = {OURS: self._embed, STOCK: self.embed_alone, THINK: self.think}
        timing = interleave(runs, protocol, progress=progress)
        seconds = {name: entry.median for name, entry in timing.timings.items()}
        items = len(self.rows)
        return {
            "tokens": self.tokens, "items": items, "backend": backend, "seconds": seconds,
            "qps": {name: items / value for name, value in seconds.items()},
            "slower": {name: seconds[THINK] / seconds[name] for name in (OURS, STOCK)},
            "check": check, "timing": timing.record(),
        }  # fmt: skip

    @torch.inference_mode()
    def _embed(self) -> Tensor:
        return self.ours(**self.features, pooled_only=True, adaptive_compute={}, share_prefixes=False).pooler_output

    def _fastest(self, progress: Callable[[str], None]) -> str:
        tried = {}
        for backend in BACKENDS:
            progress(f"think-then-embed, trying {backend}")
            self.stock.model.set_experts_implementation(backend)
            self.think(1)  # what is loaded on first use is nobody's speed
            start = time.perf_counter()
            self.think(min(self.tokens, _TRIAL_TOKENS))
            tried[backend] = time.perf_counter() - start
        return min(tried, key=tried.get)
