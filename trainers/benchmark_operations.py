"""The operations of the kernels: random inputs, naive reference, operations and bytes of each.

Inputs are dictionaries in the order of the operation's signature, so that an implementation is called with
`*inputs.values()`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import benchmark_references as references


EPS = 1e-6
EDGE_LENGTHS = (0, 1, 63, 64, 65, 0, 70)  # empty, single, and around the chunk of 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Inputs = dict[str, Any]
Shape = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """
    One operation of the kernels.

    Args:
        name (`str`): as the kernels call it.
        inputs (`Callable[[Shape, torch.dtype, torch.Generator], Inputs]`): fresh random inputs.
        reference (`Callable`): the naive reference, called with the inputs in float64.
        work (`Callable[[Shape, Inputs], tuple[float, float]]`): operations (2 per multiply-add) and bytes that must
            be moved at least once.
        differentiable (`tuple[str, ...]`): inputs that have gradients.
    """

    name: str
    inputs: Callable[[Shape, torch.dtype, torch.Generator], Inputs]
    reference: Callable[..., Any]
    work: Callable[[Shape, Inputs], tuple[float, float]]
    differentiable: tuple[str, ...]


def _normal(generator: torch.Generator, *size: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    return torch.randn(*size, generator=generator).mul_(std).to(dtype)


def lengths_to_offsets(lengths) -> Tensor:
    """`cu_seqlens`, `torch.IntTensor` `(items + 1,)`."""
    return torch.tensor([0, *torch.tensor(list(lengths)).cumsum(0).tolist()], dtype=torch.int32)


def ragged_lengths(tokens: int, low: int, high: int, seed: int = 0) -> list[int]:
    """Log-uniform item lengths from `low` to `high` that sum to `tokens`; at most the last is cut shorter."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while tokens > 0:
        draw = torch.rand((), generator=generator).item()
        lengths.append(min(tokens, round(low * (high / low) ** draw)))
        tokens -= lengths[-1]
    return lengths


def _bytes(*tensors: Tensor | None) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None))


def _expert_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """`routing`: `uniform`, or `skewed`: a few experts take most rows, some take none, some slots are skipped."""
    tokens, num_experts, slots = shape["tokens"], shape["num_experts"], shape["slots"]
    hidden, inner = shape["hidden"], shape["inner"]
    scores = torch.rand(tokens, num_experts, generator=generator)
    skewed = shape.get("routing") == "skewed"
    if skewed:
        scores = scores / torch.arange(1, num_experts + 1)  # the first experts are nearly always chosen
        scores[:, -2:] = -1.0  # and the last two never
    index = scores.topk(slots, dim=-1).indices
    weight = torch.rand(tokens, slots, generator=generator)
    weight = weight / weight.sum(-1, keepdim=True)
    if skewed:
        skipped = torch.rand(tokens, slots, generator=generator) < 0.3
        skipped[tokens // 2 : tokens // 2 + 1] = True  # one token loses all its slots
        index, weight = index.masked_fill(skipped, num_experts), weight.masked_fill(skipped, 0)
    return {
        "hidden_states": _normal(generator, tokens, hidden, dtype=dtype),
        "expert_index": index,
        "weight": weight.to(dtype),
        "gate_up_proj": _normal(generator, num_experts, 2 * inner, hidden, dtype=dtype, std=hidden**-0.5),
        "down_proj": _normal(generator, num_experts, hidden, inner, dtype=dtype, std=inner**-0.5),
    }


def _expert_work(shape: Shape, inputs: Inputs) -> tuple[float, float]:
    chosen = inputs["expert_index"][inputs["expert_index"] < shape["num_experts"]]
    one_expert = 3 * shape["hidden"] * shape["inner"]
    hit = chosen.unique().numel() * one_expert * inputs["down_proj"].element_size()
    return 2.0 * chosen.numel() * one_expert, hit + 2 * _bytes(inputs["hidden_states"])


def _linear_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    rows, features, outputs = shape["tokens"], shape["features"], shape["outputs"]
    return {
        "input": _normal(generator, rows, features, dtype=dtype),
        "weight": _normal(generator, outputs, features, dtype=dtype, std=features**-0.5),
        "bias": _normal(generator, outputs, dtype=dtype) if shape.get("bias") else None,
    }


def _linear_work(shape: Shape, inputs: Inputs) -> tuple[float, float]:
    output = shape["tokens"] * shape["outputs"] * inputs["weight"].element_size()
    return 2.0 * shape["tokens"] * shape["features"] * shape["outputs"], _bytes(*inputs.values()) + output


def _rule_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Query, key and value are views of one tensor, as in the model."""
    tokens, key_heads, value_heads, dim = sum(shape["lengths"]), *(shape[n] for n in ("key_heads", "heads", "dim"))
    mixed = _normal(generator, tokens, (2 * key_heads + value_heads) * dim, dtype=dtype)
    query, key, value = mixed.split([key_heads * dim, key_heads * dim, value_heads * dim], dim=-1)
    return {
        "query": query.unflatten(-1, (key_heads, dim)),
        "key": key.unflatten(-1, (key_heads, dim)),
        "value": value.unflatten(-1, (value_heads, dim)),
        # heads forget at different speeds, some within a token and some hardly at all
        "decay": -torch.rand(tokens, value_heads, generator=generator) * torch.logspace(-3, 0.7, value_heads),
        "beta": torch.rand(tokens, value_heads, generator=generator),
        "cu_seqlens": lengths_to_offsets(shape["lengths"]),
    }


def _rule_work(shape: Shape, inputs: Inputs) -> tuple[float, float]:
    """Operations of the recurrence: the chunked form does more and is not credited for it."""
    tokens, heads, dim = inputs["value"].shape
    return 8.0 * tokens * heads * dim * dim, 2 * _bytes(inputs["value"]) + _bytes(inputs["query"], inputs["key"])


def _conv_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    tokens, channels = sum(shape["lengths"]), shape["channels"]
    return {
        "hidden_states": _normal(generator, tokens, channels, dtype=dtype),
        "weight": _normal(generator, channels, 4, dtype=dtype, std=0.5),
        "cu_seqlens": lengths_to_offsets(shape["lengths"]),
        "activation": shape.get("activation", "silu"),
    }


def _norm_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return {
        "states": _normal(generator, *shape["size"], dtype=dtype),
        "weight": _normal(generator, shape["size"][-1], dtype=dtype, std=0.1),
        "eps": EPS,
        "dtype": dtype,
    }


def _gated_norm_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return {
        "states": _normal(generator, *shape["size"], dtype=dtype),
        "gate": _normal(generator, *shape["size"], dtype=dtype),
        "weight": _normal(generator, shape["size"][-1], dtype=dtype, std=0.1) + 1,
        "eps": EPS,
    }


def _router_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return {
        "logits": _normal(generator, shape["tokens"], shape["num_experts"], dtype=torch.float32),
        "k": shape["slots"],
    }


def _attention_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    tokens, heads, key_heads, dim = sum(shape["lengths"]), *(shape[n] for n in ("heads", "key_heads", "dim"))
    return {
        "query": _normal(generator, tokens, heads, dim, dtype=dtype),
        "key": _normal(generator, tokens, key_heads, dim, dtype=dtype),
        "value": _normal(generator, tokens, key_heads, dim, dtype=dtype),
        "cu_seqlens": lengths_to_offsets(shape["lengths"]),
        "scaling": dim**-0.5,
        "causal": shape.get("causal", True),
    }


def _attention_work(shape: Shape, inputs: Inputs) -> tuple[float, float]:
    pairs = sum(n * (n + 1) // 2 if inputs["causal"] else n * n for n in shape["lengths"])
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    return 4.0 * pairs * query.shape[1] * query.shape[2], 2 * _bytes(query) + _bytes(key, value)


def _swiglu_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Both halves of one tensor, as a fused projection leaves them."""
    tokens, inner = shape["size"]
    gate, up = _normal(generator, tokens, 2 * inner, dtype=dtype).chunk(2, dim=-1)
    return {"gate": gate, "up": up}


def _rotary_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    tokens, heads, dim = shape["size"]
    angles = torch.rand(tokens, shape["rotary"] // 2, generator=generator).mul_(6.28).repeat(1, 2)
    return {
        "states": _normal(generator, tokens, heads, dim, dtype=dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "dtype": dtype,
    }


def _row_work(operations: float, reads: int, first: str) -> Callable[[Shape, Inputs], tuple[float, float]]:
    """Work of an elementwise operation: `operations` and `reads` per element of its input `first`, and one write."""

    def work(shape: Shape, inputs: Inputs) -> tuple[float, float]:
        return operations * inputs[first].numel(), (reads + 1) * _bytes(inputs[first])

    return work


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "experts", _expert_inputs, references.experts, _expert_work,
            ("hidden_states", "weight", "gate_up_proj", "down_proj"),
        ),
        Operation("linear", _linear_inputs, references.linear, _linear_work, ("input", "weight", "bias")),
        Operation(
            "gated_delta_rule", _rule_inputs, references.gated_delta_rule, _rule_work,
            ("query", "key", "value", "decay", "beta"),
        ),
        Operation(
            "causal_conv", _conv_inputs, references.causal_conv, _row_work(8.0, 1, "hidden_states"),
            ("hidden_states", "weight"),
        ),
        Operation(
            "rms_norm", _norm_inputs, lambda states, weight, eps, dtype: references.rms_norm(states, weight, eps),
            _row_work(4.0, 1, "states"), ("states", "weight"),
        ),
        Operation(
            "gated_rms_norm", _gated_norm_inputs, references.gated_rms_norm, _row_work(8.0, 2, "states"),
            ("states", "gate", "weight"),
        ),
        Operation(
            "top_k_router", _router_inputs, references.top_k_router, _row_work(3.0, 1, "logits"), ("logits",)
        ),
        Operation(
            "varlen_attention", _attention_inputs, references.varlen_attention, _attention_work,
            ("query", "key", "value"),
        ),
        Operation("swiglu", _swiglu_inputs, references.swiglu, _row_work(4.0, 2, "gate"), ("gate", "up")),
        Operation(
            "rotary", _rotary_inputs, lambda states, cos, sin, dtype: references.rotary(states, cos, sin),
            _row_work(3.0, 1, "states"), ("states",),
        ),
    )
}  # fmt: skip


def check_shapes(name: str) -> list[Shape]:
    """Small shapes on which an operation is compared with its reference: odd, empty and skewed ones."""
    edge, one = list(EDGE_LENGTHS), [1]
    return {
        "experts": [
            {"tokens": tokens, "num_experts": 16, "hidden": 128, "inner": 64, "slots": 4, "routing": routing}
            for tokens in (0, 1, 5, 63, 64, 65)
            for routing in ("uniform", "skewed")
        ],
        "linear": [
            {"tokens": tokens, "features": 128, "outputs": 96, "bias": bias}
            for tokens in (0, 1, 65) for bias in (False, True)
        ],
        "gated_delta_rule": [
            {"lengths": lengths, "key_heads": 2, "heads": heads, "dim": dim}
            for lengths in (edge, one, [0]) for heads, dim in ((4, 64), (2, 128))
        ],
        "causal_conv": [
            {"lengths": lengths, "channels": 96, "activation": activation}
            for lengths in (edge, one, [0]) for activation in ("silu", None)
        ],
        "rms_norm": [{"size": (rows, dim)} for rows in (0, 1, 65) for dim in (64, 256)],
        "gated_rms_norm": [{"size": (rows, 4, 64)} for rows in (0, 1, 65)],
        "top_k_router": [
            {"tokens": tokens, "num_experts": experts, "slots": slots}
            for tokens in (0, 1, 65) for experts, slots in ((16, 4), (256, 8))
        ],
        "varlen_attention": [
            {"lengths": lengths, "heads": 4, "key_heads": 2, "dim": 64, "causal": causal}
            for lengths in (edge, one, [0]) for causal in (True, False)
        ],
        "swiglu": [{"size": (rows, 96)} for rows in (0, 1, 65)],
        "rotary": [{"size": (rows, 4, 64), "rotary": 32} for rows in (0, 1, 65)],
    }[name]  # fmt: skip
