"""The compute dial in the model: what it changes, what it must never change, and every way to set it."""

import copy
import json

import pytest
import torch
from sentence_transformers import SentenceTransformer

from modeling_moemb import MoEMBConfig, MoEMBModel

from ..conftest import EMB_ID, IMAGE_ID, VIDEO_ID
from .batches import Item, collate, flatten, mixed_items
from .budgets import BUDGETS, KEEP_ALL, PRUNED, SCALES
from .embedders import some_items


def run(model, items, budget, side="right", **kwargs):
    with torch.no_grad():
        return model(**collate(items, side), adaptive_compute=budget, **kwargs)


@pytest.mark.parametrize("pooled_only", [False, True])
@pytest.mark.parametrize("name", KEEP_ALL)
def test_keeping_everything_changes_no_bit(shared_model, name, pooled_only):
    items = mixed_items()
    plain, kept = (run(shared_model, items, budget, pooled_only=pooled_only) for budget in ({}, KEEP_ALL[name]))
    assert torch.equal(kept.pooler_output, plain.pooler_output)
    if not pooled_only:
        assert torch.equal(kept.last_hidden_state, plain.last_hidden_state)


@pytest.mark.parametrize("name", BUDGETS)
def test_an_item_does_not_depend_on_its_batch(shared_model, name):
    items, budget = mixed_items()[:7], BUDGETS[name]
    alone = [run(shared_model, [item], budget, output_compute=True) for item in items]
    assert (
        run(shared_model, items, {}).pooler_output - torch.cat([a.pooler_output for a in alone])
    ).abs().max() > 1e-3
    for side, order in (("right", range(7)), ("left", torch.randperm(7).tolist())):
        shuffled = [items[index] for index in order]
        batch = run(shared_model, shuffled, budget, side, output_compute=True)
        alive = collate(shuffled, side)["attention_mask"].bool()
        for row, index in enumerate(order):
            single = alone[index]
            assert torch.equal(batch.keep_mask[row][alive[row]], single.keep_mask[0])
            assert (batch.pooler_output[row] - single.pooler_output[0]).abs().max() <= 1e-5
            states = batch.last_hidden_state[row][alive[row]]
            assert (states - single.last_hidden_state[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", BUDGETS)
def test_pooled_only_and_flattened_batches_give_the_same_vectors(shared_model, name):
    items, budget = mixed_items(), BUDGETS[name]
    full = run(shared_model, items, budget).pooler_output
    assert (run(shared_model, items, budget, pooled_only=True).pooler_output - full).abs().max() <= 1e-5
    with torch.no_grad():
        flat = shared_model(**flatten(items), adaptive_compute=budget).pooler_output
    assert (flat - full).abs().max() <= 1e-5


def stock_blocks(stock_model, first: int, hidden, positions):
    """transformers' own blocks from `first` on, and its norm, over one sequence with given rotary positions."""
    decoder = stock_model.language_model
    embeddings = decoder.rotary_emb(hidden, positions)
    for layer in decoder.layers[first:]:
        hidden = layer(hidden, position_embeddings=embeddings, attention_mask=None, position_ids=None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return decoder.norm(hidden)


@pytest.mark.parametrize("index", [2, 3, 5])
@pytest.mark.parametrize("name", PRUNED)
def test_pruned_blocks_equal_stock_blocks_on_the_shortened_sequence(stock_model, shared_model, name, index):
    """Dropped is removed: attention, delta rule and convolution run as if the tokens had never been there."""
    item, budget = mixed_items()[index], PRUNED[name]
    layer = budget["token_pruning"]["layer"]
    output = run(shared_model, [item], budget, output_compute=True, output_hidden_states=True, packed_hidden=True)
    keep = output.keep_mask[0]
    with torch.no_grad():
        full = shared_model(**collate([item]), adaptive_compute={}, output_hidden_states=True, packed_hidden=True)
        hidden, positions = full.hidden_states[layer][:, keep], full.packed.position_ids[:, None, keep]
        expected = stock_blocks(stock_model, layer, hidden, positions)
    assert torch.equal(output.hidden_states[layer][:, keep], hidden)
    actual = run(shared_model, [item], budget).last_hidden_state
    scale = expected.abs().max()
    assert (actual[:, keep] - expected).abs().max() <= 1e-5 * scale
    assert not actual[:, ~keep].any()
    if not bool(keep.all()):  # the convolution of the full sequence saw other neighbours
        masked = full.last_hidden_state[keep] if full.last_hidden_state.dim() == 2 else full.last_hidden_state[:, keep]
        assert (masked - expected).abs().max() > 1e-3 * scale


@pytest.mark.parametrize("length", [63, 64, 65, 127, 129])
def test_odd_lengths_after_pruning(stock_model, shared_model, length):
    """The survivors fill a chunk of the delta rule exactly, or miss it by one."""
    item, budget = Item().text(length - 7 - 3).image(16, 16).emb(), {"token_pruning": {"layer": 4, "budget": 7}}
    keep = run(shared_model, [item], budget, output_compute=True).keep_mask[0]
    assert keep.sum() == length
    with torch.no_grad():
        full = shared_model(**collate([item]), adaptive_compute={}, output_hidden_states=True, packed_hidden=True)
        positions = full.packed.position_ids[:, None, keep]
        expected = stock_blocks(stock_model, 4, full.hidden_states[4][:, keep], positions)
    for batch in ([item], [*mixed_items()[:3], item]):
        actual = run(shared_model, batch, budget).pooler_output[-1]
        assert (actual - expected[0, -1]).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", PRUNED)
def test_text_and_emb_are_never_dropped(shared_model, name):
    items = mixed_items()
    batch = collate(items)
    output = run(shared_model, items, PRUNED[name], output_compute=True)
    visual = batch["mm_token_type_ids"] > 0
    alive = batch["attention_mask"].bool()
    assert bool(output.keep_mask[alive & ~visual].all())
    assert not output.keep_mask[~alive].any() and not output.keep_mask[visual].all()
    assert not output.last_hidden_state[~output.keep_mask].any()
    assert bool(output.last_hidden_state[output.keep_mask].any(-1).all())


def brute_force_beta(model, hidden_states, layers):
    """Mean write strength over Gated DeltaNet blocks and heads, from the states before each block."""
    total, seen = 0, 0
    for block in range(layers):
        layer = model.language_model.layers[block]
        if layer.block_type != "linear_attention":
            continue
        states = hidden_states[block].double()
        normed = states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        normed = normed * (1 + layer.input_layernorm.weight.double())
        total = total + torch.sigmoid(normed @ layer.linear_attn.in_proj_b.weight.double().T).mean(-1)
        seen += 1
    return total / seen


@pytest.mark.parametrize("layer", [1, 2, 4, 6])
def test_the_score_is_the_mean_beta_of_the_blocks_before(shared_model, layer):
    items, budget = mixed_items(), {"token_pruning": {"layer": layer, "keep": 0.4}}
    output = run(shared_model, items, budget, output_compute=True, output_beta=True, output_hidden_states=True)
    score = brute_force_beta(shared_model, output.hidden_states, layer)
    kinds = [index for index, kind in enumerate(shared_model.config.text_config.layer_types) if kind[0] == "l"]
    before = [beta for block, beta in zip(kinds, output.beta) if block < layer]
    alive = collate(items)["attention_mask"].bool()
    assert torch.stack(before).mean((0, -1)).dtype == torch.float32 and len(output.beta) == 6
    torch.testing.assert_close(torch.stack(before).mean((0, -1))[alive].double(), score[alive], atol=1e-6, rtol=1e-5)
    for row, item in enumerate(items):
        for token in (IMAGE_ID, VIDEO_ID):
            places = [place for place, id in enumerate(item.ids) if id == token]
            kept = sorted(places, key=lambda place: -score[row, place].item())[: -(-4 * len(places) // 10)]
            assert [place for place in places if output.keep_mask[row, place]] == sorted(kept)


def test_beta_is_zero_where_no_token_is_alive(shared_model):
    output = run(shared_model, mixed_items(), PRUNED["beta"], output_beta=True, output_compute=True)
    alive = collate(mixed_items())["attention_mask"].bool()
    for block, beta in zip([0, 1, 2, 4, 5, 6], output.beta):
        assert beta.shape[-1] == 4
        assert torch.equal(beta.any(-1), output.keep_mask if block >= 4 else alive)


def test_tiers_give_more_experts_to_a_higher_beta(shared_model):
    """Within an item and modality, among the tokens alive; `<emb>` keeps its own number."""
    items, calls = mixed_items(), []
    budget = {"tiered_top_k": {"layer": 3, "min": 1}, "token_pruning": {"layer": 5, "keep": 0.5, "score": "uniform"}}
    handles = [
        layer.mlp.experts.register_forward_hook(lambda module, inputs, output: calls.append(inputs[1]))
        for layer in shared_model.language_model.layers
    ]
    output = run(shared_model, items, budget, output_beta=True, output_compute=True)
    for handle in handles:
        handle.remove()
    score = torch.stack(output.beta[:3]).mean((0, -1))
    batch = collate(items)
    for block, chosen in enumerate(calls):
        alive = output.keep_mask if block >= 5 else batch["attention_mask"].bool()
        experts = torch.zeros(alive.shape, dtype=torch.long)
        experts[alive] = (chosen < 8).sum(1)
        for row in range(len(items)):
            (length,) = alive[row].nonzero()[-1].tolist()
            assert experts[row, length] == 2
            for kind in range(3):
                tokens = alive[row] & (batch["mm_token_type_ids"][row] == kind)
                places = tokens.nonzero().flatten().tolist()
                places = sorted(set(places) - {length}, key=lambda place: (-score[row, place].item(), place))
                half = (len(places) + 1) // 2 if block >= 3 else len(places)
                assert [int(experts[row, place]) for place in places] == [2] * half + [1] * (len(places) - half)


def test_attention_is_computed_for_its_control_alone(shared_model, monkeypatch):
    calls = []
    from modeling_moemb import decoder_moemb

    inner = decoder_moemb.received_attention
    monkeypatch.setattr(decoder_moemb, "received_attention", lambda *a: calls.append(1) or inner(*a))
    for name, budget in BUDGETS.items():
        calls.clear()
        run(shared_model, mixed_items(), budget)
        assert len(calls) == (name == "attention"), name


def test_random_draws_differ_between_items_and_seeds(shared_model):
    pictures = [Item().image(8, 8).emb() for _ in range(4)]
    masks = {}
    for seed in (0, 1):
        budget = {"token_pruning": {"layer": 4, "keep": 0.5, "score": "random"}, "seed": seed}
        masks[seed] = run(shared_model, pictures, budget, output_compute=True).keep_mask
        assert torch.equal(run(shared_model, pictures, budget, output_compute=True).keep_mask, masks[seed])
    rows = torch.cat(list(masks.values()))
    assert len({tuple(row) for row in rows.tolist()}) == 8
    vectors = [run(shared_model, pictures, {"random_k": 1, "seed": seed}).pooler_output for seed in (0, 1)]
    assert (vectors[0] - vectors[1]).abs().max() > 1e-3


def test_random_draws_from_embeddings(shared_model):
    """Without ids the bits of the embeddings tell items apart."""
    batch = collate(mixed_items())
    ids = batch.pop("input_ids")
    with torch.no_grad():
        embeds = shared_model.get_input_embeddings()(ids)
        output = shared_model(**batch, inputs_embeds=embeds, adaptive_compute=BUDGETS["random"], output_compute=True)
    visual = (batch["mm_token_type_ids"] > 0).sum(1)
    assert bool((output.keep_mask & (batch["mm_token_type_ids"] > 0)).sum(1).lt(visual)[visual > 1].all())


def test_a_scale_of_zero_bypasses_the_routed_experts_of_a_layer(tiny_model):
    """What calibration measures: everything else, shared expert included, stays."""
    items, scales = mixed_items(), [1.0] * 8
    scales[5] = 0.0
    bypass = {"modes": {"tau": 1e-9, "layer_scales": scales, "min_experts_emb": 0}}
    actual = run(tiny_model, items, bypass, output_compute=True)
    assert actual.compute.expert_pairs[5].sum() == 0 and bool((actual.compute.expert_pairs.sum(1)[[4, 6]] > 0).all())
    with torch.no_grad():
        tiny_model.language_model.layers[5].mlp.experts.down_proj.zero_()
    assert (actual.pooler_output - run(tiny_model, items, {}).pooler_output).abs().max() <= 1e-5


def test_a_threshold_skips_more_as_it_rises_and_spares_emb(shared_model):
    items, counts = mixed_items(), []
    for tau in (0.0, 0.02, 0.04, 0.06, 0.08, 1.0):
        record = run(shared_model, items, {"modes": {"tau": tau, "layer_scales": SCALES}}, output_compute=True).compute
        counts.append(int(record.expert_pairs.sum()))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[4] > counts[5]
    assert counts[5] == 8 * len(items)  # one expert per block for each `<emb>`


def test_one_threshold_per_modality(shared_model):
    record = run(shared_model, mixed_items(), {"modes": {"tau": {"image": 9.0}}}, output_compute=True).compute
    tokens = record.tokens
    assert not record.expert_pairs[:, 1].any()
    assert torch.equal(record.expert_pairs[:, [0, 2]], 2 * tokens[:, [0, 2]])


def test_skipping_equals_zero_weights_and_removal_equals_masked_logits(tiny_model):
    """Work not routed is not done: the same as running it and ignoring it."""
    items, moe = mixed_items(), tiny_model.language_model.layers[2].mlp
    states = torch.randn(50, 64)
    from modeling_moemb.routing_moemb import Routing, route

    def drop(routing: Routing) -> Routing:
        return routing.skip(routing.expert_index == 3)

    with torch.no_grad():
        routing = route(moe.gate(states), 2, torch.float32)
        weights = routing.weight.masked_fill(routing.expert_index == 3, 0)
        shared = torch.sigmoid(moe.shared_expert_gate(states)) * moe.shared_expert(states)
        expected = moe.experts(states, routing.expert_index, weights) + shared
        assert (moe(states, drop)[0] - expected).abs().max() <= 1e-5
        budget = {"per_modality": {"text": 1, "image": 1, "video": 1}}
        one = run(tiny_model, items, budget).pooler_output
        assert (run(tiny_model, items, {"top_k": 1}).pooler_output - one).abs().max() <= 1e-5


def test_top_k_is_setting_the_number_of_experts(tiny_settings, stock_model, shared_model):
    text = {**tiny_settings["text_config"], "num_experts_per_tok": 1}
    model = MoEMBModel(MoEMBConfig(**{**tiny_settings, "text_config": text}, emb_token_id=EMB_ID)).eval()
    model.load_state_dict(stock_model.state_dict())
    items = mixed_items()
    expected = run(model, items, {}).pooler_output
    assert (run(shared_model, items, {"top_k": 1}).pooler_output - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["everything", "attention", "random_k"])
def test_half_precision(tiny_model, name):
    output = run(tiny_model.bfloat16(), mixed_items(), BUDGETS[name], output_compute=True)
    assert output.pooler_output.isfinite().all() and output.pooler_output.dtype == torch.bfloat16


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_budget_does_not_break_training(tiny_model, checkpointing):
    tiny_model.train()
    if checkpointing:
        tiny_model.gradient_checkpointing_enable({"use_reentrant": False})
    tiny_model.set_adaptive_compute(BUDGETS["everything"])
    tiny_model(**collate(mixed_items())).pooler_output.square().sum().backward()
    gradients = [parameter.grad for parameter in tiny_model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_nothing_extra_is_returned_unasked(shared_model):
    output = run(shared_model, mixed_items(), BUDGETS["everything"])
    assert output.compute is None and output.keep_mask is None and output.beta is None
    assert list(output.keys()) == ["last_hidden_state", "pooler_output"]


def test_packed_rows_are_those_of_the_survivors(shared_model):
    items = mixed_items()
    padded = run(shared_model, items, BUDGETS["beta"], output_compute=True)
    packed = run(shared_model, items, BUDGETS["beta"], packed_hidden=True)
    assert packed.packed.num_tokens == padded.keep_mask.sum() == len(packed.last_hidden_state)
    assert torch.equal(padded.last_hidden_state.reshape(-1, 64)[packed.packed.source], packed.last_hidden_state)


@pytest.mark.parametrize("name", ["everything", "modes of two thresholds", "random"])
def test_every_way_to_set_a_budget(tiny_model, name, tmp_path):
    items, budget = mixed_items(), BUDGETS[name]
    by_call, full = (run(tiny_model, items, given).pooler_output for given in (budget, {}))
    mine = copy.deepcopy(budget)
    tiny_model.set_adaptive_compute(mine)
    next(part for part in mine.values() if isinstance(part, dict)).clear()  # the model holds a copy
    assert torch.equal(run(tiny_model, items, None).pooler_output, by_call)
    assert torch.equal(run(tiny_model, items, {}).pooler_output, full)
    tiny_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["adaptive_compute"] == budget
    loaded = MoEMBModel.from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded, items, None).pooler_output, by_call)
    tiny_model.set_adaptive_compute(None)
    assert torch.equal(run(tiny_model, items, None).pooler_output, full)


def test_sentence_transformers_route(embedder, vectors, tmp_path):
    budget = {"token_pruning": {"layer": 4, "keep": 0.5, "scope": "image"}, "modes": {"tau": 0.05}}
    cheaper = embedder.encode(some_items(), adaptive_compute=budget)
    assert abs(cheaper - vectors).max() > 1e-3
    assert abs(embedder.encode(some_items()[2], adaptive_compute=budget) - cheaper[2]).max() <= 1e-5
    with pytest.raises(ValueError, match=r"\['token_pruning'\]\['keep'\]` must be a number above 0"):
        embedder.encode(["a"], adaptive_compute={"token_pruning": {"layer": 4, "keep": 0}})
    embedder.save(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"adaptive_compute": budget}))
    saved = SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    assert abs(saved.encode(some_items()) - cheaper).max() <= 1e-5
