"""Smoke test of the built kernel, loaded as users load it."""

from pathlib import Path

import kernels
import pytest
import torch


KERNEL = kernels.get_local_kernel(Path(__file__).parents[1])
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_gated_delta_rule(device, dtype, tolerance):
    torch.manual_seed(0)
    lengths, heads, dim = [0, 1, 63, 64, 65], 2, 32
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    query, key, value = torch.randn(3, tokens, heads, dim, device=device).to(dtype).unbind(0)
    decay, beta = -torch.rand(tokens, heads, device=device), torch.rand(tokens, heads, device=device)
    unit_query, unit_key = (torch.nn.functional.normalize(tensor.double(), dim=-1) for tensor in (query, key))
    expected, start = [], 0
    for length in lengths:
        state = torch.zeros(heads, dim, dim, dtype=torch.double, device=device)
        for token in range(start, start + length):
            state = state * decay[token].double().exp()[:, None, None]
            error = value[token].double() - torch.einsum("hkv,hk->hv", state, unit_key[token])
            state = state + torch.einsum("hk,hv->hkv", unit_key[token], beta[token, :, None].double() * error)
            expected.append(torch.einsum("hkv,hk->hv", state, unit_query[token]) * dim**-0.5)
        start += length
    expected = torch.stack(expected)
    assert KERNEL.supports("gated_delta_rule", query, key, value, decay, beta, cu_seqlens)
    output = KERNEL.gated_delta_rule(query, key, value, decay, beta, cu_seqlens)
    assert output.dtype == dtype
    assert (output.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("device", DEVICES)
def test_conv_and_norms(device):
    torch.manual_seed(0)
    states, weight = torch.randn(30, 48, device=device), torch.randn(48, 4, device=device)
    cu_seqlens = torch.tensor([0, 7, 7, 30], dtype=torch.int32, device=device)
    expected = []
    for start, end in ((0, 7), (7, 30)):
        columns = torch.nn.functional.pad(states[start:end].t()[None], (3, 0))
        expected.append(torch.nn.functional.conv1d(columns, weight[:, None], groups=48)[0].t())
    expected = torch.nn.functional.silu(torch.cat(expected))
    torch.testing.assert_close(KERNEL.causal_conv(states, weight, cu_seqlens), expected, atol=1e-4, rtol=1e-4)
    scale = weight[:, 0].contiguous()
    unit = torch.nn.functional.rms_norm(states, (48,), eps=1e-6)
    torch.testing.assert_close(KERNEL.rms_norm(states, scale, 1e-6), unit * (1 + scale), atol=1e-4, rtol=1e-4)
    gated = unit * scale * torch.nn.functional.silu(states)
    torch.testing.assert_close(KERNEL.gated_rms_norm(states, states, scale, 1e-6), gated, atol=1e-4, rtol=1e-4)
