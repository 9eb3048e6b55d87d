"""Everything that can run an operation of the kernels here: ours compiled, ours in torch, transformers' own.

An implementation is a function of the inputs that returns a callable without arguments: tables and padding that its
users would also prepare once are made outside the timed part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeTextConfig
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from modeling_moemb import delta_rule_moemb, elementwise_moemb, experts_moemb, mixers_moemb, routing_moemb
from modeling_moemb.kernels_moemb import kernel as find_kernel
from modeling_moemb.layout_moemb import PackedLayout

from .benchmark_kernel_switch import kernels_off
from .benchmark_operations import Inputs, lengths_to_offsets


KERNEL, TORCH = "moemb kernel", "moemb torch"
# Bytes of gathered weights above which transformers' batched_mm is not asked to run: it is ten times slower than the
# others by then, and what it allocates and frees slows down whoever runs after it.
BATCHED_LIMIT = 256 << 20

Run = Callable[[], Any]


@dataclass(frozen=True)
class Implementation:
    """
    One implementation, bound to inputs.

    Args:
        run (`Callable[[], Any]`): the timed part.
        packed (`Callable[[Any], Any]`): its result as rows of the packed inputs, for comparison.
    """

    run: Run
    packed: Callable[[Any], Any] = lambda result: result


def _without_kernels(run: Run) -> Run:
    def inner():
        with kernels_off():
            return run()

    return inner


def implementations(name: str, inputs: Inputs) -> dict[str, Implementation]:
    """
    What can run the operation `name` on these inputs.

    Args:
        name (`str`): a key of `OPERATIONS`.
        inputs (`dict`): in the order of the operation's signature.

    Returns:
        `dict[str, Implementation]`: our kernel first (absent when none supports these inputs), our torch path, then
        what transformers has.
    """
    found = {}
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    kernel = find_kernel(name, *tensors)
    if kernel is not None:
        found[KERNEL] = Implementation(lambda: kernel(*inputs.values()))
    rows = next(iter(inputs.values())).shape[0]
    if rows:  # the model never runs on nothing, and transformers' code refuses it
        ours = _TORCH[name](inputs)
        found[TORCH] = Implementation(_without_kernels(ours.run), ours.packed)
        found.update(_STOCK[name](inputs) if name in _STOCK else {})
    return found


def _module(module_class: type[nn.Module], *args, **tensors: Tensor) -> nn.Module:
    """A module whose parameters are these very tensors, so that gradients reach them."""
    with torch.device("meta"):
        module = module_class(*args)
    for name, tensor in tensors.items():
        delattr(module, name)
        setattr(module, name, tensor)
    return module


def _lengths(inputs: Inputs) -> list[int]:
    """Lengths of the items that are not empty: the model has no others."""
    return [length for length in inputs["cu_seqlens"].diff().tolist() if length]


def _layout(inputs: Inputs) -> PackedLayout:
    layout = PackedLayout(_lengths(inputs), inputs["cu_seqlens"].device)
    for table in ("chunks", "chunk_order", "causal_groups", "causal_order", "exact_groups", "exact_order"):
        getattr(layout, table)  # built on first use, and shared by all layers of a model
    return layout


# our torch path


def _torch_experts(inputs: Inputs) -> Implementation:
    module = _experts_module(experts_moemb.MoEMBExperts, inputs, "grouped")
    arguments = [inputs[name] for name in ("hidden_states", "expert_index", "weight")]
    return Implementation(lambda: module(*arguments))


def _torch_rule(inputs: Inputs) -> Implementation:
    layout, arguments = _layout(inputs), list(inputs.values())[:5]
    return Implementation(lambda: delta_rule_moemb.gated_delta_rule(*arguments, layout))


def _torch_conv(inputs: Inputs) -> Implementation:
    offsets = lengths_to_offsets(_lengths(inputs))
    activation = ACT2FN[inputs["activation"]] if inputs["activation"] else lambda states: states
    states, weight = inputs["hidden_states"], inputs["weight"]
    return Implementation(lambda: activation(mixers_moemb.causal_conv(states, weight, offsets)))


def _torch_norm(inputs: Inputs) -> Implementation:
    states, weight = inputs["states"], inputs["weight"]
    module = _module(elementwise_moemb.MoEMBRMSNorm, states.shape[-1], inputs["eps"], weight=weight)
    return Implementation(lambda: module(states))


def _torch_gated_norm(inputs: Inputs) -> Implementation:
    states, gate, weight = inputs["states"], inputs["gate"], inputs["weight"]
    module = _module(elementwise_moemb.MoEMBRMSNormGated, states.shape[-1], inputs["eps"], weight=weight)
    return Implementation(lambda: module(states, gate))


def _torch_router(inputs: Inputs) -> Implementation:
    def run() -> tuple[Tensor, Tensor]:
        routing = routing_moemb.route(inputs["logits"], inputs["k"], torch.float32)
        return routing.expert_index, routing.weight

    return Implementation(run)


def _torch_attention(inputs: Inputs) -> Implementation:
    layout = _layout(inputs)
    states = [inputs[name] for name in ("query", "key", "value")]
    rest = layout, inputs["scaling"], inputs["causal"]
    return Implementation(lambda: mixers_moemb.varlen_attention(*states, *rest))


_TORCH: dict[str, Callable[[Inputs], Implementation]] = {
    "experts": _torch_experts,
    "linear": lambda inputs: Implementation(lambda: F.linear(*inputs.values())),
    "gated_delta_rule": _torch_rule,
    "causal_conv": _torch_conv,
    "rms_norm": _torch_norm,
    "gated_rms_norm": _torch_gated_norm,
    "top_k_router": _torch_router,
    "varlen_attention": _torch_attention,
    "swiglu": lambda inputs: Implementation(lambda: F.silu(inputs["gate"]) * inputs["up"]),
    "rotary": lambda inputs: Implementation(lambda: elementwise_moemb.rotate(*inputs.values())),
}


# transformers


def _experts_module(module_class: type[nn.Module], inputs: Inputs, *args, **settings) -> nn.Module:
    gate_up, down = inputs["gate_up_proj"], inputs["down_proj"]
    config = Qwen3_5MoeTextConfig(
        num_experts=gate_up.shape[0], hidden_size=gate_up.shape[2], moe_intermediate_size=down.shape[2],
        num_experts_per_tok=inputs["expert_index"].shape[1],
    )  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    return _module(module_class, config, *args, gate_up_proj=gate_up, down_proj=down)


def _stock_experts(inputs: Inputs) -> dict[str, Implementation]:
    index, down = inputs["expert_index"], inputs["down_proj"]
    if (index == down.shape[0]).any():
        return {}  # a skipped slot is outside what its back-ends take
    found = {}
    gathered = index.numel() * 3 * down[0].numel() * down.element_size()
    arguments = [inputs[name] for name in ("hidden_states", "expert_index", "weight")]
    for backend in ("eager", "grouped_mm", "batched_mm"):
        if backend == "batched_mm" and gathered > BATCHED_LIMIT:
            continue
        module = _experts_module(stock.Qwen3_5MoeExperts, inputs, _experts_implementation=backend)
        found[f"transformers {backend}"] = Implementation(lambda module=module: module(*arguments))
    return found


def pad_rows(rows: Tensor, lengths: list[int]) -> Tensor:
    """Packed rows `(tokens, ...)` as `(items, longest, ...)`, zero beyond each item's end."""
    return nn.utils.rnn.pad_sequence(list(rows.split(lengths)), batch_first=True)


def _unpad(lengths: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda padded: torch.cat([row[:length] for row, length in zip(padded, lengths)])


def _stock_rule(inputs: Inputs) -> dict[str, Implementation]:
    lengths, repeat = _lengths(inputs), inputs["value"].shape[1] // inputs["key"].shape[1]
    query, key, value, decay, beta = (pad_rows(tensor, lengths) for tensor in list(inputs.values())[:5])

    def run() -> Tensor:
        # repeating the key heads is part of what its layer does
        return stock.torch_chunk_gated_delta_rule(
            query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2), value, g=decay, beta=beta,
            use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip

    return {"transformers padded": Implementation(run, _unpad(lengths))}


def _stock_conv(inputs: Inputs) -> dict[str, Implementation]:
    lengths = _lengths(inputs)
    padded = pad_rows(inputs["hidden_states"], lengths).transpose(1, 2)
    weight, activation = inputs["weight"], inputs["activation"]
    unpad = _unpad(lengths)
    return {
        "transformers padded": Implementation(
            lambda: stock.causal_conv1d_fn(padded, weight, None, activation=activation),
            lambda result: unpad(result.transpose(1, 2)),
        )
    }


def _stock_attention(inputs: Inputs) -> dict[str, Implementation]:
    lengths = _lengths(inputs)
    padded = [pad_rows(inputs[name], lengths).transpose(1, 2) for name in ("query", "key", "value")]
    longest, causal = max(lengths), inputs["causal"]
    mask = None
    if min(lengths) != longest:
        alive = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        mask = alive[:, None, None, :].expand(-1, 1, longest, -1)
        mask = mask & torch.ones(longest, longest, dtype=torch.bool).tril() if causal else mask
    module = nn.Module()
    module.num_key_value_groups = padded[0].shape[1] // padded[1].shape[1]
    module.is_causal = causal

    def run() -> Tensor:
        return sdpa_attention_forward(module, *padded, mask, scaling=inputs["scaling"], is_causal=causal)[0]

    return {"transformers padded": Implementation(run, _unpad(lengths))}


def _stock_norm(inputs: Inputs) -> dict[str, Implementation]:
    states = inputs["states"]
    module = _module(stock.Qwen3_5MoeRMSNorm, states.shape[-1], inputs["eps"], weight=inputs["weight"])
    return {"transformers": Implementation(lambda: module(states))}


def _stock_gated_norm(inputs: Inputs) -> dict[str, Implementation]:
    states, gate = inputs["states"], inputs["gate"]
    module = _module(stock.Qwen3_5MoeRMSNormGated, states.shape[-1], inputs["eps"], weight=inputs["weight"])
    return {"transformers": Implementation(lambda: module(states, gate))}


def _stock_router(inputs: Inputs) -> dict[str, Implementation]:
    def run() -> tuple[Tensor, Tensor]:
        probabilities = F.softmax(inputs["logits"], dtype=torch.float, dim=-1)
        weight, index = torch.topk(probabilities, inputs["k"], dim=-1)
        return index, weight / weight.sum(dim=-1, keepdim=True)

    return {"transformers": Implementation(run)}


def _stock_swiglu(inputs: Inputs) -> dict[str, Implementation]:
    activation, gate, up = ACT2FN["silu"], inputs["gate"], inputs["up"]
    return {"transformers": Implementation(lambda: activation(gate) * up)}


def _stock_rotary(inputs: Inputs) -> dict[str, Implementation]:
    states = inputs["states"][None]
    cos, sin = (inputs[name][None].to(states.dtype) for name in ("cos", "sin"))
    none = states[:, :, :0]  # its function turns queries and keys together

    def run() -> Tensor:
        return stock.apply_rotary_pos_emb(states, none, cos, sin, unsqueeze_dim=2)[0][0]

    return {"transformers": Implementation(run)}


_STOCK: dict[str, Callable[[Inputs], dict[str, Implementation]]] = {
    "experts": _stock_experts,
    "gated_delta_rule": _stock_rule,
    "causal_conv": _stock_conv,
    "rms_norm": _stock_norm,
    "gated_rms_norm": _stock_gated_norm,
    "top_k_router": _stock_router,
    "varlen_attention": _stock_attention,
    "swiglu": _stock_swiglu,
    "rotary": _stock_rotary,
}
