"""The embedder against transformers' own model, and what a batch, a copy or a reload must never change."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModel, Qwen3_5MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeModel

from modeling_moemb import MoEMBConfig, MoEMBModel

from ..conftest import EMB_ID, IMAGE_ID
from .batches import Item, collate, mixed_items


def embed(model, items, side="right", **kwargs):
    return model(**collate(items, side), **kwargs).pooler_output


def assert_gradients_close(model, expected, tolerance=1e-5):
    """Every entry within `tolerance` of the largest entry of the whole gradient (fp32 noise is of that scale)."""
    scale = max(grad.abs().max().item() for grad in expected.values())
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= tolerance * scale, name


def unit(vectors):
    return F.normalize(vectors.float(), dim=-1)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127, 129, 1000])
def test_text_embedding_equals_stock_at_odd_lengths(stock_model, shared_model, length):
    batch = collate([Item().text(length - 1).emb()])
    with torch.no_grad():
        expected = stock_model(**batch).last_hidden_state
        actual = shared_model(**batch)
    assert (unit(actual.pooler_output) - unit(expected[:, -1])).abs().max() <= 1e-5
    assert (actual.pooler_output - expected[:, -1]).abs().max() <= 1e-5
    # the token states: 1e-5 of their scale, since the reference itself carries fp32 error over 1,000 steps
    assert (actual.last_hidden_state - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("index", range(len(mixed_items())))
def test_multimodal_embedding_equals_stock(stock_model, shared_model, index):
    batch = collate([mixed_items()[index]])
    with torch.no_grad():
        expected = stock_model(**batch).last_hidden_state[:, -1]
        actual = shared_model(**batch).pooler_output
    assert (unit(actual) - unit(expected)).abs().max() <= 1e-5


@pytest.mark.parametrize("index", range(len(mixed_items())))
def test_bf16_embedding_agrees_with_stock(tiny_settings, index):
    """At initial weights and with every expert chosen: the routers of a random model have near ties, which bf16 noise
    turns into other experts in either implementation (stock bf16 is then as far as 0.98 from stock fp32)."""
    text = {**tiny_settings["text_config"], "num_experts_per_tok": 8}
    settings = {**tiny_settings, "text_config": text}
    stock = Qwen3_5MoeModel(Qwen3_5MoeConfig(**settings)).eval()
    ours = MoEMBModel(MoEMBConfig(**settings, emb_token_id=EMB_ID)).eval()
    ours.load_state_dict(stock.state_dict())
    batch = collate([mixed_items()[index]])
    with torch.no_grad():
        theirs = unit(stock.bfloat16()(**batch).last_hidden_state[:, -1])
        mine = unit(ours.bfloat16()(**batch).pooler_output)
    assert (mine * theirs).sum() >= 0.9999


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_token_states_equal_stock(stock_model, shared_model, side):
    batch = collate(mixed_items(), side)
    alive = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = stock_model(**batch).last_hidden_state
        actual = shared_model(**batch).last_hidden_state
    assert (actual - expected)[alive].abs().max() <= 1e-5 * expected[alive].abs().max()
    assert not actual[~alive].any()


def test_batch_equals_one_by_one_whatever_side_or_order(shared_model):
    items = mixed_items()
    with torch.no_grad():
        alone = torch.cat([embed(shared_model, [item]) for item in items])
        for side in ("left", "right"):
            assert (embed(shared_model, items, side) - alone).abs().max() <= 1e-5
        order = torch.randperm(len(items)).tolist()
        assert (embed(shared_model, [items[i] for i in order]) - alone[order]).abs().max() <= 1e-5


def test_gradients_of_a_batch_equal_the_sum_of_one_by_one(tiny_model):
    items = mixed_items()
    weight = torch.randn(len(items), 64)
    (embed(tiny_model, items) * weight).sum().backward()
    together = {name: parameter.grad.clone() for name, parameter in tiny_model.named_parameters()}
    tiny_model.zero_grad()
    for item, row in zip(items, weight):
        (embed(tiny_model, [item]) * row).sum().backward()
    assert_gradients_close(tiny_model, together)


def test_gradients_equal_stock(stock_model, tiny_model):
    batch = collate([mixed_items()[5]])
    stock = copy.deepcopy(stock_model)
    weight = torch.randn(64)
    (stock(**batch).last_hidden_state[0, -1] * weight).sum().backward()
    (tiny_model(**batch).pooler_output[0] * weight).sum().backward()
    assert_gradients_close(tiny_model, {name: parameter.grad for name, parameter in stock.named_parameters()})


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_trains_in_bf16(tiny_settings, precision):
    model = MoEMBModel(MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID)).train()
    if precision == "bf16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    items, target = mixed_items(), torch.randn(8, 64)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            pooled = embed(model, items)
        loss = 1 - (unit(pooled) * unit(target)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(tiny_model, use_reentrant):
    tiny_model.train()
    items = mixed_items()
    embed(tiny_model, items).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in tiny_model.named_parameters()}
    tiny_model.zero_grad()
    tiny_model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tiny_model.enable_input_require_grads()
    calls = []
    layer = tiny_model.language_model.layers[0]
    layer.linear_attn.register_forward_hook(lambda *_: calls.append(1))
    embed(tiny_model, items).square().sum().backward()
    assert len(calls) == 2, "the block was not recomputed in the backward pass"
    assert_gradients_close(tiny_model, expected)


def test_pooled_only_gives_the_same_vectors_and_no_states(shared_model):
    items = mixed_items()
    with torch.no_grad():
        full, short = shared_model(**collate(items)), shared_model(**collate(items), pooled_only=True)
    assert short.last_hidden_state is None
    assert (full.pooler_output - short.pooler_output).abs().max() <= 1e-5


def test_pooled_only_gradients_are_exact(tiny_model):
    items = mixed_items()
    embed(tiny_model, items).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in tiny_model.named_parameters()}
    tiny_model.zero_grad()
    embed(tiny_model, items, pooled_only=True).square().sum().backward()
    assert_gradients_close(tiny_model, expected)


def test_running_after_compaction_equals_running_the_shortened_sequence(shared_model):
    """Dropping tokens between blocks by re-packing equals never having had them in the later blocks."""
    from modeling_moemb.layout_moemb import PackedLayout
    from modeling_moemb.packing_moemb import IMAGE, VIDEO, pack_batch

    batch = collate(mixed_items())
    decoder = shared_model.language_model
    packed = pack_batch(
        batch["mm_token_type_ids"],
        batch["attention_mask"],
        None,
        {IMAGE: batch["image_grid_thw"], VIDEO: batch["video_grid_thw"]},
        2,
    )
    hidden = torch.randn(packed.num_tokens, 64)
    keep = (packed.modality == 0) | (torch.rand(packed.num_tokens) < 0.4)
    small, index = packed.compact(keep)

    def run(layers, hidden, packed):
        cos, sin = decoder.rotary_emb(hidden, packed.position_ids[:, None])
        layout = PackedLayout(packed.lengths, hidden.device)
        for layer in layers:
            hidden, _ = layer(hidden, packed, layout, (cos[0], sin[0]))
        return hidden

    with torch.no_grad():
        middle = run(decoder.layers[:4], hidden, packed)
        pruned = run(decoder.layers[4:], middle[index], small)
        for item, rows in enumerate(pruned.split(small.lengths)):
            chosen = index[small.segment == item]
            alone = (
                pack_batch(
                    torch.zeros(1, len(chosen), dtype=torch.long),
                    None,
                    None,
                    {},
                    2,
                    position_ids=packed.position_ids[:, None, chosen],
                )
                if bool((packed.position_ids[0, chosen].diff() >= 0).all())
                else None
            )
            assert alone is not None
            expected = run(decoder.layers[4:], middle[chosen], alone)
            torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_packed_hidden_returns_rows_with_their_packing(shared_model):
    batch = collate(mixed_items())
    with torch.no_grad():
        padded = shared_model(**batch).last_hidden_state
        output = shared_model(**batch, packed_hidden=True)
    rows = padded.reshape(-1, 64)[output.packed.source]
    torch.testing.assert_close(output.last_hidden_state, rows)


def test_outputs_on_request(shared_model):
    batch = collate(mixed_items())
    with torch.no_grad():
        plain = shared_model(**batch)
        asked = shared_model(**batch, output_router_logits=True, output_hidden_states=True)
        as_tuple = shared_model(**batch, return_dict=False)
    assert plain.router_logits is None and plain.hidden_states is None
    assert len(asked.router_logits) == 8 and asked.router_logits[0].shape == (int(batch["attention_mask"].sum()), 8)
    assert len(asked.hidden_states) == 9
    torch.testing.assert_close(asked.hidden_states[-1], asked.last_hidden_state)
    torch.testing.assert_close(as_tuple[1], plain.pooler_output)


def test_parameter_names_are_stock(stock_model, tiny_model):
    assert set(tiny_model.state_dict()) == set(stock_model.state_dict())


def test_stock_checkpoint_loads_unchanged(stock_model, tiny_config, tmp_path):
    stock_model.save_pretrained(tmp_path, save_original_format=False)
    model, info = MoEMBModel.from_pretrained(tmp_path, config=tiny_config, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in stock_model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_checkpoint_with_one_tensor_per_expert_is_refused(stock_model, tiny_config, tmp_path):
    weights = {}
    for name, tensor in stock_model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            weights |= {name.replace("gate_up_proj", f"{e}.gate_up.weight"): t.clone() for e, t in enumerate(tensor)}
        else:
            weights[name] = tensor
    tiny_config.save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 8 tensors of routed experts .*moemb convert"):
        MoEMBModel.from_pretrained(tmp_path)


def test_save_and_reload_changes_nothing(shared_model, tmp_path):
    shared_model.save_pretrained(tmp_path)
    items = mixed_items()
    with torch.no_grad():
        expected = embed(shared_model, items)
        for loaded in (MoEMBModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
            assert isinstance(loaded, MoEMBModel) and loaded.config.emb_token_id == EMB_ID
            assert torch.equal(embed(loaded.eval(), items), expected)


def test_saved_keys_keep_the_packed_layout(shared_model, tmp_path):
    from safetensors import safe_open

    shared_model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(shared_model.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_embed_the_same(shared_model, clone):
    items = mixed_items()
    with torch.no_grad():
        assert torch.equal(embed(clone(shared_model), items), embed(shared_model, items))


def test_pooling_at_the_last_token_is_a_setting(tiny_settings, stock_model):
    model = MoEMBModel(MoEMBConfig(**tiny_settings, pooling="last")).eval()
    model.load_state_dict(stock_model.state_dict())
    batch = collate([Item().text(9), Item().text(4)], "left")
    with torch.no_grad():
        expected = stock_model(**batch).last_hidden_state[:, -1]
        assert (model(**batch).pooler_output - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("item", "number"), [(Item(ids=[1, 2, 3]), 1), (Item(ids=[EMB_ID, 4, EMB_ID]), 1), (Item(ids=[EMB_ID, 4]), 1)]
)
def test_a_missing_or_misplaced_emb_token_is_named(shared_model, item, number):
    with pytest.raises(ValueError, match=rf"item {number} must hold the `<emb>` token .* exactly once, as its last"):
        shared_model(**collate([Item().text(3).emb(), item]))


def test_adaptive_top_k_by_call_by_model_and_by_config(tiny_model):
    items = mixed_items()
    with torch.no_grad():
        full, fewer = embed(tiny_model, items), embed(tiny_model, items, adaptive_compute={"top_k": 1})
        assert (full - fewer).abs().max() > 1e-3
        tiny_model.set_adaptive_compute({"top_k": 1})
        assert torch.equal(embed(tiny_model, items), fewer)
        assert torch.equal(embed(tiny_model, items, adaptive_compute={}), full)
    budget = {"top_k": 1}
    tiny_model.set_adaptive_compute(budget)
    budget["top_k"] = 99
    assert tiny_model.config.adaptive_compute == {"top_k": 1}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"topk": 1}, ValueError, r"unknown `adaptive_compute` keys \['topk'\]"),
        ({"top_k": 3}, ValueError, "from 1 to 2"),
        ({"top_k": True}, ValueError, "from 1 to 2"),
        ({"top_k": 1.0}, ValueError, "from 1 to 2"),
        ([1], TypeError, "must be a dict"),
    ],
)
def test_wrong_budgets_are_refused(tiny_model, settings, error, message):
    with pytest.raises(error, match=message):
        embed(tiny_model, mixed_items(), adaptive_compute=settings)
    with pytest.raises(error, match=message):
        tiny_model.set_adaptive_compute(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "mean"}, "`pooling` must be one of"),
        ({"emb_token_id": 300}, "outside the vocabulary of 300"),
        ({"experts_backend": "fast"}, "`experts_backend` must be one of"),
        ({"adaptive_compute": {"top_k": 9}}, "from 1 to 2"),
    ],
)
def test_configuration_is_validated(tiny_settings, settings, message):
    with pytest.raises(ValueError, match=message):
        MoEMBConfig(**{**tiny_settings, "emb_token_id": EMB_ID, **settings})


def test_configuration_round_trip(tiny_config, tmp_path):
    tiny_config.save_pretrained(tmp_path)
    assert MoEMBConfig.from_pretrained(tmp_path).to_dict() == tiny_config.to_dict()


def test_input_embeddings_instead_of_ids(shared_model):
    batch = collate([mixed_items()[3]])
    with torch.no_grad():
        expected = shared_model(**batch).pooler_output
        embeds = shared_model.get_input_embeddings()(batch.pop("input_ids"))
        assert torch.equal(shared_model(inputs_embeds=embeds, **batch).pooler_output, expected)
    with pytest.raises(ValueError, match="exactly one of"):
        shared_model(**batch)


def test_media_types_are_derived_from_the_ids(shared_model):
    batch = collate(mixed_items())
    with torch.no_grad():
        expected = shared_model(**batch).pooler_output
        del batch["mm_token_type_ids"]
        assert torch.equal(shared_model(**batch).pooler_output, expected)


def test_vision_tower_equals_stock_on_mixed_sizes(stock_model, shared_model):
    grids = torch.tensor([[1, 8, 8], [1, 4, 6], [2, 4, 4], [1, 2, 2], [1, 8, 8]])
    pixels = torch.randn(int(grids.prod(-1).sum()), 384)
    with torch.no_grad():
        expected = stock_model.visual(pixels, grid_thw=grids).pooler_output
        torch.testing.assert_close(shared_model.visual(pixels, grids), expected, atol=1e-5, rtol=1e-5)


def test_resized_embeddings_keep_the_old_rows(tiny_model):
    before = tiny_model.get_input_embeddings().weight.clone()
    tiny_model.resize_token_embeddings(320, mean_resizing=False)
    assert torch.equal(tiny_model.get_input_embeddings().weight[:300], before)
    assert tiny_model.config.text_config.vocab_size == 320


def test_a_stock_model_class_is_not_confused_with_ours(stock_model):
    assert isinstance(stock_model, Qwen3_5MoeModel) and not isinstance(stock_model, MoEMBModel)
    assert stock_model.config.image_token_id == IMAGE_ID
