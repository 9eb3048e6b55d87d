import pytest
import torch

from .row_cases import assert_close, assert_same_bits, in_fp64, poisoned, threads, with_gradients


INF, NAN = float("inf"), float("nan")


def naive_weights(logits, k):
    probabilities = torch.softmax(logits, dim=-1)
    weight, index = torch.topk(probabilities, k, dim=-1)
    return weight / weight.sum(-1, keepdim=True), index


@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"),
    [(0, 8, 2), (1, 1, 1), (5, 16, 4), (70, 17, 17), (40, 64, 8), (33, 256, 8), (9, 512, 16), (9, 100, 20)],
)
def test_router(moemb_cpu, tokens, num_experts, k):
    # distinct logits with gaps that fp32 probabilities keep apart
    logits = (
        torch.stack([torch.randperm(num_experts) for _ in range(tokens)]).float() * 0.05
        if tokens
        else (torch.empty(0, num_experts))
    )
    with poisoned():
        index, _ = moemb_cpu.top_k_router(logits, k)
        results = with_gradients(lambda x: moemb_cpu.top_k_router(x, k)[1], [logits])
    expected = in_fp64(lambda x: naive_weights(x, k)[0], [logits], torch.float32)
    assert torch.equal(index, naive_weights(logits.double(), k)[1])
    assert_close(results, expected)


def test_equal_logits_go_to_the_lower_index(moemb_cpu):
    logits = torch.zeros(3, 40)
    logits[1, [39, 7, 20]] = 1.0
    logits[2, ::2] = -0.0  # equal to 0
    index, weight = moemb_cpu.top_k_router(logits, 5)
    assert index.tolist() == [[0, 1, 2, 3, 4], [7, 20, 39, 0, 1], [0, 1, 2, 3, 4]]
    assert torch.equal(weight[0], torch.full((5,), 0.2))


def test_far_logits_do_not_underflow(moemb_cpu):
    logits = torch.full((1, 32), -3e4)
    logits[0, 3], logits[0, 9] = 100.0, -100.0
    index, weight = moemb_cpu.top_k_router(logits, 3)
    assert index[0, :2].tolist() == [3, 9] and weight.isfinite().all() and weight[0, 0] == 1


@pytest.mark.parametrize(
    "row", [[NAN] * 20, [NAN] + [0.5] * 19, [0.5] * 19 + [-NAN], [-INF] * 20, [0.0] * 10 + [INF] * 10], ids=str
)
def test_rows_without_probabilities(moemb_cpu, row):
    logits = torch.stack([torch.tensor(row), torch.arange(20.0)])
    with poisoned():
        index, weight = moemb_cpu.top_k_router(logits, 4)
        (_, grad) = with_gradients(lambda x: moemb_cpu.top_k_router(x, 4)[1], [logits])
    assert weight[0].isnan().all() and torch.softmax(logits[0], -1).isnan().all()  # as in torch
    assert len(set(index[0].tolist())) == 4 and index.min() >= 0 and index.max() < 20
    assert index[1].tolist() == [19, 18, 17, 16] and weight[1].isfinite().all() and grad[1].isfinite().all()


def test_some_experts_ruled_out(moemb_cpu):
    logits = torch.full((1, 24), -INF)
    logits[0, 5], logits[0, 11] = 1.0, 2.0
    index, weight = moemb_cpu.top_k_router(logits, 4)
    assert index.tolist() == [[11, 5, 0, 1]] and weight[0, 2:].tolist() == [0, 0]
    assert_close([weight], [torch.softmax(torch.tensor([[2.0, 1.0, -INF, -INF]]).double(), -1)])


def test_matches_the_model(moemb_cpu):
    from modeling_moemb.routing_moemb import route

    logits = torch.randn(50, 64)
    index, weight = moemb_cpu.top_k_router(logits, 8)
    routing = route(logits, 8, torch.float32)
    assert torch.equal(index, routing.expert_index)
    assert_close([weight], [routing.weight.double()])


def test_bits(moemb_cpu):
    wide = torch.randn(3000, 80)
    logits = wide[:, 10:74]  # strided rows
    assert moemb_cpu.supports("top_k_router", logits)
    runs = []
    for count in (1, 2):
        with threads(count):
            runs.append([*moemb_cpu.top_k_router(logits, 6)])
            runs[-1] += with_gradients(lambda x: moemb_cpu.top_k_router(x, 6)[1], [logits])
    assert_same_bits(*runs)
    alone = moemb_cpu.top_k_router(logits[41:42], 6)
    assert_same_bits(list(alone), [results[41:42] for results in runs[0][:2]])


def test_wrong_arguments(moemb_cpu):
    logits = torch.randn(4, 16)
    for k in (0, 17):
        with pytest.raises(ValueError, match=f"`k` must be from 1 to 16, got {k}"):
            moemb_cpu.top_k_router(logits, k)
    with pytest.raises(ValueError, match="`logits` must be float32 on the cpu, got torch.bfloat16"):
        moemb_cpu.top_k_router(logits.bfloat16(), 2)
    with pytest.raises(ValueError, match=r"got shape \(4, 5000\)"):
        moemb_cpu.top_k_router(torch.randn(4, 5000), 2)
    assert not moemb_cpu.supports("top_k_router", logits.bfloat16())
    assert not moemb_cpu.supports("top_k_router", logits.t())


def test_compiles(moemb_cpu):
    logits = torch.randn(6, 32)
    compiled = torch.compile(lambda x: moemb_cpu.top_k_router(x, 4), backend="eager", fullgraph=True)
    assert_same_bits(list(compiled(logits)), list(moemb_cpu.top_k_router(logits, 4)))
