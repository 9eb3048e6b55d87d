"""Varlen mixers against plain recurrences in fp64, forward and backward, at odd lengths."""

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb.delta_rule_moemb import gated_delta_rule
from modeling_moemb.layout_moemb import PackedLayout
from modeling_moemb.mixers_moemb import causal_conv, last_query_attention, varlen_attention


LENGTHS = [1, 2, 3, 63, 64, 65, 127, 129, 8, 200, 16, 17]
CPU = torch.device("cpu")


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def delta_rule_naive(query, key, value, decay, beta):
    """One item, token by token: decay, read, write, read out. Shapes as in `gated_delta_rule`."""
    repeat = value.shape[1] // key.shape[1]
    query, key = (states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt() for states in (query, key))
    query = (query * query.shape[-1] ** -0.5).repeat_interleave(repeat, dim=1)
    key = key.repeat_interleave(repeat, dim=1)
    state = torch.zeros(value.shape[1], key.shape[-1], value.shape[-1], dtype=value.dtype)
    outputs = []
    for t in range(value.shape[0]):
        state = state * decay[t].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, key[t])
        state = state + torch.einsum("hk,hv->hkv", key[t], (value[t] - read) * beta[t][:, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
    return torch.stack(outputs)


def delta_rule_inputs(lengths, key_heads=2, value_heads=4, key_dim=16, value_dim=24):
    tokens = sum(lengths)
    return [
        torch.randn(tokens, key_heads, key_dim, dtype=torch.float64),
        torch.randn(tokens, key_heads, key_dim, dtype=torch.float64),
        torch.randn(tokens, value_heads, value_dim, dtype=torch.float64),
        -torch.rand(tokens, value_heads, dtype=torch.float64),
        torch.rand(tokens, value_heads, dtype=torch.float64),
    ]


def test_gated_delta_rule_equals_the_recurrence_forward_and_backward():
    inputs = delta_rule_inputs(LENGTHS)
    exact = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.cat([delta_rule_naive(*item) for item in zip(*(tensor.split(LENGTHS) for tensor in exact))])
    ours = [tensor.float().requires_grad_() for tensor in inputs]
    actual = gated_delta_rule(*ours, PackedLayout(LENGTHS, CPU))
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)

    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (actual * weight.float()).sum().backward()
    for mine, reference in zip(ours, exact):
        scale = reference.grad.abs().max()
        assert (mine.grad.double() - reference.grad).abs().max() <= 1e-5 * scale


def test_gated_delta_rule_survives_repeated_keys_without_decay():
    """Blank image patches: equal keys, full write strength, no decay. A power series of the system would overflow."""
    lengths = [64, 200]
    query, key, value, decay, beta = delta_rule_inputs(lengths)
    key, decay, beta = key[:1].expand_as(key), torch.zeros_like(decay), torch.ones_like(beta) * 0.999
    expected = torch.cat(
        [delta_rule_naive(*item) for item in zip(*(t.split(lengths) for t in (query, key, value, decay, beta)))]
    )
    actual = gated_delta_rule(*(t.float() for t in (query, key, value, decay, beta)), PackedLayout(lengths, CPU))
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-4)


def test_gated_delta_rule_is_finite_under_strong_decay():
    inputs = delta_rule_inputs([70])
    inputs[3] = torch.full_like(inputs[3], -60.0)
    ours = [tensor.float().requires_grad_() for tensor in inputs]
    actual = gated_delta_rule(*ours, PackedLayout([70], CPU))
    actual.sum().backward()
    torch.testing.assert_close(actual.double(), delta_rule_naive(*inputs), atol=2e-6, rtol=1e-5)
    assert all(tensor.grad.isfinite().all() for tensor in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_conv_equals_conv1d_per_item(dtype):
    states = torch.randn(sum(LENGTHS), 12, dtype=dtype)
    weight = torch.randn(12, 4, dtype=dtype)
    exact_states, exact_weight = states.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.cat(
        [
            F.conv1d(F.pad(item.t()[None], (3, 0)), exact_weight[:, None], groups=12)[0].t()
            for item in exact_states.split(LENGTHS)
        ]
    )
    states, weight = states.requires_grad_(), weight.requires_grad_()
    actual = causal_conv(states, weight, boundaries(LENGTHS))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(states.grad.double(), exact_states.grad, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, atol=10 * tolerance, rtol=tolerance)


def test_empty_items_change_nothing_in_the_causal_conv():
    lengths = [0, 3, 0, 0, 6, 1, 0]
    weight, filled = torch.randn(7, 4), [length for length in lengths if length]
    results = []
    for cut in (lengths, filled):
        torch.manual_seed(0)
        states = torch.randn(10, 7, requires_grad=True)
        output = causal_conv(states, weight, boundaries(cut))
        output.backward(torch.randn(10, 7))
        results.append((output, states.grad))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)


def test_causal_conv_of_fewer_tokens_than_taps():
    states, weight = torch.randn(2, 5), torch.randn(5, 4)
    expected = torch.stack([states[0] * weight[:, 3], states[1] * weight[:, 3] + states[0] * weight[:, 2]])
    torch.testing.assert_close(causal_conv(states, weight, boundaries([2])), expected)


def attention_naive(query, key, value, scaling, causal):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_varlen_attention_equals_attention_per_item(causal, train):
    inputs = [torch.randn(sum(LENGTHS), heads, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    exact = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.cat(
        [attention_naive(*item, 0.3, causal) for item in zip(*(tensor.split(LENGTHS) for tensor in exact))]
    )
    ours = [tensor.float().requires_grad_(train) for tensor in inputs]
    with torch.set_grad_enabled(train):
        actual = varlen_attention(*ours, PackedLayout(LENGTHS, CPU), 0.3, causal)
    torch.testing.assert_close(actual.double(), expected, atol=2e-6, rtol=1e-5)
    if train:
        grad = torch.randn_like(expected)
        expected.backward(grad)
        actual.backward(grad.float())
        for mine, reference in zip(ours, exact):
            torch.testing.assert_close(mine.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_last_query_attention_equals_the_last_row_of_full_attention(train):
    query, key, value = (torch.randn(sum(LENGTHS), heads, 16) for heads in (4, 2, 2))
    layout = PackedLayout(LENGTHS, CPU)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    with torch.set_grad_enabled(train):
        expected = varlen_attention(query, key, value, layout, 0.3, causal=True)[last]
        actual = last_query_attention(query[last], key, value, layout, 0.3)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_an_items_delta_rule_does_not_depend_on_its_neighbours():
    """Same length class, same arithmetic: the neighbours change which matrices share a batch, not an item's values."""
    item = [tensor.float() for tensor in delta_rule_inputs([40])]
    alone = gated_delta_rule(*item, PackedLayout([40], CPU))
    neighbours = [tensor.float() for tensor in delta_rule_inputs([5, 90])]
    batch = [torch.cat([pair[1][:5], pair[0], pair[1][5:]]) for pair in zip(item, neighbours)]
    together = gated_delta_rule(*batch, PackedLayout([5, 40, 90], CPU))[5:45]
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)
