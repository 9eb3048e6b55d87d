"""transformers' own Qwen3.5-MoE models on our kernels; MoEMB's models need nothing of this."""

from dataclasses import dataclass

import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock
from transformers.utils import logging

from .kernels_moemb import kernel_sources, kernels_report


logger = logging.get_logger(__name__)

# transformers' name of a hook -> (what carries it, the layer of our repositories, the operation it needs)
HOOKS = {
    "MoEMBExperts": ("Qwen3_5MoeExperts", "MoEMBExperts", "experts"),  # our own: transformers has none there
    "RMSNormZeroCentered": ("Qwen3_5MoeRMSNorm", "RMSNormZeroCentered", "rms_norm"),
    "RMSNormGated": ("Qwen3_5MoeRMSNormGated", "RMSNormGated", "gated_rms_norm"),
    "SoftmaxTopKRouter": ("Qwen3_5MoeTopKRouter", "SoftmaxTopKRouter", "top_k_router"),
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule", "ChunkGatedDeltaRule", "gated_delta_rule"),
    "causal_conv1d_fn": ("causal_conv1d_fn", "CausalConv1d", "causal_conv"),
}


@dataclass(frozen=True)
class KernelLayer:
    """A layer for `kernels.use_kernel_mapping`, of a repository that the seam found.

    `kernels.LocalLayerRepository` takes the backend of the torch build, which a CUDA build has CUDA for.

    Args:
        repository (`str`): name of the kernel repository.
        origin (`str`): where it came from; two origins are two layers.
        device (`str`): device type.
        layer_name (`str`): class in the repository's `layers`.
    """

    repository: str
    origin: str
    device: str
    layer_name: str

    def load(self) -> type[torch.nn.Module]:
        """The layer's class.

        Raises:
            FileNotFoundError: the repository is not in use any more.
        """
        for source in kernel_sources(self.device):
            if (source.repository, source.origin) == (self.repository, self.origin) and source.module is not None:
                return getattr(source.module.layers, self.layer_name)
        raise FileNotFoundError(f"the kernel repository {self.origin} is not in use: call use_kernels again")


def stock_kernel_mapping(device: str = "cpu") -> dict[str, dict[str, KernelLayer]]:
    """A mapping for `kernels.use_kernel_mapping` of all layers that run on this device.

    Args:
        device (`str`, *optional*, defaults to `"cpu"`): device type.

    Returns:
        `dict`: transformers' layer name to device type to [`KernelLayer`]; empty without kernels.
    """
    runs = {row.op for row in kernels_report() if row.device == device and row.dtypes}
    mapping = {}
    for hub_name, (_, layer_name, op) in HOOKS.items():
        for source in kernel_sources(device):
            if op in runs and hasattr(getattr(source.module, "layers", None), layer_name):
                layer = KernelLayer(source.repository, source.origin, device, layer_name)
                mapping.setdefault(hub_name, {device: layer})
    return mapping


def kernelize_stock(model: torch.nn.Module, training: bool = False) -> list[str]:
    """Put our kernels into a stock Qwen3.5-MoE model of transformers, in place.

    The model then takes packed sequences (`cu_seq_lens_q` with restarting `position_ids`) on every device. The gated
    delta rule and the convolution are functions that all models of the process share: theirs change for all of them.

    Args:
        model (`torch.nn.Module`): a model made of transformers' `Qwen3_5Moe` classes.
        training (`bool`, *optional*, defaults to `False`): whether gradients will be asked for.

    Returns:
        `list[str]`: transformers' names of the layers and functions that now run on kernels.

    Raises:
        ImportError: the `kernels` package is not installed.
    """
    try:
        import kernels
    except ImportError as error:
        raise ImportError("kernelize_stock needs the 'kernels' package: pip install 'kernels>=0.17.2'") from error
    device = next(model.parameters()).device.type
    mapping = stock_kernel_mapping(device)
    hidden = []
    for name in list(mapping):
        target = getattr(stock, HOOKS[name][0])
        if isinstance(target, type):
            kernels.replace_kernel_forward_from_hub(target, name)
        elif not hasattr(target, "kernel_layer_name"):
            hidden.append(name)
            del mapping[name]
    if hidden:
        logger.warning(
            "%s stay on PyTorch, which refuses packed sequences: this release of transformers hides their hooks, "
            "because it wants another release of the 'kernels' package",
            " and ".join(hidden),
        )
    mode = kernels.Mode.TRAINING if training else kernels.Mode.INFERENCE
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device=device, use_fallback=True)
    return sorted(mapping)
