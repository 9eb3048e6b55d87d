"""The mixture-of-experts block over a [`Routing`]: work that is not routed is not done."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeSparseMoeBlock

from .routing_moemb import Routing, route, uniform_top_k


def surviving_pairs(expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The (token, expert) pairs that are not skipped, sorted by expert, tokens in order inside each expert.

    Args:
        expert_index (`torch.LongTensor` of shape `(tokens, slots)`): `num_experts` marks a skipped slot.
        num_experts (`int`): number of routed experts.

    Returns:
        `order` (`torch.LongTensor` of shape `(pairs,)`), flat indices into `(tokens, slots)`, and `counts`
        (`torch.LongTensor` of shape `(num_experts,)`), pairs per expert.
    """
    flat = expert_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    return order[: int(counts.sum())], counts


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`rows` of expert `e` times `weight[e]^T`, for rows sorted by expert.

    Args:
        rows (`torch.Tensor` of shape `(pairs, in_features)`): sorted by expert.
        weight (`torch.Tensor` of shape `(num_experts, out_features, in_features)`): the checkpoint layout.
        counts (`torch.LongTensor` of shape `(num_experts,)`): rows per expert.

    Returns:
        `torch.Tensor` of shape `(pairs, out_features)`.
    """
    if rows.shape[0] > 0 and _has_grouped_product(rows, weight):
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows.contiguous(), weight.transpose(-2, -1), offs=offsets)
    blocks = rows.split(counts.tolist())
    return torch.cat([F.linear(block, matrix) for block, matrix in zip(blocks, weight.unbind(0))])


def _has_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    """torch's grouped product wants row strides of 16 bytes, fp32 or bf16, and on CUDA compute capability 8.0."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    capable = not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return aligned and capable and rows.dtype in (torch.float32, torch.bfloat16)


class MoEMBExperts(Qwen3_5MoeExperts):
    """Routed experts over surviving pairs; parameters and call signature as in transformers' class."""

    def __init__(self, config, backend: str):
        super().__init__(config)
        self.backend = backend

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): router inputs.
            top_k_index (`torch.LongTensor` of shape `(tokens, slots)`): `num_experts` marks a skipped slot.
            top_k_weights (`torch.Tensor` of shape `(tokens, slots)`): weights of the slots.

        Returns:
            `torch.Tensor` of shape `(tokens, hidden)`.
        """
        if torch.is_autocast_enabled(hidden_states.device.type):
            dtype = torch.get_autocast_dtype(hidden_states.device.type)
        else:
            dtype = self.gate_up_proj.dtype
        rows = hidden_states.to(dtype)
        run = self._loop if self.backend == "loop" else self._grouped
        with torch.autocast(hidden_states.device.type, enabled=False):
            output = run(
                rows, top_k_index, top_k_weights.to(dtype), self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
            )
        return output.to(hidden_states.dtype)

    def _grouped(self, rows: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, slots = index.shape
        order, counts = surviving_pairs(index, self.num_experts)
        gate, up = grouped_linear(rows.index_select(0, order // slots), gate_up, counts).chunk(2, dim=-1)
        outputs = grouped_linear(self.act_fn(gate) * up, down, counts)
        outputs = outputs * weights.reshape(-1).index_select(0, order)[:, None]
        if order.shape[0] == tokens * slots:
            # every pair runs: undo the sort and add a token's slots in their own order, whatever its batch
            return outputs.index_select(0, torch.argsort(order)).view(tokens, slots, -1).sum(1)
        padded = outputs.new_zeros(tokens * slots, outputs.shape[-1]).index_copy(0, order, outputs)
        return padded.view(tokens, slots, -1).sum(1)

    def _loop(self, rows: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in index.unique().tolist():
            if expert == self.num_experts:
                continue
            token, slot = (index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(self.act_fn(gate) * up, down[expert]) * weights[token, slot][:, None]
            output = output.index_add(0, token, result)
        return output


class MoEMBSparseMoeBlock(Qwen3_5MoeSparseMoeBlock):
    """Router, routed experts and the gated shared expert; parameters as in transformers' class."""

    def __init__(self, config, experts_backend: str):
        super().__init__(config)
        self.experts = MoEMBExperts(config, experts_backend)

    def forward(self, hidden_states: Tensor, top_k: int | None = None) -> tuple[Tensor, Tensor]:
        """Run the block on `(tokens, hidden)` rows.

        Args:
            hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): normed token states.
            top_k (`int`, *optional*): experts per token when fewer than the router's own; renormalised.

        Returns:
            The block's output, and the router logits (`(tokens, num_experts)`, fp32: bf16 logits tie in the top-k).
        """
        with torch.autocast(hidden_states.device.type, enabled=False):
            router_logits = F.linear(hidden_states.float(), self.gate.weight.float())
        routing: Routing = route(router_logits, self.gate.top_k, hidden_states.dtype)
        if top_k is not None:
            routing = uniform_top_k(routing, top_k)
        routed = self.experts(hidden_states, routing.expert_index, routing.weight)
        shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)
        return routed + shared, router_logits
