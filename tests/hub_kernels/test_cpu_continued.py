"""Segments that continue others: the delta rule from a state, attention with keys before its queries."""

import pytest
import torch

from .row_cases import assert_same_bits, offsets, poisoned, threads
from .test_cpu_attention import naive, packed
from .test_cpu_gated_delta import error, inputs_of, recurrence


RULE_SHAPES = [(2, 4, 32, 32), (1, 3, 24, 40), (2, 2, 128, 128)]
WHOLE = [64, 65, 129, 191, 300, 192]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RULE_SHAPES)
def test_rule_from_states_to_states(moemb_cpu, shape, dtype):
    lengths, state_of = [1, 0, 63, 64, 65, 0, 130], [2, 1, -1, 0, 2, -1, 1]
    inputs, given = inputs_of(lengths, shape, dtype), torch.randn(3, *shape[1:])
    with poisoned():
        table = torch.tensor(state_of, dtype=torch.int32)
        output, final = moemb_cpu.gated_delta_rule(*inputs, offsets(lengths), given, table, True)
    started = torch.stack([given[state] if state >= 0 else torch.zeros_like(given[0]) for state in state_of])
    expected, behind = recurrence(*inputs, lengths, started)
    assert final.dtype == torch.float32 and final.shape == behind.shape
    assert error(output, expected) < (1e-6 if dtype == torch.float32 else 2.5e-3)
    for segment, length in enumerate(lengths):
        if length or state_of[segment] >= 0:
            assert error(final[segment], behind[segment]) < 1e-6, segment
        else:
            assert not final[segment].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", RULE_SHAPES)
def test_a_rule_cut_at_64_has_the_bits_of_the_whole(moemb_cpu, shape, dtype):
    inputs = inputs_of(WHOLE, shape, dtype)
    whole, behind = moemb_cpu.gated_delta_rule(*inputs, offsets(WHOLE), return_final_state=True)
    assert_same_bits(whole, moemb_cpu.gated_delta_rule(*inputs, offsets(WHOLE)))
    with poisoned():
        start = 0
        for segment, length in enumerate(WHOLE):
            for cut in range(64, length + 1, 64):
                first, rest = ([t[a : a + n] for t in inputs] for a, n in ((start, cut), (start + cut, length - cut)))
                head, state = moemb_cpu.gated_delta_rule(*first, offsets([cut]), return_final_state=True)
                one = torch.zeros(1, dtype=torch.int32)
                tail, final = moemb_cpu.gated_delta_rule(*rest, offsets([length - cut]), state, one, True)
                assert_same_bits(torch.cat([head, tail]), whole[start : start + length])
                assert_same_bits(final[0], behind[segment])
            start += length


def test_rule_with_states_and_threads(moemb_cpu):
    inputs, given = inputs_of(WHOLE, (2, 4, 64, 64)), torch.randn(2, 4, 64, 64)
    table = torch.tensor([0, 1, -1, 1, 0, -1], dtype=torch.int32)
    with threads(1):
        one = moemb_cpu.gated_delta_rule(*inputs, offsets(WHOLE), given, table, True)
    with threads(2):
        two = moemb_cpu.gated_delta_rule(*inputs, offsets(WHOLE), given, table, True)
    for first, second in zip(one, two):
        assert_same_bits(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_of_rows_that_segments_share(moemb_cpu, dtype):
    """As on gathered copies; what no segment writes stays as it was."""
    inputs, given = inputs_of([200], (2, 4, 24, 40), dtype), torch.randn(2, 4, 24, 40)
    first, other = torch.arange(70), torch.randperm(190)[:100].sort().values
    own = [torch.tensor([100, 90, 80]), torch.tensor([], dtype=torch.long), torch.arange(110, 190)]
    rows = torch.cat([first, own[0], first, own[1], first[3:], own[2], other])
    lengths, silent = [73, 70, 147, 100], [0, 70, 67, 100]
    silent = torch.tensor(silent, dtype=torch.int32)
    table = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    out = torch.full_like(inputs[2], 7.0)
    with poisoned():
        result, final = moemb_cpu.gated_delta_rule(
            *inputs, offsets(lengths), given, table, True, rows, silent, out.contiguous()
        )
        gathered = [tensor[rows] for tensor in inputs]
        expected, behind = moemb_cpu.gated_delta_rule(*gathered, offsets(lengths), given, table, True)
    assert_same_bits(final, behind)
    written = torch.full((200,), -1)
    place = torch.arange(len(rows)).split(lengths)
    for segment, count in zip(place, silent.tolist()):
        written[rows[segment[count:]]] = segment[count:]
    assert_same_bits(result[written >= 0], expected[written[written >= 0]])
    assert (written < 0).sum() == 47 and (result[written < 0] == 7).all()
    with threads(2):
        again = moemb_cpu.gated_delta_rule(*inputs, offsets(lengths), given, table, False, rows, silent, out.clone())
    assert_same_bits(again, result)


def test_rule_refuses(moemb_cpu):
    inputs, ends = inputs_of([5], (1, 2, 16, 16)), offsets([5])
    state, table = torch.zeros(1, 2, 16, 16), torch.zeros(1, dtype=torch.int32)
    assert moemb_cpu.supports("gated_delta_rule", *inputs, ends, state, table)
    assert not moemb_cpu.supports("gated_delta_rule", *inputs, ends, state.double(), table)
    with pytest.raises(ValueError, match="come together"):
        moemb_cpu.gated_delta_rule(*inputs, ends, state)
    with pytest.raises(ValueError, match="initial_state is torch.float32 of shape"):
        moemb_cpu.gated_delta_rule(*inputs, ends, state[..., :8], table)
    with pytest.raises(ValueError, match="state_of is torch.int64"):
        moemb_cpu.gated_delta_rule(*inputs, ends, state, table.long())
    for unknown in (1, -2):
        with pytest.raises(RuntimeError, match="contradict"):
            moemb_cpu.gated_delta_rule(*inputs, ends, state, table.fill_(unknown))
    with pytest.raises(ValueError, match="rows and silent come together"):
        moemb_cpu.gated_delta_rule(*inputs, ends, rows=torch.arange(5))
    for unknown in (5, -1):
        rows = torch.tensor([0, 1, 2, 3, unknown])
        with pytest.raises(RuntimeError, match="contradict"):
            moemb_cpu.gated_delta_rule(*inputs, ends, rows=rows, silent=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="out is torch.float64"):
        moemb_cpu.gated_delta_rule(*inputs, ends, out=inputs[2].double())
    inputs[2] = inputs[2].detach().requires_grad_()
    with pytest.raises(ValueError, match="no gradients"):
        moemb_cpu.gated_delta_rule(*inputs, ends, return_final_state=True)


def continued(query, lengths, own):
    """The last `own` queries of every segment."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.cat([query[end - count : end] for end, count in zip(ends, own)])


LENGTHS = [5, 0, 1, 63, 64, 65, 150, 300, 129]
OWN = {"one": [1, 0, 1, 1, 1, 1, 1, 1, 1], "some": [2, 0, 0, 63, 7, 64, 90, 17, 128], "all": LENGTHS}


@pytest.mark.parametrize("isa", ["amx", "avx512"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 64), (16, 2, 48), (3, 1, 72), (8, 2, 256)])
def test_attention_of_the_last_queries_has_the_bits_of_all(moemb_cpu, heads, key_heads, dim, own, dtype, isa):
    (query, key, value), ends = packed(LENGTHS, heads, key_heads, dim, dtype)
    asked = continued(query, LENGTHS, own)
    moemb_cpu.limit_isa(isa)
    try:
        every = moemb_cpu.varlen_attention(query, key, value, ends, dim**-0.5, True)
        with poisoned():
            some = moemb_cpu.varlen_attention(asked, key, value, offsets(own), dim**-0.5, True, ends)
    finally:
        moemb_cpu.limit_isa("amx")
    assert_same_bits(some, continued(every, LENGTHS, own))
    expected = naive(query.double(), key.double(), value.double(), LENGTHS, dim**-0.5, True)
    assert error(some, continued(expected, LENGTHS, own)) < (1e-6 if dtype == torch.float32 else 8e-3)


def test_attention_without_causality(moemb_cpu):
    (query, key, value), ends = packed(LENGTHS, 4, 2, 32, torch.float32)
    asked = continued(query, LENGTHS, OWN["some"])
    some = moemb_cpu.varlen_attention(asked, key, value, offsets(OWN["some"]), 0.2, False, ends)
    expected = naive(query.double(), key.double(), value.double(), LENGTHS, 0.2, False)
    assert error(some, continued(expected, LENGTHS, OWN["some"])) < 1e-6


def test_attention_refuses(moemb_cpu):
    (query, key, value), ends = packed([4, 6], 2, 1, 16, torch.float32)
    asked, own = query[2:], offsets([2, 6])
    assert moemb_cpu.supports("varlen_attention", asked, key, value, own, ends)
    assert not moemb_cpu.supports("varlen_attention", asked, key, value, own)
    with pytest.raises(ValueError, match="tokens of `query`"):
        moemb_cpu.varlen_attention(asked, key, value, own, 1.0, True)
    with pytest.raises(ValueError, match="as long as"):
        moemb_cpu.varlen_attention(asked, key, value, own, 1.0, True, ends[:2])
    with pytest.raises(ValueError, match="`cu_seqlens_k` must be int32"):
        moemb_cpu.varlen_attention(asked, key, value, own, 1.0, True, ends.long())
    for wrong in (offsets([7, 3]), offsets([4, 5])):  # fewer keys than queries; keys left over
        with pytest.raises(RuntimeError, match="contradict"):
            moemb_cpu.varlen_attention(asked, key, value, own, 1.0, True, wrong)
    with pytest.raises(ValueError, match="no gradients"):
        moemb_cpu.varlen_attention(asked.clone().requires_grad_(), key, value, own, 1.0, True, ends)
