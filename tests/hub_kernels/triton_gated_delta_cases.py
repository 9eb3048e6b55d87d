"""The Triton kernels of Gated DeltaNet under the interpreter; run by test_triton_gated_delta.py."""

import pytest
import torch
import torch.nn.functional as F

from tests.hub_kernels.noarch import (
    assert_close,
    conv_oracle,
    delta_rule_oracle,
    load_sources,
    offsets,
    packed_qkv,
    poison_memory,
)


KERNEL = load_sources("moemb-gated-delta")
LONGER = ([0, 1, 63, 64, 65], [40, 31, 0, 33], [200], [0, 0, 130, 2])


@pytest.fixture(autouse=True)
def triton_on_poisoned_memory(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("MOEMB_GATED_DELTA_BACKEND", "triton")
    poison_memory(monkeypatch)


@pytest.mark.parametrize(
    "lengths",
    [[1], [3, 0, 16, 17, 5], [70], *(pytest.param(lengths, marks=pytest.mark.slow) for lengths in LONGER)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_delta_rule(lengths):
    mixed, inputs, cu_seqlens = packed_qkv(lengths, 1, 2, 20, 24, torch.float32)
    expected, actual = delta_rule_oracle(*inputs, cu_seqlens), KERNEL.gated_delta_rule(*inputs, cu_seqlens)
    assert_close(actual, expected, 5e-6, "output")
    leaves, grad = (mixed, *inputs[3:]), torch.randn(actual.shape)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for a, b in zip(torch.autograd.grad(actual, leaves, grad), wanted):
        assert_close(a, b, 1e-5, "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delta_rule_16_bit(dtype):
    _, inputs, cu_seqlens = packed_qkv([30, 70], 2, 2, 16, 16, dtype)
    actual = KERNEL.gated_delta_rule(*inputs, cu_seqlens)
    assert actual.dtype == dtype
    assert_close(actual, delta_rule_oracle(*inputs, cu_seqlens), 1e-2)


def test_equal_keys_and_no_decay():
    """The worst case of the triangular system: a series of its powers would cancel to nothing."""
    _, (query, key, value, decay, beta), cu_seqlens = packed_qkv([64, 70], 1, 1, 16, 16, torch.float32)
    inputs = (query, key[:1].expand_as(key), value, decay * 0, beta * 0 + 1)
    assert_close(KERNEL.gated_delta_rule(*inputs, cu_seqlens), delta_rule_oracle(*inputs, cu_seqlens), 5e-6)


@pytest.mark.slow
def test_strong_decay_does_not_overflow():
    _, (query, key, value, decay, beta), cu_seqlens = packed_qkv([100], 1, 1, 16, 16, torch.float32)
    inputs = (query, key, value, decay * 100, beta)
    assert_close(KERNEL.gated_delta_rule(*inputs, cu_seqlens), delta_rule_oracle(*inputs, cu_seqlens), 5e-6)


@pytest.mark.slow
def test_a_segment_does_not_hear_its_neighbours():
    _, inputs, cu_seqlens = packed_qkv([20, 70, 9], 1, 1, 16, 16, torch.float32)
    query, key, value, decay, beta = (tensor.detach() for tensor in inputs)
    value = value.clone()
    expected = delta_rule_oracle(query, key, value, decay, beta, cu_seqlens)
    value[20:90] = torch.nan
    actual = KERNEL.gated_delta_rule(query, key, value, decay, beta, cu_seqlens)
    for rows in (slice(0, 20), slice(90, 99)):
        assert_close(actual[rows], expected[rows], 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("lengths,taps", [([0, 1, 2, 40, 0, 3, 21, 0], 4), ([7], 1), ([33, 32, 31], 3)])
def test_conv(lengths, taps, activation):
    cu_seqlens = offsets(lengths)
    wide = torch.randn(int(cu_seqlens[-1]), 50).requires_grad_()
    weight = torch.randn(37, taps).requires_grad_()
    states = wide[:, 5:42]
    expected = conv_oracle(states, weight, cu_seqlens, activation)
    actual = KERNEL.causal_conv(states, weight, cu_seqlens, activation)
    assert_close(actual, expected, 1e-6, "output")
    grad = torch.randn(actual.shape)
    wanted = torch.autograd.grad(expected, (wide, weight), grad.double())
    for a, b in zip(torch.autograd.grad(actual, (wide, weight), grad), wanted):
        assert_close(a, b, 1e-5, "gradient")


def norm_oracle(states, weight, gate, eps):
    rows = states.double()
    unit = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    return unit * (1 + weight.double()) if gate is None else unit * weight.double() * F.silu(gate.double())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(5, 3, 24), (1, 130), (700, 16)])
def test_norms(shape, gated):
    states, gate = (torch.randn(shape).requires_grad_() for _ in range(2))
    weight = torch.randn(shape[-1]).requires_grad_()
    if gated:
        leaves, actual = (states, gate, weight), KERNEL.gated_rms_norm(states, gate, weight, 1e-6)
        expected = norm_oracle(states, weight, gate, 1e-6)
    else:
        leaves, actual = (states, weight), KERNEL.rms_norm(states, weight, 1e-6, torch.float32)
        expected = norm_oracle(states, weight, None, 1e-6)
    assert_close(actual, expected, 1e-6, "output")
    grad = torch.randn(shape)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for a, b in zip(torch.autograd.grad(actual, leaves, grad), wanted):
        assert_close(a, b, 1e-5, "gradient")


@pytest.mark.slow
def test_dtypes_of_norms():
    states, gate, weight = torch.randn(4, 32), torch.randn(4, 32).to(torch.bfloat16), torch.randn(32)
    output = KERNEL.gated_rms_norm(states, gate, weight, 1e-6)
    assert output.dtype == torch.bfloat16
    assert_close(output, norm_oracle(states, weight, gate, 1e-6), 1e-2)
    assert KERNEL.rms_norm(states, weight, 1e-6, torch.bfloat16).dtype == torch.bfloat16
    assert KERNEL.rms_norm(gate, weight, 1e-6).dtype == torch.bfloat16


def test_no_tokens():
    _, inputs, _ = packed_qkv([], 1, 2, 16, 8, torch.float32)
    for cu_seqlens in (offsets([]), offsets([0, 0])):
        assert KERNEL.gated_delta_rule(*inputs, cu_seqlens).shape == (0, 2, 8)
        assert KERNEL.causal_conv(torch.zeros(0, 8), torch.zeros(8, 4), cu_seqlens).shape == (0, 8)
    assert KERNEL.rms_norm(torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)
    assert KERNEL.gated_rms_norm(torch.zeros(0, 8), torch.zeros(0, 8), torch.zeros(8), 1e-6).shape == (0, 8)
