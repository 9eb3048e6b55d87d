import pytest
import torch
import torch.nn.functional as F

from .row_cases import assert_close, assert_same_bits, in_fp64, poisoned, threads, with_gradients


EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
# with one feature the gradient of the states is almost 0: errors are compared with 1;
# odd widths end in a masked vector; 2,000 rows make more than one block of the weight's gradient
SHAPES = [(0, 64), (1, 1), (7, 15), (5, 3, 64), (33, 192), (2000, 33), (3, 1000)]


def naive_norm(states, weight):
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + EPS) * (1 + weight)


def naive_gated(states, gate, weight):
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + EPS) * weight * F.silu(gate)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype_in", DTYPES)
@pytest.mark.parametrize("dtype_out", DTYPES)
def test_rms_norm(moemb_cpu, shape, dtype_in, dtype_out):
    tensors = [torch.randn(shape).to(dtype_in), (torch.randn(shape[-1]) * 0.3).to(dtype_in)]
    with poisoned():
        results = with_gradients(lambda x, w: moemb_cpu.rms_norm(x, w, EPS, dtype_out), tensors)
    assert results[0].dtype == dtype_out and results[1].dtype == dtype_in and results[0].is_contiguous()
    assert_close(results, in_fp64(naive_norm, tensors, dtype_out), floor=1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_gated_rms_norm(moemb_cpu, shape, dtype, gate_dtype):
    tensors = [torch.randn(shape).to(dtype), (torch.randn(shape) * 4).to(gate_dtype), torch.randn(shape[-1])]
    with poisoned():
        results = with_gradients(lambda x, g, w: moemb_cpu.gated_rms_norm(x, g, w, EPS), tensors)
    assert results[0].dtype == gate_dtype
    assert_close(results, in_fp64(naive_gated, tensors, gate_dtype), floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_layer_of_the_model(moemb_cpu, dtype):
    from modeling_moemb.elementwise_moemb import MoEMBRMSNorm, MoEMBRMSNormGated

    norm, gated = MoEMBRMSNorm(48, EPS), MoEMBRMSNormGated(48, EPS)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(gated.weight)
    states, gate = torch.randn(9, 48).to(dtype), torch.randn(9, 48).to(dtype)
    with torch.no_grad():
        assert_close([moemb_cpu.rms_norm(states, norm.weight, EPS, dtype)], [norm(states).double()])
        assert_close([moemb_cpu.gated_rms_norm(states, gate, gated.weight, EPS)], [gated(states, gate).double()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_read_where_they_lie(moemb_cpu, dtype):
    joined = torch.randn(11, 4 * 2 * 24).to(dtype)
    halves = joined.unflatten(-1, (4, 48)).chunk(2, dim=-1)  # (11, 4, 24), gate beside query
    parts = joined.split([96, 96], dim=-1)[1].unflatten(-1, (4, 24))  # two strides that do not join
    weight = torch.randn(24)
    for states in (*halves, parts):
        assert moemb_cpu.supports("rms_norm", states, weight) and not states.is_contiguous()
        ours = with_gradients(lambda x, w: moemb_cpu.rms_norm(x, w, EPS, dtype), [states, weight])
        assert_same_bits(
            ours, with_gradients(lambda x, w: moemb_cpu.rms_norm(x.contiguous(), w, EPS, dtype), [states, weight])
        )
        gated = [
            with_gradients(lambda x, g, w: moemb_cpu.gated_rms_norm(x, g, w, EPS), [a, b, weight])
            for a, b in ((states, halves[0]), (states.contiguous(), halves[0].contiguous()))
        ]
        assert_same_bits(*gated)


def test_four_axes_are_copied(moemb_cpu):
    states, weight = torch.randn(3, 4, 5, 16).transpose(0, 2), torch.randn(16)
    assert not moemb_cpu.supports("rms_norm", states, weight)
    assert_close(
        [moemb_cpu.rms_norm(states, weight, EPS, torch.float32)], [naive_norm(states.double(), weight.double())]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_alone(moemb_cpu, dtype):
    states, gate, weight = torch.randn(3000, 72).to(dtype), torch.randn(3000, 72).to(dtype), torch.randn(72)
    whole = moemb_cpu.rms_norm(states, weight, EPS, dtype), moemb_cpu.gated_rms_norm(states, gate, weight, EPS)
    rows = [17, 2999]
    alone = (
        torch.cat([moemb_cpu.rms_norm(states[i : i + 1], weight, EPS, dtype) for i in rows]),
        torch.cat([moemb_cpu.gated_rms_norm(states[i : i + 1], gate[i : i + 1], weight, EPS) for i in rows]),
    )
    assert_same_bits(list(alone), [results[rows] for results in whole])
    poison = states.clone()
    poison[5] = float("nan")
    others = moemb_cpu.rms_norm(poison, weight, EPS, dtype)
    assert others[5].isnan().all()
    assert_same_bits([others[:5], others[6:]], [whole[0][:5], whole[0][6:]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_bits(moemb_cpu, dtype):
    tensors = [torch.randn(4001, 40).to(dtype), torch.randn(4001, 40).to(dtype), torch.randn(40)]
    runs = []
    for count in (1, 2):
        with threads(count):
            runs.append(with_gradients(lambda x, g, w: moemb_cpu.gated_rms_norm(x, g, w, EPS), tensors))
            runs[-1] += with_gradients(lambda x, w: moemb_cpu.rms_norm(x, w, EPS, dtype), tensors[::2])
    assert_same_bits(*runs)


def test_extreme_rows(moemb_cpu):
    states = torch.tensor([[0.0] * 20, [1e-25] * 20, [1e15] * 20])
    gate = torch.tensor([[-1e4] * 20, [-90.0] * 20, [1e4] * 20])
    weight = torch.ones(20)
    results = with_gradients(lambda x, g, w: moemb_cpu.gated_rms_norm(x, g, w, EPS), [states, gate, weight])
    assert all(result.isfinite().all() for result in results)
    assert (results[0][:2] == 0).all() or results[0][:2].abs().max() < 1e-30
    assert_close([results[0][2]], [naive_gated(states.double(), gate.double(), weight.double())[2]])


def test_frozen_weight(moemb_cpu):
    states, weight = torch.randn(6, 32, requires_grad=True), torch.randn(32)
    moemb_cpu.rms_norm(states, weight, EPS, torch.float32).sum().backward()
    moemb_cpu.gated_rms_norm(states, states.detach(), weight, EPS).sum().backward()
    assert weight.grad is None and states.grad.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.double(), w, torch.float32), "`states` must be float32 or bfloat16, got torch.float64"),
        (lambda x, w: (x, w[:-1], torch.float32), r"`weight` must have shape \(32,\), got \(31,\)"),
        (lambda x, w: (x, w, torch.float16), "`dtype` must be torch.float32 or torch.bfloat16, got torch.float16"),
    ],
)
def test_wrong_arguments(moemb_cpu, change, message):
    states, weight, dtype = change(torch.randn(4, 32), torch.randn(32))
    with pytest.raises(ValueError, match=message):
        moemb_cpu.rms_norm(states, weight, EPS, dtype)


def test_compiles(moemb_cpu):
    states, weight = torch.randn(6, 32), torch.randn(32)
    compiled = torch.compile(
        lambda x: moemb_cpu.rms_norm(x, weight, EPS, x.dtype) * 2, backend="eager", fullgraph=True
    )
    assert_same_bits([compiled(states)], [moemb_cpu.rms_norm(states, weight, EPS, states.dtype) * 2])
