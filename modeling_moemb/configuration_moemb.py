"""Configuration of MoEMB: a Qwen3.5-MoE configuration plus what turns the backbone into an embedder."""

from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeVisionConfig,
)

from .settings_moemb import validate_adaptive_compute


POOLING_MODES = ("emb", "last")
EXPERTS_BACKENDS = ("grouped", "loop")


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
        self.adaptive_compute = validate_adaptive_compute(self.adaptive_compute, self.text_config)


__all__ = ["MoEMBConfig", "validate_adaptive_compute"]
