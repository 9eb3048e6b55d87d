"""The Triton experts under the interpreter; run by test_triton_experts.py."""

import pytest
import torch

from tests.hub_kernels.noarch import assert_close, experts_oracle, load_sources, poison_memory


KERNEL = load_sources("moemb-experts")
NAMES = ("output", "hidden_states", "weight", "gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def triton_on_poisoned_memory(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("MOEMB_EXPERTS_BACKEND", "triton")
    poison_memory(monkeypatch)


def inputs(index, experts, hidden, width, dtype=torch.float32):
    tokens = index.shape[0]
    tensors = (
        torch.randn(tokens, hidden),
        torch.rand(index.shape),
        torch.randn(experts, 2 * width, hidden) * hidden**-0.5,
        torch.randn(experts, hidden, width) * width**-0.5,
    )
    states, weight, gate_up, down = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return states, index, weight, gate_up, down


def check(arguments, tolerance=1e-5):
    states, _, weight, gate_up, down = arguments
    leaves = (states, weight, gate_up, down)
    expected, actual = experts_oracle(*arguments), KERNEL.experts(*arguments)
    assert actual.dtype == states.dtype
    grad = torch.randn(states.shape)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    got = torch.autograd.grad(actual, leaves, grad.to(actual.dtype))
    for name, a, b in zip(NAMES, (actual, *got), (expected, *wanted)):
        assert_close(a, b, tolerance, name)


# rows per expert: a quarter, a half and a full tile, a full tile with a tail, none at all
SLOW_COUNTS = [pytest.param(counts, marks=pytest.mark.slow) for counts in ((1, 0, 64, 65), (5, 20, 70, 0))]


@pytest.mark.parametrize("counts", [(0, 40, 4), (0, 0, 0, 63), (9,), *SLOW_COUNTS])
def test_tiles_of_every_height(counts):
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    check(inputs(index[torch.randperm(len(index))][:, None], len(counts), 20, 12))


@pytest.mark.slow
@pytest.mark.parametrize("hidden,width", [(32, 32), (33, 7), (8, 40)])
def test_sizes_that_do_and_do_not_fill_a_block(hidden, width):
    check(inputs(torch.randint(0, 3, (11, 2)), 3, hidden, width))


def test_skipped_slots_touch_nothing():
    index = torch.tensor([[3, 3, 3], [0, 3, 2], [3, 1, 3], [-1, 7, 2], [2, 2, 2]])
    arguments = inputs(index, 3, 16, 8)
    check(arguments)
    states, _, weight, *matrices = arguments
    output = KERNEL.experts(states, index, torch.where(index == 3, torch.nan, weight), *matrices)
    assert torch.equal(output[0], torch.zeros(16)) and not output.isnan().any()


@pytest.mark.slow
def test_nobody_is_routed():
    check(inputs(torch.full((4, 2), 3), 3, 16, 8))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order_of_the_rows():
    """Within one tile height; and two runs give the same bits."""
    arguments = inputs(torch.randint(0, 4, (12, 2)), 4, 16, 8)
    states, index, weight, *matrices = (tensor.detach() for tensor in arguments)
    once, again = (KERNEL.experts(states, index, weight, *matrices) for _ in range(2))
    assert torch.equal(once, again)
    order = torch.randperm(12)
    assert torch.equal(KERNEL.experts(states[order], index[order], weight[order], *matrices), once[order])


@pytest.mark.slow
def test_int32_index_fp32_weight_and_strided_states():
    _, index, weight, gate_up, down = inputs(torch.randint(0, 4, (6, 2)), 4, 16, 8, torch.bfloat16)
    wide = torch.randn(6, 2, 16).to(torch.bfloat16)
    expected = experts_oracle(wide[:, 1], index, weight.float(), gate_up, down)
    assert_close(KERNEL.experts(wide[:, 1], index.int(), weight.float(), gate_up, down), expected, 2e-2)
    expected = experts_oracle(wide[:, 0], index, weight.float(), gate_up, down)
    strided = torch.randn(16, 6).to(torch.bfloat16).t().copy_(wide[:, 0])
    assert_close(KERNEL.experts(strided, index, weight.float(), gate_up, down), expected, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(dtype):
    check(inputs(torch.randint(0, 5, (9, 2)), 4, 24, 16, dtype), 3e-2)


def test_frozen_experts_and_router():
    states, index, weight, gate_up, down = inputs(torch.randint(0, 3, (7, 2)), 3, 16, 8)
    frozen = (index, weight.detach(), gate_up.detach(), down.detach())
    KERNEL.experts(states, *frozen).square().sum().backward()
    copy = states.detach().double().requires_grad_()
    experts_oracle(copy, *frozen).square().sum().backward()
    assert_close(states.grad, copy.grad, 1e-5)


@pytest.mark.slow
def test_fixed_height_for_one_bit_pattern(monkeypatch):
    monkeypatch.setenv("MOEMB_EXPERTS_TILE", "16")
    check(inputs(torch.randint(0, 2, (21, 2)), 2, 16, 8))
    monkeypatch.setenv("MOEMB_EXPERTS_TILE", "20")
    with pytest.raises(ValueError, match="MOEMB_EXPERTS_TILE must be 16, 32, 64 or 128, got '20'"):
        check(inputs(torch.randint(0, 2, (21, 2)), 2, 16, 8))


@pytest.mark.parametrize("skewed", [False, True])
def test_schedule_covers_every_row_once(skewed):
    from moemb_experts.schedule import Schedule, tile_height

    experts, pairs = 6, 300
    index = torch.randint(0, 2 if skewed else experts + 1, (pairs // 3, 3))
    for height in (16, 32, tile_height(pairs, experts)):
        plan = Schedule(index, experts, height)
        seen = torch.zeros(pairs, dtype=torch.long)
        for expert, row in zip(plan.tile_expert.tolist(), plan.tile_row.tolist()):
            if expert < experts:
                end = min(row + height, int(plan.offsets[expert + 1]))
                assert row < end
                rows = plan.order[row:end].long()
                seen[rows] += 1
                assert (index.reshape(-1)[rows] == expert).all()
        assert torch.equal(seen, (index.reshape(-1) < experts).long())


def test_no_tokens():
    states, index, weight, gate_up, down = inputs(torch.zeros(0, 2, dtype=torch.long), 3, 16, 8)
    output = KERNEL.experts(states, index, weight, gate_up, down)
    output.sum().backward()
    assert output.shape == (0, 16) and states.grad.shape == (0, 16)
