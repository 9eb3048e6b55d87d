"""Experts of moemb-cpu against a naive fp64 loop, forward and backward, and the bits of a token alone."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm_cases import ROUTES, TOLERANCE, distance


# tokens, slots, experts, hidden, intermediate, share of skipped slots
SHAPES = [
    (1, 2, 4, 64, 32, 0.0),
    (5, 1, 1, 1, 1, 0.0),
    (63, 4, 8, 64, 32, 0.3),
    (64, 2, 3, 48, 16, 0.0),
    (65, 3, 5, 100, 37, 0.2),
    (300, 2, 5, 192, 96, 0.1),
    (300, 1, 1, 192, 112, 0.0),
    (40, 2, 64, 576, 48, 0.5),
    (40, 2, 2, 2050, 40, 0.0),
]


@pytest.fixture(autouse=True)
def restored(moemb_cpu):
    """Every test starts with all instructions and ends with the threads it met."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    moemb_cpu.limit_isa("amx")


def make(tokens, slots, experts, hidden, inner, skipped, dtype, seed=0):
    """States, index, weight, gate_up_proj, down_proj."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=random).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, hidden, generator=random) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, generator=random) * inner**-0.5).to(dtype)
    index = torch.rand(tokens, experts, generator=random).topk(slots, dim=-1).indices
    skip = torch.rand(tokens, slots, generator=random) < skipped
    weight = torch.rand(tokens, slots, generator=random).masked_fill(skip, 0)
    return states, index.masked_fill(skip, experts), weight, gate_up, down


def naive(states: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every pair of a token and a slot on its own, in fp64."""
    outputs, gate_ups, downs = [], gate_up.double().unbind(0), down.double().unbind(0)
    for token in range(states.shape[0]):
        total = states.new_zeros(states.shape[1], dtype=torch.float64)
        for slot, expert in enumerate(index[token].tolist()):
            if expert == down.shape[0]:
                continue
            gate, up = (gate_ups[expert] @ states[token].double()).chunk(2)
            total = total + weight[token, slot].double() * (downs[expert] @ (F.silu(gate) * up))
        outputs.append(total)
    return torch.stack(outputs)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def gradients(run, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Output and the gradients of all but the index."""
    inputs = leaves(*inputs)
    output = run(*inputs)
    output.backward(grad.to(output.dtype))
    return [output.detach()] + [tensor.grad for tensor in inputs if tensor.requires_grad]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, route", ROUTES)
def test_output_and_gradients_match_the_naive_loop(moemb_cpu, route, poisoned_memory, dtype, shape):
    moemb_cpu.limit_isa(route)
    inputs = make(*shape, dtype)
    grad = torch.randn(shape[0], shape[3], generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = gradients(moemb_cpu.experts, inputs, grad)
    expected = gradients(naive, [t.double() if t.is_floating_point() else t for t in inputs], grad)
    names = ["output", "hidden_states", "weight", "gate_up_proj", "down_proj"]
    for name, a, b in zip(names, actual, expected, strict=True):
        assert distance(a, b) < TOLERANCE[dtype], name
    with torch.no_grad():
        assert torch.equal(moemb_cpu.experts(*inputs), actual[0])


@pytest.mark.parametrize("dtype, route", ROUTES)
def test_frozen_experts_get_no_gradient_and_change_none(moemb_cpu, route, poisoned_memory, dtype):
    moemb_cpu.limit_isa(route)
    inputs = make(65, 3, 5, 100, 37, 0.2, dtype)
    grad = torch.randn(65, 100).to(dtype)
    _, grad_states, grad_weight, _, _ = gradients(moemb_cpu.experts, inputs, grad)
    states, index, weight, gate_up, down = inputs
    states, weight = states.clone().requires_grad_(), weight.clone().requires_grad_()
    moemb_cpu.experts(states, index, weight, gate_up, down).backward(grad)
    assert torch.equal(states.grad, grad_states)
    assert torch.equal(weight.grad, grad_weight)
    assert gate_up.grad is None


@pytest.mark.parametrize("dtype, route", ROUTES)
def test_a_token_has_the_same_bits_alone(moemb_cpu, route, dtype):
    """Also beside a token of NaN, and whatever an earlier call left in the workspaces."""
    moemb_cpu.limit_isa(route)
    states, index, weight, gate_up, down = make(200, 3, 6, 100, 50, 0.2, dtype)
    index[:, 0] = torch.where(index[:, 0] == 6, 6, 2)  # one expert with rows for several blocks
    grad = torch.randn(200, 100).to(dtype)
    moemb_cpu.experts(torch.full_like(states, float("nan")), index, weight, gate_up, down)
    together = gradients(moemb_cpu.experts, [states, index, weight, gate_up, down], grad)
    states[7] = float("nan")
    beside = gradients(moemb_cpu.experts, [states, index, weight, gate_up, down], grad)
    assert torch.isnan(beside[0][7]).all()
    for token in [0, 1, 6, 8, 63, 64, 150, 199]:
        one = slice(token, token + 1)
        alone = gradients(moemb_cpu.experts, [states[one], index[one], weight[one], gate_up, down], grad[one])
        for part in range(3):  # output, gradient of the states, of the weight
            assert torch.equal(alone[part][0], together[part][token])
            assert torch.equal(beside[part][token], together[part][token])


@pytest.mark.parametrize(
    "shape",
    [(1, 4, 8, 256, 96, 0.0), (3, 2, 4, 512, 272, 0.0), (200, 4, 8, 192, 96, 0.2)],
    ids=str,
)
@pytest.mark.parametrize("dtype, route", ROUTES)
def test_the_same_bits_for_any_number_of_threads(moemb_cpu, route, poisoned_memory, dtype, shape):
    moemb_cpu.limit_isa(route)
    inputs = make(*shape, dtype)
    grad = torch.randn(shape[0], shape[3]).to(dtype)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(gradients(moemb_cpu.experts, inputs, grad)[:3])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype, route", ROUTES)
def test_long_inputs_are_cut_without_a_trace(moemb_cpu, route, dtype):
    """More tokens than are worked on together."""
    moemb_cpu.limit_isa(route)
    inputs = make(5000, 1, 2, 32, 16, 0.1, dtype)
    output = moemb_cpu.experts(*inputs)
    states, index, weight, gate_up, down = inputs
    for part in (slice(0, 70), slice(2000, 2100), slice(4990, 5000)):
        assert torch.equal(output[part], moemb_cpu.experts(states[part], index[part], weight[part], gate_up, down))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_unused_experts_and_skipped_slots_are_not_read(moemb_cpu, dtype):
    states, index, weight, gate_up, down = make(70, 2, 6, 64, 32, 0.0, dtype)
    index = index % 3
    index[:10] = 6
    weight[:10] = float("nan")  # of skipped slots
    gate_up[3:], down[3:] = float("nan"), float("nan")
    inputs = [states, index, weight, gate_up, down]
    output, grad_states, grad_weight, grad_gate_up, _ = gradients(moemb_cpu.experts, inputs, torch.ones(70, 64))
    assert distance(output[10:], naive(states[10:], index[10:], weight[10:], gate_up, down)) < TOLERANCE[dtype]
    assert output[:10].eq(0).all() and grad_states[:10].eq(0).all() and grad_weight[:10].eq(0).all()
    assert grad_gate_up[3:].eq(0).all() and grad_gate_up[:3].isfinite().all()


def test_no_tokens_and_no_work(moemb_cpu):
    states, index, weight, gate_up, down = make(4, 2, 3, 32, 16, 0.0, torch.bfloat16)
    none = gradients(moemb_cpu.experts, [states[:0], index[:0], weight[:0], gate_up, down], torch.ones(0, 32))
    assert none[0].shape == (0, 32) and none[3].eq(0).all()
    assert moemb_cpu.experts(states, torch.full_like(index, 3), weight, gate_up, down).eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_strided_rows_and_weights_of_another_dtype(moemb_cpu, dtype):
    states, index, weight, gate_up, down = make(30, 2, 4, 40, 24, 0.1, dtype)
    wide = torch.randn(30, 61).to(dtype)
    wide[:, 5:45] = states
    expected = moemb_cpu.experts(states, index, weight.bfloat16().float(), gate_up, down)
    assert torch.equal(moemb_cpu.experts(wide[:, 5:45], index, weight.bfloat16(), gate_up, down), expected)
    columns = torch.empty(40, 30, dtype=dtype).t().copy_(states)
    assert torch.equal(moemb_cpu.experts(columns, index, weight.bfloat16(), gate_up, down), expected)


def test_torch_products_and_other_threads_are_left_alone(moemb_cpu):
    """torch keeps tiles of its own; two threads of Python have workspaces of their own."""
    inputs = [make(100, 2, 4, 128, 64, 0.1, torch.bfloat16, seed) for seed in range(2)]
    matrix = torch.randn(128, 128).bfloat16()
    expected = [moemb_cpu.experts(*i) for i in inputs]
    product = matrix @ matrix
    wrong = []

    def work(number):
        for _ in range(30):
            if not torch.equal(moemb_cpu.experts(*inputs[number]), expected[number]):
                wrong.append("experts")
            if not torch.equal(matrix @ matrix, product):
                wrong.append("torch")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_compiles_without_a_break(moemb_cpu):
    inputs = make(20, 2, 4, 32, 16, 0.1, torch.float32)
    grad = torch.randn(20, 32)
    compiled = torch.compile(lambda *i: moemb_cpu.experts(*i) * 2, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), moemb_cpu.experts(*inputs) * 2)
    states, index, weight, gate_up, down = inputs
    states = states.clone().requires_grad_()
    compiled(states, index, weight, gate_up, down).backward(grad)
    expected = gradients(moemb_cpu.experts, inputs, grad * 2)[1]
    assert torch.equal(states.grad, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_states": torch.zeros(4, 33)}, "`hidden_states` must have shape"),
        ({"hidden_states": torch.zeros(4, 32, dtype=torch.float64)}, "`hidden_states` must be fp32"),
        ({"hidden_states": torch.zeros(4, 32, dtype=torch.bfloat16)}, "`gate_up_proj` must have the dtype"),
        ({"expert_index": torch.zeros(4, 2, dtype=torch.int32)}, "`expert_index` must be int64"),
        ({"weight": torch.zeros(4, 3)}, "`weight` must have shape"),
        ({"weight": torch.zeros(4, 2, dtype=torch.int64)}, "`weight` must be a float"),
        ({"gate_up_proj": torch.zeros(3, 31, 32)}, "`gate_up_proj` must have shape"),
        ({"down_proj": torch.zeros(32, 16)}, "`down_proj` must be a CPU tensor of 3 axes"),
    ],
)
def test_wrong_arguments_are_named(moemb_cpu, change, message):
    names = ["hidden_states", "expert_index", "weight", "gate_up_proj", "down_proj"]
    arguments = dict(zip(names, make(4, 2, 3, 32, 16, 0.0, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        moemb_cpu.experts(**(arguments | change))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_outside_the_experts_is_refused(moemb_cpu, wrong):
    states, index, weight, gate_up, down = make(4, 2, 3, 32, 16, 0.0, torch.float32)
    index[2, 1] = wrong
    with pytest.raises(RuntimeError, match="outside 0 .. num_experts"):
        moemb_cpu.experts(states, index, weight, gate_up, down)


def test_supports(moemb_cpu):
    states, index, weight, gate_up, down = make(4, 2, 3, 32, 16, 0.0, torch.float32)
    assert moemb_cpu.supports("experts", states, index, weight, gate_up, down)
    assert not moemb_cpu.supports("experts", states.double(), index, weight, gate_up.double(), down.double())
    assert not moemb_cpu.supports("experts", states.bfloat16(), index, weight, gate_up, down)
    assert not moemb_cpu.supports("experts", states, index, weight, gate_up.mT, down)
    assert not moemb_cpu.supports("experts", states.to("meta"), index, weight, gate_up, down)
