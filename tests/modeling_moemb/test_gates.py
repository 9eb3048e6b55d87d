"""Gates: no effect until trained, executed as decided, saved with the model."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_moemb import MoEMBConfig, MoEMBModel
from modeling_moemb.compute_moemb import count_flops
from modeling_moemb.gates_moemb import attach_gates, twin_null_experts
from modeling_moemb.gating_moemb import GateDecision, first_gate_block

from ..conftest import EMB_ID
from .batches import Item, collate, mixed_items
from .masked_double import Double


GATES = {"keep": {"layer": 3, "width": 16}, "gradual": {}, "skip": {"router_top1": True}, "null": {"experts": 12}}
BUDGETS = {
    "keep half": {"token_pruning": {"layer": 3, "keep": 0.5, "score": "gate"}},
    "keep above": {"token_pruning": {"layer": 3, "threshold": 0.5, "score": "gate"}},
    "gradual": {"gradual_pruning": {}},
    "halting": {"gradual_pruning": {"halting": 0.05}},
    "skip": {"expert_skip": {}},
    "soft skip": {"expert_skip": {"threshold": 0.6, "scale_kept": True, "temperature": 0.5}},
    "null": {"null_experts": {}},
    "all": {
        "token_pruning": {"layer": 3, "threshold": 0.4, "score": "gate"},
        "gradual_pruning": {"threshold": 0.6},
        "expert_skip": {"threshold": 0.6},
        "null_experts": {},
    },
}
UNTRAINED = [name for name in BUDGETS if name not in ("keep half", "soft skip", "halting")]


def with_gates(model, live: bool):
    """A copy with gates; live ones decide differently from token to token."""
    model = copy.deepcopy(model)
    attach_gates(model, GATES)
    if live:
        twin_null_experts(model, noise=0.05, bias=0.0)
        with torch.no_grad():
            for name, parameter in model.gates.named_parameters():
                if "null" not in name:
                    parameter.copy_(torch.randn(parameter.shape) * (1.0 if parameter.dim() == 1 else 0.3))
            model.gates.gradual.bias.sub_(2)
    return model


@pytest.fixture(scope="module")
def live(shared_model):
    torch.manual_seed(1)
    return with_gates(shared_model, True)


def run(model, items, budget, **kwargs):
    with torch.no_grad():
        return model(**collate(items), adaptive_compute=budget, **kwargs)


def replaying(actions):
    return lambda query: actions[query.kind, query.block]


@pytest.mark.parametrize("pooled_only", [False, True])
@pytest.mark.parametrize("name", UNTRAINED)
def test_untrained_gates_change_no_bit(shared_model, name, pooled_only):
    model, items = with_gates(shared_model, False), mixed_items()
    plain = run(shared_model, items, {}, pooled_only=pooled_only)
    assert torch.equal(run(model, items, {}, pooled_only=pooled_only).pooler_output, plain.pooler_output)
    gated = run(model, items, BUDGETS[name], pooled_only=pooled_only, output_compute=True)
    assert torch.equal(gated.pooler_output, plain.pooler_output)
    assert gated.compute.skip_rate(2) == 0 and gated.compute.gate_macs > 0


@pytest.mark.parametrize("index", [2, 3, 5])
@pytest.mark.parametrize("name", BUDGETS)
def test_removed_work_equals_the_masked_double(live, name, index):
    item, budget = mixed_items()[index], BUDGETS[name]
    output = run(live, [item], budget, output_compute=True)
    full = run(live, [item], {}, output_hidden_states=True, packed_hidden=True)
    double = Double(live, full.hidden_states[0][0], full.packed.position_ids, full.packed.modality, budget)
    expected = double.run()
    assert torch.equal(output.keep_mask[0], double.alive)
    pairs = torch.stack([pairs.sum() for pairs in output.compute.item_pairs])
    assert pairs.tolist() == double.pairs == output.compute.expert_pairs.sum(1).tolist()
    assert (output.pooler_output[0] - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not torch.equal(output.pooler_output, full.pooler_output)
    if "prun" in str(budget) and name != "all":
        assert not bool(double.alive.all())
    if set(budget) & {"expert_skip", "null_experts"}:
        assert 0 < sum(double.pairs) < 2 * sum(map(sum, output.compute.lengths))


@pytest.mark.parametrize("name", BUDGETS)
def test_an_item_does_not_depend_on_its_batch(live, name):
    items = mixed_items()
    batch = run(live, items, BUDGETS[name], output_compute=True)
    alone = [run(live, [item], BUDGETS[name], output_compute=True) for item in items]
    for row, single in enumerate(alone):
        assert torch.equal(batch.keep_mask[row, : single.keep_mask.shape[1]], single.keep_mask[0])
        assert (batch.pooler_output[row] - single.pooler_output[0]).abs().max() <= 1e-5
    pooled = run(live, items, BUDGETS[name], pooled_only=True, share_prefixes=False).pooler_output
    assert (pooled - batch.pooler_output).abs().max() <= 1e-5


@pytest.mark.parametrize("name", BUDGETS)
def test_shared_prefixes_change_no_vector(live, name):
    start = Item().text(24)
    items = [Item(list(start.ids)).text(3 + n).emb() for n in range(3)]
    items += [Item(list(start.ids)).image(8, 8).emb(), Item(list(start.ids)).image(4, 12).text(2).emb()]
    shared, apart = (
        run(live, items, BUDGETS[name], pooled_only=True, output_compute=True, share_prefixes=share)
        for share in (True, False)
    )
    assert sum(shared.compute.lengths[0]) < sum(apart.compute.lengths[0])
    assert torch.equal(shared.keep_mask, apart.keep_mask)
    assert (shared.pooler_output - apart.pooler_output).abs().max() <= 1e-5 * apart.pooler_output.abs().max()


def test_text_and_emb_stay_and_the_last_block_runs_for_emb(live):
    """Whatever a policy answers."""
    items, batch = mixed_items(), collate(mixed_items())
    asked = []

    def all_gone(query):
        asked.append((query.kind, query.block))
        if query.kind in ("keep", "gradual"):
            assert bool((query.modality > 0).all())
        return torch.ones_like(query.logits, dtype=torch.bool)

    budget = {**BUDGETS["all"]}
    output = run(live, items, budget, output_compute=True, gate_policy=all_gone)
    text = batch["attention_mask"].bool() & (batch["mm_token_type_ids"] == 0)
    assert torch.equal(output.keep_mask, text)
    assert output.compute.expert_pairs[:-1].sum() == 0
    assert output.compute.expert_pairs[-1].tolist() == [2 * len(items), 0, 0]
    assert ("keep", 3) not in asked and ("gradual", 1) in asked  # nothing visual was left to ask about


@pytest.mark.parametrize("name", ["keep above", "gradual", "skip", "null", "all"])
def test_forced_actions_replay(live, name):
    """What was decided once, given as actions, gives the same vectors; the stored inputs give the same logits."""
    items, stored = mixed_items(), {}

    def sample(query):
        actions = torch.rand_like(query.logits) < 0.3
        stored[query.kind, query.block] = (query, actions)
        return actions

    first = run(live, items, BUDGETS[name], gate_policy=sample, output_compute=True)
    second = run(live, items, BUDGETS[name], gate_policy=lambda query: stored[query.kind, query.block][1])
    assert torch.equal(first.pooler_output, second.pooler_output)
    queries = [query for query, _ in stored.values()]
    given = [(query.kind, query.block, query.inputs) for query in queries]
    logits = live(gate_inputs=given).gate_logits
    for query, again in zip(queries, logits, strict=True):
        assert again.requires_grad
        torch.testing.assert_close(again.detach(), query.logits, atol=1e-6, rtol=1e-5)
        half = torch.arange(0, len(query.rows), 2)
        subset = live.gates.logits(query.kind, query.block, tuple(tensor[half] for tensor in query.inputs))
        torch.testing.assert_close(subset.detach(), query.logits[half], atol=1e-6, rtol=1e-5)
        assert bool((query.segment[1:] >= query.segment[:-1]).all())
        flat = collate(items)["mm_token_type_ids"].flatten()
        assert torch.equal(flat[query.source], query.modality)


@pytest.mark.parametrize("name", ["keep above", "gradual", "skip", "all"])
def test_rollouts_share_what_comes_before_the_first_gate(live, name):
    items, budget, calls = mixed_items(), BUDGETS[name], []
    masks = {g: {} for g in range(3)}
    size = collate(items)["input_ids"].numel()

    def different(query):
        draw = torch.rand(query.logits.shape, generator=torch.Generator().manual_seed(0)) < 0.4
        for g in range(3):
            rows = (query.source // size) == g
            masks[g][query.kind, query.block] = draw[rows]
        return draw

    handle = live.language_model.layers[0].register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    rolled = run(live, items, budget, pooled_only=True, rollouts=3, gate_policy=different, output_compute=True)
    handle.remove()
    tokens = int(collate(items)["attention_mask"].sum())
    first = first_gate_block(budget, live.config.gates)
    assert calls == [tokens if first > 0 else 3 * tokens]
    assert len(rolled.pooler_output) == 3 * len(items) == len(rolled.keep_mask)
    for g in range(3):
        single = run(live, items, budget, pooled_only=True, output_compute=True, gate_policy=replaying(masks[g]))
        assert torch.equal(rolled.keep_mask[g::3], single.keep_mask)
        assert (rolled.pooler_output[g::3] - single.pooler_output).abs().max() <= 1e-5
        for block, pairs in enumerate(single.compute.item_pairs):
            if block >= first:
                assert torch.equal(rolled.compute.item_pairs[block][g::3], pairs)


def test_each_item_may_have_its_own_number_of_rollouts(live):
    items, budget = mixed_items()[:4], BUDGETS["gradual"]
    copies = [1, 3, 2, 1]
    rolled = run(live, items, budget, pooled_only=True, rollouts=copies, output_compute=True)
    plain = run(live, items, budget, pooled_only=True, output_compute=True)
    index = torch.arange(4).repeat_interleave(torch.tensor(copies))
    assert torch.equal(rolled.keep_mask, plain.keep_mask[index])
    assert (rolled.pooler_output - plain.pooler_output[index]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="`rollouts` needs `pooled_only=True`"):
        run(live, items, budget, rollouts=2)


@pytest.mark.parametrize("name", ["keep above", "gradual", "skip", "null", "all"])
def test_hard_factors_equal_removal(live, name):
    """The differentiable stand-in at factors of 0 and 1 computes what removal does, and has gradients."""
    items = mixed_items()

    def draw(query):  # by token: masked, other rows are asked than where tokens are removed
        table = torch.rand(2000, 2, generator=torch.Generator().manual_seed(query.block + 100 * len(query.kind)))
        return (
            table[query.source, : query.logits.shape[-1] if query.logits.dim() == 2 else 1].view_as(query.logits) < 0.4
        )

    removed = run(live, items, BUDGETS[name], gate_policy=draw).pooler_output

    def soft(query):
        kept = torch.sigmoid(-query.logits)
        return GateDecision(factor=(~draw(query)).float() - kept.detach() + kept)

    masked = live(**collate(items), adaptive_compute=BUDGETS[name], gate_policy=soft).pooler_output
    assert (masked - removed).abs().max() <= 1e-5 * removed.abs().max()
    masked.square().sum().backward()
    kinds = {"keep above": ["keep"], "all": ["keep", "gradual", "skip", "null"]}.get(name, [name])
    for kind in kinds:
        grads = [parameter.grad for parameter in getattr(live.gates, kind).parameters()]
        assert all(grad is not None and bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads), kind
    live.zero_grad()


def test_gates_are_saved_with_the_model_and_kept_in_fp32(live, tmp_path):
    model = copy.deepcopy(live)
    model.set_adaptive_compute(BUDGETS["all"])
    model.save_pretrained(tmp_path)
    items = mixed_items()
    again = MoEMBModel.from_pretrained(tmp_path).eval()
    assert again.config.gates == model.config.gates
    assert torch.equal(run(again, items, None).pooler_output, run(model, items, None).pooler_output)
    half = MoEMBModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.gates.parameters()} == {torch.float32}
    assert half.language_model.layers[0].mlp.gate.weight.dtype == torch.bfloat16
    assert run(half, items, None).pooler_output.isfinite().all()


@pytest.mark.parametrize("kind", GATES)
def test_missing_weights_switch_a_gate_off(live, shared_model, kind, tmp_path, caplog):
    model = copy.deepcopy(live)
    model.set_adaptive_compute(BUDGETS["all"])
    model.save_pretrained(tmp_path)
    weights = {k: v for k, v in load_file(tmp_path / "model.safetensors").items() if not k.startswith(f"gates.{kind}")}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    left = MoEMBModel.from_pretrained(tmp_path).eval()
    key = {"keep": "token_pruning", "gradual": "gradual_pruning", "skip": "expert_skip", "null": "null_experts"}[kind]
    assert getattr(left.gates, kind) is None and kind not in left.config.gates
    assert set(left.config.adaptive_compute) == set(BUDGETS["all"]) - {key}
    expected = {name: part for name, part in BUDGETS["all"].items() if name != key}
    items = mixed_items()
    assert torch.equal(run(left, items, None).pooler_output, run(live, items, expected).pooler_output)
    left.save_pretrained(tmp_path / "again")
    assert kind not in json.loads((tmp_path / "again" / "config.json").read_text())["gates"]
    bare = {name: tensor for name, tensor in weights.items() if not name.startswith("gates.")}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    none = MoEMBModel.from_pretrained(tmp_path).eval()
    assert none.gates is None and none.config.gates is None and none.config.adaptive_compute is None
    assert torch.equal(run(none, items, None).pooler_output, run(shared_model, items, {}).pooler_output)


def test_attaching(tiny_model):
    attach_gates(tiny_model, {"skip": {}})
    assert tiny_model.config.gates == {"skip": {"blocks": list(range(8)), "router_top1": False}}
    weight = tiny_model.gates.skip.weight
    attach_gates(tiny_model, {"keep": {}, "skip": {}})
    assert tiny_model.gates.skip.weight is weight and list(tiny_model.config.gates) == ["keep", "skip"]
    with pytest.raises(ValueError, match=r"a 'skip' gate with .* cannot become one with"):
        attach_gates(tiny_model, {"skip": {"blocks": [1]}})
    with pytest.raises(ValueError, match=r"needs a 'null' gate, but this model has \['keep', 'skip'\]"):
        tiny_model.set_adaptive_compute(BUDGETS["null"])
    tiny_model.remove_gates(["keep", "skip"])
    assert tiny_model.gates is None and tiny_model.config.gates is None


WRONG = [
    ({"kep": {}}, r"`gates` must be a dict with keys among \['keep'"),
    ({"keep": {"layer": 8}}, r"`gates`\['keep'\]\['layer'\] must be an integer from 1 to 7, got 8"),
    ({"gradual": {"blocks": [0]}}, r"\['gradual'\]\['blocks'\] must be a list of 1 to 7, got \[0\]"),
    ({"skip": {"top1": True}}, r"\['skip'\] must be a dict with keys among \['blocks', 'router_top1'\]"),
    ({"null": {"experts": 0}}, r"\['null'\]\['experts'\] must be an integer from 1"),
]


@pytest.mark.parametrize(("gates", "message"), WRONG)
def test_wrong_gates_are_refused(tiny_settings, gates, message):
    with pytest.raises(ValueError, match=message):
        MoEMBConfig(**tiny_settings, emb_token_id=EMB_ID, gates=gates)


WRONG_BUDGETS = [
    ({"expert_skip": {"threshold": 1}}, r"\['expert_skip'\]\['threshold'\]` must be a number above 0 and below 1"),
    ({"expert_skip": {"temperature": 0}}, r"\['temperature'\]` must be a finite number above 0"),
    ({"gradual_pruning": {"threshold": 0.5, "halting": 0.1}}, "at most one of 'threshold' and 'halting'"),
    ({"null_experts": {"k": 4}}, r"unknown `adaptive_compute\['null_experts'\]` keys \['k'\]"),
    ({"token_pruning": {"layer": 4, "keep": 0.5, "score": "gate"}}, r"\['layer'\]` must be 3, where the keep gate"),
    ({"token_pruning": {"layer": 3, "threshold": 0.5}}, "exactly one of 'keep'"),
]


@pytest.mark.parametrize(("budget", "message"), WRONG_BUDGETS)
def test_wrong_budgets_are_refused(live, budget, message):
    with pytest.raises(ValueError, match=message):
        run(live, mixed_items()[:1], budget)


def test_a_policy_of_the_wrong_shape_is_refused(live):
    with pytest.raises(ValueError, match=r"answered the 'skip' gate of block 0 with `remove`"):
        run(live, mixed_items(), BUDGETS["skip"], gate_policy=lambda query: query.logits[:1] > 0)


def test_flops_of_gates_are_counted(live):
    items = mixed_items()
    full, keep = (run(live, items, b, output_compute=True).compute for b in ({}, BUDGETS["keep half"]))
    visual = int((collate(items)["mm_token_type_ids"] > 0).sum())
    assert full.gate_macs == 0 and keep.gate_macs == visual * (2 * 64 * 16 + 4 * 16)
    flops = count_flops(live.config, keep)
    assert (
        flops.gates == 2 * keep.gate_macs and flops.decoder == flops.mixers + flops.attention + flops.moe + flops.gates
    )
