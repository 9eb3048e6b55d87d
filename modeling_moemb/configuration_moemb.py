"""Configuration of MoEMB: a Qwen3.5-MoE configuration plus what turns the backbone into an embedder."""

from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeVisionConfig,
)

from .settings_moemb import validate_adaptive_compute, validate_gates
from .task_conditioning_moemb import validate_task_conditioning


POOLING_MODES = ("emb", "last")
EXPERTS_BACKENDS = ("grouped", "loop")
# the number of experts, of experts per token and the width of the shared expert that go with a fixed router
FIXED_ROUTERS = {"modality": (3, 1, 0), "dense": (1, 1, 0)}
FEED_FORWARDS = ("moe", *FIXED_ROUTERS)


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
        gates (`dict`, *optional*):
            The learned gates that the weights hold, see [`validate_gates`]; `adaptive_compute` says which are at work.
        embedding (`dict`, *optional*):
            The conventions an item is embedded with (prompts, order of mixed inputs, frame count, pixel budgets):
            recorded here so that every route to a vector uses the same ones.
        experts_backend (`str`, *optional*, defaults to `"grouped"`):
            `"grouped"` runs the routed experts as grouped matrix products over the surviving (token, expert) pairs,
            `"loop"` runs them one expert at a time (the plain reference).
        feed_forward (`str`, *optional*, defaults to `"moe"`):
            `"moe"`: a learned router over `num_experts` experts, beside a shared expert unless
            `shared_expert_intermediate_size` is 0. `"modality"`: one expert each for text, image and video tokens.
            `"dense"`: one network, no experts. The width of an expert, and of the dense network, is
            `moe_intermediate_size`.
        task_conditioning (`dict`, *optional*):
            What the routers are conditioned on beside the token, see [`MoEMBModel.add_task_conditioning`].
    """

    model_type = "moemb"
    sub_configs_defaults = {"vision_config": Qwen3_5MoeVisionConfig, "text_config": Qwen3_5MoeTextConfig}

    emb_token_id: int | None = None
    pooling: str = "emb"
    adaptive_compute: dict | None = None
    gates: dict | None = None
    embedding: dict | None = None
    experts_backend: str = "grouped"
    feed_forward: str = "moe"
    task_conditioning: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.pooling not in POOLING_MODES:
            raise ValueError(f"`pooling` must be one of {POOLING_MODES}, got {self.pooling!r}")
        if self.experts_backend not in EXPERTS_BACKENDS:
            raise ValueError(f"`experts_backend` must be one of {EXPERTS_BACKENDS}, got {self.experts_backend!r}")
        vocab_size = self.text_config.vocab_size
        if self.emb_token_id is not None and not 0 <= self.emb_token_id < vocab_size:
            raise ValueError(f"`emb_token_id`={self.emb_token_id} is outside the vocabulary of {vocab_size} tokens")
        self._check_feed_forward()
        self.task_conditioning = validate_task_conditioning(self.task_conditioning)
        if self.task_conditioning is not None and self.feed_forward != "moe":
            raise ValueError(f"`task_conditioning` needs a router, but `feed_forward` is {self.feed_forward!r}")
        self.gates = validate_gates(self.gates, self.text_config)
        if "null" in (self.gates or {}) and self.feed_forward != "moe":
            raise ValueError(f"a 'null' gate needs a router, but `feed_forward` is {self.feed_forward!r}")
        self.adaptive_compute = validate_adaptive_compute(self.adaptive_compute, self.text_config, self.gates)

    def _check_feed_forward(self) -> None:
        if self.feed_forward not in FEED_FORWARDS:
            raise ValueError(f"`feed_forward` must be one of {FEED_FORWARDS}, got {self.feed_forward!r}")
        names = ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
        given = tuple(getattr(self.text_config, name) for name in names)
        wanted = FIXED_ROUTERS.get(self.feed_forward, given)
        if given != wanted:
            raise ValueError(
                f"`feed_forward={self.feed_forward!r}` goes with "
                + ", ".join(f"`{name}={value}`" for name, value in zip(names, wanted))
                + f" in the text configuration, got {given}"
            )


__all__ = ["MoEMBConfig", "validate_adaptive_compute", "validate_gates"]
