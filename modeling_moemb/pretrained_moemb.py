"""The base class of the model's parts."""

import math

import torch
from transformers import initialization as init
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoePreTrainedModel,
    Qwen3_5MoeTopKRouter,
)

from .configuration_moemb import MoEMBConfig
from .gates_moemb import init_gates
from .task_conditioning_moemb import MoEMBTaskRouter


class MoEMBPreTrainedModel(Qwen3_5MoePreTrainedModel):
    config: MoEMBConfig
    config_class = MoEMBConfig
    base_model_prefix = "model"
    _no_split_modules = ["MoEMBDecoderLayer", "MoEMBVisionBlock", "MoEMBGates"]
    _keep_in_fp32_modules_strict = ["gates"]
    _can_record_outputs = {}
    _can_compile_fullgraph = False
    _is_stateful = False

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        # transformers reaches the router through its parent block, but in code outside transformers it skips modules
        # that own no parameter themselves: the routers would stay at zero
        if isinstance(module, Qwen3_5MoeTopKRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        if isinstance(module, MoEMBTaskRouter):
            init.zeros_(module.weight)
        # transformers' ones are a placeholder for a checkpoint's values: with them nearly every head forgets all but
        # the present token, and a model trained from scratch cannot learn to remember
        if isinstance(module, Qwen3_5MoeGatedDeltaNet):
            init.copy_(module.dt_bias, decay_bias(module.num_v_heads).to(module.dt_bias.device))
        init_gates(module)


def decay_bias(num_heads: int) -> torch.Tensor:
    """Initial `dt_bias` of Mamba2 and Gated DeltaNet: its softplus is log-uniform in [1e-3, 1e-1].

    Args:
        num_heads (`int`): number of value heads.

    Returns:
        `torch.FloatTensor` of shape `(num_heads,)`.
    """
    low, high = math.log(1e-3), math.log(1e-1)
    step = torch.exp(torch.rand(num_heads) * (high - low) + low)
    return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
