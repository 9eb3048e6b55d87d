"""The MoEMB model. These files are copied into every published model repository."""

from transformers import AutoConfig, AutoModel, AutoProcessor

from .configuration_moemb import MoEMBConfig, validate_adaptive_compute
from .kernels_moemb import kernels_report, use_kernels
from .modeling_moemb import MoEMBModel, MoEMBOutput, MoEMBPreTrainedModel
from .processing_moemb import MoEMBProcessor


AutoConfig.register("moemb", MoEMBConfig)
AutoModel.register(MoEMBConfig, MoEMBModel)
AutoProcessor.register(MoEMBConfig, MoEMBProcessor)

__all__ = [
    "MoEMBConfig",
    "MoEMBModel",
    "MoEMBOutput",
    "MoEMBPreTrainedModel",
    "MoEMBProcessor",
    "kernels_report",
    "use_kernels",
    "validate_adaptive_compute",
]
