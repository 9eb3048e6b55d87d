"""What surrounds a model in practice: initialisation, adapters, offloading, compilation, broken neighbours."""

import copy

import pytest
import torch
from transformers import Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.experts_moemb import MoEMBExperts

from ..conftest import EMB_ID, TEXT_IDS
from .batches import Item, collate, mixed_items


def embed(model, items, **kwargs):
    return model(**collate(items), **kwargs).pooler_output


def test_a_new_model_is_initialised_like_stock(tiny_settings):
    torch.manual_seed(0)
    stock = Qwen3_5MoeModel(Qwen3_5MoeConfig(**tiny_settings)).state_dict()
    model = MoEMBModel(MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID)).state_dict()
    for name, tensor in stock.items():
        if tensor.numel() > 100:
            # the spread of two samples' deviations is 1 / sqrt(count) of it
            assert abs(model[name].std() - tensor.std()) <= 5 * tensor.numel() ** -0.5 * tensor.std(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_item_that_holds_nan_does_not_reach_its_neighbours(tiny_model, value):
    items = [
        Item().text(3).emb(),
        Item(ids=[5, TEXT_IDS]).text(1).emb(),
        Item().text(1).emb(),
        Item().image(4, 4).emb(),
    ]
    clean = embed(tiny_model, items)
    with torch.no_grad():
        tiny_model.get_input_embeddings().weight[TEXT_IDS] = value
    broken = embed(tiny_model, items)
    assert not broken[1].isfinite().all()
    torch.testing.assert_close(broken[[0, 2, 3]], clean[[0, 2, 3]])


def test_the_configured_activation_is_used(tiny_settings):
    settings = {**tiny_settings, "text_config": {**tiny_settings["text_config"], "hidden_act": "gelu"}}
    stock = Qwen3_5MoeModel(Qwen3_5MoeConfig(**settings)).eval()
    model = MoEMBModel(MoEMBConfig(**settings, emb_token_id=EMB_ID)).eval()
    model.load_state_dict(stock.state_dict())
    batch = collate([Item().text(9).image(4, 4).emb()])
    with torch.no_grad():
        expected = stock(**batch).last_hidden_state[:, -1]
        assert (model(**batch).pooler_output - expected).abs().max() <= 1e-5


def test_offloaded_weights_embed_the_same(tiny_model):
    accelerate = pytest.importorskip("accelerate")
    with torch.no_grad():
        items = mixed_items()[:4]
        expected = embed(tiny_model, items)
        offloaded = accelerate.cpu_offload(copy.deepcopy(tiny_model), execution_device=torch.device("cpu"))
        assert offloaded.language_model.layers[0].linear_attn.conv1d.weight.is_meta
        torch.testing.assert_close(embed(offloaded, items), expected)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj", "in_proj_qkv", "out_proj", "shared_expert.down_proj"]},
        {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"target_modules": ["proj"], "target_parameters": ["mlp.gate.weight"]},  # patch projection and routers
    ],
)
def test_adapters_train_and_merge(tiny_model, targets):
    peft = pytest.importorskip("peft")
    items = mixed_items()
    adapted = peft.get_peft_model(tiny_model, peft.LoraConfig(r=2, lora_alpha=16, init_lora_weights=False, **targets))
    expected = embed(adapted.eval(), items)
    expected.square().mean().backward()
    for name, parameter in adapted.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name
    torch.testing.assert_close(embed(adapted.merge_and_unload(), items), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_for_feature_extraction_embeds_the_same(tiny_model):
    peft = pytest.importorskip("peft")
    items = mixed_items()
    with torch.no_grad():
        expected = embed(tiny_model, items)
        settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=peft.TaskType.FEATURE_EXTRACTION)
        assert torch.equal(embed(peft.get_peft_model(tiny_model, settings).eval(), items), expected)


def test_experts_compile_in_fp32(tiny_config):
    experts = MoEMBExperts(tiny_config.text_config, "grouped")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    inputs = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(experts, backend="eager")(*inputs), experts(*inputs))
