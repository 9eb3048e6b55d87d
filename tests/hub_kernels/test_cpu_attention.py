import pytest
import torch

from .row_cases import assert_close, assert_same_bits, in_fp64, offsets, poisoned, threads, with_gradients


DTYPES = [torch.float32, torch.bfloat16]
ODD = [5, 0, 1, 63, 64, 65, 0, 17, 130]
# probabilities and, on AMX, gradients of scores are rounded to bf16 before products: a few roundings instead of one
BF16_FACTOR = 4


def naive(query, key, value, lengths, scaling, causal):
    outputs, start = [query[:0]], 0
    repeat = query.shape[1] // key.shape[1]
    for length in lengths:
        q, k, v = (states[start : start + length].transpose(0, 1) for states in (query, key, value))
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = q @ k.transpose(1, 2) * scaling
        if causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def packed(lengths, heads, key_heads, dim, dtype):
    """Query, key and value as views of one projection, and the cumulative lengths."""
    rows = torch.randn(sum(lengths), heads + 2 * key_heads, dim).to(dtype)
    return list(rows.split([heads, key_heads, key_heads], dim=1)), offsets(lengths)


def dirty_workspaces(moemb_cpu, dtype, causal):
    """Leave NaN in the buffers that the next call of this thread reuses."""
    (query, key, value), cu_seqlens = packed([200], 4, 2, 256, dtype)
    query = torch.full_like(query, float("nan")).requires_grad_()
    moemb_cpu.varlen_attention(query, key, value * float("nan"), cu_seqlens, 1.0, causal).sum().backward()
    assert query.grad.isnan().any()


def check(moemb_cpu, lengths, heads, key_heads, dim, dtype, causal):
    tensors, cu_seqlens = packed(lengths, heads, key_heads, dim, dtype)
    dirty_workspaces(moemb_cpu, dtype, causal)
    with poisoned():
        results = with_gradients(
            lambda q, k, v: moemb_cpu.varlen_attention(q, k, v, cu_seqlens, dim**-0.5, causal), tensors
        )
    assert results[0].dtype == dtype and results[0].is_contiguous()
    expected = in_fp64(lambda q, k, v: naive(q, k, v, lengths, dim**-0.5, causal), tensors, dtype)
    # the gradients of a lone token's query and key are 0: what rounding leaves is compared with the inputs
    assert_close(results, expected, BF16_FACTOR if dtype == torch.bfloat16 else 1.0, floor=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(4, 2, 64), (4, 4, 32), (16, 2, 48), (3, 1, 72), (2, 1, 256), (6, 2, 7)]
)
def test_odd_lengths(moemb_cpu, heads, key_heads, dim, dtype, causal):
    check(moemb_cpu, ODD, heads, key_heads, dim, dtype, causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 1], [300], [129, 128]], ids=str)
def test_lengths(moemb_cpu, lengths, dtype, causal):
    check(moemb_cpu, lengths, 4, 2, 64, dtype, causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_without_amx(moemb_cpu, dtype, causal):
    moemb_cpu.limit_isa("avx512")
    try:
        check(moemb_cpu, ODD, 4, 2, 64, dtype, causal)
    finally:
        moemb_cpu.limit_isa("amx")


@pytest.mark.parametrize("causal", [True, False])
def test_matches_the_model(moemb_cpu, causal):
    from modeling_moemb.layout_moemb import PackedLayout
    from modeling_moemb.mixers_moemb import varlen_attention

    lengths = [9, 1, 40]
    tensors, cu_seqlens = packed(lengths, 4, 2, 32, torch.float32)
    layout = PackedLayout(lengths, torch.device("cpu"))
    theirs = with_gradients(lambda q, k, v: varlen_attention(q, k, v, layout, 0.2, causal), tensors)
    ours = with_gradients(lambda q, k, v: moemb_cpu.varlen_attention(q, k, v, cu_seqlens, 0.2, causal), tensors)
    assert_close(ours, [result.double() for result in theirs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_a_segment_depends_on_itself_alone(moemb_cpu, dtype, causal):
    lengths = [30, 130, 3, 64]
    tensors, cu_seqlens = packed(lengths, 4, 2, 48, dtype)

    def run_with(tensors, cu_seqlens, grad):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        output = moemb_cpu.varlen_attention(*tensors, cu_seqlens, 0.3, causal)
        return [output.detach(), *torch.autograd.grad(output, tensors, grad)]

    grad = torch.randn(sum(lengths), 4, 48).to(dtype)
    runs = []
    for count in (1, 2):
        with threads(count):
            runs.append(run_with(tensors, cu_seqlens, grad))
    assert_same_bits(*runs)
    for first, last in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        alone = run_with([states[first:last] for states in tensors], offsets([last - first]), grad[first:last])
        assert_same_bits(alone, [result[first:last] for result in runs[0]])

    broken = [states.clone() for states in tensors]
    for states in broken:
        states[30:160] = float("nan")
    broken = run_with(broken, cu_seqlens, grad)
    assert broken[0][30:160].isnan().all()
    for result, wanted in zip(broken, runs[0], strict=True):
        assert_same_bits([result[:30], result[160:]], [wanted[:30], wanted[160:]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(moemb_cpu, dtype):
    lengths = [100]
    tensors, cu_seqlens = packed(lengths, 2, 1, 32, dtype)
    tensors[0] = tensors[0] * 64  # the softmax picks single keys, far below and above the range of exp
    results = with_gradients(lambda q, k, v: moemb_cpu.varlen_attention(q, k, v, cu_seqlens, 8.0, True), tensors)
    expected = naive(*(states.double() for states in tensors), lengths, 8.0, True)
    assert_close(results[:1], [expected], 400 if dtype == torch.float32 else 1)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [15, 50])
def test_scores_beyond_the_digits_of_exp(moemb_cpu, dtype, power):
    """A last place of the largest score is more than the whole range of exp; the largest key takes all."""
    (query, key, value), cu_seqlens = packed([100], 2, 1, 32, dtype)
    query, key = query * 2.0**power, key * 2.0**power
    output = moemb_cpu.varlen_attention(query, key, value, cu_seqlens, 0.25, False)
    scores = torch.einsum("qhd,kd->hqk", query.double(), key[:, 0].double())
    expected = value[:, 0][scores.argmax(-1)].transpose(0, 1)
    torch.testing.assert_close(output, expected.to(dtype), atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", [-0.3, 0.0])
def test_scaling_that_is_not_positive(moemb_cpu, dtype, scaling):
    lengths = [33, 150]
    tensors, cu_seqlens = packed(lengths, 2, 1, 32, dtype)
    output = moemb_cpu.varlen_attention(*tensors, cu_seqlens, scaling, False)
    assert_close([output], [naive(*(states.double() for states in tensors), lengths, scaling, False)])


def test_wrong_arguments(moemb_cpu):
    (query, key, value), cu_seqlens = packed([4, 3], 4, 2, 16, torch.float32)
    attention = moemb_cpu.varlen_attention
    with pytest.raises(ValueError, match="`key` must have the dim and dtype of `query`"):
        attention(query, key.bfloat16(), value, cu_seqlens, 1.0, True)
    with pytest.raises(ValueError, match="whose heads divide those of `query`"):
        attention(query[:, :3], key, value, cu_seqlens, 1.0, True)
    with pytest.raises(ValueError, match="`cu_seqlens` must be int32"):
        attention(query, key, value, cu_seqlens.long(), 1.0, True)
    with pytest.raises(ValueError, match=r"`query` must be \(tokens, heads, 1 to 256\)"):
        attention(torch.randn(7, 2, 257), key, value, cu_seqlens, 1.0, True)
    for wrong in ([0, 4, 8], [1, 4, 7], [0, 5, 4, 7], [0, 4]):
        with pytest.raises(RuntimeError, match="sizes of the arguments contradict each other"):
            attention(query, key, value, torch.tensor(wrong, dtype=torch.int32), 1.0, True)


def test_compiles(moemb_cpu):
    (query, key, value), cu_seqlens = packed([4, 3], 4, 2, 16, torch.float32)
    compiled = torch.compile(
        lambda q: moemb_cpu.varlen_attention(q, key, value, cu_seqlens, 0.3, True) * 2, backend="eager", fullgraph=True
    )
    assert_same_bits([compiled(query)], [moemb_cpu.varlen_attention(query, key, value, cu_seqlens, 0.3, True) * 2])
