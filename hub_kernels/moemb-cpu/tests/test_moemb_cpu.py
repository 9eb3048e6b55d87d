"""Smoke test of the built kernel, loaded as users load it."""

from pathlib import Path

import kernels
import pytest
import torch
from torch.nn.functional import silu


KERNEL = kernels.get_local_kernel(Path(__file__).parents[1], backend="cpu")
LENGTHS = torch.tensor([0, 5, 5, 6, 70], dtype=torch.int32)
needs_avx512 = pytest.mark.skipif(KERNEL.isa() == "none", reason="this CPU has no AVX-512")


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@needs_avx512
def test_experts(dtype, tolerance):
    torch.manual_seed(0)
    tokens, experts, hidden, width, slots = 70, 6, 64, 32, 3
    states = torch.randn(tokens, hidden, dtype=dtype)
    index, weight = torch.randint(experts + 1, (tokens, slots)), torch.rand(tokens, slots)
    gate_up = (torch.randn(experts, 2 * width, hidden) * 0.1).to(dtype)
    down = (torch.randn(experts, hidden, width) * 0.1).to(dtype)
    expected = torch.zeros(tokens, hidden, dtype=torch.double)
    for expert in range(experts):
        token, slot = (index == expert).nonzero(as_tuple=True)
        gate, up = (states[token].double() @ gate_up[expert].double().t()).chunk(2, dim=-1)
        output = (silu(gate) * up) @ down[expert].double().t()
        expected.index_add_(0, token, output * weight[token, slot, None].double())
    assert KERNEL.supports("experts", states, index, weight.to(dtype), gate_up, down)
    close(KERNEL.experts(states, index, weight.to(dtype), gate_up, down), expected, tolerance)


@pytest.mark.kernels_ci
@needs_avx512
def test_gated_delta_rule():
    torch.manual_seed(0)
    tokens, heads, dim = 70, 2, 32
    query, key, value = (torch.randn(tokens, heads, dim) for _ in range(3))
    decay, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    unit_query, unit_key = ((x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()).double() for x in (query, key))
    expected = torch.empty(tokens, heads, dim, dtype=torch.double)
    starts = set(LENGTHS[:-1].tolist())
    for token in range(tokens):
        if token in starts:
            state = torch.zeros(heads, dim, dim, dtype=torch.double)  # (heads, key_dim, value_dim)
        state = state * decay[token].double().exp()[:, None, None]
        k = unit_key[token]
        read = torch.einsum("hk,hkv->hv", k, state)
        written = (value[token] - read) * beta[token, :, None]
        state = state + k[:, :, None] * written[:, None, :]
        expected[token] = torch.einsum("hk,hkv->hv", unit_query[token] * dim**-0.5, state)
    assert KERNEL.supports("gated_delta_rule", query, key, value, decay, beta, LENGTHS)
    close(KERNEL.gated_delta_rule(query, key, value, decay, beta, LENGTHS), expected, 1e-5)


@pytest.mark.kernels_ci
@needs_avx512
def test_causal_conv():
    torch.manual_seed(0)
    states, weight = torch.randn(70, 48), torch.randn(48, 4)
    expected = torch.zeros(70, 48, dtype=torch.double)
    for first, last in zip(LENGTHS[:-1].tolist(), LENGTHS[1:].tolist()):
        for token in range(first, last):
            for back in range(min(4, token - first + 1)):
                expected[token] += states[token - back].double() * weight[:, 3 - back].double()
    close(KERNEL.causal_conv(states, weight, LENGTHS, "silu"), silu(expected), 1e-5)


@pytest.mark.kernels_ci
def test_a_limit_switches_everything_off():
    states = torch.randn(4, 64)
    KERNEL.limit_isa("none")
    try:
        assert not KERNEL.supports("rms_norm", states, torch.ones(64))
    finally:
        KERNEL.limit_isa("amx")
    assert KERNEL.supports("rms_norm", states, torch.ones(64)) == (KERNEL.isa() != "none")
