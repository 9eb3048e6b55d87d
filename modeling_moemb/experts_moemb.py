"""The mixture-of-experts block over a [`Routing`]: work that is not routed is not done."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeExperts,
    Qwen3_5MoeSparseMoeBlock,
    Qwen3_5MoeTopKRouter,
)

from .elementwise_moemb import sigmoid
from .kernels_moemb import kernel
from .linear_moemb import MoEMBMLP, gated_product, linear
from .routing_moemb import Routing, route
from .task_conditioning_moemb import MoEMBTaskRouter, RouterCondition


def padded_counts(counts: Tensor) -> Tensor:
    """Row counts rounded up to eight steps per power of two, at least to a multiple of 8; 0 stays 0.

    oneDNN compiles a bf16 product anew for each row count it has not met, which costs more than the product itself.
    """
    # bit_length of counts - 1: the next power of two, without a trip through the host
    power = torch.ceil(torch.log2(counts.clamp_min(1).double())).to(counts.dtype)
    step = (2**power // 16).clamp_min(8)
    return -(-counts // step) * step


@dataclass(frozen=True)
class ExpertRows:
    """The surviving (token, expert) pairs of a routing, laid out by expert.

    Args:
        token (`torch.LongTensor` of shape `(rows,)`): the token of each row; padding rows repeat token 0.
        place (`torch.LongTensor` of shape `(pairs,)`): the row of each surviving pair, in (token, slot) order.
        pair (`torch.LongTensor` of shape `(pairs,)`, *optional*): flat (token, slot) index of each surviving pair;
            `None` when all pairs survive.
        counts (`torch.LongTensor` of shape `(num_experts,)`): rows of each expert, padding included.
    """

    token: Tensor
    place: Tensor
    pair: Tensor | None
    counts: Tensor


def expert_rows(expert_index: Tensor, num_experts: int, pad: bool) -> ExpertRows:
    """Lay out the pairs that are not skipped by expert; inside an expert tokens keep their order.

    Args:
        expert_index (`torch.LongTensor` of shape `(tokens, slots)`): `num_experts` marks a skipped slot.
        num_experts (`int`): number of routed experts.
        pad (`bool`): round each expert's rows up, see [`padded_counts`].
    """
    flat, slots = expert_index.reshape(-1), expert_index.shape[1]
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    rows = padded_counts(counts) if pad else counts
    pairs, total = torch.stack([counts.sum(), rows.sum()]).tolist()
    order = order[:pairs]
    shift = (rows.cumsum(0) - rows) - (counts.cumsum(0) - counts)  # padding that stands before each expert
    place = torch.arange(pairs, device=flat.device) + shift[flat[order]]
    token = torch.zeros(total, dtype=torch.long, device=flat.device)
    token[place] = order // slots
    by_pair = torch.argsort(order)
    pair = None if pairs == flat.shape[0] else order[by_pair]
    return ExpertRows(token, place[by_pair], pair, rows)


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
    if torch.compiler.is_compiling() and rows.dtype == torch.float32:
        return False  # torch traces the grouped product for 16-bit floats only
    aligned = all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    capable = not rows.is_cuda or torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return aligned and capable and rows.dtype in (torch.float32, torch.bfloat16)


class MoEMBExperts(Qwen3_5MoeExperts):
    """Routed experts over surviving pairs; parameters and call signature as in transformers' class."""

    def __init__(self, config, backend: str):
        super().__init__(config)
        self.backend = backend
        self.gated_by_silu = config.hidden_act == "silu"

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

    def _grouped(self, states: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        run = kernel("experts", states, index, weights, gate_up, down) if self.gated_by_silu else None
        if run is not None:
            return run(states, index, weights, gate_up, down)
        tokens, slots = index.shape
        pad = states.device.type == "cpu" and states.dtype == torch.bfloat16
        rows = expert_rows(index, self.num_experts, pad)
        gate, up = grouped_linear(states.index_select(0, rows.token), gate_up, rows.counts).chunk(2, dim=-1)
        inner = gated_product(gate, up) if self.gated_by_silu else self.act_fn(gate) * up
        outputs = grouped_linear(inner, down, rows.counts).index_select(0, rows.place)
        weights = weights.reshape(-1, 1)
        # a token's slots are added in their own order, whatever its batch
        if rows.pair is None:
            return (outputs * weights).view(tokens, slots, -1).sum(1)
        outputs = outputs * weights.index_select(0, rows.pair)
        padded = outputs.new_zeros(tokens * slots, outputs.shape[-1]).index_copy(0, rows.pair, outputs)
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


class MoEMBTopKRouter(Qwen3_5MoeTopKRouter):
    """Router logits, in fp32 whatever the precision of the model: bf16 logits tie in the top-k."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Logits of `(tokens, hidden)` rows, `(tokens, num_experts)`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return linear(hidden_states.float(), self.weight.float())


class MoEMBSparseMoeBlock(Qwen3_5MoeSparseMoeBlock):
    """Router, routed experts and the gated shared expert; parameters as in transformers' class.

    With `shared_expert_intermediate_size=0` there is no shared expert. [`add_task_router`] conditions the router.
    """

    def __init__(self, config, experts_backend: str):
        shared = config.shared_expert_intermediate_size
        if shared:
            super().__init__(config)
        else:
            nn.Module.__init__(self)  # transformers' class would make a shared expert of no width
        self.gate = MoEMBTopKRouter(config)
        self.experts = MoEMBExperts(config, experts_backend)
        self.shared_expert = MoEMBMLP(config, shared) if shared else None
        self.task_router: MoEMBTaskRouter | None = None
        self.top_k = config.num_experts_per_tok

    def add_task_router(self, dim: int) -> None:
        """Give the router its `U` for condition vectors of length `dim`; nothing changes while that is zero."""
        weight = self.gate.weight
        self.task_router = MoEMBTaskRouter(dim, weight.shape[0]).to(weight.device, weight.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        policy: Callable[[Routing], Routing] | None = None,
        modality: Tensor | None = None,
        condition: RouterCondition | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block on `(tokens, hidden)` rows.

        Args:
            hidden_states (`torch.Tensor` of shape `(tokens, hidden)`): normed token states.
            policy (`Callable[[Routing], Routing]`, *optional*): which of the chosen pairs to run; it sees the routing
                with fp32 weights, where a threshold is not blurred by the model's precision.
            modality (`torch.LongTensor` of shape `(tokens,)`, *optional*): not looked at.
            condition (`RouterCondition`, *optional*): what the tokens' routing is conditioned on.

        Returns:
            The block's output, and the router logits (`(tokens, num_experts)`, fp32).
        """
        router_logits = self.gate(hidden_states)
        if condition is not None:
            router_logits = router_logits + self.task_router(condition).to(router_logits.device)
        routing = route(router_logits, self.top_k, torch.float32)
        if policy is not None:
            routing = policy(routing)
        routed = self.experts(hidden_states, routing.expert_index, routing.weight)
        if self.shared_expert is None:
            return routed, router_logits
        shared = sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)
        return routed + shared, router_logits
