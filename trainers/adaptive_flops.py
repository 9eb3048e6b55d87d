"""FLOPs of a batch as a differentiable function of what gates keep, in the normalisation of `count_flops`.

With keep factors of exactly 0 and 1 the value is that of the FLOPs that removing would execute, so that a budget on it
is a budget on what is deployed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modeling_moemb.compute_moemb import UnitMacs


class FlopsEstimate:
    """Adds up what the blocks of a pass with `pooled_only=True` cost.

    Args:
        config (`MoEMBConfig`): the model's.
        item (`torch.LongTensor` of shape `[tokens]`): item of each token of the flattened batch.
        last (`torch.LongTensor` of shape `[items]`): the pooled token of each.
        grids (`torch.LongTensor` of shape `[pictures, 3]`, *optional*): patch grids of images and videos.
    """

    def __init__(self, config: Any, item: Tensor, last: Tensor, grids: Tensor | None = None):
        self.config, self.unit = config, UnitMacs.of(config)
        self.item, self.last, self.grids = item, last, grids
        self.text = config.text_config

    def macs(self, mass: list[Tensor], kept: list[Tensor], gates: float = 0.0) -> tuple[Tensor, float]:
        """Multiply-accumulates of the decoder, and of the vision tower and merger.

        Args:
            mass (`list[torch.Tensor]`): of each block, how much each token is there, `[tokens]` in [0, 1].
            kept (`list[torch.Tensor]`): of each block, the share of its expert slots that each token runs, `[tokens]`.
            gates (`float`): multiply-accumulates of the gates.
        """
        unit, total = self.unit, torch.as_tensor(gates, dtype=torch.float64)
        slots, items = self.text.num_experts_per_tok, len(self.last)
        for block, (alive, share) in enumerate(zip(mass, kept, strict=True)):
            alive, share = alive.double(), share.double()
            pooled = block == self.text.num_hidden_layers - 1
            asking = alive[self.last] if pooled else alive
            share = share[self.last] if pooled else share
            if self.text.layer_types[block] == "linear_attention":
                total = total + unit.delta_net * alive.sum()
            else:
                lengths = alive.new_zeros(items).index_add(0, self.item, alive)
                pairs = lengths.sum() if pooled else (lengths * (lengths + 1)).sum() / 2
                total = total + unit.attention_keys * alive.sum() + unit.attention_queries * asking.sum()
                total = total + unit.attention_pair * pairs
            total = total + (unit.router + unit.shared) * asking.sum()
            total = total + unit.expert * slots * (asking * share).sum()
        return total, self._vision()

    def _vision(self) -> float:
        if self.grids is None or not len(self.grids):
            return 0.0
        time, area = self.grids[:, 0].double(), (self.grids[:, 1] * self.grids[:, 2]).double()
        patches = float((time * area).sum())
        merge = self.config.vision_config.spatial_merge_size**2
        return (
            self.unit.patch * patches
            + self.unit.patch_pair * float((time * area**2).sum())
            + (self.unit.merged * (patches // merge))
        )

    def full(self, scope: str = "total") -> float:
        """FLOPs of full compute, with or without the vision tower."""
        ones = [torch.ones(len(self.item), device=self.item.device)] * self.text.num_hidden_layers
        decoder, vision = self.macs(ones, ones)
        return 2 * (float(decoder) + (vision if scope == "total" else 0.0))

    def removed(self, mass: list[Tensor], kept: list[Tensor], gates: float = 0.0, scope: str = "total") -> Tensor:
        """Share of the FLOPs of full compute that is removed, differentiable; `scope`: `"total"` or `"decoder"`."""
        decoder, vision = self.macs(mass, kept, gates)
        return 1 - 2 * (decoder + (vision if scope == "total" else 0.0)) / self.full(scope)


def estimate_of(config: Any, inputs: Mapping[str, Tensor]) -> FlopsEstimate:
    """The estimate for a flattened batch of model inputs."""
    bounds = inputs["cu_seq_lens_q"].long()
    item = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=bounds.device), bounds.diff())
    grids = [inputs[name] for name in ("image_grid_thw", "video_grid_thw") if inputs.get(name) is not None]
    return FlopsEstimate(config, item, bounds[1:] - 1, torch.cat(grids) if grids else None)
