"""Stock Qwen3.5-MoE models of transformers on the layers of moemb-cpu: as on PyTorch, and packed as well."""

import kernels
import pytest
import torch
from transformers import DynamicCache, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as stock

from modeling_moemb import use_kernels
from modeling_moemb.stock_kernels_moemb import HOOKS, KernelLayer, kernelize_stock, stock_kernel_mapping


LENGTHS = [5, 1, 64, 23]


@pytest.fixture
def chosen(moemb_cpu, moemb_cpu_build):
    """The build of this checkout, whatever the environment has staged."""
    previous = use_kernels(moemb_cpu_build)
    yield moemb_cpu
    use_kernels(previous)


@pytest.fixture
def model(chosen):
    """A stock text model; afterwards the functions that all models share are transformers' own again."""
    config = Qwen3_5MoeTextConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    model = stock.Qwen3_5MoeTextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    yield model
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")


def items() -> list[torch.Tensor]:
    return [torch.randint(100, (1, length)) for length in LENGTHS]


def packed_arguments(tokens: list[torch.Tensor]) -> dict:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "input_ids": torch.cat(tokens, dim=1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "use_cache": False,
    }


def run(model, **arguments) -> torch.Tensor:
    return model(**arguments).last_hidden_state


def test_every_hook_has_a_layer(chosen):
    mapping = stock_kernel_mapping("cpu")
    assert set(mapping) == set(HOOKS)
    for layer in (entry["cpu"] for entry in mapping.values()):
        assert layer.load() is getattr(chosen.layers, layer.layer_name) and hash(layer) is not None


def test_a_layer_of_a_repository_that_is_not_in_use(chosen):
    with pytest.raises(FileNotFoundError, match="/elsewhere is not in use"):
        KernelLayer("moemb-cpu", "/elsewhere", "cpu", "RMSNormGated").load()


def test_packed_equals_separate_runs(model):
    tokens = items()
    with torch.no_grad():
        separate = torch.cat([run(model, input_ids=ids, use_cache=False) for ids in tokens], dim=1)
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            run(model, **packed_arguments(tokens))
        names = kernelize_stock(model)
        assert {"chunk_gated_delta_rule", "causal_conv1d_fn"} <= set(names)
        ours = torch.cat([run(model, input_ids=ids, use_cache=False) for ids in tokens], dim=1)
        packed = run(model, **packed_arguments(tokens))
    torch.testing.assert_close(ours, separate, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed, ours, rtol=1e-5, atol=2e-6)


def test_the_forwards_are_replaced(model, chosen):
    kernelize_stock(model)
    block = model.layers[0]
    assert block.linear_attn.norm.forward.__func__ is chosen.layers.RMSNormGated.forward
    assert block.input_layernorm.forward.__func__ is chosen.layers.RMSNormZeroCentered.forward
    assert block.mlp.gate.forward.__func__ is chosen.layers.SoftmaxTopKRouter.forward
    assert block.mlp.experts.forward.__func__ is chosen.layers.MoEMBExperts.forward


def test_a_padded_batch_and_a_cache(model):
    """Prefill of two sequences and two further steps: the states that the kernel keeps to itself go in and out."""
    tokens = torch.randint(100, (2, 20))

    def steps() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        first = model(input_ids=tokens[:, :11], past_key_values=cache, use_cache=True).last_hidden_state
        chunk = model(input_ids=tokens[:, 11:19], past_key_values=cache, use_cache=True).last_hidden_state
        single = model(input_ids=tokens[:, 19:], past_key_values=cache, use_cache=True).last_hidden_state
        return [first, chunk, single]

    with torch.no_grad():
        expected = steps()
        kernelize_stock(model)
        for found, wanted in zip(steps(), expected):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_training(model):
    """Gradients of a packed batch are those of separate runs on PyTorch."""
    tokens = items()
    weights = torch.randn(sum(LENGTHS), 64)

    def gradients(states: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (states[0] * weights).sum().backward()
        return {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }

    expected = gradients(torch.cat([run(model, input_ids=ids, use_cache=False) for ids in tokens], dim=1))
    kernelize_stock(model, training=True)
    found = gradients(run(model, **packed_arguments(tokens)))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = wanted.abs().max().clamp_min(1e-6)
        assert (found[name] - wanted).abs().max() / scale < 1e-3, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel must be True"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "batch": 2}, "in one row, the batch has 2"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "output_final_state": True}, "use_cache=False"),
    ],
)
def test_what_the_rule_refuses(chosen, arguments, message):
    arguments = {"use_qk_l2norm_in_kernel": True, **arguments}
    states = torch.randn(arguments.pop("batch", 1), 4, 2, 32)
    scalars = torch.rand(states.shape[:3])
    with pytest.raises(ValueError, match=message):
        chosen.layers.ChunkGatedDeltaRule()(states, states, states, -scalars, scalars, **arguments)


def test_the_convolution_with_bias_and_activation(chosen):
    states, weight, bias = torch.randn(2, 64, 9), torch.randn(64, 4), torch.randn(64)
    reference = torch.nn.functional.conv1d(states, weight[:, None], bias, padding=3, groups=64)[:, :, :9]
    layer = chosen.layers.CausalConv1d()
    torch.testing.assert_close(layer(states, weight, bias), reference, rtol=1e-5, atol=1e-5)
    silu = torch.nn.functional.silu(reference)
    torch.testing.assert_close(layer(states, weight, bias, "silu"), silu, rtol=1e-5, atol=1e-5)
    assert layer(torch.empty(2, 64, 0), weight).shape == (2, 64, 0)
    with pytest.raises(ValueError, match="activation 'relu'"):
        layer(states, weight, None, "relu")


def compiled_calls() -> dict:
    """Layer name to `(module with what the layer expects, inputs)`."""
    torch.manual_seed(1)
    states = torch.randn(1, 6, 2, 32)
    norm = torch.nn.Parameter(torch.randn(32))
    calls = {
        "RMSNormZeroCentered": ({"weight": norm, "eps": 1e-6}, (torch.randn(6, 32),)),
        "RMSNormGated": ({"weight": norm, "variance_epsilon": 1e-6}, (torch.randn(6, 32), torch.randn(6, 32))),
        "SoftmaxTopKRouter": (
            {"weight": torch.nn.Parameter(torch.randn(16, 32)), "hidden_dim": 32, "top_k": 2},
            (torch.randn(6, 32),),
        ),
        "CausalConv1d": ({}, (torch.randn(2, 32, 6), torch.randn(32, 4), None, "silu")),
        "ChunkGatedDeltaRule": (
            {},
            (states, states, states, -torch.rand(1, 6, 2), torch.rand(1, 6, 2), 64, None, False, True),
        ),
        # frozen: gradients of the matrices take a product per expert, which a graph cannot hold
        "MoEMBExperts": (
            {
                "gate_up_proj": torch.nn.Parameter(torch.randn(4, 64, 32), requires_grad=False),
                "down_proj": torch.nn.Parameter(torch.randn(4, 32, 32), requires_grad=False),
            },
            (torch.randn(6, 32), torch.randint(4, (6, 2)), torch.rand(6, 2)),
        ),
    }
    return calls


@pytest.mark.parametrize("name", sorted({layer for _, layer, _ in HOOKS.values()}))
def test_layers_that_say_so_can_be_compiled(chosen, name):
    """As one graph, with gradients."""
    attributes, inputs = compiled_calls()[name]
    layer = getattr(chosen.layers, name)()
    for key, value in attributes.items():
        setattr(layer, key, value)
    inputs = [x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    tracked = [x for x in [*inputs, *attributes.values()] if torch.is_tensor(x) and x.requires_grad]

    def outcome(run) -> list[torch.Tensor]:
        outputs = run(*inputs)
        outputs = [x for x in (outputs if isinstance(outputs, tuple) else [outputs]) if x is not None]
        loss = sum(x.pow(2).sum() for x in outputs if x.is_floating_point())
        return outputs + list(torch.autograd.grad(loss, tracked))

    assert layer.can_torch_compile
    expected = outcome(layer)
    found = outcome(torch.compile(layer, backend="aot_eager", fullgraph=True))
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted)
