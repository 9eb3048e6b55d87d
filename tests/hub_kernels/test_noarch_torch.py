"""The portable torch paths of the noarch kernels against fp64 oracles, their checks, their layers."""

import pytest
import torch

from tests.hub_kernels.noarch import (
    KERNELS,
    assert_close,
    conv_oracle,
    delta_rule_oracle,
    experts_oracle,
    load_sources,
    offsets,
    packed_qkv,
    poison_memory,
)


EXPERTS = load_sources("moemb-experts")
GATED_DELTA = load_sources("moemb-gated-delta")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def expert_inputs(tokens=13, slots=3, experts=5, hidden=16, width=8, dtype=torch.float32):
    index = torch.randint(0, experts + 1, (tokens, slots))
    index[index == 1] = 2  # one expert without rows
    tensors = (
        torch.randn(tokens, hidden),
        torch.rand(tokens, slots),
        torch.randn(experts, 2 * width, hidden) * hidden**-0.5,
        torch.randn(experts, hidden, width) * width**-0.5,
    )
    states, weight, gate_up, down = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return states, index, weight, gate_up, down


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("tokens", [1, 13, 70])
@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_experts(monkeypatch, backend, tokens, dtype, tolerance):
    monkeypatch.setenv("MOEMB_EXPERTS_BACKEND", backend)
    inputs = expert_inputs(tokens, dtype=dtype)
    leaves = (inputs[0], *inputs[2:])
    expected, grad = experts_oracle(*inputs), torch.randn(tokens, 16)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    poison_memory(monkeypatch)
    actual = EXPERTS.experts(*inputs)
    assert actual.dtype == dtype
    assert_close(actual, expected, tolerance, "output")
    for a, b in zip(torch.autograd.grad(actual, leaves, grad.to(dtype)), wanted):
        assert_close(a, b, tolerance, "gradient")


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_skipped_slots_and_strangers(monkeypatch, backend):
    """A skipped token gives 0, whatever stands in it; a token that holds NaN spoils itself alone."""
    monkeypatch.setenv("MOEMB_EXPERTS_BACKEND", backend)
    states, index, weight, gate_up, down = (tensor.detach() for tensor in expert_inputs())
    index[0], index[1] = 5, 0
    expected = EXPERTS.experts(states, index, weight, gate_up, down)
    assert torch.equal(expected[0], torch.zeros(16))
    states[:2] = torch.nan
    weight[0] = torch.nan
    output = EXPERTS.experts(states, index, weight, gate_up, down)
    assert torch.equal(output[0], torch.zeros(16)) and output[1].isnan().all()
    assert torch.equal(output[2:], expected[2:])


@pytest.mark.parametrize("tokens,slots", [(0, 2), (3, 0), (4, 2)])
def test_nothing_is_routed(tokens, slots):
    states, _, _, gate_up, down = expert_inputs()
    states, index = states.detach()[:tokens].requires_grad_(), torch.full((tokens, slots), 5)
    output = EXPERTS.experts(states, index, torch.rand(tokens, slots), gate_up, down)
    output.sum().backward()
    assert torch.equal(output, torch.zeros(tokens, 16)) and torch.equal(states.grad, torch.zeros(tokens, 16))


LENGTHS = [[1], [0, 1, 63, 64, 65], [3, 0, 16, 17, 5], [200], [0, 0, 130, 2, 0]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "-".join(map(str, lengths)))
def test_delta_rule(lengths):
    mixed, inputs, cu_seqlens = packed_qkv(lengths, 2, 4, 20, 24, torch.float32)
    expected, actual = delta_rule_oracle(*inputs, cu_seqlens), GATED_DELTA.gated_delta_rule(*inputs, cu_seqlens)
    assert_close(actual, expected, 5e-6, "output")
    leaves, grad = (mixed, *inputs[3:]), torch.randn(actual.shape)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    for a, b in zip(torch.autograd.grad(actual, leaves, grad), wanted):
        assert_close(a, b, 1e-5, "gradient")


def test_delta_rule_keeps_segments_and_dtype():
    _, inputs, cu_seqlens = packed_qkv([20, 70, 9], 1, 1, 16, 16, torch.bfloat16)
    inputs = [tensor.detach().clone() for tensor in inputs]
    expected = GATED_DELTA.gated_delta_rule(*inputs, cu_seqlens)
    assert expected.dtype == torch.bfloat16
    inputs[2][20:90] = torch.nan
    inputs[3][20:90] = torch.nan
    actual = GATED_DELTA.gated_delta_rule(*inputs, cu_seqlens)
    assert torch.equal(actual[:20], expected[:20]) and torch.equal(actual[90:], expected[90:])


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("lengths,taps", [([0, 1, 2, 40, 0, 3, 21, 0], 4), ([2], 4), ([5, 6], 1)])
def test_conv(lengths, taps, activation):
    cu_seqlens = offsets(lengths)
    states = torch.randn(int(cu_seqlens[-1]), 10).requires_grad_()
    weight = torch.randn(10, taps).requires_grad_()
    expected = conv_oracle(states, weight, cu_seqlens, activation)
    actual = GATED_DELTA.causal_conv(states, weight, cu_seqlens, activation)
    assert_close(actual, expected, 1e-6, "output")
    grad = torch.randn(actual.shape)
    wanted = torch.autograd.grad(expected, (states, weight), grad.double())
    for a, b in zip(torch.autograd.grad(actual, (states, weight), grad), wanted):
        assert_close(a, b, 1e-5, "gradient")


def test_conv_keeps_segments():
    states, cu_seqlens = torch.randn(9, 4), offsets([4, 1, 4])
    expected = GATED_DELTA.causal_conv(states, torch.ones(4, 4), cu_seqlens)
    states[4] = torch.nan
    actual = GATED_DELTA.causal_conv(states, torch.ones(4, 4), cu_seqlens)
    assert torch.equal(actual[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_norms():
    states, gate, weight = torch.randn(6, 3, 8), torch.randn(6, 3, 8).bfloat16(), torch.randn(8)
    unit = states.double() / (states.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert_close(GATED_DELTA.rms_norm(states, weight, 1e-3), unit * (1 + weight.double()), 1e-6)
    assert GATED_DELTA.rms_norm(states, weight, 1e-3, torch.float16).dtype == torch.float16
    actual = GATED_DELTA.gated_rms_norm(states, gate, weight, 1e-3)
    assert actual.dtype == torch.bfloat16
    assert_close(actual, unit * weight.double() * torch.nn.functional.silu(gate.double()), 1e-2)


def test_no_tokens():
    _, inputs, _ = packed_qkv([], 1, 2, 16, 8, torch.float32)
    for cu_seqlens in (offsets([]), offsets([0, 0])):
        assert GATED_DELTA.gated_delta_rule(*inputs, cu_seqlens).shape == (0, 2, 8)
        assert GATED_DELTA.causal_conv(torch.zeros(0, 8), torch.zeros(8, 4), cu_seqlens).shape == (0, 8)


def broken(inputs, place, change):
    return [change(tensor) if number == place else tensor for number, tensor in enumerate(inputs)]


@pytest.mark.parametrize(
    "place,change,message",
    [
        (0, lambda tensor: tensor[None], r"`hidden_states` must be \(tokens, hidden\), got \(1, 13, 16\)"),
        (0, lambda tensor: tensor.double(), "`hidden_states` must be float32, bfloat16 or float16, got torch.float64"),
        (1, lambda tensor: tensor[1:], r"`expert_index` must be \(13, slots\), got \(12, 3\)"),
        (1, lambda tensor: tensor.float(), "`expert_index` must be int64 or int32, got torch.float32"),
        (2, lambda tensor: tensor[:, :1], r"`weight` must be \(13, 3\), got \(13, 1\)"),
        (2, lambda tensor: tensor.long(), "`weight` must be floating point, got torch.int64"),
        (3, lambda tensor: tensor[:, 1:], r"`gate_up_proj` must be \(experts, 2 \* intermediate, 16\), got"),
        (4, lambda tensor: tensor[1:], r"`down_proj` must be \(5, 16, 8\), got \(4, 16, 8\)"),
        (4, lambda tensor: tensor.bfloat16(), "`down_proj` must be torch.float32 as `hidden_states`, got"),
        (2, lambda tensor: tensor.to("meta"), "`weight` must be on cpu as `hidden_states`, got meta"),
    ],
)
def test_experts_refuses(place, change, message):
    inputs = [tensor.detach() for tensor in expert_inputs()]
    assert EXPERTS.supports("experts", *inputs)
    assert not EXPERTS.supports("experts", *broken(inputs, place, change))
    with pytest.raises(ValueError, match=message):
        EXPERTS.experts(*broken(inputs, place, change))


@pytest.mark.parametrize(
    "place,change,name",
    [
        (0, lambda tensor: tensor[..., 1:], "query"),
        (1, lambda tensor: tensor.bfloat16(), "key"),
        (1, lambda tensor: tensor[:, :0], "query"),
        (2, lambda tensor: tensor.double(), "value"),
        (2, lambda tensor: tensor[:, :3], "value"),
        (3, lambda tensor: tensor.bfloat16(), "decay"),
        (4, lambda tensor: tensor[1:], "beta"),
        (5, lambda tensor: tensor.float(), "cu_seqlens"),
        (5, lambda tensor: tensor[None], "cu_seqlens"),
    ],
)
def test_delta_rule_refuses(place, change, name):
    _, inputs, cu_seqlens = packed_qkv([5, 4], 2, 4, 8, 8, torch.float32)
    inputs = [*(tensor.detach() for tensor in inputs), cu_seqlens]
    assert GATED_DELTA.supports("gated_delta_rule", *inputs)
    assert GATED_DELTA.supports("gated_delta_rule", *inputs[:5])
    assert not GATED_DELTA.supports("gated_delta_rule", *broken(inputs, place, change))
    with pytest.raises(ValueError, match=f"`{name}`"):
        GATED_DELTA.gated_delta_rule(*broken(inputs, place, change))


@pytest.mark.parametrize(
    "op,arguments,message",
    [
        ("causal_conv", (torch.zeros(3, 4), torch.zeros(5, 4), offsets([3])), r"`weight` must be \(4, taps\)"),
        ("causal_conv", (torch.zeros(3), torch.zeros(4, 4), offsets([3])), "`hidden_states`"),
        ("rms_norm", (torch.zeros(3, 4), torch.zeros(3)), r"`weight` must be \(4,\)"),
        ("rms_norm", (torch.zeros(3, 20000), torch.zeros(20000)), "dim from 1 to 16384"),
        ("gated_rms_norm", (torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(4)), "`gate`"),
    ],
)
def test_other_ops_refuse(op, arguments, message):
    assert not GATED_DELTA.supports(op, *arguments)
    settings = () if op == "causal_conv" else (1e-6,)
    with pytest.raises(ValueError, match=message):
        getattr(GATED_DELTA, op)(*arguments, *settings)


def test_unknown_names(monkeypatch):
    assert not EXPERTS.supports("linear", torch.zeros(2, 2)) and not GATED_DELTA.supports("experts")
    with pytest.raises(ValueError, match="`activation` must be 'silu' or None, got 'relu'"):
        GATED_DELTA.causal_conv(torch.zeros(3, 4), torch.zeros(4, 4), offsets([3]), "relu")
    inputs = [tensor.detach() for tensor in expert_inputs()]
    monkeypatch.setenv("MOEMB_EXPERTS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="MOEMB_EXPERTS_BACKEND='cuda' cannot run: there is no such back-end"):
        EXPERTS.experts(*inputs)
    monkeypatch.setenv("MOEMB_GATED_DELTA_BACKEND", "cuda")
    with pytest.raises(ValueError, match="MOEMB_GATED_DELTA_BACKEND must be one of auto, triton, torch, fla"):
        GATED_DELTA.rms_norm(torch.zeros(2, 2), torch.zeros(2), 1e-6)


def test_back_ends_say_why_not():
    states, _, _, gate_up, _ = expert_inputs()
    reasons = EXPERTS.backends(states, gate_up)
    assert list(reasons) == ["triton", "grouped_mm", "sonicmoe", "loop"]
    assert reasons["loop"] is None and reasons["grouped_mm"] is None and "CUDA" in reasons["sonicmoe"]
    assert EXPERTS.backend(states, gate_up) == "loop"
    odd = EXPERTS.backends(states[:, :6], gate_up[:, :, :6])
    assert odd["grouped_mm"] == "grouped_mm wants row strides of 16 bytes"


@pytest.mark.parametrize("variant", ["torch-cpu", "torch-cuda"])
@pytest.mark.parametrize("repo", ["moemb-experts", "moemb-gated-delta"])
def test_both_variants_take_cpu_tensors(repo, variant):
    """A CUDA build of torch gets the cuda variant, also where there is no GPU."""
    import kernels
    import stage

    stage.stage(KERNELS / repo)
    module = kernels.get_local_kernel(KERNELS / repo / "build" / variant)
    if repo == "moemb-experts":
        inputs = [tensor.detach() for tensor in expert_inputs()]
        assert_close(module.experts(*inputs), experts_oracle(*inputs), 1e-5)
    else:
        _, inputs, cu_seqlens = packed_qkv([5, 20], 1, 2, 8, 8, torch.float32)
        assert_close(module.gated_delta_rule(*inputs, cu_seqlens), delta_rule_oracle(*inputs, cu_seqlens), 5e-6)


def test_layers_stand_in_for_stock_modules():
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(hidden_size=16, num_experts=4, moe_intermediate_size=8)
    config._experts_implementation = "eager"
    experts, norm = stock.Qwen3_5MoeExperts(config), stock.Qwen3_5MoeRMSNorm(16)
    gated = stock.Qwen3_5MoeRMSNormGated(16)
    for module in (experts, norm, gated):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    states, gate = torch.randn(6, 16), torch.randn(6, 16)
    weight, index = torch.rand(6, 4).topk(2)
    forward = EXPERTS.layers.MoEMBExperts.forward
    assert_close(forward(experts, states, index, weight), experts(states, index, weight), 1e-5)
    layers = GATED_DELTA.layers
    assert_close(layers.RMSNormZeroCentered.forward(norm, states), norm(states), 1e-5)
    assert_close(layers.RMSNormGated.forward(gated, states, gate), gated(states, gate), 1e-5)


def test_function_layers_stand_in_for_stock_functions():
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

    query, key, value = torch.randn(3, 2, 70, 2, 8).unbind(0)
    decay, beta = -torch.rand(2, 70, 2), torch.rand(2, 70, 2)
    rule, conv = GATED_DELTA.layers.ChunkGatedDeltaRule(), GATED_DELTA.layers.CausalConv1d()
    settings = {"g": decay, "beta": beta, "use_qk_l2norm_in_kernel": True}
    expected, _ = stock.torch_chunk_gated_delta_rule(query, key, value, **settings)
    assert_close(rule(query, key, value, **settings)[0], expected, 1e-5)
    states, weight = torch.randn(2, 12, 70), torch.randn(12, 4)
    expected = stock.causal_conv1d_fn(states, weight, None, activation="silu")
    assert_close(conv(states, weight, None, activation="silu"), expected, 1e-5)

    # one packed row: the pieces equal separate calls
    pieces, cu_seqlens = (slice(0, 30), slice(30, 70)), offsets([30, 40])
    packed = rule(query[:1], key[:1], value[:1], decay[:1], beta[:1], 64, None, False, True, cu_seqlens=cu_seqlens)[0]
    mixed = conv(states[:1], weight, None, activation="silu", cu_seq_lens_q=cu_seqlens)
    for piece in pieces:
        part = {name: tensor[:1, piece] for name, tensor in (("g", decay), ("beta", beta))}
        inputs = (tensor[:1, piece] for tensor in (query, key, value))
        alone, _ = stock.torch_chunk_gated_delta_rule(*inputs, **part, use_qk_l2norm_in_kernel=True)
        assert_close(packed[:, piece], alone, 1e-5)
        assert_close(mixed[..., piece], stock.causal_conv1d_fn(states[:1, :, piece], weight, None, "silu"), 1e-5)
    with pytest.raises(ValueError, match="use_cache=False"):
        rule(query, key, value, **settings, output_final_state=True)
    with pytest.raises(ValueError, match="no bias"):
        conv(states, weight, torch.zeros(12))
