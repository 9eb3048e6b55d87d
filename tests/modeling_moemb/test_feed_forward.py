"""Fixed routers, and a router without a shared expert, against plain loops and the stock dense model."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.feed_forward_moemb import MoEMBDenseBlock, MoEMBModalityBlock

from ..conftest import EMB_ID
from .batches import collate, mixed_items


WIDTH = 48
FIXED = {
    "modality": {"num_experts": 3, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0},
    "dense": {"num_experts": 1, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 0},
}


def design_settings(tiny_settings, feed_forward, **changes):
    text = FIXED.get(feed_forward, {"shared_expert_intermediate_size": 0}) | {"moe_intermediate_size": WIDTH}
    return tiny_settings | {
        "text_config": tiny_settings["text_config"] | text | changes,
        "feed_forward": feed_forward,
        "emb_token_id": EMB_ID,
    }


def build(tiny_settings, feed_forward) -> MoEMBModel:
    torch.manual_seed(3)
    model = MoEMBModel(MoEMBConfig(**design_settings(tiny_settings, feed_forward))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def models(tiny_settings):
    return {kind: build(tiny_settings, kind) for kind in ("moe", "modality", "dense")}


def network(hidden, gate_up, down):
    gate, up = F.linear(hidden, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def test_modality_block_sends_each_token_to_the_expert_of_its_kind(models):
    block = models["modality"].language_model.layers[0].mlp
    assert isinstance(block, MoEMBModalityBlock)
    hidden, modality = torch.randn(40, 64), torch.randint(0, 3, (40,))
    output, logits = block(hidden, None, modality)
    experts = block.experts
    expected = torch.stack(
        [network(h, experts.gate_up_proj[m], experts.down_proj[m]) for h, m in zip(hidden, modality.tolist())]
    )
    assert logits is None
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_a_router_without_a_shared_expert(models):
    block = models["moe"].language_model.layers[0].mlp
    assert not any("shared" in name for name, _ in block.named_parameters())
    hidden = torch.randn(20, 64)
    output, logits = block(hidden)
    weight, index = logits.softmax(-1).topk(2, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    for token in range(20):
        expected = sum(
            weight[token, slot] * network(hidden[token], block.experts.gate_up_proj[e], block.experts.down_proj[e])
            for slot, e in enumerate(index[token].tolist())
        )
        torch.testing.assert_close(output[token], expected, atol=1e-5, rtol=1e-5)


def test_dense_model_is_the_stock_dense_model(models, tiny_settings):
    """Parameter names and states, on text, images and video."""
    text = {k: v for k, v in tiny_settings["text_config"].items() if "expert" not in k and "moe" not in k}
    stock = Qwen3_5Model(Qwen3_5Config(**tiny_settings | {"text_config": text | {"intermediate_size": WIDTH}})).eval()
    ours = models["dense"]
    assert set(stock.state_dict()) == set(ours.state_dict())
    stock.load_state_dict(ours.state_dict())
    for item in mixed_items():
        batch = collate([item])
        with torch.no_grad():
            state = stock(**batch, use_cache=False).last_hidden_state[:, -1]
            vector = ours(**batch).pooler_output
        torch.testing.assert_close(F.normalize(vector), F.normalize(state), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["moe", "modality", "dense"])
def test_packed_equals_one_by_one_and_pooled_only(models, kind):
    model, items = models[kind], mixed_items()
    with torch.no_grad():
        whole = model(**collate(items, "left")).pooler_output
        pooled = model(**collate(items), pooled_only=True).pooler_output
        single = torch.cat([model(**collate([item])).pooler_output for item in items])
    torch.testing.assert_close(whole, single, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(pooled, single, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["moe", "modality", "dense"])
def test_saved_and_reloaded_equals(models, kind, tmp_path):
    models[kind].save_pretrained(tmp_path)
    loaded, info = MoEMBModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.feed_forward == kind
    batch = collate(mixed_items())
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).pooler_output, models[kind](**batch).pooler_output)


@pytest.mark.parametrize("kind", ["modality", "dense"])
def test_the_dial_drops_tokens_and_counts_what_was_executed(models, kind):
    model, batch = models[kind], collate(mixed_items())
    budget = {"token_pruning": {"layer": 4, "keep": 0.5}}
    with torch.no_grad():
        full = model(**batch, output_compute=True, output_router_logits=True)
        pruned = model(**batch, output_compute=True, adaptive_compute=budget)
    assert full.router_logits == ()
    assert torch.equal(full.compute.expert_pairs, full.compute.tokens)  # one expert, or the network, per token
    flops = count_flops(model.config, full.compute)
    rows = int(full.compute.tokens.sum())
    assert flops.router == flops.shared == 0
    assert flops.experts == 2 * 3 * 64 * WIDTH * rows
    assert 0.05 < count_flops(model.config, pruned.compute).removed_from(flops)["moe"] < 0.5
    if kind == "modality":  # expert e sees modality e alone
        load = full.compute.expert_load.sum(0)
        assert torch.equal(load, torch.diag(load.diagonal()))


def test_a_skipped_token_runs_no_dense_network(models):
    block = models["dense"].language_model.layers[0].mlp
    assert isinstance(block, MoEMBDenseBlock)
    hidden, skip = torch.randn(9, 64), torch.arange(9) % 3 == 0
    output, _ = block(hidden, lambda routing: routing.skip(skip[:, None]))
    assert torch.equal(output[skip], torch.zeros(3, 64))
    torch.testing.assert_close(output[~skip], block(hidden)[0][~skip])


def test_gradients_reach_every_parameter(models):
    for kind in ("moe", "modality", "dense"):
        model = models[kind].train()
        model(**collate(mixed_items())).last_hidden_state.square().sum().backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        model.zero_grad()
        model.eval()
        assert [name for name in missing if "embed_tokens" not in name] == []


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("modality", {"num_experts": 4}, "`feed_forward='modality'` goes with `num_experts=3`"),
        ("dense", {"shared_expert_intermediate_size": 8}, "goes with .*`shared_expert_intermediate_size=0`"),
        ("sparse", {}, "`feed_forward` must be one of"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(tiny_settings, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        MoEMBConfig(**design_settings(tiny_settings, kind, **changes))


def test_configurations_from_before_are_read_as_native(tiny_config, tmp_path):
    tiny_config.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for name in ("feed_forward", "task_conditioning"):
        settings.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert MoEMBConfig.from_pretrained(tmp_path).feed_forward == "moe"


def test_weights_of_another_design_are_refused(models, tmp_path, tiny_settings):
    models["dense"].save_pretrained(tmp_path)
    config = MoEMBConfig(**design_settings(tiny_settings, "modality"))
    with pytest.raises(ValueError, match="lacks 16 tensors of routed experts or the dense network"):
        MoEMBModel.from_pretrained(tmp_path, config=config)
