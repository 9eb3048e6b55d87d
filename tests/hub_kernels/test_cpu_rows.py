import pytest
import torch
import torch.nn.functional as F

from .row_cases import assert_close, assert_same_bits, in_fp64, poisoned, threads, with_gradients


DTYPES = [torch.float32, torch.bfloat16]


def naive_swiglu(gate, up):
    return F.silu(gate) * up


def naive_rotary(states, cos, sin):
    rotary = cos.shape[-1]
    cos, sin = cos[:, None].to(states.dtype), sin[:, None].to(states.dtype)
    first, second = states[..., :rotary].chunk(2, dim=-1)
    turned = states[..., :rotary] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, states[..., rotary:]], dim=-1)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5, 17), (70, 96), (900, 130)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(moemb_cpu, shape, dtype):
    tensors = [(torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)]
    with poisoned():
        results = with_gradients(moemb_cpu.swiglu, tensors)
    assert results[0].dtype == dtype
    assert_close(results, in_fp64(naive_swiglu, tensors, dtype))


def test_swiglu_extremes(moemb_cpu):
    gate = torch.tensor([-1e30, -104.0, -88.5, -20.0, 0.0, 20.0, 89.0, 1e30])
    results = with_gradients(moemb_cpu.swiglu, [gate, torch.full((8,), 1.5)])
    assert all(result.isfinite().all() for result in results)
    assert (results[0][:3].abs() < 1e-30).all()
    assert_close([results[0][3:7]], [naive_swiglu(gate.double(), torch.full((8,), 1.5).double())[3:7]])
    assert moemb_cpu.swiglu(torch.tensor([float("nan")]), torch.ones(1)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_the_halves_of_one_projection(moemb_cpu, dtype):
    halves = list(torch.randn(50, 2 * 40).to(dtype).chunk(2, dim=-1))
    assert moemb_cpu.supports("swiglu", *halves)
    expected = with_gradients(moemb_cpu.swiglu, [half.contiguous() for half in halves])
    assert_same_bits(with_gradients(moemb_cpu.swiglu, halves), expected)


# (tokens, heads, dim, rotary): nothing, all and a part turned; halves that end in a masked vector
@pytest.mark.parametrize(
    "sizes", [(0, 2, 8, 4), (1, 1, 2, 2), (9, 3, 64, 16), (9, 2, 32, 32), (5, 2, 72, 72), (4, 2, 50, 36), (3, 2, 7, 0)]
)
@pytest.mark.parametrize("dtype_in", DTYPES)
@pytest.mark.parametrize("dtype_out", DTYPES)
def test_rotary(moemb_cpu, sizes, dtype_in, dtype_out):
    tokens, heads, dim, rotary = sizes
    states = torch.randn(tokens, heads, dim).to(dtype_in)
    cos, sin = torch.randn(tokens, rotary), torch.randn(tokens, rotary)  # halves that differ
    with poisoned():
        results = with_gradients(lambda x: moemb_cpu.rotary(x, cos, sin, dtype_out), [states])
    assert results[0].dtype == dtype_out and results[1].dtype == dtype_in
    assert_close(results, in_fp64(lambda x: naive_rotary(x, cos, sin), [states], dtype_out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_matches_the_model(moemb_cpu, dtype):
    from modeling_moemb.elementwise_moemb import rotate

    angles = torch.randn(12, 8).repeat(1, 2)
    states = torch.randn(12, 3 * 2 * 32).to(dtype).unflatten(-1, (3, 64)).chunk(2, dim=-1)[0]
    assert moemb_cpu.supports("rotary", states, angles.cos(), angles.sin())
    ours = with_gradients(lambda x: moemb_cpu.rotary(x, angles.cos(), angles.sin(), dtype), [states])
    theirs = with_gradients(lambda x: rotate(x, angles.cos(), angles.sin(), dtype), [states])
    assert_close(ours, [result.double() for result in theirs])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_bits(moemb_cpu, dtype):
    gate, up = torch.randn(2, 2000, 70).to(dtype)
    states, cos, sin = torch.randn(2000, 3, 24).to(dtype), torch.randn(2000, 24), torch.randn(2000, 24)
    runs = []
    for count in (1, 2):
        with threads(count):
            runs.append(with_gradients(moemb_cpu.swiglu, [gate, up]))
            runs[-1] += with_gradients(lambda x: moemb_cpu.rotary(x, cos, sin, dtype), [states])
    assert_same_bits(*runs)


def test_wrong_arguments(moemb_cpu):
    states, table = torch.randn(4, 2, 16), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"`up` must have shape \(4, 8\), got \(4, 7\)"):
        moemb_cpu.swiglu(table, table[:, :7])
    with pytest.raises(ValueError, match="`up` must have the dtype of `gate`"):
        moemb_cpu.swiglu(table, table.bfloat16())
    with pytest.raises(ValueError, match="`states` must be float32 or bfloat16, got torch.float16"):
        moemb_cpu.rotary(states.half(), table, table, torch.float32)
    for wrong in (table[:3], table[:, :7], torch.randn(4, 18)):
        assert not moemb_cpu.supports("rotary", states, wrong, wrong)
        with pytest.raises(ValueError, match="`cos` must be"):
            moemb_cpu.rotary(states, wrong, wrong, torch.float32)


def test_compiles(moemb_cpu):
    gate, up = torch.randn(2, 6, 32)
    compiled = torch.compile(lambda a, b: moemb_cpu.swiglu(a, b) * 2, backend="eager", fullgraph=True)
    assert_same_bits([compiled(gate, up)], [moemb_cpu.swiglu(gate, up) * 2])
