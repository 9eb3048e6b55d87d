"""Routing policies and the routed experts against a plain loop in fp64."""

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb.experts_moemb import MoEMBExperts, MoEMBSparseMoeBlock, expert_rows, padded_counts
from modeling_moemb.routing_moemb import Routing, route, uniform_top_k


def experts(config, backend, dtype=torch.float32):
    module = MoEMBExperts(config.text_config, backend)
    torch.nn.init.normal_(module.gate_up_proj, std=0.2)
    torch.nn.init.normal_(module.down_proj, std=0.2)
    return module.to(dtype)


def experts_naive(hidden, index, weight, gate_up, down, num_experts):
    rows = []
    for token in range(hidden.shape[0]):
        total = torch.zeros_like(hidden[token])
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            if expert < num_experts:
                gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
                total = total + weight[token, slot] * (down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def routing_with_skips(tokens=37, slots=3, num_experts=8):
    routing = route(torch.randn(tokens, num_experts), slots, torch.float32)
    skipped = torch.rand(tokens, slots) < 0.4
    skipped[0] = True  # a token without any expert
    skipped[1] = False
    return routing.skip(skipped)


@pytest.mark.parametrize("backend", ["grouped", "loop"])
@pytest.mark.parametrize("skips", [True, False])
def test_experts_equal_the_naive_sum_forward_and_backward(tiny_config, backend, skips):
    module = experts(tiny_config, backend)
    routing = routing_with_skips() if skips else route(torch.randn(37, 8), 3, torch.float32)
    hidden = torch.randn(37, 64)
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, routing.weight)]
    exact = [
        t.detach().double().requires_grad_() for t in (hidden, routing.weight, module.gate_up_proj, module.down_proj)
    ]
    expected = experts_naive(exact[0], routing.expert_index, *exact[1:], 8)
    actual = module(mine[0], routing.expert_index, mine[1])
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad.float())
    live = routing.expert_index < 8
    torch.testing.assert_close(mine[0].grad.double(), exact[0].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine[1].grad.double()[live], exact[1].grad[live], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(module.gate_up_proj.grad.double(), exact[2].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(module.down_proj.grad.double(), exact[3].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["grouped", "loop"])
def test_all_pairs_skipped_gives_zero(tiny_config, backend):
    index = torch.full((5, 2), 8)
    output = experts(tiny_config, backend)(torch.randn(5, 64), index, torch.rand(5, 2))
    assert output.shape == (5, 64) and not output.any()


def test_skipped_pair_equals_weight_zero(tiny_config):
    module = experts(tiny_config, "grouped")
    routing = route(torch.randn(20, 8), 3, torch.float32)
    skipped = torch.rand(20, 3) < 0.5
    hidden = torch.randn(20, 64)
    removed = module(hidden, routing.skip(skipped).expert_index, routing.skip(skipped).weight)
    zeroed = module(hidden, routing.expert_index, routing.weight.masked_fill(skipped, 0))
    torch.testing.assert_close(removed, zeroed, atol=1e-6, rtol=1e-6)


def test_unaligned_widths_take_the_segment_loop(tiny_settings):
    from modeling_moemb import MoEMBConfig

    text = {**tiny_settings["text_config"], "hidden_size": 18, "moe_intermediate_size": 10}
    config = MoEMBConfig(**{**tiny_settings, "text_config": text})
    grouped = experts(config, "grouped")
    loop = experts(config, "loop")
    loop.load_state_dict(grouped.state_dict())
    routing, hidden = routing_with_skips(), torch.randn(37, 18)
    torch.testing.assert_close(
        grouped(hidden, routing.expert_index, routing.weight), loop(hidden, routing.expert_index, routing.weight)
    )


def test_surviving_pairs_are_laid_out_by_expert():
    index = torch.tensor([[2, 8], [0, 2], [8, 8], [1, 0]])
    rows = expert_rows(index, 8, pad=False)
    assert rows.token.tolist() == [1, 3, 3, 0, 1]
    assert rows.counts.tolist() == [2, 1, 2, 0, 0, 0, 0, 0]
    assert rows.pair.tolist() == [0, 2, 3, 6, 7]
    assert rows.place.tolist() == [3, 0, 4, 2, 1]


def test_padding_rows_stand_after_the_pairs_of_each_expert():
    index = torch.randint(0, 9, (300, 3))
    rows = expert_rows(index, 8, pad=True)
    counts = torch.bincount(index.flatten(), minlength=9)[:8]
    assert torch.equal(rows.counts, padded_counts(counts)) and int(rows.counts.sum()) == rows.token.shape[0]
    owner = torch.repeat_interleave(torch.arange(8), rows.counts)
    assert torch.equal(owner[rows.place], index.flatten()[rows.pair])
    assert torch.equal(rows.token[rows.place], rows.pair // 3)


def test_padded_counts_take_few_values_and_waste_little():
    counts = torch.arange(0, 5000)
    padded = padded_counts(counts)
    assert (padded >= counts).all() and padded[0] == 0 and not (padded % 8).any()
    assert (padded[64:].double() / counts[64:]).max() <= 1.13
    assert padded.unique().numel() < 80


@pytest.mark.parametrize("skips", [True, False])
def test_bf16_experts_equal_the_naive_sum(tiny_config, skips):
    module = experts(tiny_config, "grouped", torch.bfloat16)
    routing = routing_with_skips() if skips else route(torch.randn(37, 8), 3, torch.float32)
    hidden = torch.randn(37, 64).bfloat16().requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (hidden, module.gate_up_proj, module.down_proj)]
    weight = routing.weight.bfloat16()
    expected = experts_naive(exact[0], routing.expert_index, weight.double(), *exact[1:], 8)
    actual = module(hidden, routing.expert_index, weight)
    assert (actual.double() - expected).abs().max() <= 2e-2 * expected.abs().max()
    grad = torch.randn_like(expected)
    expected.backward(grad)
    actual.backward(grad.bfloat16())
    for mine, reference in zip((hidden, module.gate_up_proj, module.down_proj), exact):
        assert (mine.grad.double() - reference.grad).abs().max() <= 3e-2 * reference.grad.abs().max()


def test_route_weights_ignore_unselected_experts():
    logits = torch.randn(30, 8)
    routing = route(logits, 3, torch.float32)
    chosen = logits.gather(1, routing.expert_index).softmax(-1)
    torch.testing.assert_close(routing.weight, chosen)


def test_uniform_top_k_equals_routing_with_fewer_experts():
    logits = torch.randn(30, 8)
    fewer, direct = uniform_top_k(route(logits, 4, torch.float32), 2), route(logits, 2, torch.float32)
    assert torch.equal(fewer.expert_index, direct.expert_index)
    torch.testing.assert_close(fewer.weight, direct.weight)


def test_uniform_top_k_keeps_skipped_tokens_empty():
    routing = Routing(torch.tensor([[8, 8, 8]]), torch.zeros(1, 3), 8)
    fewer = uniform_top_k(routing, 2)
    assert fewer.expert_index.tolist() == [[8, 8]] and not fewer.weight.any()


@pytest.mark.parametrize("top_k", [0, 4, -1])
def test_uniform_top_k_refuses_counts_out_of_range(top_k):
    with pytest.raises(ValueError, match="from 1 to 3"):
        uniform_top_k(route(torch.randn(2, 8), 3, torch.float32), top_k)


def test_route_ignores_a_shift_of_all_logits():
    logits = torch.randn(50, 8)
    torch.testing.assert_close(route(logits + 3, 2, torch.float32).weight, route(logits, 2, torch.float32).weight)


def test_router_runs_in_fp32_under_autocast(tiny_config):
    block = MoEMBSparseMoeBlock(tiny_config.text_config, "grouped")
    torch.nn.init.normal_(block.gate.weight)
    for parameter in block.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden = torch.randn(10, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        _, logits = block(hidden)
    torch.testing.assert_close(logits, hidden.float() @ block.gate.weight.T)
