"""FLOPs: the published figures, the layers' own sizes, and runs against shapes."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3_5MoeConfig

from modeling_moemb.compute_moemb import (
    ComputeRecord,
    Flops,
    ItemShape,
    UnitMacs,
    count_flops,
    record_of_shapes,
)

from ..conftest import EMB_ID, IMAGE_ID, VIDEO_ID
from .batches import Item, collate, mixed_items
from .budgets import BUDGETS, EXPERTS, KEEP_ALL, PRUNED


def real_config(**changes) -> SimpleNamespace:
    """The widths of the 35B checkpoint, which are transformers' defaults, or of another one."""
    text = {**Qwen3_5MoeConfig().text_config.to_dict(), "num_hidden_layers": 40, "layer_types": None, **changes}
    config = Qwen3_5MoeConfig(text_config=text, vision_config={"out_hidden_size": text["hidden_size"]})
    config.adaptive_compute = None
    return config


CHANGES_122B = {
    "hidden_size": 3072,
    "num_hidden_layers": 48,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_attention_heads": 32,
    "linear_num_value_heads": 64,
}
# millions of multiply-accumulates per token and block, per token of the decoder, per merged vision token
PUBLISHED = [
    ({}, (35.82, 27.26, 0.52, 3.146, 3.148), 2501, 1682),
    (CHANGES_122B, (92.72, 78.64, 0.79, 9.437, 9.440), 8396, 1687),
]


@pytest.mark.parametrize(("changes", "parts", "decoder", "vision"), PUBLISHED, ids=["35B", "122B"])
def test_work_per_token_at_the_real_widths(changes, parts, decoder, vision):
    config = real_config(**changes)
    unit = UnitMacs.of(config)
    attention = unit.attention_queries + unit.attention_keys
    values = (unit.delta_net, attention, unit.router, unit.expert, unit.shared)
    for value, published in zip(values, parts):
        assert value / 1e6 == pytest.approx(published, abs=0.6 * 10 ** -len(str(published).split(".")[1]))
    one = count_flops(config, record_of_shapes(config, [ItemShape(1)]))
    assert (one.decoder - one.attention) / 2e6 == pytest.approx(decoder, abs=0.7)
    assert (4 * unit.patch + unit.merged) / 1e6 == pytest.approx(vision, abs=1)


@pytest.mark.parametrize(
    ("budget", "published"),
    [
        ({"top_k": 4}, 11.67),
        ({"token_pruning": {"layer": 4, "keep": 0.5}}, 22.76),
        ({"token_pruning": {"layer": 4, "keep": 0.3}}, 31.82),
    ],
)
def test_published_savings(budget, published):
    """400 visual and 64 text tokens at the widths of the 35B checkpoint: the figures of the paper."""
    config, item = real_config(), ItemShape(64, images=[(40, 40)])
    full, saved = (count_flops(config, record_of_shapes(config, [item], given)) for given in ({}, budget))
    assert 100 * saved.removed_from(full)["total"] == pytest.approx(published, abs=0.005)
    assert saved.vision == full.vision and saved.merger == full.merger


def test_work_per_token_is_the_size_of_the_layers(shared_model):
    """A matrix product costs its weight's size per row: the formulas against the modules themselves."""
    unit, text = UnitMacs.of(shared_model.config), shared_model.config.text_config
    layers = shared_model.language_model.layers

    def size(module, *names):
        return sum(p.numel() for n, p in module.named_parameters() if p.ndim > 1 and any(name in n for name in names))

    state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
    assert unit.delta_net == size(layers[0].linear_attn, "") + 4 * state
    assert unit.attention_queries == size(layers[3].self_attn, "q_proj", "o_proj")
    assert unit.attention_keys == size(layers[3].self_attn, "k_proj", "v_proj")
    assert unit.router == size(layers[0].mlp.gate, "")
    assert unit.expert * text.num_experts == size(layers[0].mlp.experts, "")
    assert unit.shared == size(layers[0].mlp, "shared_expert")
    assert unit.patch == size(shared_model.visual, "blocks", "patch_embed")
    assert unit.merged == size(shared_model.visual.merger, "")


def brute_force(config, item: Item, kept: list[int], pairs: int) -> int:
    """Total FLOPs of one item, token by token; `kept[block]` tokens are alive, `pairs` run in all."""
    unit, total = UnitMacs.of(config), pairs * UnitMacs.of(config).expert
    for block, alive in enumerate(kept):
        for place in range(alive):
            total += unit.router + unit.shared
            if config.text_config.layer_types[block] == "linear_attention":
                total += unit.delta_net
            else:
                total += unit.attention_queries + unit.attention_keys + unit.attention_pair * (place + 1)
    for time, height, width in [*item.images, *item.videos]:
        for _ in range(time * height * width):
            total += unit.patch + unit.patch_pair * height * width
        total += unit.merged * (time * height * width // 4)
    return 2 * total


@pytest.mark.parametrize("index", range(len(mixed_items())))
@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_one_item_equals_counting_token_by_token(tiny_config, index, keep):
    item, budget = mixed_items()[index], {"token_pruning": {"layer": 4, "keep": keep}}
    images, videos = item.ids.count(IMAGE_ID), item.ids.count(VIDEO_ID)
    text = len(item.ids) - images - videos
    short = text + math.ceil(keep * images) + math.ceil(keep * videos)
    kept = [len(item.ids)] * 4 + [short] * 4
    counted = count_flops(tiny_config, record_of_shapes(tiny_config, [shape_of(item)], budget))
    assert counted.total == brute_force(tiny_config, item, kept, 2 * sum(kept))


def shape_of(item: Item) -> ItemShape:
    visual = item.ids.count(IMAGE_ID) + item.ids.count(VIDEO_ID)
    return ItemShape(len(item.ids) - visual, [grid[1:] for grid in item.images], item.videos)


@pytest.mark.parametrize("pooled_only", [False, True])
@pytest.mark.parametrize("name", ["full", *BUDGETS, *KEEP_ALL])
def test_a_run_executes_what_its_shapes_say(shared_model, name, pooled_only):
    items, budget = mixed_items(), ({"full": {}} | BUDGETS | KEEP_ALL)[name]
    with torch.no_grad():
        run = shared_model(
            **collate(items), adaptive_compute=budget, pooled_only=pooled_only, output_compute=True
        ).compute
    measured = run.expert_pairs if "modes" in budget else None
    record = record_of_shapes(shared_model.config, list(map(shape_of, items)), budget, pooled_only, measured)
    assert run.lengths == record.lengths
    assert torch.equal(run.tokens, record.tokens)
    assert torch.equal(run.expert_pairs, record.expert_pairs)
    assert sorted(run.grids) == sorted(record.grids) and run.pooled_only == record.pooled_only
    assert count_flops(shared_model.config, run) == count_flops(shared_model.config, record)
    assert torch.equal(run.expert_load.sum(-1), run.expert_pairs)


@pytest.mark.parametrize("name", PRUNED | EXPERTS)
def test_every_budget_saves_where_it_acts(shared_model, name):
    items = mixed_items()
    with torch.no_grad():
        full, saved = (
            count_flops(shared_model.config, shared_model(**collate(items), **given, output_compute=True).compute)
            for given in ({}, {"adaptive_compute": BUDGETS[name]})
        )
    removed = saved.removed_from(full)
    assert removed["moe"] > 0 and removed["decoder"] > removed["total"] > 0
    assert (saved.mixers < full.mixers) == (name in PRUNED) == (saved.router < full.router)


def test_the_record_equals_counting_the_routing(shared_model):
    """Pairs by block, modality and expert against the router logits."""
    batch = collate(mixed_items())
    with torch.no_grad():
        output = shared_model(**batch, output_compute=True, output_router_logits=True)
    modality = batch["mm_token_type_ids"][batch["attention_mask"].bool()]
    for block, logits in enumerate(output.router_logits):
        expected = torch.zeros(3, 8, dtype=torch.long)
        for token, chosen in enumerate(logits.topk(2).indices.tolist()):
            for expert in chosen:
                expected[modality[token], expert] += 1
        assert torch.equal(output.compute.expert_load[block], expected)


def test_pooled_only_counts_the_last_block_for_the_pooled_tokens(tiny_config):
    items, unit = [ItemShape(10), ItemShape(1)], UnitMacs.of(tiny_config)
    whole, pooled = (count_flops(tiny_config, record_of_shapes(tiny_config, items, None, p)) for p in (False, True))
    spared = 9 * (unit.attention_queries + unit.router + unit.shared + 2 * unit.expert)
    spared += unit.attention_pair * (10 * 11 // 2 + 1 - 10 - 1)
    assert whole.decoder - pooled.decoder == 2 * spared


@pytest.mark.parametrize("pooled_only", [False, True])
def test_the_skip_rate_is_the_share_of_pairs_not_run(tiny_config, pooled_only):
    items = [ItemShape(10), ItemShape(3, images=[(4, 4)])]
    rates = [
        record_of_shapes(tiny_config, items, budget, pooled_only).skip_rate(2)
        for budget in ({}, {"top_k": 1}, {"token_pruning": {"layer": 4, "keep": 0.5}})
    ]
    assert rates == [0, 0.5, 0]  # a dropped token is no skipped expert


def test_the_budget_of_the_configuration_counts_when_none_is_given(tiny_config):
    config = type(tiny_config)(**{**tiny_config.to_dict(), "adaptive_compute": {"top_k": 1}, "emb_token_id": EMB_ID})
    own, full, given = (record_of_shapes(config, [ItemShape(5)], budget) for budget in (None, {}, {"top_k": 1}))
    assert torch.equal(own.expert_pairs, given.expert_pairs) and not torch.equal(own.expert_pairs, full.expert_pairs)


def test_sums_are_formed_before_ratios():
    total = Flops(vision=1, mixers=2, experts=3) + Flops(merger=1, attention=1, router=1, shared=1)
    assert (total.total, total.decoder, total.moe) == (10, 8, 5)
    half = Flops(vision=1, merger=1, experts=3)
    assert half.removed_from(total) == {"total": 0.5, "decoder": 1 - 3 / 8, "moe": 1 - 3 / 5}


def test_shapes_do_not_tell_what_a_threshold_skips(tiny_config):
    with pytest.raises(ValueError, match="pass `expert_pairs`"):
        record_of_shapes(tiny_config, [ItemShape(3)], {"modes": {"tau": {"image": 0.1}}})
    with pytest.raises(ValueError, match="from 1 to 2"):
        record_of_shapes(tiny_config, [ItemShape(3)], {"top_k": 5})


def test_an_empty_record_costs_nothing(tiny_config):
    assert count_flops(tiny_config, ComputeRecord.empty(8, torch.device("cpu"))) == Flops()
