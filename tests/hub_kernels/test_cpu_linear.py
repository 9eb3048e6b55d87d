"""The linear layer of moemb-cpu against fp64, forward and backward, and the bits of a row alone."""

import pytest
import torch
import torch.nn.functional as F

from .gemm_cases import ROUTES, TOLERANCE, distance


# rows, out_features, in_features
SHAPES = [
    (1, 1, 1),
    (1, 1, 192),
    (3, 16, 200),
    (5, 33, 8),
    (63, 50, 77),
    (64, 64, 64),
    (65, 96, 2056),
    (257, 300, 520),
    (300, 192, 576),
    (1000, 40, 64),
]


@pytest.fixture(autouse=True)
def restored(moemb_cpu):
    """Every test starts with all instructions and ends with the threads it met."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    moemb_cpu.limit_isa("amx")


def make(rows, outputs, inputs, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, inputs, generator=random).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=random) * inputs**-0.5).to(dtype)
    return states, weight, torch.randn(outputs, generator=random).to(dtype)


def gradients(run, arguments, grad):
    arguments = [argument.clone().requires_grad_() for argument in arguments]
    output = run(*arguments)
    output.backward(grad.to(output.dtype))
    return [output.detach()] + [argument.grad for argument in arguments]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, route", ROUTES)
def test_output_and_gradients_match_fp64(moemb_cpu, route, poisoned_memory, dtype, shape, with_bias):
    moemb_cpu.limit_isa(route)
    arguments = make(*shape, dtype)[: 3 if with_bias else 2]
    grad = torch.randn(shape[0], shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = gradients(moemb_cpu.linear, arguments, grad)
    expected = gradients(F.linear, [argument.double() for argument in arguments], grad)
    for name, a, b in zip(["output", "input", "weight", "bias"], actual, expected):
        assert distance(a, b) < TOLERANCE[dtype], name
    with torch.no_grad():
        assert torch.equal(moemb_cpu.linear(*arguments), actual[0])


@pytest.mark.parametrize("shape", [(130, 40, 72), (300, 100, 600)], ids=str)
@pytest.mark.parametrize("dtype, route", ROUTES)
def test_a_row_has_the_same_bits_alone(moemb_cpu, route, dtype, shape):
    moemb_cpu.limit_isa(route)
    states, weight, bias = make(*shape, dtype)
    grad = torch.randn(shape[0], shape[1]).to(dtype)
    moemb_cpu.linear(torch.full_like(states, float("nan")), weight, bias)  # leaves NaN in the workspaces
    together = gradients(moemb_cpu.linear, [states, weight, bias], grad)
    for size in (1, 2, 4, 5, 16, 17, 33, 64):
        part = slice(20, 20 + size)
        alone = gradients(moemb_cpu.linear, [states[part], weight, bias], grad[part])
        assert torch.equal(alone[0], together[0][part])
        assert torch.equal(alone[1], together[1][part])


@pytest.mark.parametrize("shape", [(1, 600, 520), (40, 100, 800), (700, 96, 192)], ids=str)
@pytest.mark.parametrize("dtype, route", ROUTES)
def test_the_same_bits_for_any_number_of_threads(moemb_cpu, route, poisoned_memory, dtype, shape):
    moemb_cpu.limit_isa(route)
    arguments = make(*shape, dtype)
    grad = torch.randn(shape[0], shape[1]).to(dtype)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(gradients(moemb_cpu.linear, arguments, grad)[:2])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_strides_leading_axes_and_no_rows(moemb_cpu, dtype):
    states, weight, bias = make(60, 48, 40, dtype)
    expected = moemb_cpu.linear(states, weight, bias)
    wide = torch.randn(60, 77).to(dtype)
    wide[:, 3:43] = states
    assert torch.equal(moemb_cpu.linear(wide[:, 3:43], weight, bias), expected)
    assert torch.equal(moemb_cpu.linear(states.view(3, 4, 5, 40), weight, bias), expected.view(3, 4, 5, 48))
    assert torch.equal(moemb_cpu.linear(states.t().contiguous().t(), weight, bias), expected)
    assert torch.equal(moemb_cpu.linear(states[3], weight, bias), expected[3])
    assert moemb_cpu.linear(states[:0], weight, bias).shape == (0, 48)
    grads = gradients(moemb_cpu.linear, [states[:0], weight, bias], torch.ones(0, 48))
    assert grads[1].shape == (0, 40) and grads[2].eq(0).all() and grads[3].eq(0).all()
    summed = gradients(lambda *a: moemb_cpu.linear(*a).sum()[None], [states, weight, bias], torch.ones(1))
    assert distance(summed[1], weight.double().sum(0).expand(60, 40)) < TOLERANCE[dtype]


def test_what_lies_beyond_the_weight_takes_no_part(moemb_cpu):
    """Odd sizes, in a memory of NaN."""
    for dtype in TOLERANCE:
        memory = torch.full((40 * 50,), float("nan"), dtype=dtype)
        states, weight, bias = make(20, 33, 41, dtype)
        inside = memory[: 33 * 41].view(33, 41).copy_(weight)
        assert torch.equal(moemb_cpu.linear(states, inside, bias), moemb_cpu.linear(states, weight, bias))
        grads = []
        for matrix in (inside, weight):
            rows = states.clone().requires_grad_()
            moemb_cpu.linear(rows, matrix, bias).sum().backward()
            grads.append(rows.grad)
        assert torch.equal(*grads)


def test_compiles_without_a_break(moemb_cpu):
    states, weight, bias = make(20, 24, 32, torch.float32)
    compiled = torch.compile(lambda *a: moemb_cpu.linear(*a) * 2, fullgraph=True, backend="aot_eager")
    grad = torch.randn(20, 24)
    actual = gradients(compiled, [states, weight, bias], grad)
    expected = gradients(lambda *a: moemb_cpu.linear(*a) * 2, [states, weight, bias], grad)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input": torch.zeros(4, 31)}, "`weight` must have shape"),
        ({"input": torch.zeros(4, 32, dtype=torch.float64)}, "`input` must be a CPU tensor of fp32"),
        ({"weight": torch.zeros(24, 32, dtype=torch.bfloat16)}, "`weight` must be a CPU tensor"),
        ({"bias": torch.zeros(23)}, "`bias` must have shape"),
        ({"bias": torch.zeros(24, dtype=torch.bfloat16)}, "`bias` must be a CPU tensor"),
    ],
)
def test_wrong_arguments_are_named(moemb_cpu, change, message):
    arguments = dict(zip(["input", "weight", "bias"], make(4, 24, 32, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        moemb_cpu.linear(**(arguments | change))


def test_supports(moemb_cpu):
    states, weight, bias = make(4, 24, 32, torch.float32)
    assert moemb_cpu.supports("linear", states, weight, bias)
    assert moemb_cpu.supports("linear", states, weight, None)
    assert not moemb_cpu.supports("linear", states.double(), weight.double(), None)
    assert not moemb_cpu.supports("linear", states, weight.bfloat16(), None)
    assert not moemb_cpu.supports("linear", states, weight.t().contiguous().t(), None)
