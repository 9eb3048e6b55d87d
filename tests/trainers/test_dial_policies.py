"""Policies of a recipe: what they may hold, and how they become runnable."""

import json

import pytest
import torch

from modeling_moemb.compute_moemb import count_flops
from moemb.trainers.dial_policies import BASELINE, Policy, PolicyError, Preparation, Prepared, check_policies
from moemb.trainers.prune_experts_sweep import kept_experts
from moemb.trainers.saliency import expert_blocks
from tests.processors import lean_processor

from .pruning_repository import BLOCKS, EXPERTS, pruning_model


@pytest.fixture
def preparation(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("MOEMB_CACHE", str(tmp_path / "cache"))
    lines = [{"text": f"item {number} " * (1 + number % 4), "side": ("query", "document")[number % 2]}
             for number in range(12)]  # fmt: skip
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    processor = lean_processor()
    model = pruning_model(tiny_settings, processor)
    data = {str(tmp_path / "items.jsonl"): 10}
    return Preparation(model, processor, "tiny", "w" * 64, data, batch_size=4, tolerance=0.03)


def executed(preparation, prepared: Prepared, items: list[str]):
    features = preparation.processor(items)
    with torch.no_grad(), prepared.applied(preparation.model):
        return preparation.model(
            **features, adaptive_compute=prepared.budget, pooled_only=True, output_compute=True
        )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        (Policy(), BASELINE),
        (Policy({"top_k": 1}), "top-k"),
        (Policy({"random_k": 1}), "random-k"),
        (Policy(skip_rate=0.5), "MoDES"),
        (Policy({"token_pruning": {"layer": 4, "keep": 0.5}}), "tokens by beta"),
        (Policy({"token_pruning": {"layer": 4, "keep": 0.5, "score": "uniform"}}), "tokens by uniform"),
        (Policy({"top_k": 1, "token_pruning": {"layer": 4, "keep": 0.5}}), "top-k + tokens by beta"),
        (Policy({"top_k": 1}, experts=4, saliency="man"), "top-k + experts by man"),
        (Policy({"top_k": 1}, execution="masking"), "top-k, masking"),
        (Policy(execution="loop"), "full compute, loop"),
    ],
)
def test_budgets_of_one_action_are_one_family(policy, family):
    assert policy.family == family


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"skip_rate": 0.0}, "skip_rate is 0.0, but must be above 0 and below 1"),
        ({"skip_rate": 1.0}, "skip_rate is 1.0, but must be above 0 and below 1"),
        ({"skip_rate": 0.5, "adaptive_compute": {"modes": {"tau": 0.1}}}, "leave it out of adaptive_compute"),
        ({"experts": 4, "saliency": "reep"}, "no saliency 'reep'; did you mean 'reap'"),
    ],
)
def test_settings_that_no_model_takes(settings, match):
    with pytest.raises(ValueError, match=match):
        Policy(**settings)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Policy({"top_k": 3}), r"policy 'mine': .*\['top_k'\]` must be an integer from 1 to 2"),
        (Policy({"token_pruning": {"layer": 8, "keep": 0.5}}), r"policy 'mine': .*\['layer'\]` must be an integer"),
        (Policy({"token_pruning": {"layer": 4, "keep": 0.0}}), "policy 'mine': .*must be a number above 0"),
        (Policy({"top_q": 3}), r"policy 'mine': unknown .*\['top_q'\]"),
        (Policy(experts=1), "policy 'mine': experts is 1, but each token runs 2"),
        (Policy(experts=9), "policy 'mine': experts is 9, but there are 8"),
    ],
)
def test_settings_that_this_model_does_not_take(policy, match, tiny_config):
    with pytest.raises(PolicyError, match=match):
        check_policies({"mine": policy}, tiny_config.text_config)


def test_the_name_of_the_baseline_is_taken(tiny_config):
    with pytest.raises(PolicyError, match="always measured"):
        check_policies({BASELINE: Policy()}, tiny_config.text_config)


def test_the_experts_that_stay_are_those_of_the_saliency(preparation):
    by_name = {name: preparation.prepare(name, Policy(experts=4, saliency=name)) for name in ("reap", "random")}
    for name, prepared in by_name.items():
        assert torch.equal(prepared.keep, kept_experts(preparation.statistics(), name, 4, seed=0))
    assert by_name["reap"].identity != by_name["random"].identity
    removed = executed(preparation, by_name["reap"], ["a text", "another"]).compute.expert_load.sum(1)
    for block in range(BLOCKS):
        hit = removed[block].nonzero().flatten().tolist()
        assert set(hit) <= set(by_name["reap"].keep[block].tolist())
    whole = executed(preparation, Prepared("", Policy(), {}), ["a text", "another"]).compute.expert_load.sum(1)
    assert ((whole > 0).sum(1) > 4).any(), "the model must use experts that the mask forbids"
    assert all(not block.gate._forward_hooks for block in expert_blocks(preparation.model))
    assert preparation.prepare("all", Policy(experts=EXPERTS)).keep is None


@pytest.mark.parametrize("policy", [Policy(skip_rate=0.4), Policy(skip_rate=0.3, experts=4)])
def test_a_threshold_skips_the_wanted_rate_of_what_the_other_settings_leave(preparation, policy):
    prepared = preparation.prepare("skip", policy)
    assert abs(prepared.calibrated["skip_rate"] - policy.skip_rate) <= 0.03
    assert prepared.budget["modes"]["tau"] > 0
    pairs = full = 0
    for item in preparation.items():
        prompt = preparation.processor.embedding["prompts"].get(item.side) or ""
        features = preparation.processor([item.value], instruction=prompt)
        with torch.no_grad(), prepared.applied(preparation.model):
            for budget in (prepared.budget, {}):
                record = preparation.model(
                    **features, adaptive_compute=budget, pooled_only=True, output_compute=True
                ).compute  # fmt: skip
                pairs, full = (pairs + int(record.expert_pairs.sum()), full) if budget else (
                    pairs, full + int(record.expert_pairs.sum()))  # fmt: skip
                assert count_flops(preparation.model.config, record).moe > 0
    assert 1 - pairs / full == pytest.approx(prepared.calibrated["skip_rate"], abs=1e-6)


def test_other_experts_are_calibrated_anew(preparation):
    """Masked experts change the weights that a threshold cuts: the sums of the whole model must not be taken."""
    whole = preparation.prepare("a", Policy(skip_rate=0.4))
    fewer = preparation.prepare("b", Policy(skip_rate=0.4, experts=4))
    scales = [prepared.budget["modes"]["layer_scales"] for prepared in (whole, fewer)]
    assert scales[0] != scales[1]
    assert len(list((preparation_cache()).iterdir())) == 2


def preparation_cache():
    from moemb.trainers.corpus_sources import cache_folder

    return cache_folder() / "calibration"


def test_a_rate_that_cannot_be_met_names_the_policy(preparation):
    with pytest.raises(PolicyError, match="policy 'most': "):
        preparation.prepare("most", Policy(skip_rate=0.9999))


def test_a_record_holds_what_was_set(preparation):
    record = preparation.prepare("x", Policy({"top_k": 1}, experts=4)).record()
    assert record["settings"] == {"adaptive_compute": {"top_k": 1}, "experts": 4}
    assert len(record["kept_experts"]) == BLOCKS and json.dumps(record)
