"""Linear layers whose rows do not depend on their neighbours, where a compiled kernel offers that.

torch's products take another route for another number of rows: the last bits of a row then depend on its batch, and
on the CPU a bf16 product is compiled anew for every row count of a ragged packing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeMLP

from .kernels_moemb import kernel


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`states @ weight^T + bias` by the kernel of this device, or by torch.

    Args:
        states (`torch.Tensor` of shape `(..., in_features)`): rows.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): the checkpoint layout.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): added to every row.
    """
    # under autocast torch chooses the dtype of the product, and torch's own product obeys it
    if not torch.is_autocast_enabled(states.device.type):
        run = kernel("linear", states, weight, bias)
        if run is not None:
            return run(states, weight, bias)
    return F.linear(states, weight, bias)


class MoEMBLinear(nn.Linear):
    """`nn.Linear` by [`linear`]; parameters, name and behaviour under adapters as in torch's class."""

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


def use_packed_linear(module: nn.Module) -> None:
    """Turn the linear layers that transformers' constructors made inside `module` into [`MoEMBLinear`], in place."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = MoEMBLinear


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise, by the kernel of this device or by torch."""
    run = kernel("swiglu", gate, up)
    return F.silu(gate) * up if run is None else run(gate, up)


class MoEMBMLP(Qwen3_5MoeMLP):
    """The shared expert; parameters as in transformers' class."""

    def __init__(self, config, intermediate_size: int):
        super().__init__(config, intermediate_size)
        use_packed_linear(self)

    def forward(self, states: Tensor) -> Tensor:
        """Run the gated MLP on `(tokens, hidden)` rows."""
        gate, up = self.gate_proj(states), self.up_proj(states)
        inner = gated_product(gate, up) if self.config.hidden_act == "silu" else self.act_fn(gate) * up
        return self.down_proj(inner)
