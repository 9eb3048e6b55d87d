"""Smoke test of the built kernel, loaded as users load it."""

from pathlib import Path

import kernels
import pytest
import torch


KERNEL = kernels.get_local_kernel(Path(__file__).parents[1])
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_experts(device, dtype, tolerance):
    torch.manual_seed(0)
    tokens, experts, hidden, width, slots = 65, 6, 64, 32, 3
    states = torch.randn(tokens, hidden, device=device, dtype=dtype)
    index = torch.randint(0, experts + 1, (tokens, slots), device=device)
    weight = torch.rand(tokens, slots, device=device)
    gate_up = torch.randn(experts, 2 * width, hidden, device=device, dtype=dtype) * 0.1
    down = torch.randn(experts, hidden, width, device=device, dtype=dtype) * 0.1
    expected = torch.zeros(tokens, hidden, dtype=torch.double, device=device)
    for token in range(tokens):
        for slot in range(slots):
            expert = int(index[token, slot])
            if expert < experts:
                gate, up = (gate_up[expert].double() @ states[token].double()).chunk(2)
                activation = torch.nn.functional.silu(gate) * up
                expected[token] += weight[token, slot] * (down[expert].double() @ activation)
    assert KERNEL.supports("experts", states, index, weight, gate_up, down)
    output = KERNEL.experts(states, index, weight, gate_up, down)
    assert output.dtype == dtype
    assert (output.double() - expected).norm() <= tolerance * expected.norm()
