"""The MoEMB model. These files are copied into every published model repository."""

from transformers import AutoConfig, AutoModel

from .configuration_moemb import MoEMBConfig, validate_adaptive_compute
from .modeling_moemb import MoEMBModel, MoEMBOutput, MoEMBPreTrainedModel


AutoConfig.register("moemb", MoEMBConfig)
AutoModel.register(MoEMBConfig, MoEMBModel)

__all__ = ["MoEMBConfig", "MoEMBModel", "MoEMBOutput", "MoEMBPreTrainedModel", "validate_adaptive_compute"]
