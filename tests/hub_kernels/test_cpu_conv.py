"""The compiled causal convolution against fp64, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from modeling_moemb.mixers_moemb import causal_conv as torch_conv

from .row_cases import offsets


pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = [1, 0, 2, 63, 64, 65, 300, 0, 3]  # the long one crosses a block of tokens
TOLERANCES = {torch.float32: 5e-7, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def oracle(hidden_states, weight, lengths, activation):
    outputs = [hidden_states.new_zeros(0, hidden_states.shape[1], dtype=torch.float64)]
    for segment in hidden_states.double().split(lengths):
        rows = F.pad(segment, (0, 0, weight.shape[1] - 1, 0))
        total = sum(rows[tap : tap + len(segment)] * weight[:, tap].double() for tap in range(weight.shape[1]))
        outputs.append(F.silu(total) if activation else total)
    return torch.cat(outputs)


def inputs_of(lengths: list[int], channels: int, taps: int, dtype=torch.float32):
    """Rows that lie apart, weights, and a gradient."""
    hidden_states = torch.randn(sum(lengths), channels + 5).to(dtype)[:, :channels]
    return hidden_states, torch.randn(channels, taps), torch.randn(sum(lengths), channels).to(dtype)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def run(module, hidden_states, weight, lengths, activation="silu", grad=None):
    """The output, or the two gradients when `grad` is given."""
    if grad is None:
        return module.causal_conv(hidden_states, weight, offsets(lengths), activation)
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden_states, weight)]
    return torch.autograd.grad(module.causal_conv(*leaves, offsets(lengths), activation), leaves, grad)


def check(module, channels, taps, dtype, activation, lengths=LENGTHS):
    hidden_states, weight, grad = inputs_of(lengths, channels, taps, dtype)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden_states, weight)]
    expected = oracle(*leaves, lengths, activation)
    output = run(module, hidden_states, weight, lengths, activation)
    assert output.dtype == dtype and error(output, expected) < TOLERANCES[dtype]
    grad_hidden, grad_weight = run(module, hidden_states, weight, lengths, activation, grad)
    expected_hidden, expected_weight = torch.autograd.grad(expected, leaves, grad.double())
    assert grad_hidden.dtype == dtype and error(grad_hidden, expected_hidden) < TOLERANCES[dtype]
    assert error(grad_weight, expected_weight) < 1e-6


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", range(1, 9))
def test_taps(moemb_cpu, taps, activation):
    check(moemb_cpu, 40, taps, torch.float32, activation)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("channels", [5, 16, 64, 1100, 2100])
def test_channels_and_dtypes(moemb_cpu, channels, dtype):
    check(moemb_cpu, channels, 4, dtype, "silu", lengths=[3, 0, 300, 1] if channels > 1000 else LENGTHS)


def test_weight_in_bf16(moemb_cpu):
    hidden_states, weight, grad = inputs_of(LENGTHS, 40, 4, torch.bfloat16)
    weight = weight.bfloat16()
    assert error(run(moemb_cpu, hidden_states, weight, LENGTHS), oracle(hidden_states, weight, LENGTHS, True)) < 2.5e-3
    assert run(moemb_cpu, hidden_states, weight, LENGTHS, grad=grad)[1].dtype == torch.bfloat16


def test_equals_the_torch_path(moemb_cpu):
    lengths = [1, 2, 63, 65, 3]  # the torch path takes no empty items
    hidden_states, weight, grad = inputs_of(lengths, 40, 4)
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden_states, weight)]
    expected = torch_conv(*leaves, offsets(lengths))
    assert error(run(moemb_cpu, hidden_states, weight, lengths, None), expected.double()) < 1e-6
    grads = run(moemb_cpu, hidden_states, weight, lengths, None, grad)
    for actual, wanted in zip(grads, torch.autograd.grad(expected, leaves, grad)):
        assert error(actual, wanted.double()) < 1e-5


def test_a_poisoned_segment_stays_alone(moemb_cpu):
    lengths = [40, 200, 64, 1, 30]
    hidden_states, weight, grad = inputs_of(lengths, 40, 4)
    clean = (
        run(moemb_cpu, hidden_states, weight, lengths),
        run(moemb_cpu, hidden_states, weight, lengths, grad=grad)[0],
    )
    bad = slice(40, 240)
    hidden_states[bad], grad[bad] = float("nan"), float("nan")
    dirty = (
        run(moemb_cpu, hidden_states, weight, lengths),
        run(moemb_cpu, hidden_states, weight, lengths, grad=grad)[0],
    )
    for before, after in zip(clean, dirty):
        assert torch.isnan(after[bad]).all()
        assert torch.equal(before[:40], after[:40]) and torch.equal(before[240:], after[240:])


def test_a_late_token_does_not_reach_far_or_back(moemb_cpu):
    hidden_states, weight, _ = inputs_of([20], 40, 4)
    before = run(moemb_cpu, hidden_states, weight, [20])
    hidden_states[10] = float("nan")
    after = run(moemb_cpu, hidden_states, weight, [20])
    assert torch.isnan(after).any(-1).tolist() == [10 <= token < 14 for token in range(20)]
    assert torch.equal(before[:10], after[:10]) and torch.equal(before[14:], after[14:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_and_in_a_batch(moemb_cpu, dtype):
    hidden_states, weight, grad = inputs_of(LENGTHS, 40, 4, dtype)
    output = run(moemb_cpu, hidden_states, weight, LENGTHS)
    grad_hidden = run(moemb_cpu, hidden_states, weight, LENGTHS, grad=grad)[0]
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        assert torch.equal(output[rows], run(moemb_cpu, hidden_states[rows], weight, [length]))
        own = run(moemb_cpu, hidden_states[rows], weight, [length], grad=grad[rows])[0]
        assert torch.equal(grad_hidden[rows], own)
        start += length


def test_same_bits_for_any_threads(moemb_cpu):
    hidden_states, weight, grad = inputs_of([700, 3, 300], 256, 4)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            lengths = [700, 3, 300]
            grads = run(moemb_cpu, hidden_states, weight, lengths, grad=grad)
            results.append([run(moemb_cpu, hidden_states, weight, lengths), *grads])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(moemb_cpu, lengths):
    hidden_states, weight, grad = inputs_of(lengths, 40, 4)
    assert run(moemb_cpu, hidden_states, weight, lengths).shape == (0, 40)
    grad_hidden, grad_weight = run(moemb_cpu, hidden_states, weight, lengths, grad=grad)
    assert grad_hidden.shape == (0, 40) and torch.equal(grad_weight, torch.zeros(40, 4))


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda x: x.double(), "hidden_states is torch.float64"),
        (0, lambda x: x[0], "hidden_states has shape"),
        (0, lambda x: x.to("meta"), "hidden_states is on meta"),
        (1, lambda x: x[:3], r"weight has shape \(3, 4\), not \(40, taps\)"),
        (1, lambda x: x.repeat(1, 3), "1 to 8 taps"),
        (2, lambda x: x.long(), "cu_seqlens is torch.int64"),
        (3, lambda x: "gelu", "activation is 'gelu'"),
    ],
)
def test_wrong_arguments(moemb_cpu, index, change, message):
    arguments = [*inputs_of([9], 40, 4)[:2], offsets([9]), "silu"]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=message):
        moemb_cpu.causal_conv(*arguments)


@pytest.mark.parametrize("cu_seqlens", [[0, 8], [1, 9], [0, 9, 5, 9]])
def test_wrong_offsets(moemb_cpu, cu_seqlens):
    hidden_states, weight, _ = inputs_of([9], 40, 4)
    with pytest.raises(RuntimeError, match="contradict"):
        moemb_cpu.causal_conv(hidden_states, weight, torch.tensor(cu_seqlens, dtype=torch.int32))


def test_supports(moemb_cpu):
    hidden_states, weight, _ = inputs_of([9], 40, 4)
    assert moemb_cpu.supports("causal_conv", hidden_states, weight, offsets([9]))
    assert moemb_cpu.supports("causal_conv", hidden_states.half(), weight.bfloat16())
    refused = [
        (hidden_states.double(), weight),
        (hidden_states.to("meta"), weight),
        (hidden_states.t().contiguous().t(), weight),
        (hidden_states, weight[:3]),
        (hidden_states, weight.repeat(1, 3)),
        (hidden_states, weight, offsets([9]).long()),
    ]
    assert not any(moemb_cpu.supports("causal_conv", *tensors) for tensors in refused)
