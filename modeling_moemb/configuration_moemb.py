"""Configuration of MoEMB: a Qwen3.5-MoE configuration plus what turns the backbone into an embedder."""

from typing import Any

from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeVisionConfig,
)


POOLING_MODES = ("emb", "last")
EXPERTS_BACKENDS = ("grouped", "loop")
ADAPTIVE_COMPUTE_KEYS = ("top_k",)


def validate_adaptive_compute(settings: dict[str, Any] | None, num_experts_per_tok: int) -> dict[str, Any] | None:
    """Check a compute budget and return a copy of it, so that a typo never silently means "full compute".

    Args:
        settings (`dict`, *optional*):
            `top_k` (`int`): routed experts per token, from 1 to the checkpoint's `num_experts_per_tok`; the kept
            routing weights are renormalised. `None` or `{}` means full compute.
        num_experts_per_tok (`int`):
            Routed experts per token of the checkpoint.

    Raises:
        TypeError: if `settings` is not a mapping.
        ValueError: for an unknown key or a value out of range; names the key, the value and what is allowed.
    """
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise TypeError(f"`adaptive_compute` must be a dict or None, got {type(settings).__name__}: {settings!r}")
    unknown = sorted(set(settings) - set(ADAPTIVE_COMPUTE_KEYS))
    if unknown:
        raise ValueError(f"unknown `adaptive_compute` keys {unknown}; known keys: {list(ADAPTIVE_COMPUTE_KEYS)}")
    top_k = settings.get("top_k")
    if top_k is not None and (
        isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_experts_per_tok
    ):
        raise ValueError(
            f"`adaptive_compute['top_k']` must be an integer from 1 to {num_experts_per_tok} "
            f"(the checkpoint's experts per token), got {top_k!r}"
        )
    return dict(settings)


class MoEMBConfig(Qwen3_5MoeConfig):
    r"""
    Configuration of a [`MoEMBModel`].

    Everything of [`Qwen3_5MoeConfig`] (`text_config`, `vision_config`, special token ids) keeps its name and meaning,
    so the configuration of a stock checkpoint is valid here.

    Args:
        emb_token_id (`int`, *optional*):
            Id of the `<emb>` token, the last token of every item. Required with `pooling="emb"`.
        pooling (`str`, *optional*, defaults to `"emb"`):
            `"emb"` reads the state of the `<emb>` token, `"last"` the state of the last attended token.
        adaptive_compute (`dict`, *optional*):
            The compute budget this checkpoint was calibrated for, see [`validate_adaptive_compute`].
        embedding (`dict`, *optional*):
            The conventions an item is embedded with (prompts, order of mixed inputs, frame count, pixel budgets):
            recorded here so that every route to a vector uses the same ones.
        experts_backend (`str`, *optional*, defaults to `"grouped"`):
            `"grouped"` runs the routed experts as grouped matrix products over the surviving (token, expert) pairs,
            `"loop"` runs them one expert at a time (the plain reference).
    """

    model_type = "moemb"
    sub_configs_defaults = {"vision_config": Qwen3_5MoeVisionConfig, "text_config": Qwen3_5MoeTextConfig}

    emb_token_id: int | None = None
    pooling: str = "emb"
    adaptive_compute: dict | None = None
    embedding: dict | None = None
    experts_backend: str = "grouped"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.pooling not in POOLING_MODES:
            raise ValueError(f"`pooling` must be one of {POOLING_MODES}, got {self.pooling!r}")
        if self.experts_backend not in EXPERTS_BACKENDS:
            raise ValueError(f"`experts_backend` must be one of {EXPERTS_BACKENDS}, got {self.experts_backend!r}")
        vocab_size = self.text_config.vocab_size
        if self.emb_token_id is not None and not 0 <= self.emb_token_id < vocab_size:
            raise ValueError(f"`emb_token_id`={self.emb_token_id} is outside the vocabulary of {vocab_size} tokens")
        validate_adaptive_compute(self.adaptive_compute, self.text_config.num_experts_per_tok)


__all__ = ["MoEMBConfig", "validate_adaptive_compute"]
