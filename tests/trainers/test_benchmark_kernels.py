"""The suite finds wrong kernels: that is what it is for."""

import pytest
import torch

from moemb.trainers import benchmark_implementations, benchmark_kernels
from moemb.trainers import benchmark_references as references
from moemb.trainers.benchmark_implementations import KERNEL, TORCH, implementations
from moemb.trainers.benchmark_kernels import check_operation, row_error, run_case, timing_cases
from moemb.trainers.benchmark_operations import OPERATIONS, check_shapes, ragged_lengths
from moemb.trainers.benchmark_timing import Protocol


@pytest.fixture
def kernel(monkeypatch):
    """Makes a function the kernel of one operation; all others have none."""
    operations = {}
    monkeypatch.setattr(benchmark_implementations, "find_kernel", lambda name, *tensors: operations.get(name))
    check_operation.cache_clear()
    yield operations
    check_operation.cache_clear()


@pytest.mark.parametrize("name", OPERATIONS)
def test_references_agree_with_our_torch_path_and_with_transformers(name, kernel):
    check = check_operation(name, "fp32")
    assert check["wrong"] == [] and KERNEL not in check["implementations"]
    assert check["implementations"][TORCH]["gradient_error"] > 0
    for peer, entry in check["implementations"].items():
        assert entry["shapes"] and entry["row_error"] <= 1e-5, peer


@pytest.mark.parametrize("name", ["experts", "causal_conv", "gated_rms_norm"])
def test_bf16_is_within_its_tolerance(name, kernel):
    assert check_operation(name, "bf16")["wrong"] == []


def gated_norm(states, gate, weight, eps):
    return references.gated_rms_norm(states, gate, weight, eps)


class Remembering:
    """A kernel whose workspace survives the call."""

    def __init__(self):
        self.workspace = {}

    def __call__(self, states, gate, weight, eps):
        output = gated_norm(states, gate, weight, eps)
        left = self.workspace.get(states.shape, torch.zeros_like(output))
        self.workspace[states.shape] = 0 * output.detach()
        return output + left


def skips_a_row(states, gate, weight, eps):
    output = torch.empty_like(states)
    output[:-1] = gated_norm(states, gate, weight, eps)[:-1]
    return output


def one_row_off(states, gate, weight, eps):
    output = gated_norm(states, gate, weight, eps).clone()
    output[-1:] *= 1.001
    return output


def no_gradient(states, gate, weight, eps):
    return gated_norm(states, gate, weight.detach(), eps)


def half_gradient(states, gate, weight, eps):
    return gated_norm(states, gate, weight, eps) + 0.001 * (gate - gate.detach())


@pytest.mark.parametrize("wrong", [Remembering(), skips_a_row, one_row_off, no_gradient, half_gradient])
def test_a_wrong_kernel_is_found(kernel, wrong):
    kernel["gated_rms_norm"] = wrong
    assert check_operation("gated_rms_norm", "fp32")["wrong"] == [KERNEL]


def test_a_right_kernel_is_not_accused(kernel):
    kernel["gated_rms_norm"] = gated_norm
    check = check_operation("gated_rms_norm", "fp32")
    assert check["wrong"] == []
    assert check["implementations"][KERNEL]["shapes"] == len(check_shapes("gated_rms_norm"))  # 0 rows included


@pytest.mark.parametrize(
    "wrong",
    [
        lambda logits, k: references.top_k_router(logits, k)[0].roll(1, 0),
        lambda logits, k: references.top_k_router(logits, k)[0].flip(1),
    ],
)
def test_a_router_with_other_experts_is_found(kernel, wrong):
    def router(logits, k):
        return wrong(logits, k), references.top_k_router(logits, k)[1]

    kernel["top_k_router"] = router
    assert check_operation("top_k_router", "fp32")["wrong"] == [KERNEL]


def test_rows_of_skipped_tokens_left_uninitialised_are_found(kernel):
    """A token whose slots are all skipped has a row of zeros, not whatever the memory held."""

    def accumulates(states, index, weight, gate_up, down):
        output = references.experts(states, index, weight, gate_up, down)
        return torch.where((index < gate_up.shape[0]).any(1)[:, None], output, torch.empty_like(output))

    kernel["experts"] = accumulates
    assert check_operation("experts", "fp32")["wrong"] == [KERNEL]
    check_operation.cache_clear()
    kernel["experts"] = references.experts
    assert check_operation("experts", "fp32")["wrong"] == []


def test_row_error():
    wanted = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert row_error(wanted, wanted) == 0
    assert row_error(wanted + torch.tensor([[0.5, 0.0], [0.0, 0.0]]), wanted) == pytest.approx(0.1, rel=0.01)
    assert row_error(wanted + torch.tensor([[0.0, 0.0], [0.1, 0.0]]), wanted) > 1
    assert row_error(wanted * float("nan"), wanted) == float("inf")
    assert row_error(wanted[:1], wanted) == float("inf")
    assert row_error(torch.tensor([1, 2]), torch.tensor([2, 1])) == float("inf")


def test_operations_and_bytes_are_counted():
    generator = torch.Generator().manual_seed(0)
    shape = {"tokens": 5, "num_experts": 16, "hidden": 128, "inner": 64, "slots": 4, "routing": "skewed"}
    inputs = OPERATIONS["experts"].inputs(shape, torch.bfloat16, generator)
    index = inputs["expert_index"]
    pairs, hit = int((index < 16).sum()), index[index < 16].unique().numel()
    operations, size = OPERATIONS["experts"].work(shape, inputs)
    assert operations == 2 * pairs * 3 * 128 * 64
    assert size == 2 * (hit * 3 * 128 * 64 + 2 * 5 * 128)
    shape = {"lengths": [3, 0, 2], "heads": 4, "key_heads": 2, "dim": 64}
    inputs = OPERATIONS["varlen_attention"].inputs(shape, torch.float32, generator)
    assert OPERATIONS["varlen_attention"].work(shape, inputs)[0] == 4 * (6 + 3) * 4 * 64


def test_skewed_routing_has_idle_experts_skipped_slots_and_an_empty_token():
    shape = {"tokens": 65, "num_experts": 16, "hidden": 8, "inner": 8, "slots": 4, "routing": "skewed"}
    index = OPERATIONS["experts"].inputs(shape, torch.float32, torch.Generator().manual_seed(0))["expert_index"]
    counts = torch.bincount(index.flatten(), minlength=17)
    assert counts[14:16].sum() == 0 and counts[16] > 4 and counts[0] > 3 * counts[13]
    assert (index == 16).all(1).any()


def test_ragged_lengths_fill_the_tokens():
    lengths = ragged_lengths(4096, 16, 1024)
    assert sum(lengths) == 4096 and max(lengths) <= 1024 and min(lengths[:-1]) >= 16
    assert lengths == ragged_lengths(4096, 16, 1024) and len(set(lengths)) > 5


def test_implementations_cover_what_transformers_has():
    shape = {"tokens": 5, "num_experts": 16, "hidden": 128, "inner": 64, "slots": 4}
    inputs = OPERATIONS["experts"].inputs(shape, torch.float32, torch.Generator().manual_seed(0))
    stock = [f"transformers {backend}" for backend in ("eager", "grouped_mm", "batched_mm")]
    assert list(implementations("experts", inputs))[-4:] == [TORCH, *stock]
    inputs["expert_index"][0, 0] = 16
    assert not [name for name in implementations("experts", inputs) if name.startswith("transformers")]


@pytest.mark.parametrize("quick", [True, False])
def test_case_names_are_unique_and_every_operation_has_cases(quick):
    cases = timing_cases(quick)
    assert len({case["name"] for case in cases}) == len(cases)
    assert {case["operation"] for case in cases} == set(OPERATIONS)


def test_a_case_compares_with_the_best_peer(kernel):
    kernel["gated_rms_norm"] = gated_norm
    name = next(name for name in benchmark_kernels.case_names(True) if name.startswith("gated_rms_norm"))
    result = run_case(name, Protocol(rounds=2, shortest=1e-4), True, lambda text: None)
    seconds = result["seconds"]
    assert set(seconds) == {KERNEL, TORCH, "transformers"} and result["best_peer"] == "transformers"
    assert result["ratio"] == pytest.approx(seconds["transformers"] / seconds[KERNEL])
    assert result["check"]["same_bits_for_one_thread"] is True
    peak = result["peak_operations_per_second"]
    assert result["share_of_peak"][KERNEL] == pytest.approx(result["operations"] / seconds[KERNEL] / peak)


def test_a_kernel_that_is_wrong_at_size_is_not_timed(kernel):
    """Right on the small shapes, wrong on the one that is timed."""
    case = next(case for case in timing_cases(True) if case["operation"] == "swiglu" and case["dtype"] == "fp32")
    case["shape"] = {"size": (40, 96)}

    def swiglu(gate, up):
        return references.swiglu(gate, up) * (1.01 if gate.shape[0] == 40 else 1.0)

    kernel["swiglu"] = swiglu
    original = benchmark_kernels.timing_cases
    try:
        benchmark_kernels.timing_cases = lambda quick=False: [case]
        result = run_case(case["name"], Protocol(rounds=1, shortest=1e-4), True, lambda text: None)
    finally:
        benchmark_kernels.timing_cases = original
    assert result["check"]["wrong"] == [KERNEL] and KERNEL not in result["seconds"]
