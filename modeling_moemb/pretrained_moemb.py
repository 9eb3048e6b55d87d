"""The base class of the model's parts."""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoePreTrainedModel

from .configuration_moemb import MoEMBConfig


class MoEMBPreTrainedModel(Qwen3_5MoePreTrainedModel):
    config: MoEMBConfig
    config_class = MoEMBConfig
    base_model_prefix = "model"
    _no_split_modules = ["MoEMBDecoderLayer", "MoEMBVisionBlock"]
    _can_record_outputs = {}
    _can_compile_fullgraph = False
    _is_stateful = False
