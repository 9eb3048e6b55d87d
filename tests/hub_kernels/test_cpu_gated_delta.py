"""The compiled gated delta rule against a token-by-token fp64 recurrence, forward and backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from modeling_moemb.delta_rule_moemb import gated_delta_rule as torch_rule
from modeling_moemb.layout_moemb import PackedLayout

from .row_cases import offsets


pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = [1, 0, 63, 64, 65, 7, 0, 130]
SHAPES = [(2, 4, 32, 32), (1, 3, 24, 40), (2, 2, 128, 128), (1, 1, 8, 16), (1, 2, 64, 96)]
# relative error of a whole tensor: fp32 arithmetic, then one rounding to the dtype
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def inputs_of(lengths: list[int], shape: tuple, dtype=torch.float32, decay_scale: float = 1.0) -> list[torch.Tensor]:
    """Query, key and value as splits of one tensor, then decay and beta."""
    key_heads, value_heads, key_dim, value_dim = shape
    tokens, key_width = sum(lengths), key_heads * key_dim
    mixed = torch.randn(tokens, 2 * key_width + value_heads * value_dim).to(dtype)
    query, key, value = mixed.split([key_width, key_width, value_heads * value_dim], dim=-1)
    decay = -torch.rand(tokens, value_heads) * torch.rand(value_heads) * 2 * decay_scale
    return [
        query.unflatten(-1, (key_heads, key_dim)),
        key.unflatten(-1, (key_heads, key_dim)),
        value.unflatten(-1, (value_heads, value_dim)),
        decay,
        torch.rand(tokens, value_heads),
    ]


def recurrence(query, key, value, decay, beta, lengths, states):
    """One token after the other in fp64, from `states`; the outputs and the states behind the segments."""
    query, key, value, decay, beta = (tensor.double() for tensor in (query, key, value, decay, beta))
    repeat = value.shape[1] // key.shape[1]
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(repeat, 1) for x in (query * query.shape[-1] ** -0.5, key))
    outputs, token, final = [value[:0]], 0, []
    for length, state in zip(lengths, states.double()):
        for t in range(token, token + length):
            state = state * decay[t].exp()[:, None, None]
            delta = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * beta[t][:, None]
            state = state + key[t][:, :, None] * delta[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t])[None])
        token += length
        final.append(state)
    return torch.cat(outputs), torch.stack(final) if final else states.double()


def oracle(query, key, value, decay, beta, lengths):
    """The recurrence from states of zero."""
    states = value.new_zeros(len(lengths), value.shape[1], key.shape[2], value.shape[2])
    return recurrence(query, key, value, decay, beta, lengths, states)[0]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def run(module, inputs, lengths, grad=None):
    """The output, or the five gradients when `grad` is given."""
    if grad is None:
        return module.gated_delta_rule(*inputs, offsets(lengths))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(module.gated_delta_rule(*leaves, offsets(lengths)), leaves, grad)


def oracle_gradients(inputs, lengths, grad):
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(oracle(*leaves, lengths), leaves, grad.double())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence(moemb_cpu, shape, dtype):
    inputs = inputs_of(LENGTHS, shape, dtype)
    output = run(moemb_cpu, inputs, LENGTHS)
    assert output.dtype == dtype and output.shape == inputs[2].shape
    assert error(output, oracle(*inputs, LENGTHS)) < TOLERANCES[dtype]


@pytest.mark.parametrize("shape, dtype", [(s, torch.float32) for s in SHAPES] + [(SHAPES[0], torch.bfloat16)])
def test_gradients(moemb_cpu, shape, dtype):
    inputs = inputs_of(LENGTHS, shape, dtype)
    grad = torch.randn(inputs[2].shape).to(dtype)
    expected = oracle_gradients(inputs, LENGTHS, grad)
    for actual, wanted, tensor in zip(run(moemb_cpu, inputs, LENGTHS, grad), expected, inputs):
        assert actual.dtype == tensor.dtype
        assert error(actual, wanted) < TOLERANCES[tensor.dtype] * 2


def test_equals_the_torch_path(moemb_cpu):
    inputs, layout = inputs_of(LENGTHS[2:6], SHAPES[0]), PackedLayout(LENGTHS[2:6], torch.device("cpu"))
    grad = torch.randn(inputs[2].shape)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = torch_rule(*leaves, layout)
    assert error(run(moemb_cpu, inputs, LENGTHS[2:6]), output.double()) < 5e-6
    for actual, expected in zip(run(moemb_cpu, inputs, LENGTHS[2:6], grad), torch.autograd.grad(output, leaves, grad)):
        assert error(actual, expected.double()) < 1e-5


@pytest.mark.parametrize("value", [0.0, -50.0, -1e4, -3e38])
def test_extreme_decays(moemb_cpu, value):
    lengths = [70, 20]
    inputs = inputs_of(lengths, SHAPES[0], decay_scale=0.05)
    inputs[3][::3] = value  # weak decays behind a strong one must keep their digits
    grad = torch.randn(inputs[2].shape)
    assert error(run(moemb_cpu, inputs, lengths), oracle(*inputs, lengths)) < 1e-6
    actual, expected = run(moemb_cpu, inputs, lengths, grad), oracle_gradients(inputs, lengths, grad)
    for tensor, wanted in zip(actual, expected):
        assert torch.isfinite(tensor).all()
        assert error(tensor, wanted) < 2e-6


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_extreme_betas(moemb_cpu, value):
    lengths = [70, 20]
    inputs = inputs_of(lengths, SHAPES[0])
    inputs[4].fill_(value)
    inputs[4][40] = 0.5
    grad = torch.randn(inputs[2].shape)
    for actual, expected in zip(run(moemb_cpu, inputs, lengths, grad), oracle_gradients(inputs, lengths, grad)):
        assert error(actual, expected) < 5e-6


def test_a_poisoned_segment_stays_alone(moemb_cpu):
    """NaN in one segment reaches no other, neither through a state nor through the workspace of the thread."""
    lengths = [40, 200, 64, 1, 30, 100]
    inputs = inputs_of(lengths, SHAPES[4])
    grad = torch.randn(inputs[2].shape)
    clean = [run(moemb_cpu, inputs, lengths), *run(moemb_cpu, inputs, lengths, grad)]
    bad = slice(40, 240)  # the longest segment runs first and fills the whole workspace
    for tensor in (*inputs, grad):
        tensor[bad] = float("nan")
    dirty = [run(moemb_cpu, inputs, lengths), *run(moemb_cpu, inputs, lengths, grad)]
    for before, after in zip(clean, dirty):
        assert torch.isnan(after[bad]).all()
        assert torch.equal(before[:40], after[:40]) and torch.equal(before[240:], after[240:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_and_in_a_batch(moemb_cpu, dtype):
    inputs = inputs_of(LENGTHS, SHAPES[0], dtype)
    grad = torch.randn(inputs[2].shape).to(dtype)
    packed = [run(moemb_cpu, inputs, LENGTHS), *run(moemb_cpu, inputs, LENGTHS, grad)]
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        own = [tensor[rows] for tensor in inputs]
        alone = [run(moemb_cpu, own, [length]), *run(moemb_cpu, own, [length], grad[rows])]
        assert all(torch.equal(whole[rows], single) for whole, single in zip(packed, alone))
        start += length


def test_same_bits_for_any_threads(moemb_cpu):
    lengths = [300, 65, 3, 64]
    inputs = inputs_of(lengths, SHAPES[0])
    grad = torch.randn(inputs[2].shape)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append([run(moemb_cpu, inputs, lengths), *run(moemb_cpu, inputs, lengths, grad)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_reentrant(moemb_cpu):
    cases = [(inputs_of([length, 5], SHAPES[0]), [length, 5]) for length in (10, 64, 90, 130)]
    expected = [run(moemb_cpu, *case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: run(moemb_cpu, *case), cases * 5))
    assert all(torch.equal(result, expected[i % 4]) for i, result in enumerate(results))


def test_strides_do_not_matter(moemb_cpu):
    inputs = inputs_of(LENGTHS, SHAPES[0])
    grad = torch.randn(inputs[2].shape)
    views = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs[:3]]  # heads outermost
    dense = [tensor.contiguous() for tensor in inputs[:3]]
    for other in (views, dense):
        assert torch.equal(run(moemb_cpu, inputs, LENGTHS), run(moemb_cpu, [*other, *inputs[3:]], LENGTHS))
    expanded = torch.randn(1, 1, 1).expand(grad.shape)
    first, second = (run(moemb_cpu, inputs, LENGTHS, g) for g in (expanded, expanded.contiguous()))
    assert all(torch.equal(*pair) for pair in zip(first, second))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(moemb_cpu, lengths):
    inputs = inputs_of(lengths, SHAPES[0])
    assert run(moemb_cpu, inputs, lengths).shape == inputs[2].shape
    grads = run(moemb_cpu, inputs, lengths, torch.zeros(inputs[2].shape))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]


def test_later_tokens_do_not_reach_earlier_ones(moemb_cpu):
    inputs = inputs_of([150], SHAPES[0])
    before = run(moemb_cpu, inputs, [150])
    for tensor in inputs:
        tensor[100:] = torch.rand_like(tensor[100:]) * -1
    after = run(moemb_cpu, inputs, [150])
    assert torch.equal(before[:100], after[:100]) and not torch.equal(before[100:], after[100:])


def test_fake_tensors(moemb_cpu):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(tensor) for tensor in inputs_of([9], SHAPES[0])]
        output = moemb_cpu.gated_delta_rule(*inputs, mode.from_tensor(offsets([9])))
    assert output.shape == inputs[2].shape and output.dtype == torch.float32


@pytest.mark.parametrize(
    "index, change, message",
    [
        (0, lambda x: x.double(), "query is torch.float64"),
        (1, lambda x: x.bfloat16(), "key is torch.bfloat16"),
        (2, lambda x: x[:, :1], "1 value heads are no multiple of 2"),
        (2, lambda x: x[1:], "value has 8 tokens, key has 9"),
        (2, lambda x: x[..., :20], "value has 20 features"),
        (0, lambda x: x[:, :1], "query has shape"),
        (1, lambda x: x[0], "key has shape"),
        (3, lambda x: x.double(), "decay is torch.float64"),
        (4, lambda x: x[:, :1], "beta is torch.float32 of shape"),
        (5, lambda x: x.long(), "cu_seqlens is torch.int64"),
        (5, lambda x: x[:0], "cu_seqlens is torch.int32 of shape"),
        (0, lambda x: x.to("meta"), "query is on meta"),
    ],
)
def test_wrong_arguments(moemb_cpu, index, change, message):
    arguments = [*inputs_of([9], SHAPES[0]), offsets([9])]
    arguments[index] = change(arguments[index])
    with pytest.raises(ValueError, match=message):
        moemb_cpu.gated_delta_rule(*arguments)


@pytest.mark.parametrize("cu_seqlens", [[0, 8], [1, 9], [0, 10], [0, 9, 5, 9], [0, -1, 9]])
def test_wrong_offsets(moemb_cpu, cu_seqlens):
    with pytest.raises(RuntimeError, match="contradict"):
        moemb_cpu.gated_delta_rule(*inputs_of([9], SHAPES[0]), torch.tensor(cu_seqlens, dtype=torch.int32))


def test_supports(moemb_cpu):
    inputs = [*inputs_of([9], SHAPES[0]), offsets([9])]

    def supports(**changes):
        names = ("query", "key", "value", "decay", "beta", "cu_seqlens")
        return moemb_cpu.supports("gated_delta_rule", *(changes.get(n, t) for n, t in zip(names, inputs)))

    query, key, value, decay, _, cu_seqlens = inputs
    assert supports()
    assert not supports(query=query.double()) and not supports(key=key.half()) and not supports(value=value[..., :20])
    assert not supports(query=query.to("meta")) and not supports(value=value[:, :1])
    assert not supports(decay=decay.double()) and not supports(cu_seqlens=cu_seqlens.long())
    assert not supports(value=value.transpose(1, 2).contiguous().transpose(1, 2))
    moemb_cpu.limit_isa("none")
    try:
        assert not supports()
    finally:
        moemb_cpu.limit_isa("amx")
